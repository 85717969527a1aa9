"""The QP state machine against a second, literal table: what IB core's ib_modify_qp_is_ok accepts.

Written from the InfiniBand specification's Modify QP tables and the verbs' documented behaviour, not from qp_state.py.
"""

from typing import Final, NamedTuple

import pytest

from pvrdma_server.abi.pvrdma_verbs import QpAttrMask, QpState, QpType
from pvrdma_server.qp_state import refusal


class Allowed(NamedTuple):
    required: str
    optional: str


# "RESET INIT" -> type -> the attributes, by name. A pair or a type that is not here is illegal.
RC: Final = {
    "RESET INIT": Allowed("PKEY_INDEX PORT ACCESS_FLAGS", ""),
    "INIT INIT": Allowed("", "PKEY_INDEX PORT ACCESS_FLAGS"),
    "INIT RTR": Allowed(
        "AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER",
        "ALT_PATH ACCESS_FLAGS PKEY_INDEX",
    ),
    "RTR RTS": Allowed(
        "TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC",
        "CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE",
    ),
    "RTS RTS": Allowed("", "CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE MIN_RNR_TIMER"),
    "RTS SQD": Allowed("", "EN_SQD_ASYNC_NOTIFY"),
    "SQD RTS": Allowed("", "CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE"),
    "SQD SQD": Allowed(
        "",
        "PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC MAX_DEST_RD_ATOMIC ALT_PATH"
        " ACCESS_FLAGS PKEY_INDEX MIN_RNR_TIMER PATH_MIG_STATE",
    ),
    # RC has no SQE; the kernel's table lets the pair through without attributes, UC with ACCESS_FLAGS.
    "SQE RTS": Allowed("", "CUR_STATE ACCESS_FLAGS"),
}
UD: Final = {
    "RESET INIT": Allowed("PKEY_INDEX PORT QKEY", ""),
    "INIT INIT": Allowed("", "PKEY_INDEX PORT QKEY"),
    "INIT RTR": Allowed("", "PKEY_INDEX QKEY"),
    "RTR RTS": Allowed("SQ_PSN", "CUR_STATE QKEY"),
    "RTS RTS": Allowed("", "CUR_STATE QKEY"),
    "RTS SQD": Allowed("", "EN_SQD_ASYNC_NOTIFY"),
    "SQD RTS": Allowed("", "CUR_STATE QKEY"),
    "SQD SQD": Allowed("", "PKEY_INDEX QKEY"),
    "SQE RTS": Allowed("", "CUR_STATE QKEY"),
}
# ib_mad names no port: QP1 belongs to one. We take it where UD does, so both ways of asking work.
GSI: Final = UD | {"RESET INIT": Allowed("PKEY_INDEX QKEY", "PORT")}
NOTHING: Final = Allowed("", "")
TYPES: Final = {QpType.RC: RC, QpType.UD: UD, QpType.GSI: GSI}
ALL_ATTRIBUTES: Final = [bit for bit in QpAttrMask if bit != QpAttrMask.STATE]


def allowed(qp_type: QpType, current: QpState, target: QpState) -> Allowed | None:
    if target == QpState.RESET or (target == QpState.ERR and current != QpState.RESET):
        return NOTHING
    return TYPES[qp_type].get(f"{current.name} {target.name}")


def mask_of(names: str) -> int:
    return sum(QpAttrMask[name] for name in names.split())


def ok(qp_type: int, current: int, target: int, mask: int) -> bool:
    return refusal(qp_type, current, target, mask | QpAttrMask.STATE) is None


every_pair = pytest.mark.parametrize(
    ("current", "target"),
    [pytest.param(a, b, id=f"{a.name}-{b.name}") for a in QpState for b in QpState],
)
every_type = pytest.mark.parametrize("qp_type", TYPES, ids=lambda t: t.name)


@every_type
@every_pair
def test_legal_exactly_with_the_required_attributes(
    qp_type: QpType, current: QpState, target: QpState
) -> None:
    rule = allowed(qp_type, current, target)
    if rule is None:
        assert not any(ok(qp_type, current, target, mask) for mask in (0, *ALL_ATTRIBUTES))
        return
    required = mask_of(rule.required)
    assert ok(qp_type, current, target, required)
    for name in rule.required.split():
        assert not ok(qp_type, current, target, required & ~QpAttrMask[name]), name


@every_type
@every_pair
def test_every_other_attribute_alone(qp_type: QpType, current: QpState, target: QpState) -> None:
    rule = allowed(qp_type, current, target)
    if rule is None:
        return
    required = mask_of(rule.required)
    for bit in ALL_ATTRIBUTES:
        if not bit & required:
            expected = bit.name in rule.optional.split()
            assert ok(qp_type, current, target, required | bit) == expected, bit.name


@every_type
@every_pair
def test_all_optional_attributes_together(
    qp_type: QpType, current: QpState, target: QpState
) -> None:
    rule = allowed(qp_type, current, target)
    if rule is not None:
        assert ok(qp_type, current, target, mask_of(rule.required) | mask_of(rule.optional))


@pytest.mark.parametrize("bit", range(21, 32))
def test_attributes_beyond_the_abi_are_refused(bit: int) -> None:
    assert not ok(QpType.RC, QpState.RTS, QpState.RTS, 1 << bit)


@pytest.mark.parametrize("state", [7, 255, 0xFFFF_FFFF])
@every_type
def test_states_that_do_not_exist(qp_type: QpType, state: int) -> None:
    for known in QpState:
        assert not ok(qp_type, known, state, 0)


def test_the_reason_names_what_is_wrong() -> None:
    missing = refusal(QpType.UD, QpState.RTR, QpState.RTS, QpAttrMask.STATE)
    extra = refusal(
        QpType.UD, QpState.RTR, QpState.RTS, QpAttrMask.STATE | QpAttrMask.SQ_PSN | QpAttrMask.AV
    )
    nowhere = refusal(QpType.UD, QpState.RESET, QpState.RTS, QpAttrMask.STATE)
    assert missing is not None
    assert f"{int(QpAttrMask.SQ_PSN):#x}" in missing
    assert extra is not None
    assert f"{int(QpAttrMask.AV):#x}" in extra
    assert nowhere is not None
    assert "no transition" in nowhere

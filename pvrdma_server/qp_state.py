"""The queue pair's states: which transitions are legal, and which attributes each one needs and allows.

Contract: one literal table, `TRANSITIONS`, and one function that applies it. No object of ours is known here.

Source: InfiniBand Architecture Specification 1.3, volume 1, section 11.2.5.2 (Modify Queue Pair), tables 91 to 99.
"""

from typing import Final, NamedTuple

from pvrdma_server.abi.pvrdma_verbs import QpAttrMask as M
from pvrdma_server.abi.pvrdma_verbs import QpState as S
from pvrdma_server.abi.pvrdma_verbs import QpType


class Rule(NamedTuple):
    """The attributes of one transition of one transport: all of `required`, and any of `optional`."""

    required: int
    optional: int


_NOTHING: Final = Rule(0, 0)
_ALT: Final = M.ALT_PATH
_RC_RTS: Final = M.CUR_STATE | M.ACCESS_FLAGS | M.ALT_PATH | M.MIN_RNR_TIMER | M.PATH_MIG_STATE
_UD_RTS: Final = M.CUR_STATE | M.QKEY

# (from, to) -> (rule for RC, rule for UD and GSI). Any state may go to RESET, and any but RESET
# to ERR, without attributes.
TRANSITIONS: Final[dict[tuple[int, int], tuple[Rule, Rule]]] = {
    (S.RESET, S.INIT): (
        Rule(M.PKEY_INDEX | M.PORT | M.ACCESS_FLAGS, 0),
        Rule(M.PKEY_INDEX | M.PORT | M.QKEY, 0),
    ),
    (S.INIT, S.INIT): (
        Rule(0, M.PKEY_INDEX | M.PORT | M.ACCESS_FLAGS),
        Rule(0, M.PKEY_INDEX | M.PORT | M.QKEY),
    ),
    (S.INIT, S.RTR): (
        Rule(
            M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN | M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER,
            _ALT | M.ACCESS_FLAGS | M.PKEY_INDEX,
        ),
        Rule(0, M.PKEY_INDEX | M.QKEY),
    ),
    (S.RTR, S.RTS): (
        Rule(M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.SQ_PSN | M.MAX_QP_RD_ATOMIC, _RC_RTS),
        Rule(M.SQ_PSN, _UD_RTS),
    ),
    (S.RTS, S.RTS): (Rule(0, _RC_RTS), Rule(0, _UD_RTS)),
    (S.RTS, S.SQD): (Rule(0, M.EN_SQD_ASYNC_NOTIFY), Rule(0, M.EN_SQD_ASYNC_NOTIFY)),
    (S.SQD, S.RTS): (Rule(0, _RC_RTS), Rule(0, _UD_RTS)),
    (S.SQD, S.SQD): (
        Rule(
            0,
            M.PORT
            | M.AV
            | M.TIMEOUT
            | M.RETRY_CNT
            | M.RNR_RETRY
            | M.MAX_QP_RD_ATOMIC
            | M.MAX_DEST_RD_ATOMIC
            | M.ALT_PATH
            | M.ACCESS_FLAGS
            | M.PKEY_INDEX
            | M.MIN_RNR_TIMER
            | M.PATH_MIG_STATE,
        ),
        Rule(0, M.PKEY_INDEX | M.QKEY),
    ),
    (S.SQE, S.RTS): (Rule(0, M.CUR_STATE | M.ACCESS_FLAGS), Rule(0, _UD_RTS)),
}


def refusal(qp_type: int, current: int, target: int, mask: int) -> str | None:
    """Why a MODIFY_QP from `current` to `target` with these attributes is illegal, or None when it is legal.

    Args:
        qp_type: `QpType`.
        current: the QP's state.
        target: the requested state (the current one when the mask does not contain STATE).
        mask: `QpAttrMask` bits of the command.
    """
    if target == S.RESET or (target == S.ERR and current != S.RESET):
        rule = _NOTHING
    else:
        rules = TRANSITIONS.get((current, target))
        if rules is None:
            return f"no transition from state {current} to {target}"
        rule = rules[0] if qp_type == QpType.RC else rules[1]
    missing = rule.required & ~mask
    if qp_type == QpType.GSI:
        missing &= ~M.PORT  # ib_mad does not name the port: a GSI queue pair was created on it
    if missing:
        return f"state {current} to {target} needs attributes {missing:#x} too"
    # int: the complement of an IntFlag has its known bits only, and unknown ones must be refused too.
    extra = mask & ~int(rule.required | rule.optional | M.STATE)
    return f"state {current} to {target} does not take attributes {extra:#x}" if extra else None

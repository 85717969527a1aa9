"""CQ, QP and SRQ commands: success and its answer's bytes in every version, every refusal, nothing leaked."""

import errno
import struct
from typing import Any

import pytest
from guest import (
    NO_ATTR,
    CommandFailed,
    Qp,
    Srq,
    UserProcess,
    create_qp,
)
from unit.bed import GID, NOBODY, Bed, cq_request, srq_request

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import Cmd
from pvrdma_server.abi.pvrdma_verbs import QpAttrMask as M
from pvrdma_server.abi.pvrdma_verbs import QpState, QpType, SrqAttr

# --- CQs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cqe", [1, 2, 64, 1024])
def test_the_answer_echoes_cqe(user: UserProcess, cqe: int) -> None:
    assert user.cq(cqe).answer.cqe == cqe


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # CVE-2018-20125: page counts.
        ({"nchunks": 0}, errno.EINVAL),
        ({"nchunks": 1}, errno.EINVAL),
        ({"nchunks": 2}, errno.EINVAL),
        ({"nchunks": 262145}, errno.EINVAL),
        ({"nchunks": 0xFFFF_FFFF}, errno.EINVAL),
        ({"cqe": 0}, errno.EINVAL),
        ({"cqe": 3}, errno.EINVAL),
        ({"cqe": 127}, errno.EINVAL),
        ({"cqe": 2048, "nchunks": 33}, errno.EINVAL),
        ({"cqe": 0x8000_0000}, errno.EINVAL),
        ({"cqe": 0xFFFF_FFFF}, errno.EINVAL),
        ({"ctx_handle": NOBODY}, errno.ENOENT),
        ({"pdir_dma": 0}, errno.EFAULT),
        ({"pdir_dma": 1 << 50}, errno.EFAULT),
        ({"cqe": 256, "nchunks": 5}, errno.EFAULT),  # the directory ends before
    ],
    ids=str,
)
def test_cve_2018_20125_cq_sizes(bed: Bed, change: dict[str, int], expected: int) -> None:
    body = api.CMD_CREATE_CQ.pack(cq_request(bed, **change))[16:]
    bed.refuse_bytes(expected, Cmd.CREATE_CQ, body)


# --- QPs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        (17, "{qpn} 10000000 10000000 04000000 04000000 00000000"),
        (18, "{qpn} 10000000 10000000 04000000 04000000 00000000"),
        (19, "{qpn} 10000000 10000000 04000000 04000000 00000000"),
        (20, "{qpn} {handle} 10000000 10000000 04000000 04000000 00000000"),
    ],
)
def test_create_qp_answers_in_the_drivers_layout(version: int, answer: str) -> None:
    bed = Bed(version)
    user = UserProcess(bed.driver)
    for _ in range(3):
        qp = Qp(user)
        expected = answer.format(
            qpn=qp.qpn.to_bytes(4, "little").hex(), handle=qp.handle.to_bytes(4, "little").hex()
        )
        raw = bed.ram.read(bed.driver.resp_slot + 16, len(bytes.fromhex(expected)))
        assert raw == bytes.fromhex(expected)
        assert bed.backend.qps[qp.qpn]
        if version < 20:
            assert qp.handle == qp.qpn


def test_min_of_both_versions_is_served() -> None:
    """VERSION says 20, the driver 19: it reads the first layout."""
    bed = Bed(19)
    assert bed.driver.read_reg(api.Reg.VERSION) == 20
    assert Qp(UserProcess(bed.driver)).query().cap.max_send_wr == 16


@pytest.mark.parametrize("max_sge", range(1, 9))
def test_any_number_of_elements_up_to_the_maximum(user: UserProcess, max_sge: int) -> None:
    """rdma-core rounds the entry's size up to a power of two, not the number of elements in it."""
    assert Qp(user, max_sge=max_sge).query().cap[2:4] == (max_sge, max_sge)
    assert Srq(user, max_sge=max_sge).query().max_sge == max_sge


@pytest.fixture
def base(user: UserProcess) -> Qp:
    """Whose request the refusals change."""
    return Qp(user)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"qp_type": QpType.SMI}, errno.EOPNOTSUPP),
        ({"qp_type": QpType.UC}, errno.EOPNOTSUPP),
        ({"qp_type": QpType.RAW_PACKET}, errno.EOPNOTSUPP),
        ({"qp_type": 255}, errno.EOPNOTSUPP),
        ({"qp_type": QpType.GSI}, errno.EPERM),
        ({"pd_handle": 0}, errno.ENOENT),
        ({"pd_handle": NOBODY}, errno.ENOENT),
        ({"send_cq_handle": NOBODY}, errno.ENOENT),
        ({"recv_cq_handle": 0xFFFF_FFFF}, errno.ENOENT),
        ({"is_srq": 1, "srq_handle": NOBODY}, errno.ENOENT),
        ({"max_send_wr": 0}, errno.EINVAL),
        ({"max_send_wr": 15}, errno.EINVAL),
        ({"max_send_wr": 512}, errno.EINVAL),
        ({"max_send_wr": 0xFFFF_FFFF}, errno.EINVAL),
        ({"max_recv_wr": 0}, errno.EINVAL),
        ({"max_recv_wr": 0x8000_0000}, errno.EINVAL),
        ({"max_send_sge": 0}, errno.EINVAL),
        ({"max_send_sge": 9}, errno.EINVAL),
        ({"max_send_sge": 16}, errno.EINVAL),
        ({"max_recv_sge": 0}, errno.EINVAL),
        ({"max_recv_sge": 0xFFFF_FFFF}, errno.EINVAL),
        # CVE-2018-20125: page counts, alone and against each other.
        ({"total_chunks": 0}, errno.EINVAL),
        ({"total_chunks": 1}, errno.EINVAL),
        ({"total_chunks": 2}, errno.EINVAL),
        ({"total_chunks": 0xFFFF}, errno.EFAULT),
        ({"send_chunks": 0}, errno.EINVAL),
        ({"send_chunks": 2}, errno.EINVAL),
        ({"send_chunks": 0xFFFF}, errno.EINVAL),
        ({"send_chunks": 0xFFFF, "total_chunks": 0xFFFF}, errno.EINVAL),
        ({"pdir_dma": 0}, errno.EFAULT),
        ({"pdir_dma": 0xFFF}, errno.EFAULT),
        ({"pdir_dma": 0xFFFF_FFFF_FFFF_F000}, errno.EFAULT),
    ],
    ids=str,
)
def test_cve_2018_20125_qp_sizes(bed: Bed, base: Qp, change: dict[str, int], expected: int) -> None:
    request = base.request._replace(**change)
    bed.refused(expected, lambda: create_qp(base.ctx, request))


def test_objects_of_different_processes_do_not_mix(bed: Bed, base: Qp) -> None:
    other = UserProcess(bed.driver)
    others_cq, kernels_cq = other.cq().handle, bed.kernel.cq().handle
    others_srq = Srq(other).handle
    changes: list[dict[str, Any]] = [
        {"send_cq_handle": others_cq},
        {"recv_cq_handle": others_cq},
        {"send_cq_handle": kernels_cq},
        {"pd_handle": bed.kernel.pd.handle},
        {"pd_handle": other.pd.handle},
        {"is_srq": 1, "srq_handle": others_srq},
    ]
    for change in changes:
        request = base.request._replace(**change)
        bed.refused(errno.EPERM, lambda r=request: create_qp(base.ctx, r))  # type: ignore[misc]


def test_a_backend_without_room(bed: Bed, base: Qp) -> None:
    bed.backend.fail_next["create_qp"] = errno.ENOSPC
    bed.refused(errno.ENOSPC, lambda: create_qp(base.ctx, base.request))


def test_there_is_one_qp1(bed: Bed) -> None:
    gsi = Qp(bed.kernel, QpType.GSI)
    assert (gsi.qpn, gsi.handle) == (1, 0)
    bed.refused(errno.EBUSY, lambda: create_qp(bed.kernel, gsi.request))
    gsi.destroy()
    assert Qp(UserProcess(bed.driver)).handle == 1
    assert Qp(bed.kernel, QpType.GSI).handle == 0


def test_query_answers_what_was_set(bed: Bed) -> None:
    bed.kernel.add_gid(GID)
    qp = Qp(UserProcess(bed.driver))
    qp.to_init()
    qp.to_rtr(dest_qpn=0x123456, dgid=GID, rq_psn=0xABCDEF, min_rnr_timer=31)
    qp.to_rts(sq_psn=0xFFFFFF, timeout=31, retry_cnt=0, rnr_retry=7, max_rd_atomic=8)
    attr = qp.query()
    assert (attr.qp_state, attr.cur_qp_state) == (QpState.RTS, QpState.RTS)
    assert (attr.dest_qp_num, attr.rq_psn, attr.sq_psn) == (0x123456, 0xABCDEF, 0xFFFFFF)
    assert (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer) == (31, 0, 7, 31)
    assert (attr.max_rd_atomic, attr.max_dest_rd_atomic, attr.port_num) == (8, 4, 1)
    assert attr.ah_attr.grh.dgid == GID
    assert attr.cap.max_send_wr == 16
    qp.to_reset()
    assert qp.query() == NO_ATTR._replace(cap=attr.cap)


def test_illegal_transitions_are_refused_in_the_response(base: Qp) -> None:
    for state in (QpState.RTR, QpState.RTS, QpState.SQD, QpState.SQE, QpState.ERR, 7):
        with pytest.raises(CommandFailed) as caught:
            base.modify(M.STATE, state=state)
        assert (caught.value.err, caught.value.resp_err) == (0, errno.EINVAL)
    assert base.query().qp_state == QpState.RESET


BAD_ATTRIBUTES: list[tuple[str, int, dict[str, Any]]] = [
    ("INIT", M.PORT, {"port_num": 0}),
    ("INIT", M.PORT, {"port_num": 2}),
    ("INIT", M.PKEY_INDEX, {"pkey_index": 1}),
    ("INIT", M.ACCESS_FLAGS, {"qp_access_flags": 0x10}),
    ("INIT", M.ACCESS_FLAGS, {"qp_access_flags": 0x8000_0000}),
    ("RTS", M.ACCESS_FLAGS, {"qp_access_flags": 0x40}),
    ("RTS", M.MIN_RNR_TIMER, {"min_rnr_timer": 32}),
    ("RTS", M.ALT_PATH, {}),
    ("RTS", M.PATH_MIG_STATE, {"path_mig_state": 1}),
    ("RTS", M.CUR_STATE, {"cur_qp_state": QpState.RTR}),
    ("SQD", M.AV, {"ah_attr": NO_ATTR.ah_attr._replace(grh=NO_ATTR.ah_attr.grh._replace(sgid_index=5))}),
    ("SQD", M.TIMEOUT, {"timeout": 32}),
    ("SQD", M.RETRY_CNT, {"retry_cnt": 8}),
    ("SQD", M.RNR_RETRY, {"rnr_retry": 255}),
    ("SQD", M.MAX_QP_RD_ATOMIC, {"max_rd_atomic": 9}),
    ("SQD", M.MAX_DEST_RD_ATOMIC, {"max_dest_rd_atomic": 17}),
    ("RTS", M.CAP, {}),
    ("RTS", 1 << 25, {}),
]  # fmt: skip


@pytest.mark.parametrize(("state", "mask", "attrs"), BAD_ATTRIBUTES, ids=str)
def test_attributes_out_of_range(
    bed: Bed, base: Qp, state: str, mask: int, attrs: dict[str, Any]
) -> None:
    bed.kernel.add_gid(GID)
    base.to_init()
    if state != "INIT":
        base.to_rtr(dest_qpn=5, dgid=GID)
        base.to_rts()
    if state == "SQD":
        base.modify(M.STATE, state=QpState.SQD)
    before = base.query()
    with pytest.raises(CommandFailed) as caught:
        base.modify(M.STATE | mask, state=QpState[state], **attrs)
    assert caught.value.resp_err == errno.EINVAL
    assert base.query() == before


@pytest.mark.parametrize(
    "attrs",
    [
        {"path_mtu": 0},
        {"path_mtu": 6},
        {"rq_psn": 1 << 24},
        {"dest_qp_num": 1 << 24},
        {"min_rnr_timer": 32},
        {"max_dest_rd_atomic": 17},
    ],
    ids=str,
)
def test_rtr_attributes_out_of_range(bed: Bed, base: Qp, attrs: dict[str, Any]) -> None:
    bed.kernel.add_gid(GID)
    base.to_init()
    with pytest.raises(CommandFailed):
        base.to_rtr(**attrs)
    base.to_rtr()


def test_rtr_through_a_gid_that_is_not_there(base: Qp) -> None:
    base.to_init()
    with pytest.raises(CommandFailed):
        base.to_rtr()


def test_a_modify_that_the_backend_refuses_changes_nothing(bed: Bed, base: Qp) -> None:
    bed.backend.fail_next["modify_qp"] = errno.EINVAL
    bed.refused(errno.EINVAL, base.to_init)
    assert base.query().qp_state == QpState.RESET
    base.to_init()


@pytest.mark.parametrize("cmd", [Cmd.MODIFY_QP, Cmd.QUERY_QP, Cmd.DESTROY_QP])
@pytest.mark.parametrize("handle", [0, 2, NOBODY, 0xFFFF_FFFF])
def test_qps_that_are_not_there(bed: Bed, base: Qp, cmd: int, handle: int) -> None:
    assert base.handle == 1
    bed.refuse_bytes(errno.ENOENT, cmd, struct.pack("<II", handle, M.STATE))


# --- SRQs ----------------------------------------------------------------------------------------------------------


def test_srq_round(bed: Bed, user: UserProcess) -> None:
    srq = Srq(user, max_wr=32, max_sge=2)
    assert srq.query() == SrqAttr(32, 2, 0)
    for _ in range(8):
        srq.post_recv()
    srq.arm_limit(8)
    assert srq.query().srq_limit == 8
    assert bed.driver.take_events() == []
    srq.destroy()
    assert bed.machine.counts()["srqs"] == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"pd_handle": NOBODY}, errno.ENOENT),
        ({"srq_type": 1}, errno.EOPNOTSUPP),
        ({"nchunks": 0}, errno.EINVAL),
        ({"nchunks": 1}, errno.EINVAL),
        ({"nchunks": 0xFFFF_FFFF}, errno.EINVAL),
        ({"attrs": SrqAttr(0, 4, 0)}, errno.EINVAL),
        ({"attrs": SrqAttr(17, 4, 0)}, errno.EINVAL),
        ({"attrs": SrqAttr(512, 4, 0)}, errno.EINVAL),
        ({"attrs": SrqAttr(16, 0, 0)}, errno.EINVAL),
        ({"attrs": SrqAttr(16, 9, 0)}, errno.EINVAL),
        ({"pdir_dma": 0}, errno.EFAULT),
    ],
    ids=str,
)
def test_srq_sizes(bed: Bed, user: UserProcess, change: dict[str, Any], expected: int) -> None:
    body = api.CMD_CREATE_SRQ.pack(srq_request(user)._replace(**change))[16:]
    bed.refuse_bytes(expected, Cmd.CREATE_SRQ, body)


def test_srq_limits(bed: Bed, user: UserProcess) -> None:
    srq = Srq(user, max_wr=16)
    bed.refused(errno.EINVAL, lambda: srq.arm_limit(17))
    for mask in (1, 4, 1 << 31):
        body = struct.pack("<IIIII", srq.handle, mask, 16, 1, 1)
        bed.refuse_bytes(errno.EOPNOTSUPP, Cmd.MODIFY_SRQ, body)
    for cmd in (Cmd.MODIFY_SRQ, Cmd.QUERY_SRQ, Cmd.DESTROY_SRQ):
        bed.refuse_bytes(errno.ENOENT, cmd, struct.pack("<I", NOBODY))
    bed.backend.fail_next["create_srq"] = errno.ENOMEM
    bed.refused(errno.ENOMEM, lambda: Srq(user))

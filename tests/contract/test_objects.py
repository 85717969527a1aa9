"""Objects: keys and their lives, SRQs, fast registration, GIDs, limits, queries."""

import errno

import pytest
from fake_owner import Bench, FakeSrqOwner, gid_v4

from pvrdma_server.abi.pvrdma_dev_api import EqeType, GidType
from pvrdma_server.abi.pvrdma_verbs import AccessFlags, PortState, QpState, QpType
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcFlags, WcStatus, WrOpcode
from pvrdma_server.backend import FastReg, Invalidate, QpInit, Rdma, RecvWr
from pvrdma_server.errors import BackendError

S = WcStatus
IOVA = 0x10_0000_0040
LOCAL_REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ


def test_port(bench: Bench) -> None:
    port = bench.a.backend.query_port()
    assert (port.state, port.phys_state) == (PortState.ACTIVE, 5)
    assert port.max_msg_sz >= 1 << 20


def test_dma_region_reaches_bus_addresses(bench: Bench) -> None:
    left, right = bench.pair()
    dma = bench.a.backend.reg_dma_mr(bench.a.pd, access=AccessFlags.LOCAL_WRITE)
    source, target = bench.a.buffer(4096, start=0x1000), bench.b.buffer(64)
    source.fill(b"by bus address", 100)
    bus_address = source.pages.runs[0][0]
    left.write(Sge(bus_address + 100, 14, dma.lkey), target.at(), target.rkey)
    left.send(Sge(0x10, 14, dma.lkey))
    bench.settle()
    assert [status for _, status in left.statuses] == [S.SUCCESS, S.LOC_PROT_ERR]
    assert target.data(0, 14) == b"by bus address"
    assert right.owner.states == []


def test_dma_region_is_never_remote(bench: Bench) -> None:
    left, _ = bench.pair()
    dma = bench.b.backend.reg_dma_mr(bench.b.pd, access=15)
    source, target = bench.a.buffer(64), bench.b.buffer(64, start=0x1000)
    left.write(source.sge(), target.pages.runs[0][0], dma.rkey)
    bench.settle()
    assert left.statuses == [(1, S.REM_ACCESS_ERR)]


def test_users_get_no_kernel_keys(bench: Bench) -> None:
    pd = bench.a.backend.create_pd(privileged=False)
    with pytest.raises(BackendError):
        bench.a.backend.reg_dma_mr(pd, access=1)
    with pytest.raises(BackendError):
        bench.a.backend.alloc_fast_reg_mr(pd, max_pages=4)


@pytest.mark.parametrize("opcode", [WrOpcode.FAST_REG_MR, WrOpcode.LOCAL_INV])
def test_users_get_no_memory_operations(bench: Bench, opcode: int) -> None:
    pd = bench.a.backend.create_pd(privileged=False)
    rkey = 0x1234
    if bench.a.backend.limits.memory_management:
        rkey = bench.a.backend.alloc_fast_reg_mr(bench.a.pd, max_pages=4).rkey
    left, right = bench.a.qp(pd=pd), bench.b.qp()
    left.connect(right)
    right.connect(left)
    arm = FastReg(0, (), 0, 0, rkey)
    left.post(opcode, (), arm if opcode == WrOpcode.FAST_REG_MR else Invalidate(rkey))
    bench.settle()
    assert left.statuses == [(1, S.LOC_QP_OP_ERR)]


def test_fast_registration_life(bench: Bench) -> None:
    """Register, let the peer write, have it invalidated by the peer, register with a new key."""
    left, right = bench.pair()
    source = bench.a.buffer(8192)
    source.fill(b"fast" * 2048)
    fast = bench.b.backend.alloc_fast_reg_mr(bench.b.pd, max_pages=4)
    pages = tuple(bench.b.pages(3, scattered=True))
    key = (fast.rkey & ~0xFF) | (fast.rkey + 1) & 0xFF
    right.post(WrOpcode.FAST_REG_MR, (), FastReg(IOVA, pages, 8192, int(LOCAL_REMOTE), key))
    bench.settle()
    assert right.statuses == [(1, S.SUCCESS)]
    right.recv()
    left.write(source.sge(), IOVA, key)
    left.post(WrOpcode.SEND_WITH_INV, (), Invalidate(key))
    bench.settle()
    assert [status for _, status in left.statuses] == [S.SUCCESS] * 2
    (wc,) = right.owner.received
    assert wc.wc_flags == WcFlags.WITH_INVALIDATE
    assert wc.imm == key.to_bytes(4, "little")
    data = b"".join(bytes(bench.b.memory.views_untrusted(page, 4096)[0]) for page in pages)
    assert data[:0x40] == bytes(0x40)
    assert data[0x40 : 0x40 + 8192] == source.data()
    key2 = (key & ~0xFF) | (key + 1) & 0xFF
    right.post(WrOpcode.FAST_REG_MR, (), FastReg(IOVA, pages, 4096, int(LOCAL_REMOTE), key2))
    right.post(WrOpcode.LOCAL_INV, (), Invalidate(key2))
    bench.settle()
    assert [status for _, status in right.statuses] == [S.SUCCESS] * 3
    left.write(source.sge(0, 8), IOVA, key2)
    bench.settle()
    assert left.statuses[-1][1] == S.REM_ACCESS_ERR


def test_registration_is_used_by_the_next_request(bench: Bench) -> None:
    left, right = bench.pair()
    target = bench.b.buffer(64)
    fast = bench.a.backend.alloc_fast_reg_mr(bench.a.pd, max_pages=1)
    pages = tuple(bench.a.pages(1))
    arm = FastReg(IOVA, pages, 64, int(AccessFlags.LOCAL_WRITE), fast.rkey)
    left.post(WrOpcode.FAST_REG_MR, (), arm, flags=0)
    left.write(Sge(IOVA, 64, fast.lkey), target.at(), target.rkey)
    left.post(WrOpcode.LOCAL_INV, (), Invalidate(fast.rkey))
    bench.settle()
    assert [status for _, status in left.statuses] == [S.SUCCESS] * 2
    left.write(Sge(IOVA, 64, fast.lkey), target.at(), target.rkey)
    bench.settle()
    assert left.statuses[-1][1] == S.LOC_PROT_ERR
    assert right.owner.states == []


@pytest.mark.parametrize("fault", ["bound", "too_many_pages", "too_long", "bad_page", "no_region"])
def test_bad_fast_registration(bench: Bench, fault: str) -> None:
    left, _ = bench.pair()
    fast = bench.a.backend.alloc_fast_reg_mr(bench.a.pd, max_pages=2)
    arm = FastReg(IOVA, tuple(bench.a.pages(2)), 8192 - 0x40, 1, fast.rkey)
    if fault == "bound":
        left.post(WrOpcode.FAST_REG_MR, (), arm, flags=0)
    elif fault == "too_many_pages":
        arm = arm._replace(pages=tuple(bench.a.pages(3)))
    elif fault == "too_long":
        arm = arm._replace(length=8192)
    elif fault == "bad_page":
        arm = arm._replace(pages=(0x1234000, 0x1235000))
    else:
        arm = arm._replace(rkey=bench.a.buffer(64).rkey)
    left.post(WrOpcode.FAST_REG_MR, (), arm)
    bench.settle()
    assert [status for _, status in left.statuses] == [S.MW_BIND_ERR]


def test_remote_invalidate_of_what_may_not_be(bench: Bench) -> None:
    left, right = bench.pair()
    user = bench.b.buffer(64)
    right.recv(user.sge())
    left.post(WrOpcode.SEND_WITH_INV, (), Invalidate(user.rkey))
    bench.settle()
    assert [status for _, status in left.statuses] == [S.REM_ACCESS_ERR]
    assert [status for _, status in right.recv_statuses] == [S.REM_INV_REQ_ERR]


def test_keys_are_not_reused_soon(bench: Bench) -> None:
    backend, pages = bench.a.backend, bench.a.buffer(64).pages
    seen = set()
    for _ in range(500):
        mr = (
            backend.alloc_fast_reg_mr(bench.a.pd, max_pages=1)
            if backend.limits.memory_management
            else backend.reg_mr(bench.a.pd, start=0, length=64, access=0, pages=pages)
        )
        assert 0 < mr.lkey == mr.rkey < 0xFFFFFFFF
        seen.add(mr.lkey >> 8)
        mr.destroy()
        mr.destroy()
    assert len(seen) == 500


def test_shared_receive_queue(bench: Bench) -> None:
    owner = FakeSrqOwner()
    srq = bench.b.backend.create_srq(bench.b.pd, owner, max_wr=16, max_sge=4)
    source, target = bench.a.buffer(64), bench.b.buffer(64)
    lefts, rights = [], []
    for _ in range(2):
        left, right = bench.a.qp(), bench.b.qp(srq=srq)
        left.connect(right)
        right.connect(left)
        lefts.append(left)
        rights.append(right)
    owner.recvs.extend(RecvWr(wr, (target.sge(),)) for wr in (7, 8, 9))
    srq.recv_doorbell()
    for left in lefts:
        left.send(source.sge())
        bench.settle()
    assert [right.recv_statuses for right in rights] == [[(7, S.SUCCESS)], [(8, S.SUCCESS)]]
    rights[0].modify(qp_state=int(QpState.ERR))
    bench.settle()
    assert rights[0].owner.events == [EqeType.QP_LAST_WQE_REACHED]
    assert len(owner.recvs) + srq.held == 1
    assert rights[1].owner.events == []


def test_srq_receive_in_use_is_flushed_before_last_wqe(bench: Bench) -> None:
    owner = FakeSrqOwner()
    srq = bench.b.backend.create_srq(bench.b.pd, owner, max_wr=16, max_sge=4)
    left, right = bench.a.qp(), bench.b.qp(srq=srq)
    left.connect(right)
    right.connect(left)
    source, target = bench.a.buffer(4 << 20, scattered=False), bench.b.buffer(64)
    owner.recvs.append(RecvWr(7, (target.sge()._replace(length=63),)))
    srq.recv_doorbell()
    left.send(source.sge(0, 64))
    bench.settle()
    too_long = bench.differs.get("send_too_long", {}).get("recv", S.LOC_LEN_ERR)
    assert right.recv_statuses == [(7, too_long)]
    assert right.owner.events == [EqeType.QP_LAST_WQE_REACHED]


def test_gid_table(bench: Bench) -> None:
    backend = bench.a.backend
    backend.add_gid(3, gid_v4(77), GidType.ROCE_V2)
    backend.add_gid(4, gid_v4(77), GidType.ROCE_V2)
    backend.remove_gid(3)
    backend.remove_gid(3)


def test_gids_are_owned(bench: Bench) -> None:
    backend, other = bench.a.backend, bench.b.backend
    backend.add_gid(4, gid_v4(77), GidType.ROCE_V2)
    if other is not backend:
        with pytest.raises(BackendError) as caught:
            other.add_gid(1, gid_v4(77), GidType.ROCE_V2)
        assert caught.value.errno == errno.EADDRINUSE
        backend.remove_gid(4)
        other.add_gid(1, gid_v4(77), GidType.ROCE_V2)


def test_qpns_are_small_and_recycled_late(bench: Bench) -> None:
    backend = bench.a.backend
    first = bench.a.qp()
    assert 2 <= first.qp.qpn <= backend.limits.max_qp
    first.destroy()
    assert bench.a.qp().qp.qpn != first.qp.qpn


def test_queue_pairs_run_out(bench: Bench) -> None:
    """QP1 is one of the max_qp."""
    made = [bench.a.qp() for _ in range(bench.a.backend.limits.max_qp - 1)]
    with pytest.raises(BackendError) as caught:
        bench.a.qp()
    assert caught.value.errno == errno.ENOMEM
    assert len({qp.qp.qpn for qp in made}) == len(made)
    made[0].destroy()
    bench.a.qp()


def test_unsupported_qp_type(bench: Bench) -> None:
    with pytest.raises(BackendError):
        bench.a.qp(QpType.UC)


def test_oversized_queue(bench: Bench) -> None:
    init = QpInit(int(QpType.RC), bench.a.backend.limits.max_qp_wr + 1, 1, 1, 1, False)
    with pytest.raises(BackendError):
        bench.a.backend.create_qp(bench.a.pd, bench.a.qp().owner, init, None)


def test_device_reset_forgets_everything(bench: Bench) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(64), bench.b.buffer(64)
    left.post(WrOpcode.RDMA_WRITE, (source.sge(),), Rdma(target.at(), target.rkey))
    left.destroy()
    bench.a.backend.reset()
    bench.settle()
    bench.a.backend.add_gid(0, bench.a.gid, GidType.ROCE_V2)
    assert left.owner.sent == []
    if bench.a is not bench.b:
        assert right.owner.states == []

"""What goes wrong, and exactly what either side is told."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from fake_owner import RAM_BASE, Bench, Buffer, FakeQp

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import AccessFlags, QpState
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcStatus, WrOpcode
from pvrdma_server.backend import Atomic, Rdma, Refused

S, E = WcStatus, EqeType


class Scene(NamedTuple):
    bench: Bench
    left: FakeQp
    right: FakeQp
    source: Buffer
    target: Buffer


class Case(NamedTuple):
    """What to do, the requester's status, the receive's status or None, the responder's events.

    `right_state`: whether the responder's QP ends in ERR, too.
    """

    act: Callable[[Scene], object]
    status: WcStatus
    recv: WcStatus | None = None
    events: tuple[EqeType, ...] = ()
    right_errs: bool = True


def other_pd_sge(s: Scene) -> Sge:
    pd = s.bench.a.backend.create_pd(privileged=False)
    return s.bench.a.buffer(64, pd=pd).sge()


def other_pd_rkey(s: Scene) -> int:
    pd = s.bench.b.backend.create_pd(privileged=False)
    return s.bench.b.buffer(4096, pd=pd).rkey


def read_only(s: Scene) -> Buffer:
    return s.bench.b.buffer(4096, AccessFlags.REMOTE_READ | AccessFlags.LOCAL_WRITE)


def write_only(s: Scene) -> Buffer:
    return s.bench.b.buffer(4096, AccessFlags.REMOTE_WRITE | AccessFlags.LOCAL_WRITE)


def gone(s: Scene) -> Buffer:
    buffer = s.bench.b.buffer(4096)
    buffer.mr.destroy()
    return buffer


def send_to_bad_recv(s: Scene) -> None:
    s.right.recv(Sge(0x1000, 4096, 0x1234))
    s.left.send(s.source.sge())


def send_to_read_only_recv(s: Scene) -> None:
    s.right.recv(s.bench.b.buffer(64, AccessFlags.REMOTE_READ).sge())
    s.left.send(s.source.sge())


def send_too_long(s: Scene) -> None:
    s.right.recv(s.target.sge(0, 63))
    s.left.send(s.source.sge())


def send_to_refused_recv(s: Scene) -> None:
    s.right.recv(refused=S.LOC_QP_OP_ERR)
    s.left.send(s.source.sge())


def write_imm_to_refused_recv(s: Scene) -> None:
    s.right.recv(refused=S.LOC_QP_OP_ERR)
    arm = Rdma(s.target.at(), s.target.rkey)
    s.left.post(WrOpcode.RDMA_WRITE_WITH_IMM, (s.source.sge(),), arm)


def atomic(s: Scene, offset: int, buffer: Buffer, sge: Sge | None = None) -> None:
    s.left.fetch_add(sge or s.source.sge(0, 8), buffer.at(offset), buffer.rkey, 1)


def write(s: Scene, buffer: Buffer, offset: int = 0, length: int = 64) -> None:
    s.left.write(s.source.sge(0, length), buffer.at(offset), buffer.rkey)


def read(s: Scene, buffer: Buffer, offset: int = 0, sge: Sge | None = None) -> None:
    s.left.read(sge or s.source.sge(), buffer.at(offset), buffer.rkey)


def local_only(s: Scene) -> Sge:
    return s.bench.a.buffer(64, 0).sge()


REMOTE = (S.REM_ACCESS_ERR, None, (E.QP_ACCESS_ERR,))
INVALID = (S.REM_INV_REQ_ERR, None, (E.QP_REQ_ERR,))
CASES: dict[str, Case] = {
    # The requester's own faults: the peer never hears of them.
    "send_unknown_lkey": Case(
        lambda s: s.left.send(Sge(0x1000, 64, 0x1234)), S.LOC_PROT_ERR, right_errs=False
    ),
    "send_other_pd": Case(lambda s: s.left.send(other_pd_sge(s)), S.LOC_PROT_ERR, right_errs=False),
    "send_beyond_region": Case(
        lambda s: s.left.send(s.source.sge(1, s.source.length)), S.LOC_PROT_ERR, right_errs=False
    ),
    "send_before_region": Case(
        lambda s: s.left.send(s.source.sge(0)._replace(addr=s.source.start - 1)),
        S.LOC_PROT_ERR,
        right_errs=False,
    ),
    "send_wrapping_address": Case(
        lambda s: s.left.send(s.source.sge(0)._replace(addr=2**64 - 8)),
        S.LOC_PROT_ERR,
        right_errs=False,
    ),
    "read_into_unwritable": Case(
        lambda s: read(s, s.target, sge=local_only(s)), S.LOC_PROT_ERR, right_errs=False
    ),
    "atomic_into_unwritable": Case(
        lambda s: atomic(s, 0, s.target, local_only(s)), S.LOC_PROT_ERR, right_errs=False
    ),
    "atomic_result_too_short": Case(
        lambda s: atomic(s, 0, s.target, s.source.sge(0, 7)), S.LOC_LEN_ERR, right_errs=False
    ),
    "refused_wqe": Case(
        lambda s: s.left.post(WrOpcode.SEND, (), Refused(S.LOC_QP_OP_ERR, "too many sges")),
        S.LOC_QP_OP_ERR,
        right_errs=False,
    ),
    "unknown_opcode": Case(lambda s: s.left.post(14), S.LOC_QP_OP_ERR, right_errs=False),
    "wrong_arm": Case(
        lambda s: s.left.post(WrOpcode.RDMA_WRITE, (), Atomic(0, 0, 0, 0)),
        S.LOC_QP_OP_ERR,
        right_errs=False,
    ),
    "message_too_long": Case(
        lambda s: s.left.send(*[s.source.sge()._replace(length=2**31)] * 2),
        S.LOC_LEN_ERR,
        right_errs=False,
    ),
    # The responder's receive.
    "send_too_long": Case(send_too_long, S.REM_INV_REQ_ERR, S.LOC_LEN_ERR),
    "send_to_bad_lkey": Case(send_to_bad_recv, S.REM_OP_ERR, S.LOC_PROT_ERR),
    "send_to_unwritable": Case(send_to_read_only_recv, S.REM_OP_ERR, S.LOC_PROT_ERR),
    "send_to_refused": Case(send_to_refused_recv, S.REM_OP_ERR, S.LOC_QP_OP_ERR),
    "write_imm_to_refused": Case(write_imm_to_refused_recv, S.REM_OP_ERR, S.LOC_QP_OP_ERR),
    # Remote keys.
    "write_unknown_rkey": Case(
        lambda s: s.left.write(s.source.sge(), s.target.at(), 0x1234), *REMOTE
    ),
    "write_other_pd": Case(
        lambda s: s.left.write(s.source.sge(), s.target.at(), other_pd_rkey(s)), *REMOTE
    ),
    "write_no_access": Case(lambda s: write(s, read_only(s)), *REMOTE),
    "write_destroyed_region": Case(lambda s: write(s, gone(s)), *REMOTE),
    "write_beyond_region": Case(lambda s: write(s, s.target, s.target.length - 63), *REMOTE),
    "write_before_region": Case(lambda s: write(s, s.target, -1), *REMOTE),
    "read_unknown_rkey": Case(
        lambda s: s.left.read(s.source.sge(), s.target.at(), 0x1234), *REMOTE
    ),
    "read_no_access": Case(lambda s: read(s, write_only(s)), *REMOTE),
    "read_beyond_region": Case(lambda s: read(s, s.target, s.target.length - 63), *REMOTE),
    "atomic_no_access": Case(lambda s: atomic(s, 0, read_only(s)), *REMOTE),
    "atomic_beyond_region": Case(lambda s: atomic(s, s.target.length, s.target), *REMOTE),
    "atomic_misaligned": Case(lambda s: atomic(s, 4, s.target), *INVALID),
}


@pytest.mark.parametrize("name", CASES)
def test_fault(bench: Bench, name: str) -> None:
    case = CASES[name]._replace(**bench.differs.get(name, {}))
    left, right = bench.pair()
    scene = Scene(bench, left, right, bench.a.buffer(64), bench.b.buffer(4096))
    good = left.write(scene.source.sge(), scene.target.at(), scene.target.rkey, flags=0)
    if bench.stops_at_once:
        bench.settle()
    case.act(scene)
    after = left.send(scene.source.sge())
    bench.elapse()
    assert good not in [wr for wr, _ in left.statuses]
    assert [status for _, status in left.statuses] == [case.status, S.WR_FLUSH_ERR]
    assert left.statuses[1][0] == after
    assert left.owner.states == [QpState.ERR]
    assert left.owner.events == []
    if case.right_errs:
        assert right.owner.states == [QpState.ERR]
        assert right.owner.events == list(case.events)
    expected = [] if case.recv is None else [case.recv]
    assert [status for _, status in right.recv_statuses] == expected


@pytest.mark.parametrize(
    ("access", "act"),
    [
        (AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC, lambda s: write(s, s.target)),
        (AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC, lambda s: read(s, s.target)),
        (AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ, lambda s: atomic(s, 0, s.target)),
    ],
    ids=["write", "read", "atomic"],
)
def test_operation_not_enabled_on_the_qp(
    bench: Bench, access: int, act: Callable[[Scene], object]
) -> None:
    left, right = bench.a.qp(), bench.b.qp()
    left.connect(right)
    right.connect(left, qp_access_flags=int(access))
    act(Scene(bench, left, right, bench.a.buffer(64), bench.b.buffer(4096)))
    bench.settle()
    assert [status for _, status in left.statuses] == [S.REM_INV_REQ_ERR]
    assert right.owner.events == [E.QP_REQ_ERR] * bench.reports_disallowed


def test_more_reads_than_the_responder_allows(bench: Bench) -> None:
    left, right = bench.a.qp(), bench.b.qp()
    left.connect(right, max_rd_atomic=2)
    right.connect(left, max_dest_rd_atomic=1)
    source, target = bench.a.buffer(1 << 20), bench.b.buffer(1 << 20)
    left.read(source.sge(), target.at(), target.rkey)
    left.read(source.sge(), target.at(), target.rkey)
    bench.settle()
    assert [status for _, status in left.statuses][-1:] == [S.REM_INV_REQ_ERR]
    assert right.owner.events == [E.QP_REQ_ERR]


def test_no_reads_allowed_at_the_requester(bench: Bench) -> None:
    left, right = bench.pair(max_rd_atomic=0)
    source = bench.a.buffer(64)
    left.read(source.sge(), 0, 0)
    bench.settle()
    assert [status for _, status in left.statuses] == [S.LOC_QP_OP_ERR]
    assert right.owner.states == []


def test_memory_unmapped_below_a_region(bench: Bench) -> None:
    """Access fails as that of a device without access, and works again when RAM is back."""
    left, right = bench.pair()
    source, target = bench.a.buffer(64), bench.b.buffer(64)
    bench.b.memory.remove_region(RAM_BASE, len(bench.b.ram))
    write(Scene(bench, left, right, source, target), target)
    bench.settle()
    local = bench.a is bench.b
    assert left.statuses == [(1, S.LOC_PROT_ERR if local else S.REM_ACCESS_ERR)]
    bench.b.memory.add_region(RAM_BASE, len(bench.b.ram), memoryview(bench.b.ram), writable=True)
    left, right = bench.pair()
    write(Scene(bench, left, right, source, target), target)
    bench.settle()
    assert left.statuses == [(1, S.SUCCESS)]


def test_flush_is_complete_and_in_order(bench: Bench) -> None:
    left, _ = bench.pair(rnr_retry=7)
    source = bench.a.buffer(64)
    receives = [left.recv(source.sge()) for _ in range(50)]
    sends = [left.send(source.sge(), flags=0) for _ in range(200)]
    left.modify(qp_state=int(QpState.ERR))
    sends.append(left.send(source.sge()))
    bench.settle()
    assert left.statuses == [(wr, S.WR_FLUSH_ERR) for wr in sends]
    assert left.recv_statuses == [(wr, S.WR_FLUSH_ERR) for wr in receives]
    late_send, late_recv = left.send(source.sge()), left.recv(source.sge())
    bench.settle()
    assert left.statuses[-1] == (late_send, S.WR_FLUSH_ERR)
    assert left.recv_statuses[-1] == (late_recv, S.WR_FLUSH_ERR)
    # The core asked for it: it is not told.
    assert left.owner.states == []


def test_flush_after_a_failure_covers_what_is_in_flight(bench: Bench) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(64), bench.b.buffer(64)
    posted = [
        left.write(source.sge(), target.at(), target.rkey),
        left.write(source.sge(), target.at(), 0x1234),
        left.write(source.sge(), target.at(), target.rkey, flags=0),
        left.read(source.sge(), target.at(), target.rkey),
        left.send(source.sge()),
    ]
    bench.settle()
    expected = [S.SUCCESS, S.REM_ACCESS_ERR] + [S.WR_FLUSH_ERR] * 3
    assert left.statuses == list(zip(posted, expected, strict=True))
    assert right.owner.received == []


def test_no_call_after_destroy_or_reset(bench: Bench) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(1 << 20), bench.b.buffer(1 << 20)
    for _ in range(20):
        right.recv(target.sge())
        left.send(source.sge())
        left.read(source.sge(), target.at(), target.rkey)
    bench.a.backend.progress(100_000)
    right.destroy()
    left.modify(qp_state=int(QpState.RESET))
    before = len(left.owner.sent)
    left.owner.sends.clear()
    bench.elapse()
    assert len(left.owner.sent) == before
    left.destroy()
    bench.elapse()


def test_reset_qp_works_again(bench: Bench) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(1 << 20), bench.b.buffer(1 << 20)
    left.write(source.sge(), target.at(), target.rkey)
    bench.a.backend.progress(1)
    for qp in (left, right):
        qp.modify(qp_state=int(QpState.RESET))
    left.connect(right, sq_psn=77, rq_psn=99)
    right.connect(left, sq_psn=99, rq_psn=77)
    wr = left.write(source.sge(), target.at(), target.rkey)
    bench.settle()
    assert left.statuses == [(wr, S.SUCCESS)]
    assert left.qp.query(left.attr).sq_psn == right.qp.query(right.attr).rq_psn > 77

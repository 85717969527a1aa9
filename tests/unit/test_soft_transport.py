"""The RC transport's timers, retries, ordering and states, on a clock that moves when told."""

import pytest
from fake_owner import Bench, FakeOwner, FakeQp
from soft_bench import DROP, FaultyFabric, soft_bench

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpState, SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus, WrOpcode
from pvrdma_server.backend import Completion, FastReg, Invalidate, Rdma
from pvrdma_server.backend_soft.aeth import RNR_DELAY_NS

S = WcStatus
TIMEOUT_14_NS = 4096 << 14


def lossy(count: int) -> FaultyFabric:
    return FaultyFabric(iter([DROP] * count))


def statuses(qp: FakeQp) -> list[int]:
    return [status for _, status in qp.statuses]


@pytest.mark.parametrize("retry_cnt", [0, 1, 7])
def test_retry_exceeded(retry_cnt: int) -> None:
    bench = soft_bench(fabric=lossy(100))
    left, right = bench.pair(retry_cnt=retry_cnt, timeout=14)
    start = bench.clock.now_ns
    first, second = left.send(), left.send(flags=0)
    bench.elapse()
    assert left.statuses == [(first, S.RETRY_EXC_ERR), (second, S.WR_FLUSH_ERR)]
    assert bench.clock.now_ns - start == TIMEOUT_14_NS * (retry_cnt + 1)
    assert left.owner.states == [QpState.ERR]
    assert right.owner.states == []
    assert bench.deadline_ns() is None


def test_peer_that_nobody_owns() -> None:
    bench = soft_bench()
    left, _ = bench.pair()
    bench.b.backend.remove_gid(0)
    left.send()
    bench.elapse()
    assert statuses(left) == [S.RETRY_EXC_ERR]


def test_timeout_zero_waits_for_ever() -> None:
    bench = soft_bench(fabric=lossy(1))
    left, _ = bench.pair(timeout=0)
    left.send()
    bench.settle()
    assert bench.deadline_ns() is None
    assert left.statuses == []


def test_lost_request_is_repeated() -> None:
    bench = soft_bench(fabric=lossy(3))
    left, _right = bench.pair(retry_cnt=3)
    source, target = bench.a.buffer(64), bench.b.buffer(64)
    source.fill(b"x" * 64)
    left.write(source.sge(), target.at(), target.rkey)
    bench.elapse()
    assert statuses(left) == [S.SUCCESS]
    assert target.data() == b"x" * 64


def test_a_repeat_carries_what_memory_holds_then() -> None:
    bench = soft_bench(fabric=lossy(1))
    left, _ = bench.pair()
    source, target = bench.a.buffer(4), bench.b.buffer(4)
    source.fill(b"old!")
    left.write(source.sge(), target.at(), target.rkey)
    bench.settle()
    source.fill(b"new!")
    bench.elapse()
    assert target.data() == b"new!"


def test_progress_restores_the_retry_count() -> None:
    script = [DROP, "ok", "ok"] * 10
    bench = soft_bench(fabric=FaultyFabric(iter(script)))
    left, right = bench.pair(retry_cnt=1)
    for _ in range(10):
        right.recv()
        left.send()
        bench.elapse()
    assert statuses(left) == [S.SUCCESS] * 10


@pytest.mark.parametrize("timer", [0, 1, 12, 31])
@pytest.mark.parametrize("rnr_retry", [0, 1, 6])
def test_receiver_not_ready(timer: int, rnr_retry: int) -> None:
    bench = soft_bench()
    left, right = bench.pair(min_rnr_timer=timer, rnr_retry=rnr_retry, timeout=0)
    start = bench.clock.now_ns
    wr = left.send()
    bench.elapse()
    assert left.statuses == [(wr, S.RNR_RETRY_EXC_ERR)]
    assert bench.clock.now_ns - start == RNR_DELAY_NS[timer] * rnr_retry
    assert right.owner.states == []


def test_rnr_delays() -> None:
    """Source: InfiniBand Architecture Specification, RNR NAK timer field."""
    assert len(RNR_DELAY_NS) == 32
    assert (RNR_DELAY_NS[0], RNR_DELAY_NS[1]) == (655_360_000, 10_000)
    assert (RNR_DELAY_NS[12], RNR_DELAY_NS[31]) == (640_000, 491_520_000)


def test_receiver_not_ready_for_ever_until_it_is() -> None:
    bench = soft_bench()
    left, right = bench.pair(rnr_retry=7)
    source, target = bench.a.buffer(300_000), bench.b.buffer(300_000)
    source.fill(b"later" * 60_000)
    left.send(source.sge())
    for _ in range(50):
        bench.settle()
        deadline = bench.deadline_ns()
        assert deadline is not None
        bench.clock.now_ns = deadline
    assert left.statuses == []
    into = right.recv(target.sge())
    bench.elapse()
    assert statuses(left) == [S.SUCCESS]
    assert right.recv_statuses == [(into, S.SUCCESS)]
    assert target.data() == source.data()


def test_write_with_imm_waits_at_its_last_chunk() -> None:
    bench = soft_bench(chunk_bytes=4096)
    left, right = bench.pair()
    source, target = bench.a.buffer(10_000), bench.b.buffer(10_000)
    source.fill(b"0123456789" * 1000)
    left.post(
        WrOpcode.RDMA_WRITE_WITH_IMM, (source.sge(),), Rdma(target.at(), target.rkey),
        SendFlags.SIGNALED, b"abcd",
    )  # fmt: skip
    bench.settle()
    assert target.data(0, 8192) == source.data(0, 8192)
    right.recv()
    bench.elapse()
    assert statuses(left) == [S.SUCCESS]
    assert right.owner.received[0].byte_len == 10_000
    assert target.data() == source.data()


def test_fence_waits_for_reads() -> None:
    """Of two RDMA WRITEs behind a READ of the same memory only the fenced one must wait."""
    bench = soft_bench(chunk_bytes=4096)
    left, _ = bench.pair()
    source, local, remote = (
        bench.a.buffer(8), bench.a.buffer(1 << 20), bench.b.buffer(1 << 20),
    )  # fmt: skip
    source.fill(b"AFTER!!!")
    left.read(local.sge(), remote.at(), remote.rkey)
    left.write(
        source.sge(), remote.at((1 << 20) - 8), remote.rkey,
        flags=SendFlags.SIGNALED | SendFlags.FENCE,
    )  # fmt: skip
    bench.settle()
    assert statuses(left) == [S.SUCCESS] * 2
    assert local.data() == bytes(1 << 20)
    assert remote.data((1 << 20) - 8) == b"AFTER!!!"


def test_reads_in_flight_are_limited_and_stall_in_order() -> None:
    bench = soft_bench(fabric=lossy(100))
    left, _ = bench.pair(max_rd_atomic=2, timeout=0)
    local, remote = bench.a.buffer(64), bench.b.buffer(64)
    for _ in range(4):
        left.read(local.sge(), remote.at(), remote.rkey)
    left.write(local.sge(), remote.at(), remote.rkey)
    bench.settle()
    # Two on their way, the third and what is behind it are left where they are.
    assert len(left.owner.sends) == 3


def test_send_queue_is_taken_as_far_as_it_allows() -> None:
    bench = soft_bench(fabric=lossy(1000))
    left, _ = bench.pair(timeout=0)
    for _ in range(100):
        left.send()
    bench.settle()
    assert len(left.owner.sends) == 100 - 64


def test_window_bounds_bytes_in_flight() -> None:
    bench = soft_bench(fabric=lossy(1000), chunk_bytes=4096, window_bytes=16384)
    left, _ = bench.pair(timeout=0)
    source, target = bench.a.buffer(1 << 20), bench.b.buffer(1 << 20)
    left.write(source.sge(), target.at(), target.rkey)
    bench.settle()
    assert bench.a.backend.counters.tx_bytes == 16384  # type: ignore[attr-defined]


@pytest.mark.parametrize("notify", [0, 1])
def test_send_queue_drain(notify: int) -> None:
    bench = soft_bench(fabric=lossy(1))
    left, right = bench.pair()
    first = left.send()
    bench.settle()
    right.recv()
    right.recv()
    left.modify(qp_state=int(QpState.SQD), en_sqd_async_notify=notify)
    second = left.send()
    bench.settle()
    assert left.qp.query(left.attr).sq_draining == 1
    assert left.owner.states == []
    bench.elapse()
    assert left.statuses == [(first, S.SUCCESS)]
    assert left.owner.states == [QpState.SQD]
    assert left.owner.events == [EqeType.SQ_DRAINED] * notify
    assert left.qp.query(left.attr).sq_draining == 0
    left.modify(qp_state=int(QpState.RTS))
    bench.settle()
    assert left.statuses == [(first, S.SUCCESS), (second, S.SUCCESS)]
    assert left.owner.states == [QpState.SQD]


def test_communication_established() -> None:
    bench = soft_bench()
    left, right = bench.a.qp(), bench.b.qp()
    left.connect(right)
    right.connect(left)
    right.modify(qp_state=int(QpState.RESET))
    right.modify(qp_state=int(QpState.INIT))
    right.modify(qp_state=int(QpState.RTR))
    right.recv()
    right.recv()
    left.send()
    left.send()
    bench.settle()
    assert right.owner.events == [EqeType.COMM_EST]
    assert [s for _, s in right.recv_statuses] == [S.SUCCESS] * 2
    assert statuses(left) == [S.SUCCESS] * 2


@pytest.mark.parametrize("state", [QpState.RESET, QpState.INIT, QpState.ERR])
def test_qp_that_does_not_hear(state: QpState) -> None:
    bench = soft_bench()
    left, right = bench.pair(retry_cnt=1)
    right.modify(qp_state=int(state))
    right.owner.recvs.clear()
    left.send()
    bench.elapse()
    assert statuses(left) == [S.RETRY_EXC_ERR]
    assert right.owner.received == []


def test_stranger_is_not_heard() -> None:
    """Only the QP's own peer may write to it, whoever knows its number and PSN."""
    bench = soft_bench()
    _left, right = bench.pair()
    stranger = bench.a.qp()
    stranger.connect(right, retry_cnt=0)
    target, source = bench.b.buffer(64), bench.a.buffer(64)
    source.fill(b"evil" * 16)
    stranger.write(source.sge(), target.at(), target.rkey)
    bench.elapse()
    assert statuses(stranger) == [S.RETRY_EXC_ERR]
    assert target.data() == bytes(64)
    assert right.owner.states == []


def test_memory_gone_between_repeats_fails_the_request() -> None:
    bench = soft_bench(fabric=lossy(1))
    left, _right = bench.pair()
    source, target = bench.a.buffer(64), bench.b.buffer(64)
    wr = left.write(source.sge(), target.at(), target.rkey)
    bench.settle()
    source.mr.destroy()
    bench.elapse()
    assert left.statuses == [(wr, S.LOC_PROT_ERR)]


def test_local_failure_waits_for_its_turn() -> None:
    """What was posted before a bad request completes first, though its ACK comes later."""
    bench = soft_bench(fabric=lossy(1))
    left, right = bench.pair()
    right.recv()
    first = left.send()
    second = left.post(99)
    third = left.send()
    bench.settle()
    assert left.statuses == []
    bench.elapse()
    assert left.statuses == [
        (first, S.SUCCESS), (second, S.LOC_QP_OP_ERR), (third, S.WR_FLUSH_ERR),
    ]  # fmt: skip


def test_receive_in_use_is_flushed_first() -> None:
    bench = soft_bench(chunk_bytes=4096)
    left, right = bench.pair()
    source, target = bench.a.buffer(1 << 20), bench.b.buffer(1 << 20)
    in_use, waiting = right.recv(target.sge()), right.recv(target.sge())
    left.send(source.sge())
    bench.a.backend.progress(1)
    bench.b.backend.progress(1)
    right.modify(qp_state=int(QpState.ERR))
    bench.settle()
    assert right.recv_statuses == [(in_use, S.WR_FLUSH_ERR), (waiting, S.WR_FLUSH_ERR)]


def test_acknowledgement_outlives_the_receiver() -> None:
    """A receiver that sees its completion and leaves at once does not fail the sender."""
    bench = soft_bench()
    left, right = bench.pair()
    right.recv()
    left.send()
    bench.a.backend.progress(1)
    bench.b.backend.progress(1)
    right.destroy()
    bench.elapse()
    assert statuses(left) == [S.SUCCESS]


def bytes_until_ping(bench: Bench, left: FakeQp, ping: FakeQp) -> int:
    moved = bench.b.backend.counters.rx_bytes  # type: ignore[attr-defined]
    while not ping.owner.sent:
        for backend in bench.backends:
            backend.progress(64 << 10)
    assert not left.owner.sent
    return bench.b.backend.counters.rx_bytes - moved  # type: ignore[attr-defined,no-any-return]


def test_a_huge_write_does_not_starve_a_ping() -> None:
    bench = soft_bench(size=40 << 20)
    left, _ = bench.pair()
    ping, pong = bench.pair()
    source, target = bench.a.buffer(16 << 20), bench.b.buffer(16 << 20)
    left.write(source.sge(), target.at(), target.rkey)
    bench.a.backend.progress(1 << 20)
    for _ in range(3):
        pong.recv()
        ping.owner.sent.clear()
        ping.send()
        # At worst what the carrier holds already, not the rest of the write.
        assert bytes_until_ping(bench, left, ping) <= 6 << 20
    bench.settle()
    assert statuses(left) == [S.SUCCESS]


def test_full_carrier_blocks_and_goes_on() -> None:
    bench = soft_bench(size=40 << 20, window_bytes=64 << 20)
    pairs = [bench.pair() for _ in range(3)]
    source, target = bench.a.buffer(8 << 20), bench.b.buffer(8 << 20)
    for left, _ in pairs:
        left.write(source.sge(), target.at(), target.rkey)
        left.read(source.sge(), target.at(), target.rkey)
    while bench.a.backend.progress(1 << 20):
        pass
    # Nobody took anything: the carrier is full, and the backend rests.
    assert bench.a.backend.counters.blocked  # type: ignore[attr-defined]
    bench.settle()
    for left, _ in pairs:
        assert statuses(left) == [S.SUCCESS] * 2


def test_idle_backend_has_no_deadline() -> None:
    bench = soft_bench()
    left, right = bench.pair()
    right.recv()
    left.send()
    bench.elapse()
    assert bench.deadline_ns() is None


def test_on_work_is_called_once_until_progress() -> None:
    bench = soft_bench()
    left, _ = bench.pair()
    bench.settle()
    rings = bench.woken.rings
    left.send()
    left.send()
    assert bench.woken.rings == rings + 1


class Meddler:
    """An owner's hook that does something to its QP when told of something."""

    def __init__(self, qp: FakeQp, action: str) -> None:
        self.qp, self.action, self.calls = qp, action, 0

    def __call__(self, *_: object, **__: object) -> None:
        self.calls += 1
        if self.calls > 1:
            assert self.action == "error", "called after destroy or reset"
        elif self.action == "destroy":
            self.qp.destroy()
        else:
            state = QpState.ERR if self.action == "error" else QpState.RESET
            self.qp.modify(qp_state=int(state))


class MeddlingOwner(FakeOwner):
    """Meddles with its QP from inside the backend's calls."""

    meddle: Meddler | None = None

    def complete_send(self, wc: Completion) -> None:
        super().complete_send(wc)
        if self.meddle:
            self.meddle()

    def complete_recv(self, wc: Completion, *, solicited: bool) -> None:
        super().complete_recv(wc, solicited=solicited)
        if self.meddle:
            self.meddle()

    def raise_event(self, event: int) -> None:
        super().raise_event(event)
        if self.meddle:
            self.meddle()


@pytest.mark.parametrize("action", ["error", "reset", "destroy"])
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_owner_may_stop_its_qp_inside_a_call(action: str, fault: bool, side: int) -> None:
    """As the device does when a CQ is full."""
    bench = soft_bench()
    pair = [bench.a.qp(owner=MeddlingOwner()), bench.b.qp(owner=MeddlingOwner())]
    left, right = pair
    left.connect(right, timeout=0)
    right.connect(left, timeout=0)
    owner = pair[side].owner
    assert isinstance(owner, MeddlingOwner)
    owner.meddle = Meddler(pair[side], action)
    source, target = bench.a.buffer(300_000), bench.b.buffer(300_000)
    for _ in range(5):
        right.recv(target.sge())
        right.recv(target.sge())
        left.send(source.sge())
        left.read(source.sge(), target.at(), target.rkey)
    if fault:
        left.post(99)
        left.write(source.sge(), 0, 0)
    right.send(target.sge())
    bench.settle()
    assert owner.meddle.calls >= 1


def test_local_operations_take_turns() -> None:
    """A ring full of registrations does not hold everybody else up."""
    bench = soft_bench()
    left, _ = bench.pair()
    ping, pong = bench.pair()
    fast = bench.a.backend.alloc_fast_reg_mr(bench.a.pd, max_pages=1)
    arm = FastReg(0, tuple(bench.a.pages(1)), 64, 1, fast.rkey)
    for _ in range(500):
        left.post(WrOpcode.FAST_REG_MR, (), arm)
        left.post(WrOpcode.LOCAL_INV, (), Invalidate(fast.rkey))
    pong.recv()
    ping.send()
    for _ in range(50):
        for backend in bench.backends:
            backend.progress(1)
        if ping.owner.sent:
            break
    assert statuses(ping) == [S.SUCCESS]
    assert len(left.owner.sent) < 500
    bench.settle()
    assert statuses(left) == [S.SUCCESS] * 1000

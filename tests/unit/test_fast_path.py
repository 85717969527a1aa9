"""The short cut for WRITEs and READs: two machines, real rings; the same with it and without it."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from guest import (
    ALL_ACCESS,
    PAGE,
    SIGNALED,
    CommandFailed,
    Cq,
    GuestRam,
    Kernel,
    Machine,
    Mr,
    PageDir,
    Qp,
    UserProcess,
    World,
    connect,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shm_bench import shm_pair

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.vmw_pvrdma_abi import Cqe, WcStatus
from pvrdma_server.backend import SendEntries
from pvrdma_server.backend_soft import fast_path, native, shm_ring
from pvrdma_server.backend_soft.codes import FENCE, OP_READ, OP_WRITE, REMOTE_WRITE
from pvrdma_server.backend_soft.config import SoftConfig
from pvrdma_server.backend_soft.fast_path import (
    ASKED,
    MAX_ASKED,
    MAX_BYTES,
    MAX_LANDED,
    MAX_MESSAGES,
    SENT,
    Landed,
    Landing,
    Piece,
    Posted,
    Requests,
    Run,
)
from pvrdma_server.backend_soft.shm_ring import RESERVE_BYTES, RingReader, RingWriter
from pvrdma_server.backend_soft.wire import (
    ACK,
    ACK_REQUEST,
    FIRST,
    HEADER_BYTES,
    LAST,
    MAX_CHUNK_BYTES,
    NAK,
    PSN_MASK,
    READ_REQUEST,
    READ_RESPONSE,
    SOLICITED,
    WITH_IMM,
    WRITE,
    pack_rc,
)
from pvrdma_server.backend_soft.wqe import SendQueue, SentMany, Wqe
from pvrdma_server.errors import GuestError

built = pytest.mark.skipif(native.extension is None, reason="the extension is not built")
SIZE = 1 << 20
DEPTH = 512


def _in_a_row(process: UserProcess, length: int) -> Mr:
    """A region whose pages are."""
    first = process.driver.ram.alloc_contiguous(length // PAGE)
    pages = PageDir(process.driver.ram, [first + PAGE * n for n in range(length // PAGE)])
    start = process.take_va(length // PAGE)
    answer = process.pd.create_mr(
        api.CmdCreateMr(
            start, length, pages.dir_dma, process.pd.handle, ALL_ACCESS, 0, length // PAGE
        )
    )
    mr = Mr(pages, start, length, answer.lkey, answer.rkey)
    mr.handle = answer.mr_handle
    return mr


@dataclass
class Two:
    """Two processes on two machines whose servers share a fabric, and one connected queue pair in each."""

    folder: str
    sq_sig_all: bool = False
    short_cut: bool = True
    in_a_row: bool = False
    reads: int = 4

    def __post_init__(self) -> None:
        world = World()
        self.backends = shm_pair(self.folder, world.clock, world.wake)  # type: ignore[arg-type]
        self.world, self.processes = world, []
        self.machines = [Machine(b, world=world, ram=GuestRam(8 << 20)) for b in self.backends]
        self.gids = [bytes(10) + b"\xff\xff" + bytes([10, 0, 0, n + 1]) for n in range(2)]
        for machine, gid in zip(self.machines, self.gids, strict=True):
            driver = machine.boot()
            Kernel(driver).add_gid(gid)
            self.processes.append(UserProcess(driver))
        self.a, self.b = (self._qp(process) for process in self.processes)
        connect(self.a, self.b, *self.gids, max_rd_atomic=self.reads)
        make = _in_a_row if self.in_a_row else UserProcess.mr
        self.source, self.target = (make(process, SIZE) for process in self.processes)
        self.source.write(random.Random(7).randbytes(SIZE))

    def _qp(self, process: UserProcess) -> Qp:
        return Qp(process, max_wr=DEPTH, send_cq=Cq(process, 2 * DEPTH), sq_sig_all=self.sq_sig_all)

    def close(self) -> None:
        for backend in self.backends:
            backend.close()

    def write(self, at: int, length: int, wr_id: int, flags: int = SIGNALED, to: int = -1) -> None:
        """Post without a doorbell."""
        self.a.ring_send, ring = lambda: None, self.a.ring_send  # type: ignore[method-assign]
        try:
            target = self.target.remote(at if to < 0 else to)
            self.a.write(self.source.sge(at, length), to=target, wr_id=wr_id, flags=flags)
        finally:
            self.a.ring_send = ring  # type: ignore[method-assign]

    def read(self, at: int, length: int, wr_id: int, into: int = -1, flags: int = SIGNALED) -> None:
        """Likewise, in the same place unless told otherwise."""
        self.a.ring_send, ring = lambda: None, self.a.ring_send  # type: ignore[method-assign]
        try:
            local = self.source.sge(at if into < 0 else into, length)
            self.a.read(local, frm=self.target.remote(at), wr_id=wr_id, flags=flags)
        finally:
            self.a.ring_send = ring  # type: ignore[method-assign]

    def go(self) -> list[Cqe]:
        """Ring, and let everything happen that can."""
        self.a.ring_send()
        while self.world.run():
            pass
        return self.a.send_cq.poll()


@pytest.fixture(
    params=[(True, False), (True, True), (False, False)],
    ids=["short cut", "memory in a row", "one by one"],
)
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    short_cut, in_a_row = request.param
    if short_cut and native.extension is None:
        pytest.skip("the extension is not built")
    if not short_cut:
        monkeypatch.setattr(shm_ring, "extension", None)
    with tempfile.TemporaryDirectory(prefix="pvrdma-fabric-") as folder:
        made = Two(folder, short_cut=short_cut, in_a_row=in_a_row)
        yield made
        made.close()


def ids(completions: list[Cqe]) -> list[int]:
    assert {wc.status for wc in completions} <= {WcStatus.SUCCESS}
    return [wc.wr_id for wc in completions]


# --- between two machines ---------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 1000, PAGE])
def test_many_small_writes(two: Two, length: int) -> None:
    count = min(DEPTH, SIZE // length - 1)
    for number in range(count):
        two.write(number * length, length, number)
    assert ids(two.go()) == list(range(count))
    assert two.target.read(0, count * length) == two.source.read(0, count * length)
    assert not any(two.target.read(count * length, 64))


@pytest.mark.parametrize("length", [60_000, 200_000, MAX_CHUNK_BYTES])
def test_long_ones(two: Two, length: int) -> None:
    count = SIZE // length
    for number in range(count):
        two.write(number * length, length, number)
    assert ids(two.go()) == list(range(count))
    assert two.target.read(0, count * length) == two.source.read(0, count * length)


@pytest.mark.parametrize("length", [MAX_CHUNK_BYTES + 1, 3 * MAX_CHUNK_BYTES, SIZE - 1, SIZE])
def test_those_of_many_messages(two: Two, length: int) -> None:
    for number in range(5):
        two.write(SIZE - length, length, number)
    assert ids(two.go()) == list(range(5))
    assert two.target.read(SIZE - length, length) == two.source.read(SIZE - length, length)
    assert not any(two.target.read(0, SIZE - length))
    no_trouble(two)


@pytest.mark.parametrize("length", [1, PAGE, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, SIZE])
def test_reads(two: Two, length: int) -> None:
    two.target.write(random.Random(8).randbytes(SIZE))
    two.source.write(bytes(SIZE))
    for number in range(9):
        two.read(SIZE - length, length, number)
    assert ids(two.go()) == list(range(9))
    assert two.source.read(SIZE - length, length) == two.target.read(SIZE - length, length)
    assert not any(two.source.read(0, SIZE - length))
    no_trouble(two)


@pytest.mark.parametrize("length", [1, 8, 64, 1000, PAGE, 20_000])
def test_many_reads(two: Two, length: int) -> None:
    count = min(300, SIZE // length - 1)
    two.target.write(random.Random(9).randbytes(SIZE))
    two.source.write(bytes(SIZE))
    for number in range(count):
        two.read(number * length, length, number)
    assert ids(two.go()) == list(range(count))
    assert two.source.read(0, count * length) == two.target.read(0, count * length)
    assert not any(two.source.read(count * length, 64))
    no_trouble(two)


def test_only_reads_that_asked_for_it_complete(two: Two) -> None:
    for number in range(100):
        two.read(8 * number, 8, number, flags=SIGNALED if number % 7 == 3 else 0)
    assert ids(two.go()) == list(range(3, 100, 7))


@pytest.mark.parametrize("at", [0, 1, 17, 98])
@pytest.mark.parametrize("own", [False, True])
def test_a_read_of_a_wrong_place_ends_it_there(two: Two, at: int, own: bool) -> None:
    two.source.write(bytes(SIZE))
    two.target.write(b"x" * SIZE)
    for number in range(100):
        place = 100 * number if number != at else SIZE - 50
        two.read(
            *((100 * number, 100, number, place) if own else (place, 100, number, 100 * number))
        )
    done = two.go()
    assert [wc.status for wc in done[: at + 1]] == [WcStatus.SUCCESS] * at + [
        WcStatus.LOC_PROT_ERR if own else WcStatus.REM_ACCESS_ERR
    ]
    assert {wc.status for wc in done[at + 1 :]} == {WcStatus.WR_FLUSH_ERR}
    assert [wc.wr_id for wc in done] == list(range(100))
    assert two.source.read(0, 100 * at) == b"x" * 100 * at
    assert not any(two.source.read(100 * at, SIZE - 100 * at))


def test_reads_before_what_waits_for_them(two: Two) -> None:
    two.target.write(b"t" * 4096)
    for number in range(0, 120, 4):
        for part in range(3):
            two.read(100 * part, 100, number + part, into=1000 + 100 * part)
        two.write(1000, 300, number + 3, SIGNALED | FENCE, to=5000)
    assert ids(two.go()) == list(range(120))
    assert two.target.read(5000, 300) == b"t" * 300
    no_trouble(two)


def test_a_peer_that_answers_no_read_is_given_up(two: Two) -> None:
    two.read(0, 8, 0)
    assert ids(two.go()) == [0]
    two.b.destroy()
    for number in range(1, 60):
        two.read(8 * number, 8, number)
    two.a.ring_send()
    while two.world.wait():
        pass
    done = two.a.send_cq.poll()
    assert [wc.wr_id for wc in done] == list(range(1, 60))
    assert done[0].status == WcStatus.RETRY_EXC_ERR
    assert {wc.status for wc in done[1:]} == {WcStatus.WR_FLUSH_ERR}


def test_reads_of_a_queue_pair_in_error_are_flushed(two: Two) -> None:
    two.read(0, 8, 0)
    assert ids(two.go()) == [0]
    for number in range(1, 60):
        two.read(8 * number, 8, number)
    two.a.ring_send()
    two.a.to_error()
    done = two.go()
    assert [wc.wr_id for wc in done] == list(range(1, 60))
    assert {wc.status for wc in done} <= {WcStatus.SUCCESS, WcStatus.WR_FLUSH_ERR}


def test_writes_and_reads_by_turns(two: Two) -> None:
    half = SIZE // 2
    model = two.source.read(0, half)
    for number in range(0, 60, 2):
        two.write(0, half - 17 * number, number)
        two.read(0, half - 17 * number, number + 1, into=half)
    assert ids(two.go()) == list(range(60))
    assert two.target.read(0, half) == model
    assert two.source.read(half, half) == model
    no_trouble(two)


def no_trouble(two: Two) -> None:
    """Nothing was sent twice, refused or out of order: the rings lose nothing."""
    for backend in two.backends:
        counters = backend.counters
        assert (counters.retries, counters.out_of_sequence, counters.naks) == (0, 0, 0)
        assert (counters.duplicate, counters.stale_response, counters.bad_message) == (0, 0, 0)


def test_only_those_that_asked_for_it_complete(two: Two) -> None:
    for number in range(100):
        two.write(100 * number, 100, number, SIGNALED if number % 7 == 3 else 0)
    assert ids(two.go()) == list(range(3, 100, 7))


def test_what_is_different_goes_between_in_its_place(two: Two) -> None:
    for number in range(0, 100, 4):
        two.write(100 * number, 100, number)
        two.write(100 * number + 100, 100, number + 1)
        two.write(100 * number + 200, 0, number + 2)
        two.a.read(
            two.source.sge(SIZE - 8, 8), frm=two.target.remote(100 * number), wr_id=number + 3
        )
    assert ids(two.go()) == list(range(100))
    assert two.source.read(SIZE - 8, 8) == two.target.read(100 * 96, 8)


def test_the_last_write_to_a_place_wins(two: Two) -> None:
    for number in range(300):
        two.write(100 * number, 100, number, to=0)
    two.go()
    assert two.target.read(0, 100) == two.source.read(100 * 299, 100)


def test_sends_after_writes_come_after_them(two: Two) -> None:
    box = two.processes[1].mr(PAGE)
    for number in range(50):
        two.b.post_recv(box.sge(), wr_id=number)
    for number in range(10):
        for part in range(5):
            two.write(500 * number + 100 * part, 100, 6 * number + part)
        two.a.send(two.source.sge(0, 10), wr_id=6 * number + 5)
    assert ids(two.go()) == list(range(60))
    assert len(two.b.recv_cq.poll()) == 10
    assert two.target.read(0, 5000) == two.source.read(0, 5000)


@pytest.mark.parametrize("at", [0, 1, 17, 298])
def test_a_wrong_key_or_place_ends_it_there(two: Two, at: int) -> None:
    for number in range(300):
        two.write(100 * number, 100, number, to=100 * number if number != at else SIZE - 50)
    done = two.go()
    assert [wc.status for wc in done[: at + 1]] == [WcStatus.SUCCESS] * at + [
        WcStatus.REM_ACCESS_ERR
    ]
    assert {wc.status for wc in done[at + 1 :]} == {WcStatus.WR_FLUSH_ERR}
    assert [wc.wr_id for wc in done] == list(range(300))
    assert two.target.read(0, 100 * at) == two.source.read(0, 100 * at)
    assert not any(two.target.read(100 * at, SIZE - 100 * at))


@pytest.mark.parametrize("at", [0, 5, 299])
def test_an_own_key_that_is_wrong_ends_it_there(two: Two, at: int) -> None:
    for number in range(300):
        offset = 100 * number if number != at else SIZE - 50
        two.write(offset, 100, number, to=100 * number)
    done = two.go()
    assert [wc.status for wc in done[: at + 1]] == [WcStatus.SUCCESS] * at + [WcStatus.LOC_PROT_ERR]
    assert [wc.wr_id for wc in done] == list(range(300))
    assert not any(two.target.read(100 * at, SIZE - 100 * at))


def test_a_key_that_went_is_not_used(two: Two) -> None:
    for number in range(100):
        two.write(100 * number, 100, number)
    assert len(two.go()) == 100
    two.processes[1].pd.dereg(two.target.handle)
    for number in range(100):
        two.write(100 * number, 100, number, to=100_000 + 100 * number)
    assert two.go()[0].status == WcStatus.REM_ACCESS_ERR
    assert not any(two.target.read(100_000, 100_000))


@pytest.mark.parametrize(("offset", "length"), [(0, PAGE), (123, 1000), (4000, 5000), (1, 2)])
def test_a_piece_is_memory_in_a_row_and_no_more_than_its_region(
    two: Two, offset: int, length: int
) -> None:
    process = two.processes[1]
    mr = process.mr(length, offset=offset)
    mr.write(bytes(n % 251 for n in range(length)))
    backend = two.backends[1]
    pd = backend._env.keys._by_index[mr.rkey >> 8].pd
    for at in {0, length // 2, length - 1}:
        piece = backend._env.keys.piece_untrusted(pd, mr.rkey, mr.addr + at, REMOTE_WRITE)
        start, end = piece.address - mr.addr, piece.address - mr.addr + len(piece.memory)
        assert 0 <= start <= at < end <= length
        assert bytes(piece.memory) == mr.read(start, end - start)
    for at in (-1, length):
        with pytest.raises(GuestError):
            backend._env.keys.piece_untrusted(pd, mr.rkey, mr.addr + at, REMOTE_WRITE)


class Stranger:
    """A carrier that leads to nobody's peer."""

    def send(self, header: bytes, payload: object) -> bool:
        raise AssertionError("nobody answers a stranger")

    send_many = send


def test_nobody_else_is_let_in(two: Two) -> None:
    two.write(0, 8, 1)
    two.go()
    backend, stranger = two.backends[1], Stranger()
    backend_peer = backend._env.port.route(two.gids[0])
    assert backend_peer is not None
    assert backend.offer(backend_peer, two.b.qpn, WRITE) is not None
    assert backend.offer(backend_peer, two.b.qpn + 1, WRITE) is None
    # PSNs that were, that is expected, and that are not.
    for psn in range(0x1233, 0x1238):
        header = message(
            8, dst_qpn=two.b.qpn, src_qpn=two.a.qpn, psn=psn, rkey=two.target.rkey,
            remote_addr=two.target.addr,
        )  # fmt: skip
        backend.receive(stranger, header, [memoryview(bytes(8))])  # type: ignore[arg-type]
        assert backend.offer(stranger, two.b.qpn, WRITE) is None  # type: ignore[arg-type]
    assert backend.counters.wrong_peer == 5
    assert two.target.read(0, 8) == two.source.read(0, 8)


@pytest.mark.parametrize("answered", [True, False])
def test_reads_that_were_repeated_make_room_for_new_ones(two: Two, answered: bool) -> None:
    """A requester that repeats itself may hear the first answers meanwhile, and then asks for as many as it may."""
    backend, psn = two.backends[1], 0x1234
    peer = backend._env.port.route(two.gids[0])
    assert peer is not None

    def ask(psns: range) -> None:
        for number in psns:
            header = message(
                0, kind=READ_REQUEST, dst_qpn=two.b.qpn, src_qpn=two.a.qpn, psn=number, total=8,
                rkey=two.target.rkey, remote_addr=two.target.addr,
            )  # fmt: skip
            backend.receive(peer, header, ())

    responder = backend._qps[two.b.qpn]._responder
    assert responder is not None
    ask(range(psn, psn + 4))
    if answered:
        while two.world.run():
            pass
        assert not responder.responses.queue
        ask(range(psn, psn + 4))
    ask(range(psn + 4, psn + 6))
    queued = [(response.kind, response.psn) for response in responder.responses.queue]
    if answered:
        assert queued == [(READ_RESPONSE, psn + n) for n in range(2, 6)]
    else:
        assert queued[-1] == (NAK, psn + 4)


def test_a_destroyed_queue_pair_hears_no_more(two: Two) -> None:
    for number in range(100):
        two.write(100 * number, 100, number)
    two.a.ring_send()
    two.a.destroy()
    while two.world.run():
        pass
    assert two.a.send_cq.poll() == []


def test_a_queue_pair_in_error_flushes_what_was_sent(two: Two) -> None:
    two.machines[1].unmap_ram()  # the peer cannot take them
    for number in range(200):
        two.write(100 * number, 100, number)
    two.a.ring_send()
    two.a.to_error()
    done = two.go()
    assert [wc.wr_id for wc in done] == list(range(200))
    assert {wc.status for wc in done} <= {
        WcStatus.SUCCESS,
        WcStatus.WR_FLUSH_ERR,
        WcStatus.REM_ACCESS_ERR,
    }


def test_a_peer_that_does_not_answer_is_given_up(two: Two) -> None:
    two.b.destroy()
    for number in range(200):
        two.write(100 * number, 100, number)
    two.a.ring_send()
    while two.world.wait():
        pass
    done = two.a.send_cq.poll()
    assert [wc.wr_id for wc in done] == list(range(200))
    assert done[0].status == WcStatus.RETRY_EXC_ERR
    assert {wc.status for wc in done[1:]} == {WcStatus.WR_FLUSH_ERR}


def test_indices_that_cannot_be_end_the_queue_pair(two: Two) -> None:
    two.write(0, 100, 1)
    two.a.sq.prod_tail = 0x1234_5678
    two.a.ring_send()
    while two.world.run():
        pass
    assert two.machines[0].errors()
    with pytest.raises(CommandFailed):
        two.a.to_rtr(dest_qpn=two.b.qpn, dgid=two.gids[1])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.integers(0, SIZE // 2 - 1),
            st.integers(0, 9000),
            st.booleans(),
            st.integers(0, SIZE // 2 - 1),
        ),
        max_size=120,
    )
)
def test_any_writes_land_as_in_a_model(two: Two, writes: list[tuple[int, int, bool, int]]) -> None:
    two.target.write(bytes(SIZE))
    model, source = bytearray(SIZE), two.source.read()
    for number, (at, length, signalled, to) in enumerate(writes):
        two.write(at, length, number, SIGNALED if signalled else 0, to)
        model[to : to + length] = source[at : at + length]
    done = two.go()
    assert ids(done) == [n for n, write in enumerate(writes) if write[2]]
    assert two.target.read() == model


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.booleans(), st.booleans(), st.integers(0, SIZE // 2 - 9000), st.integers(0, 9000),
            st.integers(0, SIZE // 2 - 9000),
        ),
        max_size=120,
    )
)  # fmt: skip
def test_any_reads_and_writes_land_as_in_a_model(
    two: Two, requests: list[tuple[bool, bool, int, int, int]]
) -> None:
    # What is read, and what is written from, is what nobody changes: the upper halves.
    half = SIZE // 2
    there, here = bytearray(two.target.read()), bytearray(two.source.read())
    for number, (is_read, signalled, at, length, to) in enumerate(requests):
        flags = SIGNALED if signalled else 0
        if is_read:
            two.read(half + at, length, number, to, flags)
            here[to : to + length] = there[half + at : half + at + length]
        else:
            two.write(half + at, length, number, flags, to)
            there[to : to + length] = here[half + at : half + at + length]
    assert ids(two.go()) == [n for n, request in enumerate(requests) if request[1]]
    assert two.target.read() == there
    assert two.source.read() == here
    no_trouble(two)


@pytest.fixture
def landings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Kind and messages of each call that lands."""
    found: list[tuple[int, int]] = []
    take = Landing.take_untrusted

    def spy(self: Landing, run: Run, tail: int, head: int) -> Landed:
        landed = take(self, run, tail, head)
        found.append((run.kind, landed.messages))
        return landed

    monkeypatch.setattr(Landing, "take_untrusted", spy)
    return found


@built
def test_the_short_cut_is_taken(two: Two, landings: list[tuple[int, int]]) -> None:
    def landed(kind: int) -> list[int]:
        return [messages for its, messages in landings if its == kind]

    for number in range(DEPTH):
        two.write(8 * number, 8, number)
    assert len(two.go()) == DEPTH
    assert (sum(landed(WRITE)) > DEPTH // 2) == two.short_cut
    for number in range(DEPTH):
        two.read(8 * number, 8, number)
    assert len(two.go()) == DEPTH
    for kind in (READ_REQUEST, READ_RESPONSE):
        assert (sum(landed(kind)) > DEPTH - 10) == two.short_cut
        assert len(landed(kind)) <= DEPTH // 2 + 5  # half of guest_qp's max_rd_atomic at a time


@built
def test_as_many_reads_are_under_way_as_the_device_allows(
    landings: list[tuple[int, int]], tmp_path: Path
) -> None:
    limit = SoftConfig().max_qp_rd_atom
    with closing(Two(str(tmp_path), in_a_row=True, reads=limit)) as two:
        two.target.write(random.Random(9).randbytes(SIZE))
        for number in range(DEPTH):
            two.read(2048 * number, 2048, number)
        assert ids(two.go()) == list(range(DEPTH))
        assert two.source.read() == two.target.read()
        no_trouble(two)
    assert (
        limit // 2 < max(messages for kind, messages in landings if kind == READ_REQUEST) <= limit
    )


# --- the consumer's end, and whatever a hostile producer writes -------------------------------

CAPACITY = 2 << 20
# The ring's control words, and how often the consumer writes its own.
HEAD, WANTS, TAIL, ASLEEP = 0, 16, 48, 64
TELL = 2 * (64 << 10)
RUN = {"dst_qpn": 7, "src_qpn": 9, "psn": 0xFF_FFF0, "rkey": 0x1234}
BASE, LENGTH = 0x10_0000, 50_000


def message(payload_length: int, **changes: int) -> bytes:
    """The header of a message of the run."""
    values = {
        "kind": WRITE, "flags": FIRST | LAST, "code": 0, "version": 1, **RUN, "length": payload_length,
        "remote_addr": BASE, "total": payload_length,
    } | changes  # fmt: skip
    return pack_rc(
        values["kind"], values["flags"], values["code"], values["version"], values["dst_qpn"],
        values["src_qpn"], values["psn"], values["length"], values["rkey"], values["remote_addr"],
        values["total"], bytes(4), 0, 0, values.get("offset", 0),
    )  # fmt: skip


class Inbox:
    """A ring with messages, and memory between two fences where they land."""

    def __init__(self, start: int = 0) -> None:
        self.ring = bytearray(CAPACITY)
        self.fenced = bytearray(LENGTH + 2 * PAGE)
        self.words = memoryview(bytearray(PAGE)).cast("Q")
        self.landing = Landing(memoryview(self.ring), self.words)
        self.tail = self.head = start
        self.psn = RUN["psn"]

    def add(self, payload: bytes, **changes: int) -> None:
        header = message(len(payload), **({"psn": self.psn & 0xFF_FFFF} | changes))
        for at, byte in enumerate(header + payload, self.head):
            self.ring[at % CAPACITY] = byte
        self.head += HEADER_BYTES + (len(payload) + 63 & ~63)
        self.psn += 1

    def run(
        self, kind: int = WRITE, *, head: int = -1, word: int = -1, **changes: object
    ) -> Landed:
        """`head` is what was seen of the producer's index before, `word` what it is now."""
        piece = Piece(BASE, memoryview(self.fenced)[PAGE : PAGE + LENGTH])
        run = Run(kind=kind, piece=piece, **RUN | changes)  # type: ignore[arg-type]
        self.words[HEAD] = self.head if word < 0 else word
        return self.landing.take_untrusted(run, self.tail, self.head if head < 0 else head)

    def take(self) -> tuple[int, int]:
        found = self.run()
        assert not any(self.fenced[:PAGE])
        assert not any(self.fenced[PAGE + LENGTH :])
        self.tail = found.tail
        return found.messages, found.length_bytes

    @property
    def memory(self) -> bytes:
        return bytes(self.fenced[PAGE : PAGE + LENGTH])


@built
@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 1000])
def test_the_end_of_the_ring_cuts_a_message_anywhere(length: int) -> None:
    payload = random.Random(length).randbytes(length)
    for before in range(HEADER_BYTES, length + 2 * HEADER_BYTES, 64):
        inbox = Inbox(3 * CAPACITY - before)
        inbox.add(payload, remote_addr=BASE + 5)
        assert inbox.take() == (1, length)
        assert inbox.memory == bytes(5) + payload + bytes(LENGTH - 5 - length)


@built
def test_psns_come_round() -> None:
    inbox = Inbox()
    for number in range(100):
        inbox.add(bytes([number]), remote_addr=BASE + number)
    assert inbox.take() == (100, 100)
    assert inbox.memory[:100] == bytes(range(100))


@built
def test_solicited_and_acknowledged_ones_are_like_the_others() -> None:
    inbox = Inbox()
    inbox.add(b"a", flags=FIRST | LAST | SOLICITED | ACK_REQUEST)
    assert inbox.take() == (1, 1)


@built
@pytest.mark.parametrize(
    "changes",
    [
        {"kind": ACK}, {"kind": 0}, {"flags": FIRST}, {"flags": 0}, {"flags": LAST}, {"flags": FIRST | LAST | WITH_IMM},
        {"version": 2}, {"dst_qpn": 8}, {"src_qpn": 7}, {"psn": 1}, {"psn": 0x0100_0000 | 0xFF_FFF1},
        {"rkey": 0x1235}, {"length": 11}, {"length": 0, "total": 0}, {"total": 9}, {"total": 1 << 31},
        {"length": 1 << 31, "total": 1 << 31}, {"length": 0xFFFF_FFFF, "total": 0xFFFF_FFFF},
        {"length": MAX_CHUNK_BYTES + 1, "total": MAX_CHUNK_BYTES + 1},
        {"remote_addr": BASE - 1}, {"remote_addr": BASE + LENGTH - 9}, {"remote_addr": 0},
        {"remote_addr": (1 << 64) - 5}, {"remote_addr": BASE + LENGTH},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_different_is_left_for_the_usual_way(changes: dict[str, int]) -> None:
    inbox = Inbox()
    inbox.add(b"good")
    inbox.add(b"0123456789", **changes)
    before = inbox.tail
    assert inbox.take() == (1, 4)
    assert inbox.tail == before + 128
    assert inbox.memory == b"good" + bytes(LENGTH - 4)


UNDER_WAY = {"address": BASE + 100, "total": 30, "done": 10}


@built
def test_a_write_of_many_messages() -> None:
    inbox = Inbox()
    inbox.add(b"a" * 10, flags=FIRST, total=30, remote_addr=BASE + 7)
    inbox.add(b"b" * 10, flags=ACK_REQUEST, rkey=0, remote_addr=0, total=0)
    inbox.add(b"c" * 10, flags=LAST)
    inbox.add(b"d" * 5, flags=FIRST, total=20)
    found = inbox.run()
    assert (found.messages, found.length_bytes, found.unanswered) == (4, 35, 1)
    assert (found.address, found.total, found.done) == (BASE, 20, 5)
    assert inbox.memory[:37] == b"d" * 5 + b"\0\0" + b"a" * 10 + b"b" * 10 + b"c" * 10


@built
@pytest.mark.parametrize(
    "changes",
    [
        {"flags": FIRST}, {"flags": FIRST | LAST}, {"flags": LAST}, {"flags": WITH_IMM}, {"psn": 3},
        {"length": 21}, {"flags": LAST, "length": 21}, {"kind": READ_RESPONSE}, {"length": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_on_is_left_for_the_usual_way(changes: dict[str, int]) -> None:
    inbox = Inbox()
    inbox.add(b"x" * 10, **({"flags": 0} | changes))
    found = inbox.run(**UNDER_WAY)
    assert (found.messages, found.tail) == (0, inbox.tail)
    assert (found.address, found.total, found.done) == tuple(UNDER_WAY.values())
    assert not any(inbox.memory)


@built
@pytest.mark.parametrize("total", [LENGTH + 1, 1 << 30, (1 << 30) + 1, 0xFFFF_FFFF])
def test_a_write_that_would_leave_the_piece_does_not_begin(total: int) -> None:
    inbox = Inbox()
    inbox.add(b"x" * 10, flags=FIRST, total=total)
    assert inbox.run().messages == 0


def reads(*pieces: tuple[int, int]) -> bytes:
    """Records of READs into the memory at (offset, length) each."""
    return b"".join(SENT.pack(0, 0, BASE + at, length, 0, 0, 1) for at, length in pieces)


@built
def test_the_data_of_reads() -> None:
    inbox = Inbox()
    for psn, length in ((PSN_MASK, 30), (0, 10), (1, 15)):
        for offset in range(0, length, 10):
            flags = LAST if offset + 10 >= length else 0
            data = bytes([psn + 1 & 7]) * min(10, length - offset)
            inbox.add(data, kind=READ_RESPONSE, flags=flags, psn=psn, offset=offset, total=length)
    records = reads((100, 30), (0, 10), (200, 15), (300, 1))
    found = inbox.run(READ_RESPONSE, psn=PSN_MASK, reads=records)
    assert (found.messages, found.completed, found.done, found.tail) == (6, 3, 0, inbox.head)
    assert inbox.memory[100:130] == bytes(30)
    assert inbox.memory[:10] == b"\1" * 10
    assert inbox.memory[200:216] == b"\2" * 15 + b"\0"


@built
def test_a_read_goes_on_where_it_was() -> None:
    inbox = Inbox()
    inbox.add(b"b" * 10, kind=READ_RESPONSE, flags=LAST, psn=5, offset=20, total=30)
    inbox.add(b"c" * 10, kind=READ_RESPONSE, flags=0, psn=6, offset=0, total=30)
    found = inbox.run(READ_RESPONSE, psn=5, done=20, reads=reads((0, 30), (30, 30)))
    assert (found.messages, found.completed, found.done) == (2, 1, 10)
    assert inbox.memory[:50] == bytes(20) + b"b" * 10 + b"c" * 10 + bytes(10)


@built
@pytest.mark.parametrize(
    ("at", "length"),
    [(LENGTH - 9, 10), (-1, 10), (LENGTH, 1), (0, LENGTH + 1), (-BASE, 10), (0, 0xFFFF_FFFF)],
)
def test_data_does_not_leave_the_piece(at: int, length: int) -> None:
    inbox = Inbox()
    inbox.add(b"x" * 10, kind=READ_RESPONSE, flags=LAST if length == 10 else 0, psn=5)
    found = inbox.run(READ_RESPONSE, psn=5, reads=reads((at, length)))
    assert (found.messages, found.completed, found.tail) == (0, 0, inbox.tail)


@built
def test_requests_of_reads() -> None:
    inbox = Inbox()
    for number in range(20):
        inbox.add(b"", kind=READ_REQUEST, total=10 + number, remote_addr=BASE + number)
    found = inbox.run(READ_REQUEST, limit=16)
    assert (found.messages, found.length_bytes, found.tail) == (16, 0, 16 * HEADER_BYTES)
    asked = [(BASE + n, 10 + n, RUN["psn"] + n & PSN_MASK) for n in range(16)]
    assert list(ASKED.iter_unpack(found.asked)) == asked
    inbox.tail, inbox.head = 0, inbox.head
    for _ in range(100):
        inbox.add(b"", kind=READ_REQUEST, total=1)
    assert inbox.run(READ_REQUEST, limit=1000).messages == MAX_ASKED


@built
@pytest.mark.parametrize(
    "changes",
    [
        {"kind": WRITE}, {"kind": 5}, {"flags": FIRST}, {"flags": LAST}, {"flags": FIRST | LAST | SOLICITED},
        {"version": 0}, {"dst_qpn": 8}, {"src_qpn": 7}, {"psn": 1}, {"rkey": 0x1235}, {"length": 1}, {"offset": 1},
        {"total": 0}, {"total": LENGTH + 1}, {"total": 0xFFFF_FFFF}, {"remote_addr": BASE - 1},
        {"remote_addr": BASE + LENGTH - 9}, {"remote_addr": (1 << 64) - 5},
    ],
    ids=str,
)  # fmt: skip
def test_other_requests_are_left_for_the_usual_way(changes: dict[str, int]) -> None:
    inbox = Inbox()
    inbox.add(b"", **({"kind": READ_REQUEST, "total": 10} | changes))
    found = inbox.run(READ_REQUEST)
    assert (found.messages, found.tail, found.asked) == (0, inbox.tail, b"")


@built
@pytest.mark.parametrize(
    "changes",
    [
        {"kind": WRITE}, {"flags": LAST}, {"flags": FIRST}, {"psn": 6}, {"offset": 0}, {"offset": 11},
        {"length": 0}, {"length": 21}, {"length": 20}, {"length": 0xFFFF_FFFF}, {"src_qpn": 1},
        {"dst_qpn": 1}, {"version": 0},
    ],
    ids=str,
)  # fmt: skip
def test_data_that_nobody_asked_for_is_left_for_the_usual_way(changes: dict[str, int]) -> None:
    inbox = Inbox()
    inbox.add(b"x" * 10, **({"kind": READ_RESPONSE, "flags": 0, "psn": 5, "offset": 10} | changes))
    found = inbox.run(READ_RESPONSE, psn=5, done=10, reads=reads((100, 30)))
    assert (found.messages, found.done) == (0, 10)
    assert not any(inbox.memory)


@built
def test_a_message_that_is_not_all_there_is_left() -> None:
    inbox = Inbox()
    inbox.add(bytes(1000))
    inbox.head -= 64
    assert inbox.take() == (0, 0)
    inbox.head = inbox.tail + 32
    assert inbox.take() == (0, 0)


@built
def test_one_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    for _ in range(MAX_MESSAGES + 10):
        inbox.add(b"x")
    assert inbox.take()[0] == MAX_MESSAGES
    # More than this ring holds, really.
    monkeypatch.setattr(fast_path, "MAX_LANDED", MAX_LANDED // 2)
    inbox = Inbox()
    for _ in range(30):
        inbox.add(bytes(40_000))
    assert MAX_LANDED // 2 <= inbox.take()[1] < MAX_LANDED // 2 + 40_000


@built
def test_what_comes_meanwhile_is_taken_too() -> None:
    inbox = Inbox(5 * CAPACITY)
    inbox.add(b"one")
    seen = inbox.head
    inbox.add(b"two", remote_addr=BASE + 3)
    found = inbox.run(head=seen)
    assert (found.messages, found.tail, found.head) == (2, inbox.head, inbox.head)
    assert inbox.memory[:6] == b"onetwo"


@built
@pytest.mark.parametrize("change", [-128, -64, 32, CAPACITY + 64, 1 << 63], ids=str)
def test_an_index_that_cannot_be_is_left_for_the_usual_way(change: int) -> None:
    inbox = Inbox(5 * CAPACITY)
    inbox.add(b"x" * 10, flags=FIRST, total=30)
    found = inbox.run(word=inbox.head + change)
    assert (found.messages, found.tail, found.head) == (1, inbox.head, inbox.head)


@built
def test_a_producer_that_never_goes_on_is_not_waited_for_long() -> None:
    inbox = Inbox()
    inbox.add(b"x" * 10, flags=FIRST, total=30)
    assert inbox.run().total == 30  # comes back at all: the wait is in `arrived`


@built
@pytest.mark.parametrize(("wants", "behind", "landed"), [(0, 0, 8), (1, 0, 1), (1, CAPACITY, 7)])
def test_a_producer_that_sleeps_is_woken_early(wants: int, behind: int, landed: int) -> None:
    inbox = Inbox()
    for _ in range(8):
        inbox.add(bytes(45_000))
        inbox.add(bytes(40_000))
    inbox.words[WANTS] = wants
    # Here the ring is full behind these: while a producer wakes up there must be work left, a quarter free is enough.
    found = inbox.run(word=inbox.head + min(behind, CAPACITY - inbox.head))
    assert found.messages == 2 * landed
    assert inbox.words[TAIL] in range(found.tail - TELL, found.tail + 1)


@built
@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=2000),
    st.integers(0, 60),
    st.integers(0, CAPACITY // 64 - 1),
    st.sampled_from([WRITE, READ_REQUEST, READ_RESPONSE]),
)
def test_any_bytes_in_the_ring(data: bytes, behind: int, start: int, kind: int) -> None:
    inbox = Inbox(64 * start)
    if kind == READ_REQUEST:
        inbox.add(b"", kind=kind, total=10)
    else:
        inbox.add(b"first", kind=kind, flags=LAST if kind == READ_RESPONSE else FIRST | LAST)
    for at, byte in enumerate(data, inbox.head):
        inbox.ring[at % CAPACITY] = byte
    inbox.head += behind * 64
    found = inbox.run(kind, reads=reads((0, 5), (10, LENGTH - 10)))
    assert found.messages >= 1
    assert found.tail <= inbox.head
    assert not any(inbox.fenced[:PAGE])
    assert not any(inbox.fenced[PAGE + LENGTH :])


# --- the producer's end -----------------------------------------------------------------------


@built
def test_a_full_ring_is_left_before_its_reserve() -> None:
    view = memoryview(bytearray(PAGE + CAPACITY))
    writer, reader = RingWriter(view), RingReader(view)
    with tempfile.TemporaryDirectory(prefix="pvrdma-fabric-") as folder:
        two = Two(folder)
        for number in range(DEPTH):
            two.write(0, 4000, number)
        entries = two.machines[0].device.resources.qps.get_untrusted(two.a.handle).peek_sends()
        assert entries is not None
        what = _posting(two, entries)
        sent = 0
        while (posted := writer.put_many_untrusted(what)) is not None:
            sent += posted.messages
            assert posted.messages == len(posted.records) // SENT.size
        size = HEADER_BYTES + 4032
        assert sent == (CAPACITY - RESERVE_BYTES) // size
        assert writer.head == sent * size
        taken: list[int] = []
        reader.take_untrusted(
            1 << 20, lambda _, payload: taken.append(len(payload[0])), lambda: None
        )
        assert taken == [4000] * sent
        two.close()


def _ring() -> tuple[memoryview, RingWriter]:
    view = memoryview(bytearray(PAGE + CAPACITY))
    return view, RingWriter(view)


LONG = 300_000


@pytest.fixture
def long_writes() -> Iterator[Requests]:
    """Eight WRITEs of `LONG` bytes each, in messages of up to 100 000."""
    with tempfile.TemporaryDirectory(prefix="pvrdma-fabric-") as folder:
        two = Two(folder, in_a_row=True)
        for number in range(8):
            two.write(number, LONG, number)
        entries = two.machines[0].device.resources.qps.get_untrusted(two.a.handle).peek_sends()
        assert entries is not None
        yield _posting(two, entries)._replace(chunk_bytes=100_000)
        two.close()


@built
def test_a_write_is_sent_whole_or_not_at_all(long_writes: Requests) -> None:
    view, writer = _ring()
    posted = writer.put_many_untrusted(long_writes)
    assert posted is not None
    size = 3 * (HEADER_BYTES + 100_032)
    count = min(-(-MAX_BYTES // LONG), (CAPACITY - RESERVE_BYTES) // size)
    assert (posted.messages, posted.head) == (3 * count, count * size)
    assert [record[0] for record in SENT.iter_unpack(posted.records)] == list(range(count))
    assert {record[-1] for record in SENT.iter_unpack(posted.records)} == {3}
    reader, seen = RingReader(view), []
    reader.take_untrusted(
        100, lambda header, payload: seen.append((header[1], len(payload[0]))), lambda: None
    )
    assert seen == [(FIRST, 100_000), (0, 100_000), (LAST, 100_000)] * count


@built
@pytest.mark.parametrize("asleep", [0, 1])
def test_room_that_is_made_meanwhile_is_used(long_writes: Requests, asleep: int) -> None:
    view, writer = _ring()
    words = view[:PAGE].cast("Q")
    writer.head = writer.tail = 0
    writer._posting.put_untrusted(long_writes, 0, 0)  # type: ignore[union-attr]
    words[ASLEEP], words[TAIL] = asleep, 1 << 20
    # As if the tail had been seen at 0.
    posted = writer._posting.put_untrusted(long_writes, 1 << 20, 0)  # type: ignore[union-attr]
    assert len(posted.records) // SENT.size == min(-(-MAX_BYTES // LONG), 6)


@built
@pytest.mark.parametrize("tail", [32, 1 << 22, 1 << 63], ids=str)
def test_room_that_cannot_be_is_not_used(long_writes: Requests, tail: int) -> None:
    view, writer = _ring()
    view[:PAGE].cast("Q")[TAIL] = tail
    posted = writer._posting.put_untrusted(long_writes, 1 << 20, 0)  # type: ignore[union-attr]
    size = 3 * (HEADER_BYTES + 100_032)
    assert len(posted.records) // SENT.size == (CAPACITY - RESERVE_BYTES - (1 << 20)) // size


def _posting(two: Two, entries: SendEntries, opcode: int = OP_WRITE) -> Requests:
    offset = two.source.pages.pages[0] - two.machines[0].ram.iova
    length = SIZE if two.in_a_row else PAGE
    piece = Piece(two.source.addr, two.machines[0].ram.view[offset : offset + length])
    return Requests(entries, opcode, two.source.lkey, piece, 256, 1 << 30, MAX_CHUNK_BYTES, 1, 2, 3)


# --- what was sent, until it is acknowledged --------------------------------------------------


def sent(first: int, count: int, each: int = 1) -> SentMany:
    records = b"".join(SENT.pack(n, 0, 0, 10, 0, SIGNALED * (n % 2), each) for n in range(count))
    return SentMany(Posted(each * count, 10 * count, 0, records), first, WRITE, 5, signal_all=False)


def test_they_complete_from_the_front() -> None:
    queue = SendQueue()
    queue.add_many(sent(100, 10))
    assert (queue.taken, queue.flying) == (10, 100)
    writes = queue.many_at_head()
    assert writes is not None
    assert queue.take_many(writes, 103) == [(1, 10), (3, 10)]
    assert (queue.taken, queue.flying, writes.first) == (6, 60, 104)
    assert queue.take_many(writes, 1000) == [(5, 10), (7, 10), (9, 10)]
    assert (queue.taken, queue.flying, queue.idle) == (0, 0, True)


def test_who_goes_back_makes_ordinary_requests_of_them() -> None:
    queue = SendQueue()
    queue.add_many(sent(100, 10))
    queue.go_back(104)
    assert [wqe.first for wqe in queue.unacked] == [100, 101, 102, 103]
    assert [wqe.first for wqe in queue.resend] == [104, 105, 106, 107, 108, 109]
    assert (queue.taken, queue.flying) == (4, 0)


def test_the_oldest_is_an_ordinary_request() -> None:
    queue = SendQueue()
    queue.add_many(sent(100, 3))
    head = queue.head()
    assert type(head) is Wqe
    assert (head.first, head.last, head.wr.wr_id, head.total) == (100, 100, 0, 10)
    assert (queue.taken, queue.flying) == (3, 30)
    assert [queue.pop_any() is not None for _ in range(4)] == [True] * 3 + [False]
    assert queue.flying == 0


def test_one_of_many_messages_completes_with_its_last() -> None:
    queue = SendQueue()
    queue.add_many(sent(100, 4, each=3))
    writes = queue.many_at_head()
    assert writes is not None
    for psn in (100, 101):
        assert queue.take_many(writes, psn) == []
        assert (queue.taken, queue.flying, writes.first, writes.first_last) == (4, 40, 100, 102)
    assert queue.take_many(writes, 106) == [(1, 10)]
    assert (queue.taken, queue.flying, writes.first, writes.first_last) == (2, 20, 106, 108)
    assert queue.take_many(writes, 111) == [(3, 10)]
    assert (queue.taken, queue.flying, queue.idle) == (0, 0, True)


def test_who_goes_back_into_the_middle_of_one_repeats_that_one() -> None:
    queue = SendQueue()
    queue.add_many(sent(100, 4, each=3))
    queue.go_back(104)
    assert [(wqe.first, wqe.last) for wqe in queue.unacked] == [(100, 102)]
    assert [(wqe.first, wqe.last) for wqe in queue.resend] == [(103, 105), (106, 108), (109, 111)]
    again = queue.next_resend(104)
    assert again is not None
    assert (again.first, again.next) == (103, 104)


def reads_sent(first: int, count: int) -> SentMany:
    records = b"".join(SENT.pack(n, 0, 0, 10, 0, SIGNALED, 1) for n in range(count))
    return SentMany(Posted(count, 0, 0, records), first, READ_REQUEST, 5, signal_all=False)


def test_reads_that_follow_reads_are_one_with_them() -> None:
    queue = SendQueue()
    queue.add_many(reads_sent(100, 3))
    queue.add_many(reads_sent(103, 2))
    many = queue.many_at_head()
    assert many is not None
    assert (len(queue.unacked), queue.taken, many.first, many.last) == (1, 5, 100, 104)
    assert queue.take_many(many, 103) == [(0, 10), (1, 10), (2, 10), (0, 10)]
    assert (queue.taken, queue.flying, many.first) == (1, 0, 104)
    queue.add_many(reads_sent(106, 1))
    assert len(queue.unacked) == 2


def test_reads_that_are_repeated_go_on_where_they_were() -> None:
    queue = SendQueue()
    queue.add_many(reads_sent(100, 3))
    many = queue.many_at_head()
    assert many is not None
    many.received = 7
    queue.go_back(100)
    assert [(wqe.kind, wqe.first, wqe.last, wqe.received) for wqe in queue.resend] == [
        (READ_REQUEST, 100, 100, 7),
        (READ_REQUEST, 101, 101, 0),
        (READ_REQUEST, 102, 102, 0),
    ]
    assert {wqe.wr.opcode for wqe in queue.resend} == {OP_READ}
    assert (queue.taken, queue.flying) == (0, 0)

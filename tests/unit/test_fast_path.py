"""The short cut for WRITEs and the data of READs: two machines, real rings; the same with it and without it."""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

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
from pvrdma_server.backend_soft.codes import REMOTE_WRITE
from pvrdma_server.backend_soft.fast_path import (
    MAX_BYTES,
    MAX_LANDED,
    MAX_MESSAGES,
    SENT,
    Landed,
    Landing,
    Piece,
    Posted,
    Run,
    WritePosting,
)
from pvrdma_server.backend_soft.shm_ring import RESERVE_BYTES, RingReader, RingWriter
from pvrdma_server.backend_soft.wire import (
    ACK,
    ACK_REQUEST,
    FIRST,
    HEADER_BYTES,
    LAST,
    MAX_CHUNK_BYTES,
    READ_RESPONSE,
    SOLICITED,
    WITH_IMM,
    WRITE,
    pack_rc,
)
from pvrdma_server.backend_soft.wqe import SendQueue, SentWrites, Wqe
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
        connect(self.a, self.b, *self.gids)
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

    def read(self, at: int, length: int, wr_id: int, into: int = -1) -> None:
        """Likewise, in the same place unless told otherwise."""
        self.a.ring_send, ring = lambda: None, self.a.ring_send  # type: ignore[method-assign]
        try:
            local = self.source.sge(at if into < 0 else into, length)
            self.a.read(local, frm=self.target.remote(at), wr_id=wr_id)
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

    send_writes = send_chunks = send


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


@built
def test_the_short_cut_is_taken(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    landed: list[int] = []
    take = Landing.take_untrusted

    def spy(self: Landing, run: Run, tail: int, head: int) -> Landed:
        found = take(self, run, tail, head)
        landed.append(found.messages)
        return found

    monkeypatch.setattr(Landing, "take_untrusted", spy)
    for number in range(DEPTH):
        two.write(8 * number, 8, number)
    assert len(two.go()) == DEPTH
    assert (sum(landed) > DEPTH // 2) == two.short_cut


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

    def run(self, kind: int = WRITE, *, head: int = -1, word: int = -1, **changes: int) -> Landed:
        """`head` is what was seen of the producer's index before, `word` what it is now."""
        piece = Piece(BASE, memoryview(self.fenced)[PAGE : PAGE + LENGTH])
        values = {"address": 0, "total": 0, "done": 0, **RUN} | changes
        run = Run(kind=kind, piece=piece, **values)
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


@built
def test_the_data_of_a_read() -> None:
    inbox = Inbox()
    for number in range(3):
        flags = LAST if number == 2 else 0
        data = bytes([number]) * 10
        inbox.add(data, kind=READ_RESPONSE, flags=flags, psn=5, offset=10 * number, total=30)
    found = inbox.run(READ_RESPONSE, psn=5, address=BASE + 100, total=30, done=0)
    assert (found.messages, found.done, found.tail) == (3, 30, inbox.head)
    assert inbox.memory[100:130] == bytes(10) + b"\1" * 10 + b"\2" * 10


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
    found = inbox.run(READ_RESPONSE, psn=5, **UNDER_WAY)
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
@given(st.binary(max_size=2000), st.integers(0, 60), st.integers(0, CAPACITY // 64 - 1))
def test_any_bytes_in_the_ring(data: bytes, behind: int, start: int) -> None:
    inbox = Inbox(64 * start)
    inbox.add(b"first")
    for at, byte in enumerate(data, inbox.head):
        inbox.ring[at % CAPACITY] = byte
    inbox.head += behind * 64
    assert inbox.take()[0] >= 1
    assert inbox.tail <= inbox.head


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
        while (posted := writer.put_writes_untrusted(what)) is not None:
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
def long_writes() -> Iterator[WritePosting]:
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
def test_a_write_is_sent_whole_or_not_at_all(long_writes: WritePosting) -> None:
    view, writer = _ring()
    posted = writer.put_writes_untrusted(long_writes)
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
def test_room_that_is_made_meanwhile_is_used(long_writes: WritePosting, asleep: int) -> None:
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
def test_room_that_cannot_be_is_not_used(long_writes: WritePosting, tail: int) -> None:
    view, writer = _ring()
    view[:PAGE].cast("Q")[TAIL] = tail
    posted = writer._posting.put_untrusted(long_writes, 1 << 20, 0)  # type: ignore[union-attr]
    size = 3 * (HEADER_BYTES + 100_032)
    assert len(posted.records) // SENT.size == (CAPACITY - RESERVE_BYTES - (1 << 20)) // size


def _posting(two: Two, entries: SendEntries) -> WritePosting:
    offset = two.source.pages.pages[0] - two.machines[0].ram.iova
    length = SIZE if two.in_a_row else PAGE
    piece = Piece(two.source.addr, two.machines[0].ram.view[offset : offset + length])
    return WritePosting(entries, two.source.lkey, piece, 256, 1 << 30, MAX_CHUNK_BYTES, 1, 2, 3)


# --- what was sent, until it is acknowledged --------------------------------------------------


def sent(first: int, count: int, each: int = 1) -> SentWrites:
    records = b"".join(SENT.pack(n, 0, 0, 10, 0, SIGNALED * (n % 2), each) for n in range(count))
    return SentWrites(Posted(each * count, 10 * count, 0, records), first, 5, signal_all=False)


def test_they_complete_from_the_front() -> None:
    queue = SendQueue()
    queue.add_writes(sent(100, 10))
    assert (queue.taken, queue.flying) == (10, 100)
    writes = queue.writes_at_head()
    assert writes is not None
    assert queue.take_writes(writes, 103) == [(1, 10), (3, 10)]
    assert (queue.taken, queue.flying, writes.first) == (6, 60, 104)
    assert queue.take_writes(writes, 1000) == [(5, 10), (7, 10), (9, 10)]
    assert (queue.taken, queue.flying, queue.idle) == (0, 0, True)


def test_who_goes_back_makes_ordinary_requests_of_them() -> None:
    queue = SendQueue()
    queue.add_writes(sent(100, 10))
    queue.go_back(104)
    assert [wqe.first for wqe in queue.unacked] == [100, 101, 102, 103]
    assert [wqe.first for wqe in queue.resend] == [104, 105, 106, 107, 108, 109]
    assert (queue.taken, queue.flying) == (4, 0)


def test_the_oldest_is_an_ordinary_request() -> None:
    queue = SendQueue()
    queue.add_writes(sent(100, 3))
    head = queue.head()
    assert type(head) is Wqe
    assert (head.first, head.last, head.wr.wr_id, head.total) == (100, 100, 0, 10)
    assert (queue.taken, queue.flying) == (3, 30)
    assert [queue.pop_any() is not None for _ in range(4)] == [True] * 3 + [False]
    assert queue.flying == 0


def test_one_of_many_messages_completes_with_its_last() -> None:
    queue = SendQueue()
    queue.add_writes(sent(100, 4, each=3))
    writes = queue.writes_at_head()
    assert writes is not None
    for psn in (100, 101):
        assert queue.take_writes(writes, psn) == []
        assert (queue.taken, queue.flying, writes.first, writes.first_last) == (4, 40, 100, 102)
    assert queue.take_writes(writes, 106) == [(1, 10)]
    assert (queue.taken, queue.flying, writes.first, writes.first_last) == (2, 20, 106, 108)
    assert queue.take_writes(writes, 111) == [(3, 10)]
    assert (queue.taken, queue.flying, queue.idle) == (0, 0, True)


def test_who_goes_back_into_the_middle_of_one_repeats_that_one() -> None:
    queue = SendQueue()
    queue.add_writes(sent(100, 4, each=3))
    queue.go_back(104)
    assert [(wqe.first, wqe.last) for wqe in queue.unacked] == [(100, 102)]
    assert [(wqe.first, wqe.last) for wqe in queue.resend] == [(103, 105), (106, 108), (109, 111)]
    again = queue.next_resend(104)
    assert again is not None
    assert (again.first, again.next) == (103, 104)

"""One call of a lane: what it does with what a guest and a peer have written, whatever that is."""

import random
import socket
import struct
from array import array
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from guest import PAGE
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.test_fast_path import BASE, CAPACITY, LENGTH, RUN, message

from pvrdma_server.backend import CompletionSlots, SendEntries, SendLane
from pvrdma_server.backend_soft import lane, native
from pvrdma_server.backend_soft.fast_path import SENT, Piece, Run
from pvrdma_server.backend_soft.lane import Bell, Driver, Drove, Lane, Sends
from pvrdma_server.backend_soft.native import Lingered
from pvrdma_server.backend_soft.shm_ring import RESERVE_BYTES, RingReader, RingWriter
from pvrdma_server.backend_soft.wire import ACK, FIRST, HEADER_BYTES, LAST, WRITE, pack_rc

pytestmark = pytest.mark.skipif(native.extension is None, reason="the extension is not built")

DEPTH, CQ_DEPTH, ENTRY_BYTES, CQE_BYTES = 16, 8, 128, 64
IDLE_NS = 20_000
LKEY, PSN = 0x77, 0xFF_FFF8
# The ring's control words.
HEAD, TAIL, ASLEEP = 0, 48, 64
# See vmw_pvrdma_abi.SqWqeHdr and what follows it: an RDMA WRITE of one element.
ENTRY = struct.Struct("<QIIIIIIQI36xQII")
SIGNALED = 2


def between(fenced: bytearray) -> memoryview:
    return memoryview(fenced)[PAGE:-PAGE]


def rows(ring: memoryview, size: int, index: int, most: int) -> list[memoryview]:
    """The ring's slots from that of the index on, around it, up to `most` in a row."""
    first, count = index % (len(ring) // size), len(ring) // size
    starts = [*range(first, count, most), *range(0, first, most)]
    ends = [min(start + most, count if start >= first else first) for start in starts]
    return [ring[a * size : b * size] for a, b in zip(starts, ends, strict=True)]


class Side:
    """One end of a link, its guest's queues and memory between fences, and the other end as a test wants it."""

    def __init__(self) -> None:
        views = [memoryview(bytearray(PAGE + CAPACITY)) for _ in range(2)]
        self.writer, self.reader = RingWriter(views[0]), RingReader(views[1])
        self.heard, self.says = RingReader(views[0]), RingWriter(views[1])
        self.out_words, self.in_words = (view[:PAGE].cast("Q") for view in views)
        self.in_data = views[1][PAGE:]
        self.bell, self.hears = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.hears.setblocking(False)
        self.signalled = memoryview(bytearray(1))
        self.look_in_c: tuple[int, int] | None = None
        self.driver = Driver(
            self.writer.memory, self.reader.memory, RESERVE_BYTES, Bell(self.bell.fileno(), self)
        )
        sizes = (DEPTH * ENTRY_BYTES, CQ_DEPTH * CQE_BYTES, LENGTH, LENGTH)
        self.fenced = [bytearray(2 * PAGE + size) for size in sizes]
        self.slots, self.cqes, self.source, self.target = map(between, self.fenced)
        self.source[:] = random.Random(5).randbytes(LENGTH)
        self.sq, self.cq = (memoryview(bytearray(8)).cast("I") for _ in range(2))
        self.sent: list[tuple[int, int]] = []  # what is under way: wr_id and length
        self.first = PSN

    def close(self) -> None:
        self.bell.close()
        self.hears.close()

    def post(self, wr_id: int, length: int = 8, flags: int = SIGNALED, **changes: int) -> None:
        """As the guest's library does."""
        values = {"num_sge": 1, "opcode": 0, "addr": BASE, "lkey": LKEY} | changes
        at = (self.sq[0] % DEPTH) * ENTRY_BYTES
        ENTRY.pack_into(
            self.slots, at, wr_id, values["num_sge"], length, values["opcode"], flags, 0, 0, 0xAA00, 0xBB,
            values["addr"], length, values["lkey"],
        )  # fmt: skip
        self.sq[0] = (self.sq[0] + 1) % (2 * DEPTH)

    def say(self, header: bytes, payload: bytes = b"") -> None:
        assert self.says.put(header, [memoryview(payload)] if payload else ())

    def acknowledge(self, psn: int, **changes: int) -> None:
        values = {"flags": LAST, "code": 0, "version": 1, "dst_qpn": 7, "src_qpn": 9} | changes
        self.say(
            pack_rc(
                ACK, values["flags"], values["code"], values["version"], values["dst_qpn"],
                values["src_qpn"], psn & 0xFF_FFFF, 0, 0, 0, 0, bytes(4), 0, 0, 0,
            )
        )  # fmt: skip

    def drive(self, *, lands: bool = True, sends: bool = True, **changes: Any) -> Drove:
        piece = Piece(BASE, self.target)
        run = (
            Run(WRITE, RUN["dst_qpn"], RUN["src_qpn"], RUN["psn"], RUN["rkey"], piece)
            if lands
            else None
        )
        row_slots, shown = changes.pop("row_slots", DEPTH), changes.pop("shown", None)
        cqes = rows(self.cqes, CQE_BYTES, self.cq[0], row_slots)[:shown]
        done = CompletionSlots(
            self.cq, self.cq[0], 2 * CQ_DEPTH - 1, CQ_DEPTH, cqes, bytes([3]) * CQE_BYTES,
            changes.pop("report", False),
        )  # fmt: skip
        head = self.sq[1]
        slots = rows(self.slots, ENTRY_BYTES, head, row_slots)[:shown]
        entries = SendEntries(self.sq, head, 2 * DEPTH - 1, slots, ENTRY_BYTES, False)
        records = b"".join(
            SENT.pack(wr_id, 0, BASE, length, 0, SIGNALED, 1) for wr_id, length in self.sent
        )
        values: dict[str, Any] = {
            "owner": SendLane(entries, done, -1), "lkey": LKEY, "piece": Piece(BASE, self.source),
            "records": records,
            "first": self.first & 0xFF_FFFF, "psn": (self.first + len(self.sent)) & 0xFF_FFFF,
            "acked": (self.first - 1) & 0xFF_FFFF, "room": DEPTH, "flying": sum(n for _, n in self.sent),
            "window": 1 << 20,
        } | changes  # fmt: skip
        what = Lane(RUN["dst_qpn"], RUN["src_qpn"], 65536, run, Sends(**values) if sends else None)
        drove = self.driver.drive_untrusted(
            what,
            (self.writer.head, self.writer.tail),
            (self.reader.seen, self.reader.tail),
            IDLE_NS,
        )
        self.check(drove)
        return drove

    def check(self, drove: Drove) -> None:
        """What holds whatever happened."""
        for fenced in self.fenced:
            assert not any(fenced[:PAGE])
            assert not any(fenced[-PAGE:])
        assert drove.in_tail <= drove.in_head
        assert drove.in_head - drove.in_tail <= CAPACITY
        assert 0 <= drove.out_head - drove.out_tail <= CAPACITY
        assert self.in_words[TAIL] == drove.in_tail
        assert drove.taken <= DEPTH
        assert drove.completions <= CQ_DEPTH

    def completed(self) -> list[tuple[int, int]]:
        """wr_id and byte_len of what lies in the completion queue."""
        found = []
        for index in range(self.cq[1], self.cq[1] + (self.cq[0] - self.cq[1]) % (2 * CQ_DEPTH)):
            cqe = self.cqes[index % CQ_DEPTH * CQE_BYTES :][:CQE_BYTES]
            assert bytes(cqe[8:24]) + bytes(cqe[28:]) == bytes([3]) * 52
            found.append(struct.unpack_from("<Q16xI", cqe))
        return found

    def said(self) -> list[tuple[int, int, bytes]]:
        """Kind, PSN and payload of what it sent."""
        found: list[tuple[int, int, bytes]] = []
        self.heard.take_untrusted(
            1 << 20,
            lambda header, payload: found.append(
                (header[0], struct.unpack_from("<I", header, 12)[0], b"".join(payload))
            ),
            lambda: None,
        )
        return found


@pytest.fixture
def side() -> Iterator[Side]:
    with closing(Side()) as made:
        yield made


def test_all_that_it_does(side: Side) -> None:
    side.sent = [(100, 10), (101, 20)]
    side.acknowledge(PSN + 1)
    side.say(message(5), b"hello")
    for wr_id in range(3):
        side.post(wr_id, 8, flags=SIGNALED if wr_id == 2 else 0)
    drove = side.drive()
    assert side.completed() == [(100, 10), (101, 20)]
    assert bytes(side.target[:5]) == b"hello"
    sent = side.said()
    assert (ACK, RUN["psn"], b"") in sent
    writes = [(psn, payload) for kind, psn, payload in sent if kind == WRITE]
    assert writes == [((PSN + 2 + n) & 0xFF_FFFF, bytes(side.source[:8])) for n in range(3)]
    assert (drove.landed, drove.acks, drove.answered, drove.taken, drove.posted) == (1, 1, 1, 3, 3)
    assert (drove.completions, drove.unanswered, drove.worked) == (2, None, 5)
    assert [record[0] for record in SENT.iter_unpack(drove.records)] == [0, 1, 2]
    assert drove.first == (PSN + 2) & 0xFF_FFFF
    assert side.sq[1] == 3
    assert drove.seen == Lingered.NOTHING


@pytest.mark.parametrize("asleep", [0, 1])
def test_a_peer_that_sleeps_is_woken_once(side: Side, asleep: int) -> None:
    side.out_words[ASLEEP] = asleep
    side.post(1)
    side.say(message(5), b"hello")
    assert side.drive().rung == asleep
    if asleep:
        assert side.hears.recv(10) == b"\1"
    with pytest.raises(BlockingIOError):
        side.hears.recv(10)


@pytest.mark.parametrize(
    "changes",
    [
        {"psn": PSN + 2}, {"psn": PSN - 1}, {"psn": PSN + 0x80_0000}, {"flags": FIRST}, {"code": 1}, {"version": 2},
        {"dst_qpn": 8}, {"src_qpn": 8},
    ],
    ids=str,
)  # fmt: skip
def test_an_acknowledgement_of_something_else_is_left(side: Side, changes: dict[str, int]) -> None:
    side.sent = [(1, 8), (2, 8)]
    side.acknowledge(**{"psn": PSN} | changes)
    drove = side.drive()
    assert (drove.acks, drove.completions, drove.in_tail) == (0, 0, 0)
    assert drove.seen == Lingered.CHANGED
    assert len(drove.records) == 2 * SENT.size


def test_an_acknowledgement_of_what_nobody_sends_is_left(side: Side) -> None:
    side.acknowledge(PSN)
    assert side.drive(sends=False).in_tail == 0


def test_an_acknowledgement_twice_counts_once(side: Side) -> None:
    side.sent = [(1, 8), (2, 8)]
    side.acknowledge(PSN)
    side.acknowledge(PSN)
    drove = side.drive()
    assert (drove.acks, drove.completions, drove.in_tail) == (1, 1, HEADER_BYTES)


@pytest.mark.parametrize(
    "changes",
    [{"opcode": 4}, {"num_sge": 2}, {"flags": 4}, {"lkey": LKEY + 1}, {"length": 0}, {"addr": BASE + LENGTH - 7}],
    ids=str,
)  # fmt: skip
def test_a_request_that_is_different_is_left(side: Side, changes: dict[str, int]) -> None:
    side.post(1)
    side.post(2, **changes)
    drove = side.drive()
    assert (drove.taken, side.sq[1], drove.unusual) == (1, 1, True)
    assert drove.seen == Lingered.CHANGED


@pytest.mark.parametrize("tail", [DEPTH + 1, 2 * DEPTH, 1 << 31], ids=str)
def test_a_send_queue_whose_index_cannot_be_is_left(side: Side, tail: int) -> None:
    side.sq[0] = tail
    drove = side.drive()
    assert (drove.taken, side.sq[1], drove.unusual) == (0, 0, True)


def test_no_more_are_under_way_than_there_is_room(side: Side) -> None:
    for wr_id in range(10):
        side.post(wr_id, 100)
    assert side.drive(room=3).taken == 3
    side.sq[1] = 0
    assert side.drive(window=250).taken == 3


def test_what_is_acknowledged_makes_room(side: Side) -> None:
    side.sent = [(1, 100)]
    side.acknowledge(PSN)
    side.post(2, 100)
    drove = side.drive(window=100)
    assert (drove.taken, drove.completions) == (1, 1)


@pytest.mark.parametrize("head", [0, 2 * CQ_DEPTH, 1 << 31], ids=str)
def test_a_completion_queue_without_room_is_left(side: Side, head: int) -> None:
    """Full, or with an index that cannot be."""
    side.cq[0], side.cq[1] = CQ_DEPTH, head
    side.sent = [(1, 8)]
    side.acknowledge(PSN)
    drove = side.drive()
    assert (drove.acks, drove.completions, side.cq[0]) == (1, 0, CQ_DEPTH)
    assert drove.seen == Lingered.CHANGED
    assert len(drove.records) == SENT.size
    assert not any(side.cqes)


def test_who_waits_to_be_told_is_told_at_once(side: Side) -> None:
    side.sent = [(1, 8), (2, 8)]
    side.acknowledge(PSN)
    drove = side.drive(report=True)
    assert (drove.completions, drove.seen) == (1, Lingered.CHANGED)


def test_who_has_something_else_to_do_is_called_away(side: Side) -> None:
    side.signalled[0] = 1
    side.post(1)
    drove = side.drive()
    assert (drove.taken, drove.seen) == (1, Lingered.STOPPED)


def test_it_ends_in_time(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on and on."""
    monkeypatch.setattr(lane, "LANE_NS", 0)
    side.driver = Driver(
        side.writer.memory, side.reader.memory, RESERVE_BYTES, Bell(side.bell.fileno(), side)
    )
    for number in range(10_000):
        side.say(message(1, psn=(RUN["psn"] + number) & 0xFF_FFFF), b"x")
    drove = side.drive()
    assert 0 < drove.landed <= 4 * 256
    assert drove.seen == Lingered.CHANGED


@pytest.mark.parametrize("head", [32, CAPACITY + 64, 1 << 63], ids=str)
def test_a_producer_whose_index_cannot_be_is_left(side: Side, head: int) -> None:
    side.in_words[HEAD] = head
    drove = side.drive()
    assert (drove.in_tail, drove.seen) == (0, Lingered.CHANGED)


@pytest.mark.parametrize("tail", [32, 64, 1 << 63], ids=str)
def test_a_consumer_whose_index_cannot_be_makes_no_room(side: Side, tail: int) -> None:
    side.writer.head = CAPACITY - RESERVE_BYTES
    side.out_words[TAIL] = tail if tail != 64 else CAPACITY
    side.post(1)
    drove = side.drive()
    assert (drove.taken, drove.out_head) == (0, CAPACITY - RESERVE_BYTES)


def test_an_answer_may_use_what_is_kept_for_it(side: Side) -> None:
    side.writer.head = CAPACITY - RESERVE_BYTES
    side.say(message(5), b"hello")
    assert side.drive().answered == 1


def test_what_cannot_be_answered_is_said_to_the_caller(side: Side) -> None:
    side.writer.head = CAPACITY
    side.say(message(5), b"hello")
    drove = side.drive()
    assert (drove.landed, drove.answered, drove.unanswered) == (1, 0, 0)


WORDS = st.integers(0, 2 * DEPTH) | st.integers(0, (1 << 32) - 1)


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(max_size=1500),
    heads=st.integers(0, 30) | st.integers(0, 1 << 60),
    tail=st.integers(0, 30) | st.integers(0, 1 << 60),
    words=st.tuples(WORDS, WORDS, WORDS),
    entries=st.binary(max_size=3 * ENTRY_BYTES),
    acked=st.integers(0, 3),
)
def test_any_bytes_anywhere(
    data: bytes, heads: int, tail: int, words: tuple[int, int, int], entries: bytes, acked: int
) -> None:
    with closing(Side()) as side:
        side.sent = [(number, 8) for number in range(3)]
        for number in range(3):
            side.post(number)
        side.acknowledge(PSN - 1 + acked)
        side.say(message(5), b"hello")
        at = side.says.head
        side.in_data[at : at + len(data)] = data
        side.slots[ENTRY_BYTES : ENTRY_BYTES + len(entries)] = entries
        side.in_words[HEAD] = at + heads * 64 & (1 << 64) - 1
        side.out_words[TAIL] = tail * 64 & (1 << 64) - 1
        side.sq[0], side.cq[1] = words[:2]
        drove = side.drive()
        assert drove.posted >= drove.taken
        assert (side.cq[0] - drove.completions) % (2 * CQ_DEPTH) == 0
        assert side.sq[1] == drove.taken


@pytest.mark.parametrize("row_slots", [1, 3, 7])
def test_queues_that_lie_row_by_row_are_one_lane(side: Side, row_slots: int) -> None:
    # Around both rings: they begin in the middle of a row, and go on at the start.
    side.sq[:], side.cq[:] = (array("I", [2 * DEPTH - 5] * 2), array("I", [CQ_DEPTH + 3] * 2))
    side.sent = [(100 + n, 10 + n) for n in range(6)]
    side.acknowledge(PSN + 5)
    for wr_id in range(9):
        side.post(wr_id, 8 + wr_id)
    drove = side.drive(row_slots=row_slots)
    assert (drove.taken, drove.completions, drove.seen) == (9, 6, Lingered.NOTHING)
    assert side.completed() == [(100 + n, 10 + n) for n in range(6)]
    writes = [payload for kind, _, payload in side.said() if kind == WRITE]
    assert writes == [bytes(side.source[: 8 + n]) for n in range(9)]
    assert side.sq[1] == 4


def test_a_lane_ends_where_its_rows_do(side: Side) -> None:
    for wr_id in range(5):
        side.post(wr_id)
    drove = side.drive(row_slots=2, shown=2)
    assert (drove.taken, drove.seen) == (4, Lingered.CHANGED)
    assert side.sq[1] == 4
    side.sent, side.first = [(1, 1), (2, 2), (3, 3)], PSN + 4
    side.acknowledge(PSN + 6)
    drove = side.drive(row_slots=1, shown=2)
    assert (drove.completions, drove.seen) == (2, Lingered.CHANGED)
    assert side.completed() == [(1, 1), (2, 2)]

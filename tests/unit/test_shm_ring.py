"""The ring: messages through it whole and in order, sleep and bell, and whatever a hostile other side writes."""

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvrdma_server.backend_soft.shm_ring import (
    CONTROL_BYTES,
    RESERVE_BYTES,
    RingFault,
    RingReader,
    RingWriter,
)
from pvrdma_server.backend_soft.wire import HEADER_BYTES, MAX_CHUNK_BYTES

# Rings need not be as large as real ones to be rings; the reserve must fit.
CAPACITY = 512 << 10
HEAD, WANTS, GIDS, TAIL, ASLEEP = 0, 16, 32, 48, 64


class Ring:
    """Both ends over one memory, and what a hostile end does to it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.memory = bytearray(CONTROL_BYTES + capacity)
        view = memoryview(self.memory)
        self.words = view[:CONTROL_BYTES].cast("Q")
        self.data = view[CONTROL_BYTES:]
        self.writer, self.reader = RingWriter(view), RingReader(view)
        self.got: list[tuple[bytes, bytes]] = []
        self.bells = 0

    def receive(self, header: bytes, payload: Sequence[memoryview]) -> None:
        self.got.append((header, b"".join(payload)))

    def bell(self) -> None:
        self.bells += 1

    def take(self, limit: int = 1 << 30) -> int:
        return self.reader.take_untrusted(limit, self.receive, self.bell)

    def put(self, payload: bytes, *cuts: int) -> bool:
        return self.writer.put(header_of(payload), pieces(payload, *cuts))


def header_of(payload: bytes, length: int | None = None) -> bytes:
    length = len(payload) if length is None else length
    return bytes(range(16)) + length.to_bytes(4, "little") + bytes(HEADER_BYTES - 20)


def pieces(data: bytes, *cuts: int) -> list[memoryview]:
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [memoryview(data)[start:end] for start, end in itertools.pairwise(ends) if end > start]


def pattern(length: int, seed: int) -> bytes:
    return (bytes((seed + n) & 0xFF for n in range(256)) * (length // 256 + 1))[:length]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 4096, MAX_CHUNK_BYTES])
def test_a_message_arrives_as_it_was(length: int) -> None:
    ring = Ring()
    payload = pattern(length, 3)
    assert ring.put(payload, length // 3)
    assert ring.take() == 1
    assert ring.got == [(header_of(payload), payload)]
    assert ring.take() == 0


def test_payloads_wrap_at_every_place() -> None:
    ring = Ring()
    # Sizes that share no factor with the ring: the end of the ring cuts them everywhere.
    for n in range(600):
        payload = pattern(10_007, n)
        assert ring.put(payload, 1, 777, 9_999)
        assert ring.take() == 1
        assert ring.got.pop()[1] == payload


def test_a_wrapped_payload_is_two_views() -> None:
    ring = Ring()
    lengths: list[list[int]] = []

    def receive(header: bytes, payload: Sequence[memoryview]) -> None:
        lengths.append([len(view) for view in payload])

    for size in (200_000, 200_000, 200_000):
        assert ring.put(bytes(size))
        assert ring.reader.take_untrusted(9, receive, ring.bell) == 1
    assert lengths[:2] == [[200_000], [200_000]]
    assert len(lengths[2]) == 2
    assert sum(lengths[2]) == 200_000


def test_full_says_no_and_rings_once_there_is_half() -> None:
    ring = Ring()
    sent = 0
    while ring.put(bytes(8192)):
        sent += 1
    assert sent == (CAPACITY - RESERVE_BYTES) // (8192 + HEADER_BYTES)
    # Who looks by itself wants no bell.
    assert ring.words[WANTS] == 0
    assert ring.writer.sleep_untrusted()
    assert ring.words[WANTS] == 1
    ring.take(1)
    assert ring.bells == 0
    ring.take()
    assert ring.bells == 1
    assert len(ring.got) == sent
    assert ring.put(bytes(8192))


def test_room_that_is_made_before_the_sleep_is_seen() -> None:
    ring = Ring()
    while ring.put(bytes(8192)):
        pass
    ring.take(1)
    assert not ring.writer.sleep_untrusted()
    assert ring.words[WANTS] == 0
    assert ring.put(bytes(8192))


def test_small_messages_pass_where_bulk_waits() -> None:
    ring = Ring()
    while ring.put(bytes(8192)):
        pass
    small = 0
    while ring.put(b"ping"):
        small += 1
    assert small >= RESERVE_BYTES // 128
    ring.put(b"")
    assert not ring.put(b"")


def test_a_reader_that_sleeps_gets_one_bell() -> None:
    ring = Ring()
    assert ring.reader.sleep_untrusted()
    ring.put(b"a")
    assert ring.writer.reader_sleeps()
    ring.put(b"b")
    assert not ring.writer.reader_sleeps()
    assert ring.take() == 2
    ring.put(b"c")
    assert not ring.writer.reader_sleeps(), "an awake reader needs no bell"
    assert not ring.reader.sleep_untrusted(), "what came before it slept keeps it awake"
    assert ring.take() == 1


def test_gids_changed_is_told_once() -> None:
    ring = Ring()
    assert not ring.reader.gids_changed()
    ring.writer.gids_changed()
    assert ring.reader.gids_changed()
    assert not ring.reader.gids_changed()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 70_000)),
        st.tuples(st.just("take"), st.integers(1, 20)),
        st.tuples(st.just("sleep"), st.just(0)),
    ),
    max_size=60,
)


@given(OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_any_interleaving_keeps_order_and_loses_no_wakeup(steps: list[tuple[str, int]]) -> None:
    ring, expected = Ring(), deque[bytes]()
    asleep = waits = False
    for n, (what, value) in enumerate(steps):
        if what == "put":
            payload = pattern(value, n)
            if ring.put(payload, value // 2):
                expected.append(payload)
                asleep = asleep and not ring.writer.reader_sleeps()
            else:
                waits, ring.bells = True, 0
        elif what == "take":
            ring.take(value)
            waits = waits and not ring.bells
        else:
            asleep = ring.reader.sleep_untrusted() or asleep
        while ring.got:
            assert ring.got.pop(0)[1] == expected.popleft()
        assert not (asleep and expected), "something is there and nobody rings"
    ring.take()
    assert [payload for _, payload in ring.got] == list(expected)
    assert not waits or ring.bells, "all is consumed and the producer was not told"


# -- hostile ------------------------------------------------------------------------------------


@given(st.integers(0, (1 << 64) - 1))
@settings(deadline=None)
def test_any_head_is_a_fault_or_bounded(head: int) -> None:
    ring = Ring()
    ring.words[HEAD] = head
    try:
        ring.take()
    except RingFault:
        return
    assert head <= CAPACITY
    assert head % 64 == 0


@given(st.integers(0, (1 << 64) - 1))
@settings(deadline=None)
def test_any_tail_is_a_fault_or_what_was_written(tail: int) -> None:
    ring = Ring()
    while ring.put(bytes(8192)):
        pass
    ring.words[TAIL] = tail
    try:
        ring.put(bytes(8192))
    except RingFault:
        return
    assert tail <= ring.writer.head
    assert tail % 64 == 0


def test_a_head_that_goes_back_is_a_fault() -> None:
    ring = Ring()
    ring.put(b"a")
    ring.put(b"b")
    ring.take()
    ring.words[HEAD] = 64
    with pytest.raises(RingFault):
        ring.take()


def test_a_tail_that_goes_back_is_a_fault() -> None:
    ring = Ring()
    ring.put(bytes(8192))
    ring.take()
    ring.writer.look_untrusted()
    ring.words[TAIL] = 0
    with pytest.raises(RingFault):
        ring.writer.look_untrusted()


@pytest.mark.parametrize("length", [5, 64, MAX_CHUNK_BYTES + 1, 0xFFFF_FFFF])
def test_a_length_beyond_what_is_there_is_a_fault(length: int) -> None:
    ring = Ring()
    ring.put(b"")
    ring.data[:HEADER_BYTES] = header_of(b"", length)
    with pytest.raises(RingFault):
        ring.take()
    assert ring.got == []


@given(st.binary(min_size=64, max_size=4096), st.integers(1, 64))
@settings(deadline=None)
def test_garbage_stays_within_the_ring(garbage: bytes, lines: int) -> None:
    ring = Ring()
    ring.data[: len(garbage)] = garbage
    ring.words[HEAD] = 64 * lines
    with suppress(RingFault):
        ring.take()
    assert sum(HEADER_BYTES + len(payload) for _, payload in ring.got) <= 64 * lines


def test_our_own_indices_are_never_read_back() -> None:
    ring = Ring()
    ring.put(b"first")
    ring.words[HEAD] = 0x4000
    ring.put(b"second")
    assert ring.words[HEAD] == 256
    ring.take(1)
    ring.words[TAIL] = 0
    ring.take()
    assert ring.words[TAIL] == 256
    assert [payload for _, payload in ring.got] == [b"first", b"second"]

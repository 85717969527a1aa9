"""Rings: the driver's arithmetic on every pair of indices, and the two device rings whose sizes it mistreats."""

from collections import deque

import pytest
from guest import PAGE, GuestRam, PageDir, RingWords, idx_inc, idx_valid
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.errors import BadGuestAddress, BadRingIndex
from pvrdma_server.guest_memory import GuestMemory, GuestPages
from pvrdma_server.rings import (
    RX_STATE_OFFSET,
    TX_STATE_OFFSET,
    ConsumerRing,
    ProducerRing,
    entries_per,
    round_up_pow2,
)

u32 = st.integers(0, 0xFFFF_FFFF)
# Where the bugs live: around the size, twice the size, the sign bit and "-1".
edges = st.sampled_from(
    [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFF0, 0xFFFF_FFFF]
)


class Fixture:
    """A ring of either kind over real pages, and the driver's words of it."""

    def __init__(self, entries: int, entry_size: int, state_offset: int = RX_STATE_OFFSET) -> None:
        self.ram = GuestRam(1 << 20)
        self.memory = GuestMemory()
        self.map()
        npages = 1 + -(-entries * entry_size // PAGE)
        self.dir = PageDir.alloc(self.ram, npages)
        pages = GuestPages(self.memory, self.dir.pages, writable=True)
        shape = (pages, state_offset, 1, entry_size, entries)
        self.producer = ProducerRing(*shape)
        self.consumer = ConsumerRing(*shape)
        self.words = RingWords(self.ram, self.dir.pages[0] + state_offset, entries)
        self.entry_size = entry_size

    def map(self) -> None:
        self.memory.add_region(self.ram.iova, self.ram.size, self.ram.view, writable=True)

    def set(self, tail: int, head: int) -> None:
        self.words.prod_tail = tail
        self.words.cons_head = head

    def slot(self, index: int) -> bytes:
        return self.dir.read(PAGE + index * self.entry_size, self.entry_size)

    def close(self) -> None:
        self.ram.close()


def legal(tail: int, head: int, entries: int) -> bool:
    """From the definition: both below twice the size, and not further apart than the size."""
    return max(tail, head) < 2 * entries and (tail - head) % (2 * entries) <= entries


@given(tail=u32 | edges, head=u32 | edges)
def test_any_pair_of_indices(tail: int, head: int) -> None:
    """CVE-2018-20216: an invalid index is neither "has data" nor "has space"."""
    ring = Fixture(8, 64)
    try:
        ring.set(tail, head)
        if not legal(tail, head, 8):
            for act in (ring.consumer.pop_untrusted, lambda: ring.producer.push_untrusted(b"x")):
                with pytest.raises(BadRingIndex):
                    act()
            assert (ring.words.prod_tail, ring.words.cons_head) == (tail, head)
            return
        used = (tail - head) % 16
        assert ring.consumer.used_untrusted() == used
        assert ring.words.has_data()[0] == (used > 0)
        assert ring.words.has_space()[0] == (used < 8)
        entry = ring.consumer.pop_untrusted()
        assert (entry is not None) == (used > 0)
        assert ring.words.cons_head == ((head + 1) % 16 if used else head)
    finally:
        ring.close()


@pytest.mark.parametrize("entries", [1, 2, 8, 64])
def test_every_legal_pair(entries: int) -> None:
    ring = Fixture(entries, 64)
    for head in range(2 * entries):
        for used in range(entries + 1):
            ring.set((head + used) % (2 * entries), head)
            assert ring.consumer.used_untrusted() == used
            assert ring.producer.push_untrusted(b"\xee" * 64) == (used < entries)
            if used < entries:
                assert ring.words.prod_tail == (head + used + 1) % (2 * entries)
                assert ring.slot((head + used) % entries) == b"\xee" * 64
            assert idx_valid(ring.words.prod_tail, entries)


def test_each_illegal_bit_alone() -> None:
    ring = Fixture(8, 64)
    for bit in range(4, 32):
        for tail, head in ((1 << bit, 0), (0, 1 << bit), (1 << bit, 1 << bit)):
            ring.set(tail, head)
            with pytest.raises(BadRingIndex):
                ring.consumer.pop_untrusted()


def test_the_two_rings_of_a_queue_pair_share_a_page() -> None:
    ring = Fixture(8, 64, TX_STATE_OFFSET)
    rx = RingWords(ring.ram, ring.dir.pages[0] + 8, 8)
    rx.prod_tail = rx.cons_head = 0xFFFF_FFFF
    ring.words.produce()
    assert ring.consumer.pop_untrusted() is not None
    assert (ring.words.prod_tail, ring.words.cons_head) == (1, 1)
    assert (rx.prod_tail, rx.cons_head) == (0xFFFF_FFFF, 0xFFFF_FFFF)


def test_entries_come_out_as_they_went_in_many_times_round() -> None:
    ring = Fixture(8, 64)
    expected: deque[bytes] = deque()
    for number in range(1000):
        entry = number.to_bytes(8, "little") * 8
        if ring.producer.push_untrusted(entry):
            expected.append(entry)
        else:
            assert len(expected) == 8
        if number % 3 == 0 and expected:
            assert ring.consumer.pop_untrusted() == expected.popleft()
    assert len(expected) >= 7


@given(
    tail=st.integers(0, 15),
    used=st.integers(0, 8),
    count=st.integers(1, 20),
    size=st.sampled_from([64, 1024]),
)
def test_many_at_once_are_published_as_one_after_the_other(
    tail: int, used: int, count: int, size: int
) -> None:
    """Over the end of the ring, over the ends of scattered pages, and up to the last free slot."""
    at_once, one_by_one = Fixture(8, size), Fixture(8, size)
    entries = [bytes([number]) * size for number in range(1, count + 1)]
    for ring in (at_once, one_by_one):
        ring.set((tail + used) % 16, tail)
    expected = [one_by_one.producer.push_untrusted(entry) for entry in entries]
    assert at_once.producer.push_all_untrusted(b"".join(entries)) == all(expected)
    assert at_once.words.prod_tail == one_by_one.words.prod_tail
    assert [at_once.slot(n) for n in range(8)] == [one_by_one.slot(n) for n in range(8)]
    for ring in (at_once, one_by_one):
        ring.close()


def test_many_at_once_in_memory_that_is_not_there() -> None:
    ring = Fixture(8, 64)
    ring.memory.remove_region(ring.ram.iova, ring.ram.size)
    with pytest.raises(BadGuestAddress):
        ring.producer.push_all_untrusted(bytes(128))
    ring.map()
    assert ring.words.prod_tail == 0
    ring.close()


@given(
    tail=st.integers(0, 15),
    used=st.integers(0, 8),
    most=st.integers(1, 10),
    size=st.sampled_from([64, 1024]),
)
def test_many_popped_at_once_are_the_oldest(tail: int, used: int, most: int, size: int) -> None:
    at_once, one_by_one = Fixture(8, size), Fixture(8, size)
    for ring in (at_once, one_by_one):
        ring.set(tail, tail)
        ring.producer.push_all_untrusted(b"".join(bytes([n]) * size for n in range(1, used + 1)))
    popped = at_once.consumer.pop_untrusted(most)
    expected = [one_by_one.consumer.pop_untrusted() for _ in range(len(popped or b"") // size)]
    assert (popped is None) == (used == 0)
    assert (popped or b"") == b"".join(entry or b"" for entry in expected)
    assert len(expected) == min(most, used, 8 - tail % 8)
    assert at_once.words.cons_head == one_by_one.words.cons_head
    for ring in (at_once, one_by_one):
        ring.close()


@pytest.mark.parametrize("entries", [16, 128, 1024])
@pytest.mark.parametrize("index", [0, 1, 15, 16, 100, 127, 1000, 2047])
def test_rows_are_the_slots_around_the_ring(entries: int, index: int) -> None:
    # Slots of 128 bytes: 32 to a page, and 256 are shown.
    made = Fixture(entries, 128)
    index %= 2 * entries
    for slot in range(entries):
        made.dir.write(PAGE + slot * 128, slot.to_bytes(4, "little"))
    made.set(index, index)
    for ring in (made.producer, made.consumer):
        words, first, mask, rows = ring.rows_untrusted()
        assert (words[0], words[1], first, mask) == (index, index, index, 2 * entries - 1)
        seen = [
            int.from_bytes(row[at : at + 4], "little")
            for row in rows
            for at in range(0, len(row), 128)
        ]
        assert seen == [(index + n) % entries for n in range(min(entries, 256))]
    del words, rows
    made.close()


def test_a_popped_entry_is_a_snapshot() -> None:
    ring = Fixture(8, 64)
    ring.dir.write(PAGE, b"before" + bytes(58))
    ring.words.produce()
    entry = ring.consumer.pop_untrusted()
    ring.dir.write(PAGE, b"after!")
    assert entry is not None
    assert entry[:6] == b"before"


def test_the_driver_may_zero_its_indices_at_any_time() -> None:
    ring = Fixture(8, 64)
    for _ in range(5):
        ring.producer.push_untrusted(bytes(64))
    ring.words.zero()
    assert ring.consumer.pop_untrusted() is None
    assert ring.producer.push_untrusted(bytes(64))
    assert ring.words.prod_tail == 1


def test_an_idle_ring_keeps_no_memory_mapped() -> None:
    """A reboot unmaps all RAM; the old driver's rings may live until the garbage collector finds them."""
    backing = bytearray(4 * PAGE)
    memory = GuestMemory()
    memory.add_region(PAGE, len(backing), memoryview(backing), writable=True)
    ring = ConsumerRing(
        GuestPages(memory, [PAGE, 2 * PAGE], writable=True), RX_STATE_OFFSET, 1, 64, 8
    )
    assert ring.pop_untrusted() is None
    with pytest.raises(BufferError):
        backing.append(0)
    memory.remove_region(PAGE, len(backing))
    backing.append(0)
    with pytest.raises(BadGuestAddress):
        ring.pop_untrusted()


def test_a_ring_lives_through_unmap_and_map() -> None:
    ring = Fixture(8, 64)
    ring.producer.push_untrusted(b"a" * 64)
    ring.memory.remove_region(ring.ram.iova, ring.ram.size)
    with pytest.raises(BadGuestAddress):
        ring.producer.push_untrusted(b"b" * 64)
    with pytest.raises(BadGuestAddress):
        ring.consumer.pop_untrusted()
    assert ring.words.prod_tail == 1
    ring.map()
    assert ring.producer.push_untrusted(b"b" * 64)
    assert ring.consumer.pop_untrusted() == b"a" * 64
    assert ring.consumer.pop_untrusted() == b"b" * 64


def test_entries_that_end_with_their_page() -> None:
    ring = Fixture(64, 128)
    for number in range(64):
        assert ring.producer.push_untrusted(bytes([number]) * 128)
    assert not ring.producer.push_untrusted(bytes(128))
    for number in range(64):
        assert ring.consumer.pop_untrusted() == bytes([number]) * 128


# --- the two device rings ------------------------------------------------------------------------------------------

DEVICE_RINGS = [
    pytest.param(4, 3072, 2048, 1024, id="notifications"),
    pytest.param(8, 1536, 1024, 512, id="async"),
]


def period_of(entries: int) -> int:
    """How long the driver's C increment takes to come back to zero."""
    index, steps = idx_inc(0, entries), 1
    while index:
        index, steps = idx_inc(index, entries), steps + 1
    return steps


@pytest.mark.parametrize(("size", "entries", "period", "capacity"), DEVICE_RINGS)
def test_the_driver_never_gets_further(size: int, entries: int, period: int, capacity: int) -> None:
    assert entries == entries_per(3, size)
    assert period_of(entries) == period
    ring = Fixture(entries, size)
    assert ring.producer.capacity == capacity


@pytest.mark.parametrize(("size", "entries", "period", "capacity"), DEVICE_RINGS)
def test_device_ring_against_the_driver(
    size: int, entries: int, period: int, capacity: int
) -> None:
    """Every fill level at many places: each entry is read once, in order, and none is overrun."""
    ring = Fixture(entries, size)
    sent: deque[bytes] = deque()
    number = 0
    for fill in (1, 2, capacity - 1, capacity, capacity + 5, 3, capacity, capacity):
        for _ in range(fill):
            entry = number.to_bytes(size, "little")
            if ring.producer.push_untrusted(entry):
                sent.append(entry)
                number += 1
        assert len(sent) <= capacity
        while ring.words.has_data()[0] > 0:
            slot = ring.words.has_data()[1]
            assert slot < capacity
            assert ring.slot(slot) == sent.popleft()
            ring.words.consume()
        assert not sent


@pytest.mark.parametrize(("size", "entries", "period", "capacity"), DEVICE_RINGS)
@given(data=st.data())
def test_device_ring_in_any_rhythm(
    size: int, entries: int, period: int, capacity: int, data: st.DataObject
) -> None:
    ring = Fixture(entries, size)
    try:
        start = data.draw(st.integers(0, period - 1))
        ring.set(start, start)
        sent: deque[bytes] = deque()
        number = 0
        for burst in data.draw(st.lists(st.integers(-1200, 1200), max_size=6)):
            for _ in range(burst):
                entry = (number & 0xFFFF_FFFF).to_bytes(size, "little")
                number += 1
                published = ring.producer.push_untrusted(entry)
                assert published == (len(sent) < capacity)
                if published:
                    sent.append(entry)
            for _ in range(min(-burst, len(sent))):
                has_data, slot = ring.words.has_data()
                assert has_data == 1
                assert ring.slot(slot) == sent.popleft()
                ring.words.consume()
            assert (ring.words.has_data()[0] == 1) == bool(sent)
    finally:
        ring.close()


@pytest.mark.parametrize("pages", [2, 3, 4, 5, 6, 9, 64])
@pytest.mark.parametrize("size", [4, 8])
def test_any_length_of_device_ring_follows_the_driver(pages: int, size: int) -> None:
    entries = entries_per(pages - 1, size)
    period = period_of(entries)
    ring = Fixture(entries, size)
    assert ring.producer.capacity == period // 2
    ring.set(period - 1, period - 1)
    assert ring.producer.push_untrusted(b"\xab" * size)
    assert ring.words.prod_tail == 0
    assert ring.slot((period - 1) & (entries - 1)) == b"\xab" * size


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (80, 128), (128, 128), (129, 256)]
)
def test_round_up(value: int, expected: int) -> None:
    assert round_up_pow2(value) == expected

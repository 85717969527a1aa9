"""Rings in guest memory: index words, entries, and the driver's exact arithmetic.

Contract: the device is the consumer of send, receive and shared receive rings (`ConsumerRing`) and the producer of
completion, asynchronous event and notification rings (`ProducerRing`). Both indices live in guest memory and are read
anew on every call: nothing is cached, so a driver that zeroes its indices after a RESET is simply right. Every index is
validated; an entry is copied before it is looked at.

Indices run modulo twice the ring's size; the extra bit is the generation. A ring is empty when both are equal and full
when they differ in just that bit. The driver applies this power-of-two arithmetic to the two device rings too, whose
sizes (3072 and 1536 entries) are not powers of two: there an index wraps at the *lowest* zero bit of its mask, so only
1024 and 512 entries are ever used and the driver's own "full" test can never be true. `_trailing_ones` is that fact.

Source: drivers/infiniband/hw/vmw_pvrdma/pvrdma_ring.h.
"""

from typing import Final

from pvrdma_server.abi.pvrdma_dev_api import RING_STATE_RX, RING_STATE_TX
from pvrdma_server.errors import BadRingIndex
from pvrdma_server.guest_memory import PAGE_SHIFT, PAGE_SIZE, GuestPages

# Of a ring shown row by row: a page may be a row, and each takes a view.
_SHOWN_BYTES: Final = 8 * PAGE_SIZE

TX_STATE_OFFSET: Final = RING_STATE_TX
RX_STATE_OFFSET: Final = RING_STATE_RX


def _trailing_ones(value: int) -> int:
    """The mask of the contiguous low one bits of `value`."""
    return value & ~(value + 1)


class Ring:
    """The shared half of both kinds of ring.

    Attributes:
        seen_head: `cons_head` as it was when the indices were last read.
        watch_token: who watches this ring, if it is watched instead of announced by doorbells.

    Args:
        pages: the object's pages; the ring state is in page 0.
        state_offset: byte offset of {prod_tail, cons_head} in page 0: `TX_STATE_OFFSET` or `RX_STATE_OFFSET`.
        first_page: index of the page where entries start.
        entry_size: bytes per entry, a power of two not above a page, so that no entry crosses one.
        entries: the size the driver computes with.
    """

    __slots__ = (
        "_base",
        "_generation",
        "_head",
        "_index_mask",
        "_pages",
        "_slot_mask",
        "_state_offset",
        "_tail",
        "capacity",
        "entry_size",
        "seen_head",
        "watch_token",
    )

    def __init__(
        self, pages: GuestPages, state_offset: int, first_page: int, entry_size: int, entries: int
    ) -> None:
        self._pages = pages
        self._base = first_page << PAGE_SHIFT
        self.entry_size = entry_size
        self._slot_mask = _trailing_ones(entries - 1)
        self._index_mask = _trailing_ones(2 * entries - 1)
        self.capacity = self._slot_mask + 1
        self._tail = state_offset // 4
        self._head = self._tail + 1
        self._state_offset = state_offset
        pages.words_untrusted()
        self._generation = pages.generation
        self.seen_head = 0
        self.watch_token: int | None = None

    @property
    def stale(self) -> bool:
        """Whether the ring's memory was unmapped since it was last used."""
        return self._generation != self._pages.generation

    def state_untrusted(self) -> memoryview:
        """The 8 bytes {prod_tail, cons_head}. Raises BadGuestAddress while they are not mapped."""
        state = self._pages.page_untrusted(0)[self._state_offset : self._state_offset + 8]
        self._generation = self._pages.generation
        return state

    def _indices_untrusted(self) -> tuple[memoryview, int, int, int]:
        """(the words they are in, prod_tail, cons_head, entries between them).

        Raises:
            BadRingIndex: one of them has bits no valid index has, or they are further apart than the ring is long.
            BadGuestAddress: the ring's memory is not mapped at the moment.
        """
        # The pages keep the words and drop them at unmap: a ring that lies idle must not keep memory mapped.
        words = self._pages.words
        if words is None:
            words = self._pages.words_untrusted()
            self._generation = self._pages.generation
        mask = self._index_mask
        tail, head = words[self._tail], words[self._head]
        used = (tail - head) & mask
        self.seen_head = head
        if (tail | head) & ~mask or used > self.capacity:
            raise BadRingIndex(
                f"prod_tail {tail:#x} cons_head {head:#x} in a ring of {self.capacity}"
            )
        return words, tail, head, used

    def _slot(self, index: int) -> memoryview:
        offset = self._base + (index & self._slot_mask) * self.entry_size
        return self._pages.views_untrusted(offset, self.entry_size)[0]

    def _rows(self, index: int) -> list[memoryview]:
        # The slots from that of the index on, around the ring, as many as are shown.
        slot, size = index & self._slot_mask, self.entry_size
        shown = min(self.capacity, _SHOWN_BYTES // size)
        ahead = min(shown, self.capacity - slot)
        views = self._pages.views_untrusted(self._base + slot * size, ahead * size)
        return views + self._pages.views_untrusted(self._base, (shown - ahead) * size)

    def used_untrusted(self) -> int:
        """Entries produced and not consumed. Raises as `_indices_untrusted`."""
        return self._indices_untrusted()[3]


class ConsumerRing(Ring):
    """A ring the guest fills and the device drains."""

    __slots__ = ()

    def _row(self, index: int) -> memoryview:
        # The slots from that of the index on, as far as they are in a row.
        slot = index & self._slot_mask
        at = self._base + slot * self.entry_size
        start, view = self._pages.piece_untrusted(at)
        return view[at - start : at - start + (self.capacity - slot) * self.entry_size]

    def pop_untrusted(self, most: int = 1) -> bytes | None:
        """Copy the oldest entries out and free their slots: up to `most` that lie in a row; None when there is none.

        Order: they are copied before `cons_head` moves, because the guest may reuse the slots from then on.

        Raises:
            BadRingIndex, BadGuestAddress: as a corrupt or unmapped ring; nothing is consumed.
        """
        words, _, head, used = self._indices_untrusted()
        if not used:
            return None
        slot = head & self._slot_mask
        count = min(most, used, self.capacity - slot)
        size = self.entry_size
        views = self._pages.views_untrusted(self._base + slot * size, count * size)
        entries = b"".join(views)
        words[self._head] = (head + count) & self._index_mask
        return entries

    def peek_untrusted(self) -> tuple[memoryview, int, int, list[memoryview]] | None:
        """What has been produced, to be looked at and then skipped; None when there is nothing.

        Returns:
            A view that begins with `prod_tail`, `cons_head`, the indices' mask, and one row of slots: from the oldest
            on, used or not, as far as they are in a row.

        Raises:
            BadRingIndex, BadGuestAddress: as `pop_untrusted`.
        """
        words, _, head, used = self._indices_untrusted()
        if not used:
            return None
        return words[self._tail :], head, self._index_mask, [self._row(head)]

    def rows_untrusted(self) -> tuple[memoryview, int, int, list[memoryview]]:
        """The same, whether or not there is anything, with rows on around the ring: 32 KiB at most.

        Raises:
            BadRingIndex, BadGuestAddress: as `pop_untrusted`.
        """
        words, _, head, _ = self._indices_untrusted()
        return words[self._tail :], head, self._index_mask, self._rows(head)

    def skip_untrusted(self, count: int) -> None:
        """Free the slots of the oldest `count` entries, of which whoever peeked has copies.

        Raises:
            BadRingIndex, BadGuestAddress: as `pop_untrusted`.
        """
        words, _, head, _ = self._indices_untrusted()
        words[self._head] = (head + count) & self._index_mask


class ProducerRing(Ring):
    """A ring the device fills and the guest drains."""

    __slots__ = ()

    def push_untrusted(self, entry: bytes) -> bool:
        """Publish one entry; False when the ring is full.

        Order: body first, then `prod_tail`. x86 keeps the order of stores; a port to another architecture needs a
        release fence between the two.

        Raises:
            BadRingIndex, BadGuestAddress: as a corrupt or unmapped ring; nothing is published.
        """
        words, tail, _, used = self._indices_untrusted()
        if used == self.capacity:
            return False
        self._slot(tail)[: len(entry)] = entry
        words[self._tail] = (tail + 1) & self._index_mask
        return True

    def push_all_untrusted(self, entries: bytes) -> bool:
        """Publish entries that lie in a row, each as long as a slot, with one store of the index.

        Order: as `push_untrusted`.

        Returns:
            Whether there was room for all of them; the oldest are published in any case.

        Raises:
            BadRingIndex, BadGuestAddress: as `push_untrusted`; nothing is published.
        """
        words, tail, _, used = self._indices_untrusted()
        size = self.entry_size
        count = min(len(entries) // size, self.capacity - used)
        first = min(count, self.capacity - (tail & self._slot_mask))
        self._store(tail, entries[: first * size])
        if first < count:
            self._store(tail + first, entries[first * size : count * size])
        words[self._tail] = (tail + count) & self._index_mask
        return count * size == len(entries)

    def rows_untrusted(self) -> tuple[memoryview, int, int, list[memoryview]]:
        """A view that begins with both indices, `prod_tail`, the indices' mask, and slots from there on.

        They go on around the ring, row by row, 32 KiB at most.

        Raises:
            BadRingIndex, BadGuestAddress: as `push_untrusted`.
        """
        words, tail, _, _ = self._indices_untrusted()
        return words[self._tail :], tail, self._index_mask, self._rows(tail)

    def _store(self, index: int, entries: bytes) -> None:
        offset = self._base + (index & self._slot_mask) * self.entry_size
        at = 0
        for view in self._pages.views_untrusted(offset, len(entries)):
            view[:] = entries[at : at + len(view)]
            at += len(view)


def entries_per(pages: int, entry_size: int) -> int:
    """How many entries fit in `pages` pages."""
    return pages * PAGE_SIZE // entry_size


def round_up_pow2(value: int) -> int:
    """The smallest power of two not below `value` (1 for 0)."""
    return 1 << max(0, value - 1).bit_length()

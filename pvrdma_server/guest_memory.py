"""Guest memory: the DMA regions a client maps, guest addresses to views, page directories, and runs of pages.

Contract: all addresses are guest bus addresses (bytes), all views are `memoryview`s of format "B" over memory that
stays valid as long as the view exists (the adapter owns mappings by reference, so a stale view can read old memory but
never crash). Nothing here blocks. Every function fed by the guest raises only `BadGuestAddress`.

QEMU unmaps and maps RAM again at the same addresses during boot and on hot-plug, so nobody keeps a plain view for long:
a `GuestPages` keeps guest addresses, drops its views when memory is unmapped, and finds them again on the next use.
"""

import struct
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from pvrdma_server.errors import BadGuestAddress

PAGE_SIZE = 4096
PAGE_SHIFT = 12
PDIR_ENTRIES = 512
# A two-level directory cannot name more; stops a guest from asking for a larger walk.
# Source: pvrdma.h PVRDMA_PAGE_DIR_MAX_PAGES.
MAX_PDIR_PAGES = PDIR_ENTRIES * PDIR_ENTRIES
# QEMU maps some tens of regions; a client that maps without end must not fill our memory.
MAX_REGIONS = 4096
_PDIR = struct.Struct("<512Q")


@dataclass(slots=True)
class DmaRegion:
    """One DMA_MAP of the client: guest addresses [iova, iova + length)."""

    iova: int
    length: int
    view: memoryview | None
    writable: bool


class MemoryObserver(Protocol):
    """Who must know at once when guest memory goes and comes."""

    def memory_unmapped(self, iova: int, length: int) -> None:
        """[iova, iova + length) is being unmapped: use of it has ended when this returns."""

    def memory_mapped(self, iova: int, length: int) -> None:
        """A region was mapped there, perhaps of other memory than before."""


@dataclass(slots=True)
class GuestMemory:
    """The guest's address space as the client mapped it. Regions never overlap."""

    _starts: list[int] = field(default_factory=list)
    _regions: list[DmaRegion] = field(default_factory=list)
    _users: "weakref.WeakSet[GuestPages]" = field(default_factory=weakref.WeakSet)
    _observers: list[MemoryObserver] = field(default_factory=list)

    def observe(self, observer: MemoryObserver) -> None:
        """Have `observer` told of everything that is mapped and unmapped from now on."""
        self._observers.append(observer)

    def add_region(
        self, iova: int, length: int, view: memoryview | None, *, writable: bool
    ) -> None:
        """Map [iova, iova + length). `view` is None for what is not RAM (no file descriptor behind it).

        Ranges that are not whole pages are kept, but are not RAM either.

        Raises:
            BadGuestAddress: it overlaps a region, or there are too many.
        """
        index = bisect_right(self._starts, iova)
        if length <= 0 or iova < 0 or iova + length > 1 << 64:
            raise BadGuestAddress(iova, length, "not a range")
        if len(self._regions) >= MAX_REGIONS:
            raise BadGuestAddress(iova, length, f"more than {MAX_REGIONS} regions")
        if index and self._regions[index - 1].iova + self._regions[index - 1].length > iova:
            raise BadGuestAddress(iova, length, "overlaps the region below")
        if index < len(self._starts) and self._starts[index] < iova + length:
            raise BadGuestAddress(iova, length, "overlaps the region above")
        # A page that two regions share could not be seen as one view, so such a region is no RAM to us.
        usable = view if not (iova | length) & (PAGE_SIZE - 1) else None
        self._starts.insert(index, iova)
        self._regions.insert(index, DmaRegion(iova, length, usable, writable))
        for observer in self._observers:
            observer.memory_mapped(iova, length)

    def remove_region(self, iova: int, length: int) -> bool:
        """Unmap the region that starts at `iova`; drop every view into it. False when there is none."""
        index = bisect_right(self._starts, iova) - 1
        if index < 0 or self._regions[index].iova != iova or self._regions[index].length != length:
            return False
        del self._starts[index], self._regions[index]
        for pages in list(self._users):
            pages.forget_views(iova, length)
        for observer in self._observers:
            observer.memory_unmapped(iova, length)
        return True

    def clear(self) -> None:
        """Unmap everything, as after a disconnect."""
        for region in list(self._regions):
            self.remove_region(region.iova, region.length)

    @property
    def regions(self) -> tuple[DmaRegion, ...]:
        """The mapped regions in address order."""
        return tuple(self._regions)

    def views_untrusted(
        self, address: int, length: int, *, writable: bool = False
    ) -> list[memoryview]:
        """Views that cover [address, address + length), in order, split where regions meet.

        Raises:
            BadGuestAddress: part of it is not mapped, not RAM, or read-only where `writable` is asked.
        """
        views = []
        position, end = address, address + length
        while position < end:
            region = self._region_at(position, address, length)
            if region.view is None:
                raise BadGuestAddress(address, length, "not RAM (no file descriptor, or not pages)")
            if writable and not region.writable:
                raise BadGuestAddress(address, length, "read-only memory")
            offset = position - region.iova
            take = min(end - position, region.length - offset)
            views.append(region.view[offset : offset + take])
            position += take
        return views

    def piece_untrusted(self, address: int, *, writable: bool = False) -> tuple[int, memoryview]:
        """(guest address, view) of the whole region around `address`.

        Raises:
            BadGuestAddress: nothing is mapped there, or no RAM, or read-only memory where `writable` is asked.
        """
        region = self._region_at(address, address, 1)
        if region.view is None or (writable and not region.writable):
            raise BadGuestAddress(address, 1, "not such memory")
        return region.iova, region.view

    def page_untrusted(self, address: int) -> memoryview:
        """One writable guest page at a page-aligned address.

        Raises:
            BadGuestAddress: not aligned, or not such memory.
        """
        if address % PAGE_SIZE:
            raise BadGuestAddress(address, PAGE_SIZE, "not page-aligned")
        return self.views_untrusted(address, PAGE_SIZE, writable=True)[0]

    def _region_at(self, position: int, address: int, length: int) -> DmaRegion:
        index = bisect_right(self._starts, position) - 1
        if index >= 0:
            region = self._regions[index]
            if position < region.iova + region.length:
                return region
        raise BadGuestAddress(address, length, f"nothing is mapped at {position:#x}")

    def register_user(self, pages: "GuestPages") -> None:
        """Have `pages` told when memory below it is unmapped."""
        self._users.add(pages)


def walk_pdir_untrusted(memory: GuestMemory, pdir_dma: int, npages: int) -> list[int]:
    """Page addresses listed by a two-level page directory, each table copied once.

    Raises:
        BadGuestAddress: too many or no pages, a table or page address that is zero, unaligned or not RAM.

    Source: drivers/infiniband/hw/vmw_pvrdma/pvrdma_misc.c pvrdma_page_dir_init.
    """
    if not 1 <= npages <= MAX_PDIR_PAGES:
        raise BadGuestAddress(pdir_dma, 0, f"a page directory of {npages} pages")
    addresses: list[int] = []
    for table_dma in islice(
        _entries(memory, pdir_dma), (npages + PDIR_ENTRIES - 1) // PDIR_ENTRIES
    ):
        addresses.extend(islice(_entries(memory, table_dma), npages - len(addresses)))
    return addresses


def _entries(memory: GuestMemory, table_dma: int) -> Iterator[int]:
    if not table_dma:
        raise BadGuestAddress(table_dma, PAGE_SIZE, "empty page directory entry")
    page = memory.views_untrusted(table_dma, PAGE_SIZE) if table_dma % PAGE_SIZE == 0 else []
    if len(page) != 1:
        raise BadGuestAddress(table_dma, PAGE_SIZE, "page table not page-aligned or split")
    return iter(_PDIR.unpack(bytes(page[0])))


class GuestPages:
    """A list of guest pages as one linear space of bytes [0, npages * 4096), adjacent pages merged into runs.

    Args:
        memory: where the pages live.
        addresses: page-aligned guest addresses, in order.
        writable: whether the device writes there.

    Raises:
        BadGuestAddress: a page is zero, unaligned, not RAM, or read-only where `writable` is asked.
    """

    __slots__ = (
        "__weakref__",
        "_memory",
        "_offsets",
        "_runs",
        "_views",
        "_writable",
        "generation",
        "length_bytes",
        "words",
    )

    def __init__(self, memory: GuestMemory, addresses: Iterable[int], *, writable: bool) -> None:
        self._memory = memory
        self._writable = writable
        self._runs = _merge_untrusted(addresses)
        self._views: list[memoryview] | None = None
        self._offsets: list[int] = []
        self.words: memoryview | None = None
        self.generation = 0
        self.length_bytes = sum(length for _, length in self._runs)
        self._resolve()
        memory.register_user(self)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(guest address, length in bytes) of each run."""
        return tuple(self._runs)

    @property
    def page_addresses(self) -> list[int]:
        """The guest address of every page, in order."""
        return [
            page
            for address, length in self._runs
            for page in range(address, address + length, PAGE_SIZE)
        ]

    def forget_views(self, iova: int, length: int) -> None:
        """Memory [iova, iova + length) is being unmapped: drop the views if they touch it."""
        if self._views is not None and any(
            a < iova + length and iova < a + n for a, n in self._runs
        ):
            self._views = None
            self._offsets = []
            self.words = None
            self.generation += 1

    def views_untrusted(self, offset: int, length: int) -> list[memoryview]:
        """Views that cover [offset, offset + length) of the linear space.

        Raises:
            BadGuestAddress: outside the pages, or the memory is not mapped at the moment.
        """
        if offset < 0 or length < 0 or offset + length > self.length_bytes:
            raise BadGuestAddress(offset, length, "outside the object's pages")
        views = self._views if self._views is not None else self._resolve()
        if length == 0:
            return []
        index = bisect_right(self._offsets, offset) - 1
        start = offset - self._offsets[index]
        first = views[index][start : start + length]
        if len(first) == length:
            return [first]
        found, left = [first], length - len(first)
        while left:
            index += 1
            found.append(views[index][:left])
            left -= len(found[-1])
        return found

    def piece_untrusted(self, offset: int) -> tuple[int, memoryview]:
        """(offset, view) of the whole run of pages around byte `offset` of the linear space.

        Raises:
            BadGuestAddress: outside the pages, or the memory is not mapped at the moment.
        """
        if not 0 <= offset < self.length_bytes:
            raise BadGuestAddress(offset, 1, "outside the object's pages")
        views = self._views if self._views is not None else self._resolve()
        index = bisect_right(self._offsets, offset) - 1
        return self._offsets[index], views[index]

    def page_untrusted(self, index: int) -> memoryview:
        """Page `index` as one view of 4096 bytes.

        Raises:
            BadGuestAddress: no such page, or not mapped at the moment.
        """
        return self.views_untrusted(index << PAGE_SHIFT, PAGE_SIZE)[0]

    def words_untrusted(self) -> memoryview:
        """Page 0 as 32-bit words; `words` is the same until the memory is unmapped, and None from then on.

        Raises:
            BadGuestAddress: not mapped at the moment.
        """
        if self.words is None:
            self.words = self.page_untrusted(0).cast("I")
        return self.words

    def _resolve(self) -> list[memoryview]:
        views: list[memoryview] = []
        offsets: list[int] = []
        offset = 0
        for address, length in self._runs:
            for view in self._memory.views_untrusted(address, length, writable=self._writable):
                views.append(view)
                offsets.append(offset)
                offset += len(view)
        self._views, self._offsets = views, offsets
        self.generation += 1
        return views


def _merge_untrusted(addresses: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    start = end = -1
    for address in addresses:
        if address == 0 or address % PAGE_SIZE:
            raise BadGuestAddress(address, PAGE_SIZE, "empty or unaligned page address")
        if address != end:
            if end > start:
                runs.append((start, end - start))
            start = address
        end = address + PAGE_SIZE
    if end > start:
        runs.append((start, end - start))
    return runs

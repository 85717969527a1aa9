"""Guest RAM: memory at a bus address, its page allocator, two-level page directories, the driver's ring arithmetic.

Everything a driver keeps in memory is made of these. Pages are handed out scattered on purpose: nothing in this ABI is
contiguous by right, and a device that assumes otherwise must be found out.
"""

import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence

PAGE = 4096
PDIR_ENTRIES = 512
INVALID_IDX = -1
_U32 = struct.Struct("<I")


class GuestRam:
    """`size` bytes of memory at bus address `iova`; page 0 of the bus is never handed out.

    A `memfd` can be given to a server. Without, no descriptor is held: thousands of tests leave their RAM to the
    garbage collector, and more than 1024 descriptors are too many.
    """

    def __init__(self, size: int = 16 << 20, iova: int = 1 << 20, *, memfd: bool = False) -> None:
        assert size % PAGE == 0 == iova % PAGE
        self.size = size
        self.iova = iova
        self.fd = -1
        if memfd:
            self.fd = os.memfd_create("guest-ram")
            os.ftruncate(self.fd, size)
        self._mmap = mmap.mmap(self.fd, size)
        self.view = memoryview(self._mmap)
        self._free = deque(range(iova or PAGE, iova + size, PAGE))

    def close(self) -> None:
        """Close the descriptor, if any; the mapping goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def free_page_count(self) -> int:
        return len(self._free)

    def alloc(self, npages: int = 1) -> list[int]:
        """Bus addresses of `npages` zeroed pages, scattered and in no order."""
        assert npages <= len(self._free), "guest RAM is exhausted"
        take = [self._free.popleft() for _ in range(min(2 * npages, len(self._free)))]
        pages = (take[0::2] + take[1::2])[:npages][::-1]
        chosen = set(pages)
        self._free.extendleft(page for page in reversed(take) if page not in chosen)
        for page in pages:
            self.write(page, bytes(PAGE))
        return pages

    def alloc_contiguous(self, npages: int) -> int:
        """Bus address of `npages` zeroed pages in a row, as the kernel's own buffers are."""
        run: list[int] = []
        for page in sorted(self._free):
            run = [*run, page] if run and run[-1] + PAGE == page else [page]
            if len(run) == npages:
                break
        assert len(run) == npages, "guest RAM is exhausted"
        chosen = set(run)
        self._free = deque(page for page in self._free if page not in chosen)
        self.write(run[0], bytes(npages * PAGE))
        return run[0]

    def free(self, pages: Sequence[int]) -> None:
        """Poison and give back: who still writes there is seen by the next owner."""
        for page in pages:
            self.write(page, b"\x6b" * PAGE)
        self._free.extend(pages)

    def read(self, address: int, length: int) -> bytes:
        offset = address - self.iova
        assert 0 <= offset <= self.size - length
        return bytes(self.view[offset : offset + length])

    def write(self, address: int, data: bytes) -> None:
        offset = address - self.iova
        assert 0 <= offset <= self.size - len(data)
        self.view[offset : offset + len(data)] = data

    def read32(self, address: int) -> int:
        return int(_U32.unpack(self.read(address, 4))[0])

    def write32(self, address: int, value: int) -> None:
        self.write(address, _U32.pack(value))


class PageDir:
    """Pages named by a two-level directory, seen as one linear space of bytes.

    Source: pvrdma_misc.c pvrdma_page_dir_init: index = page, table = index >> 9, unused entries zero.
    """

    def __init__(self, ram: GuestRam, pages: Sequence[int]) -> None:
        self.ram = ram
        self.pages = list(pages)
        tables = max(1, -(-len(pages) // PDIR_ENTRIES))
        self.dir_dma, *self.tables = ram.alloc(1 + tables)
        for number, table in enumerate(self.tables):
            part = self.pages[number * PDIR_ENTRIES : (number + 1) * PDIR_ENTRIES]
            ram.write(self.dir_dma + 8 * number, struct.pack("<Q", table))
            ram.write(table, struct.pack(f"<{len(part)}Q", *part))

    @classmethod
    def alloc(cls, ram: GuestRam, npages: int) -> "PageDir":
        """A directory with pages of its own."""
        return cls(ram, ram.alloc(npages))

    def set_entry(self, index: int, page: int) -> None:
        """Rewrite one entry, as a hostile guest or an FRMR's owner would."""
        self.pages[index] = page
        self.ram.write(
            self.tables[index // PDIR_ENTRIES] + 8 * (index % PDIR_ENTRIES), struct.pack("<Q", page)
        )

    def free(self, *, with_pages: bool = True) -> None:
        self.ram.free([self.dir_dma, *self.tables, *(self.pages if with_pages else ())])

    def _parts(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        end = offset + length
        while offset < end:
            within = offset % PAGE
            take = min(end - offset, PAGE - within)
            yield self.pages[offset // PAGE] + within, take
            offset += take

    def read(self, offset: int, length: int) -> bytes:
        return b"".join(self.ram.read(at, take) for at, take in self._parts(offset, length))

    def write(self, offset: int, data: bytes) -> None:
        done = 0
        for at, take in self._parts(offset, len(data)):
            self.ram.write(at, data[done : done + take])
            done += take


def idx_valid(idx: int, max_elems: int) -> bool:
    """As the C: no bits above twice the size, which is exact for powers of two only."""
    return (idx & ~((max_elems << 1) - 1)) & 0xFFFF_FFFF == 0


def idx_inc(idx: int, max_elems: int) -> int:
    """As the C: masked with (2n - 1), whatever n is."""
    return ((idx + 1) & 0xFFFF_FFFF) & ((max_elems << 1) - 1)


class RingWords:
    """{prod_tail, cons_head} of one ring in guest memory, with the driver's arithmetic. Source: pvrdma_ring.h."""

    def __init__(self, ram: GuestRam, address: int, max_elems: int) -> None:
        self._ram = ram
        self._at = address
        self.max_elems = max_elems

    @property
    def prod_tail(self) -> int:
        return self._ram.read32(self._at)

    @prod_tail.setter
    def prod_tail(self, value: int) -> None:
        self._ram.write32(self._at, value)

    @property
    def cons_head(self) -> int:
        return self._ram.read32(self._at + 4)

    @cons_head.setter
    def cons_head(self, value: int) -> None:
        self._ram.write32(self._at + 4, value)

    def has_space(self) -> tuple[int, int]:
        """(1, 0 or INVALID_IDX; slot of the tail)."""
        tail, head, n = self.prod_tail, self.cons_head, self.max_elems
        if idx_valid(tail, n) and idx_valid(head, n):
            return int(tail != head ^ n), tail & (n - 1)
        return INVALID_IDX, 0

    def has_data(self) -> tuple[int, int]:
        """(1, 0 or INVALID_IDX; slot of the head)."""
        tail, head, n = self.prod_tail, self.cons_head, self.max_elems
        if idx_valid(tail, n) and idx_valid(head, n):
            return int(tail != head), head & (n - 1)
        return INVALID_IDX, 0

    def produce(self) -> None:
        self.prod_tail = idx_inc(self.prod_tail, self.max_elems)

    def consume(self) -> None:
        self.cons_head = idx_inc(self.cons_head, self.max_elems)

    def zero(self) -> None:
        self.cons_head = 0
        self.prod_tail = 0

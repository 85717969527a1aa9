"""Protection domains, memory regions and the table of keys.

Contract: every access of guest memory by key goes through `KeyTable.resolve_untrusted`, which
raises only `GuestError`. A key is `index << 8 | tag`; lkey and rkey are the same number. The tag
is the guest's to rotate (FAST_REG_MR), the index names the region. No key is 0 or 0xffffffff, and
a freed index rests until all others were used, so that a stale key finds nothing.
"""

from collections import deque
from dataclasses import dataclass, field
from errno import EINVAL, ENOMEM, EPERM

from pvrdma_server.backend import FastReg
from pvrdma_server.backend_soft.codes import (
    LOCAL_WRITE,
    REMOTE_ATOMIC,
    REMOTE_READ,
    REMOTE_WRITE,
)
from pvrdma_server.backend_soft.fast_path import Piece
from pvrdma_server.errors import BackendError, GuestError
from pvrdma_server.guest_memory import PAGE_SIZE, GuestMemory, GuestPages

_PAGE_MASK = PAGE_SIZE - 1
_RIGHTS = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC
_WRITES = LOCAL_WRITE | REMOTE_WRITE | REMOTE_ATOMIC
# Indices used before any is used again: a key of a region just destroyed stays dead for long.
QUARANTINE_FACTOR = 4
MAX_INDEX = 0xFF_FFFE


class KeyFault(GuestError):
    """A key names nothing, nothing of this protection domain, or does not allow the access."""

    kind = "key_fault"


class MemoryOperationFault(GuestError):
    """A FAST_REG_MR, LOCAL_INV or remote invalidate that may not be done."""

    kind = "memory_operation_fault"


@dataclass(slots=True, eq=False)
class SoftPd:
    """A protection domain; keys, QPs and SRQs compare it by identity."""

    privileged: bool
    alive: "set[SoftPd]"

    def destroy(self) -> None:
        """Give the place in the PD count back."""
        self.alive.discard(self)


@dataclass(slots=True, eq=False)
class SoftMr:
    """A memory region. `base` is the address of byte `first` of `pages`; None pages: DMA or unbound.

    `fast_pages` is the capacity of a fast-registration region, 0 for others.
    """

    table: "KeyTable"
    pd: SoftPd
    lkey: int
    access: int
    base: int = 0
    length: int = 0
    pages: GuestPages | None = None
    first: int = 0
    dma: GuestMemory | None = None
    fast_pages: int = 0
    valid: bool = True
    rkey: int = field(init=False)

    def __post_init__(self) -> None:
        self.rkey = self.lkey

    def bind_untrusted(self, memory: GuestMemory, arm: FastReg) -> None:
        """Put memory under a fast-registration region and rotate its tag.

        Raises:
            GuestError: it is bound already, or the pages do not hold what is asked.
        """
        offset = arm.iova & _PAGE_MASK
        if self.valid:
            raise MemoryOperationFault("the region is bound already")
        if len(arm.pages) > self.fast_pages or offset + arm.length > len(arm.pages) * PAGE_SIZE:
            raise MemoryOperationFault(f"{arm.length} bytes in {len(arm.pages)} pages")
        access = arm.access & _RIGHTS
        self.pages = GuestPages(memory, arm.pages, writable=bool(access & _WRITES))
        self.base, self.first, self.length, self.access = arm.iova, offset, arm.length, access
        self.valid = True
        self.lkey = self.rkey = arm.rkey

    def unbind(self) -> None:
        """Invalidate: the key stays the region's, and reaches nothing."""
        self.valid = False
        self.pages = None
        self.length = 0

    def destroy(self) -> None:
        """Invalidate the key for ever."""
        self.table.remove(self)


@dataclass(slots=True)
class KeyTable:
    """All regions by the index in their key."""

    max_mr: int
    _by_index: dict[int, SoftMr] = field(default_factory=dict)
    _free: deque[int] = field(default_factory=deque)
    _next_index: int = 1

    def resolve_untrusted(
        self, pd: SoftPd, key: int, address: int, length: int, need: int
    ) -> list[memoryview]:
        """Views of [address, address + length) under `key`; a zero length touches no key.

        Args:
            pd: the protection domain of whoever accesses.
            key: lkey or rkey.
            address: guest virtual address, or bus address under a DMA region.
            length: bytes.
            need: access bits the region must have, all of them.

        Raises:
            GuestError: the key does not allow that, or the memory is not there now.
        """
        if not length:
            return []
        mr = self._by_index.get(key >> 8)
        if mr is None or mr.lkey != key or mr.pd is not pd or need & ~mr.access:
            raise KeyFault(f"key {key:#x} does not give access {need:#x} here")
        if mr.pages is not None:
            start = address - mr.base
            if start < 0 or start + length > mr.length:
                raise KeyFault(f"key {key:#x}: [{address:#x}, +{length:#x}) is outside the region")
            return mr.pages.views_untrusted(mr.first + start, length)
        if mr.dma is None:
            raise KeyFault(f"key {key:#x} is not bound to memory")
        return mr.dma.views_untrusted(address, length, writable=bool(need & _WRITES))

    def piece_untrusted(self, pd: SoftPd, key: int, address: int, need: int) -> Piece:
        """All that `key` names of the memory in a row around `address`.

        Raises:
            GuestError: as `resolve_untrusted` of the byte at `address`.
        """
        self.check_untrusted(pd, key, address, 1, need)
        mr = self._by_index[key >> 8]
        if mr.pages is not None:
            start, view = mr.pages.piece_untrusted(mr.first + address - mr.base)
            before = max(0, mr.first - start)
            view = view[before : mr.first + mr.length - start]
            return Piece(mr.base + start + before - mr.first, view)
        if mr.dma is None:
            raise KeyFault(f"key {key:#x} is not bound to memory")
        return Piece(*mr.dma.piece_untrusted(address, writable=bool(need & _WRITES)))

    def check_untrusted(self, pd: SoftPd, key: int, address: int, length: int, need: int) -> None:
        """As `resolve_untrusted`, of keys and bounds only: the memory itself is not looked at.

        Raises:
            KeyFault: the key does not allow that.
        """
        if not length:
            return
        mr = self._by_index.get(key >> 8)
        if mr is None or mr.lkey != key or mr.pd is not pd or need & ~mr.access or not mr.valid:
            raise KeyFault(f"key {key:#x} does not give access {need:#x} here")
        start = address - mr.base
        if mr.dma is None and (start < 0 or start + length > mr.length):
            raise KeyFault(f"key {key:#x}: [{address:#x}, +{length:#x}) is outside the region")

    def fast_reg_untrusted(self, pd: SoftPd, memory: GuestMemory, arm: FastReg) -> None:
        """Execute FAST_REG_MR: the index names the region, the tag is new.

        Raises:
            GuestError: no such region of `pd`, it is bound, or its new pages are no good.
        """
        mr = self._by_index.get(arm.rkey >> 8)
        if mr is None or mr.pd is not pd or not mr.fast_pages:
            raise MemoryOperationFault(f"key {arm.rkey:#x} names no fast-registration region")
        mr.bind_untrusted(memory, arm)

    def invalidate_untrusted(self, pd: SoftPd, key: int) -> None:
        """Execute LOCAL_INV, or the invalidate of a SEND_WITH_INV that arrived.

        Raises:
            MemoryOperationFault: the key is not that of a fast-registration region of `pd`.
        """
        mr = self._by_index.get(key >> 8)
        if mr is None or mr.lkey != key or mr.pd is not pd or not mr.fast_pages:
            raise MemoryOperationFault(f"key {key:#x} cannot be invalidated here")
        mr.unbind()

    def add_user(
        self, pd: SoftPd, *, start: int, length: int, access: int, pages: GuestPages
    ) -> SoftMr:
        """A region of guest pages, addressed by guest virtual address."""
        first = start & _PAGE_MASK
        if length < 0 or first + length > pages.length_bytes:
            raise BackendError(EINVAL, "reg_mr", f"{length} bytes do not fit into the pages")
        mr = SoftMr(self, pd, self._new_key(), access & _RIGHTS, start, length, pages, first)
        self._by_index[mr.lkey >> 8] = mr
        return mr

    def add_dma(self, pd: SoftPd, memory: GuestMemory, *, access: int) -> SoftMr:
        """All guest memory by bus address; never for a user's domain, never remotely."""
        if not pd.privileged:
            raise BackendError(EPERM, "reg_dma_mr", "not a kernel protection domain")
        mr = SoftMr(self, pd, self._new_key(), access & LOCAL_WRITE, dma=memory)
        self._by_index[mr.lkey >> 8] = mr
        return mr

    def add_fast_reg(self, pd: SoftPd, *, max_pages: int) -> SoftMr:
        """A key without memory."""
        if not pd.privileged:
            raise BackendError(EPERM, "alloc_fast_reg_mr", "not a kernel protection domain")
        if max_pages < 1:
            raise BackendError(EINVAL, "alloc_fast_reg_mr", f"{max_pages} pages")
        mr = SoftMr(self, pd, self._new_key(), 0, fast_pages=max_pages, valid=False)
        self._by_index[mr.lkey >> 8] = mr
        return mr

    def remove(self, mr: SoftMr) -> None:
        """Forget a region; nothing when it is forgotten already."""
        index = mr.lkey >> 8
        if self._by_index.get(index) is mr:
            del self._by_index[index]
            self._free.append(index)
        mr.unbind()
        mr.dma = None

    def clear(self) -> None:
        """Forget every region, as after a device reset."""
        for mr in list(self._by_index.values()):
            self.remove(mr)

    def __len__(self) -> int:
        return len(self._by_index)

    def _new_key(self) -> int:
        if len(self._by_index) >= self.max_mr:
            raise BackendError(ENOMEM, "reg_mr", f"more than {self.max_mr} regions")
        fresh = self._next_index
        if fresh <= min(self.max_mr * QUARANTINE_FACTOR, MAX_INDEX):
            index, self._next_index = fresh, fresh + 1
        else:
            index = self._free.popleft()
        # A tag that differs from one region to the next: an index guessed is not a key guessed.
        return index << 8 | (index * 167 + 89 & 0xFF)

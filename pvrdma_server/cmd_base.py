"""What every command handler works with: the device's parts, handle reservation, and size checks.

Contract: a check fed by the guest raises `CommandError` with the errno that belongs in ERR.
"""

import errno
from typing import Any, Final, NamedTuple

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_verbs import ACCESS_HUGETLB, ACCESS_OPTIONAL_MASK, AccessFlags
from pvrdma_server.backend import RdmaBackend
from pvrdma_server.errors import CommandError
from pvrdma_server.guest_memory import (
    MAX_PDIR_PAGES,
    PAGE_SHIFT,
    PAGE_SIZE,
    GuestMemory,
    GuestPages,
    walk_pdir_untrusted,
)
from pvrdma_server.objects import DeviceHooks
from pvrdma_server.resources import HandleTable, Resources

# Access bits that a region or queue pair may ask for and that change nothing here: the optional ones, and how the
# guest made the memory.
IGNORED_ACCESS: Final = ACCESS_OPTIONAL_MASK | ACCESS_HUGETLB
# Bits that a region may have besides its rights. MW_BIND lets memory windows be bound to it, of which there are none.
REGION_ACCESS: Final = int(AccessFlags.MW_BIND | AccessFlags.ZERO_BASED)
# The rights a region or queue pair may give.
KNOWN_ACCESS: Final = int(
    AccessFlags.LOCAL_WRITE
    | AccessFlags.REMOTE_WRITE
    | AccessFlags.REMOTE_READ
    | AccessFlags.REMOTE_ATOMIC
)
# Rights of a peer that write, so that the owner must be able to write as well.
WRITING_ACCESS: Final = int(AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC)


class Adapter(NamedTuple):
    """What commands work on: the device's objects, its limits, and what is below and above them."""

    resources: Resources
    memory: GuestMemory
    backend: RdmaBackend
    hooks: DeviceHooks
    caps: api.DeviceCaps
    max_uar: int
    uar_pfn: int
    version: int
    moderated: bool


class RefusedResponse(NamedTuple):
    """A response whose `err` says no (MODIFY_QP only)."""

    err: int


class ReservedHandle:
    """Reserves a handle for a block; a block that fails gives it back."""

    __slots__ = ("_handle", "_table")

    def __init__(self, table: HandleTable[Any]) -> None:
        self._table = table
        self._handle = -1

    def __enter__(self) -> int:
        self._handle = self._table.reserve()
        return self._handle

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._table.release(self._handle)


def check_size(name: str, value: int, limit: int) -> int:
    """`value` if it is a power of two up to `limit`. Raises CommandError(EINVAL)."""
    if not 1 <= value <= limit or value & (value - 1):
        raise CommandError(errno.EINVAL, f"{name} {value} is not a power of two up to {limit}")
    return value


def check_count(name: str, value: int, limit: int) -> int:
    """`value` if it is 1 to `limit`. Raises CommandError(EINVAL).

    For scatter/gather elements: rdma-core sends what its caller asked for, and rounds up the entry's size only.
    """
    if not 1 <= value <= limit:
        raise CommandError(errno.EINVAL, f"{name} {value} is not 1 to {limit}")
    return value


def pages_for(entries: int, entry_size: int) -> int:
    """Pages that `entries` of `entry_size` bytes fill."""
    return (entries * entry_size + PAGE_SIZE - 1) >> PAGE_SHIFT


def queue_pages(adapter: Adapter, pdir_dma: int, pages: int) -> GuestPages:
    """The first `pages` pages of a directory, for rings. Raises BadGuestAddress."""
    return GuestPages(
        adapter.memory, walk_pdir_untrusted(adapter.memory, pdir_dma, pages), writable=True
    )


def check_chunks(nchunks: int, needed: int) -> None:
    """Refuse fewer pages than the queues need, and absurdly many. Raises CommandError(EINVAL)."""
    if not needed <= nchunks <= MAX_PDIR_PAGES:
        raise CommandError(errno.EINVAL, f"{nchunks} pages for queues that need {needed}")

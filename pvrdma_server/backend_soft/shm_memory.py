"""Memory for rings: sealed memfds, made here or taken from a peer that may be hostile.

Contract: what `map_ring_untrusted` returns cannot shrink, so no access to it ends in SIGBUS.
"""

import fcntl
import mmap
import os
import stat
from typing import Final

from pvrdma_server.backend_soft.shm_ring import CONTROL_BYTES
from pvrdma_server.errors import GuestError

_NEEDED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PAGE: Final = 4096


class BadRingMemory(GuestError):
    """A peer's descriptor is not a sealed memfd of the size it said."""

    kind = "bad_ring_memory"


def make_ring_memory(capacity: int) -> int:
    """A sealed memfd for a ring of `capacity` bytes; the caller closes it.

    Raises:
        OSError: no memory or no descriptors.
    """
    fd = os.memfd_create("pvrdma-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, CONTROL_BYTES + capacity)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _NEEDED)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_ring_untrusted(fd: int, capacity: int) -> mmap.mmap:
    """Map a peer's ring; the descriptor stays the caller's.

    Raises:
        BadRingMemory: it could shrink under us, has another size, or cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        facts = os.fstat(fd)
        block = os.fstatvfs(fd).f_bsize
    except OSError as e:
        raise BadRingMemory(f"not a memfd: {e.strerror}") from None
    if seals & _NEEDED != _NEEDED:
        raise BadRingMemory(f"seals {seals:#x} allow it to change its size")
    # Huge pages can run out when they are touched, which is a SIGBUS as well.
    if not stat.S_ISREG(facts.st_mode) or block != _PAGE:
        raise BadRingMemory("not ordinary memory")
    if facts.st_size != CONTROL_BYTES + capacity:
        raise BadRingMemory(f"{facts.st_size} bytes for a ring of {capacity}")
    try:
        return mmap.mmap(fd, facts.st_size)
    except OSError as e:  # sealed against writing, or read-only
        raise BadRingMemory(f"cannot be mapped: {e.strerror}") from None

"""Scattered guest pages as one contiguous piece of our address space, as the host's verbs want to see a region.

Contract: a `Mapping` names memory that stays mapped until `close`, whatever the client unmaps meanwhile. Pages that
already lie in one piece are used where they are; others are mapped a second time, run by run, by `mremap` with an old
size of 0, which duplicates a shared mapping. Each run costs one of the process's vm.max_map_count mappings.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final

from pvrdma_server.errors import BackendError

_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def address_of(view: memoryview) -> int:
    """Where a view's memory lies in this process.

    Raises:
        BackendError: it is read-only memory.
    """
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    except TypeError as e:
        raise BackendError(
            errno.EACCES, "ibv_reg_mr", "the client shares this memory read-only"
        ) from e


class Mapping:
    """The memory of `views`, in order and in one piece.

    Args:
        views: page-aligned pieces, lengths multiples of the page size.

    Raises:
        BackendError: no address space, or more mappings than vm.max_map_count allows.
    """

    __slots__ = ("_reserved", "_views", "address", "length_bytes", "runs")

    def __init__(self, views: Sequence[memoryview]) -> None:
        runs = _merge([(address_of(view), len(view)) for view in views])
        self.length_bytes = sum(length for _, length in runs)
        self.runs = len(runs)
        self._reserved = 0
        self._views: Sequence[memoryview] = views
        if len(runs) == 1:
            self.address = runs[0][0]
            return
        self.address = self._reserved = _reserve(self.length_bytes)
        try:
            position = self.address
            for address, length in runs:
                _duplicate(address, length, position, len(runs))
                position += length
        except BackendError:
            self.close()
            raise
        # The duplicates stand by themselves.
        self._views = ()

    def close(self) -> None:
        """Unmap it, or let go of it."""
        self._views = ()
        if self._reserved:
            _libc.munmap(self._reserved, self.length_bytes)
            self._reserved = 0


def _merge(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for address, length in pieces:
        if runs and sum(runs[-1]) == address:
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((address, length))
    return runs


def _reserve(length: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _libc.mmap(None, length, 0, flags, -1, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise BackendError(code, "mmap", f"no address space for a region of {length} bytes")
    return int(address)


def _duplicate(address: int, length: int, target: int, runs: int) -> None:
    moved = _libc.mremap(address, 0, length, _MREMAP_MAYMOVE | _MREMAP_FIXED, target)
    if moved == target:
        return
    code = ctypes.get_errno()
    why = os.strerror(code)
    if code == errno.ENOMEM:
        why = (
            f"a region in {runs} pieces needs as many mappings: raise vm.max_map_count "
            "(sysctl -w vm.max_map_count=1048576), or back guest memory with huge pages"
        )
    raise BackendError(code, "mremap", why)

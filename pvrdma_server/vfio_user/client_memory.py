"""The memory a vfio-user client shares with us: file descriptors to views that stay valid as long as they are held.

Contract: a view is a mapping of our own, not libvfio-user's (which goes away at unmap), and lives until the last
`memoryview` into it is dropped. A stale view reads old memory; it never crashes the process. One exception no server
can exclude: a client that truncates its file after mapping it makes every access to the lost pages fatal (SIGBUS).
"""

import mmap
import os
from pathlib import Path

from pvrdma_server.vfio_user.model import Reporter, VfioCounters

_NOT_SHARED = "guest RAM is not shared; use memory-backend-memfd,share=on"


class ClientMemory:
    """The regions one client has mapped.

    Args:
        report: rate-limited logging.
        counters: `dma_maps`, `dma_unmaps`, `dma_unusable`.
    """

    def __init__(self, report: Reporter, counters: VfioCounters) -> None:
        self._report = report
        self._counters = counters
        self._regions: set[tuple[int, int]] = set()
        self._private: dict[tuple[int, int], bool] = {}
        self._pid = 0

    def attach(self, pid: int) -> None:
        """A new client, process `pid`; 0 if unknown."""
        self._pid = pid
        self._private.clear()

    def begin(self, iova: int, length: int) -> bool:
        """Note a region; False when it is there already (libvfio-user reports a repeated map again)."""
        if (iova, length) in self._regions:
            return False
        self._regions.add((iova, length))
        self._counters.dma_maps += 1
        return True

    def end(self, iova: int, length: int) -> bool:
        """Forget a region; False when it was not there, or was refused."""
        if (iova, length) not in self._regions:
            return False
        self._regions.remove((iova, length))
        self._counters.dma_unmaps += 1
        return True

    def view(
        self, iova: int, length: int, source: tuple[int, int] | None, *, writable: bool
    ) -> memoryview | None:
        """A view of a region's memory, or None where there is none to be had (logged, unless that is normal).

        Args:
            iova: for the log.
            length: bytes.
            source: the client's descriptor and the offset in its file; None for what is not RAM.
            writable: what the client allows.
        """
        if source is None:
            return None
        fd, offset = source
        try:
            if not self._is_private(fd):
                return map_view(fd, offset, length, writable=writable)
            why = _NOT_SHARED
        except (OSError, ValueError, OverflowError) as error:
            why = f"cannot be mapped: {error}"
        self._counters.dma_unusable += 1
        self._report("error", "vfu.dma_unusable", why=why, iova=iova, length=length)
        return None

    def _is_private(self, fd: int) -> bool:
        state = os.fstat(fd)
        file = (state.st_dev, state.st_ino)
        if file not in self._private:
            self._private[file] = is_private_to(self._pid, fd)
        return self._private[file]


def map_view(fd: int, offset: int, length: int, *, writable: bool) -> memoryview:
    """A view of `length` bytes at byte `offset` of the client's file.

    Args:
        fd: the client's file descriptor; not kept.
        offset: where the memory starts in the file, bytes; need not be page-aligned.
        length: bytes.
        writable: False gives a read-only mapping and a read-only view.

    Raises:
        OSError: it cannot be mapped.
        ValueError: the file is shorter than that.
    """
    page = max(mmap.PAGESIZE, os.fstatvfs(fd).f_bsize)  # hugetlbfs reports its huge page
    if os.fstat(fd).st_size % page:
        page = mmap.PAGESIZE
    lead = offset % page
    mapped = mmap.mmap(
        fd,
        -(-(lead + length) // page) * page,
        flags=mmap.MAP_SHARED,
        prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        offset=offset - lead,
    )
    mapped.madvise(mmap.MADV_DONTDUMP)
    return memoryview(mapped)[lead : lead + length]


def is_private_to(pid: int, fd: int) -> bool:
    """Whether process `pid` maps the file behind `fd`, but only privately: then its writes never reach the file.

    That is QEMU's share=off: it still passes the descriptor, and we would see stale zeros for ever. False when it
    cannot be told (another user's process, no mapping at all).
    """
    try:
        state = os.fstat(fd)
        device = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}"
        lines = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    fields = (line.split(maxsplit=5) for line in lines)
    kinds = {f[1][3] for f in fields if f[3] == device and f[4] == str(state.st_ino)}
    return kinds == {"p"}

"""Which file lies behind guest memory: whether what the client maps is what was there before.

Contract: of memory at a guest address only its *origin* is kept: the file, and where in the file guest address 0 would
lie. Two mappings of the same memory at the same guest address have one origin, however the client cuts its regions.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pvrdma_server.backend_ibv.mapping import address_of
from pvrdma_server.errors import BackendError
from pvrdma_server.guest_memory import DmaRegion, GuestMemory


class Origin(NamedTuple):
    """A file, and the offset in it of guest address 0 (which may be negative)."""

    device: str
    inode: str
    bias: int


class Piece(NamedTuple):
    """Guest memory [start, end) of one origin."""

    start: int
    end: int
    origin: Origin


class Origins:
    """The origins of the client's regions, each looked up once."""

    def __init__(self, memory: GuestMemory) -> None:
        self._memory = memory
        self._known: dict[int, tuple[DmaRegion, Origin]] = {}

    def pieces(self, start: int, end: int) -> list[Piece]:
        """The RAM that is mapped in [start, end) now."""
        found = []
        for region in self._memory.regions:
            low, high = max(start, region.iova), min(end, region.iova + region.length)
            if low < high and (origin := self._of(region)) is not None:
                found.append(Piece(low, high, origin))
        return found

    def forget(self, iova: int) -> None:
        """The region at `iova` is gone."""
        self._known.pop(iova, None)

    def _of(self, region: DmaRegion) -> Origin | None:
        known = self._known.get(region.iova)
        if known is not None and known[0] is region:
            return known[1]
        if region.view is None:
            return None
        try:
            origin = _look_up(address_of(region.view), region.iova)
        except BackendError:
            return None  # read-only: nothing there is ever registered
        if origin is not None:
            self._known[region.iova] = (region, origin)
        return origin


def still_there(
    before: Iterable[Piece], now: Iterable[Piece], runs: Iterable[tuple[int, int]]
) -> bool:
    """Whether every run (guest address, length) that lay in `before` lies in the same memory `now`."""
    same: list[tuple[int, int]] = []
    for old in before:
        for new in now:
            low, high = max(old.start, new.start), min(old.end, new.end)
            if old.origin != new.origin or low >= high:
                continue
            if same and same[-1][1] == low:
                same[-1] = (same[-1][0], high)
            else:
                same.append((low, high))
    return all(any(low <= a and a + n <= high for low, high in same) for a, n in runs)


def _look_up(address: int, iova: int) -> Origin | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, inode, *_ = line.split(maxsplit=5)
        low, high = (int(word, 16) for word in span.split("-"))
        if low <= address < high:
            return Origin(device, inode, int(offset, 16) + address - low - iova)
    return None

"""The GID table of a host port as sysfs has it, at this moment: GIDs come and go with addresses.

Contract: `GidTable` may be asked from any thread. It reads the whole table only if a GID is not where it was, and that
not too often.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

# How often the whole GID table may be read because a GID is not where it was.
SCAN_INTERVAL_S: Final = 0.25
ROCE_V1, ROCE_V2 = 1, 2
_MAX_GID_INDEX: Final = 255
_NO_GID: Final = bytes(16)


class GidTable:
    """The GIDs of one port.

    Args:
        folder: the port's in sysfs, "/sys/class/infiniband/NAME/ports/NUMBER".
        clock_s: seconds that only grow.
    """

    _TYPES: Final = {"IB/RoCE v1": ROCE_V1, "RoCE v2": ROCE_V2}

    def __init__(self, folder: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock_s = clock_s
        self._known: dict[tuple[bytes, int], int] = {}
        self._next_scan_s = clock_s()
        self._lock = threading.Lock()

    def entry(self, index: int) -> tuple[bytes, int] | None:
        """(GID, type) at `index`, or None if there is none."""
        try:
            text = (self._folder / "gids" / str(index)).read_text()
            kind = (self._folder / "gid_attrs" / "types" / str(index)).read_text().strip()
        except OSError:
            return None
        gid = bytes.fromhex(text.replace(":", ""))
        return (gid, self._TYPES[kind]) if kind in self._TYPES and gid != _NO_GID else None

    def index_of(self, gid: bytes, gid_type: int) -> int | None:
        """Where `gid` of this type stands now, or None. Called from any thread."""
        with self._lock:
            index = self._known.get((gid, gid_type))
            if index is not None and self.entry(index) == (gid, gid_type):
                return index
            now_s = self._clock_s()
            if now_s < self._next_scan_s:
                return None
            self._next_scan_s = now_s + SCAN_INTERVAL_S
            self._scan()
            return self._known.get((gid, gid_type))

    def _scan(self) -> None:
        self._known.clear()
        try:
            names = os.listdir(self._folder / "gids")
        except OSError:
            return
        for index in sorted(int(name) for name in names):
            found = self.entry(index) if index <= _MAX_GID_INDEX else None
            if found is not None:
                self._known.setdefault(found, index)

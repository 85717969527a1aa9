"""What rings in shared memory need and Python lacks: fences, and a look that lasts a moment without the GIL.

Contract: every class here has two forms, in C (`_ring_build`) and in Python, with the same results; the one in C is
taken where the extension is built. Views given to a constructor are held until `release`.
"""

import os
import platform
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, Protocol

extension: Any = None
try:
    from pvrdma_server import _ring

    extension = _ring
except ImportError:  # not built: the forms in Python
    pass

# x86 keeps stores in order and loads in order by itself; elsewhere publishing needs the fence, too.
_IN_ORDER: Final = platform.machine() in ("x86_64", "AMD64", "i686")
# Of a yield that somebody else made use of for so long there is none for so many times as long: who keeps the CPU does
# not wait for us. The same numbers as in C.
_LONG_NS: Final = 400_000
_SELDOM: Final = 50
# Somebody else must be able to run meanwhile, or waiting is only in the way.
LINGER_PAYS: Final = len(os.sched_getaffinity(0)) > 1


def _make_fence() -> Callable[[], object]:
    # Taking a lock is an atomic read-modify-write, which on x86 orders everything.
    lock = threading.Lock()

    def fence() -> None:
        lock.acquire()
        lock.release()

    return fence


def _nothing() -> None:
    """The machine orders it."""


full_fence: Final[Callable[[], object]] = (
    _make_fence() if extension is None else extension.lib.ring_fence
)
"""Nothing before it is reordered with anything after it."""
order_fence: Final[Callable[[], object]] = _nothing if _IN_ORDER else full_fence
"""Stores before it become visible before stores after it, and loads likewise."""


class Lingered(IntEnum):
    """What `Linger.wait` saw."""

    NOTHING = 0
    CHANGED = 1
    STOPPED = 2


class Looker(Protocol):
    """Who looks for everything that is not a peer's: `watcher.RingWatcher`.

    Attributes:
        signalled: a byte that is not 0 when there is something to do.
        look_in_c: addresses of `int look(void *, int)`, which looks at once (second argument -1), and of its first
            argument; None where there is none.
    """

    signalled: memoryview
    look_in_c: tuple[int, int] | None


def look_in_c(looker: Looker | None) -> tuple[Any, Any]:
    """`Looker.look_in_c` as the extension takes it."""
    ffi = extension.ffi
    if looker is None or looker.look_in_c is None:
        return ffi.NULL, ffi.NULL
    look, watch = looker.look_in_c
    return ffi.cast("ring_look", look), ffi.cast("void *", watch)


class Linger(Protocol):
    """Looks at an index of each of a link's rings, and asks a `Looker` whether something else is to be done.

    Between two looks whoever waits for this CPU gets it: it may be the peer, or the guest.
    """

    def wait(self, head: int, room: int | None, limit_ns: int) -> int:
        """Look until an index is not `head`, or not `room` (None: never mind), or there is something else."""

    def release(self) -> None:
        """Let the views go."""


class PythonLinger:
    """See `Linger`. Holds the GIL.

    Args:
        head, room: views that begin with the 64-bit index.
        looker: who says that there is something else, or None. Here only its byte is looked at.
    """

    def __init__(self, head: memoryview, room: memoryview, looker: Looker | None) -> None:
        self._head = memoryview(head).cast("B")[:8].cast("Q")
        self._room = memoryview(room).cast("B")[:8].cast("Q")
        self._stop = looker.signalled if looker is not None else None
        self._again_ns = 0

    def wait(self, head: int, room: int | None, limit_ns: int) -> int:
        """See `Linger`."""
        end_ns = time.monotonic_ns() + limit_ns
        heads, rooms, stop = self._head, self._room, self._stop
        while True:
            if heads[0] != head or (room is not None and rooms[0] != room):
                return Lingered.CHANGED
            if stop is not None and stop[0]:
                return Lingered.STOPPED
            now_ns = time.monotonic_ns()
            if now_ns >= end_ns:
                return Lingered.NOTHING
            if now_ns >= self._again_ns:
                os.sched_yield()
                after_ns = time.monotonic_ns()
                if after_ns - now_ns > _LONG_NS:
                    self._again_ns = after_ns + _SELDOM * (after_ns - now_ns)

    def release(self) -> None:
        """See `Linger`."""
        self._head.release()
        self._room.release()


class CLinger:
    """See `Linger` and, for the arguments, `PythonLinger`."""

    def __init__(self, head: memoryview, room: memoryview, looker: Looker | None) -> None:
        ffi = extension.ffi
        self._wait = extension.lib.ring_linger
        self._head = ffi.from_buffer("uint64_t[]", head)
        self._room = ffi.from_buffer("uint64_t[]", room)
        stop = ffi.NULL if looker is None else ffi.from_buffer("uint8_t[]", looker.signalled)
        self._else = (stop, *look_in_c(looker))
        self._null = ffi.NULL

    def wait(self, head: int, room: int | None, limit_ns: int) -> int:
        """See `Linger`."""
        if room is None:
            seen: int = self._wait(self._head, head, self._null, 0, *self._else, limit_ns)
        else:
            seen = self._wait(self._head, head, self._room, room, *self._else, limit_ns)
        return seen

    def release(self) -> None:
        """See `Linger`."""
        extension.ffi.release(self._head)
        extension.ffi.release(self._room)


def make_linger(head: memoryview, room: memoryview, looker: Looker | None) -> Linger:
    """The form that this machine has."""
    if extension is None:
        return PythonLinger(head, room, looker)
    return CLinger(head, room, looker)

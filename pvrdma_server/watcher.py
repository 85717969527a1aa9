"""Watches index words of rings in guest memory, for guests whose doorbells reach nobody.

A watched ring is 8 bytes {prod_tail u32, cons_head u32}. While it is *armed* and the two differ, it fires: once, then
it is disarmed until `rearm`. So the owner's loop is: `fd` readable, `fired()`, drain each ring, `rearm` it when it was
found empty. The words are a level and not an event: whatever was posted before, during or after `rearm` fires it, so no
work is lost however the two race. The words are only compared for equality: a guest can do no more than fire them.

The same descriptor tells a deadline, because epoll's own timeouts know only milliseconds.

Contract: `add`, `remove`, `rearm` and `set_deadline` may be called from any thread, `fired` from one, and `close` when
nobody is in another call. `add` keeps the view, and so the memory's mapping, until `remove`. A token of a removed ring
means nothing: `rearm` and `remove` ignore it.

`CWatcher` is the real one: a thread in C that runs without the GIL (design and memory order: `_watch_build.py`).
`PythonWatcher` is its twin for tests and for machines where the extension is not built; it is slower to notice.
"""

import errno
import os
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal, NamedTuple, Protocol

try:
    from pvrdma_server import _watch
except ImportError:  # not built; `make_watcher` falls back
    _extension: Any = None
else:
    _extension = _watch

# Stops a guest that creates rings without end. The same number as WATCH_LIMIT in C.
MAX_WATCHED: Final = 65536
_STATE_SIZE: Final = 8
_BATCH: Final = 256
_NEVER: Final = (1 << 63) - 1


class SleepPolicy(NamedTuple):
    """How long the thread sleeps between two looks at armed rings; with none armed it is blocked and costs nothing.

    Attributes:
        spin_ns: after something fired or was armed, look without sleeping for this long. Costs a core.
        min_sleep_ns: the first sleep after that; every further one is twice as long.
        max_sleep_ns: the longest, at first: the latency of the first request after a pause.
        quiet_sleep_ns: the longest after that. It is at most a 64th of the time in which nothing happened, so that only
            who was quiet for most of a second waits longer. One wake-up was measured to cost 17 us of CPU in a busy
            virtual machine, and a look at the rings of 1000 queue pairs 35 us: every 10 ms, that is half a percent.
            The thread in Python does without.
    """

    spin_ns: int = 0
    min_sleep_ns: int = 20_000
    max_sleep_ns: int = 3_000_000
    quiet_sleep_ns: int = 10_000_000


C_POLICY: Final = SleepPolicy()
# Python needs tens of microseconds per look, and takes the GIL from everybody for it.
PYTHON_POLICY: Final = SleepPolicy(0, 500_000, 10_000_000)


class RingWatcher(Protocol):
    """What the module's docstring describes.

    Attributes:
        fd: readable when a ring fired or the deadline has come.
        signalled: one byte, not 0 while a ring has fired that `fired` has not told; for who cannot look at `fd`.
        look_in_c: addresses of a function in C and of its first argument, for who attends without Python: `int
            look(void *, int token)` looks at some rings, in turn, but not at that of the token (-1: at any), and
            returns whether one has fired. None where there is none. No call may follow `close`.
    """

    fd: int
    signalled: memoryview
    look_in_c: tuple[int, int] | None

    def attend(self) -> None:
        """From now on the caller looks, by `look` or `look_in_c`, all the time: nobody else need hurry."""

    def look(self) -> bool:
        """For who attends: whether one has fired that `fired` has not told. The one in C looks at some, in turn."""

    def leave(self) -> None:
        """The caller goes to sleep."""

    def add(self, state: memoryview) -> int:
        """Watch the 8 bytes `state` (contiguous, aligned to 4). Armed at once. Returns a token.

        Raises:
            ValueError: not such a view, or the watcher is closed.
            OSError: ENOSPC, more than `MAX_WATCHED` rings; ENOMEM.
        """

    def rearm(self, token: int) -> None:
        """Fire again as soon as the words differ, at once if they do already. Nothing unless disarmed."""

    def remove(self, token: int) -> None:
        """Forget a ring. When this returns its words are not read any more and its view is let go."""

    def fired(self) -> list[int]:
        """Tokens of the rings that fired since the last call, now disarmed. `fd` is not readable afterwards."""

    def set_deadline(self, when_ns: int | None) -> None:
        """Make `fd` readable at `when_ns` (CLOCK_MONOTONIC), once. Replaces the last deadline; None cancels it."""

    def close(self) -> None:
        """Stop watching, join the thread, let all views go. Does nothing the second time."""


def make_watcher(
    prefer: Literal["c", "python"] = "c", policy: SleepPolicy | None = None
) -> RingWatcher:
    """The watcher in C if it is built and preferred, or its twin in Python."""
    if prefer == "c" and _extension is not None:
        return CWatcher(policy or C_POLICY)
    return PythonWatcher(policy or PYTHON_POLICY)


def _checked(state: memoryview) -> memoryview:
    """Our own view of the state, so that letting it go does not touch the caller's."""
    if state.nbytes != _STATE_SIZE or not state.c_contiguous:
        raise ValueError(f"a ring state is 8 contiguous bytes, not {state.nbytes}")
    return memoryview(state).cast("B")


# --- C ----------------------------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """Keeps guest memory mapped while the thread may read it."""

    words: Any
    view: memoryview

    def let_go(self) -> None:
        _extension.ffi.release(self.words)
        self.view.release()


class CWatcher:
    """See `RingWatcher`; `fd` is an epoll descriptor over an eventfd and a timerfd.

    Raises:
        OSError: no descriptors or threads left.
    """

    def __init__(self, policy: SleepPolicy = C_POLICY) -> None:
        self._lib = _extension.lib
        flag = _extension.ffi.new("uint8_t[1]")
        self.signalled = memoryview(_extension.ffi.buffer(flag)).toreadonly()
        self._watch = self._lib.watch_open(*policy, flag)
        if not self._watch:
            raise OSError(_extension.ffi.errno, os.strerror(_extension.ffi.errno))
        self.fd: int = self._lib.watch_fd(self._watch)
        ffi = _extension.ffi
        look = ffi.addressof(self._lib, "watch_look")
        self.look_in_c: tuple[int, int] | None = (
            int(ffi.cast("uintptr_t", look)),
            int(ffi.cast("uintptr_t", self._watch)),
        )
        self._tokens = _extension.ffi.new("int[]", _BATCH)
        self._held: dict[int, _Held] = {}
        # Also when a watcher is dropped or the interpreter ends: the thread must be gone before the memory is.
        self._stop = weakref.finalize(self, _close_c, self._watch, self._held, flag)

    def add(self, state: memoryview) -> int:
        """See `RingWatcher`."""
        if not self._stop.alive:
            raise ValueError("the watcher is closed")
        view = _checked(state)
        held = _Held(_extension.ffi.from_buffer("uint32_t[]", view), view)
        token: int = self._lib.watch_add(self._watch, held.words)
        if token < 0:
            held.let_go()
            if token == -errno.EINVAL:
                raise ValueError("a ring state is aligned to 4 bytes")
            raise OSError(-token, os.strerror(-token))
        self._held[token] = held
        return token

    def rearm(self, token: int) -> None:
        """See `RingWatcher`."""
        if self._stop.alive:
            self._lib.watch_rearm(self._watch, token)

    def remove(self, token: int) -> None:
        """See `RingWatcher`."""
        held = self._held.pop(token, None)
        if held is not None:
            self._lib.watch_remove(self._watch, token)
            held.let_go()

    def fired(self) -> list[int]:
        """See `RingWatcher`."""
        tokens: list[int] = []
        got = _BATCH if self._stop.alive else 0
        while got == _BATCH:
            got = self._lib.watch_fired(self._watch, self._tokens, _BATCH)
            tokens += _extension.ffi.unpack(self._tokens, got)
        return tokens

    def set_deadline(self, when_ns: int | None) -> None:
        """See `RingWatcher`."""
        if self._stop.alive:
            self._lib.watch_set_deadline(self._watch, _NEVER if when_ns is None else when_ns)

    def attend(self) -> None:
        """See `RingWatcher`."""
        if self._stop.alive:
            self._lib.watch_attend(self._watch)

    def look(self) -> bool:
        """See `RingWatcher`."""
        return self._stop.alive and bool(self._lib.watch_look(self._watch, -1))

    def leave(self) -> None:
        """See `RingWatcher`."""
        if self._stop.alive:
            self._lib.watch_leave(self._watch)

    def close(self) -> None:
        """See `RingWatcher`."""
        self._stop()
        self.fd = -1


def _close_c(watch: Any, held: dict[int, _Held], _flag: Any) -> None:
    # The thread writes the flag until it ends.
    _extension.lib.watch_close(watch)
    for each in held.values():
        each.let_go()
    held.clear()


# --- Python -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    words: memoryview
    armed: bool = True


@dataclass(slots=True)
class _Shared:
    """What the thread and its callers share, under `change`. Not the watcher itself: that may be dropped unclosed."""

    policy: SleepPolicy
    event_fd: int
    change: threading.Condition = field(default_factory=threading.Condition)
    entries: dict[int, _Entry] = field(default_factory=dict)
    fired: list[int] = field(default_factory=list)
    signalled: bytearray = field(default_factory=lambda: bytearray(1))
    deadline_ns: int = _NEVER
    sleep_ns: int = 0
    stop: bool = False

    def signal(self) -> None:
        self.signalled[0] = bool(self.fired)
        os.eventfd_write(self.event_fd, 1)

    def look(self, token: int, entry: _Entry) -> bool:
        """Whether an armed ring fired."""
        words = entry.words
        if not entry.armed or words[0] == words[1]:
            return False
        entry.armed = False
        self.fired.append(token)
        return True

    def arm(self, token: int, entry: _Entry) -> None:
        entry.armed = True
        if self.look(token, entry):
            self.signal()
        self.hurry()

    def hurry(self) -> None:
        self.sleep_ns = self.policy.min_sleep_ns
        self.change.notify()

    def timeout_s(self) -> float | None:
        """Until the next look or the deadline; None when there is nothing to look at and none."""
        waits = [self.deadline_ns - time.monotonic_ns()] if self.deadline_ns != _NEVER else []
        if any(entry.armed for entry in self.entries.values()):
            waits.append(self.sleep_ns)
        return max(0, min(waits)) / 1e9 if waits else None

    def run(self) -> None:
        with self.change:
            while not self.stop:
                fired = [self.look(token, entry) for token, entry in self.entries.items()]
                expired = time.monotonic_ns() >= self.deadline_ns
                if expired:
                    self.deadline_ns = _NEVER
                if expired or any(fired):
                    self.sleep_ns = self.policy.min_sleep_ns
                    self.signal()
                timeout_s = self.timeout_s()
                self.sleep_ns = min(2 * self.sleep_ns, self.policy.max_sleep_ns)
                self.change.wait(timeout_s)


class PythonWatcher:
    """See `RingWatcher`. It never spins."""

    def __init__(self, policy: SleepPolicy = PYTHON_POLICY) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._shared = _Shared(policy, self.fd)
        self.signalled = memoryview(self._shared.signalled).toreadonly()
        self.look_in_c: tuple[int, int] | None = None
        self._next_token = count()
        thread = threading.Thread(target=self._shared.run, name="ring-watcher", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _close_python, thread, self._shared)

    def add(self, state: memoryview) -> int:
        """See `RingWatcher`."""
        if not self._stop.alive:
            raise ValueError("the watcher is closed")
        shared, token = self._shared, next(self._next_token)
        with shared.change:
            if len(shared.entries) >= MAX_WATCHED:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            entry = shared.entries[token] = _Entry(_checked(state).cast("I"))
            shared.arm(token, entry)
        return token

    def rearm(self, token: int) -> None:
        """See `RingWatcher`."""
        shared = self._shared
        with shared.change:
            entry = shared.entries.get(token)
            if entry is not None and not entry.armed and token not in shared.fired:
                shared.arm(token, entry)

    def remove(self, token: int) -> None:
        """See `RingWatcher`."""
        shared = self._shared
        with shared.change:
            entry = shared.entries.pop(token, None)
            if entry is not None:
                entry.words.release()
                if token in shared.fired:
                    shared.fired.remove(token)

    def fired(self) -> list[int]:
        """See `RingWatcher`."""
        shared = self._shared
        with shared.change:
            if self._stop.alive:
                with suppress(BlockingIOError):
                    os.eventfd_read(shared.event_fd)
            tokens, shared.fired = shared.fired, []
            shared.signalled[0] = 0
        return tokens

    def set_deadline(self, when_ns: int | None) -> None:
        """See `RingWatcher`."""
        with self._shared.change:
            self._shared.deadline_ns = _NEVER if when_ns is None else when_ns
            self._shared.change.notify()

    def attend(self) -> None:
        """See `RingWatcher`. The thread goes on as ever: it needs the GIL for its looks, as its caller does."""

    def look(self) -> bool:
        """See `RingWatcher`."""
        return bool(self.signalled[0])

    def leave(self) -> None:
        """See `RingWatcher`."""

    def close(self) -> None:
        """See `RingWatcher`."""
        self._stop()
        self.fd = -1


def _close_python(thread: threading.Thread, shared: _Shared) -> None:
    with shared.change:
        shared.stop = True
        shared.change.notify()
    thread.join()
    for entry in shared.entries.values():
        entry.words.release()
    shared.entries.clear()
    shared.fired.clear()
    os.close(shared.event_fd)

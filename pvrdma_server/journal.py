"""What the device counts and what it says: a guest can make it count without end, but not talk without end.

Contract: the only logger of the device core. A guest error is logged once per (object kind, error kind), and steps of
drivers' lives one by one up to a number, then at powers of two.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from pvrdma_server.errors import GuestError

# Different (object kind, error kind) pairs that may be logged in one server's life: a guest cannot flood the log.
MAX_GUEST_WARNINGS: Final = 256
# Steps of drivers' lives (activated, reset) that are logged one by one; later ones only at powers of two, so that a
# driver that loads and unloads without end does not flood the log either.
MAX_LIFE_LINES: Final = 200
# Illegal acts of the guest that are kept to be shown.
MAX_RECENT_ERRORS: Final = 32


@dataclass(slots=True)
class DeviceCounters:
    """Counts since the server started, for status and for leak checks."""

    commands: Counter[str] = field(default_factory=Counter)
    guest_errors: Counter[str] = field(default_factory=Counter)
    doorbells: int = 0
    polls: int = 0
    interrupts: int = 0
    async_events: int = 0
    events_dropped: int = 0
    resets: int = 0


class RecentError(NamedTuple):
    """An illegal act of the guest. `time_s` is the time of the device's clock, `what` the kind of object."""

    time_s: float
    what: str
    kind: str
    error: str


class Journal:
    """The counters and the log of one device; `clock_s` gives the times of recent errors."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.counters = DeviceCounters()
        self.recent_errors: deque[RecentError] = deque(maxlen=MAX_RECENT_ERRORS)
        self._clock_s = clock_s
        self._log: Any = structlog.get_logger(component="device")
        self._warned: set[tuple[str, str]] = set()
        self._life_steps = 0

    def guest_error(self, what: str, error: GuestError) -> None:
        """Count an illegal act of the guest, and warn of the first of its kind."""
        self.counters.guest_errors[error.kind] += 1
        self.recent_errors.append(RecentError(self._clock_s(), what, error.kind, str(error)))
        key = (what, error.kind)
        if key not in self._warned and len(self._warned) < MAX_GUEST_WARNINGS:
            self._warned.add(key)
            self._log.warning(
                "guest_error", what=what, kind=error.kind, error=str(error), once=True
            )

    def life(self, event: str, **values: object) -> None:
        """Log a step of a driver's life."""
        self._life_steps += 1
        steps = self._life_steps
        if steps <= MAX_LIFE_LINES or steps & (steps - 1) == 0:
            self._log.info(event, step=steps, **values)

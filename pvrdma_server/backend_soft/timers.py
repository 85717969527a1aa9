"""Deadlines of queue pairs: a heap with at most one entry each, corrected lazily.

Contract: setting a later deadline, or none, costs an assignment and no heap operation; an entry that
comes up early is put back. Whoever waits for nothing costs nothing (but one wake-up).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Protocol


class Timed(Protocol):
    """Who has a deadline. `deadline_ns` None: none; `queued_ns` is the heap's business."""

    deadline_ns: int | None
    queued_ns: int | None

    def expired(self) -> None:
        """The deadline passed; it is None now."""


@dataclass(slots=True)
class Timers:
    """All deadlines of one backend."""

    _heap: list[tuple[int, int, Timed]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)
    _limit: int = 64

    def set(self, timed: Timed, deadline_ns: int) -> None:
        """Have `timed.expired` called once `deadline_ns` has passed, unless it is set anew."""
        timed.deadline_ns = deadline_ns
        if timed.queued_ns is None or deadline_ns < timed.queued_ns:
            timed.queued_ns = deadline_ns
            heappush(self._heap, (deadline_ns, next(self._order), timed))
            # Stops a guest whose deadlines alternate (RNR) from leaving stale entries behind.
            if len(self._heap) > self._limit:
                self._compact()

    def fire(self, now_ns: int) -> None:
        """Call everything whose deadline passed."""
        while self._heap and self._heap[0][0] <= now_ns:
            self._pop(now_ns)

    def next_ns(self) -> int | None:
        """When to call `fire` next, or None: the earliest deadline or, once in a while, earlier.

        Not exact on purpose: a queue that is busy moves its deadline with every message.
        """
        while self._heap:
            queued_ns, _, timed = self._heap[0]
            if timed.queued_ns == queued_ns:
                return queued_ns
            self._drop()
        return None

    def _pop(self, now_ns: int) -> None:
        queued_ns, _, timed = self._heap[0]
        deadline_ns = timed.deadline_ns
        if timed.queued_ns != queued_ns or deadline_ns is None:
            self._drop()
        elif deadline_ns > now_ns:
            self._requeue(timed)
        else:
            self._drop()
            timed.deadline_ns = None
            timed.expired()

    def _compact(self) -> None:
        # Of equal entries of one owner the first in order is as good as any.
        alive = {id(e[2]): e for e in self._heap if e[2].queued_ns == e[0]}
        self._heap = sorted(alive.values(), key=lambda entry: entry[:2])
        self._limit = max(64, 2 * len(self._heap))

    def _drop(self) -> None:
        queued_ns, _, timed = heappop(self._heap)
        if timed.queued_ns == queued_ns:
            timed.queued_ns = None

    def _requeue(self, timed: Timed) -> None:
        heappop(self._heap)
        assert timed.deadline_ns is not None
        timed.queued_ns = timed.deadline_ns
        heappush(self._heap, (timed.deadline_ns, next(self._order), timed))

"""Rings that are watched instead of announced by doorbells, and completions that are announced by moderation.

A store to a mapped doorbell page reaches nobody, so the device looks at the rings themselves: an adapter watches their
index words and says which ring has entries (`RingWatch`). A watched ring fires once and is armed again when the device
has found it empty, so no work is lost however the two race.

What a mapped page loses for good is the ARM of a completion queue (the program's next POLL overwrites it). So a
moderated CQ notifies when a completion has lain unconsumed for a while and no notification is outstanding. A spurious
event is legal; a lost one hangs a program: a notification counts as outstanding only until the program has consumed
anything.

A program may take its event, arm, and sleep without having polled that CQ. Mellanox's HCAs get the consumer's index
with an arm, and notify at once if it is behind; UCX relies on that. Here nobody sees such an arm, or sees no index with
it: so a process that leaves completions where they are is told again, later and later, which costs little and ends
every sleep. So is one that took some and left some: it may take one with each event, and have had fewer events.

Contract: no clock here; the adapter calls `moderate` a while after `pending` became true, and `repeat` when that says.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from pvrdma_server.errors import BadGuestAddress, GuestError
from pvrdma_server.objects import Armed, Cq
from pvrdma_server.rings import ConsumerRing


class RingWatch(Protocol):
    """Who watches the index words."""

    def add(self, state: memoryview) -> int:
        """Watch 8 bytes {prod_tail, cons_head}; armed. Returns a token."""

    def rearm(self, token: int) -> None:
        """Fire again as soon as the two words differ."""

    def remove(self, token: int) -> None:
        """The words are not read any more when this returns."""


@dataclass(slots=True, eq=False)
class _Watched:
    ring: ConsumerRing
    bell: Callable[[], None]


class RingWatches:
    """The watched rings of one device."""

    def __init__(self, watch: RingWatch) -> None:
        self._watch = watch
        self._by_token: dict[int, _Watched] = {}
        self._lost: list[_Watched] = []

    def add(self, ring: ConsumerRing, bell: Callable[[], None]) -> None:
        """Call `bell` when `ring` has entries."""
        self._add(_Watched(ring, bell))

    def _add(self, watched: _Watched) -> None:
        try:
            state = watched.ring.state_untrusted()
        except BadGuestAddress:
            self._lost.append(watched)
            return
        token = self._watch.add(state)
        watched.ring.watch_token = token
        self._by_token[token] = watched

    def remove(self, ring: ConsumerRing) -> None:
        """Forget `ring`."""
        if ring.watch_token is not None:
            self._watch.remove(ring.watch_token)
            del self._by_token[ring.watch_token]
            ring.watch_token = None
        else:
            self._lost = [watched for watched in self._lost if watched.ring is not ring]

    def rearm(self, token: int) -> None:
        """The ring of this token was found empty."""
        self._watch.rearm(token)

    def memory_left(self) -> None:
        """Memory was unmapped: stop watching the words in it."""
        for watched in list(self._by_token.values()):
            if watched.ring.stale:
                self.remove(watched.ring)
                self._lost.append(watched)

    def memory_came(self) -> None:
        """Memory was mapped: watch again what can be watched."""
        lost, self._lost = self._lost, []
        for watched in lost:
            self._add(watched)

    def fired(self, tokens: Iterable[int]) -> None:
        """Ring the bells of rings that have entries; tokens of rings that are gone mean nothing."""
        for token in tokens:
            watched = self._by_token.get(token)
            if watched is not None:
                watched.bell()

    def __len__(self) -> int:
        return len(self._by_token)


# How long completions of a CQ lie there and none is taken, after a process was told of them or armed the CQ, until it
# is told again; then twice as long, and so on. Far longer than a program takes from its event to its poll, if the
# machine is not overloaded: some take a completion with each event for granted.
REPEAT_NS: Final = 100_000_000


@dataclass(slots=True, eq=False)
class _Repeat:
    """A CQ that is told again unless its consumer has moved from `head`; from anywhere, if that is None."""

    cq: Cq
    head: int | None
    wait_ns: int = REPEAT_NS


class Repeats:
    """Notifies again where a process may have taken its event, armed, and gone to sleep without a poll."""

    def __init__(self, notify: Callable[[Cq], None]) -> None:
        self._notify = notify
        self._by_cq: dict[Cq, _Repeat] = {}
        self._new: list[_Repeat] = []
        self._times: list[tuple[int, int, _Repeat]] = []
        self._count = itertools.count()

    @property
    def pending(self) -> bool:
        """Whether `repeat` is to be called, now or soon, to learn when it is to be called next."""
        return bool(self._new)

    def armed(self, cq: Cq) -> None:
        """A process armed a CQ by a doorbell: what lies there already notifies nobody by itself."""
        try:
            used = cq.ring.used_untrusted()
        except BadGuestAddress:
            self.told(cq, None)
        except GuestError:
            return
        else:
            if used:
                self.told(cq, cq.ring.seen_head)

    def told(self, cq: Cq, head: int | None) -> None:
        """A process knows of what lies in a CQ whose consumer's index is `head`, or sleeps until it is told."""
        known = self._by_cq.get(cq)
        if known is None or known.head != head:
            self._by_cq[cq] = made = _Repeat(cq, head)
            self._new.append(made)

    def consumed(self, cq: Cq) -> None:
        """Its process has looked at a CQ, or it is gone."""
        self._by_cq.pop(cq, None)

    def clear(self) -> None:
        """Forget all."""
        self._by_cq.clear()
        self._new.clear()
        self._times.clear()

    def repeat(self, now_ns: int) -> int | None:
        """Notify where it is time; when to be called next, if at all."""
        new, self._new = self._new, []
        while self._times and self._times[0][0] <= now_ns:
            repeat = heapq.heappop(self._times)[2]
            if self._by_cq.get(repeat.cq) is repeat and self._waits(repeat):
                new.append(repeat)
        for repeat in new:
            # In steps, so that many events in a row do not wake us once for each.
            due_ns = (now_ns + repeat.wait_ns) // REPEAT_NS * REPEAT_NS + REPEAT_NS
            heapq.heappush(self._times, (due_ns, next(self._count), repeat))
        return self._times[0][0] if self._times else None

    def _waits(self, repeat: _Repeat) -> bool:
        """Notify, unless somebody has consumed lately; whether to look again later."""
        cq = repeat.cq
        repeat.wait_ns *= 2
        try:
            waits = cq.ring.used_untrusted() > 0
        except BadGuestAddress:
            return True  # unmapped at the moment: look again later
        except GuestError:
            waits = False
        if not waits or not (cq.moderated or cq.armed):
            del self._by_cq[cq]
            return False
        head = cq.ring.seen_head
        if repeat.head not in (None, head):
            # Some were taken and some left, maybe by a program that takes one with each event.
            repeat.head, repeat.wait_ns = head, REPEAT_NS
            return True
        cq.armed, cq.notified_head = Armed.NO, head
        self._notify(cq)
        return True


class Moderator:
    """Decides when a moderated CQ notifies."""

    def __init__(self, notify: Callable[[Cq], None], repeats: Repeats) -> None:
        self._notify = notify
        self._repeats = repeats
        self._fresh: dict[Cq, int] = {}

    @property
    def pending(self) -> bool:
        """Whether completions lie there that nobody has been told of."""
        return bool(self._fresh)

    def published(self, cq: Cq) -> None:
        """A completion was published; `cq.ring.seen_head` is the consumer's index of that moment."""
        head = cq.ring.seen_head
        # The index comes round; a look at every completion, of which a ring holds half a round, tells rounds apart.
        if cq.notified_head != head:
            cq.notified_head = None
            self._repeats.consumed(cq)
        self._fresh.setdefault(cq, head)

    def moderate(self) -> None:
        """Notify where nothing has been consumed since the last look."""
        for cq, head in list(self._fresh.items()):
            try:
                used = cq.ring.used_untrusted()
            except BadGuestAddress:
                continue  # unmapped at the moment: look again later
            except GuestError:
                used = 0
            now = cq.ring.seen_head
            if used and now != head:
                self._fresh[cq] = now  # somebody is polling: look again later
                continue
            del self._fresh[cq]
            if used and cq.notified_head != now:
                cq.notified_head = now
                self._notify(cq)
                self._repeats.told(cq, now)

    def forget(self, cq: Cq | None = None) -> None:
        """Forget one CQ, or all."""
        if cq is None:
            self._fresh.clear()
            self._repeats.clear()
        else:
            self._fresh.pop(cq, None)
            self._repeats.consumed(cq)

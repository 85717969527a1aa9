"""Rings that are watched instead of announced by doorbells, and completions that are announced by moderation.

A store to a mapped doorbell page reaches nobody, so the device looks at the rings themselves: an adapter watches their
index words and says which ring has entries (`RingWatch`). A watched ring fires once and is armed again when the device
has found it empty, so no work is lost however the two race.

What a mapped page loses for good is the ARM of a completion queue (the program's next POLL overwrites it). So a
moderated CQ notifies when a completion has lain unconsumed for a while and no notification is outstanding. A spurious
event is legal; a lost one hangs a program: a notification counts as outstanding only until the program has consumed
anything.

Contract: no clock here; the adapter calls `moderate` a while after `pending` became true.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pvrdma_server.errors import BadGuestAddress, GuestError
from pvrdma_server.objects import Cq
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


class Moderator:
    """Decides when a moderated CQ notifies."""

    def __init__(self, notify: Callable[[Cq], None]) -> None:
        self._notify = notify
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

    def forget(self, cq: Cq | None = None) -> None:
        """Forget one CQ, or all."""
        if cq is None:
            self._fresh.clear()
        else:
            self._fresh.pop(cq, None)

"""The in-process carrier: endpoints of one process, bounded queues of (header, source views).

Contract: nothing is copied here; the receiver copies straight from the sender's memory to its own,
when it is delivered. That is right where all endpoints serve one guest (or tests): a carrier between
guests copies in `send`, so that nothing leaves memory that its guest has taken back meanwhile.
A link keeps order and loses nothing until its port leaves.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from errno import EADDRINUSE

from pvrdma_server.backend_soft.carrier import Endpoint
from pvrdma_server.backend_soft.fast_path import Many, Posted
from pvrdma_server.errors import BackendError

# Stops a sender whose peer is slow from queueing without end.
LINK_MESSAGES = 256
LINK_BYTES = 2 << 20


@dataclass(slots=True, eq=False)
class LocalLink:
    """One direction between two ports (or from one to itself)."""

    source: "LocalPort"
    target: "LocalPort"
    queue: deque[tuple[bytes, Sequence[memoryview]]] = field(default_factory=deque)
    queued_bytes: int = 0
    full: bool = False
    reverse: "LocalLink | None" = None

    def send(self, header: bytes, payload: Sequence[memoryview]) -> bool:
        """Queue a message; False when the queue is full."""
        if len(self.queue) >= LINK_MESSAGES or self.queued_bytes >= LINK_BYTES:
            self.full = True
            return False
        for view in payload:
            self.queued_bytes += len(view)
        if not self.queue:
            self.target.busy.append(self)
            self.target.endpoint.wake()
        self.queue.append((header, payload))
        return True

    def send_many(self, _what: Many) -> Posted | None:
        """See `Carrier`. There is none: nothing is copied on the way."""
        return None

    def deliver(self, messages: int) -> int:
        """Hand up to `messages` to the target's endpoint; how many it were."""
        peer = self.reverse
        assert peer is not None
        endpoint, queue = self.target.endpoint, self.queue
        count = 0
        while queue and count < messages:
            header, payload = queue.popleft()
            for view in payload:
                self.queued_bytes -= len(view)
            count += 1
            endpoint.receive(peer, header, payload)
        if self.full and len(queue) <= LINK_MESSAGES // 2 and self.queued_bytes <= LINK_BYTES // 2:
            self.full = False
            self.source.endpoint.room(self)
        return count


@dataclass(slots=True, eq=False)
class LocalPort:
    """One endpoint's end."""

    fabric: "LocalFabric"
    endpoint: Endpoint
    links: "dict[LocalPort, LocalLink]" = field(default_factory=dict)
    busy: deque[LocalLink] = field(default_factory=deque)

    @property
    def pending(self) -> bool:
        """Whether messages wait."""
        return bool(self.busy)

    def claim(self, gid: bytes) -> None:
        """Own `gid`. Raises BackendError(EADDRINUSE) when somebody else does."""
        holder = self.fabric.owners.setdefault(gid, self)
        if holder is not self:
            raise BackendError(
                EADDRINUSE, "add_gid", f"{gid.hex(':', 2)} is held by {holder.endpoint.name}"
            )

    def release(self, gid: bytes) -> None:
        """Give `gid` up; nothing when it is not ours."""
        if self.fabric.owners.get(gid) is self:
            del self.fabric.owners[gid]

    def route(self, gid: bytes) -> LocalLink | None:
        """The link to the owner of `gid`, or None."""
        owner = self.fabric.owners.get(gid)
        if owner is None:
            return None
        return self.links.get(owner) or self._connect(owner)

    def poll(self, messages: int) -> int:
        """Hand up to `messages` arrived messages to the endpoint, link by link."""
        count = 0
        while self.busy and count < messages:
            link = self.busy.popleft()
            # Every link has a like share: a peer that floods us delays nobody else's.
            count += link.deliver(max(1, (messages - count) // (len(self.busy) + 1)))
            if link.queue:
                self.busy.append(link)
        return count

    def linger(self) -> bool:
        """See `Port`. Whoever sends is in this process, and would not run meanwhile."""
        return False

    def leave(self) -> None:
        """Give up every GID, forget every link, on both sides."""
        for gid in [gid for gid, owner in self.fabric.owners.items() if owner is self]:
            del self.fabric.owners[gid]
        for other in list(self.links):
            other.forget(self)
        self.links.clear()
        self.busy.clear()

    def forget(self, other: "LocalPort") -> None:
        """The other port left: who waits for room towards it may go on (into the void)."""
        link = self.links.pop(other, None)
        if link is not None and link.full:
            self.endpoint.room(link)
        self.busy = deque(link for link in self.busy if link.source is not other)

    def _connect(self, other: "LocalPort") -> LocalLink:
        there = LocalLink(self, other)
        back = there if other is self else LocalLink(other, self)
        there.reverse, back.reverse = back, there
        self.links[other] = there
        other.links[self] = back
        return there


@dataclass(slots=True)
class LocalFabric:
    """The endpoints of one process; the owner of each GID."""

    owners: dict[bytes, LocalPort] = field(default_factory=dict)

    def join(self, endpoint: Endpoint) -> LocalPort:
        """A new endpoint."""
        return LocalPort(self, endpoint)

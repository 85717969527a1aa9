"""Our end of the shared-memory fabric: whom a GID leads to, and whose turn it is.

Contract: as `Port`. No I/O of its own beside looking a GID up in the folder. The fabric makes and ends
links; the port decides which links are looked at, and when a peer is taken for stalled.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from pvrdma_server.backend_soft.carrier import Carrier, Endpoint
from pvrdma_server.backend_soft.local_fabric import LocalFabric
from pvrdma_server.backend_soft.native import Lingered, Looker
from pvrdma_server.backend_soft.shm_folder import FabricFolder
from pvrdma_server.backend_soft.shm_link import ShmLink

# How long senders wait at a ring that nobody empties before their messages are lost, so that their own
# timers decide. Longer than a healthy peer is descheduled.
STALL_NS: Final = 100_000_000
# The same while greetings are exchanged.
CONNECT_NS: Final = 500_000_000


class Connector(Protocol):
    """What makes and ends links."""

    def connect(self, server_id: str) -> ShmLink | None:
        """A link to a server, connecting; None when it cannot be had now."""

    def end(self, link: ShmLink, why: str) -> None:
        """End a link, whatever its state."""

    def kick(self) -> None:
        """There are deadlines where none were."""


class ShmPort:
    """See `Port`.

    Attributes:
        links: by server id, those that are up and those that connect.
        looker: who says that there is something to do elsewhere.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        folder: FabricFolder,
        connector: Connector,
        clock_ns: Callable[[], int],
    ) -> None:
        self.endpoint = endpoint
        self.looker: Looker | None = None
        self.links: dict[str, ShmLink] = {}
        self._folder, self._connector, self._clock_ns = folder, connector, clock_ns
        self._local = LocalFabric().join(endpoint)
        self._routes: dict[bytes, Carrier] = {}
        self._busy: deque[ShmLink] = deque()
        self._refusing: dict[ShmLink, None] = {}
        self._broken: list[ShmLink] = []

    # -- GIDs -------------------------------------------------------------------------------

    def claim(self, gid: bytes) -> None:
        """Own `gid`. Raises BackendError(EADDRINUSE) when somebody else does."""
        self._folder.claim(gid)
        self._local.claim(gid)
        own = self._local.route(gid)
        assert own is not None
        self._routes[gid] = own
        self._tell_gids()

    def release(self, gid: bytes) -> None:
        """Give `gid` up; nothing when it is not ours."""
        self._folder.release(gid)
        if self._local.route(gid) is not None:
            self._local.release(gid)
            self._routes.pop(gid, None)
            self._tell_gids()

    def _tell_gids(self) -> None:
        for link in self.links.values():
            link.tell_gids_changed()

    def route(self, gid: bytes) -> Carrier | None:
        """The carrier to the owner of `gid` (maybe ourselves), or None."""
        return self._routes.get(gid) or self._find(gid)

    def _find(self, gid: bytes) -> Carrier | None:
        owner = self._folder.owner(gid)
        if owner is None or owner.server_id == self._folder.server_id:
            return None
        link = self.links.get(owner.server_id) or self._connector.connect(owner.server_id)
        # Only a server of that user can have made the claim.
        if link is None or link.uid != owner.uid:
            return None
        self._routes[gid] = link
        return link

    def forget_routes(self, link: ShmLink) -> None:
        """Look the GIDs that lead to `link` up again when they are needed."""
        for gid in [gid for gid, carrier in self._routes.items() if carrier is link]:
            del self._routes[gid]

    # -- messages ---------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether messages wait."""
        return bool(self._busy) or self._local.pending

    def poll(self, messages: int) -> int:
        """Hand up to `messages` arrived messages to the endpoint, link by link."""
        count = self._local.poll(messages) if self._local.busy else 0
        busy = self._busy
        empty: list[ShmLink] = []
        while busy and count < messages:
            link = busy.popleft()
            # Every link has a like share: a peer that floods us delays nobody else's.
            share = max(1, (messages - count) // (len(busy) + 1))
            taken = link.deliver(share)
            count += taken
            (busy if taken == share else empty).append(link)
        busy.extend(empty)
        if self._broken:
            self.end_broken()
        return count

    def linger(self) -> bool:
        """See `Port`. Only one peer is waited for: where there are more, there is enough to do."""
        busy = self._busy
        if len(busy) == 1:
            seen = busy[0].lingers()
            if seen != Lingered.NOTHING:
                return seen == Lingered.CHANGED
        for _ in range(len(busy)):
            link = busy.popleft()
            if link.sleeps():
                self._asleep(link)
            else:
                busy.append(link)
        return bool(busy)

    def _asleep(self, link: ShmLink) -> None:
        link.busy = False
        if link.ending:
            self._connector.end(link, "hung up")

    def look_at(self, link: ShmLink) -> None:
        """Something may have arrived."""
        if not link.busy:
            link.busy = True
            link.awake()
            self._busy.append(link)
            self.endpoint.wake()

    # -- peers that do not do as they should ----------------------------------------------------

    def fault(self, link: ShmLink, why: str) -> None:
        """The peer broke the ring: the link ends, though not under the feet of our caller."""
        if link.broken is None:
            link.broken = why
            self._broken.append(link)
            self._connector.kick()

    def end_broken(self) -> None:
        """End the links of peers at fault."""
        broken, self._broken = self._broken, []
        for link in broken:
            self._connector.end(link, link.broken or "")

    def refuses(self, link: ShmLink) -> None:
        """Somebody waits for room in `link`."""
        link.refused = True
        link.since_ns = self._clock_ns()
        self._refusing[link] = None
        self.look_at(link)
        self._connector.kick()

    def has_room(self, link: ShmLink) -> None:
        """Whoever waits may try again."""
        self._refusing.pop(link, None)
        if link.refused:
            link.refused = False
            self.endpoint.room(link)

    @property
    def waits(self) -> bool:
        """Whether `check_stalled` is needed in a moment."""
        return bool(self._refusing or self._broken)

    def check_stalled(self, now_ns: int) -> None:
        """Have links lose messages that nobody takes."""
        for link in list(self._refusing):
            if link.moved():
                # Seen here, it is news to nobody else: whoever still finds no room is refused anew.
                self.has_room(link)
            elif now_ns - link.since_ns >= (STALL_NS if link.writer else CONNECT_NS):
                link.dropping = True
                self.has_room(link)

    # -- the end ----------------------------------------------------------------------------

    def forget(self, link: ShmLink) -> None:
        """The link has ended."""
        if self.links.get(link.peer_id) is link:
            del self.links[link.peer_id]
        self.forget_routes(link)
        if link.busy:
            link.busy = False
            self._busy = deque(other for other in self._busy if other is not link)
        self.has_room(link)

    def leave(self) -> None:
        """Give up every GID, end every link."""
        for link in list(self.links.values()):
            self._connector.end(link, "we leave")
        self._local.leave()
        self._routes.clear()
        self._folder.leave()

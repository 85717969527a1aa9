"""What carries messages between servers, as the transport sees it.

Contract: a `Fabric` knows who owns which GID. Joining it gives a `Port`, the endpoint's own end:
it claims GIDs, finds the `Carrier` towards whoever owns another, and hands over what arrived. A
carrier is bounded, keeps order, and never blocks: `send` says no when there is no room, and the
endpoint hears `room` when there is some again. It may lose messages (the transport repeats).

A carrier is also the peer's identity: the one given to `Endpoint.receive` is the one `Port.route`
returns for that peer's GIDs, so a peer cannot speak for another. Whatever it carries is untrusted.
"""

from collections.abc import Sequence
from typing import Protocol

from pvrdma_server.backend_soft.fast_path import Landed, Many, Posted, Run
from pvrdma_server.backend_soft.lane import Drove, Lane


class Carrier(Protocol):
    """One direction, from us towards one peer."""

    def send(self, header: bytes, payload: Sequence[memoryview]) -> bool:
        """Take a message, whole; False when there is no room (then `Endpoint.room` follows).

        The views of `payload` are read now or until the peer has answered the message: what must
        not change under way is copied by the sender.
        """

    def send_many(self, what: Many) -> Posted | None:
        """The short cut of `fast_path`; None where there is none, or no room."""


class Endpoint(Protocol):
    """Who joined a fabric."""

    name: str

    def receive(self, peer: Carrier, header: bytes, payload: Sequence[memoryview]) -> None:
        """A message from `peer`, untrusted: header a snapshot, payload views valid during the call."""

    def offer(self, peer: Carrier, qpn: int, kind: int) -> Run | None:
        """What of this kind a queue pair would take next from `peer` by the short cut of `fast_path`, if anything."""

    def landed(self, run: Run, landed: Landed) -> None:
        """What came by the short cut that was just offered, which may be nothing."""

    def lane(self, peer: Carrier) -> Lane | None:
        """What a queue pair would do next with `peer` and by itself, in a `lane`, if anything."""

    def drove(self, lane: Lane, drove: Drove) -> None:
        """What came of the lane that was just offered, which may be nothing."""

    def room(self, carrier: Carrier) -> None:
        """A carrier that had no room has some again."""

    def wake(self) -> None:
        """Messages wait in the port."""


class Port(Protocol):
    """An endpoint's end of a fabric."""

    def claim(self, gid: bytes) -> None:
        """Own `gid`. Raises BackendError(EADDRINUSE) when somebody else does."""

    def release(self, gid: bytes) -> None:
        """Give `gid` up; nothing when it is not ours."""

    def route(self, gid: bytes) -> Carrier | None:
        """The carrier to the owner of `gid` (maybe ourselves), or None."""

    def poll(self, messages: int) -> int:
        """Hand up to `messages` arrived messages to the endpoint; how many it were."""

    def linger(self) -> bool:
        """Nobody has anything to do: wait some microseconds for messages or room, or have peers ring for them.

        True when there is something; False when there is not, or when somebody else wants to run (then
        `pending` says that there may be more).
        """

    @property
    def pending(self) -> bool:
        """Whether messages wait."""

    def leave(self) -> None:
        """Give everything up; what is under way is lost."""


class Fabric(Protocol):
    """Where endpoints meet."""

    def join(self, endpoint: Endpoint) -> Port:
        """A new endpoint."""

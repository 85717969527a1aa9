"""The hub's core: who owns which GID, and where a datagram goes.

Contract: sans-I/O; the clock is asked for log lines only, never for what to do. A client is its connection: it owns the
GIDs that it registered, all 128 bits of them, sends from no other, and gives up no other. A datagram goes to the client
that owns its destination, else to the host's network (the uplink), else nowhere, counted. Whatever a client or the
network sends, the outcome is a delivery or a counted drop, and nobody else notices.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from pvrdma_server.mad_frames import (
    Datagram,
    Dropped,
    DropReason,
    Message,
    Ok,
    Receive,
    RefuseCode,
    Refused,
    Register,
    Send,
    Unregister,
)
from pvrdma_server.mad_hub.cm import NO_GID, CmMad, NotRelayed, parse
from pvrdma_server.mad_hub.connections import ConnectionTable
from pvrdma_server.mad_hub.quiet_log import QuietLog

QP1: Final = 1
# As many as a device can have; stops a client that only ever registers.
MAX_GIDS: Final = 256
# Answers that wait for the network; a client that asks for more gets them at once.
MAX_HELD: Final = 4 * MAX_GIDS
MULTICAST_PREFIX: Final = 0xFF


class Outbox(Protocol):
    """The way to a client. Nothing here blocks."""

    def put(self, message: Message, *, urgent: bool = False) -> bool:
        """Send `message`, now or later; false if too many wait. Urgent ones have more room: they come once."""

    def gone(self) -> bool:
        """Whether the client has closed its connection, even if nobody has noticed yet."""

    def close(self) -> None:
        """End the connection."""


class Uplink(Protocol):
    """The host's network."""

    def send(
        self, lane: int, gid_type: int, datagram: Datagram, *, urgent: bool = False
    ) -> DropReason | None:
        """Send `datagram` from the host's GID `datagram.sgid`; what waits in one lane holds up no other.

        Urgent ones have more room.
        """

    def when_sent(self, lane: int, call: Callable[[], None]) -> None:
        """Call once what waits in the lane now is sent, at once if nothing does."""

    def client_left(self, lane: int) -> None:
        """Nothing more comes in this lane."""


@dataclass(slots=True, eq=False)
class Client:
    """A connected client.

    Attributes:
        lane: number of its connection.
        gids: GID to its type.
        drops: its datagrams that went nowhere, by reason.
        not_read: datagrams for it that were dropped because it does not read.
        patient: its answers may wait.
        waits: how many of its requests wait for the network.
        held: answers that wait with them, for answers come in the order of the requests.
    """

    lane: int
    name: str
    outbox: Outbox
    facts: dict[str, Any]
    connections: ConnectionTable
    gids: dict[bytes, int] = field(default_factory=dict)
    drops: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    not_read: int = 0
    patient: bool = True
    waits: int = 0
    held: list[Message] = field(default_factory=list)
    attached: bool = True


@dataclass(slots=True)
class Counters:
    """What the hub has done: of datagrams, requests and connections."""

    switched: int = 0
    to_network: int = 0
    from_network: int = 0
    by_comm_id: int = 0
    farewells: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)


class MadSwitch:
    """See the module's contract.

    Args:
        clock_s: seconds that only grow, for log lines.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.counters = Counters()
        self.clients: dict[int, Client] = {}
        self.uplink: Uplink | None = None
        self._owners: dict[bytes, Client] = {}
        self._last_lane = 0
        self.log = QuietLog(clock_s)

    def attach(
        self,
        name: str,
        outbox: Outbox,
        facts: dict[str, Any],
        connections: ConnectionTable | None = None,
        *,
        patient: bool = True,
    ) -> Client:
        """A client has connected; `facts` are for the status."""
        self._last_lane += 1
        table = ConnectionTable() if connections is None else connections
        client = Client(self._last_lane, name, outbox, facts, table, patient=patient)
        self.clients[client.lane] = client
        return client

    def unplug(self) -> None:
        """The uplink is gone, with what it was to send."""
        self.uplink = None
        for client in list(self.clients.values()):
            client.waits = 0
            self._release(client)

    def detach(self, client: Client, *, farewells: bool = True) -> None:
        """The client is gone: its GIDs are free, and its peers are told, if there is anything to tell."""
        if not client.attached:
            return
        client.attached = False
        del self.clients[client.lane]
        ended = client.connections.end()
        gids, client.gids = client.gids, {}
        for gid in gids:
            del self._owners[gid]
        for datagram in ended if farewells else ():
            if datagram.dgid not in gids:
                self._farewell(client, gids.get(datagram.sgid), datagram)
        if self.uplink is not None:
            self.uplink.client_left(client.lane)

    def owner_of(self, gid: bytes) -> Client | None:
        """The client that has registered `gid`."""
        return self._owners.get(gid)

    def received(self, client: Client, message: Message) -> None:
        """`client` sent `message`."""
        match message:
            case Send(datagram):
                self._sent(client, datagram)
            case Register(gid, gid_type):
                self._answer(client, gid, self._register(client, gid, gid_type))
            case Unregister(gid):
                before, refusal = self.counters.to_network, self._unregister(client, gid)
                # The server takes the address off the port next, and the farewells need it.
                waits = self.counters.to_network > before and client.patient
                client.waits += waits
                self._answer(client, gid, refusal)
                if waits and self.uplink is not None:
                    self.uplink.when_sent(client.lane, partial(self._sent_all, client))

    def from_network(self, datagram: Datagram) -> None:
        """The uplink received `datagram`; `dgid` is zeros if it could not tell."""
        self.counters.from_network += 1
        try:
            cm = parse(datagram.payload)
        except NotRelayed as e:
            self._dropped(None, datagram, e.reason)
            return
        owner = self._owners.get(datagram.dgid)
        if owner is None:
            found = self._by_content(datagram, cm)
            if found is None:
                self._dropped(None, datagram, DropReason.UNKNOWN_RECEIVER)
                return
            owner, dgid = found
            self.counters.by_comm_id += 1
            datagram = datagram._replace(dgid=dgid)
        reason = self._deliver(owner, datagram, cm)
        if reason is not None:
            self._dropped(None, datagram, reason)

    def send_failed(self, lane: int, datagram: Datagram, why: str) -> None:
        """The uplink could not send `datagram` of `lane`, as it has found out since."""
        self.counters.to_network -= 1
        self._dropped(self.clients.get(lane), datagram, DropReason.SEND_FAILED, why)

    def snapshot(self) -> dict[str, Any]:
        """Everything there is to know, as JSON values."""
        counters = self.counters
        return {
            "clients": [
                {
                    "name": client.name,
                    **client.facts,
                    "gids": {gid.hex(): kind for gid, kind in client.gids.items()},
                    "connections": len(client.connections),
                    "established": client.connections.established,
                    "connections_evicted": client.connections.evicted,
                    "sent": client.sent,
                    "received": client.received,
                    "not_read": client.not_read,
                    "drops": dict(client.drops),
                }
                for client in self.clients.values()
            ],
            "counters": {
                "switched": counters.switched,
                "to_network": counters.to_network,
                "from_network": counters.from_network,
                "by_comm_id": counters.by_comm_id,
                "farewells": counters.farewells,
                "drops": dict(counters.drops),
                "refusals": dict(counters.refusals),
            },
        }

    # --- GIDs --------------------------------------------------------------------------------------------------------

    def _register(self, client: Client, gid: bytes, gid_type: int) -> tuple[RefuseCode, str] | None:
        if gid == NO_GID or gid[0] == MULTICAST_PREFIX or gid_type not in (1, 2):
            return RefuseCode.BAD_GID, f"GID {gid.hex(':', 2)} of type {gid_type} is nobody's own"
        holder = self._owners.get(gid)
        if holder is not None and holder is not client and holder.outbox.gone():
            # A server that comes back may be heard before its predecessor's end is.
            self.log.info("client_replaced", client=holder.name, by=client.name)
            self.detach(holder)
            holder.outbox.close()
            holder = None
        if holder is client:
            client.gids[gid] = gid_type
            return None
        if holder is not None:
            return (
                RefuseCode.HELD_BY_ANOTHER,
                f"GID {gid.hex(':', 2)} is held by {holder.name}; two VMs of a host cannot have one address",
            )
        if len(client.gids) >= MAX_GIDS:
            return RefuseCode.TOO_MANY, f"{MAX_GIDS} GIDs are registered already"
        client.gids[gid] = gid_type
        self._owners[gid] = client
        self.log.info("gid_registered", client=client.name, gid=gid.hex(":", 2), type=gid_type)
        return None

    def _unregister(self, client: Client, gid: bytes) -> tuple[RefuseCode, str] | None:
        if self._owners.get(gid) is not client:
            return RefuseCode.NOT_REGISTERED, f"GID {gid.hex(':', 2)} is not registered by you"
        gid_type = client.gids.pop(gid)
        del self._owners[gid]
        for datagram in client.connections.end(gid):
            self._farewell(client, gid_type, datagram)
        self.log.info("gid_unregistered", client=client.name, gid=gid.hex(":", 2))
        return None

    def _answer(self, client: Client, gid: bytes, refusal: tuple[RefuseCode, str] | None) -> None:
        if refusal is None:
            message: Message = Ok(gid)
        else:
            code, text = refusal
            self.counters.refusals[code.name.lower()] += 1
            self.log.warning("request_refused", client=client.name, why=text, key=code.name)
            message = Refused(gid, code, text)
        client.held.append(message)
        self._release(client)

    def _sent_all(self, client: Client) -> None:
        client.waits = max(0, client.waits - 1)
        self._release(client)

    def _release(self, client: Client) -> None:
        """Give the client its answers, unless they must wait."""
        if client.waits and len(client.held) <= MAX_HELD:
            return
        answers, client.held = client.held, []
        if not all(client.outbox.put(answer, urgent=True) for answer in answers):
            # It asks and asks and reads nothing: there is no way to go on with it.
            self.log.warning("answers_not_read", client=client.name, key="answers")
            client.outbox.close()
            self.detach(client)

    # --- datagrams ---------------------------------------------------------------------------------------------------

    def _sent(self, client: Client, datagram: Datagram) -> None:
        client.sent += 1
        reason: DropReason | None
        try:
            reason = self._route(client, datagram)
        except NotRelayed as e:
            reason = e.reason
        if reason is not None:
            self._dropped(client, datagram, reason)

    def _route(self, client: Client, datagram: Datagram) -> DropReason | None:
        gid_type = client.gids.get(datagram.sgid)
        if gid_type is None:
            return DropReason.NOT_OWNER
        if datagram.src_qp != QP1 or datagram.dst_qp != QP1:
            return DropReason.NOT_CM
        cm = parse(datagram.payload)
        owner = self._owners.get(datagram.dgid)
        if owner is not None:
            client.connections.sent(datagram, cm)
            reason = self._deliver(owner, datagram, cm)
            self.counters.switched += reason is None
            return reason
        if self.uplink is None:
            return DropReason.NO_ROUTE
        client.connections.sent(datagram, cm)
        reason = self.uplink.send(client.lane, gid_type, datagram)
        self.counters.to_network += reason is None
        return reason

    def _deliver(
        self, owner: Client, datagram: Datagram, cm: CmMad, *, urgent: bool = False
    ) -> DropReason | None:
        if not owner.outbox.put(Receive(datagram), urgent=urgent):
            owner.not_read += 1
            return DropReason.QUEUE_FULL
        owner.received += 1
        owner.connections.received(datagram, cm)
        return None

    def _farewell(self, client: Client, gid_type: int | None, datagram: Datagram) -> None:
        """Tell a peer, in the name of a client that is gone, or without that GID, that its connection is over."""
        self.counters.farewells += 1
        owner = self._owners.get(datagram.dgid)
        reason: DropReason | None = DropReason.NO_ROUTE
        if owner is not None:
            reason = self._deliver(owner, datagram, parse(datagram.payload), urgent=True)
        elif self.uplink is not None and gid_type is not None:
            reason = self.uplink.send(client.lane, gid_type, datagram, urgent=True)
            self.counters.to_network += reason is None
        if reason is not None:
            self._dropped(None, datagram, reason)

    def _by_content(self, datagram: Datagram, cm: CmMad) -> tuple[Client, bytes] | None:
        """Whose the message is by what it says, where its address does not tell: one client's, or nobody's."""
        owner = self._owners.get(cm.destination)
        if owner is not None:
            return owner, cm.destination
        found = [
            (client, path.sgid)
            for client in self.clients.values()
            if (path := client.connections.waits_for(datagram.sgid, cm)) is not None
        ]
        return found[0] if len(found) == 1 else None

    def _dropped(
        self, client: Client | None, datagram: Datagram, reason: DropReason, why: str = ""
    ) -> None:
        name = reason.name.lower()
        self.counters.drops[name] += 1
        if client is not None:
            client.drops[name] += 1
            client.outbox.put(Dropped(reason, datagram.dgid))
        self.log.warning(
            "datagram_dropped",
            client=client.name if client is not None else "network",
            why=f"{name}: {why}" if why else name,
            sgid=datagram.sgid.hex(":", 2),
            dgid=datagram.dgid.hex(":", 2),
            key=name,
        )

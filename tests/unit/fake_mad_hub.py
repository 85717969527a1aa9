"""Around the hub's core: clients that keep what they are given, a network that keeps what is sent, a clock."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pvrdma_server.mad_frames import (
    Datagram,
    Dropped,
    DropReason,
    Message,
    Ok,
    Receive,
    Register,
    Send,
    Unregister,
)
from pvrdma_server.mad_hub.switch import Client, MadSwitch


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeOutbox:
    """Implements `switch.Outbox`; with `room`, only so many messages fit (urgent ones: ten times as many)."""

    room: int = 1 << 30
    is_gone: bool = False
    closed: bool = False
    messages: list[Message] = field(default_factory=list)

    def put(self, message: Message, *, urgent: bool = False) -> bool:
        if len(self.messages) >= self.room * (10 if urgent else 1):
            return False
        self.messages.append(message)
        return True

    def gone(self) -> bool:
        return self.is_gone

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeUplink:
    """Implements `switch.Uplink`."""

    refuse: DropReason | None = None
    sent: list[tuple[int, int, Datagram]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def send(
        self, lane: int, gid_type: int, datagram: Datagram, *, urgent: bool = False
    ) -> DropReason | None:
        if self.refuse is None:
            self.sent.append((lane, gid_type, datagram))
        return self.refuse

    def when_sent(self, lane: int, call: Callable[[], None]) -> None:
        self.waiting.append(call)

    def client_left(self, lane: int) -> None:
        self.left.append(lane)


class Vm:
    """A client of the hub, at its core."""

    def __init__(self, switch: MadSwitch, name: str, *gids: bytes, room: int = 1 << 30) -> None:
        self.switch = switch
        self.outbox = FakeOutbox(room)
        self.client: Client = switch.attach(name, self.outbox, {})
        self.gid = gids[0] if gids else bytes(16)
        for gid in gids:
            assert self.register(gid) == Ok(gid)

    def register(self, gid: bytes, gid_type: int = 2) -> Message:
        self.switch.received(self.client, Register(gid, gid_type))
        return self.outbox.messages.pop()

    def unregister(self, gid: bytes) -> Message:
        self.switch.received(self.client, Unregister(gid))
        return self.outbox.messages.pop()

    def send(self, dgid: bytes, payload: bytes, sgid: bytes | None = None, **rest: int) -> None:
        datagram = Datagram(self.gid if sgid is None else sgid, dgid, payload, **rest)
        self.switch.received(self.client, Send(datagram))

    def take(self) -> list[Datagram]:
        """The datagrams that have come since the last look; answers and drops are left."""
        taken = [m.datagram for m in self.outbox.messages if isinstance(m, Receive)]
        self.outbox.messages = [m for m in self.outbox.messages if not isinstance(m, Receive)]
        return taken

    def payloads(self) -> list[bytes]:
        return [datagram.payload for datagram in self.take()]

    def drops(self) -> list[int]:
        taken = [m.reason for m in self.outbox.messages if isinstance(m, Dropped)]
        self.outbox.messages = [m for m in self.outbox.messages if not isinstance(m, Dropped)]
        return taken

    def die(self) -> None:
        self.switch.detach(self.client)


@dataclass
class Bed:
    """A hub with a network, and whatever VMs a test adds."""

    clock: Clock = field(default_factory=Clock)
    uplink: FakeUplink = field(default_factory=FakeUplink)
    switch: MadSwitch = field(init=False)

    def __post_init__(self) -> None:
        self.switch = MadSwitch(self.clock)
        self.switch.uplink = self.uplink

    def vm(self, name: str, *gids: bytes, room: int = 1 << 30) -> Vm:
        return Vm(self.switch, name, *gids, room=room)

    def from_network(self, sgid: bytes, dgid: bytes, payload: bytes) -> None:
        self.switch.from_network(Datagram(sgid, dgid, payload))

    def to_network(self) -> list[Datagram]:
        """The datagrams that have gone out since the last look."""
        taken = [datagram for _, _, datagram in self.uplink.sent]
        self.uplink.sent.clear()
        return taken

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.switch.counters.drops)

"""Arbitrary clients, MADs and bytes: every datagram is delivered, sent out, or dropped and counted; nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from unit.fake_mad_hub import Clock, FakeOutbox, FakeUplink
from unit.mad_hub_bed import HubBed, play
from unit.mads import GID_A, GID_B, GID_C, GID_C_LOCAL, GID_NET, cm_mad, rep, req, rtu, sidr_req

from pvrdma_server.abi.mad import CmAttrId
from pvrdma_server.mad_frames import (
    Datagram,
    DropReason,
    Receive,
    Register,
    Send,
    Unregister,
)
from pvrdma_server.mad_hub.cm import RELAYED, NotRelayed, parse
from pvrdma_server.mad_hub.connections import ConnectionTable
from pvrdma_server.mad_hub.switch import Client, MadSwitch

GIDS = [GID_A, GID_B, GID_C, GID_C_LOCAL, GID_NET, bytes(16), b"\xff" * 16]
SLOTS = 3

# The first three, which the clients begin with, more often than others.
gids = st.sampled_from(GIDS[:SLOTS]) | st.sampled_from(GIDS)
# Few, so that they meet.
ids = st.integers(0, 4)
tids = st.integers(0, 3)
likely = st.one_of(
    st.builds(
        cm_mad, st.sampled_from([*sorted(RELAYED), CmAttrId.CLASS_PORT_INFO]), ids, ids, tid=tids
    ),
    st.builds(req, ids, gids, gids, tid=tids),
    st.builds(rep, ids, ids, tid=tids),
    st.builds(rtu, ids, ids, tid=tids),
    st.builds(sidr_req, ids, gids, gids, tid=tids),
)
cut = st.builds(lambda mad, end: mad[:end], likely, st.integers(0, 256))
payloads = st.one_of(likely, cut, st.binary(max_size=40))
qpns = st.sampled_from([1] * 9 + [0])
# Not builds(), which would make up the other fields, too.
datagrams = st.tuples(gids, gids, payloads, qpns, qpns).map(lambda fields: Datagram(*fields))
slots = st.integers(0, SLOTS - 1)


@given(st.binary(max_size=256))
def test_any_bytes_are_a_message_or_not_relayed(payload: bytes) -> None:
    try:
        cm = parse(payload)
    except NotRelayed:
        return
    assert len(cm.mad) == 256
    assert len(cm.destination) == 16
    assert 0 <= cm.sender_qpn < 1 << 24


class HostileHub(RuleBasedStateMachine):
    """A hub with three places for clients, each of which may do anything, a network likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.uplink = FakeUplink()
        self.switch = MadSwitch(Clock())
        self.clients: list[Client] = []
        self.given = 0
        self.delivered = 0

    @initialize()
    def connect(self) -> None:
        for number in range(SLOTS):
            self.clients.append(self.attach(number, 1 << 30))
            self.register(number, GIDS[number], 2)
        self.switch.uplink = self.uplink

    def attach(self, number: int, room: int) -> Client:
        table = ConnectionTable(max_connections=4, max_sidr=2)
        return self.switch.attach(f"vm{number}", FakeOutbox(room), {}, table)

    def outbox(self, slot: int) -> FakeOutbox:
        outbox = self.clients[slot].outbox
        assert isinstance(outbox, FakeOutbox)
        return outbox

    @rule(slot=slots, gid=gids, gid_type=st.integers(0, 3))
    def register(self, slot: int, gid: bytes, gid_type: int) -> None:
        if self.clients[slot].attached:
            self.switch.received(self.clients[slot], Register(gid, gid_type))

    @rule(slot=slots, gid=gids)
    def unregister(self, slot: int, gid: bytes) -> None:
        if self.clients[slot].attached:
            self.switch.received(self.clients[slot], Unregister(gid))

    @rule(slot=slots, datagram=datagrams)
    def send(self, slot: int, datagram: Datagram) -> None:
        client = self.clients[slot]
        if not client.attached:
            return
        owns, before = datagram.sgid in client.gids, self.received()
        self.given += 1
        self.switch.received(client, Send(datagram))
        for receiver, delivered in self.new_since(before):
            assert owns
            assert receiver.gids.get(datagram.dgid)
            assert delivered == datagram

    @rule(datagram=datagrams)
    def network(self, datagram: Datagram) -> None:
        before = self.received()
        self.given += 1
        self.switch.from_network(datagram)
        for receiver, delivered in self.new_since(before):
            assert delivered.dgid in receiver.gids
            assert delivered._replace(dgid=datagram.dgid) == datagram

    def received(self) -> list[int]:
        return [len(self.outbox(slot).messages) for slot in range(SLOTS)]

    def new_since(self, before: list[int]) -> list[tuple[Client, Datagram]]:
        """At most one client has a datagram more."""
        new = [
            (self.clients[slot], message.datagram)
            for slot in range(SLOTS)
            for message in self.outbox(slot).messages[before[slot] :]
            if isinstance(message, Receive)
        ]
        assert len(new) <= 1
        return new

    @rule(on=st.booleans(), refuse=st.sampled_from([None, DropReason.QUEUE_FULL]))
    def plug(self, on: bool, refuse: DropReason | None) -> None:
        if on:
            self.switch.uplink = self.uplink
        else:
            self.switch.unplug()
        self.uplink.refuse = refuse

    @rule()
    def all_is_sent(self) -> None:
        for call in self.uplink.waiting:
            call()
        self.uplink.waiting.clear()

    @rule()
    def fail_a_send(self) -> None:
        if self.uplink.sent:
            lane, _, datagram = self.uplink.sent.pop()
            self.switch.send_failed(lane, datagram, "because")

    @rule(slot=slots, room=st.integers(1, 30))
    def die(self, slot: int, room: int) -> None:
        self.switch.detach(self.clients[slot])
        self.count(slot)
        self.clients[slot] = self.attach(slot, room)
        self.register(slot, GIDS[slot], 2)

    @rule(slot=slots, gone=st.booleans())
    def hang_up(self, slot: int, gone: bool) -> None:
        self.outbox(slot).is_gone = gone

    @rule(slot=slots)
    def read(self, slot: int) -> None:
        self.count(slot)

    def count(self, slot: int) -> None:
        outbox = self.outbox(slot)
        self.delivered += sum(isinstance(m, Receive) for m in outbox.messages)
        outbox.messages.clear()

    @invariant()
    def every_datagram_has_an_end(self) -> None:
        counters = self.switch.counters
        waiting = sum(
            isinstance(m, Receive)
            for slot in range(len(self.clients))
            for m in self.outbox(slot).messages
        )
        ends = self.delivered + waiting + len(self.uplink.sent) + counters.drops.total()
        assert self.given + counters.farewells == ends

    @invariant()
    def every_gid_has_one_owner(self) -> None:
        owned = [gid for client in self.switch.clients.values() for gid in client.gids]
        assert len(owned) == len(set(owned))
        for client in self.switch.clients.values():
            for gid in client.gids:
                assert self.switch.owner_of(gid) is client
                assert client.gids[gid] in (1, 2)

    @invariant()
    def tables_are_bounded(self) -> None:
        for client in self.clients:
            assert len(client.connections) <= 4


TestHostileHub = HostileHub.TestCase
TestHostileHub.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.binary(min_size=1, max_size=600), min_size=1, max_size=5), st.booleans())
def test_any_bytes_on_a_socket_harm_nobody(tmp_path: Path, chunks: list[bytes], old: bool) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a, bed.client("b", GID_B) as b:
            async with bed.raw("old" if old else "hub") as stream:
                for chunk in chunks:
                    try:
                        await stream.send_all(chunk)
                    except trio.BrokenResourceError:
                        break
            await bed.until(lambda: sum(bed.hub.ended.values()) == 1)
            await a.send(GID_A, GID_B, rtu(1, 2))
            assert (await b.datagram()).payload == rtu(1, 2)

    play(tmp_path, act, network=False)

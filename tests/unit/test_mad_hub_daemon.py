"""The hub on real UNIX sockets: protocol errors, dying and slow clients, restarts, umad that comes and goes.

Tests named test_N_ are the known defects of rdmacm-mux, see test_mad_hub_switch.py.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from unit.fake_umad import FakePort
from unit.mad_hub_bed import PATIENCE_S, Client, HubBed, play, running, small_buffers
from unit.mads import GID_A, GID_B, GID_C, GID_NET, drep, dreq, rep, req, rtu

from pvrdma_server.abi.ibta_vol1_c12 import CM_DREQ, CM_IDS
from pvrdma_server.abi.mad import MAD_HDR, CmAttrId
from pvrdma_server.abi.rdmacm_mux import MuxErrCode, MuxMsgType, MuxOpCode
from pvrdma_server.errors import ConfigError
from pvrdma_server.mad_frames import (
    Datagram,
    Hello,
    Message,
    Ok,
    Refused,
    Register,
    Send,
    Unregister,
    encode,
)
from pvrdma_server.mad_hub import session
from pvrdma_server.mad_hub.daemon import RETRY_S, HubConfig, MadHub
from pvrdma_server.mad_hub.lanes import BUSY_PAUSES_S, LANE_LENGTH, Lanes
from pvrdma_server.mad_hub.session import (
    HELLO_TIMEOUT_S,
    QUEUE_LENGTH,
    peer_credentials,
    printable,
)
from pvrdma_server.mad_hub.umad import UmadError
from pvrdma_server.mad_old_mux import OldMuxDialect
from pvrdma_server.status import read_status


@pytest.fixture
def events() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def attr(payload: bytes) -> int:
    return MAD_HDR.unpack_from(payload).attr_id


# --- clients ---------------------------------------------------------------------------------------------------------


def test_two_vms_talk(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a, bed.client("b", GID_B) as b:
            await a.send(GID_A, GID_B, req(1, GID_A, GID_B))
            assert await b.datagram() == Datagram(GID_A, GID_B, req(1, GID_A, GID_B))
            assert a.connection.peer_name == "fake0 port 1"
        await bed.until(lambda: bed.hub.ended == {"left": 2})

    play(tmp_path, act)


def test_a_claim_of_anothers_gid_is_refused(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("web-1", GID_A), bed.client("web-2") as b:
            await b.say(Register(GID_A, 2))
            answer = await b.next()
            assert isinstance(answer, Refused)
            assert "held by web-1" in answer.text

    play(tmp_path, act)


def test_5_all_tables_are_one_threads() -> None:
    """Sends wait in threads; what they tell comes back to the hub's own."""
    threads: dict[str, set[int]] = {"send": set(), "tell": set()}

    class Sender:
        def send(self, _gid_type: int, _datagram: Datagram) -> None:
            threads["send"].add(threading.get_ident())
            raise UmadError("no route to host")

        def close(self) -> None:
            threads["send"].add(threading.get_ident())

    async def main() -> None:
        told = trio.Event()

        def failed(_lane: int, _datagram: Datagram, _why: str) -> None:
            threads["tell"].add(threading.get_ident())
            told.set()

        async with trio.open_nursery() as nursery:
            lanes = Lanes(nursery, Sender, failed)
            assert lanes.send(1, 2, Datagram(GID_A, GID_NET, rtu(1, 2))) is None
            await told.wait()
            lanes.client_left(1)

    trio.run(main)
    assert threads["tell"] == {threading.get_ident()}
    assert threading.get_ident() not in threads["send"]


def test_6_a_client_that_dies_with_datagrams_on_their_way_harms_nobody(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a, bed.client("c", GID_C) as c:
            for _ in range(5):
                async with bed.client("b", GID_B) as b:
                    small_buffers(b.stream)
                    for number in range(1, 400):
                        await a.send(GID_A, GID_B, req(number, GID_A, GID_B))
            await a.send(GID_A, GID_C, rtu(1, 2))
            assert (await c.datagram()).payload == rtu(1, 2)
        await bed.until(lambda: sum(bed.hub.ended.values()) == 7)

    play(tmp_path, act)


def test_7_a_stream_cut_anywhere_is_put_together(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.raw() as stream, bed.client("b", GID_B) as b:
            a = Client(stream)
            frames: list[Message] = [
                Hello("a"),
                Register(GID_A, 2),
                Send(Datagram(GID_A, GID_B, rtu(1, 2))),
            ]
            for byte in b"".join(encode(frame) for frame in frames):
                await stream.send_all(bytes((byte,)))
                await trio.testing.wait_all_tasks_blocked()
            assert isinstance(await a.next(), Hello)
            assert await a.next() == Ok(GID_A)
            assert (await b.datagram()).payload == rtu(1, 2)

    play(tmp_path, act)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", 513), "bad_length"),
        (struct.pack("<IB", 1, 77), "unknown_type"),
        (encode(Ok(GID_A)), "unexpected"),
        (encode(Hello("again")), "unexpected"),
        (encode(Register(GID_C, 2)) + struct.pack("<I", 0), "bad_length"),
        (encode(Register(GID_C, 2))[:-1], "truncated"),
    ],
)
def test_a_client_that_breaks_the_protocol_is_ended_with_its_reason(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("bad", GID_A) as bad, bed.client("b", GID_B) as b:
            await bad.stream.send_all(data)
            if reason == "truncated":
                await bad.stream.send_eof()
            await bad.ended()
            assert bed.hub.ended == {reason: 1}
            await b.register(GID_A, GID_C)

    play(tmp_path, act)


def test_what_is_no_hello_ends_the_connection(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        for data in (encode(Hello("x", version=9)), b"GET / HTTP/1.0\r\n\r\n"):
            async with bed.raw() as stream:
                await stream.send_all(data)
                await Client(stream).ended()
        async with bed.raw():
            pass
        await bed.until(lambda: bed.hub.ended == {"version": 1, "bad_length": 1, "left": 1})

    play(tmp_path, act)


def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    clock = trio.testing.MockClock()

    async def act(bed: HubBed) -> None:
        async with bed.raw() as stream, bed.client("a") as a:
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(HELLO_TIMEOUT_S + 1)
            await Client(stream).ended()
            assert bed.hub.ended == {"no_hello": 1}
            await a.register(GID_A)

    play(tmp_path, act, clock=clock)


def test_only_our_user_root_and_those_allowed_may_connect(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_credentials(ours) == (os.getpid(), os.getuid())

    async def main(allowed: tuple[int, ...], welcome: bool) -> None:
        hub = MadHub(
            HubConfig(str(tmp_path / "hub"), allowed_uids=allowed),
            None,
            credentials=lambda _: (1, 4242),
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(hub.run)
            async with await trio.open_unix_socket(tmp_path / "hub") as stream:
                assert isinstance(stream, trio.SocketStream)
                client = Client(stream)
                if welcome:
                    await client.say(Hello("a"))
                    assert isinstance(await client.next(), Hello)
                else:
                    await client.ended()
                    assert hub.ended == {"not_allowed": 1}
            nursery.cancel_scope.cancel()

    trio.run(main, (), False)
    trio.run(main, (4242,), True)


def test_there_is_a_limit_to_connections_greeted_or_not(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        bed.hub.max_clients = 2
        async with bed.client("a", GID_A) as a, bed.raw():
            async with bed.raw() as third:
                await Client(third).ended()
            assert bed.hub.ended == {"too_many": 1}
            await a.register(GID_C)
        await bed.until(lambda: bed.hub.ended == {"too_many": 1, "left": 2})
        async with bed.client("b", GID_B):
            pass

    play(tmp_path, act)


def test_others_can_knock_only_where_others_are_allowed(tmp_path: Path) -> None:
    async def closed(bed: HubBed) -> None:
        assert (bed.folder / "hub").stat().st_mode & 0o777 == 0o600
        assert (bed.folder / "old").stat().st_mode & 0o777 == 0o600

    async def opened(bed: HubBed) -> None:
        assert (bed.folder / "hub").stat().st_mode & 0o777 == 0o666

    play(tmp_path, closed)
    play(tmp_path, opened, allowed_uids=(65534,))


def test_names_cannot_play_with_a_terminal() -> None:
    assert printable("vm\x1b[2J\n1") == "vm?[2J?1"
    assert printable("") == "?"
    assert printable("vm-ü") == "vm-ü"


def test_a_client_that_does_not_read_costs_its_own_datagrams_only(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with (
            bed.client("a", GID_A) as a,
            bed.client("slow", GID_B) as slow,
            bed.client("c", GID_C) as c,
        ):
            small_buffers(slow.stream)
            count = 0
            while not bed.drops().get("queue_full"):
                for _ in range(100):
                    count += 1
                    await a.send(GID_A, GID_B, req(count, GID_A, GID_B))
                await a.send(GID_A, GID_C, rtu(count, 1))
                assert CM_IDS.unpack_from((await c.datagram()).payload).local == count
            assert count > QUEUE_LENGTH
            # It begins to read: what was kept comes in order, and then what is new.
            seen = [CM_IDS.unpack_from((await slow.datagram()).payload).local for _ in range(500)]
            assert seen == list(range(1, 501))
            assert bed.hub.ended == {}

    play(tmp_path, act)


def test_a_client_that_asks_and_never_reads_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "URGENT_QUEUE_LENGTH", 50)

    async def act(bed: HubBed) -> None:
        async with bed.client("greedy", GID_A) as greedy, bed.client("b") as b:
            small_buffers(greedy.stream)
            with suppress(trio.BrokenResourceError):
                while True:
                    await greedy.say(*[Register(GID_A, 2)] * 100)
            await b.register(GID_A)
        await bed.until(lambda: bed.hub.ended == {"closed": 1, "left": 1})

    play(tmp_path, act)


def test_a_client_that_dies_tells_its_peers_and_frees_its_gids(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("b", GID_B) as b:
            async with bed.client("a", GID_A) as a:
                for peer in (GID_B, GID_NET):
                    await a.send(GID_A, peer, req(7, GID_A, peer))
                await b.datagram()
                await bed.port.outgoing.receive()
                await b.send(GID_B, GID_A, rep(9, 7, qpn=0x22))
                await a.datagram()
                await a.send(GID_A, GID_B, rtu(7, 9))
                await b.datagram()
            told = await b.datagram()
            assert (told.sgid, attr(told.payload)) == (GID_A, CmAttrId.DREQ)
            assert CM_DREQ.unpack(told.payload)[:2] == (7, 9)
            told = await bed.port.outgoing.receive()
            assert (told.sgid, told.dgid, attr(told.payload)) == (GID_A, GID_NET, CmAttrId.REJ)
            await b.register(GID_A)
        await bed.until(lambda: bed.port.senders_open == 0)

    play(tmp_path, act)


def test_a_server_that_comes_back_at_once_has_its_gid_again(tmp_path: Path) -> None:
    """Whether or not the hub has seen its predecessor's end by then."""

    async def act(bed: HubBed) -> None:
        for _ in range(30):
            before = await trio.open_unix_socket(tmp_path / "hub")
            assert isinstance(before, trio.SocketStream)
            client = Client(before)
            await client.say(Hello("vm1"))
            await client.next()
            await client.register(GID_A)
            async with bed.raw() as stream:
                after = Client(stream)
                await after.say(Hello("vm1"))
                await after.next()
                before.socket.close()
                await after.register(GID_A)
                await after.say(Unregister(GID_A))
                assert await after.next() == Ok(GID_A)
        assert bed.hub.switch.counters.refusals == {}

    play(tmp_path, act)


def test_3_a_dreq_after_ten_idle_minutes_arrives(tmp_path: Path) -> None:
    clock = trio.testing.MockClock()

    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a:
            await a.send(GID_A, GID_NET, req(7, GID_A, GID_NET))
            await bed.port.outgoing.receive()
            receiver = bed.port.receiver
            assert receiver is not None
            receiver.inject(Datagram(GID_NET, GID_A, rep(0x50, 7)))
            assert (await a.datagram()).payload == rep(0x50, 7)
            await a.send(GID_A, GID_NET, rtu(7, 0x50))
            await bed.port.outgoing.receive()
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(600)
            receiver.inject(Datagram(GID_NET, bytes(16), dreq(0x50, 7, 0x11)))
            assert (await a.datagram()).payload == dreq(0x50, 7, 0x11)
            await a.send(GID_A, GID_NET, drep(7, 0x50))
            assert (await bed.port.outgoing.receive()).payload == drep(7, 0x50)

    play(tmp_path, act, clock=clock)


def test_200_connections_in_parallel(tmp_path: Path) -> None:
    async def passive(vm: Client, gid: bytes, peer: bytes) -> None:
        ended = 0
        while ended < 200:
            payload = (await vm.datagram()).payload
            ids = CM_IDS.unpack_from(payload)
            match attr(payload):
                case CmAttrId.REQ:
                    await vm.send(gid, peer, rep(1000 + ids.local, ids.local))
                case CmAttrId.DREQ:
                    ended += 1
                    await vm.send(gid, peer, drep(ids.remote, ids.local))

    async def active(vm: Client, gid: bytes, peer: bytes) -> None:
        for number in range(1, 201):
            await vm.send(gid, peer, req(number, gid, peer, tid=number))
        ended = 0
        while ended < 200:
            payload = (await vm.datagram()).payload
            ids = CM_IDS.unpack_from(payload)
            if attr(payload) == CmAttrId.REP:
                await vm.send(gid, peer, rtu(ids.remote, ids.local))
                await vm.send(gid, peer, dreq(ids.remote, ids.local, 0x22))
            else:
                ended += 1

    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a, bed.client("b", GID_B) as b:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(passive, b, GID_B, GID_A)
                nursery.start_soon(active, a, GID_A, GID_B)
            tables = [client.connections for client in bed.hub.switch.clients.values()]
            assert [len(table) for table in tables] == [0, 0]
            assert bed.drops() == {}

    play(tmp_path, act, network=False)


# --- the hub comes and goes ------------------------------------------------------------------------------------------


def test_clients_of_a_restarted_hub_register_again(tmp_path: Path) -> None:
    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with running(tmp_path, None) as first, first.raw() as stream:
                client = Client(stream)
                await client.say(Hello("a"))
                await client.next()
                await client.register(GID_A)
                first_ends = stream.socket.dup()
            with first_ends:
                assert await first_ends.recv(1) == b""
            assert list(tmp_path.iterdir()) == []
            async with running(tmp_path, None) as second, second.client("a", GID_A):
                pass

    trio.run(main)


def test_a_hub_that_stops_ends_nobodys_connections(tmp_path: Path) -> None:
    async def main() -> None:
        port = FakePort()
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                a, b = Client(None), Client(None)  # type: ignore[arg-type]
                async with running(tmp_path, port) as bed:
                    for client, gid in ((a, GID_A), (b, GID_B)):
                        stream = await trio.open_unix_socket(tmp_path / "hub")
                        assert isinstance(stream, trio.SocketStream)
                        client.stream = stream
                        await client.say(Hello("vm"))
                        await client.next()
                        await client.register(gid)
                    for peer in (GID_B, GID_NET):
                        await a.send(GID_A, peer, req(1, GID_A, peer))
                    await b.datagram()
                    await port.outgoing.receive()
                    assert bed.hub.switch.counters.farewells == 0
                assert bed.hub.switch.counters.farewells == 0
                assert bed.hub.switch.clients == {}
                assert port.outgoing.statistics().current_buffer_used == 0
                for client in (a, b):
                    with pytest.raises(EOFError):
                        await client.next()
                    await client.stream.aclose()
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_second_hub_does_not_take_the_first_ones_place(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        other = MadHub(HubConfig(str(tmp_path / "hub")), None)
        with pytest.RaisesGroup(ConfigError, flatten_subgroups=True):
            await other.run()
        async with bed.client("a", GID_A):
            pass

    play(tmp_path, act)


def test_a_socket_that_is_left_over_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(tmp_path / "hub"))

    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A):
            pass

    play(tmp_path, act)


# --- umad ------------------------------------------------------------------------------------------------------------


def test_both_ways_to_the_network(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a:
            await a.send(GID_A, GID_NET, req(7, GID_A, GID_NET))
            sent = await bed.port.outgoing.receive()
            assert sent == Datagram(GID_A, GID_NET, req(7, GID_A, GID_NET))
            assert bed.port.receiver is not None
            bed.port.receiver.inject(Datagram(GID_NET, GID_A, rep(8, 7)))
            assert await a.datagram() == Datagram(GID_NET, GID_A, rep(8, 7))
        assert attr((await bed.port.outgoing.receive()).payload) == CmAttrId.REJ
        await bed.until(lambda: bed.port.senders_open == 0)

    play(tmp_path, act)


def taken(port: FakePort) -> None:
    port.taken = "the CM class of fake0 port 1 is taken: ib_cm is loaded"


def test_without_the_cm_class_vms_reach_each_other_and_it_is_said_once(
    tmp_path: Path, events: list[MutableMapping[str, Any]]
) -> None:
    clock = trio.testing.MockClock()

    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a, bed.client("b", GID_B) as b:
            await a.send(GID_A, GID_B, rtu(1, 2))
            assert (await b.datagram()).payload == rtu(1, 2)
            await a.send(GID_A, GID_NET, rtu(1, 2))
            await bed.until(lambda: bed.drops() == {"no_route": 1})
        for _ in range(4):
            await trio.testing.wait_all_tasks_blocked()
            tries = bed.port.tries
            clock.jump(1000)
            await bed.until(partial(lambda before: bed.port.tries > before, tries))
        assert bed.hub.snapshot()["umad"] == bed.port.taken
        bed.port.taken = None
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(1000)
        await bed.port.opened.wait()
        assert bed.hub.snapshot()["umad"] == "ready"

    play(tmp_path, act, prepare=taken, clock=clock)
    said = [e["event"] for e in events if e["event"].startswith("umad")]
    assert said == ["umad_unavailable", "umad_ready"]


def test_the_pause_between_tries_grows(tmp_path: Path) -> None:
    clock = trio.testing.MockClock()

    async def act(bed: HubBed) -> None:
        tries = []
        for _ in range(100):
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(RETRY_S)
            await trio.testing.wait_all_tasks_blocked()
            tries.append(bed.port.tries)
        # 5, 10, 20, 40, ... seconds: 500 s have room for seven.
        assert tries[-1] <= 8
        assert tries[0] == 2

    play(tmp_path, act, prepare=taken, clock=clock)


def test_asked_for_it_is_tried_at_once(tmp_path: Path) -> None:
    clock = trio.testing.MockClock()

    async def act(bed: HubBed) -> None:
        await bed.until(lambda: bed.port.tries == 1)
        bed.port.taken = None
        await trio.testing.wait_all_tasks_blocked()
        bed.hub.retry_umad()
        await bed.port.opened.wait()
        assert bed.port.tries == 2

    play(tmp_path, act, prepare=taken, clock=clock)


def test_8_a_device_that_is_gone_is_closed_and_tried_again_without_a_hot_loop(
    tmp_path: Path,
) -> None:
    clock = trio.testing.MockClock()

    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a:
            gone = bed.port.receiver
            assert gone is not None
            await a.send(GID_A, GID_NET, rtu(1, 2))
            await bed.port.outgoing.receive()
            bed.port.taken = "no umad for fake0 port 1"
            gone.unplug()
            await bed.until(lambda: gone.closed)
            await bed.until(lambda: bed.port.senders_open == 0)
            await trio.testing.wait_all_tasks_blocked()
            assert (gone.looks, bed.port.tries) == (1, 1)
            assert "Input/output error" in bed.hub.snapshot()["umad"]
            await a.send(GID_A, GID_NET, rtu(1, 2))
            await bed.until(lambda: bed.drops() == {"no_route": 1})
            bed.port.taken = None
            bed.port.opened = trio.Event()
            clock.jump(RETRY_S)
            await bed.port.opened.wait()
            await a.send(GID_A, GID_NET, rtu(3, 4))
            assert (await bed.port.outgoing.receive()).payload == rtu(3, 4)

    play(tmp_path, act, clock=clock)


def test_a_peer_that_cannot_be_resolved_holds_up_nobody_elses_sends(tmp_path: Path) -> None:
    nowhere = GID_NET[:15] + b"\x77"

    async def act(bed: HubBed) -> None:
        bed.port.unresolved.add(nowhere)
        try:
            async with bed.client("a", GID_A) as a, bed.client("b", GID_B) as b:
                for number in range(LANE_LENGTH + 10):
                    await a.send(GID_A, nowhere, rtu(number + 1, 1))
                await bed.port.waiting.wait()
                await bed.until(lambda: bed.drops().get("queue_full", 0) >= 9)
                await b.send(GID_B, GID_NET, rtu(1, 2))
                assert (await bed.port.outgoing.receive()).sgid == GID_B
                assert bed.port.receiver is not None
                bed.port.receiver.inject(Datagram(GID_NET, GID_A, rtu(5, 6)))
                assert (await a.datagram()).payload == rtu(5, 6)
                await a.send(GID_A, GID_B, rtu(7, 8))
                assert (await b.datagram()).payload == rtu(7, 8)
        finally:
            bed.port.unresolved.clear()
            bed.port.resolved.set()

    play(tmp_path, act)


def test_farewells_go_out_although_the_lane_is_full(tmp_path: Path) -> None:
    nowhere = GID_NET[:15] + b"\x77"

    async def act(bed: HubBed) -> None:
        bed.port.unresolved.add(nowhere)
        try:
            async with bed.client("a", GID_A) as a:
                for number in range(10):
                    await a.send(GID_A, GID_NET, req(number + 1, GID_A, GID_NET))
                    await bed.port.outgoing.receive()
                for number in range(LANE_LENGTH + 10):
                    await a.send(GID_A, nowhere, rtu(1000 + number, 1))
                await bed.port.waiting.wait()
                await bed.until(lambda: bed.drops().get("queue_full", 0) >= 9)
        finally:
            bed.port.unresolved.clear()
            bed.port.resolved.set()
        sent = [await bed.port.outgoing.receive() for _ in range(LANE_LENGTH + 11)]
        assert [attr(d.payload) for d in sent[-10:]] == [CmAttrId.REJ] * 10
        await bed.until(lambda: bed.port.senders_open == 0)

    play(tmp_path, act)


def test_a_gid_is_given_up_when_its_farewells_are_out(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        bed.port.unresolved.add(GID_NET)
        bed.port.resolved.set()
        async with bed.client("a", GID_A) as a:
            for number in range(5):
                await a.send(GID_A, GID_NET, req(number + 1, GID_A, GID_NET))
                await bed.port.outgoing.receive()
            bed.port.resolved.clear()
            bed.port.waiting = trio.Event()
            await a.say(Unregister(GID_A))
            await bed.port.waiting.wait()
            bed.port.resolved.set()
            assert await a.next() == Ok(GID_A)
            assert bed.port.outgoing.statistics().current_buffer_used == 5

    play(tmp_path, act)


def test_what_waits_when_the_device_goes_is_dropped_and_counted(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        bed.port.unresolved.add(GID_NET)
        bed.port.unreachable.add(GID_NET)
        async with bed.client("a", GID_A) as a:
            for number in range(20):
                await a.send(GID_A, GID_NET, rtu(number + 1, 1))
            await bed.port.waiting.wait()
            await bed.until(lambda: bed.hub.switch.counters.to_network == 20)
            assert bed.port.receiver is not None
            bed.port.taken = "gone"
            bed.port.receiver.unplug()
            await bed.until(lambda: bed.hub.snapshot()["umad"] != "ready")
            bed.port.resolved.set()
            await bed.until(lambda: bed.drops() == {"send_failed": 20})
            assert bed.hub.switch.counters.to_network == 0

    play(tmp_path, act)


def test_a_send_that_fails_is_a_counted_drop(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        bed.port.unreachable.add(GID_NET)
        async with bed.client("a", GID_A) as a, bed.client("b", GID_B) as b:
            await a.send(GID_A, GID_NET, rtu(1, 2))
            await bed.until(lambda: bed.drops() == {"send_failed": 1})
            bed.port.no_sender = "no umad"
            await b.send(GID_B, GID_NET, rtu(1, 2))
            await bed.until(lambda: bed.drops() == {"send_failed": 2})
            bed.port.no_sender = None
            bed.port.unreachable.clear()
            await b.send(GID_B, GID_NET, rtu(1, 2))
            await bed.port.outgoing.receive()

    play(tmp_path, act)


def test_a_busy_send_is_tried_again_and_then_given_up(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a:
            bed.port.busy = len(BUSY_PAUSES_S)
            await a.send(GID_A, GID_NET, rtu(1, 2))
            assert (await bed.port.outgoing.receive()).payload == rtu(1, 2)
            bed.port.busy = len(BUSY_PAUSES_S) + 1
            await a.send(GID_A, GID_NET, rtu(1, 2))
            await bed.until(lambda: bed.drops() == {"send_failed": 1})

    play(tmp_path, act)


# --- the old protocol ------------------------------------------------------------------------------------------------


def test_an_old_client_and_a_new_one_connect(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        dialect = OldMuxDialect(lambda _: 0)
        async with bed.old_client() as old, bed.client("new", GID_B) as new:
            await old.say(dialect.encode(Register(GID_A, 2)))
            answer = await old.next()
            assert (answer.msg_type, answer.err_code) == (MuxMsgType.RESP, MuxErrCode.OK)
            # As QEMU does, to itself.
            await old.say(dialect.encode(Send(Datagram(GID_A, GID_A, req(7, GID_A, GID_B)))))
            answer = await old.next()
            assert (answer.msg_type, answer.err_code) == (MuxMsgType.RESP, MuxErrCode.OK)
            asked = await new.datagram()
            assert asked.payload == req(7, GID_A, GID_B)
            # RoCE v2: a new guest that is told of v1 looks for the address in the datagram, and drops it.
            assert asked.network_type == 1
            await new.send(GID_B, GID_A, rep(8, 7))
            mad = await old.next()
            assert (mad.msg_type, mad.op_code) == (MuxMsgType.REQ, MuxOpCode.MAD)
            assert (mad.umad.gid, mad.mad[: mad.umad_len]) == (GID_B, rep(8, 7))
            await old.say(dialect.encode(Send(Datagram(GID_A, GID_A, rtu(7, 8)))))
            assert (await new.datagram()).payload == rtu(7, 8)
            await old.next()
            await old.say(dialect.encode(Register(GID_B, 2)))
            assert (await old.next()).err_code == MuxErrCode.EACCES
        await bed.until(lambda: bed.hub.ended == {"left": 2})

    play(tmp_path, act)


def test_a_mad_that_goes_nowhere_is_einval_to_an_old_client(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        dialect = OldMuxDialect(lambda _: 0)
        async with bed.old_client() as old:
            await old.say(dialect.encode(Send(Datagram(GID_A, GID_NET, rtu(1, 2)))))
            assert (await old.next()).err_code == MuxErrCode.EINVAL
            assert bed.drops() == {"not_owner": 1}

    play(tmp_path, act)


@pytest.mark.parametrize(
    ("data", "reason"), [(bytes(359), "truncated"), (struct.pack("<i", 1) * 90, "unexpected")]
)
def test_an_old_client_that_breaks_the_protocol_is_ended(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.old_client() as old:
            await old.say(data)
            await old.stream.send_eof()
            await bed.until(lambda: bed.hub.ended == {reason: 1})

    play(tmp_path, act)


# --- the process -----------------------------------------------------------------------------------------------------


def test_status(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A):
            status = await trio.to_thread.run_sync(read_status, str(tmp_path / "status"))
        (client,) = status["clients"]
        assert client["name"] == "a"
        assert (client["pid"], client["uid"]) == (os.getpid(), os.getuid())
        assert client["gids"] == {GID_A.hex(): 2}
        assert (status["device"], status["umad"]) == ("fake0 port 1", "ready")

    play(tmp_path, act)


def test_connections_leave_no_descriptors(tmp_path: Path) -> None:
    async def act(bed: HubBed) -> None:
        async def once() -> None:
            async with bed.client("a", GID_A) as a, bed.client("b", GID_B):
                await a.send(GID_A, GID_NET, req(1, GID_A, GID_NET))
                await bed.port.outgoing.receive()
            await bed.port.outgoing.receive()  # the farewell
            await bed.until(lambda: not bed.hub.switch.clients)

        await once()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await once()
        assert len(os.listdir("/proc/self/fd")) == before

    play(tmp_path, act)


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pvrdma_server.mad_hub"]
    hub = subprocess.Popen(
        [*command, "--socket", tmp_path / "hub", "--status-socket", tmp_path / "status",
         "--ibdev", "none0"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert hub.stderr is not None
    with hub.stderr:
        lines: list[str] = []
        while not any('"ready"' in line for line in lines):
            lines.append(hub.stderr.readline())
            assert lines[-1], lines
        assert any("umad_unavailable" in line for line in lines)
        shown = subprocess.run(
            [*command, "status", tmp_path / "status"], check=True, capture_output=True, timeout=60
        )
        assert json.loads(shown.stdout)["device"] == "none0 port 1"
        second = subprocess.run(
            [*command, "--socket", tmp_path / "hub"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 78
        assert "a server listens there" in second.stderr
        hub.send_signal(signal.SIGHUP)
        hub.send_signal(signal.SIGTERM)
        rest = hub.stderr.read()
        assert hub.wait(60) == 0
        assert "Traceback" not in rest
    assert not (tmp_path / "hub").exists()


def test_the_command_needs_a_socket() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pvrdma_server.mad_hub"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2
    assert "--socket" in run.stderr


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    hub = MadHub(HubConfig(str(tmp_path / "none" / "hub")), None)
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True):
        trio.run(hub.run)

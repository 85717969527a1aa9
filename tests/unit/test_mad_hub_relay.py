"""`mad_relay` and the hub, each as it is: registrations, refusals, datagrams, restarts, both protocols."""

import errno
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from unit.mads import GID_A, GID_B, rep, req, rtu

from pvrdma_server import mad_relay
from pvrdma_server.abi.rdmacm_mux import MUX_MSG, MUX_MSG_SIZE, MuxErrCode, MuxMsgType
from pvrdma_server.errors import BackendError
from pvrdma_server.mad_dialect import Dialect, HubDialect
from pvrdma_server.mad_frames import Datagram
from pvrdma_server.mad_hub.daemon import HubConfig, MadHub
from pvrdma_server.mad_old_mux import OldMuxDialect
from pvrdma_server.mad_relay import MadRelay

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be slow; nothing here waits in vain."""
    monkeypatch.setattr(mad_relay, "ANSWER_WAIT_S", 30.0)
    monkeypatch.setattr(mad_relay, "PATIENCE_S", 30.0)


@contextmanager
def hub_in_a_thread(folder: Path) -> Iterator[MadHub]:
    """A hub with a loop of its own, as a process has: a relay waits for its answers without giving way."""
    config = HubConfig(str(folder / "hub"), old_mux_path=str(folder / "old"))
    hub: MadHub
    started, stop, failed = threading.Event(), [trio.CancelScope()], list[BaseException]()
    token: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        nonlocal hub
        token.append(trio.lowlevel.current_trio_token())
        hub = MadHub(config, None)
        with stop[0]:
            async with trio.open_nursery() as nursery:
                await nursery.start(hub.run)
                started.set()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as e:
            failed.append(e)
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(DEADLINE_S)
        assert not failed
        yield hub
    finally:
        token[0].run_sync_soon(stop[0].cancel)
        thread.join(DEADLINE_S)
    assert not failed


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        with trio.fail_after(DEADLINE_S):
            await test()

    trio.run(within)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await trio.sleep(0.002)


@asynccontextmanager
async def linked(
    path: Path, name: str, dialect: Callable[[], Dialect] = HubDialect
) -> AsyncIterator[MadRelay]:
    """A VM's relay that has its link; what arrives is in its `got`."""
    relay: Any = MadRelay(str(path), name, dialect)
    relay.got = []
    relay.on_datagram = relay.got.append
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        await until(lambda: relay.connected)
        yield relay
        nursery.cancel_scope.cancel()
    relay.close()


def got(relay: Any) -> list[Datagram]:
    datagrams: list[Datagram] = relay.got
    return datagrams


def states(relay: MadRelay) -> set[str]:
    gids: Any = relay.facts()["gids"]
    return {entry["state"] for entry in gids.values()}


def old_dialect() -> Dialect:
    return OldMuxDialect(lambda _: 0)


@pytest.mark.parametrize("old", [(), ("a",), ("a", "b")], ids=["new", "one is old", "both are old"])
def test_two_vms_connect(tmp_path: Path, old: tuple[str, ...]) -> None:
    def place(name: str) -> tuple[Path, Callable[[], Dialect]]:
        return (tmp_path / "old", old_dialect) if name in old else (tmp_path / "hub", HubDialect)

    async def test() -> None:
        (a_path, a_dialect), (b_path, b_dialect) = place("a"), place("b")
        async with linked(a_path, "a", a_dialect) as a, linked(b_path, "b", b_dialect) as b:
            a.claim(GID_A, 2)
            b.claim(GID_B, 2)
            assert states(a) == states(b) == {"owned"}
            for sender, receiver, datagram in (
                (a, b, Datagram(GID_A, GID_B, req(7, GID_A, GID_B))),
                (b, a, Datagram(GID_B, GID_A, rep(8, 7))),
                (a, b, Datagram(GID_A, GID_B, rtu(7, 8))),
            ):
                got(receiver).clear()
                assert sender.send(datagram)
                await until(partial(got, receiver))
                (last,) = got(receiver)
                assert (last.sgid, last.dgid, last.payload) == datagram[:3]
            a.release(GID_A)
            b.claim(GID_A, 2)

    with hub_in_a_thread(tmp_path) as hub:
        run(test)
    assert hub.switch.counters.drops == {}


def test_anothers_gid_is_eaddrinuse_in_the_guest(tmp_path: Path) -> None:
    async def test() -> None:
        async with linked(tmp_path / "hub", "web-1") as a, linked(tmp_path / "hub", "web-2") as b:
            a.claim(GID_A, 2)
            with pytest.raises(BackendError, match="held by web-1") as raised:
                b.claim(GID_A, 2)
            assert raised.value.errno == errno.EADDRINUSE
        async with linked(tmp_path / "old", "web-3", old_dialect) as c:
            c.claim(GID_A, 2)

    with hub_in_a_thread(tmp_path):
        run(test)


def test_10_servers_come_back_to_a_hub_that_was_restarted(tmp_path: Path) -> None:
    async def test() -> None:
        first = hub_in_a_thread(tmp_path)
        first.__enter__()
        async with (
            linked(tmp_path / "hub", "a") as a,
            linked(tmp_path / "old", "b", old_dialect) as b,
        ):
            a.claim(GID_A, 2)
            b.claim(GID_B, 2)
            await trio.to_thread.run_sync(first.__exit__, None, None, None)
            await until(lambda: not a.connected and not b.connected)
            with hub_in_a_thread(tmp_path) as second:
                await until(lambda: states(a) == states(b) == {"owned"})
                a.send(Datagram(GID_A, GID_B, rtu(1, 2)))
                await until(lambda: got(b))
                assert len(second.switch.clients) == 2

    run(test)


def test_an_old_mux_that_does_not_read_for_a_while_answers_what_it_was_asked(
    tmp_path: Path,
) -> None:
    """Its answers are told apart by their order only: what was lost here must have no place in it."""
    path = str(tmp_path / "old")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        relay = MadRelay(path, "vm", old_dialect)
        link = relay._connect()
        assert link is not None
        mux, _ = listener.accept()
    with mux:
        mux.setblocking(False)
        sent = 0
        while relay.send(Datagram(GID_A, GID_B, rtu(1, 2))):
            sent += 1
        heard = b""
        while len(heard) < sent * MUX_MSG_SIZE:
            heard += mux.recv(1 << 20)
            relay._flush()
        for start in range(0, len(heard), MUX_MSG_SIZE):
            mux.send(response(heard[start : start + MUX_MSG_SIZE], MuxErrCode.OK))
            assert relay._read(link)
        mux.send(response(bytes(MUX_MSG_SIZE), MuxErrCode.EACCES))
        with pytest.raises(BackendError) as refused:
            relay.claim(GID_A, 2)
        assert refused.value.errno == errno.EADDRINUSE
        assert relay.facts()["hub_dropped"] == {}
    relay.close()


def response(request: bytes, error: MuxErrCode) -> bytes:
    message = MUX_MSG.unpack(request)
    return MUX_MSG.pack(message._replace(msg_type=MuxMsgType.RESP, err_code=error))

"""A running hub on real UNIX sockets, with a fake network, and clients of both protocols."""

import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
import trio.testing
from unit.fake_umad import FakePort

from pvrdma_server.abi.rdmacm_mux import MUX_MSG, MUX_MSG_SIZE, MuxMsg
from pvrdma_server.mad_frames import (
    Connection,
    Datagram,
    Dropped,
    Hello,
    Message,
    Ok,
    Receive,
    Register,
    Role,
    Send,
    encode,
)
from pvrdma_server.mad_hub.daemon import HubConfig, MadHub

# Long: the machine may be busy. Nothing waits for it when all is well.
PATIENCE_S = 60.0


class Client:
    """A VM's server, as the hub sees it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.connection = Connection(Role.CLIENT)
        self._messages: list[Message] = []

    async def say(self, *messages: Message) -> None:
        await self.stream.send_all(b"".join(encode(m) for m in messages))

    async def next(self) -> Message:
        """The next message that is no Dropped."""
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if not isinstance(message, Dropped):
                    return message
            data = await self.stream.receive_some(65536)
            self._messages += self.connection.receive_data(data)
            if not data:
                raise EOFError

    async def datagram(self) -> Datagram:
        message = await self.next()
        assert isinstance(message, Receive), message
        return message.datagram

    async def register(self, *gids: bytes) -> None:
        for gid in gids:
            await self.say(Register(gid, 2))
            assert await self.next() == Ok(gid)

    async def send(self, sgid: bytes, dgid: bytes, payload: bytes) -> None:
        await self.say(Send(Datagram(sgid, dgid, payload)))

    async def ended(self) -> None:
        """Returns when the hub has ended the connection."""
        try:
            while await self.stream.receive_some(65536):
                pass
        except trio.BrokenResourceError:
            pass


class OldClient:
    """An old QEMU, as the hub sees it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream

    async def say(self, raw: bytes) -> None:
        await self.stream.send_all(raw)

    async def next(self) -> MuxMsg:
        raw = b""
        while len(raw) < MUX_MSG_SIZE:
            more = await self.stream.receive_some(MUX_MSG_SIZE - len(raw))
            if not more:
                raise EOFError
            raw += more
        return MUX_MSG.unpack(raw)


class HubBed:
    """See the module's docstring."""

    def __init__(self, folder: Path, port: FakePort | None, hub: MadHub) -> None:
        self.folder = folder
        self.hub = hub
        self._port = port

    @property
    def port(self) -> FakePort:
        assert self._port is not None
        return self._port

    @asynccontextmanager
    async def raw(self, name: str = "hub") -> AsyncIterator[trio.SocketStream]:
        async with await trio.open_unix_socket(self.folder / name) as stream:
            assert isinstance(stream, trio.SocketStream)
            yield stream

    @asynccontextmanager
    async def client(self, name: str, *gids: bytes) -> AsyncIterator[Client]:
        async with self.raw() as stream:
            client = Client(stream)
            await client.say(Hello(name))
            assert isinstance(await client.next(), Hello)
            await client.register(*gids)
            yield client

    @asynccontextmanager
    async def old_client(self) -> AsyncIterator[OldClient]:
        async with self.raw("old") as stream:
            yield OldClient(stream)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Returns once `condition` holds; the hub runs meanwhile, no clock is asked."""
        while not condition():
            await trio.testing.wait_all_tasks_blocked(0.001)

    def drops(self) -> dict[str, int]:
        return dict(self.hub.switch.counters.drops)


@asynccontextmanager
async def running(folder: Path, port: FakePort | None, **config: Any) -> AsyncIterator[HubBed]:
    """A hub at `folder`/hub (and /old, /status)."""
    paths = {"old_mux_path": str(folder / "old"), "status_path": str(folder / "status")}
    hub = MadHub(HubConfig(str(folder / "hub"), **{**paths, **config}), port)
    async with trio.open_nursery() as nursery:
        await nursery.start(hub.run)
        try:
            yield HubBed(folder, port, hub)
        finally:
            nursery.cancel_scope.cancel()


def play(
    folder: Path,
    act: Callable[[HubBed], Awaitable[None]],
    *,
    network: bool = True,
    clock: trio.testing.MockClock | None = None,
    prepare: Callable[[FakePort], None] | None = None,
    **config: Any,
) -> None:
    """Run `act` on a hub of its own."""

    async def main() -> None:
        port = FakePort() if network else None
        if port is not None and prepare is not None:
            prepare(port)
        # A test that moves the clock would move this, too; it has pytest's patience.
        with trio.move_on_after(PATIENCE_S if clock is None else math.inf) as patience:
            async with running(folder, port, **config) as bed:
                if port is not None and port.taken is None:
                    await port.opened.wait()
                await act(bed)
        assert not patience.cancelled_caught, "timed out"

    trio.run(main, clock=clock)


def small_buffers(stream: trio.SocketStream) -> None:
    """Have the kernel hold little for us, so that not reading is felt soon."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

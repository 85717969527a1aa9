"""One connected client: its socket, its queue, and the protocol it speaks.

Contract: a client that does not read costs a bounded queue and nobody else anything; one that breaks the protocol, or
has no right to be here, is ended with a counted reason. Writing to a client that has gone is an error here, never a
signal.
"""

import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import trio

from pvrdma_server.mad_frames import Connection, FrameError, Hello, Message, Role, encode
from pvrdma_server.mad_hub.connections import (
    MAX_CONNECTIONS,
    MAX_OLD_CONNECTIONS,
    ConnectionTable,
)
from pvrdma_server.mad_hub.old_mux import OldMuxConnection
from pvrdma_server.mad_hub.switch import Client, MadSwitch

# Messages that wait for a client that does not read; at 600 bytes each.
QUEUE_LENGTH: Final = 1024
# Answers and farewells, which nobody repeats, may wait beyond that.
URGENT_QUEUE_LENGTH: Final = QUEUE_LENGTH + MAX_CONNECTIONS
# Bytes written at once; a client that reads one message at a time should see the first early.
WRITE_MESSAGES: Final = 64
# A client's turn: a dozen datagrams, or under 200 of the shortest requests. Others wait no longer for theirs.
READ_BYTES: Final = 4096
# A connection that says nothing holds a descriptor.
HELLO_TIMEOUT_S: Final = 10.0

_UCRED: Final = struct.Struct("3i")


class Wire(Protocol):
    """What `mad_frames.Connection` and `OldMuxConnection` have in common."""

    @property
    def failed(self) -> FrameError | None:
        """Why the connection must end, once it must."""

    def receive_data(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises FrameError."""


def peer_credentials(sock: Any) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel saw it connect."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid


class QueuedOutbox:
    """Messages on their way to one client. Implements `switch.Outbox`.

    Args:
        sock: the client's.
        encode: message to bytes; nothing for what has none.
    """

    def __init__(self, sock: Any, encode: Callable[[Message], bytes]) -> None:
        self._sock = sock
        self._encode = encode
        self._queue: deque[bytes] = deque()
        self._wake = trio.Event()
        self.scope = trio.CancelScope()

    def put(self, message: Message, *, urgent: bool = False) -> bool:
        """See `switch.Outbox`."""
        data = self._encode(message)
        return not data or self.put_bytes(data, urgent=urgent)

    def put_bytes(self, data: bytes, *, urgent: bool = False) -> bool:
        """Send `data`, now or later; false if too much waits."""
        if len(self._queue) >= (URGENT_QUEUE_LENGTH if urgent else QUEUE_LENGTH):
            return False
        self._queue.append(data)
        self._wake.set()
        return True

    def gone(self) -> bool:
        """See `switch.Outbox`."""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """See `switch.Outbox`."""
        self.scope.cancel()

    async def drain(self, stream: trio.SocketStream) -> None:
        """Write what is queued, until cancelled.

        Raises:
            trio.BrokenResourceError: the client is gone.
        """
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._queue:
                count = min(len(self._queue), WRITE_MESSAGES)
                await stream.send_all(b"".join(self._queue.popleft() for _ in range(count)))


class Session:
    """One connection, from its Hello to its end.

    Args:
        switch: the hub's core.
        stream: the client's.
        facts: about the client, for the status.

    Attributes:
        name: what logs call the client.
    """

    def __init__(self, switch: MadSwitch, stream: trio.SocketStream, facts: dict[str, Any]) -> None:
        self._switch = switch
        self._stream = stream
        self._facts = facts
        self._ended = "closed"
        self.name = f"pid {facts['pid']}"

    async def serve(self, hub_name: str) -> str:
        """Serve a client of `mad_frames` until it ends; returns the reason."""
        wire = Connection(Role.HUB)
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                messages = await self._greeting(wire)
        except trio.TooSlowError:
            return "no_hello"
        except FrameError as e:
            return e.kind
        except trio.BrokenResourceError:
            return "broken"
        if wire.peer_name is None:
            return "left"
        outbox = QueuedOutbox(self._stream.socket, encode)
        self.name = printable(wire.peer_name)
        client = self._switch.attach(self.name, outbox, self._facts)
        outbox.put(Hello(hub_name))
        await self._talk(wire, outbox, client, messages)
        return self._ended

    async def serve_old(self) -> str:
        """Serve a client of the old protocol until it ends; returns the reason."""
        connections = ConnectionTable(MAX_OLD_CONNECTIONS)
        wire = OldMuxConnection(connections)
        outbox = QueuedOutbox(self._stream.socket, wire.encode)
        self.name = f"{wire.peer_name} (pid {self._facts['pid']})"
        client = self._switch.attach(self.name, outbox, self._facts, connections, patient=False)
        await self._talk(wire, outbox, client, [])
        return self._ended

    async def _greeting(self, wire: Connection) -> list[Message]:
        while wire.peer_name is None:
            data = await self._stream.receive_some(READ_BYTES)
            messages = wire.receive_data(data)
            if not data or messages:
                return messages
        return []

    async def _talk(
        self, wire: Wire, outbox: QueuedOutbox, client: Client, messages: list[Message]
    ) -> None:
        it_has_gone = False
        try:
            with outbox.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, outbox)
                    self._ended = await self._read(wire, outbox, client, messages)
                    nursery.cancel_scope.cancel()
            it_has_gone = True
        finally:
            # Else it is the hub that stops: the client and its connections live on.
            self._switch.detach(client, farewells=it_has_gone)

    async def _write(self, outbox: QueuedOutbox) -> None:
        # The reader sees the same end, and says how it came.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await outbox.drain(self._stream)

    async def _read(
        self, wire: Wire, outbox: QueuedOutbox, client: Client, messages: list[Message]
    ) -> str:
        try:
            while True:
                for message in messages:
                    self._switch.received(client, message)
                    if not client.attached:
                        return "closed"
                    if isinstance(wire, OldMuxConnection):
                        outbox.put_bytes(wire.respond(), urgent=True)
                if wire.failed is not None:
                    return wire.failed.kind
                data = await self._stream.receive_some(READ_BYTES)
                messages = wire.receive_data(data)
                if not data:
                    return "left"
        except FrameError as e:
            return e.kind
        except trio.BrokenResourceError:
            return "broken"


def printable(name: str) -> str:
    """A name as it may stand in a log: it is the client's word, on our terminal."""
    return "".join(c if c.isprintable() else "?" for c in name) or "?"

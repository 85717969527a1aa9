"""A MAD hub with the manners that tests of its clients want: in a thread, since a client may wait for its answer."""

import queue
import socket
import threading
from contextlib import suppress
from pathlib import Path

from pvrdma_server.mad_frames import (
    Connection,
    Datagram,
    Hello,
    Message,
    Ok,
    Receive,
    RefuseCode,
    Refused,
    Register,
    Role,
    Unregister,
    encode,
)

WAIT_S = 20.0


class FakeHub:
    """Serves one client after the other.

    Attributes:
        heard: every message but Hellos, in order.
        refuse: GIDs that are another's.
        silent: no registration is answered; true from the start means not even Hello is.
    """

    def __init__(self, folder: Path, *, silent: bool = False) -> None:
        self.path = str(folder / "hub.sock")
        self.heard: queue.Queue[Message] = queue.Queue()
        self.refuse: dict[bytes, RefuseCode] = {}
        self.silent = silent
        self.clients: queue.Queue[str] = queue.Queue()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def next(self) -> Message:
        """The next message of the client."""
        return self.heard.get(timeout=WAIT_S)

    def say(self, data: bytes | Datagram | Message) -> None:
        """Send bytes, a datagram, or a message."""
        if isinstance(data, Datagram):
            data = Receive(data)
        raw = data if isinstance(data, bytes) else encode(data)
        assert self._client is not None
        with suppress(OSError):  # the client may have hung up
            self._client.sendall(raw)

    def hang_up(self) -> None:
        assert self._client is not None
        with suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End, and leave the socket's name behind, as a crash would."""
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._client is not None:
            self.hang_up()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                self._client, _ = self._listener.accept()
            except OSError:
                return
            with self._client, suppress(OSError):
                self._talk(self._client)

    def _talk(self, client: socket.socket) -> None:
        connection = Connection(Role.HUB)
        while data := client.recv(65536):
            for message in connection.receive_data(data):
                answer = self._answer(message)
                if answer is not None and not self.silent:
                    client.sendall(encode(answer))
                # Said only now, so that who waits for it finds the answer on its way.
                if isinstance(message, Hello):
                    self.clients.put(message.name)
                else:
                    self.heard.put(message)

    def _answer(self, message: Message) -> Message | None:
        match message:
            case Hello():
                return Hello("fake hub")
            case Register(gid) if gid in self.refuse:
                return Refused(gid, self.refuse[gid], "it is vm7's")
            case Register(gid) | Unregister(gid):
                return Ok(gid)
        return None

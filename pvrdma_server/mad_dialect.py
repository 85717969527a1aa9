"""How one connection of `mad_relay` speaks to the host's side; the hub's own protocol, `mad_old_mux` is the other.

Contract: sans-I/O. A dialect may count on it that what it encodes is sent: answers are told apart by their order.
"""

from typing import Final, Protocol

from pvrdma_server.mad_frames import (
    MAX_FRAME_BYTES,
    Connection,
    FrameError,
    Hello,
    Message,
    Register,
    Role,
    Send,
    Unregister,
    encode,
)

# The longest that any dialect says at once: a frame of the hub's; messages of the old mux have 360 bytes.
MAX_SAID_BYTES: Final = 4 + MAX_FRAME_BYTES


class Dialect(Protocol):
    """How one connection speaks to the host's side: our protocol, or that of QEMU's rdmacm-mux."""

    def hello(self, name: str) -> bytes:
        """What is said first."""

    def encode(self, message: Register | Unregister | Send) -> bytes:
        """The bytes of a message; none if it cannot be said."""

    def receive_data(self, data: bytes) -> list[Message]:
        """See `mad_frames.Connection`. Raises FrameError."""

    @property
    def failed(self) -> FrameError | None:
        """See `mad_frames.Connection`."""

    @property
    def peer_name(self) -> str | None:
        """Who is there, once that is known."""


class HubDialect:
    """The hub's own protocol. Implements `Dialect`."""

    def __init__(self) -> None:
        self._connection = Connection(Role.CLIENT)
        self.receive_data = self._connection.receive_data

    def hello(self, name: str) -> bytes:
        """See `Dialect`."""
        return encode(Hello(name))

    def encode(self, message: Register | Unregister | Send) -> bytes:
        """See `Dialect`."""
        return encode(message)

    @property
    def failed(self) -> FrameError | None:
        """See `Dialect`."""
        return self._connection.failed

    @property
    def peer_name(self) -> str | None:
        """See `Dialect`."""
        return self._connection.peer_name

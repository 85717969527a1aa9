"""The protocol between `pvrdma-mad-hub` and the servers of a host's VMs: bytes in, messages out.

Contract: sans-I/O; both sides use one `Connection` per UNIX stream socket. A frame is a u32 length (little-endian, of
what follows it), a type byte and a body; numbers are little-endian, GIDs 16 bytes in wire order. Each side first says
HELLO. The parser keeps at most one incomplete frame. What it does not understand raises `FrameError`, and the
connection ends: a stream that is wrong once is wrong for good.

  client                               hub
  Hello(version, VM's name)  ────────>
                             <──────── Hello(version, hub's name)
  Register(gid, gid_type)    ────────>
                             <──────── Ok(gid)  or  Refused(gid, code, text)
  Send(datagram)             ────────>
                             <──────── Receive(datagram), Dropped(reason, dgid)
  Unregister(gid)            ────────>
                             <──────── Ok(gid)  or  Refused(gid, code, text)

Answers come in the order of the requests. A hub sends nothing but its Hello before it has the client's.
"""

from collections.abc import Callable
from enum import Enum, IntEnum
from struct import Struct
from typing import Final, NamedTuple

from pvrdma_server.abi.mad import MAD_SIZE
from pvrdma_server.errors import PvrdmaError

PROTOCOL_VERSION: Final = 1
# The longest frame, without its length: a Refused with the longest text. What it stops: a peer that has us buffer.
MAX_FRAME_BYTES: Final = 512
# Names stand in logs and in refusals.
MAX_NAME_BYTES: Final = 128
MAX_TEXT_BYTES: Final = 400
GID_BYTES: Final = 16

_LENGTH = Struct("<I")
_DATAGRAM = Struct("<16s16sIIIIHBBBB")
_GID_AND_BYTE = Struct("<16sB")
_HELLO = Struct("<H")


class FrameError(PvrdmaError):
    """The peer sent what this protocol does not have; the connection must end.

    Attributes:
        kind: a short constant name for counters.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind


class RefuseCode(IntEnum):
    """Why a Register or Unregister was refused."""

    HELD_BY_ANOTHER = 1
    NOT_REGISTERED = 2
    BAD_GID = 3
    TOO_MANY = 4


class DropReason(IntEnum):
    """Why a datagram went nowhere. The hub's counters have these names in lower case."""

    NOT_OWNER = 1
    """The source GID is not the sender's."""
    NO_ROUTE = 2
    """No client has the destination GID, and there is no umad agent to send it out."""
    NOT_CM = 3
    """A MAD of another class than communication management, or of another QP than 1."""
    MALFORMED = 4
    """Too short for what its attribute says it is."""
    QUEUE_FULL = 5
    """The receiver does not read."""
    SEND_FAILED = 6
    """The host's umad refused it."""
    UNKNOWN_RECEIVER = 7
    """From the network, for none of the clients."""


class Datagram(NamedTuple):
    """One UD datagram of QP1 with its addresses; as received, `sgid` is the sender's and `dgid` ours.

    `payload` is a MAD of at most 256 bytes. `network_type` is that of a completion: 0 RoCE v1, 1 RoCE v2 over IPv4,
    2 over IPv6 (pvrdma_verbs.h, `pvrdma_network_type`). `flow_label` has 20 bits, `qkey` 32 and the queue pair
    numbers 24.
    """

    sgid: bytes
    dgid: bytes
    payload: bytes
    src_qp: int = 1
    dst_qp: int = 1
    qkey: int = 0x80010000
    flow_label: int = 0
    pkey_index: int = 0
    sl: int = 0
    traffic_class: int = 0
    hop_limit: int = 64
    network_type: int = 0


class Hello(NamedTuple):
    """First message of either side: protocol version, and the name of the VM or of the hub."""

    name: str
    version: int = PROTOCOL_VERSION


class Register(NamedTuple):
    """The client wants to own `gid`; `gid_type` is 1 for RoCE v1, 2 for RoCE v2."""

    gid: bytes
    gid_type: int


class Unregister(NamedTuple):
    """The client gives `gid` up."""

    gid: bytes


class Ok(NamedTuple):
    """The request for `gid` was done."""

    gid: bytes


class Refused(NamedTuple):
    """The request for `gid` was not done; `code` is a RefuseCode, `text` for the log."""

    gid: bytes
    code: int
    text: str


class Send(NamedTuple):
    """A datagram from the client's guest."""

    datagram: Datagram


class Receive(NamedTuple):
    """A datagram for the client's guest."""

    datagram: Datagram


class Dropped(NamedTuple):
    """A datagram of the client to `dgid` went nowhere; `reason` is a DropReason. For counters only."""

    reason: int
    dgid: bytes


Message = Hello | Register | Unregister | Ok | Refused | Send | Receive | Dropped


def _pack_text(text: str, limit: int) -> bytes:
    """UTF-8, cut at a character's end."""
    return text.encode()[:limit].decode(errors="ignore").encode()


def _unpack_text(body: bytes, limit: int) -> str:
    if len(body) > limit:
        raise FrameError("bad_frame", f"text of {len(body)} bytes, at most {limit}")
    try:
        return body.decode()
    except UnicodeDecodeError as e:
        raise FrameError("bad_frame", f"text is not UTF-8: {e}") from e


def _pack_datagram(d: Datagram) -> bytes:
    if len(d.payload) > MAD_SIZE:
        raise ValueError(f"a MAD of {len(d.payload)} bytes, at most {MAD_SIZE}")
    _check_gids(d.sgid, d.dgid)
    head = _DATAGRAM.pack(
        d.sgid,
        d.dgid,
        d.src_qp,
        d.dst_qp,
        d.qkey,
        d.flow_label,
        d.pkey_index,
        d.sl,
        d.traffic_class,
        d.hop_limit,
        d.network_type,
    )
    return head + d.payload


def _unpack_datagram(body: bytes) -> Datagram:
    if not _DATAGRAM.size <= len(body) <= _DATAGRAM.size + MAD_SIZE:
        raise FrameError("bad_frame", f"datagram of {len(body)} bytes")
    sgid, dgid, *numbers = _DATAGRAM.unpack_from(body)
    return Datagram(sgid, dgid, body[_DATAGRAM.size :], *numbers)


def _check_gids(*gids: bytes) -> None:
    for gid in gids:
        if len(gid) != GID_BYTES:
            raise ValueError(f"a GID of {len(gid)} bytes")


def _fixed(layout: Struct, body: bytes) -> tuple[bytes, int]:
    if len(body) != layout.size:
        raise FrameError("bad_frame", f"body of {len(body)} bytes, need {layout.size}")
    gid, number = layout.unpack(body)
    return gid, number


def _unpack_gid(body: bytes) -> bytes:
    if len(body) != GID_BYTES:
        raise FrameError("bad_frame", f"body of {len(body)} bytes, need a GID")
    return body


def _unpack_hello(body: bytes) -> Hello:
    if len(body) < _HELLO.size:
        raise FrameError("bad_frame", "short HELLO")
    (version,) = _HELLO.unpack_from(body)
    if version != PROTOCOL_VERSION:
        raise FrameError("version", f"peer speaks version {version}, we {PROTOCOL_VERSION}")
    return Hello(_unpack_text(body[_HELLO.size :], MAX_NAME_BYTES), version)


def _unpack_refused(body: bytes) -> Refused:
    gid, code = _fixed(_GID_AND_BYTE, body[: _GID_AND_BYTE.size])
    return Refused(gid, code, _unpack_text(body[_GID_AND_BYTE.size :], MAX_TEXT_BYTES))


def _unpack_dropped(body: bytes) -> Dropped:
    dgid, reason = _fixed(_GID_AND_BYTE, body)
    return Dropped(reason, dgid)


# type byte -> (message, its body from bytes)
_READERS: Final[dict[int, tuple[type[Message], Callable[[bytes], Message]]]] = {
    1: (Hello, _unpack_hello),
    2: (Register, lambda body: Register(*_fixed(_GID_AND_BYTE, body))),
    3: (Unregister, lambda body: Unregister(_unpack_gid(body))),
    4: (Ok, lambda body: Ok(_unpack_gid(body))),
    5: (Refused, _unpack_refused),
    6: (Send, lambda body: Send(_unpack_datagram(body))),
    7: (Receive, lambda body: Receive(_unpack_datagram(body))),
    8: (Dropped, _unpack_dropped),
}
_TYPE_BYTE: Final = {message: number for number, (message, _) in _READERS.items()}


def _body_of(message: Message) -> bytes:
    match message:
        case Hello(name, version):
            return _HELLO.pack(version) + _pack_text(name, MAX_NAME_BYTES)
        case Register(gid, gid_type):
            _check_gids(gid)
            return _GID_AND_BYTE.pack(gid, gid_type)
        case Unregister(gid) | Ok(gid):
            _check_gids(gid)
            return gid
        case Refused(gid, code, text):
            _check_gids(gid)
            return _GID_AND_BYTE.pack(gid, code) + _pack_text(text, MAX_TEXT_BYTES)
        case Send(datagram) | Receive(datagram):
            return _pack_datagram(datagram)
        case Dropped(reason, dgid):
            _check_gids(dgid)
            return _GID_AND_BYTE.pack(dgid, reason)


def encode(message: Message) -> bytes:
    """The frame of `message`. Names and texts that are too long are cut.

    Raises:
        ValueError: a GID is not 16 bytes, or a MAD longer than 256.
        struct.error: a number does not fit its field.
    """
    body = _body_of(message)
    return _LENGTH.pack(1 + len(body)) + bytes((_TYPE_BYTE[type(message)],)) + body


class Role(Enum):
    """Which side of the connection we are."""

    CLIENT = "client"
    HUB = "hub"


# What each side may send after its Hello.
_SENDS: Final[dict[Role, frozenset[type[Message]]]] = {
    Role.CLIENT: frozenset({Register, Unregister, Send}),
    Role.HUB: frozenset({Ok, Refused, Receive, Dropped}),
}


class Connection:
    """One side of a connection; see the module's contract.

    Args:
        role: our side.

    Attributes:
        peer_name: what the peer's Hello said, None before it came.
    """

    def __init__(self, role: Role) -> None:
        self.peer_name: str | None = None
        self._peer_sends = _SENDS[Role.HUB if role is Role.CLIENT else Role.CLIENT]
        self._buffer = b""
        self._failed: FrameError | None = None

    def receive_data(self, data: bytes) -> list[Message]:
        """The messages that `data`, the next bytes of the stream, complete; b"" is its end.

        Raises:
            FrameError: nothing after the messages returned before can be understood. Messages in front of the bad frame
                are returned by this call, and the next one, whatever its data, raises.
        """
        if self._failed is not None:
            raise self._failed
        messages: list[Message] = []
        try:
            if not data and self._buffer:
                raise FrameError("truncated", f"the stream ends after {len(self._buffer)} bytes")
            self._parse(data, messages)
        except FrameError as e:
            self._failed, self._buffer = e, b""
            if not messages:
                raise
        return messages

    @property
    def failed(self) -> FrameError | None:
        """Why the connection must end, once it must."""
        return self._failed

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the incomplete frame: never more than one frame."""
        return len(self._buffer)

    def _parse(self, data: bytes, messages: list[Message]) -> None:
        stream = self._buffer + data
        start = 0
        while len(stream) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(stream, start)
            if not 1 <= length <= MAX_FRAME_BYTES:
                raise FrameError("bad_length", f"a frame of {length} bytes, 1 to {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if end > len(stream):
                break
            messages.append(self._message(stream[start + _LENGTH.size : end]))
            start = end
        self._buffer = stream[start:]

    def _message(self, frame: bytes) -> Message:
        reader = _READERS.get(frame[0])
        if reader is None:
            raise FrameError("unknown_type", f"type byte {frame[0]}")
        kind, unpack = reader
        if kind is Hello and self.peer_name is not None:
            raise FrameError("unexpected", "a second HELLO")
        if kind is not Hello and (self.peer_name is None or kind not in self._peer_sends):
            raise FrameError("unexpected", f"{kind.__name__} is not the peer's to send now")
        message = unpack(frame[1:])
        if isinstance(message, Hello):
            self.peer_name = message.name
        return message

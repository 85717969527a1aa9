"""The greeting of two servers: one message each way, with the descriptor of the sender's ring.

Contract: pure format, little-endian. `parse_hello_untrusted` raises only `BadHello`.
"""

import re
from struct import Struct
from typing import Final, NamedTuple

from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.shm_ring import ring_size_ok
from pvrdma_server.errors import GuestError

PROTOCOL: Final = 1
_MAGIC: Final = b"pvrdmafb"
_HELLO = Struct("<8sIIII32s64s")
HELLO_BYTES: Final = _HELLO.size
_ID = re.compile(r"[0-9a-f]{32}")


class BadHello(GuestError):
    """Not a greeting, or of a server that we cannot talk to."""

    kind = "bad_hello"


class Hello(NamedTuple):
    """`server_id`: 32 hexadecimal digits, new for every process; `name`: for people."""

    server_id: str
    name: str
    ring_bytes: int


def is_server_id(text: str) -> bool:
    """Whether this is an id, and so a harmless file name."""
    return _ID.fullmatch(text) is not None


def pack_hello(hello: Hello) -> bytes:
    """The message; a long name is cut."""
    return _HELLO.pack(
        _MAGIC, PROTOCOL, wire.VERSION, hello.ring_bytes, wire.MAX_CHUNK_BYTES,
        hello.server_id.encode(), hello.name.encode()[-64:],
    )  # fmt: skip


def parse_hello_untrusted(data: bytes) -> Hello:
    """A greeting.

    Raises:
        BadHello: another protocol, version or geometry, or an id that is none.
    """
    if len(data) != HELLO_BYTES:
        raise BadHello(f"{len(data)} bytes")
    magic, protocol, version, ring_bytes, chunk, raw_id, raw_name = _HELLO.unpack(data)
    if magic != _MAGIC or (protocol, version) != (PROTOCOL, wire.VERSION):
        raise BadHello(
            f"protocol {protocol}, messages {version}; we speak {PROTOCOL}, {wire.VERSION}"
        )
    if not ring_size_ok(ring_bytes) or chunk != wire.MAX_CHUNK_BYTES:
        raise BadHello(f"a ring of {ring_bytes} bytes, messages of {chunk}")
    server_id = raw_id.decode("ascii", "replace")
    if not is_server_id(server_id):
        raise BadHello("an id that is none")
    name = raw_name.rstrip(b"\0").decode("utf-8", "replace")
    return Hello(server_id, name, ring_bytes)

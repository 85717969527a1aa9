"""The messages between two servers: a 64-byte little-endian header, then payload.

Contract: pure format. A header stands in front of every message whatever carries it, and later in
a slot of a shared-memory ring, so it is as untrusted as a guest: `parse_header_untrusted` takes a
bytes snapshot, bounds every field it returns, and raises only `BadMessage`.

A long SEND or RDMA WRITE travels in chunks, one PSN each. An RDMA READ or an atomic takes one PSN;
its responses repeat that PSN, READ data with its offset in the message.

     0 kind   1 flags   2 code   3 version   4 dst_qpn   8 src_qpn   12 psn   16 length
    20 rkey  24 remote_addr  32 total  36 imm  40 operand_a  48 operand_b  56 offset        (RC)
    20 qkey  24 imm  28 tclass << 20 | flow  32 sgid  48 dgid      psn = GID type    (datagram)
"""

from struct import Struct
from typing import Final, NamedTuple

from pvrdma_server.errors import GuestError

HEADER_BYTES: Final = 64
VERSION: Final = 1
PSN_MASK: Final = 0xFF_FFFF
PSN_HALF: Final = 0x80_0000
# Stops a peer from describing a chunk larger than any slot of a ring.
MAX_CHUNK_BYTES: Final = 256 << 10
# InfiniBand's own limit is 2 GiB; stops totals that no region could hold.
MAX_MESSAGE_BYTES: Final = 1 << 30

# Kinds; 0 is none, so that zeroed memory is no message.
SEND: Final = 1
WRITE: Final = 2
READ_REQUEST: Final = 3
READ_RESPONSE: Final = 4
ATOMIC_REQUEST: Final = 5
ATOMIC_RESPONSE: Final = 6
ACK: Final = 7
NAK: Final = 8
DATAGRAM: Final = 9

FIRST: Final = 1
LAST: Final = 2
SOLICITED: Final = 4
WITH_IMM: Final = 8
WITH_INV: Final = 16
ACK_REQUEST: Final = 32

# `code` of a NAK; RNR carries the timer in its low five bits.
# Source: InfiniBand Architecture Specification vol. 1, tables 43 to 45 (AETH syndrome).
NAK_PSN_SEQUENCE: Final = 0
NAK_INVALID_REQUEST: Final = 1
NAK_REMOTE_ACCESS: Final = 2
NAK_REMOTE_OPERATIONAL: Final = 3
NAK_RNR: Final = 0x20
RNR_TIMER_MASK: Final = 0x1F

# `code` of an atomic request.
ATOMIC_CMP_SWAP: Final = 0
ATOMIC_FETCH_ADD: Final = 1

NO_IMM: Final = bytes(4)

_RC = Struct("<BBBBIIIIIQI4sQQQ")
_DATAGRAM = Struct("<BBBBIIIII4sI16s16s")
pack_rc = _RC.pack
pack_datagram = _DATAGRAM.pack


class BadMessage(GuestError):
    """A peer's header is not one."""

    kind = "bad_message"


class RcMessage(NamedTuple):
    """Header of everything between two connected queue pairs.

    `code` is a NAK code or an atomic's operation, `length` the payload's bytes, `total` those of
    the whole message, `rkey` of a SEND the key to invalidate, `operand_a` of an atomic response
    the value found, `offset` where in the message a READ starts or its response belongs.
    """

    kind: int
    flags: int
    code: int
    version: int
    dst_qpn: int
    src_qpn: int
    psn: int
    length: int
    rkey: int
    remote_addr: int
    total: int
    imm: bytes
    operand_a: int
    operand_b: int
    offset: int


class DatagramMessage(NamedTuple):
    """Header of a datagram; GIDs are 16 bytes in wire order, `hop_limit` stands where `code` is."""

    kind: int
    flags: int
    hop_limit: int
    version: int
    dst_qpn: int
    src_qpn: int
    gid_type: int
    length: int
    qkey: int
    imm: bytes
    class_flow: int
    sgid: bytes
    dgid: bytes


def pack_response(kind: int, code: int, dst_qpn: int, src_qpn: int, psn: int, value: int) -> bytes:
    """Header of an ACK, a NAK or an atomic response; `value` is the atomic's result."""
    return pack_rc(
        kind, LAST, code, VERSION, dst_qpn, src_qpn, psn, 0, 0, 0, 0, NO_IMM, value, 0, 0
    )


def parse_header_untrusted(header: bytes, payload_bytes: int) -> RcMessage | DatagramMessage:
    """A header that came with `payload_bytes` of payload.

    Raises:
        BadMessage: wrong size, version or kind, or a field no message of ours can carry.
    """
    if len(header) != HEADER_BYTES or header[3] != VERSION:
        raise BadMessage("not a header of this version")
    kind = header[0]
    if kind == DATAGRAM:
        datagram = DatagramMessage._make(_DATAGRAM.unpack(header))
        if datagram.length != payload_bytes or payload_bytes > MAX_CHUNK_BYTES:
            raise BadMessage(f"datagram of {datagram.length} bytes with {payload_bytes}")
        return datagram
    # What `_make` does, without its cost.
    message = tuple.__new__(RcMessage, _RC.unpack(header))
    if not SEND <= kind <= NAK:
        raise BadMessage(f"message kind {kind}")
    if message.length != payload_bytes or payload_bytes > MAX_CHUNK_BYTES:
        raise BadMessage(f"message of {message.length} bytes with {payload_bytes}")
    if message.psn > PSN_MASK or message.total > MAX_MESSAGE_BYTES:
        raise BadMessage(f"psn {message.psn:#x}, total {message.total:#x}")
    return message

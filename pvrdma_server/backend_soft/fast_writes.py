"""RDMA WRITEs of one message each, many in one call of C: out of a send queue into a ring, out of a ring into memory.

Contract: a short cut, never another way. The first WRITE goes the usual way, with every check; what follows it and is
like it (same queue pair, same keys, next PSN, inside the same piece of memory) may go this way, and the first one that
is different ends the call and goes the usual way again. Nothing is kept between calls: keys and bounds are those that
Python has just looked up, so a key that goes is gone. Without the extension there is no short cut.

The C is in `_ring_build`; what it reads out of a ring or a send queue is hostile, and it checks snapshots.
"""

from struct import Struct
from typing import Any, Final, NamedTuple

from pvrdma_server.backend import SendEntries
from pvrdma_server.backend_soft.native import extension
from pvrdma_server.backend_soft.wire import MAX_CHUNK_BYTES

# Messages and bytes of one call: stops one queue pair from keeping all others, and everybody else, waiting.
MAX_MESSAGES: Final = 256
MAX_BYTES: Final = 256 << 10
SENT: Final = Struct("<QQQIIII")
"""wr_id, remote address, address, length, rkey, flags, unused."""


class Piece(NamedTuple):
    """Memory in a row: `memory` begins at `address`, as a key's holder names it."""

    address: int
    memory: memoryview


class WriteRun(NamedTuple):
    """What a responder would accept next, and where it would land."""

    dst_qpn: int
    src_qpn: int
    psn: int
    rkey: int
    piece: Piece


class Landed(NamedTuple):
    """What came: messages, their bytes, and the ring's index behind them."""

    messages: int
    length_bytes: int
    tail: int


class WritePosting(NamedTuple):
    """What a requester would send next: entries of its queue that read `piece` under `lkey`."""

    entries: SendEntries
    lkey: int
    piece: Piece
    limit: int
    limit_bytes: int
    max_length: int
    dst_qpn: int
    src_qpn: int
    psn: int


class Posted(NamedTuple):
    """What was sent: messages, their bytes, the ring's index behind them, and a `SENT` record of each."""

    messages: int
    length_bytes: int
    head: int
    records: bytes


class Landing:
    """The consumer's end of one ring."""

    def __init__(self, data: memoryview) -> None:
        ffi = extension.ffi
        self._data = ffi.from_buffer("uint8_t[]", data)
        self._call: Any = ffi.new("struct ring_landing *")
        self._call.data, self._call.capacity = self._data, len(data)
        self._call.max_length = MAX_CHUNK_BYTES

    def take_untrusted(self, run: WriteRun, tail: int, head: int) -> Landed:
        """Land what is like `run` between the ring's indices `tail` and `head`, which were checked."""
        call = self._call
        call.dst_qpn, call.src_qpn, call.psn, call.rkey, piece = run
        call.tail, call.head, call.limit, call.limit_bytes = tail, head, MAX_MESSAGES, MAX_BYTES
        with extension.ffi.from_buffer("uint8_t[]", piece.memory, True) as memory:
            call.piece = (piece.address, len(piece.memory), memory)
            extension.lib.ring_land_writes(call)
        return Landed(call.messages, call.bytes, call.tail)

    def release(self) -> None:
        """Let the ring go."""
        extension.ffi.release(self._data)


class Posting:
    """The producer's end of one ring."""

    def __init__(self, data: memoryview, head_word: memoryview, reserve: int) -> None:
        ffi = extension.ffi
        self._data = ffi.from_buffer("uint8_t[]", data)
        self._word = ffi.from_buffer("uint64_t[]", head_word)
        self._call: Any = ffi.new("struct ring_posting *")
        self._call.data, self._call.capacity = self._data, len(data)
        self._call.head_word, self._call.reserve = self._word, reserve
        self._records = ffi.buffer(self._call.sent)

    def put_untrusted(self, what: WritePosting, head: int, tail: int) -> Posted:
        """Send what is like `what`; `head` and `tail` are the ring's indices, which were checked."""
        call, ffi = self._call, extension.ffi
        entries, call.lkey, piece, limit, limit_bytes, call.max_length = what[:6]
        call.dst_qpn, call.src_qpn, call.psn = what[6:]
        call.limit, call.limit_bytes = min(limit, MAX_MESSAGES), min(limit_bytes, MAX_BYTES)
        call.cons_head, call.index_mask = entries.cons_head, entries.index_mask
        call.entry_size, call.slots = entries.entry_size, len(entries.slots) // entries.entry_size
        call.head, call.tail = head, tail
        with (
            ffi.from_buffer("uint32_t[]", entries.prod_tail) as prod_tail,
            ffi.from_buffer("uint8_t[]", entries.slots) as slots,
            ffi.from_buffer("uint8_t[]", piece.memory) as memory,
        ):
            call.prod_tail, call.entries = prod_tail, slots
            call.piece = (piece.address, len(piece.memory), memory)
            extension.lib.ring_post_writes(call)
        count = call.messages
        return Posted(count, call.bytes, call.head, self._records[: count * SENT.size])

    def release(self) -> None:
        """Let the ring go."""
        extension.ffi.release(self._data)
        extension.ffi.release(self._word)

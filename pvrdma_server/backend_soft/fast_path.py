"""RDMA WRITEs, and the data of READs, many messages in one call of C: from memory into a ring, from a ring into memory.

Contract: a short cut, never another way. A WRITE that goes the usual way leaves a `Hint`; what follows and is like it
(same queue pair, same keys, next PSN, inside the same piece of memory) may go this way, and the first one that is
different ends the call and goes the usual way again. Nothing but the hint is kept between calls: keys and bounds are
looked up for each, so a key that goes is gone. Without the extension there is no short cut.

The C is in `_ring_build`; what it reads out of a ring or a send queue is hostile, and it checks snapshots.
"""

from struct import Struct
from typing import Any, Final, NamedTuple

from pvrdma_server.backend import SendEntries
from pvrdma_server.backend_soft.native import LINGER_PAYS, extension
from pvrdma_server.backend_soft.wire import MAX_CHUNK_BYTES, WRITE

# Messages and bytes of one call: stops one queue pair from keeping all others, and everybody else, waiting.
MAX_MESSAGES: Final = 256
MAX_BYTES: Final = 2 << 20
# Of one call that lands, after which it is acknowledged.
MAX_LANDED: Final = 2 << 20
# How long one call may wait for the other end of the ring to move, each time and in all: longer than that takes to copy
# a message, but it may be waiting for us.
_PATIENCE_NS: Final = (40_000, 200_000) if LINGER_PAYS else (0, 0)
# A short cut that was tried in vain is not tried again for so many messages, at most: it costs about as much as one.
_MAX_DETOURS: Final = 15
SENT: Final = Struct("<QQQIIII")
"""wr_id, remote address, address, length, rkey, flags, messages."""


class Piece(NamedTuple):
    """Memory in a row: `memory` begins at `address`, as a key's holder names it."""

    address: int
    memory: memoryview


class Hint:
    """What the last WRITE was like, and whether to try the short cut for the next one."""

    __slots__ = ("_detours", "_left", "address", "key")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """There is no last one."""
        self.key = self.address = self._detours = self._left = 0

    def set(self, key: int, address: int) -> None:
        """A WRITE under `key`, at `address`, went the usual way."""
        self.key, self.address = key, address

    def tempts(self) -> bool:
        """Whether to try."""
        if self._left:
            self._left -= 1
            return False
        return self.key != 0

    def tried(self, messages: int) -> None:
        """So many went the short way."""
        self._detours = 0 if messages else min(2 * self._detours + 1, _MAX_DETOURS)
        self._left = self._detours


class Run(NamedTuple):
    """What a queue pair would accept next of one kind (WRITE, READ_RESPONSE), and where it would land.

    A message that is under way has `done` of `total` bytes at `address`; there is none when `total` is 0.
    """

    kind: int
    dst_qpn: int
    src_qpn: int
    psn: int
    rkey: int
    piece: Piece
    address: int
    total: int
    done: int


class Landed(NamedTuple):
    """What came: messages, their bytes, the ring's indices now, and what is under way.

    The last `unanswered` of them need no answer.
    """

    messages: int
    length_bytes: int
    tail: int
    head: int
    address: int
    total: int
    done: int
    unanswered: int


class WritePosting(NamedTuple):
    """What a requester would send next: entries of its queue that read `piece` under `lkey`."""

    entries: SendEntries
    lkey: int
    piece: Piece
    limit: int
    limit_bytes: int
    chunk_bytes: int
    dst_qpn: int
    src_qpn: int
    psn: int


class Chunks(NamedTuple):
    """Parts of one WRITE, or of one READ's data, that would be sent next, out of `piece` under its holder's addresses.

    `length_bytes` is the whole message's, `addr` its place here, `offset` how far it is sent.
    """

    kind: int
    flags: int
    dst_qpn: int
    src_qpn: int
    psn: int
    piece: Piece
    addr: int
    length_bytes: int
    offset: int
    chunk_bytes: int
    limit: int
    limit_bytes: int
    rkey: int = 0
    remote_addr: int = 0
    ack_every: int = 1


class Posted(NamedTuple):
    """What was sent: messages, their bytes, the ring's index behind them, and a `SENT` record of each entry."""

    messages: int
    length_bytes: int
    head: int
    records: bytes


class Landing:
    """The consumer's end of one ring."""

    def __init__(self, data: memoryview, words: memoryview) -> None:
        ffi = extension.ffi
        self._data = ffi.from_buffer("uint8_t[]", data)
        self._words = ffi.from_buffer("uint64_t[]", words)
        self._call: Any = ffi.new("struct ring_landing *")
        self._call.data, self._call.words, self._call.capacity = self._data, self._words, len(data)
        self._call.max_length = MAX_CHUNK_BYTES

    def take_untrusted(self, run: Run, tail: int, head: int) -> Landed:
        """Land what is like `run` between the ring's indices `tail` and `head`, which were checked."""
        call = self._call
        kind, call.dst_qpn, call.src_qpn, call.psn, call.rkey, piece = run[:6]
        call.address, call.total, call.done = run[6:]
        call.tail, call.head, call.limit, call.limit_bytes = tail, head, MAX_MESSAGES, MAX_LANDED
        call.told, call.patience = tail, _PATIENCE_NS
        land = extension.lib.ring_land_writes if kind == WRITE else extension.lib.ring_land_response
        with extension.ffi.from_buffer("uint8_t[]", piece.memory, True) as memory:
            call.piece = (piece.address, len(piece.memory), memory)
            land(call)
        return Landed(
            call.messages, call.bytes, call.tail, call.head, call.address, call.total, call.done,
            call.unanswered,
        )  # fmt: skip

    def release(self) -> None:
        """Let the ring go."""
        extension.ffi.release(self._data)
        extension.ffi.release(self._words)


class Posting:
    """The producer's end of one ring."""

    def __init__(self, data: memoryview, words: memoryview, reserve: int) -> None:
        ffi = extension.ffi
        self._data = ffi.from_buffer("uint8_t[]", data)
        self._words = ffi.from_buffer("uint64_t[]", words)
        self._call: Any = ffi.new("struct ring_posting *")
        self._call.max_length = MAX_BYTES
        self._records = ffi.buffer(self._call.sent)
        self._chunks: Any = ffi.new("struct ring_chunks *")
        for call in (self._call, self._chunks):
            call.to = (self._data, self._words, len(data), 0, 0, reserve, (0, 0))

    def put_untrusted(self, what: WritePosting, head: int, tail: int) -> Posted:
        """Send what is like `what`; `head` and `tail` are the ring's indices, which were checked."""
        call, ffi = self._call, extension.ffi
        entries, call.lkey, piece, limit, limit_bytes, call.chunk = what[:6]
        call.dst_qpn, call.src_qpn, call.psn = what[6:]
        call.limit, call.limit_bytes = min(limit, MAX_MESSAGES), min(limit_bytes, MAX_BYTES)
        call.cons_head, call.index_mask = entries.cons_head, entries.index_mask
        call.entry_size, call.slots = entries.entry_size, len(entries.slots) // entries.entry_size
        to = call.to
        to.head, to.tail, to.patience = head, tail, _PATIENCE_NS
        with (
            ffi.from_buffer("uint32_t[]", entries.prod_tail) as prod_tail,
            ffi.from_buffer("uint8_t[]", entries.slots) as slots,
            ffi.from_buffer("uint8_t[]", piece.memory) as memory,
        ):
            call.prod_tail, call.entries = prod_tail, slots
            call.piece = (piece.address, len(piece.memory), memory)
            extension.lib.ring_post_writes(call)
        records = self._records[: call.entries_taken * SENT.size]
        return Posted(call.messages, call.bytes, to.head, records)

    def put_chunks(self, what: Chunks, head: int, tail: int) -> Posted:
        """Send `what`, as far as there is room; `head` and `tail` are the ring's indices, which were checked."""
        call, ffi = self._chunks, extension.ffi
        call.kind, call.flags, call.dst_qpn, call.src_qpn, call.psn, piece = what[:6]
        call.addr, call.total, call.offset, call.chunk, limit, limit_bytes = what[6:12]
        call.rkey, call.remote_addr, call.ack_every = what[12:]
        call.limit, call.limit_bytes = limit, min(limit_bytes, MAX_BYTES)
        to = call.to
        to.head, to.tail, to.patience = head, tail, _PATIENCE_NS
        with ffi.from_buffer("uint8_t[]", piece.memory) as memory:
            call.piece = (piece.address, len(piece.memory), memory)
            extension.lib.ring_post_chunks(call)
        return Posted(call.messages, call.bytes, to.head, b"")

    def release(self) -> None:
        """Let the ring go."""
        extension.ffi.release(self._data)
        extension.ffi.release(self._words)

"""RDMA WRITEs and READs, many messages in one call of C: from memory into a ring, from a ring into memory.

Contract: a short cut, never another way. One that goes the usual way leaves a `Hint`; what follows and is like it
(same queue pair, same keys, next PSN, inside the same piece of memory) may go this way, and the first one that is
different ends the call and goes the usual way again. Nothing but the hint is kept between calls: keys and bounds are
looked up for each, so a key that goes is gone. Without the extension there is no short cut.

The C is in `_ring_build`; what it reads out of a ring or a send queue is hostile, and it checks snapshots.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, Final, NamedTuple

from pvrdma_server.backend import SendEntries
from pvrdma_server.backend_soft.codes import OP_READ
from pvrdma_server.backend_soft.native import LINGER_PAYS, extension
from pvrdma_server.backend_soft.wire import (
    MAX_CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    READ_REQUEST,
    READ_RESPONSE,
    WRITE,
)

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
ASKED: Final = Struct("<QII")
"""Address, length, PSN of a READ. At most 64 in one call."""
MAX_ASKED: Final = 64


class Piece(NamedTuple):
    """Memory in a row: `memory` begins at `address`, as a key's holder names it."""

    address: int
    memory: memoryview


class Detour:
    """Whether to try a short cut: after one in vain, it is left out for a while, and then longer."""

    __slots__ = ("_detours", "_left")

    def __init__(self) -> None:
        self._detours = self._left = 0

    def tempts(self) -> bool:
        """Whether to try."""
        if self._left:
            self._left -= 1
            return False
        return True

    def tried(self, messages: int) -> None:
        """So many went the short way."""
        self._detours = 0 if messages else min(2 * self._detours + 1, _MAX_DETOURS)
        self._left = self._detours


class Hint(Detour):
    """What the last one was like, and whether to try the short cut for the next. `kind`: of a message."""

    __slots__ = ("address", "key", "kind")

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """There is no last one."""
        self.kind = self.key = self.address = self._detours = self._left = 0

    def set(self, kind: int, key: int, address: int) -> None:
        """One under `key`, at `address`, went the usual way."""
        self.kind, self.key, self.address = kind, key, address

    def tempts(self) -> bool:
        """Whether to try."""
        return super().tempts() and self.key != 0


class Run(NamedTuple):
    """What a queue pair would accept next of one kind, and where it would land.

    A WRITE that is under way has `done` of `total` bytes at `address`; there is none when `total` is 0. READ_RESPONSE
    is for the `SENT` records `reads`; of the first one `done` bytes have come. READ_REQUEST is for READs of `piece`.
    """

    kind: int
    dst_qpn: int
    src_qpn: int
    psn: int
    rkey: int
    piece: Piece
    address: int = 0
    total: int = 0
    done: int = 0
    reads: bytes = b""
    limit: int = MAX_MESSAGES


class Landed(NamedTuple):
    """What came: messages, their bytes, the ring's indices now, and what is under way.

    The last `unanswered` of them need no answer. `completed`: READs whose data is all there. `asked`: an `ASKED` record
    of each READ that came.
    """

    messages: int
    length_bytes: int
    tail: int
    head: int
    address: int
    total: int
    done: int
    unanswered: int
    completed: int
    asked: bytes


class Requests(NamedTuple):
    """What a requester would send next: entries of its queue with this `opcode` and `piece` under `lkey`."""

    entries: SendEntries
    opcode: int
    lkey: int
    piece: Piece
    limit: int
    limit_bytes: int
    chunk_bytes: int
    dst_qpn: int
    src_qpn: int
    psn: int


class Chunks(NamedTuple):
    """Parts of one WRITE that would be sent next, out of `piece` under its holder's addresses.

    `length_bytes` is the whole message's, `addr` its place here, `offset` how far it is sent.
    """

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
    rkey: int
    remote_addr: int
    ack_every: int


class Answers(NamedTuple):
    """Data of READs that would be sent next, out of `piece`. `offset` bytes of the first `ASKED` record's are sent."""

    dst_qpn: int
    src_qpn: int
    piece: Piece
    asked: bytes
    offset: int
    chunk_bytes: int
    limit: int
    limit_bytes: int


Many = Requests | Chunks | Answers
"""What goes many messages at a time."""


class Posted(NamedTuple):
    """What was sent: messages, their bytes, the ring's index behind them.

    `records`: a `SENT` record of each request. `completed`: READs that are answered; `offset`: how far the next is.
    """

    messages: int
    length_bytes: int
    head: int
    records: bytes = b""
    completed: int = 0
    offset: int = 0


_LAND: dict[int, Callable[[Any], None]] = (
    {
        WRITE: extension.lib.ring_land_writes,
        READ_REQUEST: extension.lib.ring_take_reads,
        READ_RESPONSE: extension.lib.ring_land_responses,
    }
    if extension
    else {}
)


class Landing:
    """The consumer's end of one ring."""

    def __init__(self, data: memoryview, words: memoryview) -> None:
        ffi = extension.ffi
        self._data = ffi.from_buffer("uint8_t[]", data)
        self._words = ffi.from_buffer("uint64_t[]", words)
        self._call: Any = ffi.new("struct ring_landing *")
        self._call.data, self._call.words, self._call.capacity = self._data, self._words, len(data)
        self._call.max_length = MAX_CHUNK_BYTES
        self._asked = ffi.buffer(self._call.asked)

    def take_untrusted(self, run: Run, tail: int, head: int) -> Landed:
        """Land what is like `run` between the ring's indices `tail` and `head`, which were checked."""
        call, ffi = self._call, extension.ffi
        kind, call.dst_qpn, call.src_qpn, call.psn, call.rkey, piece = run[:6]
        call.address, call.total, call.done, reads, limit = run[6:]
        call.tail, call.head, call.limit, call.limit_bytes = tail, head, limit, MAX_LANDED
        call.told, call.patience = tail, _PATIENCE_NS
        if kind == READ_RESPONSE:
            records = ffi.from_buffer("struct ring_sent[]", reads)
            call.reads, call.count = records, len(records)
        with ffi.from_buffer("uint8_t[]", piece.memory, kind != READ_REQUEST) as memory:
            call.piece = (piece.address, len(piece.memory), memory)
            _LAND[kind](call)
        return Landed(
            call.messages, call.bytes, call.tail, call.head, call.address, call.total, call.done,
            call.unanswered, call.completed,
            bytes(self._asked[: call.messages * ASKED.size]) if kind == READ_REQUEST else b"",
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
        self._requests: Any = ffi.new("struct ring_posting *")
        self._chunks: Any = ffi.new("struct ring_chunks *")
        self._answers: Any = ffi.new("struct ring_answers *")
        self._records, self._asked = (
            ffi.buffer(self._requests.sent),
            ffi.buffer(self._answers.asked),
        )
        for call in (self._requests, self._chunks, self._answers):
            call.to = (self._data, self._words, len(data), 0, 0, reserve, (0, 0))

    def put_untrusted(self, what: Many, head: int, tail: int) -> Posted:
        """Send `what`, as far as there is room; `head` and `tail` are the ring's indices, which were checked."""
        if type(what) is Requests:
            return self._put_requests(what, head, tail)
        if type(what) is Chunks:
            return self._put_chunks(what, head, tail)
        assert type(what) is Answers
        return self._put_answers(what, head, tail)

    def _put_requests(self, what: Requests, head: int, tail: int) -> Posted:
        call, ffi = self._requests, extension.ffi
        entries, call.opcode, call.lkey, piece, limit, limit_bytes, call.chunk = what[:7]
        call.dst_qpn, call.src_qpn, call.psn = what[7:]
        call.limit, call.limit_bytes = min(limit, MAX_MESSAGES), min(limit_bytes, MAX_BYTES)
        call.max_length = MAX_MESSAGE_BYTES if what.opcode == OP_READ else MAX_BYTES
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
            extension.lib.ring_post_requests(call)
        records = self._records[: call.entries_taken * SENT.size]
        return Posted(call.messages, call.bytes, to.head, records)

    def _put_chunks(self, what: Chunks, head: int, tail: int) -> Posted:
        call, ffi = self._chunks, extension.ffi
        call.flags, call.dst_qpn, call.src_qpn, call.psn, piece = what[:5]
        call.addr, call.total, call.offset, call.chunk, call.limit, limit_bytes = what[5:11]
        call.rkey, call.remote_addr, call.ack_every = what[11:]
        call.limit_bytes = min(limit_bytes, MAX_BYTES)
        to = call.to
        to.head, to.tail, to.patience = head, tail, _PATIENCE_NS
        with ffi.from_buffer("uint8_t[]", piece.memory) as memory:
            call.piece = (piece.address, len(piece.memory), memory)
            extension.lib.ring_post_chunks(call)
        return Posted(call.messages, call.bytes, to.head)

    def _put_answers(self, what: Answers, head: int, tail: int) -> Posted:
        call, ffi = self._answers, extension.ffi
        call.dst_qpn, call.src_qpn, piece, asked = what[:4]
        call.offset, call.chunk, call.limit, limit_bytes = what[4:]
        self._asked[: len(asked)] = asked
        call.count, call.limit_bytes = len(asked) // ASKED.size, min(limit_bytes, MAX_BYTES)
        to = call.to
        to.head, to.tail, to.patience = head, tail, _PATIENCE_NS
        with ffi.from_buffer("uint8_t[]", piece.memory) as memory:
            call.piece = (piece.address, len(piece.memory), memory)
            extension.lib.ring_post_answers(call)
        return Posted(call.messages, call.bytes, to.head, b"", call.completed, call.offset)

    def release(self) -> None:
        """Let the ring go."""
        extension.ffi.release(self._data)
        extension.ffi.release(self._words)

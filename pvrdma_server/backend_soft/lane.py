"""A lane: while a server waits for a peer, RDMA WRITEs of one queue pair go both ways without Python.

Contract: as `fast_path`, a short cut, never another way. A queue pair whose last WRITEs went by that short cut offers a
`Lane`; C then waits for the peer and for the guest and meanwhile sends, lands, acknowledges and completes what is like
them. What is different ends it and goes the usual way. It lasts `LANE_NS` at most; what became of it is a `Drove`, by
which the queue pair catches up. Keys and bounds are looked up for each lane, so a key that goes is gone.

The C is in `_ring_lane.h`.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pvrdma_server.backend import SendLane
from pvrdma_server.backend_soft.codes import OP_WRITE
from pvrdma_server.backend_soft.fast_path import (
    MAX_BYTES,
    MAX_LANDED,
    MAX_MESSAGES,
    SENT,
    Piece,
    Run,
)
from pvrdma_server.backend_soft.native import Looker, extension, look_in_c
from pvrdma_server.backend_soft.wire import MAX_CHUNK_BYTES

# How long other queue pairs, peers and tasks wait at most for one that goes on and on.
LANE_NS: Final = 1_000_000
# Requests under way that a lane can begin with.
MAX_RECORDS: Final = 256


class Sends(NamedTuple):
    """The requester's half: WRITEs out of `piece` under `lkey`, for entries of the owner's send queue.

    `records`: a `SENT` record of each that is under way, of which `first` is the first PSN; `psn` is the next and
    `acked` the last acknowledged one. `room`: requests that may be under way. `flying` of `window` bytes are.
    """

    owner: SendLane
    lkey: int
    piece: Piece
    records: bytes
    first: int
    psn: int
    acked: int
    room: int
    flying: int
    window: int


class Lane(NamedTuple):
    """What a queue pair would do next, if it is like what it did last. A half is None where it is not."""

    qpn: int
    dest_qpn: int
    chunk_bytes: int
    run: Run | None
    sends: Sends | None


class Bell(NamedTuple):
    """How the peer is woken, and how we are called away: a socket, and who looks at everything else."""

    fd: int
    watcher: Looker


class Drove(NamedTuple):
    """What came of a lane.

    `seen`: a `Lingered`. Landed: messages, bytes, and the WRITE under way; `unanswered` (None: none) is how many
    messages came after the last one that still has to be acknowledged. Sent: `taken` entries in `posted` messages, of
    which `records` from PSN `first` are under way; `acked` as before. `answered`: ACKs sent, `acks`: ACKs that came.
    """

    seen: int
    landed: int
    landed_bytes: int
    address: int
    total: int
    done: int
    unanswered: int | None
    taken: int
    posted: int
    posted_bytes: int
    records: bytes
    first: int
    acked: int
    acks: int
    answered: int
    completions: int
    unusual: bool
    rung: int
    looked_ns: int
    out_head: int
    out_tail: int
    in_head: int
    in_tail: int

    @property
    def worked(self) -> int:
        """Messages that went either way."""
        return self.landed + self.posted + self.acks


class Driver:
    """Drives lanes of one link.

    Args:
        out_data, out_words, into_data, into_words: the rings.
        reserve: bytes of the outgoing ring that only ACKs may use.
        bell: see `Bell`.
    """

    def __init__(
        self,
        out: tuple[memoryview, memoryview],
        into: tuple[memoryview, memoryview],
        reserve: int,
        bell: Bell,
    ) -> None:
        ffi = extension.ffi
        self._buffers = [
            ffi.from_buffer("uint8_t[]", out[0]),
            ffi.from_buffer("uint64_t[]", out[1]),
            ffi.from_buffer("uint8_t[]", into[0]),
            ffi.from_buffer("uint64_t[]", into[1]),
            ffi.from_buffer("uint8_t[]", bell.watcher.signalled),
        ]
        self._lane: Any = ffi.new("struct ring_lane *")
        lane = self._lane
        put, into_call = lane.out.to, getattr(lane, "in")
        put.data, put.words, put.capacity = self._buffers[0], self._buffers[1], len(out[0])
        put.reserve = reserve
        into_call.data, into_call.words = self._buffers[2], self._buffers[3]
        into_call.capacity = len(into[0])
        into_call.max_length, into_call.limit = MAX_CHUNK_BYTES, MAX_MESSAGES
        into_call.limit_bytes = MAX_LANDED
        lane.out.opcode, lane.out.max_length = OP_WRITE, MAX_BYTES
        lane.bell_fd, lane.stop, lane.all_ns = bell.fd, self._buffers[4], LANE_NS
        lane.look, lane.watch = look_in_c(bell.watcher)
        self._records = ffi.buffer(lane.records)
        self._cqe = ffi.buffer(lane.cqe)
        self._out, self._into = lane.out, into_call

    def release(self) -> None:
        """Let the rings go."""
        for buffer in self._buffers:
            extension.ffi.release(buffer)

    def drive_untrusted(
        self, what: Lane, out: tuple[int, int], into: tuple[int, int], idle_ns: int
    ) -> Drove:
        """Go on until nothing comes for `idle_ns`; `out` and `into`: head and tail of the rings, checked."""
        lane, t, to = self._lane, self._into, self._out.to
        to.head, to.tail = out
        t.head, t.tail = into
        t.told = t.tail
        lane.idle_ns = idle_ns
        t.dst_qpn, t.src_qpn = what.qpn, what.dest_qpn
        self._out.dst_qpn, self._out.src_qpn = what.dest_qpn, what.qpn
        held: list[Any] = []
        try:
            self._set_run(what.run, held)
            self._set_sends(what, held)
            seen = extension.lib.ring_drive(lane)
        finally:
            for buffer in held:
                extension.ffi.release(buffer)
        return self._result(seen)

    def _hold(self, held: list[Any], kind: str, view: memoryview, *, writable: bool = False) -> Any:
        buffer = extension.ffi.from_buffer(kind, view, writable)
        held.append(buffer)
        return buffer

    def _set_run(self, run: Run | None, held: list[Any]) -> None:
        lane, t = self._lane, self._into
        lane.lands = run is not None
        t.total = 0
        if run is not None:
            t.psn, t.rkey, piece = run.psn, run.rkey, run.piece
            t.address, t.total, t.done = run.address, run.total, run.done
            memory = self._hold(held, "uint8_t[]", piece.memory, writable=True)
            t.piece = (piece.address, len(piece.memory), memory)

    def _set_sends(self, what: Lane, held: list[Any]) -> None:
        lane, p, sends = self._lane, self._out, what.sends
        lane.sends = sends is not None
        lane.done = lane.count = lane.report = 0
        lane.token = -1
        if sends is None:
            return
        owner, p.lkey, piece, records = sends[:4]
        lane.first, p.psn, lane.acked, lane.room, lane.flying, lane.window = sends[4:]
        entries, done = owner.entries, owner.completions
        p.cons_head, p.index_mask, p.entry_size = entries[1], entries[2], entries[4]
        p.chunk, p.slots, lane.cq_slots = what.chunk_bytes, 0, 0
        p.prod_tail = self._hold(held, "uint32_t[]", entries.prod_tail, writable=True)
        self._set_rows(lane.sq_rows, entries.rows, entries.entry_size, held)
        memory = self._hold(held, "uint8_t[]", piece.memory)
        p.piece = (piece.address, len(piece.memory), memory)
        self._records[: len(records)] = records
        lane.count = len(records) // SENT.size
        lane.signal_all, lane.report, lane.token = (
            entries.signal_all,
            done.report,
            owner.watch_token,
        )
        lane.cq_words = self._hold(held, "uint32_t[]", done.prod_tail, writable=True)
        self._set_rows(lane.cq_rows, done.rows, len(done.template), held)
        lane.cq_tail, lane.cq_mask, lane.cq_capacity = done.tail, done.index_mask, done.capacity
        self._cqe[:] = done.template

    def _set_rows(
        self, rows: Any, views: Sequence[memoryview], slot_bytes: int, held: list[Any]
    ) -> None:
        views = views[: len(rows.rows)]
        for at, view in enumerate(views):
            memory = self._hold(held, "uint8_t[]", view, writable=True)
            rows.rows[at] = (memory, len(view) // slot_bytes)
        rows.count, rows.next = len(views), 0

    def _result(self, seen: int) -> Drove:
        lane, t, p = self._lane, self._into, self._out
        left = self._records[lane.done * SENT.size : lane.count * SENT.size]
        unanswered = (t.psn - 1 - lane.ack_psn) & 0xFF_FFFF if lane.answer else None
        return Drove(
            seen, lane.landed, lane.landed_bytes, t.address, t.total, t.done, unanswered, lane.taken,
            lane.posted, lane.posted_bytes, left, lane.first, lane.acked, lane.acks, lane.answered,
            lane.completions, bool(p.unusual), lane.rung, lane.looked_ns, p.to.head, p.to.tail, t.head,
            t.tail,
        )  # fmt: skip

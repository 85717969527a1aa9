"""The outgoing half of a requester: requests taken, sent chunk by chunk, completed in order.

Contract: work is pulled from the owner only as far as the window allows. A request's data is
gathered from guest memory each time a chunk is sent, so nothing is copied or kept, and a repeat
carries what stands there then. Completions leave strictly from the head. The first failure ends
the queue: its completion, then ERR, then the QP flushes the rest.

PSNs are unbounded ints here, cut to 24 bits on the wire.

Source: InfiniBand Architecture Specification vol. 1, 9.7.2, 10.8.3.
"""

from typing import Final

from pvrdma_server.backend import Completion, SendEntries, SendWr
from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.admission import admit, atomic_operands
from pvrdma_server.backend_soft.carrier import Carrier
from pvrdma_server.backend_soft.codes import (
    ERR,
    FENCE,
    LOC_PROT_ERR,
    LOCAL_WRITE,
    OP_FETCH_ADD,
    OP_LOCAL_INV,
    OP_READ,
    OP_WRITE,
    RTS,
    WC_OF_WR,
    WR_FLUSH_ERR,
)
from pvrdma_server.backend_soft.context import QpContext
from pvrdma_server.backend_soft.fast_path import Chunks, Hint, Posted, Requests
from pvrdma_server.backend_soft.scatter import resolve_sges_untrusted
from pvrdma_server.backend_soft.wire import PSN_MASK, READ_REQUEST
from pvrdma_server.backend_soft.wqe import SendQueue, SentMany, Wqe
from pvrdma_server.errors import GuestError

# What goes by the short cut: message's kind, and work request.
_OPCODE: Final = {wire.WRITE: OP_WRITE, READ_REQUEST: OP_READ}
# Where an entry has its opcode, a little-endian number. Source: vmw_pvrdma-abi.h, struct pvrdma_sq_wqe_hdr.
_OPCODE_AT: Final = 16


class Sending:
    """What `Requester` sends and completes. `wanted`: `run` may find something to do."""

    __slots__ = (
        "_ack_every",
        "_chunk",
        "_owner",
        "_stalled",
        "_window",
        "acked",
        "ctx",
        "deadline_ns",
        "failing",
        "hint",
        "psn",
        "queue",
        "queued_ns",
        "reads",
        "recovering",
        "retries_left",
        "rnr_left",
        "rnr_wait",
        "sent",
        "wanted",
    )

    def __init__(self, ctx: QpContext) -> None:
        config = ctx.env.config
        self.ctx = ctx
        self.queue = SendQueue()
        self._owner = ctx.owner
        self._chunk, self._window = config.chunk_bytes, config.window_bytes
        self._ack_every = max(1, config.window_bytes // config.chunk_bytes // 4)
        self.queued_ns: int | None = None
        self.hint = Hint()
        self.reset(0)

    def reset(self, psn: int) -> None:
        """Start anew with this PSN; everything taken is forgotten without completion."""
        self.queue.clear()
        self.psn = self.sent = psn
        self.acked = psn - 1
        self.reads = 0
        self.failing = self.recovering = self.rnr_wait = self._stalled = False
        self.wanted = True
        self.hint.forget()
        self.retries_left, self.rnr_left = self.ctx.retry_cnt, self.ctx.rnr_retry
        self.deadline_ns: int | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return self.queue.idle

    # -- sending ----------------------------------------------------------------------------

    def run(self, carrier: Carrier | None, chunks: int) -> int:
        """Send up to `chunks` messages; the bytes sent."""
        self.wanted = False
        self._stalled = True
        moved = 0
        queue = self.queue
        while queue.flying < self._window and not self.rnr_wait:
            if not chunks:
                self.wanted = True
                break
            chunks -= 1
            if carrier is not None and (posted := self._send_more(carrier)):
                moved += posted.length_bytes
                chunks -= min(chunks, posted.length_bytes // self._chunk)
                continue
            wqe = queue.current or self._next()
            if wqe is None:
                break
            # One that is answered already had nothing to send, but took its time.
            sent = 0 if wqe.answered else self._emit_some(carrier, wqe, chunks + 1)
            chunks -= min(chunks, max(0, sent - 1) // self._chunk)
            if sent < 0:
                self.wanted = True
                break
            moved += sent
            if wqe.kind in _OPCODE and len(wqe.wr.sges) == 1:
                self.hint.set(wqe.kind, wqe.wr.sges[0].lkey, wqe.wr.sges[0].addr)
        return moved

    def _next(self) -> Wqe | None:
        queue = self.queue
        wqe = queue.next_resend(self.acked + 1) if queue.resend else None
        if wqe is None and self.ctx.state == RTS and not self.failing:
            wr = self._pull()
            if wr is not None:
                return self._admit(wr)
        return wqe

    def _pull(self) -> SendWr | None:
        # Stops a QP from holding more requests than its ring has slots.
        queue = self.queue
        if queue.taken >= self.ctx.init.max_send_wr or self._another_read():
            return None
        wr = queue.held or self._owner.pop_send()
        if wr is None:
            # The next doorbell goes on, no response need.
            self._stalled = False
            return None
        queue.held = None
        if (self.reads or wr.opcode == OP_LOCAL_INV) and self._must_wait(wr):
            queue.held = wr
            return None
        return wr

    def _another_read(self) -> bool:
        # Whether the next is a READ for which there is no room yet: in the ring it may go by the short cut later.
        if not self.reads >= self.ctx.max_rd_atomic > 0 or self.hint.kind != READ_REQUEST:
            return False
        entries = None if self.queue.held else self._owner.peek_sends()
        return entries is not None and entries.slots[_OPCODE_AT] == OP_READ

    def _must_wait(self, wr: SendWr) -> bool:
        opcode = wr.opcode
        if self.reads:
            if wr.send_flags & FENCE:
                return True
            if OP_READ <= opcode <= OP_FETCH_ADD:
                return self.reads >= self.ctx.max_rd_atomic > 0
        # Earlier requests may be repeated from memory under the key, so it lives until they end.
        return opcode == OP_LOCAL_INV and not self.queue.idle

    def _admit(self, wr: SendWr) -> Wqe:
        wqe = admit(self.ctx, wr, self.psn)
        queue = self.queue
        if not wqe.answered:
            self.psn = wqe.last + 1
            if wqe.kind >= READ_REQUEST:
                self.reads += 1
            queue.current = wqe
        else:
            self.failing = bool(wqe.status)
            queue.unacked.append(wqe)
            self._retire()
        return wqe

    def _emit_some(self, carrier: Carrier | None, wqe: Wqe, chunks: int) -> int:
        # Up to so many messages; the bytes sent, or -1 when the carrier has no room.
        left = wqe.total - (wqe.next - wqe.first) * self._chunk
        if (
            carrier is not None
            and wqe.kind == wire.WRITE
            and left > self._chunk
            and len(wqe.wr.sges) == 1
            and not wqe.flags & wire.WITH_IMM
        ):
            posted = self._emit_chunks(carrier, wqe, chunks)
            if posted is not None:
                next_psn = wqe.next + posted.messages
                self._emitted(wqe, next_psn, posted.length_bytes, posted.messages)
                return posted.length_bytes
        return self._emit(carrier, wqe)

    def _emit_chunks(self, carrier: Carrier, wqe: Wqe, chunks: int) -> Posted | None:
        ctx = self.ctx
        address, _, lkey = wqe.wr.sges[0]
        try:
            piece = ctx.env.keys.piece_untrusted(ctx.pd, lkey, address, 0)
        except GuestError:
            return None
        return carrier.send_many(
            Chunks(
                wqe.flags, ctx.dest_qpn, ctx.qpn, wqe.next, piece, address, wqe.total,
                (wqe.next - wqe.first) * self._chunk, self._chunk, chunks,
                self._window - self.queue.flying, wqe.rkey, wqe.remote_addr, self._ack_every,
            )
        )  # fmt: skip

    def _emit(self, carrier: Carrier | None, wqe: Wqe) -> int:
        # Bytes sent, or -1 when the carrier has no room.
        ctx, psn, kind, total = self.ctx, wqe.next, wqe.kind, wqe.total
        flags = wire.FIRST | wire.LAST
        views: list[memoryview] = []
        length = compare_add = swap = offset = code = 0
        if kind <= wire.WRITE:
            offset = (psn - wqe.first) * self._chunk
            length = total - offset
            if length > self._chunk or offset:
                length, flags = self._cut(psn, offset, length)
            flags |= wqe.flags
            try:
                views = resolve_sges_untrusted(ctx.env.keys, ctx.pd, wqe.wr.sges, offset, length, 0)
            except GuestError:
                self._abort(wqe)
                return 0
        elif kind == READ_REQUEST:
            offset = wqe.received
        else:
            code, compare_add, swap = atomic_operands(wqe.wr)
        if carrier is None:
            ctx.env.counters.no_route += 1
        else:
            header = wire.pack_rc(
                kind, flags, code, wire.VERSION, ctx.dest_qpn, ctx.qpn, psn & PSN_MASK, length,
                wqe.rkey, wqe.remote_addr, total, wqe.wr.imm, compare_add, swap, offset,
            )  # fmt: skip
            if not carrier.send(header, views):
                ctx.blocked_on = carrier
                return -1
        self._emitted(wqe, psn + 1, length)
        return length

    def _send_more(self, carrier: Carrier) -> Posted | None:
        # What is like the last request, by the short cut.
        queue, ctx, hint = self.queue, self.ctx, self.hint
        if queue.current or queue.resend or queue.held or self.failing or ctx.state != RTS:
            return None
        room = ctx.init.max_send_wr - queue.taken
        reads = hint.kind == READ_REQUEST
        if reads:
            room = min(room, ctx.max_rd_atomic - self.reads)
        elif self.reads:
            return None
        if room <= 0 or not hint.tempts():
            return None
        entries = self._owner.peek_sends()
        if entries is None:
            return None
        try:
            piece = ctx.env.keys.piece_untrusted(
                ctx.pd, hint.key, hint.address, LOCAL_WRITE if reads else 0
            )
        except GuestError:
            hint.forget()
            return None
        posted = carrier.send_many(
            Requests(
                entries, _OPCODE[hint.kind], hint.key, piece, room,
                max(0, self._window - queue.flying), self._chunk, ctx.dest_qpn, ctx.qpn,
                self.psn & PSN_MASK,
            )
        )  # fmt: skip
        hint.tried(posted.messages if posted else 0)
        if posted is not None:
            self._posted(posted, entries)
        return posted

    def _posted(self, posted: Posted, entries: SendEntries) -> None:
        kind, key = self.hint.kind, self.hint.key
        self.ctx.env.hot = self.ctx.qpn
        many = SentMany(posted, self.psn, kind, key, signal_all=entries.signal_all)
        self._owner.took_sends(len(many))
        if kind == READ_REQUEST:
            self.reads += len(many)
        self.queue.add_many(many)
        self.psn += posted.messages
        self.sent = max(self.sent, self.psn)
        counters = self.ctx.env.counters
        counters.tx_messages += posted.messages
        counters.tx_bytes += posted.length_bytes
        self._arm_timer()

    def _cut(self, psn: int, offset: int, length: int) -> tuple[int, int]:
        flags = 0 if offset else wire.FIRST
        if length <= self._chunk:
            return length, flags | wire.LAST
        if psn % self._ack_every == 0:
            flags |= wire.ACK_REQUEST
        return self._chunk, flags

    def _emitted(self, wqe: Wqe, next_psn: int, length: int, messages: int = 1) -> None:
        counters, queue = self.ctx.env.counters, self.queue
        counters.tx_messages += messages
        counters.tx_bytes += length
        wqe.flying += length
        queue.flying += length
        wqe.next = next_psn
        self.sent = max(self.sent, next_psn)
        if next_psn > wqe.last:
            queue.unacked.append(wqe)
            queue.current = None
        self._arm_timer()

    def _abort(self, wqe: Wqe) -> None:
        # Its data cannot be read (any more): it fails once it is the oldest.
        wqe.status, wqe.answered = LOC_PROT_ERR, True
        self.failing = True
        self.queue.current = None
        self.queue.unacked.append(wqe)
        self._retire()

    def _arm_timer(self) -> None:
        ctx = self.ctx
        if ctx.timeout_ns:
            deadline_ns = ctx.env.now_ns + ctx.timeout_ns
            if self.queued_ns is not None and self.queued_ns <= deadline_ns:
                self.deadline_ns = deadline_ns  # the usual case of `Timers.set`
            else:
                ctx.env.timers.set(self, deadline_ns)

    def _go_on(self) -> None:
        self.wanted = True
        self.ctx.schedule()

    def expired(self) -> None:
        """A timer ran out; the other half's business."""
        raise NotImplementedError

    # -- completing -------------------------------------------------------------------------

    def _retire(self) -> Wqe | None:
        # Complete what is done; the oldest request that is not, if there is one.
        queue = self.queue
        while True:
            many = queue.many_at_head()
            if many is not None:
                if many.first_last > self.acked:
                    return None  # none of them is
                if many.kind == wire.WRITE:
                    self._complete_many(many)
                    continue
                # Of READs only their data is an answer: go on with each of them.
            wqe = queue.head()
            if wqe is None:
                return None
            if not wqe.answered and (wqe.kind >= READ_REQUEST or wqe.last > self.acked):
                return wqe
            if wqe.status:
                self._fail_head(wqe.status)
                return None
            queue.drop_head()
            wr = wqe.wr
            if wr.signaled:
                self._owner.complete_send(Completion(wr.wr_id, 0, WC_OF_WR[wr.opcode], wqe.total))

    def _complete_many(self, many: SentMany) -> None:
        opcode = WC_OF_WR[_OPCODE[many.kind]]
        done = self.queue.take_many(many, self.acked)
        if done:
            self._owner.complete_sends([(wr_id, opcode, length) for wr_id, length in done])

    def _fail_head(self, status: int) -> None:
        wqe = self.queue.head()
        if wqe is None:
            return
        self.queue.drop_head()
        self._complete_failed(wqe.wr, status)
        self.ctx.fail(ERR, None)

    def _complete_failed(self, wr: SendWr, status: int) -> None:
        self._owner.complete_send(Completion(wr.wr_id, status, WC_OF_WR.get(wr.opcode, 0)))

    def flush(self, limit: int) -> int:
        """Complete up to `limit` requests as flushed, taken ones first; how many it were."""
        self.deadline_ns = None
        count = 0
        while count < limit and self.ctx.state == ERR:
            wr = self.queue.pop_any() or self._owner.pop_send()
            if wr is None:
                break
            count += 1
            self._complete_failed(wr, WR_FLUSH_ERR)
        return count

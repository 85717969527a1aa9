"""The send side of an RC queue pair: requests out, responses in, completions in order.

Contract: work is pulled from the owner only as far as the window allows. A request's data is
gathered from guest memory each time a chunk is sent, so nothing is copied or kept, and a repeat
carries what stands there then. Completions leave strictly from the head. The first failure ends
the queue: its completion, then ERR, then the QP flushes the rest.

PSNs are unbounded ints here, cut to 24 bits on the wire. `acked` never passes a READ or atomic
that is not answered: what was acknowledged behind it is sent again, as the responder expects.

Source: InfiniBand Architecture Specification vol. 1, 9.7.5 to 9.7.7, 9.9.2, 10.8.3.
"""

from collections.abc import Sequence

from pvrdma_server.backend import Completion, SendWr
from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.admission import admit, atomic_operands
from pvrdma_server.backend_soft.carrier import Carrier
from pvrdma_server.backend_soft.codes import (
    BAD_RESP_ERR,
    ERR,
    FENCE,
    LOC_PROT_ERR,
    LOCAL_WRITE,
    OP_FETCH_ADD,
    OP_LOCAL_INV,
    OP_READ,
    REM_ACCESS_ERR,
    REM_INV_REQ_ERR,
    REM_OP_ERR,
    RETRY_EXC_ERR,
    RNR_RETRY_EXC_ERR,
    RTS,
    SQD,
    WC_OF_WR,
    WR_FLUSH_ERR,
)
from pvrdma_server.backend_soft.context import QpContext
from pvrdma_server.backend_soft.scatter import copy_views, resolve_sges_untrusted
from pvrdma_server.backend_soft.wire import PSN_HALF, PSN_MASK, READ_REQUEST, RcMessage
from pvrdma_server.backend_soft.wqe import SendQueue, Wqe
from pvrdma_server.errors import GuestError

_NAK_STATUS = {
    wire.NAK_INVALID_REQUEST: REM_INV_REQ_ERR,
    wire.NAK_REMOTE_ACCESS: REM_ACCESS_ERR,
    wire.NAK_REMOTE_OPERATIONAL: REM_OP_ERR,
}
_RNR_INFINITE = 7
# Source: InfiniBand Architecture Specification vol. 1, table 46 (RNR NAK timer), in 0.01 ms.
_RNR_DELAY = (
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
    256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
)  # fmt: skip
RNR_DELAY_NS = tuple(units * 10_000 for units in _RNR_DELAY)


class Requester:
    """Send side of one RC queue pair. `more`: it could go on at once, had the turn not ended."""

    __slots__ = (
        "_ack_every", "_chunk", "_owner", "_stalled", "_window", "acked", "ctx", "deadline_ns", "failing",
        "more", "psn", "queue", "queued_ns", "reads", "recovering", "retries_left", "rnr_left",
        "rnr_wait", "sent",
    )  # fmt: skip

    def __init__(self, ctx: QpContext) -> None:
        config = ctx.env.config
        self.ctx = ctx
        self.queue = SendQueue()
        self._owner = ctx.owner
        self._chunk, self._window = config.chunk_bytes, config.window_bytes
        self._ack_every = max(1, config.window_bytes // config.chunk_bytes // 4)
        self.queued_ns: int | None = None
        self.reset(0)

    def reset(self, psn: int) -> None:
        """Start anew with this PSN; everything taken is forgotten without completion."""
        self.queue.clear()
        self.psn = self.sent = psn
        self.acked = psn - 1
        self.reads = 0
        self.failing = self.recovering = self.rnr_wait = self.more = self._stalled = False
        self.retries_left, self.rnr_left = self.ctx.retry_cnt, self.ctx.rnr_retry
        self.deadline_ns: int | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return self.queue.idle

    # -- sending ----------------------------------------------------------------------------

    def run(self, carrier: Carrier | None, chunks: int) -> int:
        """Send up to `chunks` messages; the bytes sent."""
        self.more = False
        self._stalled = True
        moved = 0
        queue = self.queue
        while queue.flying < self._window and not self.rnr_wait:
            wqe = queue.current
            if wqe is None and (wqe := self._next()) is None:
                break
            if not chunks:
                self.more = True
                break
            sent = self._emit(carrier, wqe)
            if sent < 0:
                break
            moved += sent
            chunks -= 1
        return moved

    def _next(self) -> Wqe | None:
        queue = self.queue
        wqe = queue.next_resend(self.acked + 1) if queue.resend else None
        while wqe is None and self.ctx.state == RTS and not self.failing:
            wr = self._pull()
            if wr is None:
                break
            wqe = self._admit(wr)
        return wqe

    def _pull(self) -> SendWr | None:
        # Stops a QP from holding more requests than its ring has slots.
        queue = self.queue
        if len(queue.unacked) >= self.ctx.init.max_send_wr:
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

    def _must_wait(self, wr: SendWr) -> bool:
        opcode = wr.opcode
        if self.reads:
            if wr.send_flags & FENCE:
                return True
            if OP_READ <= opcode <= OP_FETCH_ADD:
                return self.reads >= self.ctx.max_rd_atomic > 0
        # Earlier requests may be repeated from memory under the key, so it lives until they end.
        return opcode == OP_LOCAL_INV and not self.queue.idle

    def _admit(self, wr: SendWr) -> Wqe | None:
        # The request if it has something to send.
        wqe = admit(self.ctx, wr, self.psn)
        queue = self.queue
        if not wqe.answered:
            self.psn = wqe.last + 1
            if wqe.kind >= READ_REQUEST:
                self.reads += 1
            queue.current = wqe
            return wqe
        self.failing = bool(wqe.status)
        queue.unacked.append(wqe)
        self._retire()
        return None

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

    def _cut(self, psn: int, offset: int, length: int) -> tuple[int, int]:
        flags = 0 if offset else wire.FIRST
        if length <= self._chunk:
            return length, flags | wire.LAST
        if psn % self._ack_every == 0:
            flags |= wire.ACK_REQUEST
        return self._chunk, flags

    def _emitted(self, wqe: Wqe, next_psn: int, length: int) -> None:
        counters, queue = self.ctx.env.counters, self.queue
        counters.tx_messages += 1
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
            ctx.env.timers.set(self, ctx.env.now_ns + ctx.timeout_ns)

    # -- responses --------------------------------------------------------------------------

    def response(self, message: RcMessage, payload: Sequence[memoryview]) -> None:
        """An ACK, a NAK, READ data or an atomic's result from our peer."""
        unacked_psn = self.acked + 1
        distance = (message.psn - unacked_psn) & PSN_MASK
        psn = unacked_psn + distance
        if distance >= PSN_HALF or psn >= self.sent:
            self.ctx.env.counters.stale_response += 1
        elif message.kind == wire.ACK:
            if self._advance(psn):
                self._progressed()
        elif distance and not self._advance(psn - 1):
            pass
        elif message.kind == wire.NAK:
            if distance:
                self._progressed()
            self._refused(message.code, psn)
        else:
            self._answered(message, payload, psn)

    def _advance(self, psn: int) -> bool:
        # Everything up to `psn` has arrived. False when that brought a failure to the head.
        head = self.queue.head()
        if head is not None and psn < head.last and head.flying:
            count = psn - max(self.acked, head.first - 1)
            self.queue.acknowledge_part(count, self._chunk)
        self.acked = psn
        head = self._retire()
        if head is not None and head.kind >= READ_REQUEST and head.first <= psn:
            # What follows a READ or atomic arrived, but its own response did not: repeat it.
            self.acked = head.first - 1
            self._go_back_once(head.first)
        return self.ctx.state in (RTS, SQD)

    def _progressed(self) -> None:
        ctx = self.ctx
        self.retries_left, self.rnr_left = ctx.retry_cnt, ctx.rnr_retry
        self.recovering = self.rnr_wait = False
        if self.queue.head() is None:
            self.deadline_ns = None
        else:
            self._arm_timer()
        if self._stalled or ctx.state != RTS:
            ctx.schedule()

    def _answered(self, message: RcMessage, payload: Sequence[memoryview], psn: int) -> None:
        wqe = self.queue.head()
        wanted = READ_REQUEST if message.kind == wire.READ_RESPONSE else wire.ATOMIC_REQUEST
        if wqe is None or wqe.first != psn or wqe.kind != wanted or wqe.answered:
            self.ctx.env.counters.stale_response += 1
        elif message.offset == wqe.received:
            self._take_response(wqe, message, payload)
        else:
            self.ctx.env.counters.out_of_sequence += 1
            if message.offset > wqe.received:
                self._go_back_once(psn)

    def _take_response(self, wqe: Wqe, message: RcMessage, payload: Sequence[memoryview]) -> None:
        length = message.length
        if message.kind == wire.ATOMIC_RESPONSE:
            length = 8
            payload = [memoryview(message.operand_a.to_bytes(8, "little"))]
        end = wqe.received + length
        if end > wqe.total or bool(message.flags & wire.LAST) != (end == wqe.total):
            self._fail_head(BAD_RESP_ERR)
            return
        try:
            target = resolve_sges_untrusted(
                self.ctx.env.keys, self.ctx.pd, wqe.wr.sges, wqe.received, length, LOCAL_WRITE
            )
        except GuestError:
            self._fail_head(LOC_PROT_ERR)
            return
        copy_views(target, payload)
        wqe.received = end
        if end == wqe.total:
            wqe.answered = True
            self.reads -= 1
            self.acked = wqe.first
            self._retire()
        self._progressed()

    def _refused(self, code: int, psn: int) -> None:
        counters = self.ctx.env.counters
        head = self.queue.head()
        if head is None or head.answered or not head.first <= psn <= head.last:
            counters.stale_response += 1
        elif code & wire.NAK_RNR:
            counters.rnr_naks += 1
            self._receiver_not_ready(code & wire.RNR_TIMER_MASK, psn)
        elif code == wire.NAK_PSN_SEQUENCE:
            counters.naks += 1
            self._retry(psn)
        else:
            counters.naks += 1
            self._fail_head(_NAK_STATUS.get(code, REM_OP_ERR))

    # -- repeating --------------------------------------------------------------------------

    def _receiver_not_ready(self, timer: int, psn: int) -> None:
        if self.rnr_wait:
            return
        if self.rnr_left == 0:
            self._fail_head(RNR_RETRY_EXC_ERR)
            return
        if self.rnr_left != _RNR_INFINITE:
            self.rnr_left -= 1
        self.rnr_wait = True
        self._go_back(psn)
        self.ctx.env.timers.set(self, self.ctx.env.now_ns + RNR_DELAY_NS[timer])

    def expired(self) -> None:
        """The retry timer, or the RNR timer, ran out."""
        if self.ctx.state not in (RTS, SQD) or self.queue.idle:
            return
        if self.rnr_wait:
            self.rnr_wait = False
            self.ctx.schedule()
        else:
            self._retry(self.acked + 1)

    def _retry(self, psn: int) -> None:
        if not self.retries_left:
            self._fail_head(RETRY_EXC_ERR)
            return
        self.retries_left -= 1
        self._go_back(psn)
        self._arm_timer()

    def _go_back_once(self, psn: int) -> None:
        # One loss shows in many responses; only the first of them repeats anything.
        if not self.recovering:
            self._go_back(psn)

    def _go_back(self, psn: int) -> None:
        self.recovering = True
        self.ctx.env.counters.retries += 1
        self.queue.go_back(psn)
        self.ctx.schedule()

    # -- completing -------------------------------------------------------------------------

    def _retire(self) -> Wqe | None:
        # Complete what is done; the oldest request that is not, if there is one.
        queue = self.queue
        while (wqe := queue.head()) is not None:
            if not wqe.answered and (wqe.kind >= READ_REQUEST or wqe.last > self.acked):
                return wqe
            if wqe.status:
                self._fail_head(wqe.status)
                break
            queue.drop_head()
            wr = wqe.wr
            if wr.signaled:
                self._owner.complete_send(Completion(wr.wr_id, 0, WC_OF_WR[wr.opcode], wqe.total))
        return None

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
        while count < limit:
            wr = self.queue.pop_any() or self._owner.pop_send()
            if wr is None:
                break
            count += 1
            self._complete_failed(wr, WR_FLUSH_ERR)
        return count

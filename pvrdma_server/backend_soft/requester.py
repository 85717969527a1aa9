"""The send side of an RC queue pair: what its peer answers, and when it repeats itself.

Contract: `sending` takes, sends and completes requests; here responses and timers decide what has
arrived and what is sent again (go back to the first that has not). `acked` never passes a READ or
atomic that is not answered: what was acknowledged behind it is sent again, as the responder
expects.

Source: InfiniBand Architecture Specification vol. 1, 9.7.5 to 9.7.7, 9.9.2.
"""

from collections.abc import Sequence

from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.aeth import NAK_STATUS, RNR_DELAY_NS, RNR_INFINITE
from pvrdma_server.backend_soft.codes import (
    BAD_RESP_ERR,
    LOC_PROT_ERR,
    LOCAL_WRITE,
    REM_OP_ERR,
    RETRY_EXC_ERR,
    RNR_RETRY_EXC_ERR,
    RTS,
    SQD,
)
from pvrdma_server.backend_soft.fast_path import SENT, Landed, Run
from pvrdma_server.backend_soft.lane import MAX_RECORDS, Drove, Sends
from pvrdma_server.backend_soft.scatter import copy_views, resolve_sges_untrusted
from pvrdma_server.backend_soft.sending import Sending
from pvrdma_server.backend_soft.wire import PSN_HALF, PSN_MASK, READ_REQUEST, RcMessage
from pvrdma_server.backend_soft.wqe import SentMany, Wqe
from pvrdma_server.errors import GuestError


class Requester(Sending):
    """Send side of one RC queue pair."""

    __slots__ = ()

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
        before, self.acked = self.acked, psn
        head = self._retire()
        if head is not None and head.first <= psn:
            if head.kind < READ_REQUEST:
                # In the middle of a message; all that was sent of it, maybe.
                self.queue.acknowledge_part(before, psn, self._chunk)
            else:
                # What follows a READ or atomic arrived, but its own response did not: repeat it.
                self.acked = head.first - 1
                self._go_back_once(head.first)
        return self.ctx.state in (RTS, SQD)

    def _progressed(self) -> None:
        ctx = self.ctx
        self.retries_left, self.rnr_left = ctx.retry_cnt, ctx.rnr_retry
        self.recovering = self.rnr_wait = False
        queue = self.queue
        if queue.unacked or queue.current is not None or queue.resend:
            self._arm_timer()
        else:
            self.deadline_ns = None
        if self._stalled or ctx.state != RTS:
            self._go_on()

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
        self._received(wqe, end)

    def _received(self, wqe: Wqe, end: int) -> None:
        # So much of the answer to the oldest request is there, hence all that precedes it has arrived.
        wqe.received = end
        if end == wqe.total:
            wqe.answered = True
            self.reads -= 1
            self.acked = wqe.first
            self._retire()
        elif self.acked < wqe.first - 1:
            self._advance(wqe.first - 1)
        self._progressed()

    def offer(self) -> Run | None:
        """What could come next by the short cut of `fast_path`: the data of the oldest request, if it is a READ."""
        ctx, wqe, many = self.ctx, self.queue.first, self.queue.many_at_head()
        if many is not None:
            if many.kind != READ_REQUEST:
                return None
            records, lkey, first, received = many.records, many.lkey, many.first, many.received
            # Half of what may be under way: more is asked for before the other half lands.
            records = records[: SENT.size * max(1, ctx.max_rd_atomic // 2)]
            address: int = SENT.unpack_from(records)[2]
        elif wqe is None or wqe.kind != READ_REQUEST or wqe.answered or len(wqe.wr.sges) != 1:
            return None
        else:
            address, _, lkey = wqe.wr.sges[0]
            records, first = SENT.pack(0, 0, address, wqe.total, 0, 0, 1), wqe.first
            received = wqe.received
        try:
            piece = ctx.env.keys.piece_untrusted(ctx.pd, lkey, address, LOCAL_WRITE)
        except GuestError:
            return None
        return Run(
            wire.READ_RESPONSE, ctx.qpn, ctx.dest_qpn, first & PSN_MASK, 0, piece, done=received,
            reads=records,
        )  # fmt: skip

    def landed(self, landed: Landed) -> None:
        """What came of it."""
        wqe, many = self.queue.first, self.queue.many_at_head()
        if not landed.messages:
            return
        if many is None:
            assert wqe is not None
            self._received(wqe, wqe.total if landed.completed else landed.done)
            return
        many.received = landed.done
        if landed.completed:
            self.acked = many.first + landed.completed - 1
            self.reads -= landed.completed
            self._complete_many(many)
            self._retire()
        self._progressed()

    # -- lanes ------------------------------------------------------------------------------

    def lane(self) -> Sends | None:
        """What would be sent next in a `lane`: WRITEs like the last one, if nothing else is under way."""
        ctx, queue, hint = self.ctx, self.queue, self.hint
        if (
            hint.kind != wire.WRITE
            or not hint.key
            or self.failing
            or self.recovering
            or self.rnr_wait
        ):
            return None
        if queue.current or queue.resend or queue.held or queue.taken > MAX_RECORDS:
            return None
        records = []
        for many in queue.unacked:
            if type(many) is not SentMany or many.kind != wire.WRITE or many.lkey != hint.key:
                return None
            records.append(many.records)
        owner = self._owner.send_lane()
        if owner is None:
            return None
        try:
            piece = ctx.env.keys.piece_untrusted(ctx.pd, hint.key, hint.address, 0)
        except GuestError:
            return None
        first = queue.unacked[0].first if queue.unacked else self.psn
        return Sends(
            owner, hint.key, piece, b"".join(records), first & PSN_MASK, self.psn & PSN_MASK, self.acked & PSN_MASK,
            ctx.init.max_send_wr, queue.flying, self._window,
        )  # fmt: skip

    def drove(self, sends: Sends, drove: Drove) -> None:
        """What came of it."""
        if drove.taken or drove.completions:
            self._owner.drove(drove.taken, drove.completions)
        self.psn += drove.posted
        self.sent = max(self.sent, self.psn)
        if drove.taken or drove.acks:
            first = self.psn - ((self.psn - drove.first) & PSN_MASK)
            self.queue.become(
                drove.records,
                first,
                self.psn,
                sends.lkey,
                signal_all=sends.owner.entries.signal_all,
            )
        if drove.acks:
            self.acked += (drove.acked - self.acked) & PSN_MASK
            if self._retire() is None and self.ctx.state in (RTS, SQD):
                self._progressed()
        elif drove.taken:
            self._arm_timer()
        if drove.unusual:
            self._go_on()

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
            self._fail_head(NAK_STATUS.get(code, REM_OP_ERR))

    # -- repeating --------------------------------------------------------------------------

    def _receiver_not_ready(self, timer: int, psn: int) -> None:
        if self.rnr_wait:
            return
        if self.rnr_left == 0:
            self._fail_head(RNR_RETRY_EXC_ERR)
            return
        if self.rnr_left != RNR_INFINITE:
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
            self._go_on()
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
        self._go_on()

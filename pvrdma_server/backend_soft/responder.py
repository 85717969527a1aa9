"""The receive side of an RC queue pair: requests in, responses out, receives completed.

Contract: requests are executed in PSN order, each once; a repeated READ is executed again, a
repeated atomic answered from a store, a repeated SEND or WRITE acknowledged. Nothing waits here:
a message without a receive is answered with an RNR NAK and dropped until it comes again.

Responses are queued in PSN order and leave in the QP's turns (`responses`).

A fault answers with its NAK, completes the receive it hit (or raises the event), and ends the QP.
Source: InfiniBand Architecture Specification vol. 1, 9.7.4, 9.7.5.1, 9.9.3 (table 57 ff.).
"""

from collections import deque
from collections.abc import Callable, Sequence

from pvrdma_server.backend import Completion, RecvWr
from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.codes import (
    ERR,
    EVENT_ACCESS_ERR,
    EVENT_REQ_ERR,
    LOC_LEN_ERR,
    LOC_PROT_ERR,
    LOCAL_WRITE,
    REM_INV_REQ_ERR,
    REMOTE_ATOMIC,
    REMOTE_READ,
    REMOTE_WRITE,
    WC_RECV,
    WC_RECV_IMM,
    WC_WITH_IMM,
    WC_WITH_INV,
    WR_FLUSH_ERR,
)
from pvrdma_server.backend_soft.context import QpContext
from pvrdma_server.backend_soft.fast_path import MAX_MESSAGES, Hint, Landed, Run
from pvrdma_server.backend_soft.lane import Drove
from pvrdma_server.backend_soft.responses import ResponseQueue
from pvrdma_server.backend_soft.scatter import (
    copy_views,
    resolve_sges_untrusted,
    sges_length,
)
from pvrdma_server.backend_soft.wire import (
    FIRST,
    LAST,
    PSN_HALF,
    PSN_MASK,
    RcMessage,
)
from pvrdma_server.errors import GuestError

_U64 = (1 << 64) - 1


class _Fault(Exception):
    """A request that is answered with a NAK and ends the QP.

    `event` is what the owner hears when no receive carries the news, `status` that receive's.
    """

    def __init__(self, nak: int, event: int, status: int = REM_INV_REQ_ERR) -> None:
        super().__init__()
        self.nak, self.event, self.status = nak, event, status


class _NotReady(Exception):
    """No receive is posted."""


def _invalid() -> _Fault:
    return _Fault(wire.NAK_INVALID_REQUEST, EVENT_REQ_ERR)


def _no_access() -> _Fault:
    return _Fault(wire.NAK_REMOTE_ACCESS, EVENT_ACCESS_ERR)


class Responder:
    """Receive side of one RC queue pair."""

    __slots__ = (
        "_address", "_atomics", "_done", "_kind", "_nak_sent", "_owner", "_rkey", "_total", "_wr",
        "ctx", "hint", "psn", "responses",
    )  # fmt: skip

    def __init__(self, ctx: QpContext) -> None:
        self.ctx = ctx
        self._owner = ctx.owner
        self.responses = ResponseQueue(ctx)
        self._atomics: deque[tuple[int, int]] = deque()
        self._wr: RecvWr | None = None
        self.hint = Hint()
        self.reset(0)

    def reset(self, psn: int) -> None:
        """Start anew, expecting this PSN; a receive in use is forgotten without completion."""
        self.psn = psn
        self.responses.clear()
        self._atomics.clear()
        self._wr = None
        self._kind = self._address = self._rkey = self._total = self._done = 0
        self._nak_sent = False
        self.hint.forget()

    # -- requests ---------------------------------------------------------------------------

    def request(self, message: RcMessage, payload: Sequence[memoryview]) -> None:
        """A request from our peer."""
        distance = (message.psn - self.psn) & PSN_MASK
        if distance:
            self._out_of_order(message, distance)
            return
        self._nak_sent = False
        try:
            _HANDLERS[message.kind](self, message, payload)
        except _NotReady:
            self._nak(wire.NAK_RNR | self.ctx.min_rnr_timer)
        except _Fault as fault:
            self._fail(fault)

    def _out_of_order(self, message: RcMessage, distance: int) -> None:
        counters = self.ctx.env.counters
        if distance < PSN_HALF:
            counters.out_of_sequence += 1
            if not self._nak_sent:
                self._nak(wire.NAK_PSN_SEQUENCE)
            return
        counters.duplicate += 1
        psn = self.psn - (PSN_MASK + 1 - distance)
        try:
            self._repeat(message, psn)
        except _Fault as fault:
            self._fail(fault)

    def _repeat(self, message: RcMessage, psn: int) -> None:
        if message.kind <= wire.WRITE:
            self.responses.acknowledge(psn)
            return
        # The requester went back to here, so it will ask for all that followed again, too.
        self.responses.forget_from(psn)
        if message.kind == wire.READ_REQUEST:
            if self.responses.jobs < self.ctx.max_dest_rd_atomic:
                self._queue_read(message, psn)
        else:
            for done, found in self._atomics:
                if done == psn:
                    self.responses.atomic(psn, found)
        self.responses.repeats(psn)

    def _send(self, message: RcMessage, payload: Sequence[memoryview]) -> None:
        if message.flags & FIRST:
            if self._kind:
                raise _invalid()
            self._begin_send(message)
        elif self._kind != wire.SEND:
            raise _invalid()
        wr = self._wr
        assert wr is not None
        end = self._bounded_end(message)
        if message.length:
            try:
                target = resolve_sges_untrusted(
                    self.ctx.env.keys, self.ctx.rq.pd, wr.sges, self._done, message.length,
                    LOCAL_WRITE,
                )  # fmt: skip
            except GuestError:
                raise _Fault(wire.NAK_REMOTE_OPERATIONAL, EVENT_REQ_ERR, LOC_PROT_ERR) from None
            copy_views(target, payload)
        self._done = end
        if not message.flags & LAST:
            self._accepted(message)
            return
        flags, imm = (
            self._invalidate(message) if message.flags & wire.WITH_INV else (0, wire.NO_IMM)
        )
        self._accepted(message)
        if message.flags & wire.WITH_IMM:
            flags, imm = WC_WITH_IMM, message.imm
        self._received(message, WC_RECV, flags, imm)

    def _begin_send(self, message: RcMessage) -> None:
        wr = self._take()
        self._wr = wr
        if wr.refused:
            raise _Fault(wire.NAK_REMOTE_OPERATIONAL, EVENT_REQ_ERR, wr.refused)
        if message.total > sges_length(wr.sges):
            raise _Fault(wire.NAK_INVALID_REQUEST, EVENT_REQ_ERR, LOC_LEN_ERR)
        self._kind, self._total, self._done = wire.SEND, message.total, 0

    def _write(self, message: RcMessage, payload: Sequence[memoryview]) -> None:
        ctx = self.ctx
        if message.flags & FIRST:
            if self._kind or not ctx.access & REMOTE_WRITE:
                raise _invalid()
            self._address, self._rkey = message.remote_addr, message.rkey
            self._total, self._done = message.total, 0
        elif self._kind != wire.WRITE:
            raise _invalid()
        end = self._bounded_end(message)
        keys = ctx.env.keys
        try:
            if message.flags & (FIRST | LAST) == FIRST:
                # All of it, before the first byte lands.
                keys.check_untrusted(ctx.pd, self._rkey, self._address, self._total, REMOTE_WRITE)
            target = keys.resolve_untrusted(
                ctx.pd, self._rkey, self._address + self._done, message.length, REMOTE_WRITE
            )
        except GuestError:
            raise _no_access() from None
        if message.flags & (LAST | wire.WITH_IMM) == LAST | wire.WITH_IMM:
            self._take_for_imm()
        copy_views(target, payload)
        self._kind, self._done = wire.WRITE, end
        self.hint.set(wire.WRITE, self._rkey, self._address)
        self._accepted(message)
        if self._wr is not None:
            self._received(message, WC_RECV_IMM, WC_WITH_IMM, message.imm)

    def offer(self, kind: int) -> Run | None:
        """What could come next: requests like the last one, for memory in a row with it."""
        return self.run(kind) if self.hint.tempts() else None

    def run(self, kind: int = wire.WRITE) -> Run | None:
        """The same, whether or not it is worth a try."""
        ctx, hint = self.ctx, self.hint
        access = REMOTE_WRITE if kind == wire.WRITE else REMOTE_READ
        if hint.kind != kind or self._kind not in (0, kind) or not ctx.access & access:
            return None
        limit = MAX_MESSAGES
        if kind == wire.READ_REQUEST:
            limit = min(limit, ctx.max_dest_rd_atomic - self.responses.jobs)
        if limit <= 0:
            return None
        try:
            piece = ctx.env.keys.piece_untrusted(ctx.pd, hint.key, hint.address, access)
        except GuestError:
            hint.forget()
            return None
        under_way = (self._address, self._total, self._done) if self._kind else (0, 0, 0)
        psn = self.psn & PSN_MASK
        return Run(kind, ctx.qpn, ctx.dest_qpn, psn, hint.key, piece, *under_way, limit=limit)

    def landed(self, kind: int, landed: Landed) -> None:
        """What came of it."""
        self.hint.tried(landed.messages)
        if not landed.messages:
            return
        self.ctx.env.hot = self.ctx.qpn
        if kind == wire.READ_REQUEST:
            self._nak_sent = False
            self.responses.read_many(self.psn, landed.asked, self.hint.key)
            self.psn += landed.messages
            return
        self._wrote(landed, landed.messages)
        if landed.unanswered < landed.messages:
            self.responses.acknowledge(self.psn - 1 - landed.unanswered)

    def _wrote(self, what: Landed | Drove, messages: int) -> None:
        self._nak_sent = False
        self._kind = wire.WRITE if what.total else 0
        self._address, self._total, self._done = what.address, what.total, what.done
        self._rkey = self.hint.key
        self.psn += messages

    def drove(self, drove: Drove) -> None:
        """So much landed in a lane, and was acknowledged but for `unanswered`."""
        self._wrote(drove, drove.landed)
        if drove.unanswered is not None:
            self.responses.acknowledge(self.psn - 1 - drove.unanswered)

    def _take_for_imm(self) -> None:
        wr = self._take()
        if wr.refused:
            self._wr = wr
            raise _Fault(wire.NAK_REMOTE_OPERATIONAL, EVENT_REQ_ERR, wr.refused)
        self._wr = wr

    def _bounded_end(self, message: RcMessage) -> int:
        # Stops a peer from sending more, or less, than the first chunk announced.
        end = self._done + message.length
        if end > self._total or bool(message.flags & LAST) != (end == self._total):
            raise _invalid()
        return end

    def _read(self, message: RcMessage, _payload: Sequence[memoryview]) -> None:
        if self._kind or not self.ctx.access & REMOTE_READ:
            raise _invalid()
        self._admit_job()
        self._queue_read(message, self.psn)
        self.psn += 1
        self.hint.set(wire.READ_REQUEST, message.rkey, message.remote_addr)

    def _admit_job(self) -> None:
        # As many as the peer may have under way. One that repeated itself may have had its answer meanwhile: it cannot
        # ask for one more unless the oldest is done.
        responses = self.responses
        if responses.jobs >= self.ctx.max_dest_rd_atomic and not responses.forget_repeat():
            raise _invalid()

    def _queue_read(self, message: RcMessage, psn: int) -> None:
        ctx = self.ctx
        if message.offset > message.total:
            raise _invalid()
        try:
            ctx.env.keys.check_untrusted(
                ctx.pd, message.rkey, message.remote_addr, message.total, REMOTE_READ
            )
        except GuestError:
            raise _no_access() from None
        self.responses.read(psn, message)

    def _atomic(self, message: RcMessage, _payload: Sequence[memoryview]) -> None:
        ctx = self.ctx
        if self._kind or not ctx.access & REMOTE_ATOMIC or message.remote_addr % 8:
            raise _invalid()
        self._admit_job()
        try:
            views = ctx.env.keys.resolve_untrusted(
                ctx.pd, message.rkey, message.remote_addr, 8, REMOTE_ATOMIC
            )
        except GuestError:
            raise _no_access() from None
        found = _execute_atomic(views[0], message)
        if len(self._atomics) >= ctx.max_dest_rd_atomic:
            self._atomics.popleft()
        self._atomics.append((self.psn, found))
        self.responses.atomic(self.psn, found)
        self.psn += 1

    def _invalidate(self, message: RcMessage) -> tuple[int, bytes]:
        # IBA 9.9.3 makes this a silent fault of the responder; we also tell the requester, or it
        # would repeat itself to death.
        try:
            self.ctx.env.keys.invalidate_untrusted(self.ctx.pd, message.rkey)
        except GuestError:
            raise _no_access() from None
        return WC_WITH_INV, message.rkey.to_bytes(4, "little")

    def _take(self) -> RecvWr:
        wr = self.ctx.rq.take()
        if wr is None:
            raise _NotReady
        return wr

    def _accepted(self, message: RcMessage) -> None:
        if message.flags & LAST:
            self._kind = 0
        if message.flags & (LAST | wire.ACK_REQUEST):
            self.responses.acknowledge(self.psn)
        self.psn += 1

    def _received(self, message: RcMessage, opcode: int, flags: int, imm: bytes) -> None:
        wr, self._wr = self._wr, None
        assert wr is not None
        wc = Completion(wr.wr_id, 0, opcode, self._total, imm, self.ctx.dest_qpn, flags)
        self._owner.complete_recv(wc, solicited=bool(message.flags & wire.SOLICITED))

    # -- faults -----------------------------------------------------------------------------

    def _nak(self, code: int) -> None:
        self._nak_sent = True
        self.responses.nak(self.psn, code)

    def _fail(self, fault: _Fault) -> None:
        self._nak(fault.nak)
        wr, self._wr = self._wr, None
        if wr is None:
            self.ctx.fail(ERR, fault.event)
            return
        self._owner.complete_recv(Completion(wr.wr_id, fault.status, WC_RECV), solicited=True)
        self.ctx.fail(ERR, None)

    def flush_current(self) -> None:
        """Complete the receive that a message was filling as flushed."""
        wr, self._wr = self._wr, None
        self._kind = 0
        if wr is not None:
            self._owner.complete_recv(Completion(wr.wr_id, WR_FLUSH_ERR, WC_RECV), solicited=True)


def _execute_atomic(view: memoryview, message: RcMessage) -> int:
    # Atomic towards other queue pairs of this device (IB_ATOMIC_HCA), not towards guest CPUs.
    word = view.cast("B").cast("Q")
    found = word[0]
    if message.code == wire.ATOMIC_FETCH_ADD:
        word[0] = (found + message.operand_a) & _U64
    elif found == message.operand_a:
        word[0] = message.operand_b
    return found


_HANDLERS: dict[int, Callable[[Responder, RcMessage, Sequence[memoryview]], None]] = {
    wire.SEND: Responder._send,
    wire.WRITE: Responder._write,
    wire.READ_REQUEST: Responder._read,
    wire.ATOMIC_REQUEST: Responder._atomic,
}

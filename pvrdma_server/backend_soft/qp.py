"""A queue pair: its state, its turns, and what its halves have in common.

Contract: `SoftQp` is what the core holds. Its halves do the protocol (`requester` and `responder`
for RC, `datagram` for UD and GSI); here are the states, the flush, the scheduling. A QP that is
dead or reset calls its owner no more.

Source: InfiniBand Architecture Specification vol. 1, 10.3.1 (states).
"""

from collections.abc import Callable, Sequence

from pvrdma_server.abi.mad import GSI_QKEY
from pvrdma_server.abi.pvrdma_verbs import QpAttr, QpAttrMask
from pvrdma_server.backend import Completion, QpInit, QpOwner
from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.carrier import Carrier
from pvrdma_server.backend_soft.codes import (
    ERR,
    EVENT_COMM_EST,
    EVENT_LAST_WQE,
    EVENT_SQ_DRAINED,
    GSI,
    INIT,
    RC,
    RESET,
    RTR,
    RTS,
    SQD,
    SQE,
    WC_RECV,
    WR_FLUSH_ERR,
)
from pvrdma_server.backend_soft.context import Environment, QpContext, RecvQueue
from pvrdma_server.backend_soft.datagram import DatagramReceiver, DatagramSender
from pvrdma_server.backend_soft.fast_path import Detour, Landed, Run
from pvrdma_server.backend_soft.lane import Drove, Lane
from pvrdma_server.backend_soft.memory import SoftPd
from pvrdma_server.backend_soft.requester import Requester
from pvrdma_server.backend_soft.responder import Responder
from pvrdma_server.backend_soft.responses import ResponseQueue
from pvrdma_server.backend_soft.srq import SoftSrq
from pvrdma_server.backend_soft.wire import PSN_MASK, DatagramMessage, RcMessage

_DEAD = -1
_STATE = int(QpAttrMask.STATE)
_HEARS = frozenset((RTR, RTS, SQD, SQE))
_TIMEOUT_UNIT_NS = 4096
_REQUESTS = frozenset((wire.SEND, wire.WRITE, wire.READ_REQUEST, wire.ATOMIC_REQUEST))


class SoftQp:
    """A queue pair of the embedded backend."""

    __slots__ = (
        "_comm_est",
        "_ctx",
        "_datagrams",
        "_detour",
        "_env",
        "_flushing",
        "_forget",
        "_responder",
        "_responses",
        "_sender",
        "_sqd_drained",
        "_sqd_notify",
        "_srq",
        "_turn_chunks",
        "qpn",
        "scheduled",
    )

    def __init__(
        self,
        env: Environment,
        pd: SoftPd,
        owner: QpOwner,
        init: QpInit,
        srq: SoftSrq | None,
        qpn: int,
        forget: Callable[["SoftQp"], None],
    ) -> None:
        self.qpn = qpn
        self.scheduled = False
        rq = srq.queue if srq else RecvQueue(owner, pd)
        self._env, self._srq, self._forget = env, srq, forget
        self._ctx = ctx = QpContext(env, owner, pd, qpn, init, rq, self._fail, self._schedule)
        self._sender: Requester | DatagramSender
        self._responder: Responder | None = None
        self._responses: ResponseQueue | None = None
        self._turn_chunks = env.config.turn_chunks
        self._datagrams: DatagramReceiver | None = None
        if init.qp_type == RC:
            self._sender, self._responder = Requester(ctx), Responder(ctx)
            self._responses = self._responder.responses
        else:
            self._sender, self._datagrams = DatagramSender(ctx), DatagramReceiver(ctx)
        self._detour = Detour()
        self._comm_est = self._flushing = self._sqd_notify = self._sqd_drained = False

    # -- what the core calls ----------------------------------------------------------------

    def modify(self, attr: QpAttr, mask: int) -> None:
        """Apply attributes; `attr` is the merged state."""
        self._apply(attr)
        if mask & _STATE:
            self._enter(int(attr.qp_state), attr)

    def query(self, attr: QpAttr) -> QpAttr:
        """`attr` with the PSNs and the drain state as they are."""
        ctx = self._ctx
        draining = ctx.state == SQD and not self._sqd_drained
        if self._responder is None:
            return attr._replace(sq_draining=int(draining))
        return attr._replace(
            sq_psn=self._sender.psn & PSN_MASK,
            rq_psn=self._responder.psn & PSN_MASK,
            sq_draining=int(draining),
        )

    def send_doorbell(self) -> None:
        """Sends may have been posted."""
        if self._ctx.state >= RTS:
            self._sender.wanted = True
            self._schedule()

    def recv_doorbell(self) -> None:
        """Receives may have been posted: only a QP in error looks at once, to flush them."""
        if self._ctx.state == ERR:
            self._schedule()

    def destroy(self) -> None:
        """Give everything back; the owner is not called again."""
        if self._ctx.state != _DEAD:
            self._last_words()
            self._forget_work()
            self._ctx.state = _DEAD
            self._forget(self)

    # -- what arrives -----------------------------------------------------------------------

    def receive_rc(self, peer: Carrier, message: RcMessage, payload: Sequence[memoryview]) -> None:
        """A message for a connected QP from whoever owns `peer`."""
        ctx = self._ctx
        responder, sender = self._responder, self._sender
        if responder is None or ctx.state not in _HEARS:
            self._env.counters.unknown_qp += 1
        elif message.src_qpn != ctx.dest_qpn or self._env.port.route(ctx.dgid) is not peer:
            self._env.counters.wrong_peer += 1
        elif message.kind in _REQUESTS:
            if self._comm_est or self._communication_established():
                responder.request(message, payload)
        elif ctx.state != RTR and isinstance(sender, Requester):
            sender.response(message, payload)

    def offer(self, peer: Carrier, kind: int) -> Run | None:
        """What of this kind could come next from `peer` by the short cut of `fast_path`."""
        ctx, responder, sender = self._ctx, self._responder, self._sender
        if responder is None or ctx.state not in _HEARS:
            return None
        if self._env.port.route(ctx.dgid) is not peer:
            return None
        if kind != wire.READ_RESPONSE:
            return responder.offer(kind) if self._comm_est else None
        return sender.offer() if ctx.state != RTR and isinstance(sender, Requester) else None

    def landed(self, kind: int, landed: Landed) -> None:
        """What came of it."""
        if kind != wire.READ_RESPONSE:
            assert self._responder is not None
            self._responder.landed(kind, landed)
        else:
            assert isinstance(self._sender, Requester)
            self._sender.landed(landed)

    def lane(self, peer: Carrier) -> Lane | None:
        """What could come next in a `lane` with `peer`."""
        ctx, responder, sender = self._ctx, self._responder, self._sender
        if ctx.state != RTS or responder is None or not isinstance(sender, Requester):
            return None
        if responder.responses.queue or self._env.port.route(ctx.dgid) is not peer:
            return None
        sends = sender.lane()
        if sends is None and not sender.idle:
            return None  # what comes next is an answer
        run = responder.run() if self._comm_est else None
        if (sends is None and run is None) or not self._detour.tempts():
            return None
        return Lane(self.qpn, ctx.dest_qpn, self._env.config.chunk_bytes, run, sends)

    def drove(self, lane: Lane, drove: Drove) -> None:
        """What came of it."""
        self._detour.tried(drove.worked)
        if lane.sends is not None:
            assert isinstance(self._sender, Requester)
            self._sender.drove(lane.sends, drove)
        if lane.run is not None and drove.landed:
            assert self._responder is not None
            self._responder.drove(drove)

    def receive_datagram(self, message: DatagramMessage, payload: Sequence[memoryview]) -> None:
        """A datagram whose GIDs were checked."""
        if self._datagrams is None or self._ctx.state not in _HEARS:
            self._env.counters.unknown_qp += 1
        else:
            self._datagrams.datagram(message, payload)

    def _communication_established(self) -> bool:
        # The owner may answer the event with another state.
        self._comm_est = True
        if self._ctx.state == RTR:
            self._ctx.owner.raise_event(EVENT_COMM_EST)
        return self._ctx.state in _HEARS

    # -- turns ------------------------------------------------------------------------------

    def run(self) -> int:
        """Take a turn: answer, send, flush; the bytes moved."""
        ctx, env = self._ctx, self._env
        responses = self._responses
        carrier = env.port.route(ctx.dgid) if responses is not None else None
        ctx.blocked_on = None
        moved, more = 0, False
        if responses is not None and responses.queue:
            moved = responses.run(carrier, self._turn_chunks)
            more = responses.more
        sender = self._sender
        if sender.wanted and RTS <= ctx.state <= SQD and ctx.blocked_on is None:
            moved += sender.run(carrier, self._turn_chunks)
            more = more or (sender.wanted and ctx.blocked_on is None)
        if ctx.state >= SQD:
            more = self._wind_down() or more
        if ctx.blocked_on is not None:
            env.block(self, ctx.blocked_on)
        if more:
            self._schedule()
        return moved

    def _wind_down(self) -> bool:
        # SQD, SQE or ERR: true when there is more to flush.
        ctx = self._ctx
        if ctx.state == SQD:
            if self._sender.idle and not self._sqd_drained:
                self._drained()
            return False
        limit = self._env.config.turn_flush
        if self._sender.flush(limit) == limit:
            return True
        return ctx.state == ERR and self._flush_recv(limit)

    def _drained(self) -> None:
        owner = self._ctx.owner
        self._sqd_drained = True
        owner.state_changed(SQD)
        if self._sqd_notify and self._ctx.state == SQD:
            owner.raise_event(EVENT_SQ_DRAINED)

    def _flush_recv(self, limit: int) -> bool:
        ctx = self._ctx
        if self._responder is not None:
            self._responder.flush_current()
        if self._srq is not None:
            if self._flushing and ctx.state == ERR:
                self._flushing = False
                ctx.owner.raise_event(EVENT_LAST_WQE)
            return False
        while limit and ctx.state == ERR and (wr := ctx.rq.take()) is not None:
            ctx.owner.complete_recv(Completion(wr.wr_id, WR_FLUSH_ERR, WC_RECV), solicited=True)
            limit -= 1
        return not limit

    def _schedule(self) -> None:
        if self._ctx.state > INIT:
            self._env.schedule(self)

    # -- states -----------------------------------------------------------------------------

    def _apply(self, attr: QpAttr) -> None:
        ctx = self._ctx
        gsi = ctx.init.qp_type == GSI
        ctx.dest_qpn, ctx.dgid = attr.dest_qp_num, bytes(attr.ah_attr.grh.dgid)
        ctx.qkey = GSI_QKEY if gsi else attr.qkey
        ctx.access = attr.qp_access_flags
        ctx.timeout_ns = 0
        if attr.timeout & 31:
            floor = self._env.config.min_ack_timeout_ns
            ctx.timeout_ns = max(_TIMEOUT_UNIT_NS << (attr.timeout & 31), floor)
        ctx.retry_cnt, ctx.rnr_retry = attr.retry_cnt & 7, attr.rnr_retry & 7
        ctx.min_rnr_timer = attr.min_rnr_timer & 31
        ctx.max_rd_atomic = min(attr.max_rd_atomic, self._env.config.max_qp_rd_atom)
        ctx.max_dest_rd_atomic = min(attr.max_dest_rd_atomic, self._env.config.max_qp_rd_atom)
        self._sqd_notify = bool(attr.en_sqd_async_notify)

    def _enter(self, state: int, attr: QpAttr) -> None:
        ctx = self._ctx
        previous, ctx.state = ctx.state, state
        if state == RESET:
            self._forget_work()
        elif state == RTR and previous != RTR:
            self._comm_est = False
            if self._responder is not None:
                self._responder.reset(attr.rq_psn)
        elif state == RTS and previous == RTR:
            self._sender.reset(attr.sq_psn)
        elif state == RTS:
            self._sender.wanted = True
        elif state == SQD and previous != SQD:
            self._sqd_drained = False
        elif state == ERR and previous != ERR:
            self._last_words()
            self._flushing = True
        self._schedule()

    def _fail(self, state: int, event: int | None) -> None:
        ctx = self._ctx
        if ctx.state in (_DEAD, RESET, ERR, state):
            return
        ctx.state = state
        self._flushing = state == ERR
        ctx.owner.state_changed(state)
        if event is not None and ctx.state == state:
            ctx.owner.raise_event(event)
        self._schedule()

    def _last_words(self) -> None:
        # What was received was completed, so its sender should hear of it if there is room now.
        if self._responses is not None:
            self._responses.run_short(self._env.port.route(self._ctx.dgid))
            self._responses.clear()

    def _forget_work(self) -> None:
        self._sender.reset(0)
        if self._responder is not None:
            self._responder.reset(0)
        if self._srq is None:
            self._ctx.rq.spare = None
        self._flushing = False

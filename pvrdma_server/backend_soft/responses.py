"""The responses of an RC responder, on their way back to the requester.

Contract: in PSN order, each sent once. Bounded: at most one READ or atomic for each the peer may
have in flight (the responder checks `jobs`), one acknowledgement between two of them, and a NAK
only at the end. READ data is gathered chunk by chunk when it is sent.
"""

from collections import deque
from itertools import islice

from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.carrier import Carrier
from pvrdma_server.backend_soft.codes import ERR, EVENT_ACCESS_ERR, REMOTE_READ
from pvrdma_server.backend_soft.context import QpContext
from pvrdma_server.backend_soft.fast_path import ASKED, MAX_ASKED, MAX_MESSAGES, Answers
from pvrdma_server.backend_soft.wire import PSN_MASK, RcMessage
from pvrdma_server.errors import GuestError

_JOBS = (wire.READ_RESPONSE, wire.ATOMIC_RESPONSE)


class _Response:
    """An ACK, a NAK (`code`), an atomic's result (`value`) or READ data (`value` bytes of it)."""

    __slots__ = ("address", "code", "kind", "offset", "psn", "repeat", "rkey", "value")

    def __init__(self, kind: int, psn: int, code: int = 0, value: int = 0) -> None:
        self.kind, self.psn, self.code, self.value = kind, psn, code, value
        self.address = self.rkey = self.offset = 0
        self.repeat = False


class ResponseQueue:
    """What one QP has to answer. `more`: it could go on at once, had the turn not ended."""

    __slots__ = ("ctx", "more", "queue")

    def __init__(self, ctx: QpContext) -> None:
        self.ctx = ctx
        self.queue: deque[_Response] = deque()
        self.more = False

    @property
    def jobs(self) -> int:
        """READs and atomics not answered yet."""
        return sum(1 for response in self.queue if response.kind in _JOBS)

    def clear(self) -> None:
        """Forget all."""
        self.queue.clear()
        self.more = False

    def forget_from(self, psn: int) -> None:
        """Forget the responses to `psn` and everything after it."""
        while self.queue and self.queue[-1].psn >= psn:
            self.queue.pop()

    def repeats(self, psn: int) -> None:
        """The peer has asked for `psn` before."""
        if self.queue and self.queue[-1].psn == psn:
            self.queue[-1].repeat = True

    def forget_repeat(self) -> bool:
        """Forget the oldest READ or atomic; False, and nothing is forgotten, when it was asked for only once."""
        for response in self.queue:
            if response.kind in _JOBS:
                if response.repeat:
                    self.queue.remove(response)
                return response.repeat
        return False

    def acknowledge(self, psn: int) -> None:
        """Everything up to `psn` is done."""
        queue = self.queue
        if queue and queue[-1].kind == wire.ACK:
            queue[-1].psn = max(queue[-1].psn, psn)
        else:
            queue.append(_Response(wire.ACK, psn))
            self.ctx.schedule()

    def nak(self, psn: int, code: int) -> None:
        """`psn` is refused. A NAK that is still here is replaced: its PSN is the same."""
        if self.queue and self.queue[-1].kind == wire.NAK:
            self.queue.pop()
        self._append(_Response(wire.NAK, psn, code))

    def atomic(self, psn: int, found: int) -> None:
        """The atomic at `psn` found this value."""
        self._append(_Response(wire.ATOMIC_RESPONSE, psn, 0, found))

    def read(self, psn: int, request: RcMessage) -> None:
        """Send the data a checked READ request asks for."""
        job = _Response(wire.READ_RESPONSE, psn, 0, request.total)
        job.address, job.rkey, job.offset = request.remote_addr, request.rkey, request.offset
        self._append(job)

    def read_many(self, psn: int, asked: bytes, rkey: int) -> None:
        """Likewise for many, from `psn` on: an `ASKED` record each, all checked."""
        for address, length, _ in ASKED.iter_unpack(asked):
            job = _Response(wire.READ_RESPONSE, psn, 0, length)
            job.address, job.rkey = address, rkey
            self.queue.append(job)
            psn += 1
        self.ctx.schedule()

    def _append(self, response: _Response) -> None:
        self.queue.append(response)
        self.ctx.schedule()

    def run(self, carrier: Carrier | None, chunks: int) -> int:
        """Send up to `chunks` messages; the bytes sent."""
        self.more = False
        moved = 0
        queue = self.queue
        if carrier is None:
            self.ctx.env.counters.no_route += len(queue)
            queue.clear()
        while queue and carrier is not None:
            if not chunks:
                self.more = True
                break
            length = self._emit_many(carrier, queue[0], chunks) or self._emit(carrier, queue[0])
            if length < 0:
                self.ctx.blocked_on = carrier
                break
            moved += length
            chunks -= min(chunks, max(1, length // self.ctx.env.config.chunk_bytes))
        self.ctx.env.counters.tx_bytes += moved
        return moved

    def run_short(self, carrier: Carrier | None) -> None:
        """Send what precedes any READ data, as far as there is room."""
        queue = self.queue
        while carrier is not None and queue and queue[0].kind != wire.READ_RESPONSE:
            if self._emit(carrier, queue[0]) < 0:
                break

    def _emit(self, carrier: Carrier, response: _Response) -> int:
        # Bytes sent, or -1 when the carrier has no room.
        ctx = self.ctx
        if response.kind == wire.READ_RESPONSE:
            return self._emit_read(carrier, response)
        header = wire.pack_response(
            response.kind, response.code, ctx.dest_qpn, ctx.qpn, response.psn & PSN_MASK,
            response.value,
        )  # fmt: skip
        if not carrier.send(header, ()):
            return -1
        ctx.env.counters.tx_messages += 1
        self.queue.popleft()
        return 0

    def _emit_many(self, carrier: Carrier, first: _Response, chunks: int) -> int:
        # What of READs' data goes by the short cut of `fast_path`: bytes, 0 when it takes the usual way.
        ctx, queue = self.ctx, self.queue
        if first.kind != wire.READ_RESPONSE:
            return 0
        try:
            piece = ctx.env.keys.piece_untrusted(ctx.pd, first.rkey, first.address, REMOTE_READ)
        except GuestError:
            return 0
        asked = []
        for job in islice(queue, MAX_ASKED):
            if job.kind != wire.READ_RESPONSE or job.rkey != first.rkey:
                break
            if job.offset and job is not first:
                break
            asked.append(ASKED.pack(job.address, job.value, job.psn & PSN_MASK))
        chunk_bytes = ctx.env.config.chunk_bytes
        posted = carrier.send_many(
            Answers(
                ctx.dest_qpn, ctx.qpn, piece, b"".join(asked), first.offset, chunk_bytes, MAX_MESSAGES,
                chunks * chunk_bytes,
            )
        )  # fmt: skip
        if posted is None:
            return 0
        ctx.env.counters.tx_messages += posted.messages
        for _ in range(posted.completed):
            queue.popleft()
        if posted.offset:
            queue[0].offset = posted.offset
        return posted.length_bytes

    def _emit_read(self, carrier: Carrier, job: _Response) -> int:
        ctx = self.ctx
        length = min(job.value - job.offset, ctx.env.config.chunk_bytes)
        try:
            views = ctx.env.keys.resolve_untrusted(
                ctx.pd, job.rkey, job.address + job.offset, length, REMOTE_READ
            )
        except GuestError:
            self._read_failed(job)
            return 0
        last = job.offset + length == job.value
        header = wire.pack_rc(
            job.kind, wire.LAST if last else 0, 0, wire.VERSION, ctx.dest_qpn, ctx.qpn,
            job.psn & PSN_MASK, length, 0, 0, job.value, wire.NO_IMM, 0, 0, job.offset,
        )  # fmt: skip
        if not carrier.send(header, views):
            return -1
        ctx.env.counters.tx_messages += 1
        job.offset += length
        if last:
            self.queue.popleft()
        return length

    def _read_failed(self, job: _Response) -> None:
        # The key went, or its memory did: what was asked after this one gets no answer.
        self.queue.clear()
        self.queue.append(_Response(wire.NAK, job.psn, wire.NAK_REMOTE_ACCESS))
        self.ctx.fail(ERR, EVENT_ACCESS_ERR)

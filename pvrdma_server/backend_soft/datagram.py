"""UD and GSI queue pairs: datagrams out and in.

Contract: a datagram is copied when it is sent, so its request completes at once; what cannot be
delivered is dropped and counted, as a network would. Every receive begins with the 40 bytes that
say where the datagram came from; its source GID is proven to be the sender's.

Source: InfiniBand Architecture Specification vol. 1, 9.8.3 (UD), 10.2.4 (Q_Key), 13.5.3.3 (QP1).
"""

from collections.abc import Sequence

from pvrdma_server.abi.mad import GRH_SIZE, OWN_QKEY, build_grh_area, network_hdr_type
from pvrdma_server.abi.pvrdma_dev_api import GidType
from pvrdma_server.abi.pvrdma_verbs import mtu_bytes
from pvrdma_server.backend import Completion, RecvWr, Refused, SendWr, Ud
from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.carrier import Carrier
from pvrdma_server.backend_soft.codes import (
    ERR,
    LOC_LEN_ERR,
    LOC_PROT_ERR,
    LOC_QP_OP_ERR,
    LOCAL_WRITE,
    OP_SEND,
    OP_SEND_IMM,
    RTS,
    SOLICIT,
    SQE,
    WC_GRH,
    WC_OF_WR,
    WC_RECV,
    WC_WITH_IMM,
    WR_FLUSH_ERR,
)
from pvrdma_server.backend_soft.context import QpContext
from pvrdma_server.backend_soft.scatter import (
    copy_views,
    resolve_sges_untrusted,
    sges_length,
)
from pvrdma_server.backend_soft.wire import DatagramMessage
from pvrdma_server.errors import GuestError

_MULTICAST = 0xFF
_V2 = int(GidType.ROCE_V2)
_OPCODES = (OP_SEND, OP_SEND_IMM)


class DatagramSender:
    """Send side of one UD or GSI queue pair. `wanted`: as of the requester."""

    __slots__ = ("_mtu", "_owner", "_ready", "ctx", "wanted")

    def __init__(self, ctx: QpContext) -> None:
        self.ctx = ctx
        self._owner = ctx.owner
        self._mtu = mtu_bytes(ctx.env.config.mtu)
        self._ready: tuple[SendWr, Carrier, bytes, list[memoryview]] | None = None
        self.wanted = True

    @property
    def psn(self) -> int:
        """Datagrams are not numbered."""
        return 0

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return self._ready is None

    def reset(self, _psn: int) -> None:
        """Start anew."""
        self._ready = None
        self.wanted = True

    def run(self, _carrier: Carrier | None, chunks: int) -> int:
        """Send up to `chunks` datagrams; the bytes sent."""
        moved = 0
        self.wanted = False
        while self._ready or self.ctx.state == RTS:
            if not chunks:
                self.wanted = True
                break
            if self._ready is None:
                wr = self._owner.pop_send()
                if wr is None:
                    break
                self._prepare(wr)
            if self._ready is not None and not self._transmit():
                self.wanted = True
                break
            chunks -= 1
            moved += GRH_SIZE
        return moved

    def _prepare(self, wr: SendWr) -> None:
        status = self._start(wr)
        if status:
            self._complete(wr, status)
            self.ctx.fail(SQE, None)
        elif self._ready is None and wr.signaled:
            self._complete(wr, 0)

    def _start(self, wr: SendWr) -> int:
        # The failure, or 0: then it is ready to go, or was dropped.
        arm = wr.arm
        if type(arm) is Refused:
            return arm.status
        if type(arm) is not Ud or wr.opcode not in _OPCODES:
            return LOC_QP_OP_ERR
        length = sges_length(wr.sges)
        if length > self._mtu:
            return LOC_LEN_ERR
        try:
            views = resolve_sges_untrusted(self.ctx.env.keys, self.ctx.pd, wr.sges, 0, length, 0)
        except GuestError:
            return LOC_PROT_ERR
        carrier = self._route(arm)
        if carrier is not None:
            # A copy: the request completes before the peer has seen its data.
            payload = [memoryview(b"".join(views))] if length else []
            self._ready = (wr, carrier, self._header(wr, arm, length), payload)
        return 0

    def _route(self, arm: Ud) -> Carrier | None:
        env = self.ctx.env
        if arm.av.dgid[0] == _MULTICAST:
            env.counters.datagram_multicast += 1
            return None
        carrier = env.port.route(arm.av.dgid)
        if carrier is None or arm.av.sgid_index not in env.gids:
            env.counters.no_route += 1
            return None
        return carrier

    def _header(self, wr: SendWr, arm: Ud, length: int) -> bytes:
        ctx, av = self.ctx, arm.av
        source = ctx.env.gids[av.sgid_index]
        flags = wire.FIRST | wire.LAST
        if wr.send_flags & SOLICIT:
            flags |= wire.SOLICITED
        if wr.opcode == OP_SEND_IMM:
            flags |= wire.WITH_IMM
        qkey = ctx.qkey if arm.qkey & OWN_QKEY else arm.qkey
        return wire.pack_datagram(
            wire.DATAGRAM, flags, av.hop_limit & 0xFF, wire.VERSION, arm.remote_qpn & 0xFFFFFF,
            ctx.qpn, source.gid_type, length, qkey, wr.imm,
            (av.traffic_class & 0xFF) << 20 | av.flow_label & 0xFFFFF, source.gid, av.dgid,
        )  # fmt: skip

    def _transmit(self) -> bool:
        assert self._ready is not None
        wr, carrier, header, payload = self._ready
        if not carrier.send(header, payload):
            self.ctx.blocked_on = carrier
            return False
        self._ready = None
        self.ctx.env.counters.tx_messages += 1
        if wr.signaled:
            self._complete(wr, 0)
        return True

    def _complete(self, wr: SendWr, status: int) -> None:
        self._owner.complete_send(Completion(wr.wr_id, status, WC_OF_WR.get(wr.opcode, 0)))

    def flush(self, limit: int) -> int:
        """Complete up to `limit` requests as flushed; how many it were."""
        count = 0
        while count < limit and self.ctx.state in (SQE, ERR):
            ready, self._ready = self._ready, None
            wr = ready[0] if ready else self._owner.pop_send()
            if wr is None:
                break
            count += 1
            self._complete(wr, WR_FLUSH_ERR)
        return count


class DatagramReceiver:
    """Receive side of one UD or GSI queue pair."""

    __slots__ = ("_owner", "ctx")

    def __init__(self, ctx: QpContext) -> None:
        self.ctx = ctx
        self._owner = ctx.owner

    def datagram(self, message: DatagramMessage, payload: Sequence[memoryview]) -> None:
        """A datagram for this QP, from the owner of its source GID."""
        ctx = self.ctx
        counters = ctx.env.counters
        if message.qkey != ctx.qkey:
            counters.datagram_qkey += 1
            return
        wr = ctx.rq.take()
        if wr is None:
            counters.datagram_no_buffer += 1
        elif wr.refused:
            self._fail(wr, wr.refused)
        elif GRH_SIZE + message.length > sges_length(wr.sges):
            # Dropped, not failed: a peer's long datagram must not end our QP.
            counters.datagram_too_long += 1
            ctx.rq.give_back(wr)
        else:
            self._deliver(wr, message, payload)

    def _deliver(self, wr: RecvWr, message: DatagramMessage, payload: Sequence[memoryview]) -> None:
        ctx = self.ctx
        length = GRH_SIZE + message.length
        try:
            target = resolve_sges_untrusted(
                ctx.env.keys, ctx.rq.pd, wr.sges, 0, length, LOCAL_WRITE
            )
        except GuestError:
            self._fail(wr, LOC_PROT_ERR)
            return
        copy_views(target, [memoryview(_grh_area(message)), *payload])
        flags, imm = WC_GRH, wire.NO_IMM
        if message.flags & wire.WITH_IMM:
            flags, imm = flags | WC_WITH_IMM, message.imm
        wc = Completion(
            wr.wr_id, 0, WC_RECV, length, imm, message.src_qpn, flags,
            network_hdr_type=_network_hdr_type(message),
        )  # fmt: skip
        self._owner.complete_recv(wc, solicited=bool(message.flags & wire.SOLICITED))

    def _fail(self, wr: RecvWr, status: int) -> None:
        self._owner.complete_recv(Completion(wr.wr_id, status, WC_RECV), solicited=True)
        self.ctx.fail(ERR, None)


def _grh_area(message: DatagramMessage) -> bytes:
    return build_grh_area(
        message.sgid,
        message.dgid,
        message.length,
        roce_v2=message.gid_type == _V2,
        traffic_class=message.class_flow >> 20 & 0xFF,
        flow_label=message.class_flow & 0xFFFFF,
        hop_limit=message.hop_limit,
    )


def _network_hdr_type(message: DatagramMessage) -> int:
    return network_hdr_type(message.sgid, message.dgid, roce_v2=message.gid_type == _V2)

"""Queue pairs on the host: work pulled out of the guest's rings while the host has room, completions handed back.

The guest's ring is the queue; the host's holds what is under way. Every request that goes to the host gets a number
that is never used again, so a completion that outlives a reset or its queue pair is recognised as stale. Not every
request asks the host for a completion: only what the guest signals, and the last one of a batch, which frees the slots
of those before it.

Contract: completions reach the owner in posting order, unsuccessful ones whether signalled or not, and none after
`destroy`. A request the host will not take completes in its turn with an error, and the queue pair stops as it would
have on hardware.
"""

import errno
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpAttr, QpAttrMask, QpState, QpType
from pvrdma_server.abi.vmw_pvrdma_abi import NetworkHdrType, Sge, WcFlags, WcOpcode, WcStatus
from pvrdma_server.backend import Completion, QpInit, QpOwner, Refused, SendWr, Ud
from pvrdma_server.backend_ibv.host import ah_attr_of_qp, verb
from pvrdma_server.backend_ibv.memory import IbvPd, Registrar
from pvrdma_server.backend_ibv.queues import CompletionQueues, HostCq
from pvrdma_server.backend_ibv.requests import OPCODES, Parts, post_recvs, post_sends
from pvrdma_server.backend_ibv.srq import IbvSrq
from pvrdma_server.errors import BackendError, BadGuestAddress
from pvrdma_server.qp_state import TRANSITIONS

# Requests handed to the host in one call; more would keep a vCPU waiting.
_BATCH: Final = 32
# Elements beyond what the guest may use: one that crosses DMA regions is split.
_EXTRA_SGE: Final = 4
_STATE: Final = int(QpAttrMask.STATE)
# The guest's bits for attributes are the host's; these are ours to answer for.
_PASSED_MASK: Final = int(
    QpAttrMask.STATE | QpAttrMask.ACCESS_FLAGS | QpAttrMask.PKEY_INDEX | QpAttrMask.PORT
    | QpAttrMask.QKEY | QpAttrMask.AV | QpAttrMask.PATH_MTU | QpAttrMask.TIMEOUT | QpAttrMask.RETRY_CNT
    | QpAttrMask.RNR_RETRY | QpAttrMask.RQ_PSN | QpAttrMask.MAX_QP_RD_ATOMIC | QpAttrMask.MIN_RNR_TIMER
    | QpAttrMask.SQ_PSN | QpAttrMask.MAX_DEST_RD_ATOMIC | QpAttrMask.DEST_QPN
    | QpAttrMask.EN_SQD_ASYNC_NOTIFY
)  # fmt: skip
_HOST_QP_TYPE: Final = {int(QpType.RC): 2, int(QpType.UD): 4}
# ibv_wc_flags -> ours. Source: verbs.h IBV_WC_GRH, IBV_WC_WITH_IMM, IBV_WC_WITH_INV.
_WC_GRH, _WC_WITH_IMM, _WC_WITH_INV = 1, 2, 8
_SUCCESS: Final = int(WcStatus.SUCCESS)
_FLUSHED: Final = int(WcStatus.WR_FLUSH_ERR)
# What the host writes to the local elements of.
_LOCAL_WRITERS: Final = (int(WcOpcode.RDMA_READ), int(WcOpcode.COMP_SWAP), int(WcOpcode.FETCH_ADD))
_RECEIVING: Final = (
    int(QpState.INIT),
    int(QpState.RTR),
    int(QpState.RTS),
    int(QpState.SQD),
    int(QpState.SQE),
)


class Sent(NamedTuple):
    """A send request under way; `number` 0 for one that never reached the host and completes with `status`.

    `sges` are the host's, to find out afterwards why it failed.
    """

    number: int
    wr_id: int
    opcode: int
    signaled: bool
    status: int = 0
    sges: tuple[Sge, ...] = ()


class Surroundings(Protocol):
    """What a queue pair needs of its backend."""

    registrar: Registrar
    cqs: CompletionQueues
    port: int

    def number(self) -> int:
        """A request number, never 0 and never given twice."""

    def host_gid_index(self, index: int) -> int:
        """The host's index of the guest's GID. Raises BackendError."""

    def address_handle(self, pd: IbvPd, ud: Ud) -> Any:
        """An address handle for a datagram. Raises BackendError."""

    def forget_qp(self, qp: "IbvQp") -> None:
        """The queue pair is gone."""

    def host_trouble(self, error: BackendError) -> None:
        """Log an error that no caller can be told of."""


@dataclass(slots=True)
class _Reserved:
    """Entries of host completion queues."""

    send_cq: HostCq
    send: int
    recv_cq: HostCq
    recv: int


@dataclass(slots=True)
class _Flags:
    """Once-only reports of a queue pair, forgotten at RESET."""

    stopped: bool = False  # somebody has said why the queue pair is in ERR
    refused: bool = False
    comm_est: bool = False
    last_wqe: bool = False
    fatal: bool = False
    flushes: deque[tuple[int, int]] = field(default_factory=deque)


class IbvQp:
    """An RC or UD queue pair. Implements `backend.BackendQp`."""

    def __init__(
        self, around: Surroundings, pd: IbvPd, owner: QpOwner, init: QpInit, srq: IbvSrq | None
    ) -> None:
        if init.qp_type not in _HOST_QP_TYPE:
            raise BackendError(errno.EOPNOTSUPP, "ibv_create_qp", f"QP type {init.qp_type}")
        self._around = around
        self.pd = pd
        self._owner = owner
        self.srq = srq
        self.state = int(QpState.RESET)
        self._peer_qpn = 0
        self._datagram = init.qp_type == QpType.UD
        self._send_room = init.max_send_wr
        self._recv_room = init.max_recv_wr
        self._sent: deque[Sent] = deque()
        self._received: dict[int, int] = {}
        self._flags = _Flags()
        self._reserved = self._reserve(init)
        try:
            self.qp: Any = self._create(init)
        except BackendError:
            self._release()
            raise
        self.qpn = int(self.qp.qp_num)

    # --- life --------------------------------------------------------------------------------------------------------

    def _reserve(self, init: QpInit) -> _Reserved:
        recv = self.srq.max_wr if self.srq else init.max_recv_wr
        cqs = self._around.cqs
        send_cq = cqs.reserve(init.max_send_wr)
        try:
            return _Reserved(send_cq, init.max_send_wr, cqs.reserve(recv), recv)
        except BackendError:
            cqs.release(send_cq, init.max_send_wr)
            raise

    def _release(self) -> None:
        taken = self._reserved
        self._around.cqs.release(taken.send_cq, taken.send)
        self._around.cqs.release(taken.recv_cq, taken.recv)

    def _create(self, init: QpInit) -> Any:
        device_sge = int(self.pd.device.attr.max_sge)
        extra = _EXTRA_SGE if self.pd.privileged else 0
        cap = QPCap(
            max_send_wr=init.max_send_wr, max_recv_wr=init.max_recv_wr,
            max_send_sge=min(init.max_send_sge + extra, device_sge),
            max_recv_sge=min(init.max_recv_sge + extra, device_sge) if init.max_recv_sge else 0,
            max_inline_data=0,
        )  # fmt: skip
        attr = QPInitAttr(
            qp_type=_HOST_QP_TYPE[init.qp_type], scq=self._reserved.send_cq.cq,
            rcq=self._reserved.recv_cq.cq, srq=self.srq.srq if self.srq else None, cap=cap, sq_sig_all=0,
        )  # fmt: skip
        with verb("ibv_create_qp"):
            return QP(self.pd.pd, attr)

    def destroy(self) -> None:
        """See `backend.BackendQp`."""
        self._around.forget_qp(self)
        try:
            with verb("ibv_destroy_qp"):
                self.qp.close()
        finally:
            self._release()

    # --- attributes --------------------------------------------------------------------------------------------------

    def modify(self, attr: QpAttr, mask: int) -> None:
        """See `backend.BackendQp`."""
        target = attr.qp_state if mask & _STATE else self.state
        stopping = target in (QpState.RESET, QpState.ERR)
        if stopping:
            mask = _STATE
        elif target != self.state:
            # `attr` is complete; the host wants to be told everything that its transition needs.
            rules = TRANSITIONS[self.state, target]
            mask |= rules[1 if self._datagram else 0].required
        host = QPAttr(qp_state=target)
        if not stopping:
            self._fill(host, attr, mask)
        with verb("ibv_modify_qp", f"state {self.state} to {target}, attributes {mask:#x}"):
            self.qp.modify(host, mask & _PASSED_MASK)
        self._flags.stopped |= target == QpState.ERR
        self.state = target
        self._peer_qpn = attr.dest_qp_num
        if target == QpState.RESET:
            self._forget_work()
        else:
            self.recv_doorbell()
            self.send_doorbell()

    def _fill(self, host: Any, attr: QpAttr, mask: int) -> None:
        host.cur_qp_state = self.state
        host.pkey_index = 0
        host.port_num = self._around.port
        host.qp_access_flags = attr.qp_access_flags & 0xF
        for name in ("qkey", "rq_psn", "sq_psn", "dest_qp_num", "max_rd_atomic", "max_dest_rd_atomic",
                     "min_rnr_timer", "timeout", "retry_cnt", "rnr_retry", "en_sqd_async_notify"):  # fmt: skip
            setattr(host, name, getattr(attr, name))
        if mask & QpAttrMask.PATH_MTU:
            host.path_mtu = attr.path_mtu
        if mask & QpAttrMask.AV:
            index = self._around.host_gid_index(attr.ah_attr.grh.sgid_index)
            host.ah_attr = ah_attr_of_qp(attr, index, self._around.port)

    def _forget_work(self) -> None:
        # Completions of before the reset are stale: their numbers are unknown from here on.
        self._sent.clear()
        self._received.clear()
        self._flags = _Flags()

    def query(self, attr: QpAttr) -> QpAttr:
        """See `backend.BackendQp`."""
        with verb("ibv_query_qp"):
            host, _ = self.qp.query(_STATE | int(QpAttrMask.SQ_PSN) | int(QpAttrMask.RQ_PSN))
        return attr._replace(
            sq_psn=int(host.sq_psn) & 0xFFFFFF, rq_psn=int(host.rq_psn) & 0xFFFFFF,
            sq_draining=int(host.sq_draining) & 1,
        )  # fmt: skip

    def host_state(self) -> int:
        """The host's `QpState` of this queue pair."""
        with verb("ibv_query_qp"):
            return int(self.qp.query(_STATE)[0].qp_state)

    # --- sends -------------------------------------------------------------------------------------------------------

    def send_doorbell(self) -> None:
        """See `backend.BackendQp`."""
        if self.state == QpState.RTS:
            while not self._flags.refused and self._send_batch():
                pass
        elif self.state == QpState.ERR:
            self._flush()

    def _send_batch(self) -> bool:
        """Hand one batch to the host; true when there may be another."""
        room = min(self._send_room - len(self._sent), _BATCH)
        batch: list[SendWr] = []
        refused: SendWr | None = None
        while len(batch) < room:
            wr = self._owner.pop_send()
            if wr is None:
                break
            if isinstance(wr.arm, Refused) or wr.opcode not in OPCODES:
                refused = wr
                break
            batch.append(wr)
        taken, status = self._post_sends(batch) if batch else (0, 0)
        if taken < len(batch):
            self._refuse(batch[taken:], status)
        elif refused is not None:
            status = (
                refused.arm.status if isinstance(refused.arm, Refused) else WcStatus.LOC_QP_OP_ERR
            )
            self._refuse([refused], int(status))
        return bool(batch) and len(batch) == room and not self._flags.refused

    def _post_sends(self, batch: list[SendWr]) -> tuple[int, int]:
        """How many the host took, and the status of the first that it did not."""
        status = int(WcStatus.LOC_QP_OP_ERR)
        parts = Parts()
        chain = []
        sent: list[Sent] = []
        try:
            for index, wr in enumerate(batch):
                try:
                    chain.append(
                        self._host_send(parts, wr, last=index == len(batch) - 1, sent=sent)
                    )
                except (BackendError, BadGuestAddress) as e:
                    if isinstance(e, BadGuestAddress):
                        status = int(WcStatus.LOC_PROT_ERR)
                    self._report(e)
                    break
            if chain and len(chain) < len(batch):
                chain[-1].send_flags |= 2  # IBV_SEND_SIGNALED: it has become the last
            taken = post_sends(self.qp, chain)
        finally:
            parts.close()
        self._sent.extend(sent[:taken])
        return taken, status

    def _host_send(self, parts: Parts, wr: SendWr, *, last: bool, sent: list[Sent]) -> Any:
        number = self._around.number()
        sges = self._around.registrar.translate(self.pd, wr.sges)
        request = parts.send(number, wr, sges, signaled=wr.signaled or last)
        if isinstance(wr.arm, Ud):
            request.set_wr_ud(
                self._around.address_handle(self.pd, wr.arm), wr.arm.remote_qpn, wr.arm.qkey
            )
        sent.append(Sent(number, wr.wr_id, OPCODES[wr.opcode][1], wr.signaled, 0, sges))
        return request

    def _refuse(self, wrs: list[SendWr], status: int) -> None:
        """Requests that the host does not get: the first fails, those behind it are flushed, and nothing follows."""
        for wr in wrs:
            self._sent.append(Sent(0, wr.wr_id, 0, True, status))
            status = _FLUSHED
        self._flags.refused = True
        self._settle_sent()

    def _settle_sent(self) -> None:
        """Complete refused requests whose turn has come, and stop the queue pair then."""
        while self._sent and self._sent[0].number == 0:
            entry = self._sent.popleft()
            if self.state != QpState.ERR:
                self._stop()
            self._owner.complete_send(Completion(entry.wr_id, entry.status, entry.opcode))

    def _stop(self) -> None:
        """Move to ERR by ourselves, as hardware does after a request that it cannot execute."""
        self._flags.stopped = True
        try:
            with verb("ibv_modify_qp"):
                self.qp.modify(QPAttr(qp_state=int(QpState.ERR)), _STATE)
        except BackendError as e:
            self._around.host_trouble(e)
        self._to_error()

    def _to_error(self) -> None:
        if self.state != QpState.ERR:
            self.state = int(QpState.ERR)
            self._owner.state_changed(self.state)

    def _report(self, error: BackendError | BadGuestAddress) -> None:
        if isinstance(error, BackendError):
            self._around.host_trouble(error)

    # --- receives ----------------------------------------------------------------------------------------------------

    def recv_doorbell(self) -> None:
        """See `backend.BackendQp`."""
        if self.srq is not None:
            return
        if self.state in _RECEIVING:
            while len(self._received) < self._recv_room and self._recv_batch():
                pass
        elif self.state == QpState.ERR:
            self._flush()

    def _recv_batch(self) -> bool:
        parts = Parts()
        chain: list[Any] = []
        taken: list[tuple[int, int]] = []
        bad: tuple[int, int] | None = None
        room = min(self._recv_room - len(self._received), _BATCH)
        try:
            while len(chain) < room and bad is None:
                wr = self._owner.pop_recv()
                if wr is None:
                    break
                try:
                    sges = self._around.registrar.translate(self.pd, wr.sges)
                except (BackendError, BadGuestAddress) as e:
                    self._report(e)
                    bad = (wr.wr_id, int(WcStatus.LOC_PROT_ERR))
                    break
                if wr.refused:
                    bad = (wr.wr_id, wr.refused)
                    break
                number = self._around.number()
                chain.append(parts.recv(number, sges))
                taken.append((number, wr.wr_id))
            count = post_recvs(self.qp, chain)
        finally:
            parts.close()
        self._received.update(taken[:count])
        failed = [(wr_id, int(WcStatus.LOC_QP_OP_ERR)) for _, wr_id in taken[count:]]
        if failed or bad:
            self._flags.flushes.extend(failed + ([bad] if bad else []))
            self._stop()
            self._flush()
            return False
        return len(chain) == room

    # --- completions -------------------------------------------------------------------------------------------------

    def completed(self, wc: Any) -> None:
        """Take one host completion of this queue pair."""
        number = int(wc.wr_id)
        if self.srq is not None and (wr_id := self.srq.take(number)) is not None:
            self._complete_recv(wc, wr_id)
        elif number in self._received:
            self._complete_recv(wc, self._received.pop(number))
        elif self._sent and self._sent[0].number <= number:
            self._complete_send(wc, number)

    def _complete_send(self, wc: Any, number: int) -> None:
        entry = self._sent.popleft()
        while entry.number != number:
            entry = self._sent.popleft()  # unsignalled, and done before this one
        status = int(wc.status)
        if status:
            status = self._true_status(entry, status)
            self._noticed_error()
        if status or entry.signaled:
            opcode = entry.opcode
            length = int(wc.byte_len) if status == _SUCCESS else 0
            self._owner.complete_send(
                Completion(entry.wr_id, status, opcode, length, vendor_err=int(wc.vendor_err))
            )
        self._settle_sent()

    def _true_status(self, entry: Sent, status: int) -> int:
        """Soft-RoCE flushes even the request whose own elements made it stop; tell such a one by its elements."""
        if status == _FLUSHED and not self._flags.stopped:
            writes = entry.opcode in _LOCAL_WRITERS
            if not self._around.registrar.covers(self.pd, entry.sges, writes=writes):
                status = int(WcStatus.LOC_PROT_ERR)
        if status != _FLUSHED:
            self._flags.stopped = True
        return status

    def _complete_recv(self, wc: Any, wr_id: int) -> None:
        status = int(wc.status)
        if status:
            self._noticed_error()
            self._owner.complete_recv(
                Completion(wr_id, status, int(WcOpcode.RECV), vendor_err=int(wc.vendor_err)),
                solicited=True,
            )
            return
        if self.state == QpState.RTR:
            self.established()
        # The host does not say whether the sender asked for an event: an event too many is legal.
        self._owner.complete_recv(self._received_wc(wc, wr_id), solicited=True)

    def _received_wc(self, wc: Any, wr_id: int) -> Completion:
        host_flags = int(wc.wc_flags)
        flags = (
            (int(WcFlags.GRH) if host_flags & _WC_GRH else 0)
            | (int(WcFlags.WITH_IMM) if host_flags & _WC_WITH_IMM else 0)
            | (int(WcFlags.WITH_INVALIDATE) if host_flags & _WC_WITH_INV else 0)
        )
        return Completion(
            wr_id, _SUCCESS, int(wc.opcode), int(wc.byte_len),
            imm=int(wc.imm_data).to_bytes(4, "little"),
            src_qp=int(wc.src_qp) if self._datagram else self._peer_qpn,
            wc_flags=flags, sl=int(wc.sl),
            network_hdr_type=int(NetworkHdrType.IPV4) if self._datagram else 0,
        )  # fmt: skip

    def _noticed_error(self) -> None:
        """A completion failed: the host has moved the queue pair, or will not have (SQE, a receive's own error)."""
        if self.state in (QpState.ERR, QpState.SQE):
            return
        try:
            state = self.host_state()
        except BackendError as e:
            self._around.host_trouble(e)
            state = int(QpState.ERR)
        if state in (QpState.ERR, QpState.SQE):
            self.state = state
            self._owner.state_changed(state)

    def refill(self) -> None:
        """Completions have made room: take more work, or flush what is left."""
        self.recv_doorbell()
        self.send_doorbell()

    def _flush(self) -> None:
        """In ERR: complete what never reached the host, once the host has given back what did."""
        self._settle_sent()
        if not self._sent:
            while (wr := self._owner.pop_send()) is not None:
                self._owner.complete_send(Completion(wr.wr_id, _FLUSHED, 0))
        if self.srq is None and not self._received:
            while self._flags.flushes:
                wr_id, status = self._flags.flushes.popleft()
                self._owner.complete_recv(
                    Completion(wr_id, status, int(WcOpcode.RECV)), solicited=True
                )
            while (recv := self._owner.pop_recv()) is not None:
                self._owner.complete_recv(
                    Completion(recv.wr_id, _FLUSHED, int(WcOpcode.RECV)), solicited=True
                )

    # --- events ------------------------------------------------------------------------------------------------------

    def established(self) -> None:
        """The peer has sent before we are in RTS: the guest's connection manager wants to know, once."""
        if not self._flags.comm_est:
            self._flags.comm_est = True
            self._owner.raise_event(int(EqeType.COMM_EST))

    def last_wqe(self) -> None:
        """The host says so of some queue pair: it is this one if it receives from an SRQ and is in ERR."""
        if self.srq is not None and not self._flags.last_wqe and self._look_for_error():
            self._flags.last_wqe = True
            self._owner.raise_event(int(EqeType.QP_LAST_WQE_REACHED))

    def fatal(self, event: int) -> None:
        """The host reports an error of some queue pair: it is this one if it is in ERR and nobody has said so."""
        if (
            not self._flags.fatal
            and self.state not in (QpState.RESET, QpState.ERR)
            and self._look_for_error()
        ):
            self._flags.fatal = True
            self._owner.raise_event(event)

    def drained(self) -> None:
        """The host says that some queue pair's send queue is drained: it is this one if it is in SQD."""
        if self.state == QpState.SQD:
            self._owner.raise_event(int(EqeType.SQ_DRAINED))

    def _look_for_error(self) -> bool:
        if self.state == QpState.ERR:
            return True
        if self.state == QpState.RESET or self.host_state() != QpState.ERR:
            return False
        self._to_error()
        return True

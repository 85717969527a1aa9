"""A queue pair's life on the host: created, its attributes, and the ways it stops.

Contract: see qp.py. `WorkingQp` (work.py) adds sends and receives, `IbvQp` (qp.py) completions and events.
"""

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from pvrdma_server.abi.pvrdma_verbs import QpAttr, QpAttrMask, QpState, QpType
from pvrdma_server.abi.vmw_pvrdma_abi import Sge
from pvrdma_server.backend import BackendLimits, QpInit, QpOwner, Ud
from pvrdma_server.backend_ibv.host import ah_attr_of_qp, gid_text, giving_back, verb
from pvrdma_server.backend_ibv.memory import IbvPd, Registrar
from pvrdma_server.backend_ibv.queues import CompletionQueues, HostCq
from pvrdma_server.backend_ibv.receives import Receives
from pvrdma_server.backend_ibv.requests import (
    CONNECTED,
    DATAGRAMS,
    NO_READS,
    PLAIN,
    PLAIN_NO_READS,
)
from pvrdma_server.backend_ibv.srq import IbvSrq
from pvrdma_server.errors import BackendError
from pvrdma_server.qp_state import TRANSITIONS

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
    limits: BackendLimits

    @property
    def number(self) -> Callable[[], int]:
        """Gives a request number, never 0 and never given twice."""

    def host_gid_index(self, index: int) -> int:
        """The host's index of the guest's GID. Raises BackendError."""

    def address_handle(self, pd: IbvPd, ud: Ud) -> Any:
        """An address handle for a datagram. Raises BackendError."""

    def forget_qp(self, qp: "HostQp") -> None:
        """The queue pair is gone."""

    def flush_later(self, qp: "HostQp") -> None:
        """The queue pair has more to flush: call its `refill` soon."""

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


class HostQp:
    """An RC or UD queue pair without its work."""

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
        self._opcodes = DATAGRAMS if self._datagram else NO_READS
        self._plain = frozenset() if self._datagram else PLAIN_NO_READS
        self._send_room = init.max_send_wr
        self._max_message = around.limits.max_msg_size
        self._sent: deque[Sent] = deque()
        self._flags = _Flags()
        self._reserved = self._reserve(init)
        try:
            self.qp: Any = self._create(init)
        except BackendError:
            self._release()
            raise
        self.qpn = int(self.qp.qp_num)
        self.address = int(getattr(self.qp, "qp", 0))  # what events call it by
        self._receives = Receives(
            pd, self.qp, owner, around.registrar, room=0 if srq else init.max_recv_wr,
            number=around.number, trouble=around.host_trouble,
        )  # fmt: skip

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
        with giving_back("ibv_destroy_qp"):
            self.qp.close()
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
        what = f"state {self.state} to {target}, attributes {mask:#x}"
        if mask & QpAttrMask.AV:
            what += f", peer {gid_text(attr.ah_attr.grh.dgid)}"
        with verb("ibv_modify_qp", what):
            self.qp.modify(host, mask & _PASSED_MASK)
        self._flags.stopped |= target == QpState.ERR
        self.state = target
        self._peer_qpn = attr.dest_qp_num
        # rxe lets a read wait for ever where none is allowed; it fails where it is taken.
        if not self._datagram:
            self._opcodes = CONNECTED if attr.max_rd_atomic else NO_READS
            self._plain = PLAIN if attr.max_rd_atomic else PLAIN_NO_READS
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
        self._receives.give_up()
        self._flags = _Flags()

    def query(self, attr: QpAttr) -> QpAttr:
        """See `backend.BackendQp`."""
        with verb("ibv_query_qp"):
            host, _ = self.qp.query(_STATE | int(QpAttrMask.SQ_PSN) | int(QpAttrMask.RQ_PSN))
        return attr._replace(
            sq_psn=int(host.sq_psn) & 0xFFFFFF, rq_psn=int(host.rq_psn) & 0xFFFFFF,
            sq_draining=int(host.sq_draining) & 1,
        )  # fmt: skip

    @property
    def under_way(self) -> int:
        """Sends that the host has and has not completed."""
        return len(self._sent)

    def host_state(self) -> int:
        """The host's `QpState` of this queue pair."""
        with verb("ibv_query_qp"):
            return int(self.qp.query(_STATE)[0].qp_state)

    def send_doorbell(self) -> None:
        """Take the guest's sends, or flush them; see work.py."""
        raise NotImplementedError

    def recv_doorbell(self) -> None:
        """Take the guest's receives, or flush them; see work.py."""
        raise NotImplementedError

    def refill(self) -> None:
        """Completions have made room: take more work, or flush what is left."""
        self.recv_doorbell()
        self.send_doorbell()

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

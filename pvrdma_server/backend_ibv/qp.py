"""Queue pairs on the host: work pulled out of the guest's rings while the host has room, completions handed back.

The guest's ring is the queue; the host's holds what is under way. Every request that goes to the host gets a number
that is never used again, so a completion that outlives a reset or its queue pair is recognised as stale. Not every
request asks the host for a completion: only what the guest signals, and the last one of a batch, which frees the slots
of those before it.

Contract: completions reach the owner in posting order, unsuccessful ones whether signalled or not, and none after
`destroy`. A request the host will not take completes in its turn with an error, and the queue pair stops as it would
have on hardware.
"""

from collections.abc import Iterable
from typing import Any, Final

from pvrdma_server.abi.mad import (
    GRH_SIZE,
    NEXT_HDR_IBA,
    is_v4_mapped,
    network_hdr_type,
    parse_grh_area,
)
from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpState
from pvrdma_server.abi.vmw_pvrdma_abi import NetworkHdrType, WcFlags, WcOpcode, WcStatus
from pvrdma_server.backend import Completion, Done
from pvrdma_server.backend_ibv.host_qp import Sent
from pvrdma_server.backend_ibv.receives import Taken
from pvrdma_server.backend_ibv.work import WorkingQp
from pvrdma_server.errors import BackendError

# ibv_wc_flags -> ours. Source: verbs.h IBV_WC_GRH, IBV_WC_WITH_IMM, IBV_WC_WITH_INV.
_WC_GRH, _WC_WITH_IMM, _WC_WITH_INV = 1, 2, 8
_SEEN: Final = _WC_GRH | _WC_WITH_IMM | _WC_WITH_INV
_GRH: Final = int(WcFlags.GRH)
_FLAGS: Final = [
    (_GRH if host & _WC_GRH else 0)
    | (int(WcFlags.WITH_IMM) if host & _WC_WITH_IMM else 0)
    | (int(WcFlags.WITH_INVALIDATE) if host & _WC_WITH_INV else 0)
    for host in range(_SEEN + 1)
]
_RTR: Final = int(QpState.RTR)
_NEXT_HDR_AT: Final = 6  # in a GRH, as in an IPv6 header
_SUCCESS: Final = int(WcStatus.SUCCESS)
_FLUSHED: Final = int(WcStatus.WR_FLUSH_ERR)
# What the host writes to the local elements of.
_LOCAL_WRITERS: Final = (int(WcOpcode.RDMA_READ), int(WcOpcode.COMP_SWAP), int(WcOpcode.FETCH_ADD))


class IbvQp(WorkingQp):
    """An RC or UD queue pair. Implements `backend.BackendQp`."""

    # --- completions -------------------------------------------------------------------------------------------------

    def completed_all(self, completions: Iterable[Any]) -> None:
        """Take host completions of this queue pair, in their order; what succeeds in a row is published together."""
        sent, take = self._sent, (self._receives if self.srq is None else self.srq).take
        done: list[Done] = []
        received: list[Completion] = []
        for wc in completions:
            number, failed = wc.wr_id, int(wc.status)
            # Numbers are unique: this can only be the oldest send's.
            if sent and sent[0].number == number and not failed:
                if received:
                    received = self._publish(done, received)
                entry = sent.popleft()
                if entry.signaled:
                    done.append((entry.wr_id, entry.opcode, wc.byte_len))
                if sent and not sent[0].number:
                    done = self._publish(done, received)
                    self._settle_sent()
                continue
            taken = take(number)
            if done:
                done = self._publish(done, received)
            if taken is not None and not failed and not taken.dead:
                received.append(self._received_wc(wc, taken))
                continue
            if received:
                received = self._publish(done, received)
            if taken is not None:
                self._failed_recv(wc, taken)
            elif sent and sent[0].number <= number:
                self._complete_send(wc, number)
        self._publish(done, received)

    def _publish(self, done: list[Done], received: list[Completion]) -> list[Any]:
        """One of the two at most has anything. Returns the list that takes its place."""
        if done:
            self._owner.complete_sends(done)
        if received:
            self._owner.complete_recvs(received)
        return []

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

    def _failed_recv(self, wc: Any, taken: Taken) -> None:
        status = self._true_recv_status(taken, int(wc.status))
        self._noticed_error()
        self._owner.complete_recv(
            Completion(taken.wr_id, status, int(WcOpcode.RECV), vendor_err=int(wc.vendor_err)),
            solicited=True,
        )

    def _true_recv_status(self, taken: Taken, status: int) -> int:
        if taken.dead and status != _FLUSHED:
            if not status:
                self._stop()  # a message without data for it could use it; it was none all the same
            return taken.dead
        if status == WcStatus.LOC_QP_OP_ERR and not self._around.registrar.covers(
            taken.pd, taken.sges, writes=True
        ):
            return int(
                WcStatus.LOC_PROT_ERR
            )  # soft-RoCE has one status for all that is wrong with a receive
        return status

    def _received_wc(self, wc: Any, taken: Taken) -> Completion:
        """Of a success. The host does not say whether the sender asked for an event: an event too many is legal."""
        if self.state == _RTR:
            self.established()
        flags, source, network = _FLAGS[wc.wc_flags & _SEEN], self._peer_qpn, 0
        if self._datagram:
            source, network = wc.src_qp, self._network_hdr_type(taken)
        else:
            flags &= ~_GRH
        imm = wc.imm_data.to_bytes(4, "little")
        return Completion(
            taken.wr_id, _SUCCESS, int(wc.opcode), wc.byte_len, imm, source, flags, 0, 0, wc.sl, network
        )  # fmt: skip

    def _network_hdr_type(self, taken: Taken) -> int:
        """What the datagram came with. The host does not say so; the header in front of its data does."""
        area = self._around.registrar.peek(taken.pd, taken.sges, GRH_SIZE)
        if len(area) < GRH_SIZE:
            return int(NetworkHdrType.IPV4)
        gids = parse_grh_area(area)
        roce_v2 = is_v4_mapped(gids[0]) or area[_NEXT_HDR_AT] != NEXT_HDR_IBA
        return int(network_hdr_type(*gids, roce_v2=roce_v2))

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

    # --- events ------------------------------------------------------------------------------------------------------

    def established(self) -> None:
        """The peer has sent before we are in RTS: the guest's connection manager wants to know, once."""
        if not self._flags.comm_est:
            self._flags.comm_est = True
            self._owner.raise_event(int(EqeType.COMM_EST))

    def last_wqe(self, *, named: bool) -> None:
        """The host says so of this queue pair, or of some: then it is this if it receives from an SRQ and is in ERR."""
        if self.srq is not None and not self._flags.last_wqe and (named or self._look_for_error()):
            self._flags.last_wqe = True
            self._owner.raise_event(int(EqeType.QP_LAST_WQE_REACHED))

    def fatal(self, event: int, *, named: bool) -> None:
        """The host reports an error of this queue pair, or of some: then it is one that has gone to ERR unnoticed."""
        if self._flags.fatal or self.state == QpState.RESET:
            return
        if named:
            self._to_error()
        elif self.state == QpState.ERR or not self._look_for_error():
            return
        self._flags.fatal = True
        self._owner.raise_event(event)

    def drained(self) -> None:
        """The host says that a send queue is drained: it is this one's if it is in SQD."""
        if self.state == QpState.SQD:
            self._owner.raise_event(int(EqeType.SQ_DRAINED))

    def _look_for_error(self) -> bool:
        if self.state == QpState.ERR:
            return True
        if self.state == QpState.RESET or self.host_state() != QpState.ERR:
            return False
        self._to_error()
        return True

    def device_lost(self) -> None:
        """The host device is gone: nothing that it was given will be completed by it."""
        self._to_error()
        while self._sent:
            entry = self._sent.popleft()
            status = entry.status or _FLUSHED
            self._owner.complete_send(Completion(entry.wr_id, status, entry.opcode))
        for wr in self._receives.give_up():
            self._owner.complete_recv(
                Completion(wr.wr_id, _FLUSHED, int(WcOpcode.RECV)), solicited=True
            )
        self._flush()

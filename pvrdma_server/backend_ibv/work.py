"""Work on its way to the host: batches out of the guest's rings while the host has room; what cannot go, fails in turn.

Contract: see qp.py.
"""

from typing import Any, Final

from pvrdma_server.abi.pvrdma_verbs import QpState
from pvrdma_server.abi.vmw_pvrdma_abi import WcOpcode, WcStatus
from pvrdma_server.backend import Completion, Refused, SendWr, Ud
from pvrdma_server.backend_ibv.host_qp import HostQp, Sent
from pvrdma_server.backend_ibv.requests import OPCODES, Parts, post_recvs, post_sends
from pvrdma_server.errors import BackendError, BadGuestAddress

# Requests handed to the host in one call; more would keep a vCPU waiting.
_BATCH: Final = 32
_FLUSHED: Final = int(WcStatus.WR_FLUSH_ERR)
_RECEIVING: Final = (
    int(QpState.INIT),
    int(QpState.RTR),
    int(QpState.RTS),
    int(QpState.SQD),
    int(QpState.SQE),
)


class WorkingQp(HostQp):
    """A queue pair and the work it takes."""

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
            if isinstance(wr.arm, Refused) or wr.opcode not in self._opcodes:
                refused = wr
                break
            batch.append(wr)
        taken, status = self._post_sends(batch) if batch else (0, 0)
        if taken < len(batch):
            self._refuse(batch[taken:] + ([refused] if refused else []), status)
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
        if 0 < taken < len(chain):
            # The host would not tell when these are done: it was to do so of the batch's last.
            self._stop()
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

    def _report(self, error: BackendError | BadGuestAddress) -> None:
        if isinstance(error, BackendError):
            self._around.host_trouble(error)

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

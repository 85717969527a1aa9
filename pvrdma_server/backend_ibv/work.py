"""Work on its way to the host: batches out of the guest's rings while the host has room; what cannot go, fails in turn.

Contract: see qp.py.
"""

from typing import Any, Final

from pvrdma_server.abi.pvrdma_verbs import QpState, SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcOpcode, WcStatus
from pvrdma_server.backend import Atomic, Completion, Refused, SendWr, Ud
from pvrdma_server.backend_ibv.host_qp import HostQp, Sent
from pvrdma_server.backend_ibv.requests import BATCH, OPCODES, HostSend, SendChain
from pvrdma_server.errors import BackendError, BadGuestAddress, BadWqe
from pvrdma_server.qp_ops import PlainSend, snapshot_sends

ATOMIC_BYTES: Final = 8
_FLUSHED: Final = int(WcStatus.WR_FLUSH_ERR)
_SIGNALED: Final = int(SendFlags.SIGNALED)
# Requests flushed at once: a process that posts as fast as we flush must not keep the rest of its guest waiting.
_TURN: Final = 128
_RECEIVING: Final = (
    int(QpState.INIT),
    int(QpState.RTR),
    int(QpState.RTS),
    int(QpState.SQD),
    int(QpState.SQE),
)
# One thread posts, and posting copies: one chain does for all queue pairs.
_CHAIN: Final = SendChain()


class WorkingQp(HostQp):
    """A queue pair and the work it takes."""

    # --- sends -------------------------------------------------------------------------------------------------------

    def send_doorbell(self) -> None:
        """See `backend.BackendQp`."""
        if self.state == QpState.RTS:
            while not self._flags.refused and (self._send_plain() or self._send_batch()):
                pass
        elif self.state == QpState.ERR:
            self._flush()

    def _send_plain(self) -> bool:
        """Hand the host what lies in front as plain requests, a batch at most; true when there was any.

        What this leaves is `_send_batch`'s to take and to judge.
        """
        room = min(self._send_room - len(self._sent), BATCH)
        entries = self._owner.peek_sends() if self._plain and room > 0 else None
        if entries is None:
            return False
        batch: list[PlainSend] = []
        opcodes, longest, keys = self._plain, self._max_message, self.pd.dma_keys
        for send in snapshot_sends(entries, room):
            if send[1] != 1 or send[2] not in opcodes or send[8] > longest:
                break
            if keys and send[9] in keys:
                found = self._translated(send)
                if found is None:
                    break
                batch.append(found)
            else:
                batch.append(send)
        if batch:
            self._owner.took_sends(len(batch))
            self._post_plain(batch, _SIGNALED if entries.signal_all else 0)
        return bool(batch)

    def _translated(self, send: PlainSend) -> PlainSend | None:
        """The same with a host's key; None if that takes more than one element, or cannot be."""
        try:
            sges = self._around.registrar.translate(self.pd, (Sge._make(send[7:]),))
        except (BadGuestAddress, BackendError):
            return None
        return (*send[:7], *sges[0]) if len(sges) == 1 else None

    def _post_plain(self, batch: list[PlainSend], signals: int) -> None:
        number, note = self._around.number, self._sent.append
        numbers = [number() for _ in batch]
        taken = _CHAIN.post_plain(self.qp, numbers, batch, signals)
        for mine, send in zip(numbers[:taken], batch, strict=False):
            opcode, signaled = OPCODES[send[2]][1], bool((send[3] | signals) & _SIGNALED)
            note(Sent(mine, send[0], opcode, signaled, 0, (Sge._make(send[7:]),)))
        if taken < len(batch):
            self._part_taken(taken)
            self._refuse([send[0] for send in batch[taken:]], int(WcStatus.LOC_QP_OP_ERR))

    def _part_taken(self, taken: int) -> None:
        if taken:
            # The host would not tell when these are done: it was to do so of the batch's last.
            self._stop()

    def _send_batch(self) -> bool:
        """Hand one batch to the host; true when there may be another."""
        room = min(self._send_room - len(self._sent), BATCH)
        batch: list[SendWr] = []
        refused: SendWr | None = None
        opcodes, pop = self._opcodes, self._owner.pop_send
        while len(batch) < room:
            wr = pop()
            if wr is None:
                break
            if opcodes.get(wr.opcode) is not type(wr.arm):
                refused = wr
                break
            batch.append(wr)
        taken, status = self._post_sends(batch) if batch else (0, 0)
        if taken < len(batch):
            rest = batch[taken:] + ([refused] if refused else [])
            self._refuse([wr.wr_id for wr in rest], status)
        elif refused is not None:
            status = (
                refused.arm.status if isinstance(refused.arm, Refused) else WcStatus.LOC_QP_OP_ERR
            )
            self._refuse([refused.wr_id], int(status))
        return bool(batch) and len(batch) == room and not self._flags.refused

    def _post_sends(self, batch: list[SendWr]) -> tuple[int, int]:
        """How many the host took, and the status of the first that it did not."""
        status = int(WcStatus.LOC_QP_OP_ERR)
        sends: list[HostSend] = []
        try:
            for wr in batch:
                sends.append(self._host_send(wr))
        except BadWqe as e:
            status = e.status
        except BadGuestAddress:
            status = int(WcStatus.LOC_PROT_ERR)
        except BackendError as e:
            self._around.host_trouble(e)
        if not sends:
            return 0, status
        sends[-1] = sends[-1]._replace(signaled=True)  # frees the slots of those before it
        taken = _CHAIN.post(self.qp, sends)
        for send, wr in zip(sends[:taken], batch, strict=False):
            self._sent.append(
                Sent(send.number, wr.wr_id, OPCODES[wr.opcode][1], wr.signaled, 0, send.sges)
            )
        if taken < len(sends):
            self._part_taken(taken)
        return taken, status

    def _host_send(self, wr: SendWr) -> HostSend:
        length = sum([sge.length for sge in wr.sges])
        if length > self._max_message or (length < ATOMIC_BYTES and isinstance(wr.arm, Atomic)):
            # rxe reports these as something else, or not at all.
            raise BadWqe(WcStatus.LOC_LEN_ERR, f"a message of {length} bytes")
        sges = self._around.registrar.translate(self.pd, wr.sges) if self.pd.dma_keys else wr.sges
        handle: Any = None
        if self._datagram:
            assert isinstance(wr.arm, Ud)
            handle = self._around.address_handle(self.pd, wr.arm)
        return HostSend(
            self._around.number(),
            wr.opcode,
            wr.send_flags,
            wr.signaled,
            wr.imm,
            sges,
            wr.arm,
            handle,
        )

    def _refuse(self, wr_ids: list[int], status: int) -> None:
        """Requests that the host does not get: the first fails, those behind it are flushed, and nothing follows."""
        for wr_id in wr_ids:
            self._sent.append(Sent(0, wr_id, 0, True, status))
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
            refused = self._receives.feed()
            if refused:
                self._flags.flushes.extend(refused)
                self._stop()
                self._flush()
        elif self.state == QpState.ERR:
            self._flush()

    def _flush(self) -> None:
        """In ERR: complete what never reached the host, once the host has given back what did."""
        self._settle_sent()
        more = not self._sent and self._flush_sends()
        if self.srq is None and not self._receives.posted:
            while self._flags.flushes:
                wr_id, status = self._flags.flushes.popleft()
                self._owner.complete_recv(
                    Completion(wr_id, status, int(WcOpcode.RECV)), solicited=True
                )
            more = self._flush_receives() or more
        if more:
            self._around.flush_later(self)

    def _flush_sends(self) -> bool:
        """A turn of it; true when there may be more."""
        for _ in range(_TURN):
            wr = self._owner.pop_send()
            if wr is None:
                return False
            self._owner.complete_send(Completion(wr.wr_id, _FLUSHED, 0))
        return True

    def _flush_receives(self) -> bool:
        for _ in range(_TURN):
            wr = self._owner.pop_recv()
            if wr is None:
                return False
            self._owner.complete_recv(
                Completion(wr.wr_id, _FLUSHED, int(WcOpcode.RECV)), solicited=True
            )
        return True

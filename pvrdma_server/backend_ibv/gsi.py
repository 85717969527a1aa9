"""QP1 in software: the host's own QP1 belongs to the host's kernel.

Contract: the guest's ib_mad binds to it and its sends complete, but go nowhere until a relay carries them: `relay` is
called with every datagram when it is set; without, they are counted and logged once.
"""

from collections.abc import Callable
from typing import Any

import structlog

from pvrdma_server.abi.pvrdma_verbs import QpAttr, QpState
from pvrdma_server.abi.vmw_pvrdma_abi import WcOpcode, WcStatus
from pvrdma_server.backend import Completion, QpOwner, RecvWr, Refused, SendWr

QP1 = 1


class GsiQp:
    """QP1. Implements `backend.BackendQp`."""

    qpn = QP1

    def __init__(self, owner: QpOwner, on_destroy: Callable[["GsiQp"], None]) -> None:
        self.state = int(QpState.RESET)
        self.sends_dropped = 0
        self.relay: Callable[[SendWr], None] | None = None
        self._owner = owner
        self._on_destroy = on_destroy
        self._log: Any = structlog.get_logger(component="backend_ibv")

    def modify(self, attr: QpAttr, mask: int) -> None:
        """See `backend.BackendQp`."""
        self.state = attr.qp_state
        self.send_doorbell()
        self.recv_doorbell()

    def query(self, attr: QpAttr) -> QpAttr:
        """See `backend.BackendQp`."""
        return attr

    def send_doorbell(self) -> None:
        """See `backend.BackendQp`."""
        if self.state not in (QpState.RTS, QpState.ERR):
            return
        while (wr := self._owner.pop_send()) is not None:
            self._send(wr)

    def _send(self, wr: SendWr) -> None:
        status = int(WcStatus.SUCCESS)
        if self.state == QpState.ERR:
            status = int(WcStatus.WR_FLUSH_ERR)
        elif isinstance(wr.arm, Refused):
            status = wr.arm.status
        elif self.relay is not None:
            self.relay(wr)
        else:
            self._drop()
        if wr.signaled or status:
            self._owner.complete_send(Completion(wr.wr_id, status, int(WcOpcode.SEND)))

    def _drop(self) -> None:
        if not self.sends_dropped:
            self._log.warning(
                "gsi_send_dropped",
                why="no MAD relay is connected: rdma_cm cannot connect",
                once=True,
            )
        self.sends_dropped += 1

    def recv_doorbell(self) -> None:
        """See `backend.BackendQp`. Receives stay in the guest's ring until a datagram comes."""
        if self.state != QpState.ERR:
            return
        while (wr := self._owner.pop_recv()) is not None:
            self.complete_recv(
                wr, Completion(wr.wr_id, int(WcStatus.WR_FLUSH_ERR), int(WcOpcode.RECV))
            )

    def complete_recv(self, wr: RecvWr, wc: Completion) -> None:
        """Publish a receive's completion."""
        self._owner.complete_recv(wc._replace(wr_id=wr.wr_id), solicited=True)

    def destroy(self) -> None:
        """See `backend.BackendQp`."""
        self._on_destroy(self)

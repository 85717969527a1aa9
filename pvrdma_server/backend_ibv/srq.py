"""Shared receive queues on the host, fed from the guest's ring."""

from collections.abc import Callable
from typing import Any

from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr

from pvrdma_server.backend import SrqOwner
from pvrdma_server.backend_ibv.host import verb
from pvrdma_server.backend_ibv.memory import IbvPd, Registrar
from pvrdma_server.backend_ibv.requests import Parts
from pvrdma_server.errors import BackendError, BadGuestAddress


class IbvSrq:
    """A shared receive queue. Implements `backend.BackendSrq`.

    Attributes:
        held: receives taken from the guest's ring that no message has used yet: still posted, to the guest.
    """

    def __init__(
        self, pd: IbvPd, owner: SrqOwner, registrar: Registrar, number: Callable[[], int],
        *, max_wr: int, max_sge: int,
    ) -> None:  # fmt: skip
        self.pd = pd
        self.held = 0
        self.max_wr = max_wr
        self._owner = owner
        self._registrar = registrar
        self._number = number
        self._posted: dict[int, int] = {}
        self.on_destroy: Callable[[IbvSrq], None] | None = None
        with verb("ibv_create_srq"):
            self.srq: Any = SRQ(pd.pd, SrqInitAttr(SrqAttr(max_wr=max_wr, max_sge=max_sge)))

    def recv_doorbell(self) -> None:
        """See `backend.BackendSrq`. Feeds the host's queue as far as it has room."""
        while self.held < self.max_wr:
            self.held += 1
            wr = self._owner.pop_recv()
            if wr is None:
                self.held -= 1
                return
            number = self._number()
            self._posted[number] = wr.wr_id
            if wr.refused or not self._post(number, wr.sges):
                # No queue pair is its owner yet; the host's device would have refused to take it.
                self._forget(number)

    def _post(self, number: int, sges: Any) -> bool:
        parts = Parts()
        try:
            with verb("ibv_post_srq_recv"):
                self.srq.post_recv(parts.recv(number, self._registrar.translate(self.pd, sges)))
        except (BackendError, BadGuestAddress):
            return False
        finally:
            parts.close()
        return True

    def take(self, number: int) -> int | None:
        """The guest's id of a receive that has completed, or None if it is not of this queue."""
        if number not in self._posted:
            return None
        wr_id = self._posted[number]
        self._forget(number)
        check = getattr(self._owner, "check_limit", None)
        if check is not None:
            check()
        return wr_id

    def _forget(self, number: int) -> None:
        del self._posted[number]
        self.held -= 1

    def destroy(self) -> None:
        """See `backend.BackendSrq`."""
        if self.on_destroy is not None:
            self.on_destroy(self)
        with verb("ibv_destroy_srq"):
            self.srq.close()

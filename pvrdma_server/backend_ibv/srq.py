"""Shared receive queues on the host, fed from the guest's ring."""

from collections.abc import Callable
from typing import Any

from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr

from pvrdma_server.backend import SrqOwner
from pvrdma_server.backend_ibv.host import giving_back, verb
from pvrdma_server.backend_ibv.memory import IbvPd, Registrar
from pvrdma_server.backend_ibv.receives import Receives, Taken
from pvrdma_server.errors import BackendError


class IbvSrq:
    """A shared receive queue. Implements `backend.BackendSrq`."""

    def __init__(
        self, pd: IbvPd, owner: SrqOwner, registrar: Registrar, *, max_wr: int, max_sge: int,
        number: Callable[[], int], trouble: Callable[[BackendError], None],
    ) -> None:  # fmt: skip
        self.pd = pd
        self.max_wr = max_wr
        self._owner = owner
        self.on_destroy: Callable[[IbvSrq], None] | None = None
        with verb("ibv_create_srq"):
            self.srq: Any = SRQ(pd.pd, SrqInitAttr(SrqAttr(max_wr=max_wr, max_sge=max_sge)))
        self._receives = Receives(
            pd, self.srq, owner, registrar, room=max_wr, number=number, trouble=trouble
        )

    @property
    def held(self) -> int:
        """See `backend.BackendSrq`."""
        return len(self._receives.posted)

    def recv_doorbell(self) -> None:
        """See `backend.BackendSrq`. Feeds the host's queue as far as it has room."""
        # No queue pair owns what the host takes in no form: it is logged, and gone.
        self._receives.feed()
        self._owner.check_limit()

    def take(self, number: int) -> Taken | None:
        """As `Receives.take`."""
        taken = self._receives.take(number)
        if taken is not None:
            self._owner.check_limit()
        return taken

    def destroy(self) -> None:
        """See `backend.BackendSrq`."""
        if self.on_destroy is not None:
            self.on_destroy(self)
        with giving_back("ibv_destroy_srq"):
            self.srq.close()

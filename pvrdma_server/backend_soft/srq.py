"""A shared receive queue.

Contract: receives are taken from its owner one by one when a message needs one; their keys are
those of the SRQ's own protection domain.
"""

from collections.abc import Callable

from pvrdma_server.backend import SrqOwner
from pvrdma_server.backend_soft.context import RecvQueue
from pvrdma_server.backend_soft.memory import SoftPd


class SoftSrq:
    """A shared receive queue of the embedded backend."""

    __slots__ = ("_forget", "queue")

    def __init__(self, pd: SoftPd, owner: SrqOwner, forget: Callable[["SoftSrq"], None]) -> None:
        self.queue = RecvQueue(owner, pd)
        self._forget = forget

    @property
    def held(self) -> int:
        """See `backend.BackendSrq`: one that the message it was taken for did not use."""
        return int(self.queue.spare is not None)

    def recv_doorbell(self) -> None:
        """Nothing waits for receives here: senders that found none come again by their timers."""

    def destroy(self) -> None:
        """Give everything back."""
        self.queue.spare = None
        self._forget(self)

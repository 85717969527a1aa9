"""Receives on their way to the host: pulled out of a guest's ring, for a queue pair or for a shared receive queue.

A receive that cannot be posted as it is (the guest's WQE is malformed, or names memory that is not there) is posted as
one that no message can be written to, so that it fails when a message takes it, in its turn, as on hardware; and its
completion then carries the guest's own error.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcStatus
from pvrdma_server.backend import RecvWr
from pvrdma_server.backend_ibv.memory import IbvPd, Registrar
from pvrdma_server.backend_ibv.requests import BATCH, post_recvs
from pvrdma_server.errors import BackendError, BadGuestAddress

# No region has key 0.
_DEAD: Final = (Sge(0, 1, 0),)


class Source(Protocol):
    """Where receives come from."""

    def pop_recvs(self, most: int) -> list[RecvWr]:
        """Take some of the next posted receives, up to `most`; none only if there is none."""


class Taken(NamedTuple):
    """A receive that the host has completed, and why it was bound to fail (0: it was not)."""

    wr_id: int
    dead: int
    pd: IbvPd
    sges: tuple[Sge, ...]


class Receives:
    """The receives of one queue that the host holds, by their request number.

    Args:
        queue: the host's queue pair or SRQ, whose `post_recv` takes them.
        source: the guest's ring.
        room: how many the host's queue takes.
        number: gives a request number that is never given again.
        trouble: told of what the host refuses.
    """

    __slots__ = (
        "_dead",
        "_number",
        "_pd",
        "_queue",
        "_registrar",
        "_source",
        "_trouble",
        "posted",
        "room",
    )

    def __init__(
        self, pd: IbvPd, queue: Any, source: Source, registrar: Registrar, *,
        room: int, number: Callable[[], int], trouble: Callable[[BackendError], None],
    ) -> None:  # fmt: skip
        self._pd = pd
        self._queue = queue
        self._source = source
        self._registrar = registrar
        self._number = number
        self._trouble = trouble
        self._dead: dict[int, int] = {}
        self.posted: dict[int, RecvWr] = {}
        self.room = room

    def feed(self) -> list[tuple[int, int]]:
        """Post what the guest has, as far as the host has room.

        Returns:
            (wr_id, status) of those that the host does not take even as dead ones.
        """
        while True:
            batch = self._pull()
            rest = self._post(batch)
            if rest or len(batch) < BATCH:
                return rest

    def _post(self, batch: list[tuple[int, Sequence[Sge]]]) -> list[tuple[int, int]]:
        while batch:
            count = post_recvs(self._queue, batch)
            if count == len(batch):
                break
            number = batch[count][0]
            self._dead.setdefault(number, int(WcStatus.LOC_QP_OP_ERR))
            if not post_recvs(self._queue, [(number, _DEAD)]):
                self._trouble(
                    BackendError(errno.EIO, "ibv_post_recv", "the host takes no receives")
                )
                return [
                    (
                        self.posted.pop(number).wr_id,
                        self._dead.pop(number, int(WcStatus.LOC_QP_OP_ERR)),
                    )
                    for number, _ in batch[count:]
                ]
            batch = batch[count + 1 :]
        return []

    def _pull(self) -> list[tuple[int, Sequence[Sge]]]:
        batch: list[tuple[int, Sequence[Sge]]] = []
        room = min(self.room - len(self.posted), BATCH)
        while len(batch) < room and (wrs := self._source.pop_recvs(room - len(batch))):
            for wr in wrs:
                number = self._number()
                self.posted[number] = wr
                batch.append((number, self._elements(number, wr)))
        return batch

    def _elements(self, number: int, wr: RecvWr) -> Sequence[Sge]:
        status = wr.refused
        if not status:
            try:
                return self._registrar.translate(self._pd, wr.sges)
            except BackendError as e:
                self._trouble(e)
            except BadGuestAddress:
                pass  # the guest's fault; its completion says so
            status = int(WcStatus.LOC_PROT_ERR)
        self._dead[number] = status
        return _DEAD

    def take(self, number: int) -> Taken | None:
        """A receive that has completed; None if it is none of ours."""
        wr = self.posted.pop(number, None)
        if wr is None:
            return None
        return Taken(wr.wr_id, self._dead.pop(number, 0) if self._dead else 0, self._pd, wr.sges)

    def give_up(self) -> list[RecvWr]:
        """What is posted now, which the host will not complete or whose completions are stale; it is forgotten."""
        given = list(self.posted.values())
        self.posted.clear()
        self._dead.clear()
        return given

"""What the device tells the guest by itself: asynchronous events, completion notifications, interrupts.

Contract: nothing is raised before `flush`, which publishes what the two device rings take and raises each vector once
for the whole batch. What a full or unmapped ring does not take waits, within a limit.

Source: drivers/infiniband/hw/vmw_pvrdma/pvrdma_main.c pvrdma_intr0_handler, pvrdma_intr1_handler, pvrdma_intrx_handler.
"""

from collections import deque
from typing import Final, Protocol

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import IntrCause, IntrVector
from pvrdma_server.errors import BadGuestAddress, GuestError
from pvrdma_server.journal import Journal
from pvrdma_server.objects import Cq
from pvrdma_server.rings import ProducerRing

# Events that wait for space in a ring that the guest does not drain.
MAX_WAITING: Final = 4096
IMR_NOTHING: Final = 0xFFFF_FFFF


class InterruptSink(Protocol):
    """Where interrupts go."""

    def trigger(self, vector: int) -> bool:
        """Raise an MSI-X vector (`IntrVector`); false when the guest has not enabled it."""


class Reports:
    """The two device rings, and the interrupts, of one device.

    Attributes:
        imr: the interrupt mask register: all or nothing.
    """

    def __init__(self, interrupts: InterruptSink, journal: Journal) -> None:
        self.imr = 0
        self._icr = 0
        self._interrupts = interrupts
        self._journal = journal
        self._async_ring: ProducerRing | None = None
        self._cq_ring: ProducerRing | None = None
        self._vectors: set[int] = set()
        self._events: deque[bytes] = deque()
        # Each CQ once: a guest that arms without draining its ring must not fill our memory.
        self._cqs: dict[int, None] = {}

    def start(self, async_ring: ProducerRing, cq_ring: ProducerRing) -> None:
        """The driver has published its rings."""
        self._async_ring, self._cq_ring = async_ring, cq_ring

    def reset(self) -> None:
        """Forget the driver's rings and everything that waits."""
        self._async_ring = self._cq_ring = None
        self.imr = self._icr = 0
        self._vectors.clear()
        self._events.clear()
        self._cqs.clear()

    def take_icr(self) -> int:
        """The interrupt cause register, cleared by reading."""
        value, self._icr = self._icr, 0
        return value

    def event(self, event: int, info: int) -> None:
        """Queue an asynchronous event."""
        self._journal.counters.async_events += 1
        if len(self._events) >= MAX_WAITING:
            self._journal.counters.events_dropped += 1
        else:
            self._events.append(api.EQE.pack(api.Eqe(int(event), info)))

    def notify(self, cq: Cq) -> None:
        """Queue a completion notification."""
        self._cqs[cq.handle] = None

    def forget(self, cq: Cq) -> None:
        """The CQ is gone."""
        self._cqs.pop(cq.handle, None)

    def response(self) -> None:
        """The driver waits for the answer of a command.

        Without MSI-X it reads ICR, and takes nothing but exactly RESPONSE for the answer.
        """
        self._icr = IntrCause.RESPONSE
        self._vectors.add(IntrVector.RESPONSE)

    @property
    def waiting(self) -> bool:
        """Whether something waits for ring space, which the guest frees without a doorbell."""
        return bool(self._events or self._cqs)

    def flush(self) -> None:
        """Publish what the rings take and raise the interrupts."""
        if self._events and self._drain(self._events, self._async_ring, "async_ring"):
            self._vectors.add(IntrVector.ASYNC)
        if self._cqs and self._publish_cqs():
            self._vectors.add(IntrVector.CQ)
        if self._vectors and self.imr != IMR_NOTHING:
            for vector in sorted(self._vectors):
                self._journal.counters.interrupts += 1
                self._interrupts.trigger(vector)
            self._vectors.clear()

    def _publish_cqs(self) -> bool:
        waiting = deque(api.CQNE.pack(api.Cqne(handle)) for handle in self._cqs)
        published = self._drain(waiting, self._cq_ring, "cq_ring")
        for handle in list(self._cqs)[: len(self._cqs) - len(waiting)]:
            del self._cqs[handle]
        return published

    def _drain(self, waiting: deque[bytes], ring: ProducerRing | None, name: str) -> bool:
        """Publish from the left what the ring takes; true when something was published."""
        published = False
        if ring is None:
            waiting.clear()
            return published
        try:
            while waiting and ring.push_untrusted(waiting[0]):
                waiting.popleft()
                published = True
        except BadGuestAddress:
            pass  # unmapped at the moment: it waits
        except GuestError as e:
            self._journal.guest_error(name, e)
            waiting.clear()
        return published

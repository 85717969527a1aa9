"""Which interrupt goes out for a vector: MSI-X or INTx, now or at unmask.

Contract: no I/O of its own; `fire` does it. A vector raised while masked stays pending and goes out at unmask, so none
is lost. libvfio-user keeps one table of eventfds for INTx and MSI-X: what is armed there belongs to the mode the client
last set, and index 0 is INTx's when MSI-X is off.
"""

from collections.abc import Callable

from pvrdma_server.vfio_user.model import VfioCounters
from pvrdma_server.vfio_user.pci_config import ConfigSpace


class Interrupts:
    """The interrupt state of one device.

    Args:
        config: tells MSI-X on or off, INTx forbidden.
        fire: signals the client's eventfd of a vector; False where there is none.
        counters: `irq_triggered`, `irq_masked`, `irq_unarmed`.
    """

    def __init__(
        self, config: ConfigSpace, fire: Callable[[int], bool], counters: VfioCounters
    ) -> None:
        self._config = config
        self._fire = fire
        self._counters = counters
        self._masked: set[tuple[bool, int]] = set()
        self._pending: set[tuple[bool, int]] = set()

    def trigger(self, vector: int) -> bool:
        """Raise `vector`. False when the guest has nothing armed there."""
        msix = self._config.msix_enabled
        if (msix, vector) in self._masked:
            self._pending.add((msix, vector))
            self._counters.irq_masked += 1
            return True
        if (msix or (vector == 0 and not self._config.intx_disabled)) and self._fire(vector):
            self._counters.irq_triggered += 1
            return True
        self._counters.irq_unarmed += 1
        return False

    def set_mask(self, start: int, count: int, *, msix: bool, masked: bool) -> None:
        """The client masks or unmasks vectors [start, start + count)."""
        vectors = {(msix, vector) for vector in range(start, start + count)}
        if masked:
            self._masked |= vectors
            return
        self._masked -= vectors
        due = vectors & self._pending
        self._pending -= due
        for _, vector in sorted(due):
            self.trigger(vector)

    def reset(self) -> None:
        """Nothing masked, nothing pending."""
        self._masked.clear()
        self._pending.clear()

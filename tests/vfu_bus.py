"""The driver-side fake's bus over a vfio-user socket: a guest on a real server process."""

import os
import select
from types import TracebackType
from typing import Self

from guest_driver import Driver
from guest_ram import GuestRam
from vfu_client import IRQ_MSIX, VfuClient

VECTORS = 3
_COMMAND_MEMORY_AND_MASTER = 0x6
# How long one `wait` sleeps for an interrupt; a guest looks at its rings again after it.
_WAIT_S = 0.02


class VfuBus:
    """One client of a server. Implements `guest_driver.Bus`.

    Args:
        path: the server's socket.
        ram: the guest's memory, mapped at the device.
    """

    def __init__(self, path: str, ram: GuestRam | None = None, *, timeout_s: float = 30.0) -> None:
        self.ram = ram or GuestRam(memfd=True)
        self.client = VfuClient(path, timeout_s=timeout_s)
        self._eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(VECTORS)]
        self._poll = select.poll()
        for eventfd in self._eventfds:
            self._poll.register(eventfd, select.POLLIN)
        self.map_ram()
        self.client.arm(IRQ_MSIX, 0, self._eventfds)
        self.client.enable_msix()
        self.client.set_command(_COMMAND_MEMORY_AND_MASTER)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def boot(self) -> Driver:
        """Load the driver."""
        return Driver(self, self.ram).probe()

    def map_ram(self) -> None:
        self.client.dma_map(self.ram.iova, self.ram.size, fd=self.ram.fd)

    def unmap_ram(self) -> None:
        self.client.dma_unmap(self.ram.iova, self.ram.size)

    def close(self) -> None:
        """Hang up, as QEMU does when it ends."""
        self.client.close()
        for eventfd in self._eventfds:
            os.close(eventfd)

    # --- guest_driver.Bus ------------------------------------------------------------------------------------------

    def read32(self, bar: int, offset: int) -> int:
        return self.client.read_u32(bar, offset)

    def write32(self, bar: int, offset: int, value: int) -> None:
        self.client.write_u32(bar, offset, value)

    def take_interrupts(self) -> set[int]:
        raised = set()
        for vector, eventfd in enumerate(self._eventfds):
            try:
                os.eventfd_read(eventfd)
                raised.add(vector)
            except BlockingIOError:
                continue
        return raised

    def wait(self) -> bool:
        """Sleep until an interrupt comes, a moment at most: the device works by itself."""
        self._poll.poll(1000 * _WAIT_S)
        return True

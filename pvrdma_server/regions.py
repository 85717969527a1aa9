"""BAR1 registers and BAR2 doorbells: bytes in, device calls out.

Contract: any access of any size at any offset is answered; reads outside the registers are zeros. A register is read
and written in whole, aligned 32-bit words (a 64-bit store is two words, low first, as PCI would split it); anything
else is counted as a guest error and changes nothing.

BAR2 holds `max_uar` doorbell pages and behind them, in its upper half, a page that a client may map: QEMU stops posting
writes as soon as any region has such a page, and the driver needs its writes done when they return (it reads the
capabilities from memory right after DSRHIGH).
"""

import struct
from typing import Final

from pvrdma_server.abi.pvrdma_dev_api import PciResource
from pvrdma_server.device import PvrdmaDevice
from pvrdma_server.errors import BadHandle
from pvrdma_server.guest_memory import PAGE_SHIFT, PAGE_SIZE

REGISTERS_SIZE: Final = PAGE_SIZE
_WORD: Final = struct.Struct("<I")
_UAR_REGISTERS: Final = PAGE_SIZE - 1


def uar_bar_size(max_uar: int) -> int:
    """Bytes of BAR2: the doorbell pages, and as much again for the page that is mapped."""
    return 2 * max_uar * PAGE_SIZE


class Regions:
    """The memory BARs of one device."""

    def __init__(self, device: PvrdmaDevice) -> None:
        self._device = device
        self._uar_size = device.config.max_uar * PAGE_SIZE

    def bar_read(self, bar: int, offset: int, length: int) -> bytes:
        """`length` bytes at `offset` of a BAR. Doorbells are write-only and read as zeros."""
        if bar != PciResource.REG or offset % 4 or length % 4:
            return bytes(length)
        words = (self._device.read_register(at) for at in range(offset, offset + length, 4))
        return b"".join(_WORD.pack(word) for word in words)

    def bar_write(self, bar: int, offset: int, data: bytes) -> None:
        """Store `data` at `offset` of a BAR; what it starts is done on return."""
        if offset % 4 or len(data) % 4 or len(data) > 8:
            self._device.guest_error(
                "register", BadHandle(f"write of {len(data)} bytes at {offset:#x} of BAR{bar}")
            )
            return
        for (value,) in _WORD.iter_unpack(data):
            if bar == PciResource.REG:
                self._device.write_register(offset, value)
            elif bar == PciResource.UAR and offset < self._uar_size:
                self._device.doorbell(offset >> PAGE_SHIFT, offset & _UAR_REGISTERS, value)
            offset += 4

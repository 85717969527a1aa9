"""PCI configuration space and MSI-X table as bytes with write masks.

Contract: pure memory, no I/O. Every access the PCI specification allows succeeds, whatever its size and alignment, and
writes change only what the specification lets software change: guests (and QEMU) write read-only fields and reserved
bits as a matter of course, and an error reply would only fill logs.

Offsets are in bytes from the start of the space, integers little-endian.
Source: linux/pci_regs.h (PCI_COMMAND, PCI_BASE_ADDRESS_0, PCI_MSIX_FLAGS, PCI_MSIX_ENTRY_SIZE).
"""

from collections.abc import Iterable
from typing import NamedTuple

CONFIG_SIZE = 256
COMMAND = 0x04
COMMAND_MASTER = 0x0004
COMMAND_INTX_DISABLE = 0x0400
# IO, MEMORY, MASTER, INVALIDATE, PARITY, SERR, FAST_BACK, INTX_DISABLE
_COMMAND_WRITABLE = 0x0757
_REVISION = 0x08
_CACHE_LINE_SIZE = 0x0C
_LATENCY_TIMER = 0x0D
_BASE_ADDRESS_0 = 0x10
_BAR_COUNT = 6
_MEM_TYPE_64 = 0x4
_INTERRUPT_LINE = 0x3C
_MSIX_CAP_ID = 0x11
_MSIX_FLAGS = 2
_MSIX_FLAGS_WRITABLE = 0xC000
_MSIX_ENABLE = 0x8000
_MSIX_ENTRY_SIZE = 16
_MSIX_VECTOR_CTRL = 12

MSIX_BAR = 0
MSIX_BAR_SIZE = 0x4000
MSIX_PBA_OFFSET = 0x1000


class BarSize(NamedTuple):
    """What configuration space must know of a memory BAR: index, power-of-two size in bytes, width."""

    index: int  # type: ignore[assignment]
    size: int
    is_64bit: bool


def msix_capability(vectors: int) -> bytes:
    """The MSI-X capability: table at the start of BAR 0, pending bits at `MSIX_PBA_OFFSET` of it."""
    words = (_MSIX_CAP_ID | (vectors - 1) << 16, MSIX_BAR, MSIX_PBA_OFFSET | MSIX_BAR)
    return b"".join(word.to_bytes(4, "little") for word in words)


class ConfigSpace:
    """A conventional PCI header with an MSI-X capability.

    Args:
        raw: 256 writable bytes that already hold ids, class and capabilities; they become the power-on state.
        bars: the memory BARs; every other BAR register reads 0.
        msix_offset: where the MSI-X capability starts.
        revision: the revision id.
    """

    def __init__(
        self, raw: memoryview, bars: Iterable[BarSize], *, msix_offset: int, revision: int
    ) -> None:
        self._raw = raw
        self._writable = bytearray(CONFIG_SIZE)
        self._msix_flags = msix_offset + _MSIX_FLAGS
        raw[_REVISION] = revision
        raw[_BASE_ADDRESS_0 : _BASE_ADDRESS_0 + 4 * _BAR_COUNT] = bytes(4 * _BAR_COUNT)
        self._allow(COMMAND, 2, _COMMAND_WRITABLE)
        self._allow(self._msix_flags, 2, _MSIX_FLAGS_WRITABLE)
        for offset in (_CACHE_LINE_SIZE, _LATENCY_TIMER, _INTERRUPT_LINE):
            self._allow(offset, 1, 0xFF)
        for bar in bars:
            self._declare(bar)
        self._power_on = bytes(raw)

    def _declare(self, bar: BarSize) -> None:
        offset = _BASE_ADDRESS_0 + 4 * bar.index
        width = 8 if bar.is_64bit else 4
        self._raw[offset] = _MEM_TYPE_64 if bar.is_64bit else 0
        # What reads back after writing all ones tells the size.
        self._allow(offset, width, ((1 << 8 * width) - bar.size) & ~0xF)

    def _allow(self, offset: int, width: int, mask: int) -> None:
        self._writable[offset : offset + width] = mask.to_bytes(width, "little")

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`; the caller checked the bounds."""
        return bytes(self._raw[offset : offset + length])

    def write(self, offset: int, data: bytes) -> None:
        """Store the writable bits of `data` at `offset`; the caller checked the bounds."""
        for position, value in enumerate(data, offset):
            mask = self._writable[position]
            self._raw[position] = self._raw[position] & ~mask | value & mask

    def reset(self) -> None:
        """Back to the power-on state: no bus mastering, MSI-X off, BARs unassigned."""
        self._raw[:] = self._power_on

    @property
    def bus_master(self) -> bool:
        """Whether the device may do DMA and interrupts."""
        return bool(self._raw[COMMAND] & COMMAND_MASTER)

    @property
    def intx_disabled(self) -> bool:
        """Whether the guest forbade INTx."""
        return bool(self._raw[COMMAND + 1] & COMMAND_INTX_DISABLE >> 8)

    @property
    def msix_enabled(self) -> bool:
        """Whether the guest switched MSI-X on."""
        return bool(self._raw[self._msix_flags + 1] & _MSIX_ENABLE >> 8)


class MsixBar:
    """BAR 0: the MSI-X table, which is plain memory to us (QEMU routes the vectors), and its pending bits, always 0."""

    def __init__(self, vectors: int, size: int = MSIX_BAR_SIZE) -> None:
        self._table_size = vectors * _MSIX_ENTRY_SIZE
        self._bytes = bytearray(size)
        self.reset()

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`; the caller checked the bounds."""
        return bytes(self._bytes[offset : offset + length])

    def write(self, offset: int, data: bytes) -> None:
        """Store what falls into the table; the rest is read-only."""
        kept = data[: max(0, self._table_size - offset)]
        self._bytes[offset : offset + len(kept)] = kept

    def reset(self) -> None:
        """Every vector masked, no address."""
        self._bytes[: self._table_size] = bytes(self._table_size)
        for entry in range(0, self._table_size, _MSIX_ENTRY_SIZE):
            self._bytes[entry + _MSIX_VECTOR_CTRL] = 1

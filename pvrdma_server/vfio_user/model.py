"""What the device behind the socket looks like to this package, and what this package counts and says.

Contract: values and Protocols only; no I/O beyond the logger.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

# Stops unlimited memory where messages have unlimited variety.
_MAX_LOG_KINDS: Final = 128
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


class PciIdentity(NamedTuple):
    """The read-only ids of configuration space; `class_code` has 24 bits."""

    vendor_id: int
    device_id: int
    subsystem_vendor_id: int
    subsystem_id: int
    class_code: int
    revision: int


class MmapArea(NamedTuple):
    """A page-aligned part of a BAR (bytes) that the client may map instead of sending messages."""

    offset: int
    length: int


class Bar(NamedTuple):
    """A memory BAR of a power-of-two size in bytes.

    `fd` (it stays yours) backs the `mmap_areas` at the same offsets. One area at most: QEMU accepts one descriptor per
    region, and libvfio-user sends one per area.
    """

    index: int  # type: ignore[assignment]
    size: int
    fd: int | None
    mmap_areas: tuple[MmapArea, ...]
    is_64bit: bool


class ResetReason(Enum):
    """Why the device is reset: by the client, because the client is gone, or by a PCI function level reset."""

    DEVICE = "device"
    LOST_CONNECTION = "lost_connection"
    PCI = "pci"


class DeviceModel(Protocol):
    """The device behind the BARs. BAR 0 (MSI-X) and configuration space are not its business.

    A GuestError from `dma_map` refuses the region; any other exception from any method ends the server.
    """

    def bar_read(self, bar: int, offset: int, length: int) -> bytes:
        """Exactly `length` bytes; offset and length are within the BAR, but of any size and alignment."""

    def bar_write(self, bar: int, offset: int, data: bytes) -> None:
        """As `bar_read`."""

    def dma_map(self, iova: int, length: int, view: memoryview | None, *, writable: bool) -> None:
        """[iova, iova + length) became guest memory; no view where it cannot be mapped."""

    def dma_unmap(self, iova: int, length: int) -> None:
        """A region that `dma_map` accepted is gone; views may be kept, but show old memory from now on."""

    def reset(self, reason: ResetReason) -> None:
        """Back to the power-on state."""

    def bus_master_changed(self, enabled: bool) -> None:
        """The guest allowed or forbade DMA and interrupts; told before `reset` where a reset forbids it."""


@dataclass(slots=True)
class VfioCounters:
    """What happened since the start."""

    messages: int = 0
    attaches: int = 0
    disconnects: int = 0
    refused_clients: int = 0
    failed_attaches: int = 0
    protocol_errors: int = 0
    resets: int = 0
    dma_maps: int = 0
    dma_unmaps: int = 0
    dma_unusable: int = 0
    irq_triggered: int = 0
    irq_masked: int = 0
    irq_unarmed: int = 0
    callback_errors: int = 0
    logs_suppressed: int = 0


class Reporter:
    """Logs what a guest or client can cause at will: once per kind of message, then only counted.

    Args:
        logger: a structlog logger.
        counters: `logs_suppressed` counts the repetitions.
    """

    def __init__(self, logger: Any, counters: VfioCounters) -> None:
        self._log = logger
        self._counters = counters
        self._seen: set[tuple[str, str]] = set()

    def __call__(self, level: str, event: str, **values: object) -> None:
        """Log `event` at `level` unless its like was logged before; numbers in strings do not make a difference."""
        kind = (event, " ".join(_NUMBER.sub("#", v) for v in values.values() if isinstance(v, str)))
        if kind in self._seen or len(self._seen) >= _MAX_LOG_KINDS:
            self._counters.logs_suppressed += 1
            return
        self._seen.add(kind)
        getattr(self._log, level)(event, **values)

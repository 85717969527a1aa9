"""vfio-user: the PCI device that QEMU sees, through libvfio-user.

Contract: `library.py` is the only importer of the cffi module; ints, bytes and memoryviews go out, never ffi. One
thread (trio's) calls everything here, since libvfio-user is not thread-safe. The device model is called synchronously,
in the order of the client's messages, and between two of them it is quiet. An exception of the model is our bug (but
for a GuestError of `dma_map`): it leaves through `VfioUserContext.serve`.

Read `context.py` first (clients, one after the other), then `library.py` (the device as libvfio-user holds it);
`connection.py`, `client_memory.py`, `interrupts.py` and `pci_config.py` each do one thing and know nothing of the rest.
"""

from pvrdma_server.vfio_user.context import VfioUserContext
from pvrdma_server.vfio_user.model import (
    Bar,
    DeviceModel,
    MmapArea,
    PciIdentity,
    ResetReason,
    VfioCounters,
)

__all__ = [
    "Bar",
    "DeviceModel",
    "MmapArea",
    "PciIdentity",
    "ResetReason",
    "VfioCounters",
    "VfioUserContext",
]

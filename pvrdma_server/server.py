"""The composition root: one device, its backend, its sockets, and the trio tasks that serve them.

Contract: `run` returns when it was asked to stop (SIGTERM, SIGINT) and raises what would make going on wrong. Tasks:
*vfio-user* (requests in order, clients one after the other), *work* (the backend's queues, timers and completions) and
*status*. Doorbells are answered by the vfio-user task; what they started is finished by the work task.
"""

import os
import signal
import time
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import structlog
import trio

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.backend_soft import SoftBackend, SoftConfig
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.device import PvrdmaDevice
from pvrdma_server.guest_memory import PAGE_SIZE
from pvrdma_server.regions import REGISTERS_SIZE, Regions, uar_bar_size
from pvrdma_server.status import process_facts, serve_status
from pvrdma_server.vfio_user import Bar, MmapArea, PciIdentity, ResetReason, VfioUserContext

# The device's class: network controller, other. Drivers do not look at it. Source: QEMU's removed device.
PCI_CLASS: Final = 0x028000
# Bytes the work task copies before other tasks get their turn: about 100 us of memcpy.
WORK_BUDGET: Final = 1 << 20
# How often to look whether the guest has drained a full event ring (it does so without a doorbell).
RETRY_S: Final = 0.005


class ServerConfig(NamedTuple):
    """One server. `listen_fd` is a listening socket to use instead of `socket_path` (socket activation)."""

    socket_path: str | None
    listen_fd: int | None
    status_path: str | None
    device: DeviceConfig
    soft: SoftConfig


class Work:
    """A flag that says "there is something to do", for the work task to sleep on."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def wake(self) -> None:
        """Have the work task look, now or in a moment."""
        self._event.set()

    async def wait(self) -> None:
        """Return once `wake` was called since the last return."""
        await self._event.wait()
        self._event = trio.Event()


class Server:
    """Everything of one running server. Implements `vfio_user.DeviceModel` and `device.InterruptSink`."""

    def __init__(self, config: ServerConfig) -> None:
        self._work = Work()
        self._log: Any = structlog.get_logger(component="server")
        self.backend = SoftBackend(
            clock_ns=time.monotonic_ns, on_work=self._work.wake, config=config.soft
        )
        self.device = PvrdmaDevice(self.backend, self, config.device)
        self._regions = Regions(self.device)
        self._mmap_fd = os.memfd_create("pvrdma-uar", os.MFD_CLOEXEC)
        size = uar_bar_size(config.device.max_uar)
        os.ftruncate(self._mmap_fd, size)
        self._vfio = VfioUserContext(
            self,
            socket_path=config.socket_path,
            listen_fd=config.listen_fd,
            identity=PciIdentity(
                vendor_id=api.PCI_VENDOR_ID_VMWARE,
                device_id=api.PCI_DEVICE_ID_VMWARE_PVRDMA,
                subsystem_vendor_id=api.PCI_VENDOR_ID_VMWARE,
                subsystem_id=api.PCI_DEVICE_ID_VMWARE_PVRDMA,
                class_code=PCI_CLASS,
                revision=0,
            ),
            bars=(
                Bar(api.PciResource.REG, REGISTERS_SIZE, None, (), is_64bit=False),
                Bar(
                    api.PciResource.UAR,
                    size,
                    self._mmap_fd,
                    (MmapArea(size - PAGE_SIZE, PAGE_SIZE),),
                    is_64bit=True,
                ),
            ),
            msix_vectors=api.MAX_INTERRUPTS,
            logger=structlog.get_logger(component="vfio_user"),
        )

    def close(self) -> None:
        """Give everything back."""
        self._vfio.close()
        self.device.reset("server stops")
        self.backend.close()
        os.close(self._mmap_fd)

    # --- vfio_user.DeviceModel -------------------------------------------------------------------------------------

    def bar_read(self, bar: int, offset: int, length: int) -> bytes:
        """See `vfio_user.DeviceModel`."""
        return self._regions.bar_read(bar, offset, length)

    def bar_write(self, bar: int, offset: int, data: bytes) -> None:
        """See `vfio_user.DeviceModel`."""
        self._regions.bar_write(bar, offset, data)

    def dma_map(self, iova: int, length: int, view: memoryview | None, *, writable: bool) -> None:
        """See `vfio_user.DeviceModel`."""
        self.device.dma_map(iova, length, view, writable=writable)

    def dma_unmap(self, iova: int, length: int) -> None:
        """See `vfio_user.DeviceModel`."""
        self.device.dma_unmap(iova, length)

    def reset(self, reason: ResetReason) -> None:
        """See `vfio_user.DeviceModel`."""
        self.device.reset(reason.value)

    def bus_master_changed(self, enabled: bool) -> None:
        """See `vfio_user.DeviceModel`. A guest that starts another kernel says so in no other way."""
        if not enabled:
            self.device.reset("bus mastering off")

    def trigger(self, vector: int) -> bool:
        """See `device.InterruptSink`."""
        return self._vfio.trigger(vector)

    # --- tasks -----------------------------------------------------------------------------------------------------

    async def run(self, status_path: str | None) -> None:
        """Serve until SIGTERM or SIGINT."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_on_signal, nursery.cancel_scope)
            nursery.start_soon(self._work_task)
            if status_path is not None:
                nursery.start_soon(serve_status, status_path, self.snapshot)
            await nursery.start(self._vfio.serve)
            self._log.info("ready", pid=os.getpid())

    async def _stop_on_signal(self, scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                self._log.info("stopping", signal=signal.Signals(number).name)
                scope.cancel()
                return

    async def _work_task(self) -> None:
        while True:
            if self.device.progress(WORK_BUDGET):
                await trio.lowlevel.checkpoint()
                continue
            with trio.move_on_after(self._sleep_s()):
                await self._work.wait()

    def _sleep_s(self) -> float:
        deadline_ns = self.backend.next_deadline_ns()
        sleep_s = float("inf")
        if deadline_ns is not None:
            sleep_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        return min(sleep_s, RETRY_S) if self.device.waits_for_guest else sleep_s

    # --- status ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything there is to know from outside, as JSON values."""
        device = self.device
        return {
            "state": device.state.value,
            "driver_version": device.driver_version,
            "connected": self._vfio.connected,
            "objects": device.resources.counts(),
            "dma_regions": len(device.memory.regions),
            "gids": {
                index: {"gid": gid.gid.hex(), "type": gid.gid_type}
                for index, gid in sorted(device.resources.gids.items())
            },
            "device": asdict(device.counters),
            "vfio_user": asdict(self._vfio.counters),
            "process": process_facts(),
        }


async def serve(config: ServerConfig) -> None:
    """Run one server until it is asked to stop.

    Raises:
        ConfigError: what was asked for cannot be had.
        TransportError: libvfio-user or its socket cannot be set up.
    """
    server = Server(config)
    try:
        await server.run(config.status_path)
    finally:
        server.close()
        structlog.get_logger(component="server").info("stopped")

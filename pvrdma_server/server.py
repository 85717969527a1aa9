"""The composition root: one device, its backend, its sockets, and the trio tasks that serve them.

Contract: `run` returns when it was asked to stop (SIGTERM, SIGINT) and raises what would make going on wrong. Tasks:
*vfio-user* (requests in order, clients one after the other), *work* (the backend's queues, timers and completions) and
*status*. Doorbells are answered by the vfio-user task; what they started is finished by the work task.
"""

import math
import os
import signal
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
import trio

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.backend import HostBackend
from pvrdma_server.backend_soft import ShmFabric, SoftBackend, SoftConfig
from pvrdma_server.backend_soft.counters import Counters as SoftCounters
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.device import PvrdmaDevice
from pvrdma_server.errors import ConfigError
from pvrdma_server.gid_sync import GidSync, Policy, Pyroute2Netlink
from pvrdma_server.guest_memory import PAGE_SIZE
from pvrdma_server.journal import DeviceCounters
from pvrdma_server.regions import REGISTERS_SIZE, Regions, uar_bar_size
from pvrdma_server.status import process_facts, serve_status
from pvrdma_server.vfio_user import (
    Bar,
    MmapArea,
    PciIdentity,
    ResetReason,
    VfioCounters,
    VfioUserContext,
)
from pvrdma_server.watcher import make_watcher

# The device's class: network controller, other. Drivers do not look at it. Source: QEMU's removed device.
PCI_CLASS: Final = 0x028000
# Bytes the work task copies before other tasks get their turn: about 300 us of memcpy.
WORK_BUDGET: Final = 4 << 20
# How often to look whether the guest has drained a full event ring (it does so without a doorbell).
RETRY_NS: Final = 5_000_000
# How long a completion lies unconsumed before a process is told that it is there (mapped doorbells only): longer than a
# polling program takes to come round, shorter than anyone waits for an interrupt.
MODERATION_NS: Final = 100_000


class HostConfig(NamedTuple):
    """The host RDMA device to use instead of the embedded backend.

    Attributes:
        device: its name, as `ibv_devices` lists it.
        port: its port, from 1.
        node_guid: the guest device's, 8 bytes in wire order.
        gid_policy: whether the port's netdev may be given the guest's addresses.
        gid_marker: file that names the addresses given, for the start after a crash.
    """

    device: str
    port: int
    node_guid: bytes
    gid_policy: Policy
    gid_marker: Path | None


class FabricConfig(NamedTuple):
    """Where the embedded backends of one host meet: a folder, and users besides ours whose servers may."""

    folder: str
    uids: tuple[int, ...] = ()


class ServerConfig(NamedTuple):
    """One server. `listen_fd` is a listening socket to use instead of `socket_path` (socket activation).

    `host` chooses the backend over host verbs; None is the embedded one, which reaches the guests of other servers
    over `fabric`.
    """

    socket_path: str | None
    listen_fd: int | None
    status_path: str | None
    device: DeviceConfig
    soft: SoftConfig
    host: HostConfig | None = None
    fabric: FabricConfig | None = None


def open_host(config: HostConfig) -> HostBackend:
    """The backend over the host's RDMA device.

    Raises:
        ConfigError: pyverbs or the device is missing.
    """
    try:
        from pvrdma_server.backend_ibv import IbvBackend, IbvConfig
    except ImportError as e:
        raise ConfigError(
            f"--backend ibv needs pyverbs 60 or newer (Debian: python3-pyverbs): {e}"
        ) from e
    netlink = Pyroute2Netlink() if config.gid_policy is Policy.ADD else None
    keeper = GidSync(config.gid_policy, config.gid_marker, netlink)
    return IbvBackend(IbvConfig(config.device, config.port, config.node_guid), keeper)


def open_fabric(config: ServerConfig) -> ShmFabric | None:
    """Our place in the fabric, if there is one.

    Raises:
        ConfigError: the folder cannot be used.
    """
    if config.fabric is None:
        return None
    return ShmFabric(config.fabric.folder, config.soft.name, uids=config.fabric.uids)


def mmap_area(config: DeviceConfig) -> MmapArea:
    """The part of BAR2 that the client maps: the processes' doorbell pages, or a page that nobody uses.

    There is always one: its presence is what keeps QEMU from posting writes.
    """
    if config.mapped_doorbells:
        return MmapArea(PAGE_SIZE, (config.max_uar - 1) * PAGE_SIZE)
    return MmapArea(uar_bar_size(config.max_uar) - PAGE_SIZE, PAGE_SIZE)


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
        self._moderate_ns: int | None = None
        self._deadline_ns: int | None = None
        self._log: Any = structlog.get_logger(component="server")
        self._host = open_host(config.host) if config.host is not None else None
        self._fabric = open_fabric(config)
        self.backend = self._host or SoftBackend(
            clock_ns=time.monotonic_ns,
            fabric=self._fabric,
            on_work=self._work.wake,
            config=config.soft,
        )
        # With trapped doorbells the watcher watches nothing and is a clock with microseconds, which epoll lacks.
        self._watcher = make_watcher()
        if self._fabric is not None:
            self._fabric.yield_to(self._watcher.signalled)
        mapped = config.device.mapped_doorbells
        self.device = PvrdmaDevice(
            self.backend, self, config.device, self._watcher if mapped else None
        )
        if self._host is not None:
            self._host.on_event = self.device.async_event
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
                    (mmap_area(config.device),),
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
        if self._fabric is not None:
            self._fabric.close()
        self._watcher.close()
        os.close(self._mmap_fd)

    # --- vfio_user.DeviceModel -------------------------------------------------------------------------------------

    def bar_read(self, bar: int, offset: int, length: int) -> bytes:
        """See `vfio_user.DeviceModel`."""
        return self._regions.bar_read(bar, offset, length)

    def bar_write(self, bar: int, offset: int, data: bytes) -> None:
        """See `vfio_user.DeviceModel`."""
        self._regions.bar_write(bar, offset, data)
        if self.device.more_work:
            self._work.wake()
        else:
            self._set_deadline()

    def dma_map(self, iova: int, length: int, view: memoryview | None, *, writable: bool) -> None:
        """See `vfio_user.DeviceModel`."""
        self.device.dma_map(iova, length, view, writable=writable)
        if self._host is not None:
            self._host.memory_mapped()

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
            nursery.start_soon(self._watch_task)
            if self._host is not None:
                nursery.start_soon(self._host_task, self._host)
            if self._fabric is not None:
                nursery.start_soon(self._fabric_task, self._fabric)
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
            else:
                self._set_deadline()
                await self._work.wait()

    async def _watch_task(self) -> None:
        """Wakes for rings that have entries and for deadlines."""
        while True:
            await trio.lowlevel.wait_readable(self._watcher.fd)
            more = self.device.rings_fired(self._watcher.fired())
            self._deadline_ns = None
            now_ns = time.monotonic_ns()
            if self._moderate_ns is not None and now_ns >= self._moderate_ns:
                self._moderate_ns = None
                self.device.moderate()
            if more:
                self._work.wake()
            else:
                self._set_deadline()

    async def _host_task(self, host: HostBackend) -> None:
        """Wakes for the host device's completions and events."""
        while True:
            await trio.lowlevel.wait_readable(host.wait_fd)
            if self.device.progress(WORK_BUDGET):
                self._work.wake()
            else:
                self._set_deadline()

    async def _fabric_task(self, fabric: ShmFabric) -> None:
        """Wakes for what other servers sent, and for servers that come and go."""
        while True:
            with trio.move_on_after(fabric.timeout_s or math.inf):
                await trio.lowlevel.wait_readable(fabric.fd)
            fabric.ready()
            if self.device.progress(WORK_BUDGET):
                self._work.wake()
            else:
                self._set_deadline()

    def _set_deadline(self) -> None:
        now_ns = time.monotonic_ns()
        if self._moderate_ns is None and self.device.wants_moderation:
            self._moderate_ns = now_ns + MODERATION_NS
        deadlines = [self._moderate_ns, self.backend.next_deadline_ns()]
        if self.device.waits_for_guest:
            deadlines.append(now_ns + RETRY_NS)
        deadline_ns = min((d for d in deadlines if d is not None), default=None)
        if deadline_ns != self._deadline_ns:
            self._deadline_ns = deadline_ns
            self._watcher.set_deadline(deadline_ns)

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
            "device": _plain(device.counters),
            "backend": _plain(self.backend.counters)
            if isinstance(self.backend, SoftBackend)
            else {},
            "fabric": self._fabric.facts() if self._fabric is not None else None,
            "vfio_user": _plain(self._vfio.counters),
            "process": process_facts(),
        }


def _plain(counters: SoftCounters | DeviceCounters | VfioCounters) -> dict[str, Any]:
    """Counters as JSON values. Not `asdict`: before Python 3.12 it makes a Counter of a Counter's items."""
    values = {record.name: getattr(counters, record.name) for record in fields(counters)}
    return {
        name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()
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

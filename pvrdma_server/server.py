"""The composition root: one device, its backend, its sockets, and the trio tasks that serve them.

Contract: `run` returns when it was asked to stop (SIGTERM, SIGINT) and raises what would make going on wrong. Tasks:
*vfio-user* (requests in order, clients one after the other), *work* (the backend's queues, timers and completions),
*control* and *metrics*. Doorbells are answered by the vfio-user task; what they started is finished by the work task.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog
import trio

from pvrdma_server import __version__, logs
from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.backend import HostBackend
from pvrdma_server.backend_soft import ShmFabric, SoftBackend
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.device import PvrdmaDevice
from pvrdma_server.facts import (
    OBJECT_KINDS,
    gid_rows,
    object_facts,
    plain,
    port_facts,
    status_facts,
)
from pvrdma_server.gsi import Gsi
from pvrdma_server.guest_memory import PAGE_SIZE
from pvrdma_server.mad_relay import NoRelay
from pvrdma_server.parts import (
    ServerConfig,
    metrics_server,
    open_fabric,
    open_host,
    open_relay,
)
from pvrdma_server.regions import REGISTERS_SIZE, Regions, uar_bar_size
from pvrdma_server.status import RefusedRequest, process_facts, serve_control
from pvrdma_server.supervision import keep_alive, obey_signals
from pvrdma_server.systemd import Notifier, watchdog_s
from pvrdma_server.vfio_user import (
    Bar,
    MmapArea,
    PciIdentity,
    ResetReason,
    VfioUserContext,
)
from pvrdma_server.watcher import make_watcher

# The device's class: network controller, other. Drivers do not look at it. Source: QEMU's removed device.
PCI_CLASS: Final = 0x028000
# Bytes the work task copies before other tasks get their turn: about 300 us of memcpy.
WORK_BUDGET: Final = 4 << 20
# How long tasks that have nothing to do with guests wait at most, beside the time that the budget takes.
ATTEND_NS: Final = 1_000_000
# How often to look whether the guest has drained a full event ring (it does so without a doorbell).
RETRY_NS: Final = 5_000_000
# How long a completion lies unconsumed before a process is told that it is there (mapped doorbells only): longer than a
# polling program takes to come round, shorter than anyone waits for an interrupt.
MODERATION_NS: Final = 100_000
# Objects of a kind that the control socket shows unless asked for more, and at most: some ms of our time.
SHOWN_OBJECTS: Final = 256
MAX_SHOWN_OBJECTS: Final = 65536


def mmap_area(config: DeviceConfig) -> MmapArea:
    """The part of BAR2 that the client maps: the processes' doorbell pages, or a page that nobody uses.

    There is always one: its presence is what keeps QEMU from posting writes.
    """
    if config.mapped_doorbells:
        return MmapArea(PAGE_SIZE, (config.max_uar - 1) * PAGE_SIZE)
    return MmapArea(uar_bar_size(config.max_uar) - PAGE_SIZE, PAGE_SIZE)


class Work:
    """A flag that says "there is something to do", for the work task to sleep on.

    Attributes:
        held: somebody is at work and looks at `missed` afterwards, so that nobody need wake up.
    """

    def __init__(self) -> None:
        self._event = trio.Event()
        self.held = self.missed = False

    def wake(self) -> None:
        """Have the work task look, now or in a moment."""
        if self.held:
            self.missed = True
        else:
            self._event.set()

    async def wait(self) -> None:
        """Return once `wake` was called since the last return."""
        await self._event.wait()
        self._event = trio.Event()


class Server:
    """Everything of one running server. Implements `vfio_user.DeviceModel` and `device.InterruptSink`."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._started_s = time.monotonic()
        self._work = Work()
        self._turns = 0
        self._moderate_ns: int | None = None
        self._repeat_ns: int | None = None
        self._deadline_ns: int | None = None
        self._log: Any = structlog.get_logger(component="server")
        self._relay = open_relay(config)
        self._gsi = Gsi(self._relay or NoRelay())
        self._gsi.on_work = self._work.wake
        if self._relay is not None:
            self._relay.on_datagram = self._gsi.receive
        self._host = open_host(config.host, self._gsi) if config.host is not None else None
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
            self._fabric.yield_to(self._watcher)
        mapped = config.device.mapped_doorbells
        self.device = PvrdmaDevice(
            self.backend, self, config.device, self._watcher if mapped else None, clock_s=time.time
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
        if self._relay is not None:
            self._relay.close()
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

    async def run(self, environment: Mapping[str, str]) -> None:
        """Serve until SIGTERM or SIGINT. `environment` says whether a service manager wants to hear from us."""
        notifier, timeout_s = Notifier(environment), watchdog_s(environment)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey_signals, nursery.cancel_scope, notifier, self._config.reload)
            nursery.start_soon(self._work_task)
            nursery.start_soon(self._watch_task)
            if self._host is not None:
                nursery.start_soon(self._host_task, self._host)
            if self._fabric is not None:
                nursery.start_soon(self._fabric_task, self._fabric)
            if self._relay is not None:
                nursery.start_soon(self._relay.run)
            if self._config.status_path is not None:
                await nursery.start(serve_control, self._config.status_path, self.commands())
            if any(self._config.metrics):
                await nursery.start(metrics_server(), *self._config.metrics, self.snapshot)
            await nursery.start(self._vfio.serve)
            if timeout_s is not None:
                nursery.start_soon(
                    keep_alive,
                    notifier,
                    timeout_s,
                    lambda: self._turns,
                    self._work.wake,
                    self._line,
                )
            self._log.info(
                "ready", name=self._config.soft.name, version=__version__, pid=os.getpid()
            )
            notifier.ready()

    async def _work_task(self) -> None:
        while True:
            self._turns += 1
            if self._attend():
                await trio.lowlevel.checkpoint()
            else:
                await self._work.wait()

    async def _watch_task(self) -> None:
        """Wakes for rings that have entries and for deadlines."""
        while True:
            await trio.lowlevel.wait_readable(self._watcher.fd)
            if self._attend(self._watcher.fired()):
                self._work.wake()

    async def _host_task(self, host: HostBackend) -> None:
        """Wakes for the host device's completions and events."""
        while True:
            await trio.lowlevel.wait_readable(host.wait_fd)
            if self._attend():
                self._work.wake()

    async def _fabric_task(self, fabric: ShmFabric) -> None:
        """Wakes for what other servers sent, and for servers that come and go."""
        while True:
            with trio.move_on_after(fabric.timeout_s or math.inf):
                await trio.lowlevel.wait_readable(fabric.fd)
            if self._attend(first=fabric.ready):
                self._work.wake()

    def _attend(
        self, fired: Sequence[int] = (), *, first: Callable[[], None] | None = None
    ) -> bool:
        """Work as long as one thing leads to another, within `ATTEND_NS`; true when more is ready now.

        A way through trio costs as much as all the rest, so what comes meanwhile is looked at here.
        """
        until_ns = time.monotonic_ns() + ATTEND_NS
        watcher, device, work = self._watcher, self.device, self._work
        work.held = True
        watcher.attend()
        if first is not None:
            first()
        while True:
            device.rings_fired(fired)
            work.missed = False
            more = device.progress(WORK_BUDGET)
            now_ns = time.monotonic_ns()
            self._keep_time(now_ns)
            if now_ns >= until_ns or not watcher.look():
                break
            fired = watcher.fired()
        work.held = False
        more = more or work.missed or bool(watcher.signalled[0])
        if not more:
            self._set_deadline()
            watcher.leave()
        return more

    def _keep_time(self, now_ns: int) -> None:
        """Do what is due."""
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            self._deadline_ns = None
        if self._moderate_ns is not None and now_ns >= self._moderate_ns:
            self._moderate_ns = None
            self.device.moderate()
        if self._repeat_ns is not None and now_ns >= self._repeat_ns:
            self._repeat_ns = self.device.repeat(now_ns)

    def _set_deadline(self) -> None:
        now_ns = time.monotonic_ns()
        if self._moderate_ns is None and self.device.wants_moderation:
            self._moderate_ns = now_ns + MODERATION_NS
        if self.device.wants_repeat:
            self._repeat_ns = self.device.repeat(now_ns)
        deadlines = [self._moderate_ns, self._repeat_ns, self.backend.next_deadline_ns()]
        if self.device.waits_for_guest:
            deadlines.append(now_ns + RETRY_NS)
        deadline_ns = min((d for d in deadlines if d is not None), default=None)
        # An earlier one than is needed wakes us for nothing, once; to move it for every message costs more.
        if deadline_ns is not None and (
            self._deadline_ns is None or deadline_ns < self._deadline_ns
        ):
            self._deadline_ns = deadline_ns
            self._watcher.set_deadline(deadline_ns)

    # --- control ---------------------------------------------------------------------------------------------------

    def commands(self) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        """What the control socket can be asked."""
        return {
            "status": lambda _: self.snapshot(),
            "objects": self._objects,
            "log-level": _log_level,
        }

    def _line(self) -> str:
        """The server in a line, for the service manager."""
        client = "attached" if self._vfio.connected else "not attached"
        objects = self.device.resources
        return (
            f"QEMU {client}, device {self.device.state.value}, {len(objects.qps)} queue pairs, "
            f"{len(objects.gids)} GIDs"
        )

    def snapshot(self) -> dict[str, Any]:
        """The server in short, as JSON values."""
        soft = isinstance(self.backend, SoftBackend)
        return {
            "version": __version__,
            "name": self._config.soft.name,
            "backend_kind": "soft" if soft else "ibv",
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "log_level": logs.level(),
            "connected": self._vfio.connected,
            **status_facts(self.device),
            "port": port_facts(self.backend),
            "backend": plain(self.backend.counters)
            if isinstance(self.backend, SoftBackend)
            else {},
            "fabric": self._fabric.facts() if self._fabric is not None else None,
            "gsi": self._gsi.facts() if self._host is not None else None,
            "mad_relay": self._relay.facts() if self._relay is not None else None,
            "vfio_user": plain(self._vfio.counters),
            "process": process_facts(),
        }

    def _objects(self, request: dict[str, Any]) -> dict[str, Any]:
        """Objects of the kinds asked for, or of all; the guest's GIDs beside the host's."""
        limit = request.get("limit", SHOWN_OBJECTS)
        if type(limit) is not int or not 0 < limit <= MAX_SHOWN_OBJECTS:
            raise RefusedRequest(f'"limit" must be a number from 1 to {MAX_SHOWN_OBJECTS}')
        known = (*OBJECT_KINDS, "gids")
        kinds = request.get("kinds", known)
        if not isinstance(kinds, list | tuple) or not all(kind in known for kind in kinds):
            raise RefusedRequest(f'"kinds" must be an array, of {", ".join(known)}')
        reply = object_facts(self.device, limit, [kind for kind in kinds if kind != "gids"])
        if "gids" in kinds:
            host = self._host.gid_facts() if self._host is not None else {}
            reply["gids"] = gid_rows(self.device.resources.gids, host)
        return reply


def _log_level(request: dict[str, Any]) -> dict[str, Any]:
    """The level in force, after a change to "level" if that is given."""
    before = logs.level()
    level = request.get("level", before)
    if not isinstance(level, str) or level not in logs.LEVELS:
        raise RefusedRequest(f'"level" must be one of: {", ".join(logs.LEVELS)}')
    if level != before:
        logs.set_level(level)
        structlog.get_logger(component="server").warning("log_level", level=level, before=before)
    return {"log_level": level, "before": before}


async def serve(config: ServerConfig) -> None:
    """Run one server until it is asked to stop.

    Raises:
        ConfigError: what was asked for cannot be had.
        TransportError: libvfio-user or its socket cannot be set up.
    """
    server = Server(config)
    try:
        await server.run(os.environ)
    finally:
        server.close()
        structlog.get_logger(component="server").info("stopped")

"""The device as libvfio-user holds it: the only importer of the cffi module.

Contract: synchronous, and never blocks as long as a whole message waits whenever `run` is called (`connection.py` sees
to that). Callbacks never let an exception read as success: it is kept in `failure`, the client gets an error reply, and
the caller must stop.

The library's listening socket and its connections are replaced by ours underneath (`attach`, `adopt`): the numbers it
keeps stay the same, what they refer to does not.
"""

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple

from pvrdma_server._vfu import ffi, lib
from pvrdma_server.errors import GuestError, TransportError
from pvrdma_server.vfio_user import connection, pci_config
from pvrdma_server.vfio_user.client_memory import ClientMemory
from pvrdma_server.vfio_user.interrupts import Interrupts
from pvrdma_server.vfio_user.model import (
    Bar,
    DeviceModel,
    PciIdentity,
    Reporter,
    ResetReason,
    VfioCounters,
)

_MAX_BARS: Final = 6
_PROT_WRITE: Final = 2
_LOG_INFO: Final = 6
# By syslog level. The client causes nearly all of them, so an error of the library is a warning of ours.
_LOG_METHODS: Final = ("error", "error", "error", "warning", "warning", "info", "info", "debug")
_RESET_REASONS: Final = {
    lib.VFU_RESET_DEVICE: ResetReason.DEVICE,
    lib.VFU_RESET_LOST_CONN: ResetReason.LOST_CONNECTION,
    lib.VFU_RESET_PCI_FLR: ResetReason.PCI,
}


class _Region(NamedTuple):
    read: Callable[[int, int], bytes]
    write: Callable[[int, bytes], None]


def _error(function: str) -> TransportError:
    return TransportError(f"{function}: {os.strerror(ffi.errno)}")


class VfuDevice:
    """A PCI device in libvfio-user.

    Args:
        model: what the BARs, resets and memory maps go to.
        identity: PCI ids.
        bars: the memory BARs beside BAR 0.
        vectors: MSI-X vectors.
        report: rate-limited logging.
        counters: what happened.

    Attributes:
        connected: whether a client is attached.
        failure: the exception that a callback raised; the device must not go on.
        memory: the client's memory.

    Raises:
        TransportError: libvfio-user refuses the device.
    """

    def __init__(
        self,
        model: DeviceModel,
        identity: PciIdentity,
        bars: Sequence[Bar],
        vectors: int,
        *,
        report: Reporter,
        counters: VfioCounters,
    ) -> None:
        self.connected = False
        self.failure: BaseException | None = None
        self.memory = ClientMemory(report, counters)
        self._model = model
        self._report = report
        self._counters = counters
        self._bus_master = False
        self._incoming: tuple[int, int] | None = None
        self._firing = False
        self._msix_bar = pci_config.MsixBar(vectors)
        self._regions: dict[int, _Region] = {}
        self._ctx = _create_context()
        _devices[self._ctx] = self
        try:
            self._build(identity, (_MSIX_BAR, *bars), vectors)
        except BaseException:
            self.close()
            raise

    def _build(self, identity: PciIdentity, bars: Sequence[Bar], vectors: int) -> None:
        self._call("vfu_setup_log", lib.pvrdma_log, _LOG_INFO)
        self._call("vfu_pci_init", lib.VFU_PCI_TYPE_CONVENTIONAL, 0, identity.revision)
        lib.vfu_pci_set_id(self._ctx, *identity[:4])
        lib.vfu_pci_set_class(self._ctx, *identity.class_code.to_bytes(3, "big"))
        capability = ffi.from_buffer(pci_config.msix_capability(vectors))
        msix_offset = self._call("vfu_pci_add_capability", 0, 0, capability)
        self._set_callbacks(vectors)
        for bar in bars:
            self._set_bar(bar)
        self._call("vfu_realize_ctx")
        space = ffi.cast("char *", lib.vfu_pci_get_config_space(self._ctx))
        self._config = pci_config.ConfigSpace(
            memoryview(ffi.buffer(space, pci_config.CONFIG_SIZE)).cast("B"),
            [pci_config.BarSize(bar.index, bar.size, bar.is_64bit) for bar in bars],
            msix_offset=msix_offset,
            revision=identity.revision,
        )
        config = _Region(self._config.read, self._config.write)
        self._regions[lib.VFU_PCI_DEV_CFG_REGION_IDX] = config
        self._interrupts = Interrupts(self._config, self._fire, self._counters)
        self._listen_fd = lib.vfu_get_poll_fd(self._ctx)

    def _set_callbacks(self, vectors: int) -> None:
        lib.vfu_setup_device_quiesce_cb(self._ctx, ffi.addressof(lib, "pvrdma_quiesce"))
        self._call("vfu_setup_device_reset_cb", lib.pvrdma_reset)
        self._call("vfu_setup_device_dma", lib.pvrdma_dma_register, lib.pvrdma_dma_unregister)
        intx, msix = lib.VFU_DEV_INTX_IRQ, lib.VFU_DEV_MSIX_IRQ
        self._call("vfu_setup_device_nr_irqs", intx, 1)
        self._call("vfu_setup_device_nr_irqs", msix, vectors)
        self._call("vfu_setup_irq_state_callback", intx, lib.pvrdma_intx_state)
        self._call("vfu_setup_irq_state_callback", msix, lib.pvrdma_msix_state)
        # Configuration space is all ours: the library refuses PARITY, FAST_BACK and more with an error.
        index, callback = lib.VFU_PCI_DEV_CFG_REGION_IDX, lib.pvrdma_config
        flags = lib.VFU_REGION_FLAG_RW | lib.VFU_REGION_FLAG_ALWAYS_CB
        size = pci_config.CONFIG_SIZE
        self._call("vfu_setup_region", index, size, callback, flags, ffi.NULL, 0, -1, 0)

    def _set_bar(self, bar: Bar) -> None:
        index = bar.index
        if not 0 <= index < _MAX_BARS or index in self._regions:
            raise TransportError(f"BAR {index} does not exist or is taken")
        # libvfio-user sends the descriptor once per area; QEMU 11.1 accepts one per region and breaks off otherwise.
        if len(bar.mmap_areas) != (bar.fd is not None):
            raise TransportError(f"BAR {index}: one area to map with a descriptor, none without")
        areas = ffi.new("struct iovec[]", len(bar.mmap_areas))
        for area, (offset, length) in zip(areas, bar.mmap_areas, strict=True):
            area.iov_base, area.iov_len = ffi.cast("void *", offset), length
        backing = (ffi.NULL, 0, -1) if bar.fd is None else (areas, len(areas), bar.fd)
        callback = getattr(lib, f"pvrdma_bar{index}")
        flags = lib.VFU_REGION_FLAG_RW | lib.VFU_REGION_FLAG_MEM
        self._call("vfu_setup_region", index, bar.size, callback, flags, *backing, 0)
        if bar is _MSIX_BAR:
            self._regions[index] = _Region(self._msix_bar.read, self._msix_bar.write)
        else:
            read, write = self._model.bar_read, self._model.bar_write
            self._regions[index] = _Region(partial(read, index), partial(write, index))

    def _call(self, function: str, *arguments: Any) -> int:
        result: int = getattr(lib, function)(self._ctx, *arguments)
        if result < 0:
            raise _error(function)
        return result

    def attach(self, greeting: bytes) -> tuple[bytes, str]:
        """Have the library negotiate: its reply to the client's first message, and why it refused, or ""."""
        with connection.plant_connection(self._listen_fd) as planted:
            planted.send(greeting)
            refused = lib.vfu_attach_ctx(self._ctx) < 0
            why = os.strerror(ffi.errno) if refused else ""
            try:
                reply = planted.recv(connection.MAX_MESSAGE)
            except OSError:
                reply = b""
        self.connected = not refused
        return reply, why

    def adopt(self, fd: int) -> None:
        """After `attach`: talk to the client on a duplicate of `fd` from now on."""
        os.dup2(fd, lib.vfu_get_poll_fd(self._ctx), inheritable=False)

    def run(self, client_fd: int | None = None, dma_offset: int = 0) -> None:
        """Serve the one message that waits whole, or see the end of the connection.

        Args:
            client_fd: the descriptor that travels with a DMA_MAP; borrowed.
            dma_offset: its offset in that file, bytes.

        Raises:
            TransportError: the library lost the stream; `connected` still tells whether it knows.
        """
        self._incoming = None if client_fd is None else (client_fd, dma_offset)
        status = lib.vfu_run_ctx(self._ctx)
        error = ffi.errno
        self._incoming = None
        if status < 0:
            if error != errno.ENOTCONN:
                raise TransportError(f"libvfio-user: {os.strerror(error)}")
            self.connected = False
        elif self._config.bus_master != self._bus_master:
            try:
                self._tell_bus_master(self._config.bus_master)
            except BaseException as bug:  # as in a callback
                self.fail(bug)

    def fail(self, bug: BaseException) -> None:
        """Keep the first exception of the model for the caller of `run`."""
        self._counters.callback_errors += 1
        self.failure = self.failure or bug

    def _tell_bus_master(self, enabled: bool) -> None:
        self._bus_master = enabled
        self._model.bus_master_changed(enabled)

    @property
    def msix_enabled(self) -> bool:
        """Whether the guest switched MSI-X on."""
        return self._config.msix_enabled

    def trigger(self, vector: int) -> bool:
        """Raise an interrupt; False when the guest has nothing armed there."""
        return self._interrupts.trigger(vector)

    def _fire(self, vector: int) -> bool:
        if not self.connected:
            return False
        self._firing = True  # the library logs an error for each vector that is not armed
        failed = lib.vfu_irq_trigger(self._ctx, vector) < 0
        error = ffi.errno
        self._firing = False
        return (
            not failed or error == errno.EAGAIN
        )  # EAGAIN: the eventfd already counts to its limit

    def close(self) -> None:
        """Free the library's side; a client still attached is gone, as the model is told. May be called again."""
        ctx, self._ctx = self._ctx, ffi.NULL
        if ctx != ffi.NULL:
            lib.vfu_setup_log(ctx, ffi.NULL, 0)
            if not self.connected:  # the model has heard of the end
                lib.vfu_setup_device_reset_cb(ctx, ffi.NULL)
            self.connected = False
            lib.vfu_destroy_ctx(ctx)
            _devices.pop(ctx, None)

    # -- callbacks ---------------------------------------------------------------------------------------------

    def on_log(self, level: int, message: bytes) -> None:
        """A line of the library's log."""
        if not self._firing:
            self._report(
                _LOG_METHODS[level], "vfu.library", text=message.decode("utf-8", "replace")
            )

    def on_reset(self, reason: int) -> None:
        """The client resets the device, or is gone."""
        self._counters.resets += 1
        self._config.reset()
        self._msix_bar.reset()
        self._interrupts.reset()
        if self._bus_master:
            self._tell_bus_master(False)
        self._model.reset(_RESET_REASONS[reason])

    def on_map(self, iova: int, length: int, prot: int) -> None:
        """The client maps memory; the same region again is no news."""
        if not self.memory.begin(iova, length):
            return
        writable = bool(prot & _PROT_WRITE)
        view = self.memory.view(iova, length, self._incoming, writable=writable)
        try:
            self._model.dma_map(iova, length, view, writable=writable)
        except GuestError as error:
            self.memory.end(iova, length)
            self._report("warning", "vfu.dma_map_refused", error=str(error))

    def on_unmap(self, iova: int, length: int) -> None:
        """The client unmaps a region."""
        if self.memory.end(iova, length):
            self._model.dma_unmap(iova, length)

    def on_irq_state(self, start: int, count: int, *, msix: bool, masked: bool) -> None:
        """The client masks or unmasks vectors."""
        self._interrupts.set_mask(start, count, msix=msix, masked=masked)

    def on_access(self, region: int, buffer: Any, count: int, offset: int, is_write: bool) -> None:
        """A read fills `buffer`, a write takes from it."""
        read, write = self._regions[region]
        if is_write:
            write(offset, ffi.buffer(buffer, count)[:])
            return
        data = read(offset, count)
        if len(data) != count:
            raise ValueError(f"region {region}: {len(data)} bytes for a read of {count}")
        ffi.memmove(buffer, data, count)


_MSIX_BAR: Final = Bar(pci_config.MSIX_BAR, pci_config.MSIX_BAR_SIZE, None, (), is_64bit=False)
_devices: dict[Any, VfuDevice] = {}


def _create_context() -> Any:
    flags = lib.LIBVFIO_USER_FLAG_ATTACH_NB
    with connection.private_path() as path:
        name = path.encode()
        ctx = lib.vfu_create_ctx(lib.VFU_TRANS_SOCK, name, flags, ffi.NULL, lib.VFU_DEV_TYPE_PCI)
        error = _error("vfu_create_ctx")
    if ctx == ffi.NULL:
        raise error
    return ctx


def _on_error(
    _kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    # cffi's documented way to the callback's arguments.
    device = _devices.get(trace.tb_frame.f_locals.get("ctx")) if trace else None
    if device is not None:
        device.fail(value)
    ffi.errno = errno.EIO  # the library replies errno, and 0 would read as success


def _access(region: int) -> Callable[..., int]:
    def callback(ctx: Any, buffer: Any, count: int, offset: int, is_write: bool) -> int:
        _devices[ctx].on_access(region, buffer, count, offset, is_write)
        return count

    return callback


def _log(ctx: Any, level: int, message: Any) -> None:
    _devices[ctx].on_log(level, ffi.string(message))


def _reset(ctx: Any, reason: int) -> int:
    _devices[ctx].on_reset(reason)
    return 0


def _dma_register(ctx: Any, info: Any) -> None:
    iova = int(ffi.cast("uintptr_t", info.iova.iov_base))
    _devices[ctx].on_map(iova, info.iova.iov_len, info.prot)


def _dma_unregister(ctx: Any, info: Any) -> None:
    iova = int(ffi.cast("uintptr_t", info.iova.iov_base))
    _devices[ctx].on_unmap(iova, info.iova.iov_len)


def _intx_state(ctx: Any, start: int, count: int, masked: bool) -> None:
    _devices[ctx].on_irq_state(start, count, msix=False, masked=masked)


def _msix_state(ctx: Any, start: int, count: int, masked: bool) -> None:
    _devices[ctx].on_irq_state(start, count, msix=True, masked=masked)


def _export() -> None:
    with_result: dict[str, Callable[..., int]] = {
        f"pvrdma_bar{bar}": _access(bar) for bar in range(_MAX_BARS)
    }
    with_result["pvrdma_config"] = _access(lib.VFU_PCI_DEV_CFG_REGION_IDX)
    with_result["pvrdma_reset"] = _reset
    for name, function in with_result.items():
        ffi.def_extern(name=name, error=-1, onerror=_on_error)(function)
    without: dict[str, Callable[..., None]] = {
        "pvrdma_log": _log,
        "pvrdma_dma_register": _dma_register,
        "pvrdma_dma_unregister": _dma_unregister,
        "pvrdma_intx_state": _intx_state,
        "pvrdma_msix_state": _msix_state,
    }
    for name, callback in without.items():
        ffi.def_extern(name=name, onerror=_on_error)(callback)


_export()

"""The kernel driver up to the point where IB core takes over: probe, remove, command slot, device rings, link events.

Contract: does what drivers/infiniband/hw/vmw_pvrdma does, in its order, over a `Bus`; the very same code runs against
the device in this process and against a server behind a socket.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from guest_ram import PAGE, GuestRam, PageDir, RingWords

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.layout import Layout
from pvrdma_server.abi.pvrdma_dev_api import DeviceCtl, IntrVector, PciResource, Reg

RING_PAGES = 4
COMMAND_TIMEOUT_S = 10.0
IMR_ALL_MASKED = 0xFFFF_FFFF

R = TypeVar("R", bound=NamedTuple)


class Bus(Protocol):
    """The PCI bus as a guest's driver sees it."""

    def read32(self, bar: int, offset: int) -> int:
        """A 32-bit load from a BAR."""

    def write32(self, bar: int, offset: int, value: int) -> None:
        """A 32-bit store to a BAR, done on return."""

    def take_interrupts(self) -> set[int]:
        """MSI-X vectors raised since the last call."""

    def wait(self) -> bool:
        """Let the device work or wait a moment for it; false when nothing more will happen by itself."""


class ProbeError(Exception):
    """The driver refuses the device."""


class CommandFailed(Exception):
    """A command failed: `err` is what ERR read, `resp_err` the response's own error (MODIFY_QP)."""

    def __init__(self, cmd: int, err: int, resp_err: int = 0) -> None:
        super().__init__(f"command {cmd:#x}: ERR {err} resp.err {resp_err}")
        self.cmd = cmd
        self.err = err
        self.resp_err = resp_err


class CommandTimeout(Exception):
    """Vector 0 never came."""


class Nothing(Exception):
    """What a test waits for will not happen by itself."""


class Driver:
    """One driver instance.

    Args:
        bus: registers, doorbells, interrupts.
        ram: memory, which is mapped at the device already.
        driver_version: the newest ABI version this driver knows (PVRDMA_VERSION of its header).
        uar_pfn: page frame of BAR2.
        vectors: MSI-X vectors the platform gave; 1 means INTx or MSI, where ICR is asked.
    """

    def __init__(
        self,
        bus: Bus,
        ram: GuestRam,
        *,
        driver_version: int = api.PVRDMA_VERSION,
        uar_pfn: int = 0x38_0000_0000 >> 12,
        vectors: int = 3,
    ) -> None:
        self.bus = bus
        self.ram = ram
        self.driver_version = driver_version
        self.uar_pfn = uar_pfn
        self.vectors = vectors
        self.events: list[api.Eqe] = []
        self.notifications: list[int] = []
        self.cmd_done = False
        self.interrupts: list[int] = []
        self.comp_handlers: dict[int, Callable[[], object]] = {}
        self.qp_tbl: dict[int, object] = {}
        self.active = False

    # --- life ------------------------------------------------------------------------------------------------------

    def probe(self) -> Self:
        """Up to ACTIVATE, in the driver's order. Raises ProbeError."""
        self.dsr_version = min(self.read_reg(Reg.VERSION), self.driver_version)
        self._alloc_shared()
        self.write_reg(Reg.DSRLOW, self.dsr & 0xFFFF_FFFF)
        self.write_reg(Reg.DSRHIGH, self.dsr >> 32)
        # No register is read between DSRHIGH and the first look at the capabilities.
        self.caps = self.read_dsr().caps
        self._check_caps()
        self._free_uars = list(range(self.caps.max_uar - 1, 0, -1))
        self.write_reg(Reg.IMR, 0)
        self.write_reg(Reg.CTL, DeviceCtl.ACTIVATE)
        if self.read_reg(Reg.ERR):
            raise ProbeError("failed to activate device")
        self.active = True
        return self

    def remove(self) -> None:
        """As pvrdma_pci_remove, its objects having been destroyed one by one before."""
        self.active = False
        self.write_reg(Reg.IMR, IMR_ALL_MASKED)
        self.write_reg(Reg.CTL, DeviceCtl.RESET)
        self.async_dir.free()
        self.cqn_dir.free()
        self.ram.free([self.dsr, self.cmd_slot, self.resp_slot])

    def _alloc_shared(self) -> None:
        self.dsr, self.cmd_slot, self.resp_slot = (self.ram.alloc(1)[0] for _ in range(3))
        self.async_dir = PageDir.alloc(self.ram, RING_PAGES)
        self.cqn_dir = PageDir.alloc(self.ram, RING_PAGES)
        self.async_ring = self._rx_ring(self.async_dir, api.EQE.size)
        self.cqn_ring = self._rx_ring(self.cqn_dir, api.CQNE.size)
        self.ram.write(self.dsr, api.DEVICE_SHARED_REGION64.pack(self.make_dsr()))

    def make_dsr(self) -> api.DeviceSharedRegion64:
        """The shared region as this driver fills it, caps zero."""
        wide = self.dsr_version >= api.PPN64_VERSION
        return api.DeviceSharedRegion64(
            driver_version=self.driver_version,
            gos_info=api.pack_gos_info(api.GosInfo(api.GosBits.BITS_64, api.GosType.LINUX, 1, 0)),
            cmd_slot_dma=self.cmd_slot,
            resp_slot_dma=self.resp_slot,
            async_ring_pages=api.RingPageInfo(RING_PAGES, self.async_dir.dir_dma),
            cq_ring_pages=api.RingPageInfo(RING_PAGES, self.cqn_dir.dir_dma),
            # An old driver writes 32 bits only; what follows them is padding, zero in a fresh page.
            uar_pfn64=self.uar_pfn if wide else self.uar_pfn & 0xFFFF_FFFF,
            caps=api.DEVICE_CAPS.unpack_from(bytes(api.DEVICE_CAPS.size)),
        )

    def read_dsr(self) -> api.DeviceSharedRegion64:
        size = api.DEVICE_SHARED_REGION64.size
        return api.DEVICE_SHARED_REGION64.unpack(self.ram.read(self.dsr, size))

    def _check_caps(self) -> None:
        """Source: pvrdma.h PVRDMA_SUPPORTED and what probe does with caps."""
        kinds = {api.GidType.ROCE_V1}
        if self.dsr_version >= api.ROCEV2_VERSION:
            kinds.add(api.GidType.ROCE_V2)
        if self.caps.mode != api.DeviceMode.ROCE or self.caps.gid_types not in kinds:
            raise ProbeError("driver needs RoCE v1 or v2 support (-14)")
        if not self.caps.max_uar or self.caps.max_uar & (self.caps.max_uar - 1):
            raise ProbeError("failed to allocate UAR table")

    def alloc_uar(self) -> int:
        """Index of a doorbell page for a process."""
        return self._free_uars.pop()

    def free_uar(self, index: int) -> None:
        self._free_uars.append(index)

    def link_up(self) -> int:
        """NETDEV_UP: UNQUIESCE, then ERR, which must read 0. Not under the command semaphore."""
        self.write_reg(Reg.CTL, DeviceCtl.UNQUIESCE)
        return self.read_reg(Reg.ERR)

    # --- registers and doorbells -----------------------------------------------------------------------------------

    def read_reg(self, reg: int) -> int:
        return self.bus.read32(PciResource.REG, reg)

    def write_reg(self, reg: int, value: int) -> None:
        self.bus.write32(PciResource.REG, reg, value)

    def ring_uar(self, page: int, offset: int, value: int) -> None:
        self.bus.write32(PciResource.UAR, page * PAGE + offset, value)

    # --- commands --------------------------------------------------------------------------------------------------

    def post_bytes(self, request: bytes, *, ack: int | None) -> bytes:
        """As pvrdma_cmd_post. `ack` is None for commands that do not wait; then the answer is empty.

        Raises:
            CommandFailed: ERR is not 0; CommandTimeout: vector 0 did not come.
        """
        self.interrupt()  # whatever was pending belongs to the past
        self.ram.write(self.cmd_slot, request.ljust(api.CMD_REQ_SIZE, b"\0"))
        self.cmd_done = False
        self.write_reg(Reg.REQUEST, 0)
        err = self.read_reg(Reg.ERR)
        if err:
            raise CommandFailed(api.CMD_HDR.unpack_from(request).cmd, err)
        if ack is None:
            return b""
        self._wait_for_response()
        response = self.ram.read(self.resp_slot, api.CMD_RESP_SIZE)
        assert api.CMD_RESP_HDR.unpack_from(response).ack == ack, "unknown response"
        return response

    def _wait_for_response(self) -> None:
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        self.interrupt()
        while not self.cmd_done:
            more = self.bus.wait()
            self.interrupt()
            if not self.cmd_done and (not more or time.monotonic() > deadline):
                raise CommandTimeout

    def post(self, cmd: int, layout: Layout[Any], body: NamedTuple, *, wait: bool = False) -> bytes:
        """Build and execute a command; the whole response slot when it waits. Raises as `post_bytes`."""
        head = api.CMD_HDR.pack(api.CmdHdr(response=0, cmd=cmd))
        request = head + layout.pack(body)[len(head) :]
        return self.post_bytes(request, ack=api.CMD_FIRST_RESP + cmd if wait else None)

    def call(self, cmd: int, layout: Layout[Any], body: NamedTuple, answer: Layout[R]) -> R:
        """`post` a command that waits, and decode its answer."""
        return answer.unpack_from(self.post(cmd, layout, body, wait=True))

    # --- interrupts ------------------------------------------------------------------------------------------------

    def interrupt(self) -> set[int]:
        """Serve the interrupts that came; the vectors."""
        vectors = self.bus.take_interrupts()
        self.interrupts.extend(sorted(vectors))
        if IntrVector.RESPONSE in vectors and (self.vectors > 1 or self.read_reg(Reg.ICR) == 1):
            self.cmd_done = True
        if IntrVector.ASYNC in vectors and self.active and self.vectors > 1:
            self.drain_events()
        if IntrVector.CQ in vectors and self.vectors > 2:
            self.drain_notifications()
        return vectors

    def drain_events(self) -> list[api.Eqe]:
        """The vector 1 handler; everything since probe is kept in `events`."""
        found = [api.EQE.unpack(raw) for raw in self._drain(self.async_dir, self.async_ring, 8)]
        self.events += found
        return found

    def drain_notifications(self) -> list[int]:
        """The vector 2 handler: calls the completion handlers; the CQ handles."""
        found = []
        for raw in self._drain(self.cqn_dir, self.cqn_ring, 4):
            handle = api.CQNE.unpack(raw).info
            found.append(handle)
            self.comp_handlers.get(handle, int)()
        self.notifications += found
        return found

    def take_notifications(self) -> list[int]:
        """Serve interrupts; CQ handles notified since the last call."""
        self.interrupt()
        taken, self.notifications = self.notifications, []
        return taken

    def take_events(self) -> list[api.Eqe]:
        """Serve interrupts; events since the last call."""
        self.interrupt()
        taken, self.events = self.events, []
        return taken

    def _rx_ring(self, pages: PageDir, entry_size: int) -> RingWords:
        slots = (RING_PAGES - 1) * PAGE // entry_size
        return RingWords(self.ram, pages.pages[0] + api.RING_STATE_RX, slots)

    def _drain(self, pages: PageDir, ring: RingWords, size: int) -> list[bytes]:
        found: list[bytes] = []
        while True:
            has_data, slot = ring.has_data()
            if has_data <= 0:
                return found
            found.append(pages.read(PAGE + size * slot, size))
            ring.consume()

"""The device: its life (reset, shared region mapped, active), its rings, its commands, and what doorbells do.

Contract: synchronous and sans-I/O. The adapters call in (registers, doorbells, memory, progress); the device calls out
through an `InterruptSink` and an `RdmaBackend`. Every entry point leaves everything settled: failed queues stopped,
what waits for ring space retried, interrupts raised once for the whole batch. No guest act raises out of here.

Read first: docs/architecture.md, then cmd_ring.py and resources.py.
Source: drivers/infiniband/hw/vmw_pvrdma/pvrdma_main.c (pvrdma_pci_probe, pvrdma_pci_remove).
"""

import errno
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, NamedTuple

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_dev_api import DeviceCtl, EqeType, Reg
from pvrdma_server.abi.pvrdma_verbs import QpState
from pvrdma_server.backend import RdmaBackend
from pvrdma_server.caps import DeviceConfig, make_caps
from pvrdma_server.cmd_base import Adapter
from pvrdma_server.cmd_ring import execute_untrusted
from pvrdma_server.errors import BadGuestAddress, BadHandle, CommandError, GuestError
from pvrdma_server.guest_memory import PAGE_SIZE, GuestMemory, GuestPages, walk_pdir_untrusted
from pvrdma_server.journal import Journal
from pvrdma_server.objects import Armed, Cq, Qp, UserContext
from pvrdma_server.reports import InterruptSink, Reports
from pvrdma_server.resources import Resources, TableSizes
from pvrdma_server.rings import RX_STATE_OFFSET, ConsumerRing, ProducerRing, entries_per
from pvrdma_server.watches import Moderator, Repeats, RingWatch, RingWatches

# The driver makes rings of 4 pages. Stops a guest from having us walk and hold long directories for nothing.
MAX_DEVICE_RING_PAGES: Final = 64
# What a doorbell copies before it is answered (bytes); the vCPU and QEMU's big lock wait that long.
INLINE_BUDGET: Final = 64 * 1024


class State(Enum):
    """The life of the device as one driver sees it."""

    RESET = "reset"
    MAPPED = "mapped"
    ACTIVE = "active"


class _Shared(NamedTuple):
    """The mapped device shared region and what hangs on it."""

    request: GuestPages
    response: GuestPages
    adapter: Adapter


class PvrdmaDevice:
    """One PVRDMA device. Implements `objects.DeviceHooks`.

    Args:
        backend: who moves the bytes.
        interrupts: where interrupts go.
        config: what the operator decided.
        watch: who watches the rings of processes; None where their doorbells are heard.
        clock_s: the time, for what is shown of recent errors.

    Attributes:
        more_work: whether the last progress, a doorbell's too, left work that is ready now: call `progress`.
    """

    def __init__(
        self,
        backend: RdmaBackend,
        interrupts: InterruptSink,
        config: DeviceConfig,
        watch: RingWatch | None = None,
        clock_s: Callable[[], float] = float,
    ) -> None:
        self._journal = Journal(clock_s)
        self._reports = Reports(interrupts, self._journal)
        self.counters = self._journal.counters
        self.recent_errors = self._journal.recent_errors
        self.memory = GuestMemory()
        self.backend = backend
        self.config = config
        self.caps = make_caps(backend, config)
        self.state = State.RESET
        self.driver_version = 0
        self.more_work = False
        self.resources = self._new_resources()
        self._shared: _Shared | None = None
        self._dsr_low = 0
        self._dsr_high = 0
        self._err = 0
        self._mac = [0, 0]
        self._failed_cqs: list[Cq] = []
        self._failed_qps: list[Qp] = []
        self._work_missed = False
        self._watches = RingWatches(watch) if watch is not None else None
        self._repeats = Repeats(self.cq_notify)
        self._moderator = Moderator(self.cq_notify, self._repeats)
        backend.attach(self.memory)

    def _new_resources(self) -> Resources:
        caps = self.caps
        return Resources(
            TableSizes(
                self.config.max_uar,
                caps.max_pd,
                caps.max_mr,
                caps.max_cq,
                caps.max_srq,
                caps.max_qp,
            )
        )

    # --- registers -------------------------------------------------------------------------------------------------

    def read_register(self, offset: int) -> int:
        """The 32-bit register at `offset`; ICR is cleared by reading. Unknown registers read as zero."""
        match offset:
            case Reg.VERSION:
                return api.PVRDMA_VERSION
            case Reg.ERR:
                return self._err
            case Reg.ICR:
                return self._reports.take_icr()
            case Reg.IMR:
                return self._reports.imr
            case Reg.MACL | Reg.MACH:
                return self._mac[offset == Reg.MACH]
        return 0

    def write_register(self, offset: int, value: int) -> None:
        """Store to the 32-bit register at `offset`; whatever it starts is finished on return."""
        try:
            self._write_register(offset, value)
        except CommandError as e:
            self._err = e.errno
            self.guest_error("command", e)
        except GuestError as e:
            self._err = errno.EFAULT
            self.guest_error("register", e)
        self._settle()

    def _write_register(self, offset: int, value: int) -> None:
        match offset:
            case Reg.DSRLOW:
                self._dsr_low = value
            case Reg.DSRHIGH:
                self._dsr_high = value
                self._map_shared_region(value << 32 | self._dsr_low)
            case Reg.CTL:
                self._control(value)
            case Reg.REQUEST:
                self._execute(value)
            case Reg.IMR:
                self._reports.imr = value
            case Reg.MACL | Reg.MACH:
                self._mac[offset == Reg.MACH] = value
            case _:
                raise BadHandle(f"write of {value:#x} to register {offset:#x}")

    def _control(self, value: int) -> None:
        if value == DeviceCtl.RESET:
            self.reset("driver")
        elif value == DeviceCtl.ACTIVATE and self.state is not State.RESET:
            self.state = State.ACTIVE
            self._err = 0
            self._journal.life("device_active", driver_version=self.driver_version)
        elif value == DeviceCtl.UNQUIESCE and self.state is State.ACTIVE:
            # The driver raises PORT_ACTIVE by itself once ERR reads 0, whatever the last command left there.
            self._err = 0
        else:
            raise CommandError(errno.EINVAL, f"control {value:#x} in state {self.state.value}")

    def _map_shared_region(self, address: int) -> None:
        self.reset("new shared region")
        page = self.memory.page_untrusted(address & ~(PAGE_SIZE - 1))
        offset = address & (PAGE_SIZE - 1)
        if offset + api.DEVICE_SHARED_REGION64.size > PAGE_SIZE:
            raise BadGuestAddress(address, api.DEVICE_SHARED_REGION64.size, "crosses a page")
        dsr = api.DEVICE_SHARED_REGION64.unpack_from(bytes(page), offset)
        if not dsr.driver_version:
            raise BadGuestAddress(
                address, PAGE_SIZE, "the shared region is empty: guest RAM is not shared with the "
                "server; use memory-backend-memfd,share=on",
            )  # fmt: skip
        version = min(api.PVRDMA_VERSION, dsr.driver_version)
        uar_pfn = dsr.uar_pfn64 if version >= api.PPN64_VERSION else dsr.uar_pfn64 & 0xFFFF_FFFF
        rings = [
            self._device_ring(info, size)
            for info, size in (
                (dsr.async_ring_pages, api.EQE.size),
                (dsr.cq_ring_pages, api.CQNE.size),
            )
        ]
        self._shared = _Shared(
            request=GuestPages(self.memory, [dsr.cmd_slot_dma], writable=True),
            response=GuestPages(self.memory, [dsr.resp_slot_dma], writable=True),
            adapter=Adapter(
                resources=self.resources,
                memory=self.memory,
                backend=self.backend,
                hooks=self,
                caps=self.caps,
                max_uar=self.config.max_uar,
                uar_pfn=uar_pfn,
                version=version,
                moderated=self._watches is not None,
            ),
        )
        self._reports.start(*rings)
        # The driver reads the capabilities from memory right after this register write, with no read in between.
        caps_at = offset + api.DEVICE_SHARED_REGION64.fields["caps"].offset
        page[caps_at : caps_at + api.DEVICE_CAPS.size] = api.DEVICE_CAPS.pack(self.caps)
        self.driver_version = dsr.driver_version
        self.state = State.MAPPED
        self._err = 0

    def _device_ring(self, info: api.RingPageInfo, entry_size: int) -> ProducerRing:
        if not 2 <= info.num_pages <= MAX_DEVICE_RING_PAGES:
            raise BadGuestAddress(info.pdir_dma, 0, f"a device ring of {info.num_pages} pages")
        addresses = walk_pdir_untrusted(self.memory, info.pdir_dma, info.num_pages)
        pages = GuestPages(self.memory, addresses, writable=True)
        entries = entries_per(info.num_pages - 1, entry_size)
        return ProducerRing(pages, RX_STATE_OFFSET, 1, entry_size, entries)

    def _execute(self, value: int) -> None:
        shared = self._shared
        if shared is None:
            raise CommandError(errno.ENODEV, "no device shared region")
        if value:
            raise CommandError(errno.EINVAL, f"request {value:#x}; 0 executes the command slot")
        request = bytes(shared.request.page_untrusted(0)[: api.CMD_REQ_SIZE])
        response = shared.response.page_untrusted(0)
        header = api.CMD_HDR.unpack_from(request)
        self.counters.commands[_command_name(header.cmd)] += 1
        outcome = execute_untrusted(shared.adapter, request)
        response[: len(outcome.response)] = outcome.response
        self._err = 0
        if outcome.wait:
            self._reports.response()

    # --- doorbells -------------------------------------------------------------------------------------------------

    def doorbell(self, page: int, offset: int, value: int) -> None:
        """A store of `value` to `offset` of doorbell page `page`."""
        self.counters.doorbells += 1
        try:
            self._doorbell(page, offset, value)
        except GuestError as e:
            self.guest_error("doorbell", e)
        self._settle()

    def _doorbell(self, page: int, offset: int, value: int) -> None:
        handle = value & abi.UAR_HANDLE_MASK
        if offset == abi.UAR_CQ_OFFSET:
            self._cq_doorbell(page, handle, value)
        elif offset == abi.UAR_QP_OFFSET:
            qp = self.resources.qps.get_untrusted(handle)
            self._check_page(page, qp.pd.ctx, "QP", handle)
            if value & abi.UAR_QP_RECV:
                qp.backend.recv_doorbell()
            if value & abi.UAR_QP_SEND:
                qp.backend.send_doorbell()
                self.more_work = self.backend.progress(INLINE_BUDGET)
        elif offset == abi.UAR_SRQ_OFFSET:
            srq = self.resources.srqs.get_untrusted(handle)
            self._check_page(page, srq.pd.ctx, "SRQ", handle)
            srq.backend.recv_doorbell()
        else:
            raise BadHandle(f"no doorbell at offset {offset:#x}")

    def _cq_doorbell(self, page: int, handle: int, value: int) -> None:
        cq = self.resources.cqs.get_untrusted(handle)
        self._check_page(page, cq.ctx, "CQ", handle)
        if cq.ctx is not None and value & (abi.UAR_CQ_ARM | abi.UAR_CQ_ARM_SOL):
            self._repeats.armed(cq)
        if value & abi.UAR_CQ_ARM:
            cq.armed = Armed.NEXT
        elif value & abi.UAR_CQ_ARM_SOL:
            cq.armed = max(cq.armed, Armed.SOLICITED)
        if value & abi.UAR_CQ_POLL:
            self.counters.polls += 1
            self.more_work = self.backend.progress(INLINE_BUDGET)

    def _check_page(self, page: int, owner: UserContext | None, kind: str, handle: int) -> None:
        if page != (owner.uar_page if owner else 0):
            raise BadHandle(f"doorbell page {page} rings {kind} {handle}, which is not its own")

    # --- memory ----------------------------------------------------------------------------------------------------

    def dma_map(self, iova: int, length: int, view: memoryview | None, *, writable: bool) -> None:
        """The client maps guest memory; work that waited for it goes on."""
        try:
            self.memory.add_region(iova, length, view, writable=writable)
        except GuestError as e:
            self.guest_error("dma_map", e)
            return
        for cq in self.resources.cqs:
            if cq.backlog:
                cq.memory_returned()
        if self._watches is not None:
            self._watches.memory_came()
        if self._work_missed:
            self.look_at_rings()
        self._settle()

    def dma_unmap(self, iova: int, length: int) -> None:
        """The client unmaps guest memory; nobody touches it once this returns."""
        self.memory.remove_region(iova, length)
        if self._watches is not None:
            self._watches.memory_left()

    # --- work ------------------------------------------------------------------------------------------------------

    def progress(self, budget_bytes: int) -> bool:
        """Let the backend work; true when more is ready now."""
        self.more_work = self.backend.progress(budget_bytes)
        self._settle()
        return self.more_work

    def look_at_rings(self) -> None:
        """Look for work in every queue, for guests whose doorbells are not heard."""
        self._work_missed = False
        for srq in self.resources.srqs:
            srq.backend.recv_doorbell()
        for qp in self.resources.qps:
            qp.backend.recv_doorbell()
            qp.backend.send_doorbell()
        self._settle()

    def rings_fired(self, tokens: Iterable[int]) -> None:
        """Watched rings have entries: `progress` does their work."""
        if self._watches is not None:
            self._watches.fired(tokens)

    @property
    def wants_moderation(self) -> bool:
        """Whether `moderate` is to be called in a while."""
        return self._moderator.pending

    def moderate(self) -> None:
        """Notify the CQs whose completions nobody has looked at since the last call."""
        self._moderator.moderate()
        self._settle()

    @property
    def wants_repeat(self) -> bool:
        """Whether `repeat` has not yet said when it is to be called."""
        return self._repeats.pending

    def repeat(self, now_ns: int) -> int | None:
        """Notify again the processes that leave all completions of a CQ where they are; when to be called next."""
        due_ns = self._repeats.repeat(now_ns)
        self._settle()
        return due_ns

    @property
    def waits_for_guest(self) -> bool:
        """Whether events or notifications wait for ring space, which the guest frees without a doorbell."""
        return self._reports.waiting

    def reset(self, why: str) -> None:
        """Forget the driver: every object, ring and pending interrupt. The memory map stays."""
        if self.state is not State.RESET or self._shared is not None:
            self._journal.life("device_reset", why=why, **self.resources.counts())
        self.resources.clear()
        self.backend.reset()
        self.counters.resets += 1
        self.resources = self._new_resources()
        self._shared = None
        self.state = State.RESET
        self._err = 0
        self._reports.reset()
        self._failed_cqs.clear()
        self._failed_qps.clear()
        self._moderator.forget()
        self._work_missed = False

    # --- objects.DeviceHooks -------------------------------------------------------------------------------------

    def cq_notify(self, cq: Cq) -> None:
        """See `objects.DeviceHooks`."""
        self._reports.notify(cq)

    def cq_failed(self, cq: Cq) -> None:
        """See `objects.DeviceHooks`."""
        self._failed_cqs.append(cq)

    def qp_failed(self, qp: Qp) -> None:
        """See `objects.DeviceHooks`."""
        self._failed_qps.append(qp)

    def async_event(self, event: int, info: int) -> None:
        """See `objects.DeviceHooks`."""
        self._reports.event(event, info)

    def guest_error(self, what: str, error: GuestError) -> None:
        """See `objects.DeviceHooks`."""
        self._journal.guest_error(what, error)

    def watch(self, ring: ConsumerRing, bell: Callable[[], None]) -> None:
        """See `objects.DeviceHooks`."""
        if self._watches is not None:
            self._watches.add(ring, bell)

    def unwatch(self, ring: ConsumerRing) -> None:
        """See `objects.DeviceHooks`."""
        if self._watches is not None:
            self._watches.remove(ring)

    def ring_drained(self, token: int) -> None:
        """See `objects.DeviceHooks`."""
        if self._watches is not None:
            self._watches.rearm(token)

    def cq_published(self, cq: Cq) -> None:
        """See `objects.DeviceHooks`."""
        self._moderator.published(cq)

    def cq_gone(self, cq: Cq) -> None:
        """See `objects.DeviceHooks`."""
        self._moderator.forget(cq)
        self._reports.forget(cq)

    def work_missed(self) -> None:
        """See `objects.DeviceHooks`."""
        self._work_missed = True

    # --- settling ------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        # Each queue pair that is stopped flushes, and may overflow a CQ or find its other queue corrupt.
        while self._failed_cqs or self._failed_qps:
            self._stop_failed()
        self._reports.flush()

    def _stop_failed(self) -> None:
        while self._failed_qps:
            qp = self._failed_qps.pop()
            if qp.state != QpState.ERR:
                qp.raise_event(EqeType.QP_FATAL)
                qp.to_error()
        while self._failed_cqs:
            cq = self._failed_cqs.pop()
            for qp in self.resources.qps:
                if cq in (qp.send_cq, qp.recv_cq):
                    qp.to_error()


def _command_name(number: int) -> str:
    return api.Cmd(number).name.lower() if number in api.Cmd._value2member_map_ else "unknown"

"""Verbs in a guest: PDs, regions, buffers and CQs of the kernel and of user processes.

Contract: a `Context` is whoever opened the device. The kernel's has doorbell page 0 and context handle 0, DMA regions
and fast registration; a `UserProcess` has a page of its own and registers memory by virtual address, as rdma-core does.
"""

import struct
import time
from typing import NamedTuple

from guest_driver import Driver, Nothing
from guest_ram import PAGE, PageDir, RingWords

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_dev_api import Cmd, MrFlags
from pvrdma_server.abi.pvrdma_verbs import AccessFlags
from pvrdma_server.abi.vmw_pvrdma_abi import Cqe, Sge

WAIT_TIMEOUT_S = 20.0
ALL_ACCESS = (
    AccessFlags.LOCAL_WRITE
    | AccessFlags.REMOTE_WRITE
    | AccessFlags.REMOTE_READ
    | AccessFlags.REMOTE_ATOMIC
)
_FIRST_VA = 0x7F12_0000_0000


class Remote(NamedTuple):
    """Where an RDMA operation goes."""

    addr: int
    rkey: int


class Buffer:
    """Guest memory that work requests can name: `length` bytes at `addr`, backed by `pages` from byte `offset`."""

    def __init__(self, pages: PageDir, addr: int, length: int, lkey: int, rkey: int) -> None:
        self.pages = pages
        self.addr = addr
        self.length = length
        self.lkey = lkey
        self.rkey = rkey

    def write(self, data: bytes, at: int = 0) -> None:
        self.pages.write(self.addr % PAGE + at, data)

    def read(self, at: int = 0, length: int | None = None) -> bytes:
        return self.pages.read(
            self.addr % PAGE + at, self.length - at if length is None else length
        )

    def write64(self, value: int, at: int = 0) -> None:
        self.write(struct.pack("<Q", value), at)

    def read64(self, at: int = 0) -> int:
        return int(struct.unpack("<Q", self.read(at, 8))[0])

    def sge(self, at: int = 0, length: int | None = None) -> Sge:
        return Sge(self.addr + at, self.length - at if length is None else length, self.lkey)

    def remote(self, at: int = 0) -> Remote:
        return Remote(self.addr + at, self.rkey)


class Mr(Buffer):
    """A user's region: virtual address and length chosen by the process, pages scattered."""

    handle: int


class Frmr:
    """A kernel's fast registration region and its page list, which the guest owns and rewrites."""

    def __init__(self, driver: Driver, handle: int, lkey: int, rkey: int, max_pages: int) -> None:
        self.driver = driver
        self.handle = handle
        self.lkey = lkey
        self.rkey = rkey
        self.page_list = PageDir(driver.ram, [0] * max_pages)
        self.max_pages = max_pages
        self.npages = 0
        self.iova = 0
        self.length = 0

    def map_pages(self, pages: list[int], *, offset: int = 0, length: int | None = None) -> None:
        """As ib_map_mr_sg: fill the page list; the region begins `offset` bytes into the first page."""
        for index, page in enumerate(pages):
            self.page_list.set_entry(index, page)
        self.npages = len(pages)
        self.iova = pages[0] + offset
        self.length = len(pages) * PAGE - offset if length is None else length

    def update_key(self) -> None:
        """As ib_update_fast_reg_key with ib_inc_rkey: the low 8 bits of both keys."""
        tag = (self.rkey + 1) & 0xFF
        self.lkey = self.lkey & ~0xFF | tag
        self.rkey = self.rkey & ~0xFF | tag

    def remote(self, at: int = 0) -> Remote:
        return Remote(self.iova + at, self.rkey)

    def sge(self, at: int = 0, length: int | None = None) -> Sge:
        return Sge(self.iova + at, self.length - at if length is None else length, self.lkey)


class Cq:
    """A completion queue and whoever polls it."""

    def __init__(self, ctx: "Context", cqe: int) -> None:
        self.ctx = ctx
        self.cqe = cqe
        driver = ctx.driver
        self.pages = PageDir.alloc(driver.ram, 1 + -(-cqe * abi.CQE_SIZE // PAGE))
        request = api.CmdCreateCq(self.pages.dir_dma, ctx.handle, cqe, len(self.pages.pages))
        self.answer = driver.call(Cmd.CREATE_CQ, api.CMD_CREATE_CQ, request, api.CMD_CREATE_CQ_RESP)
        self.handle = self.answer.cq_handle
        self.ring = RingWords(driver.ram, self.pages.pages[0] + api.RING_STATE_RX, cqe)

    def poll_one(self) -> Cqe | None:
        """As both libraries: POLL when empty, look once more; a handle nobody knows is never consumed."""
        has_data, slot = self.ring.has_data()
        if has_data == 0:
            self.ring_doorbell(abi.UAR_CQ_POLL)
            has_data, slot = self.ring.has_data()
        if has_data <= 0:
            return None
        cqe = abi.CQE.unpack(self.pages.read(PAGE + slot * abi.CQE_SIZE, abi.CQE_SIZE))
        if cqe.qp & 0xFFFF not in self.ctx.qp_tbl:
            return None
        self.ring.consume()
        return cqe

    def poll(self, max_entries: int = 1 << 16) -> list[Cqe]:
        """What is there, up to `max_entries`."""
        found: list[Cqe] = []
        while len(found) < max_entries and (cqe := self.poll_one()):
            found.append(cqe)
        return found

    def wait(self, count: int = 1) -> list[Cqe]:
        """Exactly `count` completions. Raises Nothing when they will not come by themselves."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        found = self.poll(count)
        while len(found) < count:
            more = self.ctx.driver.bus.wait()
            found += self.poll(count - len(found))
            if len(found) < count and (not more or time.monotonic() > deadline):
                raise Nothing(f"{len(found)} of {count} completions: {found}")
        return found

    def wait_one(self) -> Cqe:
        return self.wait(1)[0]

    def arm(self, *, solicited: bool = False) -> bool:
        """Request a notification; true when completions were missed (REPORT_MISSED_EVENTS)."""
        self.ring_doorbell(abi.UAR_CQ_ARM_SOL if solicited else abi.UAR_CQ_ARM)
        return self.ring.has_data()[0] > 0

    def notified(self) -> int:
        """Notifications of this CQ since the last call."""
        self.ctx.driver.interrupt()
        mine = [h for h in self.ctx.driver.notifications if h == self.handle]
        self.ctx.driver.notifications = [
            h for h in self.ctx.driver.notifications if h != self.handle
        ]
        return len(mine)

    def wait_notified(self) -> int:
        """At least one notification. Raises Nothing."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not (count := self.notified()):
            more = self.ctx.driver.bus.wait()
            if not (count := self.notified()) and (not more or time.monotonic() > deadline):
                raise Nothing("no notification")
            if count:
                break
        return count

    def ring_doorbell(self, bits: int) -> None:
        self.ctx.ring_uar(abi.UAR_CQ_OFFSET, self.handle | bits)

    def flush(self, qp_handle: int) -> None:
        """As _pvrdma_flush_cqe: drop one QP's completions in place, the others move towards the tail."""
        if self.ring.has_data()[0] <= 0:
            return
        waiting = []
        index = self.ring.cons_head
        while index != self.ring.prod_tail:
            waiting.append(self._entry(index))
            index = (index + 1) & (2 * self.cqe - 1)
        kept = [raw for raw in waiting if abi.CQE.unpack(raw).qp & 0xFFFF != qp_handle]
        for _ in range(len(waiting) - len(kept)):
            self.ring.consume()
        for number, raw in enumerate(kept):
            slot = (self.ring.cons_head + number) & (self.cqe - 1)
            self.pages.write(PAGE + slot * abi.CQE_SIZE, raw)

    def _entry(self, index: int) -> bytes:
        return self.pages.read(PAGE + (index & (self.cqe - 1)) * abi.CQE_SIZE, abi.CQE_SIZE)

    def destroy(self) -> None:
        self.ctx.driver.post(Cmd.DESTROY_CQ, api.CMD_DESTROY_CQ, api.CmdDestroyCq(self.handle))
        self.pages.free()


class Pd:
    """A protection domain."""

    def __init__(self, ctx: "Context") -> None:
        self.ctx = ctx
        request = api.CmdCreatePd(ctx.handle)
        self.handle = ctx.driver.call(
            Cmd.CREATE_PD, api.CMD_CREATE_PD, request, api.CMD_CREATE_PD_RESP
        ).pd_handle

    def reg_mr(
        self, length: int, access: int = ALL_ACCESS, *, offset: int = 0, va: int | None = None
    ) -> Mr:
        """Register `length` bytes that begin `offset` bytes into their first page."""
        driver = self.ctx.driver
        pages = PageDir.alloc(driver.ram, -(-(offset + length) // PAGE))
        start = (self.ctx.take_va(len(pages.pages)) if va is None else va) + offset
        answer = self.create_mr(
            api.CmdCreateMr(start, length, pages.dir_dma, self.handle, access, 0, len(pages.pages))
        )
        mr = Mr(pages, start, length, answer.lkey, answer.rkey)
        mr.handle = answer.mr_handle
        return mr

    def dma_mr(self) -> api.CmdCreateMrResp:
        """As pvrdma_get_dma_mr, which IB core asks for once for every kernel PD."""
        request = api.CmdCreateMr(0, 0, 0, self.handle, AccessFlags.LOCAL_WRITE, MrFlags.DMA, 0)
        return self.create_mr(request)

    def alloc_frmr(self, max_pages: int) -> Frmr:
        """As pvrdma_alloc_mr."""
        answer = self.create_mr(api.CmdCreateMr(0, 0, 0, self.handle, 0, MrFlags.FRMR, max_pages))
        return Frmr(self.ctx.driver, answer.mr_handle, answer.lkey, answer.rkey, max_pages)

    def create_mr(self, request: api.CmdCreateMr) -> api.CmdCreateMrResp:
        return self.ctx.driver.call(
            Cmd.CREATE_MR, api.CMD_CREATE_MR, request, api.CMD_CREATE_MR_RESP
        )

    def dereg(self, mr_handle: int) -> None:
        self.ctx.driver.post(Cmd.DESTROY_MR, api.CMD_DESTROY_MR, api.CmdDestroyMr(mr_handle))

    def destroy(self) -> None:
        self.ctx.driver.post(Cmd.DESTROY_PD, api.CMD_DESTROY_PD, api.CmdDestroyPd(self.handle))


class Context:
    """Who opened the device: the kernel, or a process."""

    def __init__(self, driver: Driver, handle: int, uar_page: int) -> None:
        self.driver = driver
        self.handle = handle
        self.uar_page = uar_page
        self.qp_tbl: dict[int, object] = {}
        self.pd = Pd(self)
        self._next_va = _FIRST_VA

    def ring_uar(self, offset: int, value: int) -> None:
        """Ring a doorbell on one's own page."""
        self.driver.ring_uar(self.uar_page, offset, value)

    def take_va(self, npages: int) -> int:
        """A virtual address range with a hole behind it."""
        va, self._next_va = self._next_va, self._next_va + (npages + 1) * PAGE
        return va

    def cq(self, cqe: int = 64) -> Cq:
        return Cq(self, cqe)


class Kernel(Context):
    """The guest kernel: doorbell page 0, DMA key, contiguous buffers; the GID table is its business too."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver, 0, 0)
        self.qp_tbl = driver.qp_tbl
        self.dma = self.pd.dma_mr()
        self.gids: dict[int, bytes] = {}

    def buffer(self, length: int) -> Buffer:
        """Memory by bus address, keyed with the PD's DMA region."""
        npages = -(-length // PAGE)
        first = self.driver.ram.alloc_contiguous(npages)
        pages = PageDir(self.driver.ram, [first + PAGE * i for i in range(npages)])
        return Buffer(pages, first, length, self.dma.lkey, self.dma.rkey)

    def add_gid(self, gid: bytes, index: int = 0, gid_type: int | None = None) -> None:
        """As pvrdma_add_gid: CREATE_BIND does not wait."""
        kind = self.driver.caps.gid_types if gid_type is None else gid_type
        request = api.CmdCreateBind(1024, 0xFFF, index, gid, kind)
        self.driver.post(Cmd.CREATE_BIND, api.CMD_CREATE_BIND, request)
        self.gids[index] = gid

    def del_gid(self, index: int) -> None:
        """As pvrdma_del_gid."""
        request = api.CmdDestroyBind(index, self.gids.pop(index))
        self.driver.post(Cmd.DESTROY_BIND, api.CMD_DESTROY_BIND, request)


class UserProcess(Context):
    """A process over rdma-core: opens the device, and rings its own doorbell page only."""

    def __init__(self, driver: Driver) -> None:
        uar_page = driver.alloc_uar()
        request = api.CmdCreateUc64(driver.uar_pfn + uar_page)
        handle = driver.call(
            Cmd.CREATE_UC, api.CMD_CREATE_UC64, request, api.CMD_CREATE_UC_RESP
        ).ctx_handle
        super().__init__(driver, handle, uar_page)

    def mr(
        self, length: int, access: int = ALL_ACCESS, *, offset: int = 0, va: int | None = None
    ) -> Mr:
        """Register memory in the process's own PD."""
        return self.pd.reg_mr(length, access, offset=offset, va=va)

    def exit(self) -> None:
        """Close the device with whatever is left in it, as a crash of the kernel's clean-up would."""
        self.driver.post(Cmd.DESTROY_UC, api.CMD_DESTROY_UC, api.CmdDestroyUc(self.handle))
        self.driver.free_uar(self.uar_page)

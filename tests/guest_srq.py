"""Receive queues, shared receive queues and address handles in a guest."""

from collections.abc import Sequence
from typing import NamedTuple

from guest_ram import PAGE, PageDir, RingWords
from guest_verbs import Context, Pd

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_dev_api import Cmd
from pvrdma_server.abi.pvrdma_verbs import SrqAttr, SrqAttrMask
from pvrdma_server.abi.vmw_pvrdma_abi import Sge


def pow2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


class QueueFull(Exception):
    """The library says ENOMEM."""


class Ah(NamedTuple):
    """An address handle; it exists in the guest only."""

    dgid: bytes
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0
    flow_label: int = 0
    dmac: bytes = bytes.fromhex("020000000001")

    def av(self, pd: Pd) -> abi.Av:
        """As pvrdma_create_ah builds it (the SL is lost there)."""
        return abi.Av(
            port_pd=pd.handle | 1 << 24,
            sl_tclass_flowlabel=self.traffic_class << 20 | self.flow_label,
            dgid=self.dgid,
            src_path_bits=0x80,
            gid_index=self.sgid_index,
            stat_rate=0,
            hop_limit=self.hop_limit,
            dmac=self.dmac,
        )


class RecvQueue:
    """A ring of receive entries: a QP's own, or an SRQ's."""

    def __init__(self, pages: PageDir, ring: RingWords, first_page: int, max_sge: int) -> None:
        self.pages = pages
        self.ring = ring
        self.first_page = first_page
        self.entry_size = pow2(abi.RQ_WQE_HDR_SIZE + abi.SGE_SIZE * max_sge)

    def put(self, sges: Sequence[Sge], wr_id: int, num_sge: int | None) -> None:
        """Write an entry and produce it. Raises QueueFull."""
        has_space, slot = self.ring.has_space()
        if has_space <= 0:
            raise QueueFull
        count = len(sges) if num_sge is None else num_sge
        wqe = abi.RQ_WQE_HDR.pack(abi.RqWqeHdr(wr_id, count, 0))
        wqe += b"".join(abi.SGE.pack(sge) for sge in sges)
        self.pages.write(self.first_page * PAGE + slot * self.entry_size, wqe)
        self.ring.produce()


class Srq:
    """A shared receive queue; user processes only, as the driver refuses the kernel's."""

    def __init__(
        self,
        ctx: Context,
        *,
        max_wr: int = 16,
        max_sge: int = 4,
        limit: int = 0,
        pd: Pd | None = None,
    ) -> None:
        self.ctx = ctx
        driver = ctx.driver
        entry = pow2(abi.RQ_WQE_HDR_SIZE + abi.SGE_SIZE * max_sge)
        # The library allocates twice the pages it needs.
        npages = 1 + 2 * -(-max_wr * entry // PAGE)
        self.pages = PageDir.alloc(driver.ram, npages)
        request = api.CmdCreateSrq(
            self.pages.dir_dma, (pd or ctx.pd).handle, npages, SrqAttr(max_wr, max_sge, limit), 0
        )
        self.handle = driver.call(
            Cmd.CREATE_SRQ, api.CMD_CREATE_SRQ, request, api.CMD_CREATE_SRQ_RESP
        ).srqn
        ring = RingWords(driver.ram, self.pages.pages[0] + api.RING_STATE_RX, max_wr)
        self.queue = RecvQueue(self.pages, ring, 1, max_sge)

    def post_recv(self, *sges: Sge, wr_id: int = 0, num_sge: int | None = None) -> None:
        self.queue.put(sges, wr_id, num_sge)
        self.ctx.ring_uar(abi.UAR_SRQ_OFFSET, self.handle | abi.UAR_SRQ_RECV)

    def arm_limit(self, limit: int) -> None:
        request = api.CmdModifySrq(self.handle, SrqAttrMask.LIMIT, SrqAttr(0, 0, limit))
        self.ctx.driver.post(Cmd.MODIFY_SRQ, api.CMD_MODIFY_SRQ, request)

    def query(self) -> SrqAttr:
        request = api.CmdQuerySrq(self.handle)
        return self.ctx.driver.call(
            Cmd.QUERY_SRQ, api.CMD_QUERY_SRQ, request, api.CMD_QUERY_SRQ_RESP
        ).attrs

    def destroy(self) -> None:
        self.ctx.driver.post(Cmd.DESTROY_SRQ, api.CMD_DESTROY_SRQ, api.CmdDestroySrq(self.handle))
        self.pages.free()

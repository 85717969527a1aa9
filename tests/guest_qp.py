"""Queue pairs and shared receive queues in a guest, and how two of them are connected.

Contract: posting is what driver and library do: write the entry, then `prod_tail`, then the doorbell.
"""

from collections.abc import Sequence
from typing import Any

from guest_driver import CommandFailed
from guest_ram import PAGE, PageDir, RingWords
from guest_srq import Ah, QueueFull, RecvQueue, Srq, pow2
from guest_verbs import Context, Cq, Frmr, Pd, Remote

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_dev_api import Cmd
from pvrdma_server.abi.pvrdma_verbs import (
    QP_ATTR,
    AccessFlags,
    AhFlags,
    Mtu,
    QpAttr,
    QpState,
    QpType,
    SendFlags,
)
from pvrdma_server.abi.pvrdma_verbs import QpAttrMask as M
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WrOpcode

SIGNALED = SendFlags.SIGNALED
NO_ATTR: QpAttr = QP_ATTR.unpack_from(bytes(QP_ATTR.size))
REMOTE_ACCESS = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC

# The attribute masks of ib_cm and of every verbs program.
RC_INIT = M.STATE | M.PKEY_INDEX | M.PORT | M.ACCESS_FLAGS
RC_RTR = (
    M.STATE | M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN | M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
)
RC_RTS = M.STATE | M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.SQ_PSN | M.MAX_QP_RD_ATOMIC
UD_INIT = M.STATE | M.PKEY_INDEX | M.PORT | M.QKEY
UD_RTR = M.STATE
UD_RTS = M.STATE | M.SQ_PSN


class Qp:
    """A queue pair: RC by default, with CQs made on the way when none are given."""

    def __init__(
        self,
        ctx: Context,
        qp_type: int = QpType.RC,
        send_cq: Cq | None = None,
        recv_cq: Cq | None = None,
        *,
        srq: Srq | None = None,
        max_wr: int = 16,
        max_sge: int = 4,
        sq_sig_all: bool = False,
        pd: Pd | None = None,
    ) -> None:
        self.ctx = ctx
        self.pd = pd or ctx.pd
        self.qp_type = qp_type
        self.send_cq = send_cq or ctx.cq()
        self.recv_cq = recv_cq or self.send_cq
        self.srq = srq
        self.max_sge = max_sge
        self.entry_size = pow2(abi.SQ_WQE_HDR_SIZE + abi.SGE_SIZE * max_sge)
        send_pages = -(-max_wr * self.entry_size // PAGE)
        recv_entry = pow2(abi.RQ_WQE_HDR_SIZE + abi.SGE_SIZE * max_sge)
        recv_pages = 0 if srq else -(-max_wr * recv_entry // PAGE)
        ram = ctx.driver.ram
        self.pages = PageDir.alloc(ram, 1 + send_pages + recv_pages)
        self.request = api.CmdCreateQp(
            pdir_dma=self.pages.dir_dma,
            pd_handle=self.pd.handle,
            send_cq_handle=self.send_cq.handle,
            recv_cq_handle=self.recv_cq.handle,
            srq_handle=srq.handle if srq else 0,
            max_send_wr=max_wr,
            max_recv_wr=max_wr,
            max_send_sge=max_sge,
            max_recv_sge=max_sge,
            max_inline_data=0,
            lkey=0,
            access_flags=AccessFlags.LOCAL_WRITE,
            total_chunks=len(self.pages.pages),
            send_chunks=send_pages,
            max_atomic_arg=0,
            sq_sig_all=sq_sig_all,
            qp_type=qp_type,
            is_srq=srq is not None,
        )
        self.qpn, self.handle = create_qp(ctx, self.request)
        self.sq = RingWords(ram, self.pages.pages[0] + api.RING_STATE_TX, max_wr)
        rq = RingWords(ram, self.pages.pages[0] + api.RING_STATE_RX, max_wr)
        self.rq = RecvQueue(self.pages, rq, 1 + send_pages, max_sge)
        ctx.qp_tbl[self.handle] = self

    # --- state -----------------------------------------------------------------------------------------------------

    def modify(self, mask: int, **attrs: Any) -> None:
        """MODIFY_QP. Raises CommandFailed, with `resp_err` where the response says no."""
        attr = NO_ATTR._replace(**{"qp_state" if k == "state" else k: v for k, v in attrs.items()})
        request = api.CmdModifyQp(self.handle, mask, attr)
        answer = self.ctx.driver.post(Cmd.MODIFY_QP, api.CMD_MODIFY_QP, request, wait=True)
        err = api.CMD_RESP_HDR.unpack_from(answer).err
        if err:
            raise CommandFailed(Cmd.MODIFY_QP, 0, err)
        if mask & M.STATE and attr.qp_state == QpState.RESET:
            self._forget_queues()

    def _forget_queues(self) -> None:
        # Driver and library zero the indices only now, after the command.
        for cq in {self.send_cq, self.recv_cq}:
            cq.flush(self.handle)
        self.sq.zero()
        if not self.srq:
            self.rq.ring.zero()

    def query(self) -> QpAttr:
        request = api.CmdQueryQp(self.handle, 0x1FFFFF)
        return self.ctx.driver.call(
            Cmd.QUERY_QP, api.CMD_QUERY_QP, request, api.CMD_QUERY_QP_RESP
        ).attrs

    def to_init(self, *, qkey: int = 0x11111111, access: int = REMOTE_ACCESS) -> None:
        if self.qp_type == QpType.RC:
            self.modify(RC_INIT, state=QpState.INIT, port_num=1, qp_access_flags=access)
        else:
            self.modify(UD_INIT, state=QpState.INIT, port_num=1, qkey=qkey)

    def to_rtr(self, *, dest_qpn: int = 0, dgid: bytes = bytes(16), **attrs: Any) -> None:
        if self.qp_type != QpType.RC:
            self.modify(UD_RTR, state=QpState.RTR)
            return
        grh = NO_ATTR.ah_attr.grh._replace(dgid=dgid, hop_limit=64)
        ah = NO_ATTR.ah_attr._replace(grh=grh, ah_flags=AhFlags.GRH, port_num=1)
        wanted = {
            "path_mtu": Mtu.MTU_1024,
            "dest_qp_num": dest_qpn,
            "rq_psn": 0x1234,
            "max_dest_rd_atomic": 4,
            "min_rnr_timer": 12,
            "ah_attr": ah,
        }
        self.modify(RC_RTR, state=QpState.RTR, **{**wanted, **attrs})

    def to_rts(self, **attrs: Any) -> None:
        if self.qp_type != QpType.RC:
            self.modify(UD_RTS, state=QpState.RTS, sq_psn=0x1234)
            return
        wanted = {
            "timeout": 14,
            "retry_cnt": 7,
            "rnr_retry": 7,
            "sq_psn": 0x1234,
            "max_rd_atomic": 4,
        }
        self.modify(RC_RTS, state=QpState.RTS, **{**wanted, **attrs})

    def ready(self, *, qkey: int = 0x11111111) -> "Qp":
        """A datagram queue pair all the way to RTS."""
        self.to_init(qkey=qkey)
        self.to_rtr()
        self.to_rts()
        return self

    def to_error(self) -> None:
        self.modify(M.STATE, state=QpState.ERR)

    def to_reset(self) -> None:
        self.modify(M.STATE, state=QpState.RESET)

    def destroy(self) -> None:
        """As the driver: the command, the CQs cleaned of our completions, the table entry, the memory."""
        driver = self.ctx.driver
        driver.post(Cmd.DESTROY_QP, api.CMD_DESTROY_QP, api.CmdDestroyQp(self.handle))
        for cq in {self.send_cq, self.recv_cq}:
            cq.flush(self.handle)
        del self.ctx.qp_tbl[self.handle]
        self.pages.free()

    # --- posting ---------------------------------------------------------------------------------------------------

    def post_raw(self, header: bytes, sges: Sequence[Sge] = (), *, doorbell: bool = True) -> None:
        """Write a send entry of any bytes, produce it, ring. Raises QueueFull."""
        has_space, slot = self.sq.has_space()
        if has_space <= 0:
            raise QueueFull
        wqe = header + b"".join(abi.SGE.pack(sge) for sge in sges)
        self.pages.write(PAGE + slot * self.entry_size, wqe[: self.entry_size])
        self.sq.produce()
        if doorbell:
            self.ring_send()

    def ring_send(self) -> None:
        self.ctx.ring_uar(abi.UAR_QP_OFFSET, self.handle | abi.UAR_QP_SEND)

    def ring_recv(self) -> None:
        self.ctx.ring_uar(abi.UAR_QP_OFFSET, self.handle | abi.UAR_QP_RECV)

    def post_recv(
        self, *sges: Sge, wr_id: int = 0, num_sge: int | None = None, doorbell: bool = True
    ) -> None:
        self.rq.put(sges, wr_id, num_sge)
        if doorbell:
            self.ring_recv()

    def send(
        self,
        *sges: Sge,
        wr_id: int = 0,
        flags: int = SIGNALED,
        imm: bytes | None = None,
        doorbell: bool = True,
    ) -> None:
        opcode = WrOpcode.SEND if imm is None else WrOpcode.SEND_WITH_IMM
        hdr = abi.SqWqeHdr(wr_id, len(sges), 0, opcode, flags, imm or bytes(4))
        self.post_raw(abi.SQ_WQE_HDR.pack(hdr), sges, doorbell=doorbell)

    def send_to(
        self,
        ah: Ah,
        remote_qpn: int,
        *sges: Sge,
        wr_id: int = 0,
        flags: int = SIGNALED,
        imm: bytes | None = None,
        qkey: int = 0x11111111,
    ) -> None:
        """A datagram."""
        opcode = WrOpcode.SEND if imm is None else WrOpcode.SEND_WITH_IMM
        hdr = abi.SqWqeUd(
            wr_id, len(sges), 0, opcode, flags, imm or bytes(4), remote_qpn, qkey, *ah.av(self.pd)
        )
        self.post_raw(abi.SQ_WQE_UD.pack(hdr), sges)

    def _rdma(
        self, opcode: int, sges: Sequence[Sge], to: Remote, wr_id: int, flags: int, imm: bytes
    ) -> None:
        hdr = abi.SqWqeRdma(wr_id, len(sges), 0, opcode, flags, imm, to.addr, to.rkey)
        self.post_raw(abi.SQ_WQE_RDMA.pack(hdr), sges)

    def write(
        self,
        *sges: Sge,
        to: Remote,
        wr_id: int = 0,
        flags: int = SIGNALED,
        imm: bytes | None = None,
    ) -> None:
        opcode = WrOpcode.RDMA_WRITE if imm is None else WrOpcode.RDMA_WRITE_WITH_IMM
        self._rdma(opcode, sges, to, wr_id, flags, imm or bytes(4))

    def read(self, *sges: Sge, frm: Remote, wr_id: int = 0, flags: int = SIGNALED) -> None:
        self._rdma(WrOpcode.RDMA_READ, sges, frm, wr_id, flags, bytes(4))

    def cmp_swp(
        self,
        sge: Sge,
        at: Remote,
        compare: int,
        swap: int,
        *,
        wr_id: int = 0,
        flags: int = SIGNALED,
    ) -> None:
        self._atomic(WrOpcode.ATOMIC_CMP_AND_SWP, sge, at, compare, swap, wr_id, flags)

    def fetch_add(
        self, sge: Sge, at: Remote, add: int, *, wr_id: int = 0, flags: int = SIGNALED
    ) -> None:
        self._atomic(WrOpcode.ATOMIC_FETCH_AND_ADD, sge, at, add, 0, wr_id, flags)

    def _atomic(
        self, opcode: int, sge: Sge, at: Remote, add: int, swap: int, wr_id: int, flags: int
    ) -> None:
        hdr = abi.SqWqeAtomic(wr_id, 1, 0, opcode, flags, bytes(4), at.addr, add, swap, at.rkey)
        self.post_raw(abi.SQ_WQE_ATOMIC.pack(hdr), [sge])

    def invalidate(
        self, opcode: int, rkey: int, *sges: Sge, wr_id: int = 0, flags: int = SIGNALED
    ) -> None:
        """LOCAL_INV, or SEND_WITH_INV with something to send."""
        ex = rkey.to_bytes(4, "little")
        hdr = abi.SqWqeHdr(wr_id, len(sges), 0, opcode, flags, ex)
        self.post_raw(abi.SQ_WQE_HDR.pack(hdr), sges)

    def reg_mr(self, mr: Frmr, access: int, *, wr_id: int = 0, flags: int = SIGNALED) -> None:
        """FAST_REG_MR with the page list as it stands."""
        hdr = abi.SqWqeFastReg(
            wr_id, 0, 0, WrOpcode.FAST_REG_MR, flags, bytes(4),
            mr.iova, mr.page_list.dir_dma, 12, mr.npages, mr.length, access, mr.rkey,
        )  # fmt: skip
        self.post_raw(abi.SQ_WQE_FAST_REG.pack(hdr))


def create_qp(ctx: Context, request: api.CmdCreateQp) -> tuple[int, int]:
    """CREATE_QP as it stands in `request`; (QPN, handle) by the layout of the device's version."""
    raw = ctx.driver.post(Cmd.CREATE_QP, api.CMD_CREATE_QP, request, wait=True)
    if ctx.driver.dsr_version >= api.QPHANDLE_VERSION:
        v2 = api.CMD_CREATE_QP_RESP_V2.unpack_from(raw)
        return v2.qpn, v2.qp_handle
    v1 = api.CMD_CREATE_QP_RESP.unpack_from(raw)
    return v1.qpn, v1.qpn


def connect(a: Qp, b: Qp, gid_a: bytes, gid_b: bytes, **rts: Any) -> None:
    """Two RC queue pairs from RESET to RTS, each other's peers. Each may ask for as many READs as the other."""
    rtr = {"max_dest_rd_atomic": rts["max_rd_atomic"]} if "max_rd_atomic" in rts else {}
    a.to_init()
    b.to_init()
    a.to_rtr(dest_qpn=b.qpn, dgid=gid_b, **rtr)
    b.to_rtr(dest_qpn=a.qpn, dgid=gid_a, **rtr)
    a.to_rts(**rts)
    b.to_rts(**rts)

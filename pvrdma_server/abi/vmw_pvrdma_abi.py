"""include/uapi/rdma/vmw_pvrdma-abi.h: doorbells, work queue entries, completions.

Contract: a send WQE header is always 80 bytes; its union is one record per arm, each holding the
common fields too, so that a snapshot is decoded by one unpack. Which arm is live follows from the
opcode: `SQ_WQE_HDR` reads just the common part.

Source: vmw_pvrdma-abi.h, the symbol `pvrdma_` + the name in C form unless a docstring says
otherwise.
"""

from enum import IntEnum, IntFlag
from typing import NamedTuple

from pvrdma_server.abi.layout import CConstants, CMapping, Layout

# Doorbells: a 32-bit store to a UAR page is a 24-bit handle and these bits. (PVRDMA_UAR_*)
UAR_HANDLE_MASK = 0x00FF_FFFF
UAR_QP_OFFSET = 0
UAR_QP_SEND = 1 << 30
UAR_QP_RECV = 1 << 31
UAR_CQ_OFFSET = 4
UAR_CQ_ARM_SOL = 1 << 29
UAR_CQ_ARM = 1 << 30
UAR_CQ_POLL = 1 << 31
UAR_SRQ_OFFSET = 8
UAR_SRQ_RECV = 1 << 30

SQ_WQE_HDR_SIZE = 80
RQ_WQE_HDR_SIZE = 16
SGE_SIZE = 16
CQE_SIZE = 64


class WrOpcode(IntEnum):
    """Send opcodes. Source: PVRDMA_WR_*."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LSO = 7
    SEND_WITH_INV = 8
    RDMA_READ_WITH_INV = 9
    LOCAL_INV = 10
    FAST_REG_MR = 11
    MASKED_ATOMIC_CMP_AND_SWP = 12
    MASKED_ATOMIC_FETCH_AND_ADD = 13
    BIND_MW = 14
    REG_SIG_MR = 15
    ERROR = 16


class WcStatus(IntEnum):
    """Completion status, numbered as InfiniBand verbs do. Source: PVRDMA_WC_*."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21


class WcOpcode(IntEnum):
    """What completed; bit 7 marks a receive. Source: PVRDMA_WC_*."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LSO = 6
    LOCAL_INV = 7
    FAST_REG_MR = 8
    MASKED_COMP_SWAP = 9
    MASKED_FETCH_ADD = 10
    RECV = 128
    RECV_RDMA_WITH_IMM = 129


class WcFlags(IntFlag):
    """Completion flags. rdma-core numbers bits 2 and up otherwise: user CQs get only the first two.

    Source: PVRDMA_WC_*.
    """

    GRH = 1 << 0
    WITH_IMM = 1 << 1
    WITH_INVALIDATE = 1 << 2
    IP_CSUM_OK = 1 << 3
    WITH_SMAC = 1 << 4
    WITH_VLAN = 1 << 5
    WITH_NETWORK_HDR_TYPE = 1 << 6


class NetworkHdrType(IntEnum):
    """Header the packet came with. Source: enum pvrdma_network_type, PVRDMA_NETWORK_*."""

    IB = 0
    ROCE_V1 = 0
    IPV4 = 1
    IPV6 = 2


class Av(NamedTuple):
    """Address vector of a UD send. `port_pd` is the PD handle | port << 24."""

    port_pd: int
    sl_tclass_flowlabel: int
    dgid: bytes
    src_path_bits: int
    gid_index: int
    stat_rate: int
    hop_limit: int
    dmac: bytes


AV = Layout(
    Av,
    40,
    port_pd=(0, "I"),
    sl_tclass_flowlabel=(4, "I"),
    dgid=(8, "16s"),
    src_path_bits=(24, "B"),
    gid_index=(25, "B"),
    stat_rate=(26, "B"),
    hop_limit=(27, "B"),
    dmac=(28, "6s"),
)


class Sge(NamedTuple):
    """Scatter/gather element: guest address (or MR address), length in bytes, key."""

    addr: int
    length: int
    lkey: int


SGE = Layout(Sge, SGE_SIZE, addr=(0, "Q"), length=(8, "I"), lkey=(12, "I"))


class RqWqeHdr(NamedTuple):
    """Receive WQE, RQ or SRQ; `num_sge` elements follow it. `total_len` is reserved."""

    wr_id: int
    num_sge: int
    total_len: int


RQ_WQE_HDR = Layout(
    RqWqeHdr, RQ_WQE_HDR_SIZE, wr_id=(0, "Q"), num_sge=(8, "I"), total_len=(12, "I")
)


class SqWqeHdr(NamedTuple):
    """Common part of a send WQE. `ex`: immediate (big-endian) or rkey to invalidate (little)."""

    wr_id: int
    num_sge: int
    total_len: int
    opcode: int
    send_flags: int
    ex: bytes


SQ_WQE_HDR = Layout(
    SqWqeHdr,
    SQ_WQE_HDR_SIZE,
    wr_id=(0, "Q"),
    num_sge=(8, "I"),
    total_len=(12, "I"),
    opcode=(16, "I"),
    send_flags=(20, "I"),
    ex=(24, "4s"),
)


class SqWqeRdma(NamedTuple):
    """Send WQE of an RDMA write or read. Source: pvrdma_sq_wqe_hdr.wr.rdma."""

    wr_id: int
    num_sge: int
    total_len: int
    opcode: int
    send_flags: int
    ex: bytes
    remote_addr: int
    rkey: int


SQ_WQE_RDMA = Layout(
    SqWqeRdma,
    SQ_WQE_HDR_SIZE,
    wr_id=(0, "Q"),
    num_sge=(8, "I"),
    total_len=(12, "I"),
    opcode=(16, "I"),
    send_flags=(20, "I"),
    ex=(24, "4s"),
    remote_addr=(32, "Q"),
    rkey=(40, "I"),
)


class SqWqeAtomic(NamedTuple):
    """Send WQE of a 64-bit atomic. Source: pvrdma_sq_wqe_hdr.wr.atomic."""

    wr_id: int
    num_sge: int
    total_len: int
    opcode: int
    send_flags: int
    ex: bytes
    remote_addr: int
    compare_add: int
    swap: int
    rkey: int


SQ_WQE_ATOMIC = Layout(
    SqWqeAtomic,
    SQ_WQE_HDR_SIZE,
    wr_id=(0, "Q"),
    num_sge=(8, "I"),
    total_len=(12, "I"),
    opcode=(16, "I"),
    send_flags=(20, "I"),
    ex=(24, "4s"),
    remote_addr=(32, "Q"),
    compare_add=(40, "Q"),
    swap=(48, "Q"),
    rkey=(56, "I"),
)


class ExCmpSwap(NamedTuple):
    """Operands of a masked compare and swap."""

    swap_val: int
    compare_val: int
    swap_mask: int
    compare_mask: int


EX_CMP_SWAP = Layout(
    ExCmpSwap,
    32,
    swap_val=(0, "Q"),
    compare_val=(8, "Q"),
    swap_mask=(16, "Q"),
    compare_mask=(24, "Q"),
)


class ExFetchAdd(NamedTuple):
    """Operands of a masked fetch and add."""

    add_val: int
    field_boundary: int


EX_FETCH_ADD = Layout(ExFetchAdd, 16, add_val=(0, "Q"), field_boundary=(8, "Q"))


class SqWqeMaskedAtomic(NamedTuple):
    """Send WQE of a masked atomic; `wr_data` is an `ExCmpSwap` or an `ExFetchAdd`.

    Source: pvrdma_sq_wqe_hdr.wr.masked_atomics. No Linux driver fills it.
    """

    wr_id: int
    num_sge: int
    total_len: int
    opcode: int
    send_flags: int
    ex: bytes
    remote_addr: int
    log_arg_sz: int
    rkey: int
    wr_data: bytes


SQ_WQE_MASKED_ATOMIC = Layout(
    SqWqeMaskedAtomic,
    SQ_WQE_HDR_SIZE,
    wr_id=(0, "Q"),
    num_sge=(8, "I"),
    total_len=(12, "I"),
    opcode=(16, "I"),
    send_flags=(20, "I"),
    ex=(24, "4s"),
    remote_addr=(32, "Q"),
    log_arg_sz=(40, "I"),
    rkey=(44, "I"),
    wr_data=(48, "32s"),
)


class SqWqeFastReg(NamedTuple):
    """Send WQE that registers a page list on an FRMR. `length` is in bytes.

    Source: pvrdma_sq_wqe_hdr.wr.fast_reg.
    """

    wr_id: int
    num_sge: int
    total_len: int
    opcode: int
    send_flags: int
    ex: bytes
    iova_start: int
    pl_pdir_dma: int
    page_shift: int
    page_list_len: int
    length: int
    access_flags: int
    rkey: int


SQ_WQE_FAST_REG = Layout(
    SqWqeFastReg,
    SQ_WQE_HDR_SIZE,
    wr_id=(0, "Q"),
    num_sge=(8, "I"),
    total_len=(12, "I"),
    opcode=(16, "I"),
    send_flags=(20, "I"),
    ex=(24, "4s"),
    iova_start=(32, "Q"),
    pl_pdir_dma=(40, "Q"),
    page_shift=(48, "I"),
    page_list_len=(52, "I"),
    length=(56, "I"),
    access_flags=(60, "I"),
    rkey=(64, "I"),
)


class SqWqeUd(NamedTuple):
    """Send WQE of a UD or GSI QP, its address vector flattened (`av_*`).

    Source: pvrdma_sq_wqe_hdr.wr.ud.
    """

    wr_id: int
    num_sge: int
    total_len: int
    opcode: int
    send_flags: int
    ex: bytes
    remote_qpn: int
    remote_qkey: int
    av_port_pd: int
    av_sl_tclass_flowlabel: int
    av_dgid: bytes
    av_src_path_bits: int
    av_gid_index: int
    av_stat_rate: int
    av_hop_limit: int
    av_dmac: bytes


SQ_WQE_UD = Layout(
    SqWqeUd,
    SQ_WQE_HDR_SIZE,
    wr_id=(0, "Q"),
    num_sge=(8, "I"),
    total_len=(12, "I"),
    opcode=(16, "I"),
    send_flags=(20, "I"),
    ex=(24, "4s"),
    remote_qpn=(32, "I"),
    remote_qkey=(36, "I"),
    av_port_pd=(40, "I"),
    av_sl_tclass_flowlabel=(44, "I"),
    av_dgid=(48, "16s"),
    av_src_path_bits=(64, "B"),
    av_gid_index=(65, "B"),
    av_stat_rate=(66, "B"),
    av_hop_limit=(67, "B"),
    av_dmac=(68, "6s"),
)


class Cqe(NamedTuple):
    """Completion. `qp` is the QP's handle; `imm_data` is big-endian, or the invalidated rkey."""

    wr_id: int
    qp: int
    opcode: int
    status: int
    byte_len: int
    imm_data: bytes
    src_qp: int
    wc_flags: int
    vendor_err: int
    pkey_index: int
    slid: int
    sl: int
    dlid_path_bits: int
    port_num: int
    smac: bytes
    network_hdr_type: int


CQE = Layout(
    Cqe,
    CQE_SIZE,
    wr_id=(0, "Q"),
    qp=(8, "Q"),
    opcode=(16, "I"),
    status=(20, "I"),
    byte_len=(24, "I"),
    imm_data=(28, "4s"),
    src_qp=(32, "I"),
    wc_flags=(36, "I"),
    vendor_err=(40, "I"),
    pkey_index=(44, "H"),
    slid=(46, "H"),
    sl=(48, "B"),
    dlid_path_bits=(49, "B"),
    port_num=(50, "B"),
    smac=(51, "6s"),
    network_hdr_type=(57, "B"),
)


def _arm(arm: str, *names: str) -> dict[str, str]:
    return {name: f"wr.{arm}.{name}" for name in names}


_SQ_WQE = "struct pvrdma_sq_wqe_hdr"

C_LAYOUTS = (
    CMapping("struct pvrdma_av", AV),
    CMapping("struct pvrdma_sge", SGE),
    CMapping("struct pvrdma_rq_wqe_hdr", RQ_WQE_HDR),
    CMapping(_SQ_WQE, SQ_WQE_HDR),
    CMapping(_SQ_WQE, SQ_WQE_RDMA, _arm("rdma", "remote_addr", "rkey")),
    CMapping(_SQ_WQE, SQ_WQE_ATOMIC, _arm("atomic", *SqWqeAtomic._fields[6:])),
    CMapping(_SQ_WQE, SQ_WQE_MASKED_ATOMIC, _arm("masked_atomics", *SqWqeMaskedAtomic._fields[6:])),
    CMapping(_SQ_WQE, SQ_WQE_FAST_REG, _arm("fast_reg", *SqWqeFastReg._fields[6:])),
    CMapping(
        _SQ_WQE,
        SQ_WQE_UD,
        _arm("ud", "remote_qpn", "remote_qkey")
        | {f"av_{name}": f"wr.ud.av.{name}" for name in Av._fields},
    ),
    CMapping("struct pvrdma_ex_cmp_swap", EX_CMP_SWAP),
    CMapping("struct pvrdma_ex_fetch_add", EX_FETCH_ADD),
    CMapping("struct pvrdma_cqe", CQE),
)

C_CONSTANTS = (
    CConstants("PVRDMA_WR_", WrOpcode.__members__),
    CConstants("PVRDMA_WC_", WcStatus.__members__),
    CConstants("PVRDMA_WC_", WcOpcode.__members__),
    CConstants("PVRDMA_WC_", WcFlags.__members__),
    CConstants("PVRDMA_NETWORK_", NetworkHdrType.__members__),
    CConstants(
        "PVRDMA_", {name: value for name, value in globals().items() if name.startswith("UAR_")}
    ),
)

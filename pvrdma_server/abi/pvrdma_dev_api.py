"""vmw_pvrdma/pvrdma_dev_api.h: registers, the shared region, commands, events.

Contract: offsets of a request or response count from the start of its slot, so bytes 0 to 15, the
header, are `CMD_HDR` or `CMD_RESP_HDR` and packing a body leaves them zero. Names as in the header
without `pvrdma_`; a union is one record per arm (`CmdCreateUc64`, `DeviceSharedRegion64`). The
ring state words come from pvrdma_ring.h, the ring sizes from pvrdma.h.

Source: pvrdma_dev_api.h, the symbol `pvrdma_` + the name in C form unless a docstring says
otherwise.
"""

from enum import IntEnum, IntFlag
from typing import NamedTuple

from pvrdma_server.abi.layout import CConstants, CMapping, Layout
from pvrdma_server.abi.pvrdma_verbs import (
    PORT_ATTR,
    QP_ATTR,
    SRQ_ATTR,
    PortAttr,
    QpAttr,
    SrqAttr,
)

# PCI identity. Source: pvrdma_main.c, pvrdma_pci_table; pvrdma.h, PCI_DEVICE_ID_VMWARE_PVRDMA.
PCI_VENDOR_ID_VMWARE = 0x15AD
PCI_DEVICE_ID_VMWARE_PVRDMA = 0x0820

# What each device version brought. Source: PVRDMA_*_VERSION.
ROCEV1_VERSION = 17
ROCEV2_VERSION = 18
PPN64_VERSION = 19
QPHANDLE_VERSION = 20
PVRDMA_VERSION = QPHANDLE_VERSION

BOARD_ID = 1
REV_ID = 1

# Page directory: one page of 512 tables of 512 pages of 4 KiB. Source: PVRDMA_PDIR_SHIFT and on.
PAGE_SIZE = 4096
PDIR_ENTRIES = 512
PTABLE_SHIFT = 9
PDIR_SHIFT = 18
PAGE_DIR_MAX_PAGES = PDIR_ENTRIES * PDIR_ENTRIES
MAX_FAST_REG_PAGES = 128

MAX_INTERRUPTS = 3

# Ring state page: two pairs of u32 words, byte offsets. Source: pvrdma_ring.h, pvrdma_ring_state.
RING_STATE_TX = 0
RING_STATE_RX = 8
RING_PROD_TAIL = 0
RING_CONS_HEAD = 4
RING_STATE_SIZE = 16

# Pages of the async and CQ notification rings, and of a QP's ring state. Source: pvrdma.h.
NUM_RING_PAGES = 4
QP_NUM_HEADER_PAGES = 1

# Size in bytes of the request and response unions. Source: pvrdma_cmd_req, pvrdma_cmd_resp.
CMD_REQ_SIZE = 184
CMD_RESP_SIZE = 176

CMD_FIRST_RESP = 0x8000_0000
"""`CmdRespHdr.ack` is this plus the command. Source: PVRDMA_CMD_FIRST_RESP."""


class Reg(IntEnum):
    """Byte offsets of the 32-bit registers of BAR1. Source: PVRDMA_REG_*."""

    VERSION = 0x00
    DSRLOW = 0x04
    DSRHIGH = 0x08
    CTL = 0x0C
    REQUEST = 0x10
    ERR = 0x14
    ICR = 0x18
    IMR = 0x1C
    MACL = 0x20
    MACH = 0x24


class PciResource(IntEnum):
    """BAR numbers. Source: PVRDMA_PCI_RESOURCE_*."""

    MSIX = 0
    REG = 1
    UAR = 2


class DeviceCtl(IntEnum):
    """Values written to CTL. Source: PVRDMA_DEVICE_CTL_*."""

    ACTIVATE = 0
    UNQUIESCE = 1
    RESET = 2


class IntrVector(IntEnum):
    """MSI-X vectors. Source: PVRDMA_INTR_VECTOR_*."""

    RESPONSE = 0
    ASYNC = 1
    CQ = 2


class IntrCause(IntFlag):
    """Bits of ICR. Source: PVRDMA_INTR_CAUSE_*."""

    RESPONSE = 1 << 0
    ASYNC = 1 << 1
    CQ = 1 << 2


class CqFlags(IntFlag):
    """Source: PVRDMA_CQ_FLAG_*."""

    ARMED_SOL = 1 << 0
    ARMED = 1 << 1


class MrFlags(IntFlag):
    """Kind of a memory region; 0 is a user region. Source: PVRDMA_MR_FLAG_*."""

    DMA = 1 << 0
    FRMR = 1 << 1


class AtomicOps(IntFlag):
    """Bits of `DeviceCaps.atomic_ops`. Source: PVRDMA_ATOMIC_OP_*."""

    COMP_SWAP = 1 << 0
    FETCH_ADD = 1 << 1
    MASK_COMP_SWAP = 1 << 2
    MASK_FETCH_ADD = 1 << 3


class BmmeFlags(IntFlag):
    """Bits of `DeviceCaps.bmme_flags`; all three or none. Source: PVRDMA_BMME_FLAG_*."""

    LOCAL_INV = 1 << 0
    REMOTE_INV = 1 << 1
    FAST_REG_WR = 1 << 2


class GidType(IntFlag):
    """Of a GID; `DeviceCaps.gid_types` must be exactly one. Source: PVRDMA_GID_TYPE_FLAG_*."""

    ROCE_V1 = 1 << 0
    ROCE_V2 = 1 << 1


class DeviceMode(IntEnum):
    """Source: PVRDMA_DEVICE_MODE_*."""

    ROCE = 0
    IWARP = 1
    IB = 2


class GosBits(IntEnum):
    """Word size of the guest. Source: PVRDMA_GOS_BITS_*."""

    UNK = 0
    BITS_32 = 1
    BITS_64 = 2


class GosType(IntEnum):
    """Source: PVRDMA_GOS_TYPE_*."""

    UNK = 0
    LINUX = 1


class EqeType(IntEnum):
    """Async events, numbered as IB events. Source: PVRDMA_EVENT_*."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18


class Cmd(IntEnum):
    """Commands. Source: PVRDMA_CMD_*."""

    QUERY_PORT = 0
    QUERY_PKEY = 1
    CREATE_PD = 2
    DESTROY_PD = 3
    CREATE_MR = 4
    DESTROY_MR = 5
    CREATE_CQ = 6
    RESIZE_CQ = 7
    DESTROY_CQ = 8
    CREATE_QP = 9
    MODIFY_QP = 10
    QUERY_QP = 11
    DESTROY_QP = 12
    CREATE_UC = 13
    DESTROY_UC = 14
    CREATE_BIND = 15
    DESTROY_BIND = 16
    CREATE_SRQ = 17
    MODIFY_SRQ = 18
    QUERY_SRQ = 19
    DESTROY_SRQ = 20


class GosInfo(NamedTuple):
    """The guest operating system, from the bit-field word `DeviceSharedRegion.gos_info`."""

    gos_bits: int
    gos_type: int
    gos_ver: int
    gos_misc: int


def unpack_gos_info(word: int) -> GosInfo:
    """Split the bit-field word: 2, 4, 16 and 10 bits from the least significant up."""
    return GosInfo(word & 0x3, word >> 2 & 0xF, word >> 6 & 0xFFFF, word >> 22 & 0x3FF)


def pack_gos_info(info: GosInfo) -> int:
    """The bit-field word of `info`; bits that do not fit are dropped."""
    return (
        info.gos_bits & 0x3
        | (info.gos_type & 0xF) << 2
        | (info.gos_ver & 0xFFFF) << 6
        | (info.gos_misc & 0x3FF) << 22
    )


class DeviceCaps(NamedTuple):
    """What the device can do; GUIDs are 8 bytes in wire order, sizes in bytes."""

    fw_ver: int
    node_guid: bytes
    sys_image_guid: bytes
    max_mr_size: int
    page_size_cap: int
    atomic_arg_sizes: int
    ex_comp_mask: int
    device_cap_flags2: int
    max_fa_bit_boundary: int
    log_max_atomic_inline_arg: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_ee_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    max_ee_init_rd_atom: int
    max_ee: int
    max_rdd: int
    max_mw: int
    max_raw_ipv6_qp: int
    max_raw_ethy_qp: int
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_total_mcast_qp_attach: int
    max_ah: int
    max_fmr: int
    max_map_per_fmr: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_uar: int
    gid_tbl_len: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int
    mode: int
    atomic_ops: int
    bmme_flags: int
    gid_types: int
    max_fast_reg_page_list_len: int


DEVICE_CAPS = Layout(
    DeviceCaps,
    208,
    fw_ver=(0, "Q"),
    node_guid=(8, "8s"),
    sys_image_guid=(16, "8s"),
    max_mr_size=(24, "Q"),
    page_size_cap=(32, "Q"),
    atomic_arg_sizes=(40, "Q"),
    ex_comp_mask=(48, "I"),
    device_cap_flags2=(52, "I"),
    max_fa_bit_boundary=(56, "I"),
    log_max_atomic_inline_arg=(60, "I"),
    vendor_id=(64, "I"),
    vendor_part_id=(68, "I"),
    hw_ver=(72, "I"),
    max_qp=(76, "I"),
    max_qp_wr=(80, "I"),
    device_cap_flags=(84, "I"),
    max_sge=(88, "I"),
    max_sge_rd=(92, "I"),
    max_cq=(96, "I"),
    max_cqe=(100, "I"),
    max_mr=(104, "I"),
    max_pd=(108, "I"),
    max_qp_rd_atom=(112, "I"),
    max_ee_rd_atom=(116, "I"),
    max_res_rd_atom=(120, "I"),
    max_qp_init_rd_atom=(124, "I"),
    max_ee_init_rd_atom=(128, "I"),
    max_ee=(132, "I"),
    max_rdd=(136, "I"),
    max_mw=(140, "I"),
    max_raw_ipv6_qp=(144, "I"),
    max_raw_ethy_qp=(148, "I"),
    max_mcast_grp=(152, "I"),
    max_mcast_qp_attach=(156, "I"),
    max_total_mcast_qp_attach=(160, "I"),
    max_ah=(164, "I"),
    max_fmr=(168, "I"),
    max_map_per_fmr=(172, "I"),
    max_srq=(176, "I"),
    max_srq_wr=(180, "I"),
    max_srq_sge=(184, "I"),
    max_uar=(188, "I"),
    gid_tbl_len=(192, "I"),
    max_pkeys=(196, "H"),
    local_ca_ack_delay=(198, "B"),
    phys_port_cnt=(199, "B"),
    mode=(200, "B"),
    atomic_ops=(201, "B"),
    bmme_flags=(202, "B"),
    gid_types=(203, "B"),
    max_fast_reg_page_list_len=(204, "I"),
)


class RingPageInfo(NamedTuple):
    """A device ring: pages including the state page, bus address of its page directory."""

    num_pages: int
    pdir_dma: int


RING_PAGE_INFO = Layout(RingPageInfo, 16, num_pages=(0, "I"), pdir_dma=(8, "Q"))


class DeviceSharedRegion(NamedTuple):
    """The DSR as a driver older than PPN64_VERSION fills it. Addresses are bus addresses.

    The guest writes all but `caps`, which the device writes. `gos_info` is a bit-field word.
    """

    driver_version: int
    gos_info: int
    cmd_slot_dma: int
    resp_slot_dma: int
    async_ring_pages: RingPageInfo
    cq_ring_pages: RingPageInfo
    uar_pfn: int
    caps: DeviceCaps


DEVICE_SHARED_REGION = Layout(
    DeviceSharedRegion,
    280,
    driver_version=(0, "I"),
    gos_info=(8, "I"),
    cmd_slot_dma=(16, "Q"),
    resp_slot_dma=(24, "Q"),
    async_ring_pages=(32, RING_PAGE_INFO),
    cq_ring_pages=(48, RING_PAGE_INFO),
    uar_pfn=(64, "I"),
    caps=(72, DEVICE_CAPS),
)


class DeviceSharedRegion64(NamedTuple):
    """The DSR with a 64-bit UAR page frame. Source: pvrdma_device_shared_region.uar_pfn64."""

    driver_version: int
    gos_info: int
    cmd_slot_dma: int
    resp_slot_dma: int
    async_ring_pages: RingPageInfo
    cq_ring_pages: RingPageInfo
    uar_pfn64: int
    caps: DeviceCaps


DEVICE_SHARED_REGION64 = Layout(
    DeviceSharedRegion64,
    280,
    driver_version=(0, "I"),
    gos_info=(8, "I"),
    cmd_slot_dma=(16, "Q"),
    resp_slot_dma=(24, "Q"),
    async_ring_pages=(32, RING_PAGE_INFO),
    cq_ring_pages=(48, RING_PAGE_INFO),
    uar_pfn64=(64, "Q"),
    caps=(72, DEVICE_CAPS),
)


class Eqe(NamedTuple):
    """Async event: an `EqeType` and the handle or port it is about."""

    type: int
    info: int


EQE = Layout(Eqe, 8, type=(0, "I"), info=(4, "I"))


class Cqne(NamedTuple):
    """CQ notification: the CQ's handle."""

    info: int


CQNE = Layout(Cqne, 4, info=(0, "I"))


class CmdHdr(NamedTuple):
    """Head of every request; `response` is opaque and goes into the answer."""

    response: int
    cmd: int


CMD_HDR = Layout(CmdHdr, 16, response=(0, "Q"), cmd=(8, "I"))


class CmdRespHdr(NamedTuple):
    """Head of every response; `ack` is CMD_FIRST_RESP + the command."""

    response: int
    ack: int
    err: int


CMD_RESP_HDR = Layout(CmdRespHdr, 16, response=(0, "Q"), ack=(8, "I"), err=(12, "B"))


class CmdQueryPort(NamedTuple):
    """QUERY_PORT request."""

    port_num: int


CMD_QUERY_PORT = Layout(CmdQueryPort, 24, port_num=(16, "B"))


class CmdQueryPortResp(NamedTuple):
    """QUERY_PORT response."""

    attrs: PortAttr


CMD_QUERY_PORT_RESP = Layout(CmdQueryPortResp, 64, attrs=(16, PORT_ATTR))


class CmdQueryPkey(NamedTuple):
    """QUERY_PKEY request."""

    port_num: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, never called


CMD_QUERY_PKEY = Layout(CmdQueryPkey, 24, port_num=(16, "B"), index=(17, "B"))


class CmdQueryPkeyResp(NamedTuple):
    """QUERY_PKEY response."""

    pkey: int


CMD_QUERY_PKEY_RESP = Layout(CmdQueryPkeyResp, 24, pkey=(16, "H"))


class CmdCreateUc(NamedTuple):
    """CREATE_UC request: the absolute page frame of the context's UAR page."""

    pfn: int


CMD_CREATE_UC = Layout(CmdCreateUc, 24, pfn=(16, "I"))


class CmdCreateUc64(NamedTuple):
    """CREATE_UC request since PPN64_VERSION. Source: pvrdma_cmd_create_uc.pfn64."""

    pfn64: int


CMD_CREATE_UC64 = Layout(CmdCreateUc64, 24, pfn64=(16, "Q"))


class CmdCreateUcResp(NamedTuple):
    """CREATE_UC response."""

    ctx_handle: int


CMD_CREATE_UC_RESP = Layout(CmdCreateUcResp, 24, ctx_handle=(16, "I"))


class CmdDestroyUc(NamedTuple):
    """DESTROY_UC request."""

    ctx_handle: int


CMD_DESTROY_UC = Layout(CmdDestroyUc, 24, ctx_handle=(16, "I"))


class CmdCreatePd(NamedTuple):
    """CREATE_PD request; `ctx_handle` 0 is the kernel driver."""

    ctx_handle: int


CMD_CREATE_PD = Layout(CmdCreatePd, 24, ctx_handle=(16, "I"))


class CmdCreatePdResp(NamedTuple):
    """CREATE_PD response."""

    pd_handle: int


CMD_CREATE_PD_RESP = Layout(CmdCreatePdResp, 24, pd_handle=(16, "I"))


class CmdDestroyPd(NamedTuple):
    """DESTROY_PD request."""

    pd_handle: int


CMD_DESTROY_PD = Layout(CmdDestroyPd, 24, pd_handle=(16, "I"))


class CmdCreateMr(NamedTuple):
    """CREATE_MR request; `length` in bytes, `flags` are `MrFlags`."""

    start: int
    length: int
    pdir_dma: int
    pd_handle: int
    access_flags: int
    flags: int
    nchunks: int


CMD_CREATE_MR = Layout(
    CmdCreateMr,
    56,
    start=(16, "Q"),
    length=(24, "Q"),
    pdir_dma=(32, "Q"),
    pd_handle=(40, "I"),
    access_flags=(44, "I"),
    flags=(48, "I"),
    nchunks=(52, "I"),
)


class CmdCreateMrResp(NamedTuple):
    """CREATE_MR response."""

    mr_handle: int
    lkey: int
    rkey: int


CMD_CREATE_MR_RESP = Layout(
    CmdCreateMrResp, 32, mr_handle=(16, "I"), lkey=(20, "I"), rkey=(24, "I")
)


class CmdDestroyMr(NamedTuple):
    """DESTROY_MR request."""

    mr_handle: int


CMD_DESTROY_MR = Layout(CmdDestroyMr, 24, mr_handle=(16, "I"))


class CmdCreateCq(NamedTuple):
    """CREATE_CQ request; `nchunks` pages, the state page included."""

    pdir_dma: int
    ctx_handle: int
    cqe: int
    nchunks: int


CMD_CREATE_CQ = Layout(
    CmdCreateCq, 40, pdir_dma=(16, "Q"), ctx_handle=(24, "I"), cqe=(28, "I"), nchunks=(32, "I")
)


class CmdCreateCqResp(NamedTuple):
    """CREATE_CQ response; `cqe` must echo the request."""

    cq_handle: int
    cqe: int


CMD_CREATE_CQ_RESP = Layout(CmdCreateCqResp, 24, cq_handle=(16, "I"), cqe=(20, "I"))


class CmdResizeCq(NamedTuple):
    """RESIZE_CQ request; Linux never sends it."""

    cq_handle: int
    cqe: int


CMD_RESIZE_CQ = Layout(CmdResizeCq, 24, cq_handle=(16, "I"), cqe=(20, "I"))


class CmdResizeCqResp(NamedTuple):
    """RESIZE_CQ response."""

    cqe: int


CMD_RESIZE_CQ_RESP = Layout(CmdResizeCqResp, 24, cqe=(16, "I"))


class CmdDestroyCq(NamedTuple):
    """DESTROY_CQ request."""

    cq_handle: int


CMD_DESTROY_CQ = Layout(CmdDestroyCq, 24, cq_handle=(16, "I"))


class CmdCreateSrq(NamedTuple):
    """CREATE_SRQ request."""

    pdir_dma: int
    pd_handle: int
    nchunks: int
    attrs: SrqAttr
    srq_type: int


CMD_CREATE_SRQ = Layout(
    CmdCreateSrq,
    56,
    pdir_dma=(16, "Q"),
    pd_handle=(24, "I"),
    nchunks=(28, "I"),
    attrs=(32, SRQ_ATTR),
    srq_type=(48, "B"),
)


class CmdCreateSrqResp(NamedTuple):
    """CREATE_SRQ response."""

    srqn: int


CMD_CREATE_SRQ_RESP = Layout(CmdCreateSrqResp, 24, srqn=(16, "I"))


class CmdModifySrq(NamedTuple):
    """MODIFY_SRQ request; `attr_mask` is a `SrqAttrMask`."""

    srq_handle: int
    attr_mask: int
    attrs: SrqAttr


CMD_MODIFY_SRQ = Layout(
    CmdModifySrq, 40, srq_handle=(16, "I"), attr_mask=(20, "I"), attrs=(24, SRQ_ATTR)
)


class CmdQuerySrq(NamedTuple):
    """QUERY_SRQ request."""

    srq_handle: int


CMD_QUERY_SRQ = Layout(CmdQuerySrq, 24, srq_handle=(16, "I"))


class CmdQuerySrqResp(NamedTuple):
    """QUERY_SRQ response."""

    attrs: SrqAttr


CMD_QUERY_SRQ_RESP = Layout(CmdQuerySrqResp, 32, attrs=(16, SRQ_ATTR))


class CmdDestroySrq(NamedTuple):
    """DESTROY_SRQ request."""

    srq_handle: int


CMD_DESTROY_SRQ = Layout(CmdDestroySrq, 24, srq_handle=(16, "I"))


class CmdCreateQp(NamedTuple):
    """CREATE_QP request; `send_chunks` does not count the state page, `total_chunks` does."""

    pdir_dma: int
    pd_handle: int
    send_cq_handle: int
    recv_cq_handle: int
    srq_handle: int
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    lkey: int
    access_flags: int
    total_chunks: int
    send_chunks: int
    max_atomic_arg: int
    sq_sig_all: int
    qp_type: int
    is_srq: int


CMD_CREATE_QP = Layout(
    CmdCreateQp,
    80,
    pdir_dma=(16, "Q"),
    pd_handle=(24, "I"),
    send_cq_handle=(28, "I"),
    recv_cq_handle=(32, "I"),
    srq_handle=(36, "I"),
    max_send_wr=(40, "I"),
    max_recv_wr=(44, "I"),
    max_send_sge=(48, "I"),
    max_recv_sge=(52, "I"),
    max_inline_data=(56, "I"),
    lkey=(60, "I"),
    access_flags=(64, "I"),
    total_chunks=(68, "H"),
    send_chunks=(70, "H"),
    max_atomic_arg=(72, "H"),
    sq_sig_all=(74, "B"),
    qp_type=(75, "B"),
    is_srq=(76, "B"),
)


class CmdCreateQpResp(NamedTuple):
    """CREATE_QP response before QPHANDLE_VERSION: the QPN is the handle."""

    qpn: int
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int


CMD_CREATE_QP_RESP = Layout(
    CmdCreateQpResp,
    40,
    qpn=(16, "I"),
    max_send_wr=(20, "I"),
    max_recv_wr=(24, "I"),
    max_send_sge=(28, "I"),
    max_recv_sge=(32, "I"),
    max_inline_data=(36, "I"),
)


class CmdCreateQpRespV2(NamedTuple):
    """CREATE_QP response since QPHANDLE_VERSION."""

    qpn: int
    qp_handle: int
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int


CMD_CREATE_QP_RESP_V2 = Layout(
    CmdCreateQpRespV2,
    48,
    qpn=(16, "I"),
    qp_handle=(20, "I"),
    max_send_wr=(24, "I"),
    max_recv_wr=(28, "I"),
    max_send_sge=(32, "I"),
    max_recv_sge=(36, "I"),
    max_inline_data=(40, "I"),
)


class CmdModifyQp(NamedTuple):
    """MODIFY_QP request; `attr_mask` is a `QpAttrMask`."""

    qp_handle: int
    attr_mask: int
    attrs: QpAttr


CMD_MODIFY_QP = Layout(
    CmdModifyQp, 184, qp_handle=(16, "I"), attr_mask=(20, "I"), attrs=(24, QP_ATTR)
)


class CmdQueryQp(NamedTuple):
    """QUERY_QP request."""

    qp_handle: int
    attr_mask: int


CMD_QUERY_QP = Layout(CmdQueryQp, 24, qp_handle=(16, "I"), attr_mask=(20, "I"))


class CmdQueryQpResp(NamedTuple):
    """QUERY_QP response."""

    attrs: QpAttr


CMD_QUERY_QP_RESP = Layout(CmdQueryQpResp, 176, attrs=(16, QP_ATTR))


class CmdDestroyQp(NamedTuple):
    """DESTROY_QP request."""

    qp_handle: int


CMD_DESTROY_QP = Layout(CmdDestroyQp, 24, qp_handle=(16, "I"))


class CmdDestroyQpResp(NamedTuple):
    """DESTROY_QP response; the driver does not look at it."""

    events_reported: int


CMD_DESTROY_QP_RESP = Layout(CmdDestroyQpResp, 24, events_reported=(16, "I"))


class CmdCreateBind(NamedTuple):
    """CREATE_BIND request: a GID (16 bytes, wire order) and its `GidType` for a table index."""

    mtu: int
    vlan: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, never called
    new_gid: bytes
    gid_type: int


CMD_CREATE_BIND = Layout(
    CmdCreateBind,
    48,
    mtu=(16, "I"),
    vlan=(20, "I"),
    index=(24, "I"),
    new_gid=(28, "16s"),
    gid_type=(44, "B"),
)


class CmdDestroyBind(NamedTuple):
    """DESTROY_BIND request."""

    index: int  # type: ignore[assignment]  # shadows tuple.index, never called
    dest_gid: bytes


CMD_DESTROY_BIND = Layout(CmdDestroyBind, 40, index=(16, "I"), dest_gid=(20, "16s"))


C_LAYOUTS = (
    CMapping("struct pvrdma_device_caps", DEVICE_CAPS),
    CMapping("struct pvrdma_ring_page_info", RING_PAGE_INFO),
    CMapping("struct pvrdma_device_shared_region", DEVICE_SHARED_REGION),
    CMapping("struct pvrdma_device_shared_region", DEVICE_SHARED_REGION64),
    CMapping("struct pvrdma_eqe", EQE),
    CMapping("struct pvrdma_cqne", CQNE),
    CMapping("struct pvrdma_cmd_hdr", CMD_HDR),
    CMapping("struct pvrdma_cmd_resp_hdr", CMD_RESP_HDR),
    CMapping("struct pvrdma_cmd_query_port", CMD_QUERY_PORT),
    CMapping("struct pvrdma_cmd_query_port_resp", CMD_QUERY_PORT_RESP),
    CMapping("struct pvrdma_cmd_query_pkey", CMD_QUERY_PKEY),
    CMapping("struct pvrdma_cmd_query_pkey_resp", CMD_QUERY_PKEY_RESP),
    CMapping("struct pvrdma_cmd_create_uc", CMD_CREATE_UC),
    CMapping("struct pvrdma_cmd_create_uc", CMD_CREATE_UC64),
    CMapping("struct pvrdma_cmd_create_uc_resp", CMD_CREATE_UC_RESP),
    CMapping("struct pvrdma_cmd_destroy_uc", CMD_DESTROY_UC),
    CMapping("struct pvrdma_cmd_create_pd", CMD_CREATE_PD),
    CMapping("struct pvrdma_cmd_create_pd_resp", CMD_CREATE_PD_RESP),
    CMapping("struct pvrdma_cmd_destroy_pd", CMD_DESTROY_PD),
    CMapping("struct pvrdma_cmd_create_mr", CMD_CREATE_MR),
    CMapping("struct pvrdma_cmd_create_mr_resp", CMD_CREATE_MR_RESP),
    CMapping("struct pvrdma_cmd_destroy_mr", CMD_DESTROY_MR),
    CMapping("struct pvrdma_cmd_create_cq", CMD_CREATE_CQ),
    CMapping("struct pvrdma_cmd_create_cq_resp", CMD_CREATE_CQ_RESP),
    CMapping("struct pvrdma_cmd_resize_cq", CMD_RESIZE_CQ),
    CMapping("struct pvrdma_cmd_resize_cq_resp", CMD_RESIZE_CQ_RESP),
    CMapping("struct pvrdma_cmd_destroy_cq", CMD_DESTROY_CQ),
    CMapping("struct pvrdma_cmd_create_srq", CMD_CREATE_SRQ),
    CMapping("struct pvrdma_cmd_create_srq_resp", CMD_CREATE_SRQ_RESP),
    CMapping("struct pvrdma_cmd_modify_srq", CMD_MODIFY_SRQ),
    CMapping("struct pvrdma_cmd_query_srq", CMD_QUERY_SRQ),
    CMapping("struct pvrdma_cmd_query_srq_resp", CMD_QUERY_SRQ_RESP),
    CMapping("struct pvrdma_cmd_destroy_srq", CMD_DESTROY_SRQ),
    CMapping("struct pvrdma_cmd_create_qp", CMD_CREATE_QP),
    CMapping("struct pvrdma_cmd_create_qp_resp", CMD_CREATE_QP_RESP),
    CMapping("struct pvrdma_cmd_create_qp_resp_v2", CMD_CREATE_QP_RESP_V2),
    CMapping("struct pvrdma_cmd_modify_qp", CMD_MODIFY_QP),
    CMapping("struct pvrdma_cmd_query_qp", CMD_QUERY_QP),
    CMapping("struct pvrdma_cmd_query_qp_resp", CMD_QUERY_QP_RESP),
    CMapping("struct pvrdma_cmd_destroy_qp", CMD_DESTROY_QP),
    CMapping("struct pvrdma_cmd_destroy_qp_resp", CMD_DESTROY_QP_RESP),
    CMapping("struct pvrdma_cmd_create_bind", CMD_CREATE_BIND),
    CMapping("struct pvrdma_cmd_destroy_bind", CMD_DESTROY_BIND),
)

C_CONSTANTS = (
    CConstants("PVRDMA_REG_", Reg.__members__),
    CConstants("PVRDMA_PCI_RESOURCE_", PciResource.__members__),
    CConstants("PVRDMA_DEVICE_CTL_", DeviceCtl.__members__),
    CConstants("PVRDMA_INTR_VECTOR_", IntrVector.__members__),
    CConstants("PVRDMA_INTR_CAUSE_", IntrCause.__members__),
    CConstants("PVRDMA_CQ_FLAG_", CqFlags.__members__),
    CConstants("PVRDMA_MR_FLAG_", MrFlags.__members__),
    CConstants("PVRDMA_ATOMIC_OP_", AtomicOps.__members__),
    CConstants("PVRDMA_BMME_FLAG_", BmmeFlags.__members__),
    CConstants("PVRDMA_GID_TYPE_FLAG_", GidType.__members__),
    CConstants("PVRDMA_DEVICE_MODE_", DeviceMode.__members__),
    CConstants("PVRDMA_GOS_", {"BITS_32": GosBits.BITS_32, "BITS_64": GosBits.BITS_64}),
    CConstants("PVRDMA_GOS_TYPE_", GosType.__members__),
    CConstants("PVRDMA_EVENT_", EqeType.__members__),
    CConstants("PVRDMA_CMD_", Cmd.__members__),
    CConstants(
        "PVRDMA_",
        {
            "ROCEV1_VERSION": ROCEV1_VERSION,
            "ROCEV2_VERSION": ROCEV2_VERSION,
            "PPN64_VERSION": PPN64_VERSION,
            "QPHANDLE_VERSION": QPHANDLE_VERSION,
            "VERSION": PVRDMA_VERSION,
            "BOARD_ID": BOARD_ID,
            "REV_ID": REV_ID,
            "PTABLE_SHIFT": PTABLE_SHIFT,
            "PDIR_SHIFT": PDIR_SHIFT,
            "PAGE_DIR_MAX_PAGES": PAGE_DIR_MAX_PAGES,
            "MAX_FAST_REG_PAGES": MAX_FAST_REG_PAGES,
            "MAX_INTERRUPTS": MAX_INTERRUPTS,
            "CMD_FIRST_RESP": CMD_FIRST_RESP,
        },
    ),
)

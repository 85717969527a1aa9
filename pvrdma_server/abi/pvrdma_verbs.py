"""vmw_pvrdma/pvrdma_verbs.h: attributes of ports, QPs, SRQs, addresses.

Contract: the attribute records travel inside commands (`pvrdma_dev_api`) and are never validated
here. Numbers are the InfiniBand verbs' own. `PortPhysState`, `DeviceCapFlags`, `SrqAttrMask` and
`SrqType` have no name in the header, but the driver passes IB core's numbers through these fields:
their source is include/rdma/ib_verbs.h.

Source: pvrdma_verbs.h, the symbol `pvrdma_` + the name in C form unless a docstring says
otherwise.
"""

from enum import IntEnum, IntFlag
from typing import NamedTuple

from pvrdma_server.abi.layout import CConstants, CMapping, Layout

GID_SIZE = 16


class LinkLayer(IntEnum):
    """Source: PVRDMA_LINK_LAYER_*."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class Mtu(IntEnum):
    """Path MTU code; `mtu_bytes` gives its size. Source: PVRDMA_MTU_*."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5


class PortState(IntEnum):
    """Source: PVRDMA_PORT_*."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class PortPhysState(IntEnum):
    """Source: ib_verbs.h, enum ib_port_phys_state."""

    SLEEP = 1
    POLLING = 2
    DISABLED = 3
    PORT_CONFIGURATION_TRAINING = 4
    LINK_UP = 5
    LINK_ERROR_RECOVERY = 6
    PHY_TEST = 7


class PortCapFlags(IntFlag):
    """Source: PVRDMA_PORT_*."""

    SM = 1 << 1
    NOTICE_SUP = 1 << 2
    TRAP_SUP = 1 << 3
    OPT_IPD_SUP = 1 << 4
    AUTO_MIGR_SUP = 1 << 5
    SL_MAP_SUP = 1 << 6
    MKEY_NVRAM = 1 << 7
    PKEY_NVRAM = 1 << 8
    LED_INFO_SUP = 1 << 9
    SM_DISABLED = 1 << 10
    SYS_IMAGE_GUID_SUP = 1 << 11
    PKEY_SW_EXT_PORT_TRAP_SUP = 1 << 12
    EXTENDED_SPEEDS_SUP = 1 << 14
    CM_SUP = 1 << 16
    SNMP_TUNNEL_SUP = 1 << 17
    REINIT_SUP = 1 << 18
    DEVICE_MGMT_SUP = 1 << 19
    VENDOR_CLASS_SUP = 1 << 20
    DR_NOTICE_SUP = 1 << 21
    CAP_MASK_NOTICE_SUP = 1 << 22
    BOOT_MGMT_SUP = 1 << 23
    LINK_LATENCY_SUP = 1 << 24
    CLIENT_REG_SUP = 1 << 25
    IP_BASED_GIDS = 1 << 26


class PortWidth(IntEnum):
    """Source: PVRDMA_WIDTH_*."""

    WIDTH_1X = 1
    WIDTH_4X = 2
    WIDTH_8X = 4
    WIDTH_12X = 8


class PortSpeed(IntEnum):
    """Per-lane speed. Source: PVRDMA_SPEED_*."""

    SDR = 1
    DDR = 2
    QDR = 4
    FDR10 = 8
    FDR = 16
    EDR = 32


class DeviceCapFlags(IntFlag):
    """Bits of `DeviceCaps.device_cap_flags`, handed raw to IB core.

    Source: ib_verbs.h and ib_user_verbs.h, IB_(UVERBS_)DEVICE_*; those a PVRDMA device may set.
    """

    RESIZE_MAX_WR = 1 << 0
    BAD_PKEY_CNTR = 1 << 1
    BAD_QKEY_CNTR = 1 << 2
    RAW_MULTI = 1 << 3
    AUTO_PATH_MIG = 1 << 4
    CHANGE_PHY_PORT = 1 << 5
    UD_AV_PORT_ENFORCE = 1 << 6
    CURR_QP_STATE_MOD = 1 << 7
    SHUTDOWN_PORT = 1 << 8
    PORT_ACTIVE_EVENT = 1 << 10
    SYS_IMAGE_GUID = 1 << 11
    RC_RNR_NAK_GEN = 1 << 12
    SRQ_RESIZE = 1 << 13
    N_NOTIFY_CQ = 1 << 14
    MEM_MGT_EXTENSIONS = 1 << 21


class AhFlags(IntFlag):
    """Source: enum pvrdma_ah_flags, PVRDMA_AH_*."""

    GRH = 1


class Rate(IntEnum):
    """Static rate. Source: PVRDMA_RATE_*."""

    RATE_PORT_CURRENT = 0
    RATE_2_5_GBPS = 2
    RATE_10_GBPS = 3
    RATE_30_GBPS = 4
    RATE_5_GBPS = 5
    RATE_20_GBPS = 6
    RATE_40_GBPS = 7
    RATE_60_GBPS = 8
    RATE_80_GBPS = 9
    RATE_120_GBPS = 10
    RATE_14_GBPS = 11
    RATE_56_GBPS = 12
    RATE_112_GBPS = 13
    RATE_168_GBPS = 14
    RATE_25_GBPS = 15
    RATE_100_GBPS = 16
    RATE_200_GBPS = 17
    RATE_300_GBPS = 18


class CqNotifyFlags(IntFlag):
    """Guest-internal: the device sees UAR bits. Source: PVRDMA_CQ_*."""

    SOLICITED = 1 << 0
    NEXT_COMP = 1 << 1
    SOLICITED_MASK = SOLICITED | NEXT_COMP
    REPORT_MISSED_EVENTS = 1 << 2


class QpType(IntEnum):
    """Source: PVRDMA_QPT_*. The Linux driver creates GSI, RC and UD only."""

    SMI = 0
    GSI = 1
    RC = 2
    UC = 3
    UD = 4
    RAW_IPV6 = 5
    RAW_ETHERTYPE = 6
    RAW_PACKET = 8
    XRC_INI = 9
    XRC_TGT = 10


class QpAttrMask(IntFlag):
    """Which fields of `QpAttr` a command means. Source: PVRDMA_QP_*."""

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20


class QpState(IntEnum):
    """Source: PVRDMA_QPS_*."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class MigState(IntEnum):
    """Source: PVRDMA_MIG_*."""

    MIGRATED = 0
    REARM = 1
    ARMED = 2


class SendFlags(IntFlag):
    """Source: PVRDMA_SEND_*."""

    FENCE = 1 << 0
    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3
    IP_CSUM = 1 << 4


class AccessFlags(IntFlag):
    """Rights of a region or QP. Source: PVRDMA_ACCESS_*, PVRDMA_ZERO_BASED."""

    LOCAL_WRITE = 1 << 0
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5
    ON_DEMAND = 1 << 6


ACCESS_OPTIONAL_MASK = 0x3FF0_0000
"""Access bits a device may ignore. Source: ib_verbs.h, IB_ACCESS_OPTIONAL."""
ACCESS_HUGETLB = 1 << 7
"""How the guest made the memory; the driver passes it on. Source: ib_verbs.h, IB_ACCESS_HUGETLB."""


class SrqAttrMask(IntFlag):
    """Source: ib_verbs.h, enum ib_srq_attr_mask. The Linux driver sends LIMIT only."""

    MAX_WR = 1 << 0
    LIMIT = 1 << 1


class SrqType(IntEnum):
    """Source: ib_verbs.h, enum ib_srq_type."""

    BASIC = 0
    XRC = 1
    TM = 2


class PortAttr(NamedTuple):
    """Answer of QUERY_PORT. `max_msg_sz` is in bytes; MTUs are `Mtu` codes."""

    state: int
    max_mtu: int
    active_mtu: int
    gid_tbl_len: int
    port_cap_flags: int
    max_msg_sz: int
    bad_pkey_cntr: int
    qkey_viol_cntr: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    lmc: int
    max_vl_num: int
    sm_sl: int
    subnet_timeout: int
    init_type_reply: int
    active_width: int
    active_speed: int
    phys_state: int


PORT_ATTR = Layout(
    PortAttr,
    48,
    state=(0, "I"),
    max_mtu=(4, "I"),
    active_mtu=(8, "I"),
    gid_tbl_len=(12, "I"),
    port_cap_flags=(16, "I"),
    max_msg_sz=(20, "I"),
    bad_pkey_cntr=(24, "I"),
    qkey_viol_cntr=(28, "I"),
    pkey_tbl_len=(32, "H"),
    lid=(34, "H"),
    sm_lid=(36, "H"),
    lmc=(38, "B"),
    max_vl_num=(39, "B"),
    sm_sl=(40, "B"),
    subnet_timeout=(41, "B"),
    init_type_reply=(42, "B"),
    active_width=(43, "B"),
    active_speed=(44, "B"),
    phys_state=(45, "B"),
)


class GlobalRoute(NamedTuple):
    """Where a packet goes: destination GID (16 bytes, wire order) and our GID's index."""

    dgid: bytes
    flow_label: int
    sgid_index: int
    hop_limit: int
    traffic_class: int


GLOBAL_ROUTE = Layout(
    GlobalRoute,
    24,
    dgid=(0, "16s"),
    flow_label=(16, "I"),
    sgid_index=(20, "B"),
    hop_limit=(21, "B"),
    traffic_class=(22, "B"),
)


class AhAttr(NamedTuple):
    """Address of a connected QP's peer."""

    grh: GlobalRoute
    dlid: int
    vlan_id: int
    sl: int
    src_path_bits: int
    static_rate: int
    ah_flags: int
    port_num: int
    dmac: bytes


AH_ATTR = Layout(
    AhAttr,
    40,
    grh=(0, GLOBAL_ROUTE),
    dlid=(24, "H"),
    vlan_id=(26, "H"),
    sl=(28, "B"),
    src_path_bits=(29, "B"),
    static_rate=(30, "B"),
    ah_flags=(31, "B"),
    port_num=(32, "B"),
    dmac=(33, "6s"),
)


class QpCap(NamedTuple):
    """Queue sizes of a QP, in entries, elements and bytes."""

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int


QP_CAP = Layout(
    QpCap,
    24,
    max_send_wr=(0, "I"),
    max_recv_wr=(4, "I"),
    max_send_sge=(8, "I"),
    max_recv_sge=(12, "I"),
    max_inline_data=(16, "I"),
)


class QpAttr(NamedTuple):
    """QP attributes; `QpAttrMask` says which of them count."""

    qp_state: int
    cur_qp_state: int
    path_mtu: int
    path_mig_state: int
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: int
    pkey_index: int
    alt_pkey_index: int
    en_sqd_async_notify: int
    sq_draining: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    alt_port_num: int
    alt_timeout: int
    cap: QpCap
    ah_attr: AhAttr
    alt_ah_attr: AhAttr


QP_ATTR = Layout(
    QpAttr,
    160,
    qp_state=(0, "I"),
    cur_qp_state=(4, "I"),
    path_mtu=(8, "I"),
    path_mig_state=(12, "I"),
    qkey=(16, "I"),
    rq_psn=(20, "I"),
    sq_psn=(24, "I"),
    dest_qp_num=(28, "I"),
    qp_access_flags=(32, "I"),
    pkey_index=(36, "H"),
    alt_pkey_index=(38, "H"),
    en_sqd_async_notify=(40, "B"),
    sq_draining=(41, "B"),
    max_rd_atomic=(42, "B"),
    max_dest_rd_atomic=(43, "B"),
    min_rnr_timer=(44, "B"),
    port_num=(45, "B"),
    timeout=(46, "B"),
    retry_cnt=(47, "B"),
    rnr_retry=(48, "B"),
    alt_port_num=(49, "B"),
    alt_timeout=(50, "B"),
    cap=(56, QP_CAP),
    ah_attr=(80, AH_ATTR),
    alt_ah_attr=(120, AH_ATTR),
)


class SrqAttr(NamedTuple):
    """SRQ sizes; `srq_limit` arms the SRQ_LIMIT_REACHED event."""

    max_wr: int
    max_sge: int
    srq_limit: int


SRQ_ATTR = Layout(SrqAttr, 16, max_wr=(0, "I"), max_sge=(4, "I"), srq_limit=(8, "I"))


def mtu_bytes(mtu: int) -> int:
    """Size in bytes of an MTU code 1 to 5.

    Raises:
        ValueError: `mtu` is no code.
    """
    return 128 << Mtu(mtu)


C_LAYOUTS = (
    CMapping("struct pvrdma_port_attr", PORT_ATTR),
    CMapping("struct pvrdma_global_route", GLOBAL_ROUTE),
    CMapping("struct pvrdma_ah_attr", AH_ATTR),
    CMapping("struct pvrdma_qp_cap", QP_CAP),
    CMapping("struct pvrdma_qp_attr", QP_ATTR),
    CMapping("struct pvrdma_srq_attr", SRQ_ATTR),
)

C_CONSTANTS = (
    CConstants("PVRDMA_LINK_LAYER_", LinkLayer.__members__),
    CConstants("PVRDMA_", Mtu.__members__),
    CConstants("PVRDMA_PORT_", PortState.__members__),
    CConstants("PVRDMA_PORT_", PortCapFlags.__members__),
    CConstants("PVRDMA_", PortWidth.__members__),
    CConstants("PVRDMA_SPEED_", PortSpeed.__members__),
    CConstants("PVRDMA_AH_", AhFlags.__members__),
    CConstants("PVRDMA_", Rate.__members__),
    CConstants("PVRDMA_CQ_", CqNotifyFlags.__members__),
    CConstants("PVRDMA_QPT_", QpType.__members__),
    CConstants("PVRDMA_QP_", QpAttrMask.__members__),
    CConstants("PVRDMA_QPS_", QpState.__members__),
    CConstants("PVRDMA_MIG_", MigState.__members__),
    CConstants("PVRDMA_SEND_", SendFlags.__members__),
    CConstants(
        "PVRDMA_ACCESS_",
        {name: bit for name, bit in AccessFlags.__members__.items() if name != "ZERO_BASED"},
    ),
    CConstants("PVRDMA_", {"ZERO_BASED": AccessFlags.ZERO_BASED}),
)

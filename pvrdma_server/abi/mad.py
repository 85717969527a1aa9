"""What travels on QP1: the 40-byte network header area of a receive, and the MAD header.

Contract: pure formats, big-endian throughout. Every UD receive begins with 40 bytes that say where
the datagram came from. For RoCE v1, and RoCE v2 over IPv6, they are one 40-byte header; for RoCE
v2 over IPv4 they are 20 zero bytes and the IPv4 header. The guest's IB core addresses replies from
this area alone, so it tells the three apart by version, checksum and next header.

Source: InfiniBand Architecture Specification vol. 1, 8.3 (GRH) and 13.4 (MADs), annexes A16 and
A17 (RoCE); ib_mad.h, ib_verbs.h (`rdma_network_hdr`); pvrdma_verbs.h (`pvrdma_grh`).
"""

from enum import IntEnum
from struct import unpack
from typing import NamedTuple

from pvrdma_server.abi.layout import BigEndianLayout, CMapping, ReadableBuffer
from pvrdma_server.abi.vmw_pvrdma_abi import NetworkHdrType

GRH_SIZE = 40
IPV4_HDR_SIZE = 20
MAD_SIZE = 256
MAD_HDR_SIZE = 24
MAD_BASE_VERSION = 1
CM_CLASS_VERSION = 2

GSI_QPN = 1
GSI_QKEY = 0x8001_0000
"""Key of every QP1. Source: InfiniBand Architecture Specification vol. 1, 13.5.3.3."""
OWN_QKEY = 0x8000_0000
"""A request's key with this bit set stands for the sending queue pair's own. Source: ibid., 10.2.4."""

NEXT_HDR_IBA = 0x1B
"""`Grh.next_hdr` of RoCE v1 and InfiniBand."""
IP_PROTOCOL_UDP = 17

BTH_SIZE, DETH_SIZE, ICRC_SIZE, UDP_HDR_SIZE = 12, 8, 4, 8
_DONT_FRAGMENT = 0x4000


class MgmtClass(IntEnum):
    """Source: ib_mad.h, IB_MGMT_CLASS_*."""

    SUBN_LID_ROUTED = 0x01
    SUBN_ADM = 0x03
    PERF_MGMT = 0x04
    BM = 0x05
    DEVICE_MGMT = 0x06
    CM = 0x07
    SNMP = 0x08
    DEVICE_ADM = 0x10
    BOOT_MGMT = 0x11
    BIS = 0x12
    CONG_MGMT = 0x21
    SUBN_DIRECTED_ROUTE = 0x81


class MgmtMethod(IntEnum):
    """Source: ib_mad.h, IB_MGMT_METHOD_*."""

    GET = 0x01
    SET = 0x02
    SEND = 0x03
    TRAP = 0x05
    REPORT = 0x06
    TRAP_REPRESS = 0x07
    GET_RESP = 0x81
    REPORT_RESP = 0x86


class CmAttrId(IntEnum):
    """Messages of the communication manager. Source: ib_cm.h, CM_*_ATTR_ID."""

    CLASS_PORT_INFO = 0x0001
    REQ = 0x0010
    MRA = 0x0011
    REJ = 0x0012
    REP = 0x0013
    RTU = 0x0014
    DREQ = 0x0015
    DREP = 0x0016
    SIDR_REQ = 0x0017
    SIDR_REP = 0x0018
    LAP = 0x0019
    APR = 0x001A


class MadHdr(NamedTuple):
    """Head of every MAD; its data follow. Source: ib_mad.h, struct ib_mad_hdr."""

    base_version: int
    mgmt_class: int
    class_version: int
    method: int
    status: int
    class_specific: int
    tid: int
    attr_id: int
    attr_mod: int


MAD_HDR = BigEndianLayout(
    MadHdr,
    MAD_HDR_SIZE,
    base_version=(0, "B"),
    mgmt_class=(1, "B"),
    class_version=(2, "B"),
    method=(3, "B"),
    status=(4, "H"),
    class_specific=(6, "H"),
    tid=(8, "Q"),
    attr_id=(16, "H"),
    attr_mod=(20, "I"),
)


class Grh(NamedTuple):
    """Global route header, the shape of an IPv6 header; `paylen` in bytes, GIDs in wire order."""

    version_tclass_flow: int
    paylen: int
    next_hdr: int
    hop_limit: int
    sgid: bytes
    dgid: bytes


GRH = BigEndianLayout(
    Grh,
    GRH_SIZE,
    version_tclass_flow=(0, "I"),
    paylen=(4, "H"),
    next_hdr=(6, "B"),
    hop_limit=(7, "B"),
    sgid=(8, "16s"),
    dgid=(24, "16s"),
)


class Ipv4Hdr(NamedTuple):
    """IPv4 header without options; `total_length` in bytes, addresses in wire order."""

    version_ihl: int
    tos: int
    total_length: int
    identification: int
    flags_fragment: int
    ttl: int
    protocol: int
    checksum: int
    saddr: bytes
    daddr: bytes


IPV4_HDR = BigEndianLayout(
    Ipv4Hdr,
    IPV4_HDR_SIZE,
    version_ihl=(0, "B"),
    tos=(1, "B"),
    total_length=(2, "H"),
    identification=(4, "H"),
    flags_fragment=(6, "H"),
    ttl=(8, "B"),
    protocol=(9, "B"),
    checksum=(10, "H"),
    saddr=(12, "4s"),
    daddr=(16, "4s"),
)

V4_MAPPED_PREFIX = bytes(10) + b"\xff\xff"


def is_v4_mapped(gid: bytes) -> bool:
    """Whether the GID (16 bytes, wire order) is ::ffff:a.b.c.d, as RoCE v2 over IPv4 uses."""
    return gid.startswith(V4_MAPPED_PREFIX)


def ipv4_checksum(header: bytes) -> int:
    """Internet checksum of 20 header bytes; 0 if they hold their own right checksum already.

    Source: RFC 1071.
    """
    total = sum(int(word) for word in unpack("!10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def pack_grh(
    sgid: bytes,
    dgid: bytes,
    *,
    paylen: int,
    next_hdr: int = NEXT_HDR_IBA,
    traffic_class: int = 0,
    flow_label: int = 0,
    hop_limit: int = 64,
) -> bytes:
    """The 40 bytes of a GRH or IPv6 header.

    Args:
        sgid: Source GID, 16 bytes in wire order.
        dgid: Destination GID, likewise.
        paylen: Bytes that follow the header on the wire.
        next_hdr: `NEXT_HDR_IBA`, or `IP_PROTOCOL_UDP` for RoCE v2.
        traffic_class: 8 bits.
        flow_label: 20 bits.
        hop_limit: 8 bits.
    """
    word = 6 << 28 | (traffic_class & 0xFF) << 20 | flow_label & 0xFFFFF
    return GRH.pack(Grh(word, paylen, next_hdr, hop_limit, sgid, dgid))


def pack_ipv4(
    saddr: bytes, daddr: bytes, *, total_length: int, tos: int = 0, ttl: int = 64
) -> bytes:
    """The 20 bytes of an IPv4 header in front of UDP, its checksum right.

    Args:
        saddr: Source address, 4 bytes in wire order.
        daddr: Destination address, likewise.
        total_length: Bytes of the whole packet, this header included.
        tos: 8 bits.
        ttl: 8 bits.
    """
    header = Ipv4Hdr(
        0x45, tos, total_length, 0, _DONT_FRAGMENT, ttl, IP_PROTOCOL_UDP, 0, saddr, daddr
    )
    return IPV4_HDR.pack(header._replace(checksum=ipv4_checksum(IPV4_HDR.pack(header))))


def network_hdr_type(sgid: bytes, dgid: bytes, *, roce_v2: bool) -> NetworkHdrType:
    """The header that a datagram between two GIDs travels with; what its completion says."""
    if not roce_v2:
        return NetworkHdrType.ROCE_V1
    v4 = is_v4_mapped(sgid) and is_v4_mapped(dgid)
    return NetworkHdrType.IPV4 if v4 else NetworkHdrType.IPV6


def build_grh_area(
    sgid: bytes,
    dgid: bytes,
    payload_length: int,
    *,
    roce_v2: bool = True,
    traffic_class: int = 0,
    flow_label: int = 0,
    hop_limit: int = 64,
) -> bytes:
    """The 40 bytes in front of a UD payload, as the network type of the two GIDs wants them.

    Args:
        sgid: Source GID, 16 bytes in wire order.
        dgid: Destination GID, likewise.
        payload_length: Bytes of UD payload (256 for a MAD), without the transport headers.
        roce_v2: Both v4-mapped then gives 20 zero bytes and an IPv4 header, else an IPv6 header;
            without it a GRH.
        traffic_class: 8 bits; the IPv4 TOS.
        flow_label: 20 bits; lost in IPv4.
        hop_limit: 8 bits; the IPv4 TTL.
    """
    length = BTH_SIZE + DETH_SIZE + (payload_length + 3 & ~3) + ICRC_SIZE
    if roce_v2:
        length += UDP_HDR_SIZE
        if network_hdr_type(sgid, dgid, roce_v2=True) == NetworkHdrType.IPV4:
            header = pack_ipv4(
                sgid[12:],
                dgid[12:],
                total_length=IPV4_HDR_SIZE + length,
                tos=traffic_class,
                ttl=hop_limit,
            )
            return bytes(GRH_SIZE - IPV4_HDR_SIZE) + header
    return pack_grh(
        sgid,
        dgid,
        paylen=length,
        next_hdr=IP_PROTOCOL_UDP if roce_v2 else NEXT_HDR_IBA,
        traffic_class=traffic_class,
        flow_label=flow_label,
        hop_limit=hop_limit,
    )


def parse_grh_area(area: ReadableBuffer) -> tuple[bytes, bytes]:
    """(source GID, destination GID) of a 40-byte area; the reader's half of `build_grh_area`.

    An area that ends in an IPv4 header is IPv4, as IB core decides: what stands in its first 20 bytes
    is then undefined, but if it looks like an IPv6 header, the IPv4 header's checksum must be right.

    Raises:
        ValueError: `area` is not 40 bytes.
    """
    grh = GRH.unpack(area)
    tail = bytes(area[GRH_SIZE - IPV4_HDR_SIZE :])
    if tail[0] == 0x45 and (area[0] >> 4 != 6 or ipv4_checksum(tail) == 0):
        ipv4 = IPV4_HDR.unpack(tail)
        return V4_MAPPED_PREFIX + ipv4.saddr, V4_MAPPED_PREFIX + ipv4.daddr
    return grh.sgid, grh.dgid


C_LAYOUTS = (CMapping("struct pvrdma_grh", GRH),)

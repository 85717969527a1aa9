"""Messages of the communication manager: what a relay must read of them, and the two that it sends itself.

Contract: pure formats over a whole 256-byte MAD, big-endian; fields of fewer bits than their word stand in its upper
bits. The attribute ids are `mad.CmAttrId`. The specification's offsets count from behind the MAD header, these from its
start.

Source: linux/include/rdma/ibta_vol1_c12.h, CM_*; InfiniBand Architecture Specification vol. 1, chapter 12.
"""

from enum import IntEnum
from typing import NamedTuple

from pvrdma_server.abi.layout import BigEndianLayout
from pvrdma_server.abi.mad import MAD_HDR_SIZE, MAD_SIZE


class CmIds(NamedTuple):
    """The sender's id and the receiver's, as all messages have them; REQ and SIDR have only the first."""

    local: int
    remote: int


CM_IDS = BigEndianLayout(CmIds, MAD_HDR_SIZE + 8, local=(24, "I"), remote=(28, "I"))
SIDR_MIN_SIZE = MAD_HDR_SIZE + 4
"""Bytes up to and with the request id."""


class CmReq(NamedTuple):
    """What a relay needs of a REQ. `local_qpn` stands in the upper 24 bits of its word."""

    local_comm_id: int
    local_ca_guid: bytes
    local_qpn: int
    primary_local_gid: bytes
    primary_remote_gid: bytes


CM_REQ = BigEndianLayout(
    CmReq,
    MAD_SIZE,
    local_comm_id=(24, "I"),
    local_ca_guid=(40, "8s"),
    local_qpn=(56, "I"),
    primary_local_gid=(80, "16s"),
    primary_remote_gid=(96, "16s"),
)


class CmRep(NamedTuple):
    """What a relay needs of a REP. `local_qpn` stands in the upper 24 bits of its word."""

    local_comm_id: int
    remote_comm_id: int
    local_qpn: int


CM_REP = BigEndianLayout(
    CmRep,
    MAD_SIZE,
    local_comm_id=(24, "I"),
    remote_comm_id=(28, "I"),
    local_qpn=(36, "I"),
)


class CmRej(NamedTuple):
    """A REJ. `message_rejected` is 2 bits at the top of its byte, `info_length` 7 at the top of its own."""

    local_comm_id: int
    remote_comm_id: int
    message_rejected: int
    info_length: int
    reason: int
    ari: bytes


CM_REJ = BigEndianLayout(
    CmRej,
    MAD_SIZE,
    local_comm_id=(24, "I"),
    remote_comm_id=(28, "I"),
    message_rejected=(32, "B"),
    info_length=(33, "B"),
    reason=(34, "H"),
    ari=(36, "72s"),
)


class CmRejected(IntEnum):
    """`CmRej.message_rejected`. Source: cm_msgs.h, CM_MSG_RESPONSE_*."""

    REQ = 0
    REP = 1
    OTHER = 2


class CmRejReason(IntEnum):
    """Those a relay gives. Source: ib_cm.h, IB_CM_REJ_*."""

    TIMEOUT = 4
    CONSUMER_DEFINED = 28


class CmDreq(NamedTuple):
    """A DREQ. `remote_qpn`, the receiver's, stands in the upper 24 bits of its word."""

    local_comm_id: int
    remote_comm_id: int
    remote_qpn: int


CM_DREQ = BigEndianLayout(
    CmDreq,
    MAD_SIZE,
    local_comm_id=(24, "I"),
    remote_comm_id=(28, "I"),
    remote_qpn=(32, "I"),
)


class CmSidrReq(NamedTuple):
    """A SIDR_REQ as rdma_cm sends it: its private data begin with IP version (upper 4 bits), port and addresses.

    Source: cma_priv.h, struct cma_hdr.
    """

    request_id: int
    ip_version: int
    dst_addr: bytes


CM_SIDR_REQ = BigEndianLayout(
    CmSidrReq, MAD_SIZE, request_id=(24, "I"), ip_version=(41, "B"), dst_addr=(60, "16s")
)

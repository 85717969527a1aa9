"""Messages of the communication manager, as the hub reads them, and the two that it sends for a client that is gone.

Contract: pure. A MAD is hostile: `parse` looks at no more than it has, and either returns or raises `NotRelayed`.
"""

from itertools import count
from typing import Final, NamedTuple

from pvrdma_server.abi.ibta_vol1_c12 import (
    CM_DREQ,
    CM_IDS,
    CM_REJ,
    CM_REP,
    CM_REQ,
    CM_SIDR_REQ,
    SIDR_MIN_SIZE,
    CmDreq,
    CmRej,
    CmRejected,
    CmRejReason,
)
from pvrdma_server.abi.mad import (
    CM_CLASS_VERSION,
    MAD_BASE_VERSION,
    MAD_HDR,
    MAD_HDR_SIZE,
    MAD_SIZE,
    V4_MAPPED_PREFIX,
    CmAttrId,
    MadHdr,
    MgmtClass,
    MgmtMethod,
)
from pvrdma_server.mad_frames import DropReason

RELAYED: Final = frozenset(
    {
        CmAttrId.REQ,
        CmAttrId.MRA,
        CmAttrId.REJ,
        CmAttrId.REP,
        CmAttrId.RTU,
        CmAttrId.DREQ,
        CmAttrId.DREP,
        CmAttrId.SIDR_REQ,
        CmAttrId.SIDR_REP,
        CmAttrId.LAP,
        CmAttrId.APR,
    }
)
_SIDR: Final = frozenset({CmAttrId.SIDR_REQ, CmAttrId.SIDR_REP})
_ONE_ID: Final = _SIDR | {CmAttrId.REQ}
NO_GID: Final = bytes(16)

_tids = count(1)


class NotRelayed(Exception):
    """The MAD goes nowhere; `reason` says why."""

    def __init__(self, reason: DropReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


class CmMad(NamedTuple):
    """A message of the communication manager.

    Attributes:
        attr_id: a CmAttrId of RELAYED.
        tid: transaction id, the same in retries.
        sender_id: the sender's comm id (of SIDR the request id), 0 if it has none yet.
        receiver_id: the receiver's comm id, 0 if the sender does not know it.
        mad: the whole MAD, zeros added up to its 256 bytes.
    """

    attr_id: int
    tid: int
    sender_id: int
    receiver_id: int
    mad: bytes

    @property
    def sender_qpn(self) -> int:
        """The sender's queue pair, as its REQ or REP says; 0 of any other message."""
        if self.attr_id == CmAttrId.REQ:
            return CM_REQ.unpack(self.mad).local_qpn >> 8
        if self.attr_id == CmAttrId.REP:
            return CM_REP.unpack(self.mad).local_qpn >> 8
        return 0

    @property
    def ca_guid(self) -> bytes:
        """The sender's CA GUID, of a REQ only."""
        return CM_REQ.unpack(self.mad).local_ca_guid

    @property
    def destination(self) -> bytes:
        """The GID that a REQ or SIDR_REQ says it is for; zeros of any other message."""
        if self.attr_id == CmAttrId.REQ:
            return CM_REQ.unpack(self.mad).primary_remote_gid
        if self.attr_id != CmAttrId.SIDR_REQ:
            return NO_GID
        sidr = CM_SIDR_REQ.unpack(self.mad)
        if sidr.ip_version >> 4 == 4:
            return V4_MAPPED_PREFIX + sidr.dst_addr[12:]
        return sidr.dst_addr if sidr.ip_version >> 4 == 6 else NO_GID


def parse(payload: bytes) -> CmMad:
    """The message that `payload` is.

    Raises:
        NotRelayed: it is no message of the communication manager, or ends before its comm ids.
    """
    if len(payload) < MAD_HDR_SIZE:
        raise NotRelayed(DropReason.MALFORMED)
    header = MAD_HDR.unpack_from(payload)
    if (
        header.base_version != MAD_BASE_VERSION
        or header.mgmt_class != MgmtClass.CM
        or header.class_version != CM_CLASS_VERSION
        or header.method != MgmtMethod.SEND
        or header.attr_id not in RELAYED
    ):
        raise NotRelayed(DropReason.NOT_CM)
    if len(payload) < (SIDR_MIN_SIZE if header.attr_id in _ONE_ID else CM_IDS.size):
        raise NotRelayed(DropReason.MALFORMED)
    mad = payload.ljust(MAD_SIZE, b"\0")
    ids = CM_IDS.unpack_from(mad)
    if header.attr_id == CmAttrId.SIDR_REP:
        return CmMad(header.attr_id, header.tid, 0, ids.local, mad)
    receiver = 0 if header.attr_id in _ONE_ID else ids.remote
    return CmMad(header.attr_id, header.tid, ids.local, receiver, mad)


def _header(attr_id: CmAttrId) -> bytes:
    return MAD_HDR.pack(
        MadHdr(
            MAD_BASE_VERSION,
            MgmtClass.CM,
            CM_CLASS_VERSION,
            MgmtMethod.SEND,
            0,
            0,
            next(_tids) & 0xFFFFFFFF,
            attr_id,
            0,
        )
    )


def build_dreq(sender_id: int, receiver_id: int, receiver_qpn: int) -> bytes:
    """A DREQ; its receiver ignores one that does not name its own queue pair."""
    body = CM_DREQ.pack(CmDreq(sender_id, receiver_id, receiver_qpn << 8))
    return _header(CmAttrId.DREQ) + body[MAD_HDR_SIZE:]


def build_rej(
    sender_id: int,
    receiver_id: int,
    rejected: CmRejected,
    reason: CmRejReason,
    ca_guid: bytes = b"",
) -> bytes:
    """A REJ. For TIMEOUT, its receiver finds the connection by `ca_guid` (8 bytes) and the sender's comm id."""
    ari = ca_guid.ljust(72, b"\0")
    rej = CmRej(sender_id, receiver_id, rejected << 6, len(ca_guid) << 1, reason, ari)
    return _header(CmAttrId.REJ) + CM_REJ.pack(rej)[MAD_HDR_SIZE:]

"""MADs of the communication manager for tests, as Linux's ib_cm forms them."""

from pvrdma_server.abi.ibta_vol1_c12 import (
    CM_DREQ,
    CM_IDS,
    CM_REJ,
    CM_REP,
    CM_REQ,
    CM_SIDR_REQ,
    CmDreq,
    CmIds,
    CmRej,
    CmRep,
    CmReq,
    CmSidrReq,
)
from pvrdma_server.abi.mad import MAD_HDR, MAD_HDR_SIZE, CmAttrId, MadHdr, is_v4_mapped

GID_A = bytes.fromhex("00000000000000000000ffff0a090001")
GID_B = bytes.fromhex("00000000000000000000ffff0a090002")
GID_C = bytes.fromhex("20010db80000000002005efffe000003")
# The same interface id as GID_C, with another prefix.
GID_C_LOCAL = bytes.fromhex("fe8000000000000002005efffe000003")
GID_NET = bytes.fromhex("00000000000000000000ffff0a0900fe")
GUID_A = bytes.fromhex("02500000000000aa")


def mad_header(attr_id: int, tid: int = 1, *, mgmt_class: int = 7, version: int = 2) -> bytes:
    return MAD_HDR.pack(MadHdr(1, mgmt_class, version, 3, 0, 0, tid, attr_id, 0))


def cm_mad(attr_id: int, sender_id: int, receiver_id: int = 0, *, tid: int = 1) -> bytes:
    body = CM_IDS.pack(CmIds(sender_id, receiver_id))[MAD_HDR_SIZE:]
    return (mad_header(attr_id, tid) + body).ljust(256, b"\0")


def req(
    local_id: int, sgid: bytes, dgid: bytes, *, tid: int = 1, qpn: int = 0x11, guid: bytes = GUID_A
) -> bytes:
    body = CM_REQ.pack(CmReq(local_id, guid, qpn << 8, sgid, dgid))
    return mad_header(CmAttrId.REQ, tid) + body[MAD_HDR_SIZE:]


def rep(local_id: int, remote_id: int, *, tid: int = 1, qpn: int = 0x22) -> bytes:
    body = CM_REP.pack(CmRep(local_id, remote_id, qpn << 8))
    return mad_header(CmAttrId.REP, tid) + body[MAD_HDR_SIZE:]


def rtu(local_id: int, remote_id: int, *, tid: int = 1) -> bytes:
    return cm_mad(CmAttrId.RTU, local_id, remote_id, tid=tid)


def rej(local_id: int, remote_id: int, *, tid: int = 1, reason: int = 28) -> bytes:
    body = CM_REJ.pack(CmRej(local_id, remote_id, 0, 0, reason, bytes(72)))
    return mad_header(CmAttrId.REJ, tid) + body[MAD_HDR_SIZE:]


def dreq(local_id: int, remote_id: int, qpn: int, *, tid: int = 2) -> bytes:
    body = CM_DREQ.pack(CmDreq(local_id, remote_id, qpn << 8))
    return mad_header(CmAttrId.DREQ, tid) + body[MAD_HDR_SIZE:]


def drep(local_id: int, remote_id: int, *, tid: int = 2) -> bytes:
    return cm_mad(CmAttrId.DREP, local_id, remote_id, tid=tid)


def sidr_req(request_id: int, sgid: bytes, dgid: bytes, *, tid: int = 1) -> bytes:
    version = 4 if is_v4_mapped(dgid) else 6
    address = bytes(12) + dgid[12:] if version == 4 else dgid
    body = bytearray(CM_SIDR_REQ.pack(CmSidrReq(request_id, version << 4, address)))
    body[44:60] = bytes(12) + sgid[12:] if version == 4 else sgid
    return mad_header(CmAttrId.SIDR_REQ, tid) + bytes(body[MAD_HDR_SIZE:])


def sidr_rep(request_id: int, *, tid: int = 1) -> bytes:
    return cm_mad(CmAttrId.SIDR_REP, request_id, tid=tid)

"""Messages of the communication manager, made and read, for tests that play one of its ends.

Contract: pure; a message is a whole MAD of 256 bytes, and `Cm` reads the fields of one. Offsets are those of the
specification, which count from behind the MAD header.

Source: InfiniBand Architecture Specification vol. 1, chapter 12; linux/drivers/infiniband/core/cma_priv.h, struct
cma_hdr: what rdma_cm puts in front of a REQ's and SIDR_REQ's private data.
"""

import struct
from typing import Any, NamedTuple

from pvrdma_server.abi.mad import (
    CM_CLASS_VERSION,
    MAD_BASE_VERSION,
    MAD_HDR,
    MAD_HDR_SIZE,
    MAD_SIZE,
    CmAttrId,
    MadHdr,
    MgmtClass,
    MgmtMethod,
)

A = CmAttrId
PS_TCP, PS_UDP = 0x0106, 0x0111
PKEY = 0xFFFF
# 4.096 us * 2^20, as rdma_cm says: 4.3 s. With 15 retries there is a minute for a hub to come back.
RESPONSE_TIMEOUT = 20
# Where private data begin.
_PRIVATE = {A.REQ: 140, A.REP: 36, A.RTU: 8, A.REJ: 84, A.MRA: 10, A.DREQ: 12, A.DREP: 8}
_SIDR_PRIVATE = {A.SIDR_REQ: 16, A.SIDR_REP: 96}
_QPN = {A.REQ: 32, A.REP: 12, A.DREQ: 8, A.SIDR_REP: 8}
_PSN = {A.REQ: 44, A.REP: 20}
_SERVICE_ID = {A.REQ: 8, A.SIDR_REQ: 8, A.SIDR_REP: 12}


def service_id(port_space: int, port: int) -> int:
    """As rdma_cm makes one of a port space and a port."""
    return port_space << 16 | port


def cma_header(source: bytes, target: bytes, port: int) -> bytes:
    """rdma_cm's own header between two IPv4-mapped GIDs; `port` is the source's."""
    return struct.pack(
        "!BBH16s16s", 0, 4 << 4, port, bytes(12) + source[12:], bytes(12) + target[12:]
    )


class Cm(NamedTuple):
    """One message."""

    attr_id: int
    tid: int
    body: bytes

    @classmethod
    def parse(cls, mad: bytes) -> "Cm":
        header = MAD_HDR.unpack_from(mad)
        return cls(header.attr_id, header.tid, mad[MAD_HDR_SIZE:])

    def pack(self) -> bytes:
        header = MadHdr(
            MAD_BASE_VERSION, MgmtClass.CM, CM_CLASS_VERSION, MgmtMethod.SEND, 0, 0, self.tid,
            self.attr_id, 0,
        )  # fmt: skip
        return MAD_HDR.pack(header) + self.body

    def _u32(self, offset: int) -> int:
        return int.from_bytes(self.body[offset : offset + 4], "big")

    @property
    def local_id(self) -> int:
        return self._u32(0)

    @property
    def remote_id(self) -> int:
        return self._u32(4)

    @property
    def qpn(self) -> int:
        return self._u32(_QPN[CmAttrId(self.attr_id)]) >> 8

    @property
    def psn(self) -> int:
        return self._u32(_PSN[CmAttrId(self.attr_id)]) >> 8

    @property
    def service_id(self) -> int:
        at = _SERVICE_ID[CmAttrId(self.attr_id)]
        return int.from_bytes(self.body[at : at + 8], "big")

    @property
    def reason(self) -> int:
        """Of a REJ."""
        return int.from_bytes(self.body[10:12], "big")

    @property
    def status(self) -> int:
        """Of a SIDR_REP."""
        return self.body[4]

    @property
    def qkey(self) -> int:
        """Of a SIDR_REP."""
        return self._u32(20)

    @property
    def private(self) -> bytes:
        return self.body[(_PRIVATE | _SIDR_PRIVATE)[CmAttrId(self.attr_id)] :]


def message(attr_id: CmAttrId, tid: int, *parts: tuple[int, str, Any], private: bytes = b"") -> Cm:
    """A message of fields, each (offset, struct format, value), and private data."""
    body = bytearray(MAD_SIZE - MAD_HDR_SIZE)
    for offset, form, value in parts:
        struct.pack_into(f"!{form}", body, offset, value)
    start = (_PRIVATE | _SIDR_PRIVATE)[attr_id]
    assert len(private) <= len(body) - start
    body[start : start + len(private)] = private
    return Cm(attr_id, tid, bytes(body))


def req(
    tid: int, local_id: int, service: int, qpn: int, psn: int, sgid: bytes, dgid: bytes,
    *, guid: bytes, private: bytes = b"", retries: int = 15,
) -> Cm:  # fmt: skip
    """A REQ for an RC connection over RoCE with MTU 1024."""
    return message(
        A.REQ, tid, (0, "I", local_id), (8, "Q", service), (16, "8s", guid),
        (32, "I", qpn << 8 | 4), (36, "I", 4), (40, "I", RESPONSE_TIMEOUT << 3),
        (44, "I", psn << 8 | RESPONSE_TIMEOUT << 3 | 7), (48, "H", PKEY), (50, "B", 3 << 4 | 7),
        (51, "B", retries << 4), (52, "H", 0xFFFF), (54, "H", 0xFFFF), (56, "16s", sgid), (72, "16s", dgid),
        (88, "I", 3), (93, "B", 64), (95, "B", 18 << 3), private=private,
    )  # fmt: skip


def rep(tid: int, local_id: int, remote_id: int, qpn: int, psn: int, *, private: bytes = b"") -> Cm:
    """A REP."""
    return message(
        A.REP, tid, (0, "I", local_id), (4, "I", remote_id), (12, "I", qpn << 8), (20, "I", psn << 8),
        (24, "B", 4), (25, "B", 4), (26, "B", 15 << 3), (27, "B", 7 << 5), (28, "8s", bytes(range(8))),
        private=private,
    )  # fmt: skip


def rej(tid: int, local_id: int, remote_id: int, reason: int, *, of_rep: bool = False) -> Cm:
    """A REJ of a REQ, or of a REP."""
    return message(
        A.REJ,
        tid,
        (0, "I", local_id),
        (4, "I", remote_id),
        (8, "B", of_rep << 6),
        (10, "H", reason),
    )


def dreq(tid: int, local_id: int, remote_id: int, remote_qpn: int) -> Cm:
    """A DREQ."""
    return message(A.DREQ, tid, (0, "I", local_id), (4, "I", remote_id), (8, "I", remote_qpn << 8))


def pair(attr_id: CmAttrId, tid: int, local_id: int, remote_id: int) -> Cm:
    """An RTU, a DREP, or an MRA that asks for a minute."""
    more = [(9, "B", 24 << 3)] if attr_id == A.MRA else []
    return message(attr_id, tid, (0, "I", local_id), (4, "I", remote_id), *more)


def sidr_req(tid: int, request_id: int, service: int, *, private: bytes = b"") -> Cm:
    """A SIDR_REQ."""
    return message(
        A.SIDR_REQ, tid, (0, "I", request_id), (4, "H", PKEY), (8, "Q", service), private=private
    )


def sidr_rep(tid: int, request_id: int, service: int, qpn: int, qkey: int) -> Cm:
    """A SIDR_REP with status 0."""
    return message(
        A.SIDR_REP,
        tid,
        (0, "I", request_id),
        (8, "I", qpn << 8),
        (12, "Q", service),
        (20, "I", qkey),
    )

"""The messages of QEMU's `rdmacm-mux` (removed in 9.1): 360 bytes each way, over a UNIX stream socket.

Contract: pure format. A message is a C struct sent as it lies in memory: host byte order, four bytes of padding in the
header and at the end. The umad part is libibumad's `struct ib_user_mad`, which is aligned to 4 bytes (the kernel's is
to 8), so it begins at byte 36.

Source: contrib/rdmacm-mux/rdmacm-mux.h of QEMU 9.0, infiniband/umad.h.
"""

from enum import IntEnum
from typing import Final, NamedTuple

from pvrdma_server.abi.ib_user_mad import USER_MAD_HDR, UserMadHdr
from pvrdma_server.abi.layout import Layout

MUX_MSG_SIZE: Final = 360
MUX_MAD_SIZE: Final = 256


class MuxMsgType(IntEnum):
    """Source: RdmaCmMuxMsgType. What the mux sends by itself, MADs from the network, are requests too."""

    REQ = 0
    RESP = 1


class MuxOpCode(IntEnum):
    """Source: RdmaCmMuxOpCode."""

    REG = 0
    UNREG = 1
    MAD = 2


class MuxErrCode(IntEnum):
    """Source: RdmaCmMuxErrCode."""

    OK = 0
    EINVAL = 1
    EEXIST = 2
    EACCES = 3
    ENOTFOUND = 4


class MuxMsg(NamedTuple):
    """One message; `umad_len` is how many bytes of `mad` count (an `int` in C, so it may be negative)."""

    msg_type: int
    op_code: int
    sgid: bytes
    err_code: int
    umad_len: int
    umad: UserMadHdr
    mad: bytes


MUX_MSG = Layout(
    MuxMsg,
    MUX_MSG_SIZE,
    msg_type=(0, "i"),
    op_code=(4, "i"),
    sgid=(8, "16s"),
    err_code=(24, "i"),
    umad_len=(32, "i"),
    umad=(36, USER_MAD_HDR),
    mad=(100, f"{MUX_MAD_SIZE}s"),
)

"""/dev/infiniband/umadN: what an agent reads and writes, and how it registers.

Contract: pure formats. The header of a MAD mixes byte orders: what stays in the host is little-endian ints, what
travels (QPN, Q_Key, LID, GID, flow label) is `bytes` in wire order, as everywhere in this package. The header is the
one with a pkey index, which an agent asks for with ENABLE_PKEY before anything else.

Source: linux/include/uapi/rdma/ib_user_mad.h; behaviour: drivers/infiniband/core/user_mad.c.
"""

from typing import Final, NamedTuple

from pvrdma_server.abi.layout import CMapping, Layout


class UserMadHdr(NamedTuple):
    """What stands in front of every MAD. As received, `gid` is the sender's and `gid_index` says which GID is ours.

    `status` is 0, or ETIMEDOUT when a send that awaited a response got none; `length` the bytes of header and MAD.
    """

    id: int
    status: int
    timeout_ms: int
    retries: int
    length: int
    qpn: bytes
    qkey: bytes
    lid: bytes
    sl: int
    path_bits: int
    grh_present: int
    gid_index: int
    hop_limit: int
    traffic_class: int
    gid: bytes
    flow_label: bytes
    pkey_index: int


USER_MAD_HDR_SIZE: Final = 64
USER_MAD_HDR = Layout(
    UserMadHdr,
    USER_MAD_HDR_SIZE,
    id=(0, "I"),
    status=(4, "I"),
    timeout_ms=(8, "I"),
    retries=(12, "I"),
    length=(16, "I"),
    qpn=(20, "4s"),
    qkey=(24, "4s"),
    lid=(28, "2s"),
    sl=(30, "B"),
    path_bits=(31, "B"),
    grh_present=(32, "B"),
    gid_index=(33, "B"),
    hop_limit=(34, "B"),
    traffic_class=(35, "B"),
    gid=(36, "16s"),
    flow_label=(52, "4s"),
    pkey_index=(56, "H"),
)


class UserMadRegReq(NamedTuple):
    """Argument of REGISTER_AGENT. `method_mask` has a bit per method, `id` is set by the kernel and may be 0.

    With `mgmt_class` 0 the agent sends only.
    """

    id: int
    method_mask: bytes
    qpn: int
    mgmt_class: int
    mgmt_class_version: int
    oui: bytes
    rmpp_version: int


USER_MAD_REG_REQ_SIZE: Final = 28
USER_MAD_REG_REQ = Layout(
    UserMadRegReq,
    USER_MAD_REG_REQ_SIZE,
    id=(0, "I"),
    method_mask=(4, "16s"),
    qpn=(20, "B"),
    mgmt_class=(21, "B"),
    mgmt_class_version=(22, "B"),
    oui=(23, "3s"),
    rmpp_version=(26, "B"),
)
# The kernel's struct ends in a byte of padding, which _IOWR counts: 28.

# Source: IB_USER_MAD_*; _IOWR(0x1b, 1, 28 bytes), _IOW(0x1b, 2, 4 bytes), _IO(0x1b, 3).
REGISTER_AGENT: Final = 0xC01C1B01
UNREGISTER_AGENT: Final = 0x40041B02
ENABLE_PKEY: Final = 0x00001B03

C_LAYOUTS = (
    CMapping("struct ib_user_mad_hdr", USER_MAD_HDR),
    CMapping("struct ib_user_mad_reg_req", USER_MAD_REG_REQ),
)

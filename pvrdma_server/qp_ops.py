"""Work requests in, completions out: the translation between ring entries and values.

A short primer on PVRDMA rings. A queue pair's pages are one page of ring state, then the send queue's entries, then the
receive queue's. The guest writes an entry, then moves `prod_tail`, then rings a doorbell that says only "look at QP n".
An entry is a header (80 bytes for sends, 16 for receives) and its scatter/gather elements; its size is rounded up to a
power of two, so the number of elements an entry *can* hold may exceed what the queue pair was created with. Keys and
addresses pass through untouched: whoever moves the bytes resolves them (the embedded backend, or the host's HCA).

A completion is 64 bytes; the guest finds its queue pair by the *handle* in it, and never consumes one whose handle it
does not know, so none may be written for a queue pair that is gone.

Contract: pure functions over byte snapshots; `..._untrusted` raise only `BadWqe`.
Read first: rings.py. Source: vmw_pvrdma-abi.h (pvrdma_sq_wqe_hdr, pvrdma_rq_wqe_hdr, pvrdma_sge, pvrdma_cqe).
"""

from collections.abc import Iterator, Sequence
from functools import cache
from struct import Struct, calcsize
from typing import Final, NamedTuple, TypeAlias, cast

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_verbs import QpType, SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import NetworkHdrType, Sge, WcFlags, WcStatus, WrOpcode
from pvrdma_server.backend import (
    AddressVector,
    Atomic,
    Completion,
    Done,
    FastReg,
    Invalidate,
    Rdma,
    RecvWr,
    SendEntries,
    SendWr,
    Ud,
)
from pvrdma_server.errors import BadGuestAddress, BadWqe
from pvrdma_server.guest_memory import PAGE_SIZE, GuestMemory, walk_pdir_untrusted
from pvrdma_server.rings import round_up_pow2

# The page list of one FAST_REG_MR; a longer one would have us walk guest memory without end.
MAX_FAST_REG_PAGES: Final = api.MAX_FAST_REG_PAGES

_RC_USER: Final = frozenset(
    {
        WrOpcode.RDMA_WRITE,
        WrOpcode.RDMA_WRITE_WITH_IMM,
        WrOpcode.SEND,
        WrOpcode.SEND_WITH_IMM,
        WrOpcode.RDMA_READ,
        WrOpcode.ATOMIC_CMP_AND_SWP,
        WrOpcode.ATOMIC_FETCH_AND_ADD,
    }
)
_RC_KERNEL: Final = _RC_USER | {WrOpcode.SEND_WITH_INV, WrOpcode.LOCAL_INV, WrOpcode.FAST_REG_MR}
_UD: Final = frozenset({WrOpcode.SEND, WrOpcode.SEND_WITH_IMM})
_GSI: Final = frozenset({WrOpcode.SEND})
_SIGNALED: Final = int(SendFlags.SIGNALED)


class SendRules(NamedTuple):
    """What a queue pair lets its send queue do; made once when it is created."""

    opcodes: frozenset[int]
    max_sge: int
    sq_sig_all: bool
    datagram: bool


def send_rules(qp_type: int, *, privileged: bool, max_sge: int, sq_sig_all: bool) -> SendRules:
    """The rules of a queue pair.

    A user's send queue lies in memory that its process can write, and rdma-core passes its own numbers for opcodes
    above 6 (BIND_MW arrives as SEND_WITH_INV, DRIVER1 as FAST_REG_MR), so only the kernel's queue pairs (`privileged`)
    may use those.
    """
    if qp_type == QpType.RC:
        opcodes = _RC_KERNEL if privileged else _RC_USER
    else:
        opcodes = _UD if qp_type == QpType.UD else _GSI
    return SendRules(frozenset(map(int, opcodes)), max_sge, sq_sig_all, qp_type != QpType.RC)


def sq_entry_size(max_sge: int) -> int:
    """Bytes of one send queue entry. Source: drv pvrdma_qp.c pvrdma_set_sq_size."""
    return round_up_pow2(abi.SQ_WQE_HDR_SIZE + max_sge * abi.SGE.size)


def rq_entry_size(max_sge: int) -> int:
    """Bytes of one receive queue entry. Source: drv pvrdma_qp.c pvrdma_set_rq_size."""
    return round_up_pow2(abi.RQ_WQE_HDR_SIZE + max_sge * abi.SGE.size)


def parse_send_untrusted(wqe: bytes, rules: SendRules, memory: GuestMemory) -> SendWr:
    """Decode one send queue entry (a snapshot).

    Raises:
        BadWqe: an opcode this queue pair may not use, too many elements, or a page list that is not one.
    """
    hdr = abi.SQ_WQE_HDR.unpack_from(wqe)
    opcode = hdr.opcode
    if opcode not in rules.opcodes:
        raise BadWqe(WcStatus.LOC_QP_OP_ERR, f"opcode {opcode} is not for this queue pair")
    flags = hdr.send_flags
    return SendWr(
        hdr.wr_id,
        opcode,
        flags,
        rules.sq_sig_all or bool(flags & _SIGNALED),
        hdr.ex,
        _parse_sges_untrusted(wqe, abi.SQ_WQE_HDR_SIZE, hdr.num_sge, rules.max_sge),
        _ud_arm(wqe) if rules.datagram else _ARMS[opcode](wqe, memory),
    )


def parse_recv_untrusted(wqe: bytes, max_sge: int) -> RecvWr:
    """Decode one receive queue entry (a snapshot).

    Raises:
        BadWqe: too many elements.
    """
    hdr = abi.RQ_WQE_HDR.unpack_from(wqe)
    return RecvWr(hdr.wr_id, _parse_sges_untrusted(wqe, abi.RQ_WQE_HDR_SIZE, hdr.num_sge, max_sge))


# What `snapshot_sends` gives: wr_id, num_sge, opcode, send_flags, ex (as a number), remote_addr, rkey, and an element's
# addr, length, lkey.
PlainSend: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int]
_PLAIN: Final = "<QI4xIII4xQI36xQII"


@cache
def _plain_layout(entry_size: int) -> Struct:
    return Struct(f"{_PLAIN}{entry_size - calcsize(_PLAIN)}x")


def snapshot_sends(entries: SendEntries, most: int) -> Iterator[PlainSend]:
    """Up to `most` of the entries in a row that have been produced, copied, and then read as requests of one element.

    Unchecked: what it gives means nothing unless `num_sge` is 1 and the opcode's arm is an RDMA's or none.
    """
    tail, mask, size = entries.prod_tail[0], entries.index_mask, entries.entry_size
    used = (tail - entries.cons_head) & mask
    if tail & ~mask or used > (mask >> 1) + 1:
        return iter(())  # the guest has just spoilt it; who looks at the ring next will see
    count = min(most, used, len(entries.slots) // size)
    copy = bytes(entries.slots[: count * size])
    return cast(Iterator[PlainSend], _plain_layout(size).iter_unpack(copy))


_PLAIN_RECV: Final = "<QI4xQII"


@cache
def _recv_layout(entry_size: int) -> Struct:
    return Struct(f"{_PLAIN_RECV}{entry_size - calcsize(_PLAIN_RECV)}x")


def plain_recvs(wqes: bytes, entry_size: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Receive queue entries in a row as wr_id, num_sge, and an element's addr, length, lkey.

    Every queue's entries have room for an element. Unchecked: what it gives means nothing unless `num_sge` is 1.
    """
    return cast(
        Iterator[tuple[int, int, int, int, int]], _recv_layout(entry_size).iter_unpack(wqes)
    )


def wr_id_of(wqe: bytes) -> int:
    """The work request id of an entry of either kind, for the completion of one that cannot be decoded."""
    return int.from_bytes(wqe[:8], "little")


def _parse_sges_untrusted(wqe: bytes, offset: int, num_sge: int, max_sge: int) -> tuple[Sge, ...]:
    if num_sge > max_sge:
        raise BadWqe(
            WcStatus.LOC_QP_OP_ERR, f"{num_sge} scatter/gather elements, {max_sge} allowed"
        )
    if num_sge == 1:
        return (abi.SGE.unpack_from(wqe, offset),)
    return tuple(abi.SGE.unpack_from(wqe, offset + 16 * i) for i in range(num_sge))


def _no_arm(_wqe: bytes, _: GuestMemory) -> None:
    return None


def _rdma_arm(wqe: bytes, _: GuestMemory) -> Rdma:
    arm = abi.SQ_WQE_RDMA.unpack_from(wqe)
    return Rdma(arm.remote_addr, arm.rkey)


def _atomic_arm(wqe: bytes, _: GuestMemory) -> Atomic:
    arm = abi.SQ_WQE_ATOMIC.unpack_from(wqe)
    return Atomic(arm.remote_addr, arm.compare_add, arm.swap, arm.rkey)


def _invalidate_arm(wqe: bytes, _: GuestMemory) -> Invalidate:
    return Invalidate(int.from_bytes(abi.SQ_WQE_HDR.unpack_from(wqe).ex, "little"))


def _fast_reg_arm(wqe: bytes, memory: GuestMemory) -> FastReg:
    arm = abi.SQ_WQE_FAST_REG.unpack_from(wqe)
    if not 1 <= arm.page_list_len <= MAX_FAST_REG_PAGES:
        raise BadWqe(WcStatus.LOC_QP_OP_ERR, f"a page list of {arm.page_list_len} pages")
    if (arm.iova_start & (PAGE_SIZE - 1)) + arm.length > arm.page_list_len * PAGE_SIZE:
        raise BadWqe(WcStatus.LOC_QP_OP_ERR, f"length {arm.length:#x} exceeds its page list")
    try:
        # The list is the guest's to rewrite as soon as the WQE is processed: copy it now.
        pages = walk_pdir_untrusted(memory, arm.pl_pdir_dma, arm.page_list_len)
    except BadGuestAddress as e:
        raise BadWqe(WcStatus.LOC_QP_OP_ERR, f"page list: {e}") from e
    return FastReg(arm.iova_start, tuple(pages), arm.length, arm.access_flags, arm.rkey)


def _ud_arm(wqe: bytes) -> Ud:
    arm = abi.SQ_WQE_UD.unpack_from(wqe)
    word = arm.av_sl_tclass_flowlabel
    av = AddressVector(
        pd_handle=arm.av_port_pd & 0xFFFFFF,
        port=arm.av_port_pd >> 24,
        dgid=arm.av_dgid,
        sgid_index=arm.av_gid_index,
        hop_limit=arm.av_hop_limit,
        traffic_class=(word >> 20) & 0xFF,
        flow_label=word & 0xFFFFF,
        dmac=arm.av_dmac,
    )
    return Ud(arm.remote_qpn & 0xFFFFFF, arm.remote_qkey, av)


_ARMS: Final = {
    int(WrOpcode.RDMA_WRITE): _rdma_arm,
    int(WrOpcode.RDMA_WRITE_WITH_IMM): _rdma_arm,
    int(WrOpcode.RDMA_READ): _rdma_arm,
    int(WrOpcode.SEND): _no_arm,
    int(WrOpcode.SEND_WITH_IMM): _no_arm,
    int(WrOpcode.ATOMIC_CMP_AND_SWP): _atomic_arm,
    int(WrOpcode.ATOMIC_FETCH_AND_ADD): _atomic_arm,
    int(WrOpcode.SEND_WITH_INV): _invalidate_arm,
    int(WrOpcode.LOCAL_INV): _invalidate_arm,
    int(WrOpcode.FAST_REG_MR): _fast_reg_arm,
}

# The kernel driver copies neither smac nor a VLAN id, so SMAC and VLAN are never set; rdma-core passes the flags raw
# and numbers them differently (4 is IP_CSUM_OK, 8 WITH_INV there), so a user's CQ gets only the two both agree on.
# Plain integers: to "and" an enumeration takes 0.6 us, forty times as long.
_GRH: Final = int(WcFlags.GRH)
_NETWORK_HDR_TYPE: Final = int(WcFlags.WITH_NETWORK_HDR_TYPE)
_KERNEL_FLAGS: Final = int(WcFlags.GRH | WcFlags.WITH_IMM | WcFlags.WITH_INVALIDATE)
_NO_MAC: Final = bytes(6)
_PORT: Final = 1
_USER_FLAGS: Final = int(WcFlags.GRH | WcFlags.WITH_IMM)
# RoCE has no service level. UCX reads a datagram's network header in its place, as mlx5 numbers it (2 IPv4, 1 IPv6),
# and drops the datagram when it looks for the wrong address.
_SL_OF_NETWORK: Final = {int(NetworkHdrType.IPV4): 2, int(NetworkHdrType.IPV6): 1}


def encode_cqe(wc: Completion, qp_handle: int, *, kernel: bool) -> bytes:
    """The 64 bytes of a completion for a CQ of the guest's kernel or of one of its processes.

    Source: vmw_pvrdma-abi.h pvrdma_cqe; drv pvrdma_cq.c pvrdma_poll_one; lib cq.c pvrdma_poll_one.
    """
    flags = wc.wc_flags & (_KERNEL_FLAGS if kernel else _USER_FLAGS)
    if kernel and flags & _GRH:
        flags |= _NETWORK_HDR_TYPE
    sl = wc.sl
    if not kernel and flags & _GRH:
        sl = _SL_OF_NETWORK.get(wc.network_hdr_type, sl)
    # By position: names would take as long as all the rest.
    return abi.CQE.pack(
        abi.Cqe(
            wc.wr_id, qp_handle, wc.opcode, wc.status, wc.byte_len, wc.imm, wc.src_qp, flags, wc.vendor_err,
            wc.pkey_index, 0, sl, 0, _PORT, _NO_MAC, wc.network_hdr_type,
        )
    )  # fmt: skip


# The rest of a completion that has nothing to tell but its request, opcode, status and length.
_BARE_CQE: Final = abi.CQE.pack(
    abi.Cqe(0, 0, 0, 0, 0, bytes(4), 0, 0, 0, 0, 0, 0, 0, 1, _NO_MAC, 0)
)
_DONE: Final = Struct(f"<QQIII{len(_BARE_CQE) - 28}s")


def encode_done(done: Sequence[Done], qp_handle: int) -> bytes:
    """As `encode_cqe`, of sends that succeeded, one after the other."""
    pack, rest, success = _DONE.pack, _BARE_CQE[28:], int(WcStatus.SUCCESS)
    return b"".join(
        [pack(wr_id, qp_handle, opcode, success, length, rest) for wr_id, opcode, length in done]
    )

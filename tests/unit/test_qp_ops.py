"""Work queue entries and completions: literal bytes, who may post what, and every bound.

The bytes are written by hand from the header (vmw_pvrdma-abi.h), field by field.
"""

import struct

import pytest
from guest import PAGE, GuestRam, PageDir
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.abi.pvrdma_verbs import QpType, SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import (
    NetworkHdrType,
    Sge,
    WcFlags,
    WcOpcode,
    WcStatus,
    WrOpcode,
)
from pvrdma_server.backend import (
    AddressVector,
    Arm,
    Atomic,
    Completion,
    FastReg,
    Invalidate,
    Rdma,
    SendEntries,
    SendWr,
    Ud,
)
from pvrdma_server.errors import BadWqe
from pvrdma_server.guest_memory import GuestMemory
from pvrdma_server.qp_ops import (
    MAX_FAST_REG_PAGES,
    SendRules,
    encode_cqe,
    encode_done,
    parse_recv_untrusted,
    parse_send_untrusted,
    rq_entry_size,
    send_rules,
    snapshot_sends,
    sq_entry_size,
    wr_id_of,
)

NO_MEMORY = GuestMemory()
MAX_SGE = 4
KERNEL_RC = send_rules(QpType.RC, privileged=True, max_sge=MAX_SGE, sq_sig_all=False)
USER_RC = send_rules(QpType.RC, privileged=False, max_sge=MAX_SGE, sq_sig_all=False)
KERNEL_UD = send_rules(QpType.UD, privileged=True, max_sge=MAX_SGE, sq_sig_all=False)
USER_UD = send_rules(QpType.UD, privileged=False, max_sge=MAX_SGE, sq_sig_all=False)
GSI = send_rules(QpType.GSI, privileged=True, max_sge=MAX_SGE, sq_sig_all=False)

COMMON = "8877665544332211 {num_sge:02x}000000 00000000 {opcode:02x}000000 {flags:02x}000000 {ex} 00000000 "
SGE_HEX = "0010000000007f00 00020000 01030000 "
SGE = Sge(0x007F_0000_0000_1000, 0x200, 0x301)
WR_ID = 0x1122_3344_5566_7788


def wqe(
    opcode: int, union: str = "", *, num_sge: int = 0, flags: int = 0, ex: str = "00000000"
) -> bytes:
    """A send entry: the common part, the union padded to byte 80, and `num_sge` elements (up to what fits)."""
    head = bytes.fromhex(COMMON.format(num_sge=num_sge & 0xFF, opcode=opcode, flags=flags, ex=ex))
    assert len(head) == 32
    raw = bytearray((head + bytes.fromhex(union)).ljust(80, b"\0"))
    raw[8:12] = struct.pack("<I", num_sge)
    raw += bytes.fromhex(SGE_HEX) * min(num_sge, MAX_SGE)
    return bytes(raw.ljust(sq_entry_size(MAX_SGE), b"\xee"))


def parse(raw: bytes, rules: SendRules) -> SendWr:
    return parse_send_untrusted(raw, rules, NO_MEMORY)


# --- who may -------------------------------------------------------------------------------------------------------

BOTH_RC = {"KERNEL_RC", "USER_RC"}
EVERYBODY = {"KERNEL_RC", "USER_RC", "KERNEL_UD", "USER_UD", "GSI"}
MAY: dict[int, set[str]] = {
    WrOpcode.RDMA_WRITE: BOTH_RC,
    WrOpcode.RDMA_WRITE_WITH_IMM: BOTH_RC,
    WrOpcode.SEND: EVERYBODY,
    WrOpcode.SEND_WITH_IMM: EVERYBODY - {"GSI"},
    WrOpcode.RDMA_READ: BOTH_RC,
    WrOpcode.ATOMIC_CMP_AND_SWP: BOTH_RC,
    WrOpcode.ATOMIC_FETCH_AND_ADD: BOTH_RC,
    WrOpcode.SEND_WITH_INV: {"KERNEL_RC"},
    WrOpcode.LOCAL_INV: {"KERNEL_RC"},
    WrOpcode.FAST_REG_MR: {"KERNEL_RC"},
}
RULES = {
    "KERNEL_RC": KERNEL_RC,
    "USER_RC": USER_RC,
    "KERNEL_UD": KERNEL_UD,
    "USER_UD": USER_UD,
    "GSI": GSI,
}


@pytest.mark.parametrize("who", RULES)
@pytest.mark.parametrize("opcode", [*range(18), 0x7F, 0x80, 0xFF])
def test_who_may_post_what(who: str, opcode: int) -> None:
    ram = GuestRam(1 << 20)
    memory = GuestMemory()
    memory.add_region(ram.iova, ram.size, ram.view, writable=True)
    pdir = PageDir.alloc(ram, 1).dir_dma
    # Good as any opcode's arguments: a page list of one page for FAST_REG_MR.
    union = struct.pack("<QQIIIII", ram.iova, pdir, 12, 1, PAGE, 1, 7).hex()
    raw = wqe(opcode, union)
    if who in MAY.get(opcode, set()):
        assert parse_send_untrusted(raw, RULES[who], memory).opcode == opcode
    else:
        with pytest.raises(BadWqe, match=f"opcode {opcode} ") as caught:
            parse_send_untrusted(raw, RULES[who], memory)
        assert caught.value.status == WcStatus.LOC_QP_OP_ERR


@pytest.mark.parametrize("opcode", [0x100, 0x8000_0000, 0xFFFF_FFFF, 0x1_0002 & 0xFFFF_FFFF])
def test_large_opcodes_are_not_cut(opcode: int) -> None:
    raw = bytearray(wqe(0))
    raw[16:20] = struct.pack("<I", opcode)
    with pytest.raises(BadWqe):
        parse(bytes(raw), KERNEL_RC)


# --- literal entries -----------------------------------------------------------------------------------------------

RDMA_HEX = "00f0debc9a785634 efbeadde"
RDMA = Rdma(0x3456_789A_BCDE_F000, 0xDEAD_BEEF)
ATOMIC_HEX = "00f0debc9a785634 0100000000000080 0200000000000090 efbeadde"
ATOMIC = Atomic(0x3456_789A_BCDE_F000, 0x8000_0000_0000_0001, 0x9000_0000_0000_0002, 0xDEAD_BEEF)
IMM = "a1b2c3d4"


@pytest.mark.parametrize(
    ("opcode", "union", "ex", "arm"),
    [
        (WrOpcode.SEND, "", "00000000", None),
        (WrOpcode.SEND_WITH_IMM, "", IMM, None),
        (WrOpcode.RDMA_WRITE, RDMA_HEX, "00000000", RDMA),
        (WrOpcode.RDMA_WRITE_WITH_IMM, RDMA_HEX, IMM, RDMA),
        (WrOpcode.RDMA_READ, RDMA_HEX, "00000000", RDMA),
        (WrOpcode.ATOMIC_CMP_AND_SWP, ATOMIC_HEX, "00000000", ATOMIC),
        (WrOpcode.ATOMIC_FETCH_AND_ADD, ATOMIC_HEX, "00000000", ATOMIC),
        (WrOpcode.SEND_WITH_INV, "", "01030080", Invalidate(0x8000_0301)),
        (WrOpcode.LOCAL_INV, "", "01030080", Invalidate(0x8000_0301)),
    ],
    ids=lambda v: v.name if isinstance(v, WrOpcode) else "",
)
def test_entry_from_bytes(opcode: int, union: str, ex: str, arm: Arm) -> None:
    flags = SendFlags.SIGNALED | SendFlags.FENCE
    got = parse(wqe(opcode, union, num_sge=1, flags=flags, ex=ex), KERNEL_RC)
    assert got == SendWr(WR_ID, opcode, flags, True, bytes.fromhex(ex), (SGE,), arm)


def test_datagram_from_bytes() -> None:
    union = (
        "56341200 44332211"  # remote_qpn, remote_qkey
        "0b000001 cdab1f0f"  # av: port_pd, sl_tclass_flowlabel
        "fe80000000000000 020000fffe000001"  # dgid
        "80 05 07 40 020000000001 000000000000"  # path bits, gid index, rate, hop limit, dmac
    )
    got = parse(wqe(WrOpcode.SEND, union, num_sge=2), USER_UD)
    av = AddressVector(
        pd_handle=11,
        port=1,
        dgid=bytes.fromhex("fe80000000000000020000fffe000001"),
        sgid_index=5,
        hop_limit=0x40,
        traffic_class=0xF1,
        flow_label=0xFABCD,
        dmac=bytes.fromhex("020000000001"),
    )
    assert got == SendWr(
        WR_ID, WrOpcode.SEND, 0, False, bytes(4), (SGE, SGE), Ud(0x123456, 0x11223344, av)
    )


def test_a_qpn_has_24_bits() -> None:
    got = parse(wqe(WrOpcode.SEND, "ffffffff 00000000"), GSI)
    assert isinstance(got.arm, Ud)
    assert got.arm.remote_qpn == 0xFFFFFF


def test_receive_from_bytes() -> None:
    raw = bytes.fromhex("8877665544332211 02000000 ffffffff" + SGE_HEX * 2)
    got = parse_recv_untrusted(raw.ljust(128, b"\xee"), MAX_SGE)
    assert (got.wr_id, got.sges, got.refused) == (WR_ID, (SGE, SGE), 0)
    assert wr_id_of(raw) == WR_ID


@pytest.mark.parametrize("signaled", [False, True])
@pytest.mark.parametrize("sig_all", [False, True])
def test_who_is_signaled(signaled: bool, sig_all: bool) -> None:
    rules = send_rules(QpType.RC, privileged=False, max_sge=1, sq_sig_all=sig_all)
    raw = wqe(WrOpcode.SEND, flags=SendFlags.SIGNALED if signaled else 0)
    assert parse(raw, rules).signaled == (signaled or sig_all)


def test_inline_is_an_ordinary_entry() -> None:
    """The driver forces max_inline to 0, the library writes elements all the same."""
    raw = wqe(WrOpcode.SEND, num_sge=1, flags=SendFlags.INLINE)
    assert parse(raw, USER_RC).sges == (SGE,)


def test_the_reserved_length_means_nothing() -> None:
    raw = bytearray(wqe(WrOpcode.SEND, num_sge=1))
    raw[12:16] = b"\xff" * 4
    assert parse(bytes(raw), USER_RC).sges == (SGE,)


# --- num_sge: CVE-2018-20124 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sge", [0, 1, MAX_SGE - 1, MAX_SGE])
def test_num_sge_up_to_the_limit(num_sge: int) -> None:
    assert parse(wqe(WrOpcode.SEND, num_sge=num_sge), USER_RC).sges == (SGE,) * num_sge
    raw = bytes.fromhex("8877665544332211") + struct.pack("<II", num_sge, 0)
    raw += bytes.fromhex(SGE_HEX) * num_sge
    assert parse_recv_untrusted(raw, MAX_SGE).sges == (SGE,) * num_sge


@pytest.mark.parametrize("num_sge", [MAX_SGE + 1, MAX_SGE + 3, 16, 0xFF, 0x8000_0000, 0xFFFF_FFFF])
def test_cve_2018_20124_num_sge_beyond_the_limit(num_sge: int) -> None:
    """Beyond what the QP was created with, also where the rounded-up entry would hold it."""
    with pytest.raises(BadWqe) as sent:
        parse(wqe(WrOpcode.SEND, num_sge=num_sge), USER_RC)
    raw = bytes(8) + struct.pack("<II", num_sge, 0)
    with pytest.raises(BadWqe) as received:
        parse_recv_untrusted(raw.ljust(rq_entry_size(MAX_SGE), b"\0"), MAX_SGE)
    assert sent.value.status == received.value.status == WcStatus.LOC_QP_OP_ERR


@pytest.mark.parametrize("max_sge", [1, 2, 4, 8, 16, 32, 64, 128])
def test_entry_sizes_are_the_drivers(max_sge: int) -> None:
    send, receive = sq_entry_size(max_sge), rq_entry_size(max_sge)
    assert send & (send - 1) == receive & (receive - 1) == 0
    assert send // 2 < 80 + 16 * max_sge <= send <= PAGE
    assert receive // 2 < 16 + 16 * max_sge <= receive <= PAGE


# --- FAST_REG_MR ---------------------------------------------------------------------------------------------------


class FastRegFixture:
    def __init__(self, npages: int = 3) -> None:
        self.ram = GuestRam(2 << 20)
        self.memory = GuestMemory()
        self.memory.add_region(self.ram.iova, self.ram.size, self.ram.view, writable=True)
        self.list = PageDir.alloc(self.ram, npages)

    def parse(self, *, iova: int, npages: int, length: int, pdir: int | None = None) -> SendWr:
        where = self.list.dir_dma if pdir is None else pdir
        union = struct.pack("<QQIIIII", iova, where, 12, npages, length, 7, 0x301)
        return parse_send_untrusted(wqe(WrOpcode.FAST_REG_MR, union.hex()), KERNEL_RC, self.memory)


def test_fast_reg_copies_its_page_list() -> None:
    fixture = FastRegFixture()
    pages = tuple(fixture.list.pages)
    got = fixture.parse(iova=0x5123, npages=3, length=3 * PAGE - 0x123)
    fixture.list.set_entry(0, 0xDEAD_0000)
    assert got.arm == FastReg(0x5123, pages, 3 * PAGE - 0x123, 7, 0x301)


@pytest.mark.parametrize(
    ("iova", "npages", "length"),
    [
        (0, 0, 0),
        (0, 0, PAGE),
        (0, MAX_FAST_REG_PAGES + 1, PAGE),
        (0, 0xFFFF_FFFF, 0xFFFF_FFFF),
        (0, 3, 3 * PAGE + 1),
        (1, 3, 3 * PAGE),
        (PAGE - 1, 1, 2),
        (0xFFF, 3, 0xFFFF_FFFF),
    ],
)
def test_fast_reg_lengths_that_lie(iova: int, npages: int, length: int) -> None:
    with pytest.raises(BadWqe) as caught:
        FastRegFixture().parse(iova=iova, npages=npages, length=length)
    assert caught.value.status == WcStatus.LOC_QP_OP_ERR


@pytest.mark.parametrize("pdir", [0, 1, 0x1234_5678_9000])
def test_fast_reg_lists_that_are_nowhere(pdir: int) -> None:
    with pytest.raises(BadWqe, match="page list"):
        FastRegFixture().parse(iova=0, npages=1, length=PAGE, pdir=pdir)


# --- any bytes -----------------------------------------------------------------------------------------------------


@given(
    st.binary(min_size=256, max_size=256),
    st.integers(0, 17),
    st.integers(0, 6),
    st.sampled_from(list(RULES)),
)
def test_any_entry_is_a_request_or_a_bad_wqe(
    noise: bytes, opcode: int, num_sge: int, who: str
) -> None:
    raw = bytearray(noise)
    raw[16:20] = struct.pack("<I", opcode)
    raw[8:12] = struct.pack("<I", num_sge)
    try:
        got = parse(bytes(raw), RULES[who])
    except BadWqe:
        return
    assert who in MAY[opcode]
    assert len(got.sges) == num_sge <= MAX_SGE


# --- completions ---------------------------------------------------------------------------------------------------


def test_completion_to_bytes() -> None:
    wc = Completion(
        wr_id=WR_ID,
        status=WcStatus.SUCCESS,
        opcode=WcOpcode.RECV,
        byte_len=0x1234,
        imm=bytes.fromhex(IMM),
        src_qp=0xABCDEF,
        wc_flags=WcFlags.GRH | WcFlags.WITH_IMM,
        vendor_err=0x55,
        pkey_index=0,
        sl=3,
        network_hdr_type=2,
    )
    assert encode_cqe(wc, 0x42, kernel=True).hex(" ", 4) == bytes.fromhex(
        "8877665544332211 4200000000000000 80000000 00000000 34120000 a1b2c3d4 efcdab00 43000000"
        "55000000 0000 0000 03 00 01 000000000000 02 000000000000"
    ).hex(" ", 4)


@pytest.mark.parametrize(
    ("network", "sl"),
    [(NetworkHdrType.IPV4, 2), (NetworkHdrType.IPV6, 1), (NetworkHdrType.ROCE_V1, 0)],
)
def test_a_process_reads_the_network_header_as_service_level(
    network: NetworkHdrType, sl: int
) -> None:
    """As mlx5's L3 header type: UCX chooses the address it compares by it. The kernel has a field of its own."""
    wc = Completion(0, 0, WcOpcode.RECV, wc_flags=WcFlags.GRH, network_hdr_type=network)
    assert encode_cqe(wc, 1, kernel=False)[48] == sl
    assert encode_cqe(wc, 1, kernel=True)[48] == 0
    assert encode_cqe(wc._replace(wc_flags=0), 1, kernel=False)[48] == 0


ALL_FLAGS = 0xFF
KERNEL_MAY = (
    WcFlags.GRH | WcFlags.WITH_IMM | WcFlags.WITH_INVALIDATE | WcFlags.WITH_NETWORK_HDR_TYPE
)


def flags_of(wc_flags: int, *, kernel: bool) -> int:
    wc = Completion(0, 0, WcOpcode.RECV, wc_flags=wc_flags)
    return int(struct.unpack_from("<I", encode_cqe(wc, 1, kernel=kernel), 36)[0])


@pytest.mark.parametrize("wc_flags", [*(1 << bit for bit in range(8)), ALL_FLAGS, 0])
def test_flags_that_neither_reader_can_take_are_never_set(wc_flags: int) -> None:
    """SMAC and VLAN: the kernel copies neither. Above bit 1 rdma-core numbers them differently."""
    kernel, user = flags_of(wc_flags, kernel=True), flags_of(wc_flags, kernel=False)
    assert kernel & ~int(KERNEL_MAY) == 0
    assert user & ~int(WcFlags.GRH | WcFlags.WITH_IMM) == 0
    both = WcFlags.GRH | WcFlags.WITH_IMM
    assert kernel & both == user & both == wc_flags & both
    assert bool(kernel & WcFlags.WITH_NETWORK_HDR_TYPE) == bool(wc_flags & WcFlags.GRH)


@pytest.mark.parametrize("kernel", [True, False])
def test_sends_that_succeeded_look_the_same_at_once(kernel: bool) -> None:
    done = [(WR_ID, WcOpcode.RDMA_READ, 0x1234), (2**64 - 1, WcOpcode.SEND, 2**32 - 1), (0, 0, 0)]
    each = [encode_cqe(Completion(w, 0, o, n), 0x42, kernel=kernel) for w, o, n in done]
    assert encode_done(done, 0x42) == b"".join(each)


# --- many at once --------------------------------------------------------------------------------------------------


def lying(tail: int, head: int, entries: bytes, size: int, mask: int = 15) -> SendEntries:
    state = memoryview(bytearray(struct.pack("<II", tail, head))).cast("I")
    return SendEntries(state, head, mask, [memoryview(bytearray(entries))], size, signal_all=False)


@given(max_sge=st.integers(1, 16), raw=st.binary(min_size=96, max_size=96), flags=st.integers(0, 7))
def test_a_plain_request_reads_the_same_at_once(max_sge: int, raw: bytes, flags: int) -> None:
    opcodes = (WrOpcode.RDMA_WRITE, WrOpcode.RDMA_READ, WrOpcode.RDMA_WRITE_WITH_IMM)
    rules, size = USER_RC._replace(max_sge=max_sge), sq_entry_size(max_sge)
    entries = []
    for opcode in opcodes:
        fields = struct.pack("<QIIII", WR_ID + opcode, 1, 0, opcode, flags)
        entries.append((fields + raw[24:]).ljust(size, b"\xee"))
    found = list(snapshot_sends(lying(1, 14, b"".join(entries), size), 16))
    for entry, plain in zip(entries, found, strict=True):
        wr = parse(entry, rules)
        ex, remote_addr, rkey = plain[4:7]
        assert plain[:4] == (wr.wr_id, 1, wr.opcode, wr.send_flags)
        assert ex.to_bytes(4, "little") == wr.imm
        assert Rdma(remote_addr, rkey) == wr.arm
        assert (Sge._make(plain[7:]),) == wr.sges


@pytest.mark.parametrize(
    ("tail", "most", "count"),
    [
        (3, 16, 3), (3, 2, 2), (0, 16, 0),
        (8, 16, 4),  # the rest lies at the ring's beginning
        (9, 16, 0), (15, 16, 0), (16, 16, 0), (2**32 - 1, 16, 0),  # no indices any more
    ],
)  # fmt: skip
def test_how_many_are_read_at_once(tail: int, most: int, count: int) -> None:
    assert len(list(snapshot_sends(lying(tail, 0, bytes(4 * 128), 128), most))) == count


def test_what_is_read_at_once_is_a_snapshot() -> None:
    entries = lying(2, 0, bytes(4 * 128), 128)
    found = snapshot_sends(entries, 2)
    entries.slots[:] = b"\xff" * (4 * 128)
    assert {number for plain in found for number in plain} == {0}

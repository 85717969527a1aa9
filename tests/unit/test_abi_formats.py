"""Every format of `pvrdma_server.abi` against bytes written by hand, four ways.

deconstruct and construct go through the field offsets alone; parse and emit through the Layout. In
the samples each number's low byte names its place and its high bit is set, so that a swap of
fields, of bytes, or of sign shows; none of them is a known enumeration member.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.abi import mad
from pvrdma_server.abi import pvrdma_dev_api as dev
from pvrdma_server.abi import pvrdma_verbs as verbs
from pvrdma_server.abi import vmw_pvrdma_abi as uapi
from pvrdma_server.abi.layout import BigEndianLayout, Layout, enum_name


def h(number: int) -> int:
    return 0x8000 | number


def i(number: int) -> int:
    return 0x8000_0000 | number


def q(number: int) -> int:
    return 0x8000_0000_0000_0000 | number


class Sample(NamedTuple):
    layout: Layout[Any]
    hex: str
    value: Any

    @property
    def wire(self) -> bytes:
        return bytes.fromhex(self.hex)


HDR = "00000000 00000000 00000000 00000000 "  # the slot's header, which a body leaves alone
GID_HEX = "fe800000 00000000 02005efffe001122 "
GID = bytes([0xFE, 0x80, 0, 0, 0, 0, 0, 0, 0x02, 0, 0x5E, 0xFF, 0xFE, 0, 0x11, 0x22])
MAC_HEX = "0200c0ffee07 "
MAC = bytes([0x02, 0x00, 0xC0, 0xFF, 0xEE, 0x07])

# struct pvrdma_sq_wqe_hdr up to its union
SQ_HEX = "01000000 00000080 02000080 03000080 04000080 05000080 a0a1a2a3 00000000 "
SQ = (q(1), i(2), i(3), i(4), i(5), b"\xa0\xa1\xa2\xa3")

UAPI = [
    Sample(
        uapi.AV,
        "01000080 02000080" + GID_HEX + "81 82 83 84" + MAC_HEX + "000000000000",
        uapi.Av(i(1), i(2), GID, 0x81, 0x82, 0x83, 0x84, MAC),
    ),
    Sample(uapi.SGE, "01000000 00000080 02000080 03000080", uapi.Sge(q(1), i(2), i(3))),
    Sample(uapi.RQ_WQE_HDR, "01000000 00000080 02000080 03000080", uapi.RqWqeHdr(q(1), i(2), i(3))),
    Sample(uapi.SQ_WQE_HDR, SQ_HEX + "00" * 48, uapi.SqWqeHdr(*SQ)),
    Sample(
        uapi.SQ_WQE_RDMA,
        SQ_HEX + "11000000 00000080 12000080 00000000" + "00" * 32,
        uapi.SqWqeRdma(*SQ, q(0x11), i(0x12)),
    ),
    Sample(
        uapi.SQ_WQE_ATOMIC,
        SQ_HEX
        + "11000000 00000080 12000000 00000080 13000000 00000080 14000080 00000000"
        + "00" * 16,
        uapi.SqWqeAtomic(*SQ, q(0x11), q(0x12), q(0x13), i(0x14)),
    ),
    Sample(
        uapi.SQ_WQE_MASKED_ATOMIC,
        SQ_HEX
        + "11000000 00000080 12000080 13000080"
        + "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        uapi.SqWqeMaskedAtomic(*SQ, q(0x11), i(0x12), i(0x13), bytes(range(32))),
    ),
    Sample(
        uapi.SQ_WQE_FAST_REG,
        SQ_HEX
        + "11000000 00000080 12000000 00000080 13000080 14000080 15000080 16000080"
        + "17000080 00000000"
        + "00" * 8,
        uapi.SqWqeFastReg(*SQ, q(0x11), q(0x12), i(0x13), i(0x14), i(0x15), i(0x16), i(0x17)),
    ),
    Sample(
        uapi.SQ_WQE_UD,
        SQ_HEX
        + "11000080 12000080"
        + "13000080 14000080"
        + GID_HEX
        + "81 82 83 84"
        + MAC_HEX
        + "000000000000",
        uapi.SqWqeUd(*SQ, i(0x11), i(0x12), i(0x13), i(0x14), GID, 0x81, 0x82, 0x83, 0x84, MAC),
    ),
    Sample(
        uapi.EX_CMP_SWAP,
        "01000000 00000080 02000000 00000080 03000000 00000080 04000000 00000080",
        uapi.ExCmpSwap(q(1), q(2), q(3), q(4)),
    ),
    Sample(uapi.EX_FETCH_ADD, "01000000 00000080 02000000 00000080", uapi.ExFetchAdd(q(1), q(2))),
    Sample(
        uapi.CQE,
        "01000000 00000080 02000000 00000080 03000080 04000080 05000080 a0a1a2a3"
        "06000080 07000080 08000080 0980 0a80 8b 8c 8d" + MAC_HEX + "8e 000000000000",
        uapi.Cqe(
            q(1),
            q(2),
            i(3),
            i(4),
            i(5),
            b"\xa0\xa1\xa2\xa3",
            i(6),
            i(7),
            i(8),
            h(9),
            h(10),
            0x8B,
            0x8C,
            0x8D,
            MAC,
            0x8E,
        ),
    ),
]

PORT_HEX = (
    "01000080 02000080 03000080 04000080 05000080 06000080 07000080 08000080"
    "0980 0a80 0b80 8c 8d 8e 8f 90 91 92 93 0000 "
)
PORT = verbs.PortAttr._make([*map(i, range(1, 9)), h(9), h(10), h(11), *range(0x8C, 0x94)])
ROUTE_HEX = GID_HEX + "21000080 a2 a3 a4 00 "
ROUTE = verbs.GlobalRoute(GID, i(0x21), 0xA2, 0xA3, 0xA4)
AH_HEX = ROUTE_HEX + "2580 2680 a7 a8 a9 aa ab" + MAC_HEX + "00 "
AH = verbs.AhAttr(ROUTE, h(0x25), h(0x26), 0xA7, 0xA8, 0xA9, 0xAA, 0xAB, MAC)
CAP_HEX = "31000080 32000080 33000080 34000080 35000080 00000000 "
CAP = verbs.QpCap(i(0x31), i(0x32), i(0x33), i(0x34), i(0x35))
ALT_AH_HEX = AH_HEX.replace("a7 a8", "e7 e8")
ALT_AH = AH._replace(sl=0xE7, src_path_bits=0xE8)
QP_HEX = (
    "01000080 02000080 03000080 04000080 05000080 06000080 07000080 08000080 09000080"
    "0a80 0b80 8c 8d 8e 8f 90 91 92 93 94 95 96 0000000000" + CAP_HEX + AH_HEX + ALT_AH_HEX
)
QP = verbs.QpAttr._make([*map(i, range(1, 10)), h(10), h(11), *range(0x8C, 0x97), CAP, AH, ALT_AH])
SRQ_HEX = "41000080 42000080 43000080 00000000 "
SRQ = verbs.SrqAttr(i(0x41), i(0x42), i(0x43))

VERBS = [
    Sample(verbs.PORT_ATTR, PORT_HEX, PORT),
    Sample(verbs.GLOBAL_ROUTE, ROUTE_HEX, ROUTE),
    Sample(verbs.AH_ATTR, AH_HEX, AH),
    Sample(verbs.QP_CAP, CAP_HEX, CAP),
    Sample(verbs.QP_ATTR, QP_HEX, QP),
    Sample(verbs.SRQ_ATTR, SRQ_HEX, SRQ),
]

CAPS_HEX = (
    "51000000 00000080 c0c1c2c3c4c5c6c7 d0d1d2d3d4d5d6d7"
    "52000000 00000080 53000000 00000080 54000000 00000080"
    "01000080 02000080 03000080 04000080 05000080 06000080 07000080 08000080"
    "09000080 0a000080 0b000080 0c000080 0d000080 0e000080 0f000080 10000080"
    "11000080 12000080 13000080 14000080 15000080 16000080 17000080 18000080"
    "19000080 1a000080 1b000080 1c000080 1d000080 1e000080 1f000080 20000080"
    "21000080 22000080 23000080 24000080 25000080"
    "6180 e2 e3 e4 e5 e6 e7 68000080 "
)
CAPS = dev.DeviceCaps._make(
    [
        q(0x51),
        bytes(range(0xC0, 0xC8)),
        bytes(range(0xD0, 0xD8)),
        *(q(0x52), q(0x53), q(0x54)),
        *map(i, range(1, 0x26)),
        h(0x61),
        *range(0xE2, 0xE8),
        i(0x68),
    ]
)
DSR_HEX = (
    "71000080 00000000 72000080 00000000 73000000 00000080 74000000 00000080"
    "75000080 00000000 76000000 00000080 77000080 00000000 78000000 00000080"
)
DSR = (
    i(0x71),
    i(0x72),
    q(0x73),
    q(0x74),
    dev.RingPageInfo(i(0x75), q(0x76)),
    dev.RingPageInfo(i(0x77), q(0x78)),
)

DEV = [
    Sample(dev.DEVICE_CAPS, CAPS_HEX, CAPS),
    Sample(
        dev.RING_PAGE_INFO,
        "01000080 00000000 02000000 00000080",
        dev.RingPageInfo(i(1), q(2)),
    ),
    Sample(
        dev.DEVICE_SHARED_REGION,
        DSR_HEX + "79000080 00000000" + CAPS_HEX,
        dev.DeviceSharedRegion(*DSR, uar_pfn=i(0x79), caps=CAPS),
    ),
    Sample(
        dev.DEVICE_SHARED_REGION64,
        DSR_HEX + "79000000 00000080" + CAPS_HEX,
        dev.DeviceSharedRegion64(*DSR, uar_pfn64=q(0x79), caps=CAPS),
    ),
    Sample(dev.EQE, "01000080 02000080", dev.Eqe(i(1), i(2))),
    Sample(dev.CQNE, "01000080", dev.Cqne(i(1))),
    Sample(dev.CMD_HDR, "01000000 00000080 02000080 00000000", dev.CmdHdr(q(1), i(2))),
    Sample(
        dev.CMD_RESP_HDR,
        "01000000 00000080 02000080 83 000000",
        dev.CmdRespHdr(q(1), i(2), 0x83),
    ),
]


def body(layout: Layout[Any], text: str, *values: Any) -> Sample:
    """A request or response: the header's 16 bytes, then `text`."""
    return Sample(layout, HDR + text, layout.record(*values))


COMMANDS = [
    body(dev.CMD_QUERY_PORT, "81 00000000000000", 0x81),
    body(dev.CMD_QUERY_PORT_RESP, PORT_HEX, PORT),
    body(dev.CMD_QUERY_PKEY, "81 82 000000000000", 0x81, 0x82),
    body(dev.CMD_QUERY_PKEY_RESP, "0180 000000000000", h(1)),
    body(dev.CMD_CREATE_UC, "01000080 00000000", i(1)),
    body(dev.CMD_CREATE_UC64, "01000000 00000080", q(1)),
    body(dev.CMD_CREATE_UC_RESP, "01000080 00000000", i(1)),
    body(dev.CMD_DESTROY_UC, "01000080 00000000", i(1)),
    body(dev.CMD_CREATE_PD, "01000080 00000000", i(1)),
    body(dev.CMD_CREATE_PD_RESP, "01000080 00000000", i(1)),
    body(dev.CMD_DESTROY_PD, "01000080 00000000", i(1)),
    body(
        dev.CMD_CREATE_MR,
        "01000000 00000080 02000000 00000080 03000000 0000008004000080 05000080 06000080 07000080",
        *(q(1), q(2), q(3), i(4), i(5), i(6), i(7)),
    ),
    body(dev.CMD_CREATE_MR_RESP, "01000080 02000080 03000080 00000000", i(1), i(2), i(3)),
    body(dev.CMD_DESTROY_MR, "01000080 00000000", i(1)),
    body(
        dev.CMD_CREATE_CQ,
        "01000000 00000080 02000080 03000080 04000080 00000000",
        *(q(1), i(2), i(3), i(4)),
    ),
    body(dev.CMD_CREATE_CQ_RESP, "01000080 02000080", i(1), i(2)),
    body(dev.CMD_RESIZE_CQ, "01000080 02000080", i(1), i(2)),
    body(dev.CMD_RESIZE_CQ_RESP, "01000080 00000000", i(1)),
    body(dev.CMD_DESTROY_CQ, "01000080 00000000", i(1)),
    body(
        dev.CMD_CREATE_SRQ,
        "01000000 00000080 02000080 03000080" + SRQ_HEX + "84 00000000000000",
        *(q(1), i(2), i(3), SRQ, 0x84),
    ),
    body(dev.CMD_CREATE_SRQ_RESP, "01000080 00000000", i(1)),
    body(dev.CMD_MODIFY_SRQ, "01000080 02000080" + SRQ_HEX, i(1), i(2), SRQ),
    body(dev.CMD_QUERY_SRQ, "01000080 00000000", i(1)),
    body(dev.CMD_QUERY_SRQ_RESP, SRQ_HEX, SRQ),
    body(dev.CMD_DESTROY_SRQ, "01000080 00000000", i(1)),
    body(
        dev.CMD_CREATE_QP,
        "01000000 00000080 02000080 03000080 04000080 05000080 06000080 07000080"
        "08000080 09000080 0a000080 0b000080 0c000080 0d80 0e80 0f80 90 91 92 000000",
        *(q(1), *map(i, range(2, 13)), h(13), h(14), h(15), 0x90, 0x91, 0x92),
    ),
    body(
        dev.CMD_CREATE_QP_RESP,
        "01000080 02000080 03000080 04000080 05000080 06000080",
        *map(i, range(1, 7)),
    ),
    body(
        dev.CMD_CREATE_QP_RESP_V2,
        "01000080 02000080 03000080 04000080 05000080 06000080 07000080 00000000",
        *map(i, range(1, 8)),
    ),
    body(dev.CMD_MODIFY_QP, "01000080 02000080" + QP_HEX, i(1), i(2), QP),
    body(dev.CMD_QUERY_QP, "01000080 02000080", i(1), i(2)),
    body(dev.CMD_QUERY_QP_RESP, QP_HEX, QP),
    body(dev.CMD_DESTROY_QP, "01000080 00000000", i(1)),
    body(dev.CMD_DESTROY_QP_RESP, "01000080 00000000", i(1)),
    body(
        dev.CMD_CREATE_BIND,
        "01000080 02000080 03000080" + GID_HEX + "84 000000",
        *(i(1), i(2), i(3), GID, 0x84),
    ),
    body(dev.CMD_DESTROY_BIND, "01000080" + GID_HEX + "00000000", i(1), GID),
]

MAD = [
    Sample(
        mad.MAD_HDR,
        "81 82 83 84 8005 8006 80000000 00000007 8008 0000 80000009",
        mad.MadHdr(0x81, 0x82, 0x83, 0x84, h(5), h(6), q(7), h(8), i(9)),
    ),
    Sample(
        mad.GRH,
        "80000001 8002 83 84" + GID_HEX + "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
        mad.Grh(i(1), h(2), 0x83, 0x84, GID, bytes(range(0xF0, 0x100))),
    ),
    Sample(
        mad.IPV4_HDR,
        "81 82 8003 8004 8005 86 87 8008 0a0b0c0d 0e0f1011",
        mad.Ipv4Hdr(
            0x81,
            0x82,
            h(3),
            h(4),
            h(5),
            0x86,
            0x87,
            h(8),
            b"\x0a\x0b\x0c\x0d",
            b"\x0e\x0f\x10\x11",
        ),
    ),
]

SAMPLES = {s.layout.record.__name__: s for s in [*UAPI, *VERBS, *DEV, *COMMANDS, *MAD]}
LAYOUTS = {
    value.record.__name__: value
    for module in (uapi, verbs, dev, mad)
    for value in vars(module).values()
    if isinstance(value, Layout)
}
every_sample = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())


def leaves(layout: Layout[Any], value: Any, base: int = 0) -> Iterator[tuple[int, int, Any]]:
    """(offset, size, value) of every plain field, nested ones by their own layout's offsets."""
    for (offset, size), item in zip(layout.fields.values(), value, strict=True):
        if isinstance(item, tuple):
            yield from leaves(LAYOUTS[type(item).__name__], item, base + offset)
        else:
            yield base + offset, size, item


def byte_order(sample: Sample) -> Any:
    return "big" if isinstance(sample.layout, BigEndianLayout) else "little"


def test_every_layout_has_a_sample() -> None:
    assert set(SAMPLES) == set(LAYOUTS)


@every_sample
def test_deconstruct(sample: Sample) -> None:
    for offset, size, item in leaves(sample.layout, sample.value):
        raw = sample.wire[offset : offset + size]
        found = raw if isinstance(item, bytes) else int.from_bytes(raw, byte_order(sample))
        assert found == item, offset


@every_sample
def test_construct(sample: Sample) -> None:
    image = bytearray(sample.layout.size)
    for offset, size, item in leaves(sample.layout, sample.value):
        raw = item if isinstance(item, bytes) else item.to_bytes(size, byte_order(sample))
        image[offset : offset + size] = raw
    assert image == sample.wire


@every_sample
def test_parse(sample: Sample) -> None:
    parsed = sample.layout.unpack(sample.wire)
    assert parsed == sample.value
    assert type(parsed) is sample.layout.record
    framed = memoryview(b"\xff" * 5 + sample.wire + b"\xff" * 5)
    assert sample.layout.unpack_from(framed, 5) == sample.value


@every_sample
def test_emit(sample: Sample) -> None:
    assert sample.layout.pack(sample.value) == sample.wire
    target = bytearray(b"\xa5" * (sample.layout.size + 10))
    sample.layout.pack_into(memoryview(target), 5, sample.value)
    assert target == b"\xa5" * 5 + sample.wire + b"\xa5" * 5


@every_sample
def test_reserved_bytes_are_ignored_when_parsing(sample: Sample) -> None:
    image = bytearray(b"\xff" * sample.layout.size)
    for offset, size, _ in leaves(sample.layout, sample.value):
        image[offset : offset + size] = sample.wire[offset : offset + size]
    assert sample.layout.unpack(image) == sample.value


@every_sample
def test_a_short_buffer_is_refused(sample: Sample) -> None:
    short = sample.wire[:-1]
    with pytest.raises(struct.error):
        sample.layout.unpack_from(short)
    with pytest.raises(ValueError, match="bytes, need"):
        sample.layout.unpack(short)
    with pytest.raises(ValueError, match="exceeds"):
        sample.layout.pack_into(bytearray(short), 0, sample.value)


@given(data=st.data(), name=st.sampled_from(sorted(SAMPLES)))
def test_any_bytes_survive_a_round_trip(data: st.DataObject, name: str) -> None:
    layout = LAYOUTS[name]
    image = data.draw(st.binary(min_size=layout.size, max_size=layout.size))
    value = layout.unpack(image)
    packed = layout.pack(value)
    assert len(packed) == layout.size
    assert layout.unpack(packed) == value
    covered = {
        at for offset, size, _ in leaves(layout, value) for at in range(offset, offset + size)
    }
    assert all(packed[at] == (image[at] if at in covered else 0) for at in range(layout.size))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_unknown_numbers_survive(opcode: int, status: int) -> None:
    wqe = uapi.SqWqeHdr(0, 0, 0, opcode, 0, bytes(4))
    assert uapi.SQ_WQE_HDR.unpack(uapi.SQ_WQE_HDR.pack(wqe)).opcode == opcode
    cqe = uapi.CQE.unpack(bytes(64))._replace(status=status)
    assert uapi.CQE.unpack(uapi.CQE.pack(cqe)).status == status


def test_an_unknown_number_is_its_own_name() -> None:
    assert enum_name(uapi.WrOpcode, 4) == "RDMA_READ"
    assert enum_name(uapi.WrOpcode, 99) == "99"


def test_unknown_flags_are_kept() -> None:
    assert int(verbs.AccessFlags(0x4000_0001)) == 0x4000_0001


@given(st.integers(0, 2**32 - 1))
def test_the_guest_os_word_survives(word: int) -> None:
    assert dev.pack_gos_info(dev.unpack_gos_info(word)) == word


def test_the_guest_os_word() -> None:
    linux_64 = dev.GosInfo(dev.GosBits.BITS_64, dev.GosType.LINUX, 0x060C, 0)
    assert dev.pack_gos_info(linux_64) == 0x2 | 1 << 2 | 0x060C << 6
    assert dev.unpack_gos_info(0x2 | 1 << 2 | 0x060C << 6) == linux_64


@pytest.mark.parametrize("code", verbs.Mtu)
def test_mtu_bytes(code: verbs.Mtu) -> None:
    assert f"MTU_{verbs.mtu_bytes(code)}" == code.name


def test_mtu_zero_is_no_mtu() -> None:
    with pytest.raises(ValueError, match="0 is not a valid Mtu"):
        verbs.mtu_bytes(0)


class Pair(NamedTuple):
    a: int
    b: int


class Blob(NamedTuple):
    a: bytes


@pytest.mark.parametrize(
    ("size", "fields", "complaint"),
    [
        (8, {"a": (0, "I"), "b": (2, "H")}, "overlaps"),
        (8, {"a": (4, "I"), "b": (0, "I")}, "overlaps"),
        (6, {"a": (0, "I"), "b": (4, "I")}, "beyond"),
        (8, {"b": (0, "I"), "a": (4, "I")}, "fields"),
        (8, {"a": (0, "I")}, "fields"),
        (48, {"a": (0, "I"), "b": (8, mad.GRH)}, "byte order"),
    ],
)
def test_a_wrong_layout_is_refused(size: int, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Layout(Pair, size, **fields)


@pytest.mark.parametrize("blob", [b"", b"123", b"12345"])
def test_bytes_of_the_wrong_length_are_refused(blob: bytes) -> None:
    layout = Layout(Blob, 8, a=(0, "4s"))
    with pytest.raises(ValueError, match="not 4"):
        layout.pack(Blob(blob))
    with pytest.raises(ValueError, match="not 16"):
        verbs.AH_ATTR.pack(AH._replace(grh=ROUTE._replace(dgid=blob)))


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_number_that_does_not_fit_is_refused(number: int) -> None:
    with pytest.raises(struct.error):
        dev.CQNE.pack(dev.Cqne(number))


def test_a_store_outside_the_buffer_is_refused() -> None:
    for offset in (-4, 5):
        with pytest.raises(ValueError, match="exceeds"):
            dev.CQNE.pack_into(bytearray(8), offset, dev.Cqne(1))


def test_a_failed_store_leaves_the_target_alone() -> None:
    target = bytearray(b"\xa5" * 8)
    with pytest.raises(struct.error):
        dev.EQE.pack_into(target, 0, dev.Eqe(1, -1))
    assert target == b"\xa5" * 8

"""The network header area in front of a UD receive: by hand, and as the guest reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.abi.mad import (
    GRH,
    IP_PROTOCOL_UDP,
    IPV4_HDR,
    MAD_SIZE,
    NEXT_HDR_IBA,
    build_grh_area,
    ipv4_checksum,
    is_v4_mapped,
    parse_grh_area,
)

V4_A = bytes.fromhex("00000000000000000000ffff0a090001")
V4_B = bytes.fromhex("00000000000000000000ffff0a090002")
LOCAL_A = bytes.fromhex("fe8000000000000002005efffe000001")
LOCAL_B = bytes.fromhex("fe8000000000000002005efffe000002")

gids = st.binary(min_size=16, max_size=16)
v4_gids = st.binary(min_size=4, max_size=4).map(lambda tail: V4_A[:12] + tail)


def test_ipv4_checksum_of_a_known_header() -> None:
    header = bytes.fromhex("45000073000040004011 0000 c0a80001c0a800c7")
    assert ipv4_checksum(header) == 0xB861
    assert ipv4_checksum(header[:10] + b"\xb8\x61" + header[12:]) == 0


def test_v4_mapped_gids_get_an_ipv4_header_in_the_last_20_bytes() -> None:
    area = build_grh_area(V4_A, V4_B, MAD_SIZE, traffic_class=0x20, hop_limit=0x40)
    # 20 IPv4 + 8 UDP + 12 BTH + 8 DETH + 256 + 4 ICRC = 308
    assert area == bytes(20) + bytes.fromhex("45200134 0000 4000 40 11 2585 0a090001 0a090002")
    assert IPV4_HDR.unpack(area[20:]).protocol == IP_PROTOCOL_UDP


def test_other_gids_get_an_ipv6_header() -> None:
    area = build_grh_area(LOCAL_A, LOCAL_B, MAD_SIZE, traffic_class=0xAB, flow_label=0xCDEF0)
    # 8 UDP + 12 BTH + 8 DETH + 256 + 4 ICRC = 288
    assert area == bytes.fromhex("6abcdef0 0120 11 40") + LOCAL_A + LOCAL_B


@pytest.mark.parametrize(("sgid", "dgid"), [(V4_A, V4_B), (LOCAL_A, LOCAL_B)])
def test_roce_v1_always_gets_a_grh(sgid: bytes, dgid: bytes) -> None:
    area = build_grh_area(sgid, dgid, MAD_SIZE, roce_v2=False)
    assert area == bytes.fromhex("60000000 0118 1b 40") + sgid + dgid
    assert GRH.unpack(area).next_hdr == NEXT_HDR_IBA


def test_mixed_gids_get_an_ipv6_header() -> None:
    assert GRH.unpack(build_grh_area(V4_A, LOCAL_B, 0)).next_hdr == IP_PROTOCOL_UDP


def test_the_payload_is_padded_to_words() -> None:
    lengths = [GRH.unpack(build_grh_area(LOCAL_A, LOCAL_B, n)).paylen for n in (0, 1, 4, 5)]
    assert lengths == [32, 36, 36, 40]


@given(v4_gids, v4_gids, st.integers(0, 4096), st.integers(0, 255), st.integers(0, 255))
def test_ipv4_area_reads_back(sgid: bytes, dgid: bytes, length: int, tos: int, ttl: int) -> None:
    area = build_grh_area(sgid, dgid, length, traffic_class=tos, hop_limit=ttl)
    assert area[:20] == bytes(20)
    assert ipv4_checksum(area[20:]) == 0
    assert parse_grh_area(area) == (sgid, dgid)


@given(gids, gids, st.integers(0, 4096), st.booleans())
def test_any_area_reads_back(sgid: bytes, dgid: bytes, length: int, roce_v2: bool) -> None:
    area = build_grh_area(sgid, dgid, length, roce_v2=roce_v2)
    assert len(area) == 40
    if sgid[12] != 0x45:  # else it may be an IPv4 header by chance, for the guest too
        assert parse_grh_area(area) == (sgid, dgid)


def test_v4_mapped() -> None:
    assert is_v4_mapped(V4_A)
    assert not is_v4_mapped(LOCAL_A)
    assert not is_v4_mapped(bytes(16))

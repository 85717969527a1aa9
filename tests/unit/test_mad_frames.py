"""The protocol between hub and servers: every message there and back, however the stream is cut; what is refused."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.mad_frames import (
    MAX_FRAME_BYTES,
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    Connection,
    Datagram,
    Dropped,
    FrameError,
    Hello,
    Message,
    Ok,
    Receive,
    Refused,
    Register,
    Role,
    Send,
    Unregister,
    encode,
)

GID_A = bytes.fromhex("00000000000000000000ffff0a090001")
GID_B = bytes.fromhex("fe8000000000000002005efffe000002")

gids = st.binary(min_size=16, max_size=16)
u8, u16, u32 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32))
datagrams = st.builds(
    Datagram, gids, gids, st.binary(max_size=256), u32, u32, u32, u32, u16, u8, u8, u8, u8
)
texts = st.text(max_size=40)
from_client = st.one_of(
    st.builds(Register, gids, u8), st.builds(Unregister, gids), st.builds(Send, datagrams)
)
from_hub = st.one_of(
    st.builds(Ok, gids),
    st.builds(Refused, gids, u8, texts),
    st.builds(Receive, datagrams),
    st.builds(Dropped, u8, gids),
)


def hub_after_hello() -> Connection:
    hub = Connection(Role.HUB)
    assert hub.receive_data(encode(Hello("vm1"))) == [Hello("vm1")]
    return hub


def frame(type_byte: int, body: bytes = b"") -> bytes:
    return struct.pack("<IB", 1 + len(body), type_byte) + body


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Hello("vm"), "05000000 01 0100 766d"),
        (Register(GID_A, 2), "12000000 02" + GID_A.hex() + "02"),
        (Unregister(GID_A), "11000000 03" + GID_A.hex()),
        (Ok(GID_A), "11000000 04" + GID_A.hex()),
        (Refused(GID_A, 1, "no"), "14000000 05" + GID_A.hex() + "01 6e6f"),
        (
            Send(Datagram(GID_A, GID_B, b"\xaa\xbb", 1, 2, 3, 4, 5, 6, 7, 8, 1)),
            "39000000 06"
            + GID_A.hex()
            + GID_B.hex()
            + "01000000 02000000 03000000 04000000 0500 06 07 08 01 aabb",
        ),
        (Dropped(2, GID_B), "12000000 08" + GID_B.hex() + "02"),
    ],
)
def test_bytes_on_the_wire(message: Message, expected: str) -> None:
    assert encode(message) == bytes.fromhex(expected)


@given(st.lists(from_client, max_size=5), st.data())
def test_client_messages_however_the_stream_is_cut(
    messages: list[Message], data: st.DataObject
) -> None:
    check_cut(Role.HUB, [Hello("vm"), *messages], data)


@given(st.lists(from_hub, max_size=5), st.data())
def test_hub_messages_however_the_stream_is_cut(
    messages: list[Message], data: st.DataObject
) -> None:
    check_cut(Role.CLIENT, [Hello("hub"), *messages], data)


def check_cut(role: Role, messages: list[Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    connection, received = Connection(role), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        if start < end:
            received += connection.receive_data(stream[start:end])
        assert connection.buffered_bytes < 4 + MAX_FRAME_BYTES
    assert received == messages
    assert connection.receive_data(b"") == []


def test_byte_by_byte() -> None:
    connection, received = Connection(Role.HUB), []
    for byte in encode(Hello("vm")) + encode(Register(GID_A, 1)):
        received += connection.receive_data(bytes((byte,)))
    assert received == [Hello("vm"), Register(GID_A, 1)]
    assert connection.peer_name == "vm"


@given(st.lists(st.binary(max_size=700), max_size=6), st.booleans())
def test_any_bytes_give_messages_or_a_frame_error(chunks: list[bytes], greeted: bool) -> None:
    connection = hub_after_hello() if greeted else Connection(Role.HUB)
    for chunk in chunks:
        failed_before = connection.failed
        with suppress(FrameError):
            connection.receive_data(chunk)
            assert failed_before is None
        assert connection.buffered_bytes < 4 + MAX_FRAME_BYTES


@given(st.integers(0, 9), st.binary(max_size=400))
def test_any_body_gives_a_message_or_a_frame_error(type_byte: int, body: bytes) -> None:
    hub = hub_after_hello()
    with suppress(FrameError):
        assert len(hub.receive_data(frame(type_byte, body))) == 1
    if hub.failed is not None:
        assert hub.failed.kind in {"bad_frame", "unknown_type", "unexpected"}


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_length_out_of_range_ends_the_connection_before_its_body_comes(length: int) -> None:
    hub = hub_after_hello()
    with pytest.raises(FrameError, match="bad_length"):
        hub.receive_data(struct.pack("<I", length))


def test_the_longest_frames_fit() -> None:
    longest = [
        encode(Hello("é" * MAX_NAME_BYTES)),
        encode(Refused(GID_A, 1, "é" * MAX_TEXT_BYTES)),
        encode(Send(Datagram(GID_A, GID_B, bytes(256)))),
    ]
    assert all(len(f) <= 4 + MAX_FRAME_BYTES for f in longest)
    client = Connection(Role.CLIENT)
    assert client.receive_data(longest[0])
    assert client.receive_data(longest[1]) == [Refused(GID_A, 1, "é" * (MAX_TEXT_BYTES // 2))]


@pytest.mark.parametrize("length", [0, 1, 23, 24, 255, 256])
def test_short_mads_are_carried(length: int) -> None:
    datagram = Datagram(GID_A, GID_B, bytes(length))
    assert hub_after_hello().receive_data(encode(Send(datagram))) == [Send(datagram)]


def test_long_mads_are_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="257 bytes"):
        encode(Send(Datagram(GID_A, GID_B, bytes(257))))
    body = encode(Send(Datagram(GID_A, GID_B, bytes(256))))[5:] + b"x"
    with pytest.raises(FrameError, match="bad_frame"):
        hub_after_hello().receive_data(frame(6, body))


@pytest.mark.parametrize("gid", [b"", bytes(15), bytes(17)])
def test_a_gid_has_16_bytes(gid: bytes) -> None:
    for message in (
        Register(gid, 1),
        Unregister(gid),
        Ok(gid),
        Refused(gid, 1, ""),
        Dropped(1, gid),
        Send(Datagram(gid, GID_B, b"")),
        Send(Datagram(GID_A, gid, b"")),
    ):
        with pytest.raises(ValueError, match="GID"):
            encode(message)


def test_hello_comes_first_and_once() -> None:
    with pytest.raises(FrameError, match="unexpected"):
        Connection(Role.HUB).receive_data(encode(Register(GID_A, 1)))
    with pytest.raises(FrameError, match="unexpected"):
        hub_after_hello().receive_data(encode(Hello("vm1")))


def test_each_side_has_its_own_messages() -> None:
    for message in (Ok(GID_A), Receive(Datagram(GID_A, GID_B, b""))):
        with pytest.raises(FrameError, match="unexpected"):
            hub_after_hello().receive_data(encode(message))
    client = Connection(Role.CLIENT)
    client.receive_data(encode(Hello("hub")))
    with pytest.raises(FrameError, match="unexpected"):
        client.receive_data(encode(Register(GID_A, 1)))


def test_another_version_is_named() -> None:
    with pytest.raises(FrameError, match="peer speaks version 7, we 1"):
        Connection(Role.HUB).receive_data(encode(Hello("vm", version=7)))


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(FrameError, match="type byte 99"):
        hub_after_hello().receive_data(frame(99))


def test_messages_before_the_bad_frame_are_delivered_and_then_it_ends() -> None:
    hub = hub_after_hello()
    stream = encode(Register(GID_A, 1)) + frame(99)
    assert hub.receive_data(stream) == [Register(GID_A, 1)]
    assert hub.failed is not None
    with pytest.raises(FrameError, match="unknown_type"):
        hub.receive_data(encode(Register(GID_B, 1)))
    assert hub.buffered_bytes == 0


def test_the_end_in_mid_frame_is_an_error() -> None:
    hub = hub_after_hello()
    hub.receive_data(encode(Register(GID_A, 1))[:-1])
    with pytest.raises(FrameError, match="truncated"):
        hub.receive_data(b"")


def test_names_that_are_no_text() -> None:
    with pytest.raises(FrameError, match="UTF-8"):
        Connection(Role.HUB).receive_data(frame(1, b"\x01\x00\xff\xfe"))
    with pytest.raises(FrameError, match="bad_frame"):
        Connection(Role.HUB).receive_data(frame(1, b"\x01\x00" + b"x" * (MAX_NAME_BYTES + 1)))

"""Messages that break off, stall, lie about their size, or are no messages."""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
import vfu_client
from hypothesis import given, settings
from hypothesis import strategies as st
from vfu_client import VfioError, VfuClient, pack
from vfu_server import BAR2_SIZE, Server

from pvrdma_server.vfio_user import ResetReason


def region_write(offset: int, data: bytes, *, count: int | None = None, region: int = 1) -> bytes:
    return struct.pack("<QII", offset, region, len(data) if count is None else count) + data


WRITE = pack(vfu_client.REGION_WRITE, region_write(0, b"abcd"))


@pytest.fixture
def works_after(server: Server) -> Callable[[], None]:
    def check() -> None:
        server.device.wait_for("reset", ResetReason.LOST_CONNECTION)
        with VfuClient(server.path) as client:
            client.write_u32(1, 8, 0x12345678)
            assert client.read_u32(1, 8) == 0x12345678

    return check


@pytest.mark.parametrize("cut", [1, 15, 16, 20, len(WRITE) - 1])
def test_a_client_that_goes_away_within_a_message(
    server: Server, works_after: Callable[[], None], cut: int
) -> None:
    with VfuClient(server.path) as client:
        client.sock.sendall(WRITE[:cut])
    works_after()
    assert server.device.bars[1][:4] == bytes(4)


def test_a_message_may_come_byte_by_byte(server: Server) -> None:
    with VfuClient(server.path) as client:
        for byte in WRITE:
            client.sock.send(bytes([byte]))
        assert client.receive().error == 0
    assert server.device.bars[1][:4] == b"abcd"


def test_many_messages_in_one_send(server: Server) -> None:
    messages = [
        pack(vfu_client.REGION_WRITE, region_write(4 * i, b"wxyz"), msg_id=i) for i in range(200)
    ]
    with VfuClient(server.path) as client:
        client.sock.sendall(b"".join(messages))
        assert [client.receive().msg_id for _ in messages] == list(range(200))
    assert server.device.bars[1][:800] == b"wxyz" * 200


@pytest.mark.parametrize("cut", [3, 20])
def test_a_message_that_stalls_ends_the_session(
    start_server: Callable[..., Server], cut: int
) -> None:
    server = start_server(attach_timeout_s=0.2)
    with VfuClient(server.path) as client:
        client.sock.sendall(WRITE[:cut])
        assert client.hung_up()
    server.stop_serving()
    assert server.context.counters.protocol_errors == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 16,
        b"\xff" * 5000,
        b"\0" * 16,
        pack(9, bytes(16), flags=1),
        pack(9, b"", size=15),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_garbage_ends_the_session(
    server: Server, works_after: Callable[[], None], garbage: bytes
) -> None:
    with VfuClient(server.path) as client:
        client.sock.sendall(garbage)
        assert client.hung_up()
    works_after()
    assert server.context.counters.protocol_errors == 1


def test_an_oversized_message_ends_the_session(
    server: Server, works_after: Callable[[], None]
) -> None:
    with VfuClient(server.path) as client:
        message = pack(vfu_client.REGION_WRITE, region_write(0, bytes(512 * 1024)))
        with contextlib.suppress(ConnectionError):
            client.sock.sendall(message)
        assert client.hung_up()
    works_after()


def test_the_largest_write_of_a_bar(server: Server) -> None:
    data = os.urandom(BAR2_SIZE)
    with VfuClient(server.path) as client:
        client.write(2, 0, data)
        assert client.read(2, 0, BAR2_SIZE) == data


@pytest.mark.parametrize("command", [0, 1, 11, 12, 15, 99, 0xFFFF])
def test_an_unknown_command_is_an_error_reply(server: Server, command: int) -> None:
    with VfuClient(server.path) as client:
        with pytest.raises(VfioError) as caught:
            client.request(command, bytes(32))
        assert caught.value.errno == errno.EINVAL
        assert client.read_u32(1, 0) == 0
    assert bool(server.events_logged("vfu.write_multi")) == (command == 15)


@pytest.mark.parametrize("command", [3, 4, 5, 7, 9, 10, 14])
@pytest.mark.parametrize("length", [0, 1, 8, 15])
def test_short_bodies(server: Server, command: int, length: int) -> None:
    with VfuClient(server.path) as client, pytest.raises((VfioError, ConnectionError)):
        client.request(command, b"\x7f" * length)
    with VfuClient(server.path) as client:
        assert client.read_u32(1, 0) == 0


def test_a_write_whose_count_lies(server: Server) -> None:
    with VfuClient(server.path) as client:
        for count in (3, 5, 1 << 31):
            with pytest.raises(VfioError):
                client.request(vfu_client.REGION_WRITE, region_write(0, b"abcd", count=count))
        assert client.read_u32(1, 0) == 0


def test_set_irqs_with_a_wrapping_range(server: Server, works_after: Callable[[], None]) -> None:
    flags = vfu_client.IRQ_DATA_EVENTFD | vfu_client.IRQ_TRIGGER
    with VfuClient(server.path) as client, pytest.raises(ConnectionError):
        client.set_irqs(vfu_client.IRQ_MSIX, flags, 1, 0xFFFFFFFF)
    works_after()


def test_more_descriptors_than_any_message_has(
    server: Server, works_after: Callable[[], None]
) -> None:
    fds = [os.eventfd(0) for _ in range(40)]
    with VfuClient(server.path) as client, pytest.raises(VfioError):
        client.arm(vfu_client.IRQ_MSIX, 0, fds)
    for fd in fds:
        os.close(fd)
    works_after()


def test_descriptors_where_none_belong_are_closed(server: Server) -> None:
    inside, outside = socket.socketpair()
    outside.settimeout(10)
    with VfuClient(server.path) as client:
        for command in (
            vfu_client.REGION_READ,
            vfu_client.DEVICE_SET_IRQS,
            vfu_client.DMA_UNMAP,
            99,
        ):
            with pytest.raises(VfioError):
                client.request(command, b"\x7f" * 24, fds=[inside.fileno()] * 8)
        inside.close()
        assert outside.recv(1) == b""  # nobody holds the other end
    outside.close()


def test_a_client_that_does_not_read_its_replies(
    server: Server, works_after: Callable[[], None]
) -> None:
    request = pack(vfu_client.REGION_READ, struct.pack("<QII", 0, 2, BAR2_SIZE))
    with VfuClient(server.path) as client:
        client.sock.sendall(request * 16)
        works_after()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 16), st.binary(max_size=64), st.sampled_from([0, 0x10])),
        min_size=1,
        max_size=6,
    ),
    st.binary(max_size=20),
)
def test_any_messages_leave_a_server_that_works(
    fuzzed: Server, messages: list[tuple[int, bytes, int]], rest: bytes
) -> None:
    with VfuClient(fuzzed.path) as client:
        sent = b"".join(pack(command, body, flags=flags) for command, body, flags in messages)
        client.sock.sendall(sent + rest)
        client.sock.shutdown(socket.SHUT_WR)
        try:
            while client.sock.recv(65536):
                pass
        except ConnectionError:
            pass
    with VfuClient(fuzzed.path) as client:
        assert len(client.read(1, 0, 4)) == 4


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(str(tmp_path_factory.mktemp("fuzz") / "vm.sock"))
    yield server
    server.stop()

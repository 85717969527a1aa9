"""Clients come, go, say nothing, say nonsense, and come in crowds."""

import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import vfu_client
from vfu_client import VfioError, VfuClient
from vfu_server import BAR1_SIZE, Server

from pvrdma_server.errors import ConfigError, TransportError
from pvrdma_server.vfio_user import ResetReason


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(path)
    return sock


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_negotiates_as_qemu_does(server: Server) -> None:
    with VfuClient(server.path) as client:
        assert client.server_capabilities["max_msg_fds"] == 8
        assert client.device_info() == (0x3, 10, 5)
        assert server.context.connected


def test_the_reply_carries_the_request_id(server: Server) -> None:
    with VfuClient(server.path, negotiate=False) as client:
        client._next_id = 0xFFFF
        client.negotiate()
        assert client.read_u32(1, 0) == 0  # id 0


def test_a_silent_client_does_not_keep_others_out(start_server: Callable[..., Server]) -> None:
    server = start_server(attach_timeout_s=0.3)
    with connect(server.path) as silent, VfuClient(server.path) as client:
        assert client.read_u32(1, 0) == 0
        assert hung_up(silent)
        assert client.read_u32(1, 0) == 0
    assert server.context.counters.failed_attaches == 1
    assert server.events_logged("vfu.attach_failed")


def test_silent_clients_are_limited(server: Server) -> None:
    crowd = [connect(server.path) for _ in range(8)]
    with connect(server.path) as late:
        assert hung_up(late)
    for sock in crowd:
        sock.close()
    assert server.context.counters.refused_clients == 1


def test_a_second_client_is_refused_and_the_first_goes_on(server: Server) -> None:
    with VfuClient(server.path) as first:
        for _ in range(3):
            with connect(server.path) as second:
                assert hung_up(second)
            assert first.read_u32(1, 0) == 0
    assert server.context.counters.refused_clients == 3
    assert server.context.counters.attaches == 1
    assert len(server.events_logged("vfu.client_refused")) == 1


def test_of_two_that_greet_one_is_attached(server: Server) -> None:
    with connect(server.path) as early, VfuClient(server.path) as first:
        early.sendall(vfu_client.pack(vfu_client.VERSION, vfu_client.version_body()))
        assert hung_up(early)
        assert first.read_u32(1, 0) == 0


def test_a_greeting_may_come_in_pieces(server: Server) -> None:
    message = vfu_client.pack(vfu_client.VERSION, vfu_client.version_body())
    with VfuClient(server.path, negotiate=False) as client:
        for start in range(0, len(message), 7):
            client.sock.send(message[start : start + 7])
        assert client.receive().command == vfu_client.VERSION
        assert client.read_u32(1, 0) == 0


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (struct.pack("<HH", 1, 0) + b"{}\0", errno.EINVAL),
        (struct.pack("<HH", 0, 0) + b"{}", errno.EINVAL),
        (struct.pack("<HH", 0, 0) + b"{nonsense\0", errno.EINVAL),
        (vfu_client.version_body({"max_msg_fds": -1}), errno.EINVAL),
        (b"\0\0", errno.EINVAL),
    ],
    ids=["major", "no-nul", "json", "fds", "short"],
)
def test_a_bad_greeting_is_refused_and_the_next_client_served(
    server: Server, body: bytes, error: int
) -> None:
    with VfuClient(server.path, negotiate=False) as client:
        with pytest.raises(VfioError) as caught:
            client.negotiate(body)
        assert caught.value.errno == error
        assert client.hung_up()
    with VfuClient(server.path) as client:
        assert client.read_u32(1, 0) == 0


def test_the_first_message_must_be_the_greeting(server: Server) -> None:
    with VfuClient(server.path, negotiate=False) as client:
        with pytest.raises(VfioError):
            client.device_info()
        assert client.hung_up()
    with VfuClient(server.path) as client:
        assert client.device_info()


@pytest.mark.parametrize("sent", [b"", b"\0", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, bytes(16)])
def test_nonsense_instead_of_a_greeting(server: Server, sent: bytes) -> None:
    with connect(server.path) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        assert hung_up(sock)
    with VfuClient(server.path) as client:
        assert client.read_u32(1, 0) == 0


def test_a_greeting_that_never_ends(server: Server) -> None:
    with connect(server.path) as sock:
        sock.sendall(vfu_client.pack(vfu_client.VERSION, b"", size=1 << 20))
        assert hung_up(sock)
    server.stop_serving()
    assert server.context.counters.protocol_errors == 1


def test_reconnect_finds_a_reset_device(server: Server) -> None:
    ram = os.memfd_create("ram")
    os.ftruncate(ram, 4096)
    with VfuClient(server.path) as client:
        client.set_command(0x7)
        client.enable_msix()
        client.write_u32(0, 0, 0xFEE00000)
        client.dma_map(0, 4096, fd=ram)
    server.device.wait_for("unmap", 0, 4096)
    server.device.wait_for("bus_master", False)
    server.device.wait_for("reset", ResetReason.LOST_CONNECTION)
    with VfuClient(server.path) as client:
        assert client.read(vfu_client.CONFIG_REGION, 4, 2) == bytes(2)
        assert not server.call(server.context.msix_enabled)
        assert client.read_u32(0, 0) == 0
        client.dma_map(0, 4096, fd=ram)
    os.close(ram)
    assert server.context.counters.attaches == 2


def test_twenty_clients_after_one_another_leak_no_descriptor(server: Server) -> None:
    def cycle() -> None:
        with VfuClient(server.path) as client:
            event = os.eventfd(0)
            client.arm(vfu_client.IRQ_MSIX, 0, [event])
            os.close(event)
        server.device.wait_for("reset", ResetReason.LOST_CONNECTION)
        with VfuClient(server.path, negotiate=False) as client, pytest.raises(VfioError):
            client.device_info()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        cycle()
    with VfuClient(server.path):  # whatever the last one left is closed by now
        assert len(os.listdir("/proc/self/fd")) <= before + 5


def test_stop_removes_the_socket_and_hangs_up(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with VfuClient(server.path) as client:
        server.stop_serving()
        assert client.hung_up()
        server.device.wait_for("reset", ResetReason.LOST_CONNECTION)
    server.context.close()
    assert not os.path.exists(server.path)
    server.context.close()
    assert server.error is None


def test_a_stale_socket_is_replaced(socket_path: str, start_server: Callable[..., Server]) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(socket_path)
    server = start_server()
    with VfuClient(server.path) as client:
        assert client.device_info()


def test_a_live_server_is_not_replaced(server: Server, start_server: Callable[..., Server]) -> None:
    with pytest.raises(TransportError, match="another server listens there"):
        start_server()
    with VfuClient(server.path) as client:
        assert client.device_info()


def test_what_is_not_a_socket_is_not_removed(
    socket_path: str, start_server: Callable[..., Server]
) -> None:
    Path(socket_path).write_text("precious")
    with pytest.raises(ConfigError, match="Address already in use; its folder must exist"):
        start_server()
    assert Path(socket_path).read_text() == "precious"


def test_a_path_too_long_is_named(tmp_path: Path, start_server: Callable[..., Server]) -> None:
    with pytest.raises(ConfigError, match=r"too long; .* not longer than 107 bytes"):
        start_server(socket_path=str(tmp_path / ("x" * 120)))


def test_the_socket_of_a_successor_stays(start_server: Callable[..., Server]) -> None:
    server = start_server()
    os.unlink(server.path)
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(server.path)
        server.stop_serving()
        server.context.close()
        assert os.path.exists(server.path)


def test_an_inherited_listening_socket(
    socket_path: str, start_server: Callable[..., Server]
) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(socket_path)
    listener.listen()
    server = start_server(socket_path=None, listen_fd=listener.detach())
    with VfuClient(socket_path) as client:
        assert client.device_info()
    server.stop_serving()
    server.context.close()
    assert os.path.exists(socket_path)


def test_exactly_one_way_to_listen(start_server: Callable[..., Server]) -> None:
    with pytest.raises(TransportError, match="exactly one"):
        start_server(socket_path=None)


def test_a_client_process_that_is_killed(server: Server) -> None:
    program = (
        f"import os, sys; sys.path.insert(0, {os.path.dirname(vfu_client.__file__)!r})\n"
        f"import vfu_client; c = vfu_client.VfuClient({server.path!r})\n"
        "c.write_u32(1, 0, 1); print('up', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
    server.device.wait_for("reset", ResetReason.LOST_CONNECTION)
    with VfuClient(server.path) as client:
        assert len(client.read(1, 0, BAR1_SIZE)) == BAR1_SIZE

"""Guests and the rest of the world: a bare-metal peer, a second server, and what a crash leaves behind."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from guest import CommandFailed, Kernel, Qp, Remote, UserProcess, connect
from host_peer import (
    DESTINATION_BYTES,
    PEER_ADDRESS,
    PEER_DEVICE,
    PEER_GID_INDEX,
    Destination,
    connect_tcp,
    ended,
    in_peer,
    receive_exactly,
    run_peer,
    v4_gid,
)
from host_server import HostServer

from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus

pytestmark = pytest.mark.host
OK = int(WcStatus.SUCCESS)
PEER_GID = v4_gid(PEER_ADDRESS)
PSN = 0x1234


class Booted:
    """A guest on a server, with its GID."""

    def __init__(self, server: Any) -> None:
        self.gid: bytes = server.gid
        self.bus = server.connect()
        self.driver = self.bus.boot()
        self.kernel = Kernel(self.driver)
        self.kernel.add_gid(self.gid)
        self.process = UserProcess(self.driver)


@pytest.fixture
def guest(server: Any) -> Iterator[Booted]:
    made = Booted(server)
    yield made
    made.bus.close()


def to_peer(qp: Qp, qpn: int, *, psn: int = PSN) -> None:
    qp.to_init()
    qp.to_rtr(dest_qpn=qpn, dgid=PEER_GID, rq_psn=psn)
    qp.to_rts()


def test_peer_reads_and_writes_guest_memory(guest: Booted) -> None:
    memory = guest.process.mr(20_000, offset=123)
    memory.write(b"guest".ljust(20_000, b"."))
    qp = Qp(guest.process)
    with run_peer() as peer:
        to_peer(qp, peer.hello["qpn"])
        peer.ask(do="connect", qpn=qp.qpn, gid=guest.gid.hex())
        there = {"addr": memory.addr, "rkey": memory.rkey}
        assert peer.ask(do="work", opcode=4, length=20_000, **there) == {"status": OK}
        assert peer.ask(do="read", length=6)["data"] == b"guest.".hex()
        peer.ask(do="write", data=b"metal".hex())
        assert (
            peer.ask(do="work", opcode=0, length=5, addr=memory.addr + 9000, rkey=memory.rkey)[
                "status"
            ]
            == OK
        )
        assert memory.read(9000, 6) == b"metal."
        memory.write64(5, 5)  # 123 + 5 is a multiple of 8
        assert (
            peer.ask(do="work", opcode=6, length=8, addr=memory.addr + 5, rkey=memory.rkey, add=3)[
                "status"
            ]
            == OK
        )
        assert memory.read64(5) == 8


def test_guest_reads_and_writes_peer_memory(guest: Booted) -> None:
    local = guest.process.mr(8192)
    qp = Qp(guest.process)
    with run_peer() as peer:
        to_peer(qp, peer.hello["qpn"])
        peer.ask(do="connect", qpn=qp.qpn, gid=guest.gid.hex())
        remote = Remote(peer.hello["addr"], peer.hello["rkey"])
        local.write(b"hello, metal")
        qp.write(local.sge(0, 12), to=remote, wr_id=1)
        assert qp.send_cq.wait_one().status == OK
        assert peer.ask(do="read", length=12)["data"] == b"hello, metal".hex()
        peer.ask(do="write", data=b"hello, guest".hex(), at=100)
        qp.read(local.sge(4096, 12), frm=Remote(remote.addr + 100, remote.rkey), wr_id=2)
        assert qp.send_cq.wait_one().status == OK
        assert local.read(4096, 12) == b"hello, guest"
        qp.fetch_add(local.sge(0, 8), remote, 1, wr_id=3)
        assert qp.send_cq.wait_one().status == OK
        assert local.read(0, 8) == b"hello, m"


@pytest.mark.parametrize("role", ["client", "server"])
def test_ibv_rc_pingpong(guest: Booted, role: str) -> None:
    """The program of the rxe host against the guest, which speaks its TCP greeting and plays its game."""
    rounds, size = 30, 4096
    words = [
        "ibv_rc_pingpong",
        "-d",
        PEER_DEVICE,
        "-g",
        PEER_GID_INDEX,
        "-n",
        str(rounds),
        "-s",
        str(size),
    ]
    qp = Qp(guest.process, max_wr=64)
    buffer = guest.process.mr(size)
    me = Destination(qp.qpn, PSN, guest.gid)
    for number in range(32):
        qp.post_recv(buffer.sge(), wr_id=number)
    with ExitStack() as stack:
        if role == "client":
            program = stack.enter_context(ended(in_peer(words)))
            sock = stack.enter_context(connect_tcp(18515))
            sock.sendall(me.pack())
            peer = Destination.unpack(receive_exactly(sock, DESTINATION_BYTES))
            to_peer(qp, peer.qpn, psn=peer.psn)
            sock.sendall(b"done\0")
        else:
            listener = stack.enter_context(socket.create_server(("10.9.0.1", 18516)))
            program = stack.enter_context(ended(in_peer([*words, "-p", "18516", "10.9.0.1"])))
            sock = stack.enter_context(listener.accept()[0])
            peer = Destination.unpack(receive_exactly(sock, DESTINATION_BYTES))
            to_peer(qp, peer.qpn, psn=peer.psn)
            sock.sendall(me.pack())
            receive_exactly(sock, 5)
        play(qp, buffer, rounds, serve=role == "client")
        output, _ = program.communicate(timeout=60)
    assert program.returncode == 0, output
    assert f"{rounds} iters in" in output, output


def play(qp: Qp, buffer: Any, rounds: int, *, serve: bool) -> None:
    """Ping, pong: both ends send as soon as they have received."""
    posted = 32
    if serve:
        qp.send(buffer.sge(), wr_id=1000)
    sent, received = int(serve), 0
    while received < rounds or sent < rounds:
        for wc in qp.recv_cq.wait(1):
            assert wc.status == OK, wc
            if wc.opcode & 128:
                received += 1
                if posted < rounds + 2:
                    qp.post_recv(buffer.sge(), wr_id=posted)
                    posted += 1
                if sent < rounds:
                    qp.send(buffer.sge(), wr_id=1000 + sent)
                    sent += 1


def test_two_servers_on_two_devices(guest: Booted, other_server: Any) -> None:
    other = Booted(other_server)
    a, b = Qp(guest.process), Qp(other.process)
    connect(a, b, guest.gid, other.gid)
    source, target = guest.process.mr(30_000), other.process.mr(30_000)
    source.write(bytes(range(250)) * 120)
    a.write(source.sge(), to=target.remote(), wr_id=1)
    assert a.send_cq.wait_one().status == OK
    assert target.read() == bytes(range(250)) * 120
    target.write(bytes(30_000))
    b.post_recv(target.sge(), wr_id=2)
    a.send(source.sge(), wr_id=3)
    assert a.send_cq.wait_one().status == OK
    assert b.recv_cq.wait_one().byte_len == 30_000
    source.write(bytes(30_000))
    b.write(target.sge(), to=source.remote(), wr_id=4)
    assert b.send_cq.wait_one().status == OK
    assert source.read() == bytes(range(250)) * 120
    other.bus.close()


def addresses(netdev: str = "d0") -> str:
    return subprocess.run(
        ["ip", "address", "show", netdev], capture_output=True, text=True, check=True
    ).stdout


def test_crash_leaves_an_address_that_the_next_start_takes_away(tmp_path: Path) -> None:
    server = HostServer(tmp_path, "rxe0", "10.9.0.150")
    server.start()
    guest = Booted(server)
    assert "10.9.0.150" in addresses()
    server.end(kill=True)
    guest.bus.close()
    assert "10.9.0.150" in addresses()
    server.start()
    assert "10.9.0.150" not in addresses()
    guest = Booted(server)
    assert "10.9.0.150" in addresses()
    assert server.end() == 0
    guest.bus.close()
    assert "10.9.0.150" not in addresses()
    assert not list(tmp_path.glob("gids-*"))


def test_without_permission_one_line_says_what_is_missing(tmp_path: Path) -> None:
    server = HostServer(tmp_path, "rxe0", "10.9.0.160", policy="check")
    server.start()
    guest = Booted(server)
    qp = Qp(guest.process)
    qp.to_init()
    started = time.monotonic()
    with pytest.raises(CommandFailed):
        qp.to_rtr(dest_qpn=1, dgid=PEER_GID)
    assert time.monotonic() - started < 5
    assert server.end() == 0
    guest.bus.close()
    (line,) = server.events("gid_address_missing")
    assert line["address"] == "10.9.0.160/32 on d0"
    assert "10.9.0.160" not in addresses()

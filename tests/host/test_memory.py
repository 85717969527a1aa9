"""Memory that a client unmaps below registered regions: nobody reaches it then, and everybody again when it is back."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest import Kernel, Qp, UserProcess, connect
from host_peer import PEER_ADDRESS, run_peer, v4_gid
from host_server import HostServer

from pvrdma_server.abi.vmw_pvrdma_abi import WcOpcode, WcStatus

pytestmark = pytest.mark.host
OK, REFUSED = int(WcStatus.SUCCESS), int(WcStatus.REM_ACCESS_ERR)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HostServer]:
    made = HostServer(tmp_path, "rxe0", "10.9.0.120")
    made.start()
    yield made
    assert made.end() == 0, made.log.read_text()


class Guest:
    """A guest with one region that a peer may reach."""

    def __init__(self, server: HostServer) -> None:
        self.gid = server.gid
        self.bus = server.connect()
        self.kernel = Kernel(self.bus.boot())
        self.kernel.add_gid(self.gid)
        self.process = UserProcess(self.kernel.driver)
        self.memory = self.process.mr(3 * 4096, offset=8)

    def peer_writes(self, data: bytes) -> int:
        """The status of a peer's RDMA WRITE to the region, over a connection of its own."""
        qp = Qp(self.process)
        with run_peer() as peer:
            qp.to_init()
            qp.to_rtr(dest_qpn=peer.hello["qpn"], dgid=v4_gid(PEER_ADDRESS))
            qp.to_rts()
            peer.ask(do="connect", qpn=qp.qpn, gid=self.gid.hex())
            peer.ask(do="write", data=data.hex())
            self.before_write()
            status = peer.ask(
                do="work", opcode=0, length=len(data), addr=self.memory.addr + 5000,
                rkey=self.memory.rkey,
            )["status"]  # fmt: skip
        assert isinstance(status, int)
        return status

    def before_write(self) -> None:
        """What happens between the connection and its use."""


@pytest.fixture
def guest(server: HostServer) -> Iterator[Guest]:
    made = Guest(server)
    yield made
    made.bus.close()


def test_unmapped_memory_is_out_of_reach_until_it_is_back(guest: Guest, server: HostServer) -> None:
    assert guest.peer_writes(b"before") == OK
    guest.before_write = guest.bus.unmap_ram  # type: ignore[method-assign]
    assert guest.peer_writes(b"within") == REFUSED
    assert guest.memory.read(5000, 6) == b"before"
    (told,) = server.events("memory_unmapped_below_regions")
    assert told["regions"] == 1
    # It comes back in two pieces; the region lies in both.
    ram, half = guest.bus.ram, guest.bus.ram.size // 2
    guest.bus.client.dma_map(ram.iova + half, half, fd=ram.fd, offset=half)
    guest.bus.client.dma_map(ram.iova, half, fd=ram.fd)
    guest.before_write = lambda: None  # type: ignore[method-assign]
    assert guest.peer_writes(b"after.") == OK
    assert guest.memory.read(5000, 6) == b"after."
    assert server.events("region_lost") == []


def test_other_memory_in_its_place_is_not_reached(guest: Guest, server: HostServer) -> None:
    other = os.memfd_create("other")
    os.ftruncate(other, guest.bus.ram.size)

    def replace() -> None:
        guest.bus.unmap_ram()
        guest.bus.client.dma_map(guest.bus.ram.iova, guest.bus.ram.size, fd=other)

    guest.before_write = replace  # type: ignore[method-assign]
    assert guest.peer_writes(b"within") == REFUSED
    (told,) = server.events("region_lost")
    assert told["lkey"] == hex(guest.memory.lkey)
    with os.fdopen(other, "rb") as file:
        assert b"within" not in file.read()


def test_what_lies_in_an_unmapped_region_fails_locally(guest: Guest) -> None:
    """A receive that names unmapped memory fails when a message takes it."""
    extra = guest.bus.ram.size
    # A second piece of RAM, beside the one that the rings are in.
    beside = os.memfd_create("beside")
    os.ftruncate(beside, extra)
    base = guest.bus.ram.iova + extra
    guest.bus.client.dma_map(base, extra, fd=beside)
    a, b = Qp(guest.kernel), Qp(guest.kernel)
    connect(a, b, guest.gid, guest.gid)
    source = guest.kernel.buffer(64)
    target = source.sge()._replace(addr=base + 4096)
    b.post_recv(target, wr_id=1)
    a.send(source.sge(), wr_id=2)
    assert a.send_cq.wait_one().status == OK
    assert b.recv_cq.wait_one().status == OK
    b.post_recv(target, wr_id=3)
    guest.bus.client.dma_unmap(base, extra)
    a.send(source.sge(), wr_id=4)
    assert a.send_cq.wait_one().status == WcStatus.REM_OP_ERR
    wc = b.recv_cq.wait_one()
    assert (wc.status, wc.wr_id, wc.opcode) == (WcStatus.LOC_PROT_ERR, 3, WcOpcode.RECV)
    os.close(beside)


def test_kernel_memory_comes_back(guest: Guest) -> None:
    a, b = Qp(guest.kernel), Qp(guest.kernel)
    connect(a, b, guest.gid, guest.gid)
    source, target = guest.kernel.buffer(9000), guest.kernel.buffer(9000)
    for turn in range(3):
        source.write(bytes([turn + 1]) * 9000)
        b.post_recv(target.sge(), wr_id=1)
        a.send(source.sge(), wr_id=2)
        assert a.send_cq.wait_one().status == OK
        assert b.recv_cq.wait_one().status == OK
        assert target.read() == bytes([turn + 1]) * 9000
        guest.bus.unmap_ram()
        guest.bus.map_ram()

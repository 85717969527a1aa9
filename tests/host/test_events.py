"""Events of the host that become the guest's, each about the object that it is about; and two guests on one device."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guest import Kernel, Qp, Srq, UserProcess, connect
from host_server import HostServer

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpState
from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus

pytestmark = pytest.mark.host
OK = int(WcStatus.SUCCESS)
WAIT_S = 30.0


class Guest:
    """A guest with its driver loaded and one GID."""

    def __init__(self, server: HostServer) -> None:
        self.gid = server.gid
        self.bus = server.connect()
        self.driver = self.bus.boot()
        self.kernel = Kernel(self.driver)
        self.kernel.add_gid(self.gid)
        self.process = UserProcess(self.driver)

    def events_until(self, wanted: int) -> list[tuple[int, int]]:
        """(type, info) of what came until one of a kind did."""
        seen: list[tuple[int, int]] = []
        deadline = time.monotonic() + WAIT_S
        while not any(kind == wanted for kind, _ in seen):
            assert time.monotonic() < deadline, f"no event {wanted}: {seen}"
            self.bus.wait()
            seen += [(event.type, event.info) for event in self.driver.take_events()]
        return seen


@pytest.fixture
def guest(server: Any) -> Iterator[Guest]:
    made = Guest(server)
    yield made
    made.bus.close()


def test_last_wqe_names_its_queue_pair(guest: Guest) -> None:
    srq = Srq(guest.process)
    mr = guest.process.mr(256)
    srq.post_recv(mr.sge(), wr_id=1)
    bystander, qp = Qp(guest.process, srq=srq), Qp(guest.process, srq=srq)
    for mine in (bystander, qp):
        connect(Qp(guest.process), mine, guest.gid, guest.gid)
    qp.to_error()
    seen = guest.events_until(EqeType.QP_LAST_WQE_REACHED)
    assert [info for kind, info in seen if kind == EqeType.QP_LAST_WQE_REACHED] == [qp.handle]
    assert bystander.query().qp_state == QpState.RTS


def test_access_error_names_its_queue_pair(guest: Guest) -> None:
    pairs = [(Qp(guest.process), Qp(guest.process)) for _ in range(2)]
    for pair in pairs:
        connect(*pair, guest.gid, guest.gid)
    mr = guest.process.mr(256)
    left, right = pairs[1]
    left.write(mr.sge(), to=mr.remote()._replace(rkey=mr.rkey ^ 0x5500), wr_id=1)
    assert left.send_cq.wait_one().status == WcStatus.REM_ACCESS_ERR
    seen = guest.events_until(EqeType.QP_ACCESS_ERR)
    assert [info for kind, info in seen if kind == EqeType.QP_ACCESS_ERR] == [right.handle]
    assert pairs[0][1].query().qp_state == QpState.RTS


def test_gid_change(guest: Guest) -> None:
    guest.driver.take_events()
    address = "10.9.0.171/32"
    try:
        subprocess.run(["ip", "address", "add", address, "dev", "d0"], check=True)
        assert (EqeType.GID_CHANGE, 1) in guest.events_until(EqeType.GID_CHANGE)
    finally:
        subprocess.run(["ip", "address", "delete", address, "dev", "d0"], check=True)


def test_malformed_receive_of_an_srq_fails_when_a_message_takes_it(guest: Guest) -> None:
    srq = Srq(guest.process)
    mr = guest.process.mr(256)
    srq.post_recv(mr.sge(), wr_id=5, num_sge=99)
    sender, receiver = Qp(guest.process), Qp(guest.process, srq=srq)
    connect(sender, receiver, guest.gid, guest.gid)
    sender.send(mr.sge(), wr_id=6)
    assert sender.send_cq.wait_one().status == WcStatus.REM_OP_ERR
    wc = receiver.recv_cq.wait_one()
    assert (wc.status, wc.wr_id) == (WcStatus.LOC_QP_OP_ERR, 5)


def test_two_servers_share_one_device(server: Any, tmp_path: Path) -> None:
    """Each with its own GID: they reach each other, and neither's end is the other's."""
    other_server = HostServer(tmp_path, "rxe0", "10.9.0.170")
    other_server.start()
    guest, other = Guest(server), Guest(other_server)
    a, b = Qp(guest.process), Qp(other.process)
    connect(a, b, guest.gid, other.gid)
    source, target = guest.process.mr(9000), other.process.mr(9000)
    source.write(bytes(range(250)) * 36)
    a.write(source.sge(), to=target.remote(), wr_id=1)
    assert a.send_cq.wait_one().status == OK
    assert target.read() == bytes(range(250)) * 36
    # The second guest's keys are nothing to queue pairs of the first's server.
    mine = guest.process.mr(64)
    a.write(source.sge(0, 64)._replace(lkey=target.lkey), to=target.remote(), wr_id=2)
    assert a.send_cq.wait_one().status in (WcStatus.LOC_PROT_ERR, WcStatus.LOC_QP_OP_ERR)
    c, d = Qp(guest.process), Qp(guest.process)
    connect(c, d, guest.gid, guest.gid)
    other.bus.close()
    assert other_server.end() == 0, other_server.log.read_text()
    shown = subprocess.run(
        ["ip", "address", "show", "d0"], capture_output=True, text=True, check=True
    ).stdout
    assert "10.9.0.170" not in shown
    assert server.address in shown
    c.write(source.sge(0, 64), to=mine.remote(), wr_id=3)
    assert c.send_cq.wait_one().status == OK
    guest.bus.close()

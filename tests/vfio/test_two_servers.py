"""Two real servers and their guests' drivers: messages between them; ends killed, stopped and restarted."""

import errno
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guest import CommandFailed, Cq, Driver, Kernel, Mr, Qp, connect
from guest_ram import GuestRam
from server_process import ServerProcess
from vfu_bus import VfuBus

from pvrdma_server.abi.vmw_pvrdma_abi import Cqe, WcStatus

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
OK, RETRIES, FLUSHED = WcStatus.SUCCESS, WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR


def gid_of(number: int) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes([10, 0, 0, number])


class Side:
    """A server with a guest on it: a kernel, memory, and whatever queue pair is connected now."""

    def __init__(self, folder: Path, number: int) -> None:
        self.process = ServerProcess(folder, f"vm{number}")
        self.gid = gid_of(number)
        self.bus: VfuBus | None = None

    def boot(self) -> None:
        self.process.start()
        self.bus = VfuBus(self.process.socket, GuestRam(24 << 20, memfd=True))
        self.driver: Driver = self.bus.boot()
        self.kernel = Kernel(self.driver)
        self.kernel.add_gid(self.gid)
        self.memory: Mr = self.kernel.pd.reg_mr(4 * MIB)
        self.cq: Cq = self.kernel.cq(256)

    def qp(self) -> Qp:
        return Qp(self.kernel, send_cq=self.cq, max_wr=64)

    def hang_up(self) -> None:
        if self.bus is not None:
            self.bus.close()
            self.bus.ram.close()
            self.bus = None

    def held(self) -> dict[str, Any]:
        now = self.process.status()
        return {
            "objects": now["objects"],
            "fds": now["process"]["fds"],
            "mappings": now["process"]["mappings"],
        }


class Two:
    """Both sides."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b = Side(folder, 1), Side(folder, 2)

    def boot(self) -> None:
        self.a.boot()
        self.b.boot()

    def connected(self, **rts: Any) -> tuple[Qp, Qp]:
        left, right = self.a.qp(), self.b.qp()
        connect(left, right, self.a.gid, self.b.gid, **rts)
        return left, right

    def writes(self, qp: Qp, count: int, size: int = 256 << 10) -> None:
        for wr_id in range(1, count + 1):
            qp.write(self.a.memory.sge(0, size), to=self.b.memory.remote(), wr_id=wr_id)

    def works(self) -> None:
        """A fresh pair of queue pairs moves bytes both ways."""
        left, right = self.connected()
        for n, (qp, source, target) in enumerate(((left, self.a, self.b), (right, self.b, self.a))):
            data = bytes((n + i) & 0xFF for i in range(256)) * 1200
            source.memory.write(data, at=MIB)
            qp.write(source.memory.sge(MIB, len(data)), to=target.memory.remote(2 * MIB), wr_id=n)
            assert source.cq.wait_one().status == OK
            assert target.memory.read(2 * MIB, len(data)) == data
        left.destroy()
        right.destroy()

    def close(self) -> None:
        for side in (self.a, self.b):
            side.hang_up()
            side.process.end()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    try:
        made.boot()
        yield made
    finally:
        made.close()


def statuses(cqes: list[Cqe]) -> list[tuple[int, int]]:
    return [(cqe.wr_id, cqe.status) for cqe in cqes]


def failed_in_order(cqes: list[Cqe], first: int, last: int) -> None:
    """Successes, one failure by timeout, flushes; each request once, in order."""
    assert [cqe.wr_id for cqe in cqes] == list(range(first, last + 1))
    kinds = [kind for kind, _ in itertools.groupby(cqe.status for cqe in cqes)]
    assert kinds in ([OK, RETRIES, FLUSHED], [OK, RETRIES], [RETRIES, FLUSHED], [RETRIES])
    assert [cqe.status for cqe in cqes].count(RETRIES) == 1


def test_every_operation(two: Two) -> None:
    left, right = two.connected()
    a, b = two.a.memory, two.b.memory
    a.write(b"written" * 1000)
    left.write(a.sge(0, 7000), to=b.remote(), wr_id=1)
    assert two.a.cq.wait_one().status == OK
    assert b.read(0, 7000) == b"written" * 1000
    left.read(a.sge(MIB, 7000), frm=b.remote(), wr_id=2)
    assert two.a.cq.wait_one().status == OK
    assert a.read(MIB, 7000) == b"written" * 1000
    b.write64(41, at=2 * MIB)
    left.fetch_add(a.sge(2 * MIB, 8), b.remote(2 * MIB), 1, wr_id=3)
    assert two.a.cq.wait_one().status == OK
    assert (a.read64(2 * MIB), b.read64(2 * MIB)) == (41, 42)
    right.post_recv(b.sge(3 * MIB, 4096), wr_id=9)
    left.send(a.sge(0, 7), wr_id=4)
    assert two.a.cq.wait_one().status == OK
    received = two.b.cq.wait_one()
    assert (received.wr_id, received.status, received.byte_len) == (9, OK, 7)
    assert b.read(3 * MIB, 7) == b"written"


def test_a_receive_that_comes_late(two: Two) -> None:
    left, right = two.connected()
    left.send(two.a.memory.sge(0, 64), wr_id=1)
    two.a.process.wait_for("an RNR NAK", lambda now: now["backend"]["rnr_naks"])
    right.post_recv(two.b.memory.sge(0, 64), wr_id=2)
    assert two.a.cq.wait_one().status == OK
    assert two.b.cq.wait_one().status == OK


def test_a_gid_that_is_taken(two: Two) -> None:
    with pytest.raises(CommandFailed) as caught:
        two.b.kernel.add_gid(two.a.gid, index=1)
    assert caught.value.err == errno.EADDRINUSE
    two.works()


def test_a_killed_server_is_a_pulled_cable(two: Two) -> None:
    two.works()
    before = two.a.held()
    left, _ = two.connected(retry_cnt=2)
    two.writes(left, 10)
    done = two.a.cq.wait(1)
    two.b.process.end(kill=True)
    two.b.hang_up()
    for wr_id in range(11, 31):
        left.write(two.a.memory.sge(0, 65536), to=two.b.memory.remote(), wr_id=wr_id)
    done += two.a.cq.wait(30 - len(done))
    failed_in_order(done, 1, 30)
    left.destroy()
    two.a.process.wait_for("rid of the peer", lambda now: now["fabric"]["peers"] == [])
    two.b.boot()
    two.works()
    after = two.a.held()
    assert after["objects"] == before["objects"]
    assert after["fds"] == before["fds"]
    assert abs(after["mappings"] - before["mappings"]) <= 4
    assert two.a.process.status()["device"]["guest_errors"] == {}


def test_a_stopped_server_is_a_pulled_cable_too(two: Two) -> None:
    two.works()
    before = two.a.held()
    left, right = two.connected(retry_cnt=1)
    two.b.process.send(signal.SIGSTOP)
    # More than the ring holds.
    two.writes(left, 40)
    failed_in_order(two.a.cq.wait(40), 1, 40)
    two.b.process.send(signal.SIGCONT)
    left.destroy()
    right.destroy()
    two.works()
    assert two.a.held()["objects"] == before["objects"]
    assert two.a.held()["fds"] == before["fds"]
    assert [peer["state"] for peer in two.a.process.status()["fabric"]["peers"]] == ["up"]


def test_a_server_that_stops_before_it_was_ever_called(two: Two) -> None:
    left, right = two.connected(retry_cnt=1)
    two.b.process.send(signal.SIGSTOP)
    two.writes(left, 2)
    assert statuses(two.a.cq.wait(2)) == [(1, RETRIES), (2, FLUSHED)]
    two.b.process.send(signal.SIGCONT)
    left.destroy()
    right.destroy()
    two.works()


def test_a_guest_that_ends_takes_nothing_along(two: Two) -> None:
    """QEMU dies, its server lives: the peer runs into its timeout; a new guest on the old server is a new peer."""
    two.works()
    left, _ = two.connected(retry_cnt=1)
    two.b.hang_up()
    two.b.process.wait_for("without objects", lambda now: not any(now["objects"].values()))
    two.writes(left, 3)
    failed_in_order(two.a.cq.wait(3), 1, 3)
    left.destroy()
    two.b.bus = VfuBus(two.b.process.socket, GuestRam(24 << 20, memfd=True))
    two.b.driver = two.b.bus.boot()
    two.b.kernel = Kernel(two.b.driver)
    two.b.kernel.add_gid(two.b.gid)
    two.b.memory, two.b.cq = two.b.kernel.pd.reg_mr(4 * MIB), two.b.kernel.cq(256)
    two.works()


def test_a_survivor_that_restarts_both_ways(two: Two) -> None:
    for side in (two.a, two.b, two.a):
        side.hang_up()
        assert side.process.end() == 0
        side.boot()
        two.works()
    assert len(list((two.a.process.folder / "fabric").glob("*.sock"))) == 2

"""What scripts/bench measures on: server processes, guests made of the tests' fakes, and their queue pairs.

Contract: this process is every QEMU and every guest's driver, and must not be what is measured. So all work requests
are written into the rings before a run begins; while it runs, posting is one store of an index, completions are
counted by another, and between two looks this process sleeps.
"""

import contextlib
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from guest import PAGE, SIGNALED, Cq, GuestRam, Kernel, Mr, PageDir, Qp, UserProcess
from vfu_bus import VfuBus

from pvrdma_lab import paths
from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_verbs import AccessFlags
from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus, WrOpcode
from pvrdma_server.backend_soft.config import SoftConfig
from pvrdma_server.status import read_status

KIB, MIB = 1 << 10, 1 << 20
# Of guest memory for data: larger than any cache, so that both ends touch memory as guests do.
REGION: Final = 128 * MIB
_QUEUES: Final = 96 * MIB
# Slots of the queues whose every entry is written beforehand.
DEPTH: Final = 4096
CQ_DEPTH: Final = 8192
SMALL_DEPTH: Final = 16
_SMALL_CQ: Final = 64
_SHARED_CQ: Final = 1024
_START_S: Final = 30.0
_READS: Final = SoftConfig().max_qp_rd_atom
_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
_STATUS = struct.Struct("<I")
_STATUS_AT = abi.CQE.fields["status"].offset
_OPCODES = {
    "WRITE": WrOpcode.RDMA_WRITE,
    "READ": WrOpcode.RDMA_READ,
    "SEND": WrOpcode.SEND,
}


class BenchError(Exception):
    """A server or an operation failed."""


class ServerProcess:
    """A running server, and what the kernel says it costs."""

    def __init__(self, process: "subprocess.Popen[bytes]", socket: Path, status: Path) -> None:
        self.process, self.socket, self._status = process, str(socket), str(status)
        self._proc = Path(f"/proc/{process.pid}")

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        total = 0
        for task in (self._proc / "task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def work_s(self) -> float:
        """CPU time so far without looking for work: at peers' rings, and by the thread that watches the guest's."""
        peers = read_status(self._status)["fabric"]["peers"]
        looked: float = sum(peer["looked_s"] for peer in peers)
        for task in (self._proc / "task").iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text() == "ring-watcher\n":
                    looked += int((task / "schedstat").read_text().split()[0]) / 1e9
        return self.cpu_s() - looked

    def own_memory_mib(self) -> float:
        """Memory that is nobody else's: without the guest's, the rings and shared libraries."""
        for line in (self._proc / "smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) / 1024
        raise BenchError("/proc has no Private_Dirty")


@contextmanager
def server(folder: Path, name: str, options: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """A server process within the block."""
    socket, log_path = folder / f"{name}.sock", folder / f"{name}.log"
    status = folder / f"{name}.status"
    command = [
        sys.executable, "-m", "pvrdma_server", "--socket-path", str(socket), "--name", name,
        "--fabric", str(folder / "fabric"), "--status-socket", str(status), *options,
    ]  # fmt: skip
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=paths.REPOSITORY, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _START_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(log_path.read_text())
            time.sleep(0.02)
        yield ServerProcess(process, socket, status)
    finally:
        process.terminate()
        process.wait(_START_S)


class BenchRam(GuestRam):
    """Guest memory whose upper part is one region in a row, for data."""

    def __init__(self) -> None:
        super().__init__(_QUEUES + REGION, memfd=True)
        self._free = deque(range(self.iova, self.iova + _QUEUES, PAGE))
        self.data = self.view[_QUEUES:]

    def data_pages(self, *, scattered: bool) -> list[int]:
        first = self.iova + _QUEUES
        pages = list(range(first, first + REGION, PAGE))
        # No two neighbours in a row: the worst that a guest's memory can look like.
        return pages[::2] + pages[1::2] if scattered else pages


class CountedCq(Cq):
    """A completion queue whose entries are counted as they come, and looked at when the run is over."""

    def take(self) -> int:
        """Consume everything; how many it were."""
        ring = self.ring
        tail, head = ring.prod_tail, ring.cons_head
        if tail != head:
            ring.cons_head = tail
        return (tail - head) & (2 * self.cqe - 1)

    def check_last(self, count: int) -> None:
        """Raise BenchError unless the last `count` (at most the ring) were successful."""
        tail = self.ring.prod_tail
        for index in range(tail - min(count, self.cqe), tail):
            offset = PAGE + (index & (self.cqe - 1)) * abi.CQE_SIZE + _STATUS_AT
            status = _STATUS.unpack(self.pages.read(offset, _STATUS.size))[0]
            if status != WcStatus.SUCCESS:
                raise BenchError(f"a completion with status {WcStatus(status).name}")


class Station:
    """One guest on its server: a process of the guest with one region; queue pairs come and go."""

    def __init__(
        self, bus: VfuBus, ram: BenchRam, number: int, server: ServerProcess, options: "RigOptions"
    ) -> None:
        self.ram, self.server = ram, server
        self.gid = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, number + 1])
        self.kernel = Kernel(bus.boot())
        self.kernel.add_gid(self.gid)
        # Doorbells of a process reach nobody when they are mapped, so there is nothing to ring.
        self.trapped = options.trapped
        self.process = process = UserProcess(self.kernel.driver)
        pages = PageDir(ram, ram.data_pages(scattered=options.scattered))
        start = process.take_va(len(pages.pages))
        request = api.CmdCreateMr(
            start, REGION, pages.dir_dma, process.pd.handle, _ACCESS, 0, len(pages.pages)
        )
        answer = process.pd.create_mr(request)
        self.mr = Mr(pages, start, REGION, answer.lkey, answer.rkey)
        # Of queue pairs nobody waits for, since a device has fewer completion queues than queue pairs.
        self.shared = CountedCq(process, _SHARED_CQ)


class BenchQp(Qp):
    """A queue pair whose rings are filled once and then only moved."""

    def __init__(self, station: Station, depth: int, sends: CountedCq, receives: CountedCq) -> None:
        self.station, self.depth = station, depth
        self.sends, self.receives = sends, receives
        super().__init__(
            station.process, max_wr=depth, max_sge=1, send_cq=self.sends, recv_cq=self.receives
        )

    def at(self, slot: int, size: int) -> int:
        """Where in the region the message of this slot is."""
        return slot * max(size, 64) % REGION

    def fill_sends(self, operation: str, size: int, peer: "BenchQp", every: int) -> None:
        """Write every slot of the send queue; one in `every` is signalled."""
        opcode, target = _OPCODES[operation], peer.station.mr
        for slot in range(self.depth):
            at = self.at(slot, size)
            flags = 0 if (slot + 1) % every else SIGNALED
            header = abi.SqWqeRdma(slot, 1, 0, opcode, flags, bytes(4), *target.remote(at))
            wqe = abi.SQ_WQE_RDMA.pack(header) + abi.SGE.pack(self.station.mr.sge(at, size))
            self.pages.write(PAGE + slot * self.entry_size, wqe)

    def fill_receives(self, size: int) -> None:
        """Write every slot of the receive queue."""
        header = abi.RQ_WQE_HDR.pack(abi.RqWqeHdr(0, 1, 0))
        for slot in range(self.depth):
            wqe = header + abi.SGE.pack(self.station.mr.sge(self.at(slot, size), size))
            self.pages.write(self.rq.first_page * PAGE + slot * self.rq.entry_size, wqe)

    def post(self, count: int) -> None:
        """Let the next `count` sends go."""
        self.sq.prod_tail = (self.sq.prod_tail + count) & (2 * self.depth - 1)
        if self.station.trapped:
            self.ring_send()

    def top_up(self) -> None:
        """Post receives until the queue is full, and take what was received."""
        self.rq.ring.prod_tail = self.rq.ring.cons_head ^ self.depth
        self.receives.take()


@dataclass(frozen=True, slots=True)
class RigOptions:
    """How servers and memories are set up."""

    servers: int = 2
    scattered: bool = False
    trapped: bool = False

    @property
    def server_options(self) -> list[str]:
        return ["--doorbells", "trapped"] if self.trapped else []


@contextmanager
def rig(folder: Path, options: RigOptions) -> Iterator[list[Station]]:
    """Guests on servers that meet in one fabric."""
    with ExitStack() as stack:
        stations = []
        for number in range(options.servers):
            process = stack.enter_context(server(folder, f"vm{number}", options.server_options))
            ram = BenchRam()
            bus = stack.enter_context(VfuBus(process.socket, ram))
            stations.append(Station(bus, ram, number, process, options))
        yield stations


def connected(a: Station, b: Station) -> tuple[BenchQp, BenchQp]:
    """Two queue pairs, each other's peers, with completion queues of their own."""

    def qp(station: Station) -> BenchQp:
        cqs = (CountedCq(station.process, CQ_DEPTH) for _ in range(2))
        return BenchQp(station, DEPTH, *cqs)

    return _connect(qp(a), qp(b))


def connected_small(a: Station, b: Station) -> tuple[BenchQp, BenchQp]:
    """The same with short queues, of which only the first's sends have a completion queue of their own."""
    sends = CountedCq(a.process, _SMALL_CQ)
    first = BenchQp(a, SMALL_DEPTH, sends, a.shared)
    return _connect(first, BenchQp(b, SMALL_DEPTH, b.shared, b.shared))


def connected_idle(a: Station, b: Station) -> tuple[BenchQp, BenchQp]:
    """The same with short queues, for nothing: they share the completion queues of their stations."""
    return _connect(*(BenchQp(each, SMALL_DEPTH, each.shared, each.shared) for each in (a, b)))


def _connect(first: BenchQp, second: BenchQp) -> tuple[BenchQp, BenchQp]:
    # As many READs under way as a queue pair may have.
    gids = first.station.gid, second.station.gid
    for qp in (first, second):
        qp.to_init()
    first.to_rtr(dest_qpn=second.qpn, dgid=gids[1], max_dest_rd_atomic=_READS)
    second.to_rtr(dest_qpn=first.qpn, dgid=gids[0], max_dest_rd_atomic=_READS)
    for qp in (first, second):
        qp.to_rts(max_rd_atomic=_READS)
    return first, second

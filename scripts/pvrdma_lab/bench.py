"""scripts/bench: bytes from one device's guest memory to another's, through two real servers, against plain memcpy.

Two server processes meet in a fabric folder. This process is both their QEMUs and both their guests' drivers (the
fakes of tests/), and does nothing while they work. memcpy is measured in the same run, between the same memories,
walking them so that the caches do not help. No number here contains a vCPU's exits, QEMU, or interrupts in a guest.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from guest import PAGE, SIGNALED, Cq, GuestRam, Kernel, Mr, PageDir, Qp, connect
from rich.console import Console
from rich.table import Table
from vfu_bus import VfuBus

from pvrdma_lab import paths
from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_verbs import AccessFlags
from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
OPERATIONS = ("WRITE", "READ", "SEND")
# Larger than any cache of a core, so that both ends touch memory as guests do.
REGION = 128 * MIB
_QUEUES = 8 * MIB
_DEPTH = 256
_START_S = 30.0
_STEP_S = 60.0
_BATCHES_AHEAD = 3
# What this process sleeps between two looks at a completion queue: it must leave the cores to the servers.
_LOOK_S = 0.0002
_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ


class BenchError(Exception):
    """A server or an operation failed."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One measurement: bytes of a message, messages per second, GB/s, and that over memcpy's."""

    operation: str
    size_bytes: int
    messages_per_s: float
    gb_per_s: float
    of_memcpy: float


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


class Station:
    """One guest on its server: memory, a kernel's queue pair, one region."""

    def __init__(self, bus: VfuBus, ram: BenchRam, gid: bytes, *, scattered: bool) -> None:
        self.ram, self.gid = ram, gid
        self.kernel = kernel = Kernel(bus.boot())
        kernel.add_gid(gid)
        pages = PageDir(ram, ram.data_pages(scattered=scattered))
        start = kernel.take_va(len(pages.pages))
        answer = kernel.pd.create_mr(
            api.CmdCreateMr(
                start, REGION, pages.dir_dma, kernel.pd.handle, _ACCESS, 0, len(pages.pages)
            )
        )
        self.mr = Mr(pages, start, REGION, answer.lkey, answer.rkey)
        self.qp = Qp(kernel, max_wr=_DEPTH, send_cq=kernel.cq(1024), recv_cq=kernel.cq(1024))


def _drain(cq: Cq) -> int:
    count = 0
    while cq.ring.has_data()[0] > 0:
        cqe = cq.poll_one()
        if cqe is not None and cqe.status != WcStatus.SUCCESS:
            raise BenchError(f"completion with status {WcStatus(cqe.status).name}")
        count += 1
    return count


def _wait(cq: Cq) -> int:
    deadline = time.monotonic() + _STEP_S
    while not (count := _drain(cq)):
        if time.monotonic() > deadline:
            raise BenchError(f"no completion within {_STEP_S:.0f} s")
        time.sleep(_LOOK_S)
    return count


class Run:
    """One operation of one size: batches of work requests, some on their way, the last of each signalled."""

    def __init__(self, a: Station, b: Station, operation: str, size: int, total: int) -> None:
        self.a, self.b, self.operation, self.size = a, b, operation, size
        self.batch = max(1, min(64, 16 * MIB // size))
        self.batches = max(2, min(total // size, 4096) // self.batch)
        self.posted = 0

    def measure(self) -> float:
        """Seconds it took."""
        started = time.perf_counter()
        done = 0
        while done < self.batches:
            while self.posted < min(done + _BATCHES_AHEAD, self.batches) * self.batch:
                self._post()
            done += _wait(self.a.qp.send_cq)
        return time.perf_counter() - started

    @property
    def messages(self) -> int:
        return self.batch * self.batches

    def _post(self) -> None:
        qp, peer = self.a.qp, self.b
        if self.operation == "SEND":
            _drain(peer.qp.recv_cq)
            for n in range(self.batch):
                peer.qp.post_recv(peer.mr.sge(self._at(n), self.size), doorbell=False)
        ring, qp.ring_send = qp.ring_send, lambda: None  # type: ignore[method-assign]
        try:
            for n in range(self.batch):
                self._post_one(qp, self._at(n), SIGNALED if n == self.batch - 1 else 0)
        finally:
            qp.ring_send = ring  # type: ignore[method-assign]
        self.posted += self.batch
        qp.ring_send()

    def _at(self, n: int) -> int:
        return (self.posted + n) * max(self.size, 64) % REGION

    def _post_one(self, qp: Qp, at: int, flags: int) -> None:
        local, remote = self.a.mr.sge(at, self.size), self.b.mr.remote(at)
        if self.operation == "WRITE":
            qp.write(local, to=remote, flags=flags)
        elif self.operation == "READ":
            qp.read(local, frm=remote, flags=flags)
        else:
            qp.send(local, flags=flags)


def memcpy_gb_per_s(a: BenchRam, b: BenchRam) -> float:
    """Copying 1 MiB pieces from all over one memory to another: the median of seven walks."""
    rates = []
    for _ in range(7):
        started = time.perf_counter()
        for at in range(0, REGION, MIB):
            b.data[at : at + MIB] = a.data[at : at + MIB]
        rates.append(REGION / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates)


@contextmanager
def server(folder: Path, name: str) -> Iterator[str]:
    """A server process within the block: its socket."""
    socket = folder / f"{name}.sock"
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "pvrdma_server", "--socket-path", str(socket), "--name", name,
                "--fabric", str(folder / "fabric"), "--status-socket", str(folder / f"{name}.status"),
            ],
            cwd=paths.REPOSITORY, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + _START_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError((folder / f"{name}.log").read_text())
            time.sleep(0.02)
        yield str(socket)
    finally:
        process.terminate()
        process.wait(_START_S)


@contextmanager
def stations(folder: Path, *, scattered: bool) -> Iterator[tuple[Station, Station]]:
    """Two guests on two servers, connected."""
    with ExitStack() as stack:
        made = []
        for number, name in enumerate("ab"):
            ram = BenchRam()
            bus = stack.enter_context(VfuBus(stack.enter_context(server(folder, name)), ram))
            gid = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, number + 1])
            made.append(Station(bus, ram, gid, scattered=scattered))
        a, b = made
        connect(a.qp, b.qp, a.gid, b.gid)
        yield a, b


def measure(
    sizes: Sequence[int],
    operations: Sequence[str],
    total: int,
    *,
    scattered: bool,
    repeats: int = 3,
) -> tuple[float, list[Rate]]:
    """memcpy's GB/s, and the best of `repeats` runs of every operation and size."""
    rates = []
    with (
        tempfile.TemporaryDirectory(prefix="pvrdma-bench-") as folder,
        stations(Path(folder), scattered=scattered) as (a, b),
    ):
        memcpy = memcpy_gb_per_s(a.ram, b.ram)
        for operation in operations:
            for size in sizes:
                runs = [Run(a, b, operation, size, total) for _ in range(repeats)]
                seconds = min(run.measure() for run in runs)
                per_s = runs[0].messages / seconds
                gb = per_s * size / 1e9
                rates.append(Rate(operation, size, per_s, gb, gb / memcpy))
        memcpy = statistics.mean((memcpy, memcpy_gb_per_s(a.ram, b.ram)))
    return memcpy, [
        Rate(r.operation, r.size_bytes, r.messages_per_s, r.gb_per_s, r.gb_per_s / memcpy)
        for r in rates
    ]


def size_text(size: int) -> str:
    """Returns 64 B, 4 KiB, 1 MiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _table(memcpy: float, rates: list[Rate]) -> Table:
    table = Table(
        title=f"device to device, two servers on one host; cold memcpy {memcpy:.1f} GB/s",
        title_justify="left",
    )
    for heading in ("operation", "size", "messages/s", "GB/s", "of memcpy"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for rate in rates:
        table.add_row(
            rate.operation, size_text(rate.size_bytes), f"{rate.messages_per_s:,.0f}",
            f"{rate.gb_per_s:.2f}", f"{rate.of_memcpy:.2f}",
        )  # fmt: skip
    return table


def _plot(path: str, memcpy: float, rates: list[Rate]) -> None:
    try:
        from matplotlib import pyplot as plt  # type: ignore[import-not-found]
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None
    _, axes = plt.subplots(figsize=(8, 5))
    for operation in dict.fromkeys(rate.operation for rate in rates):
        mine = [rate for rate in rates if rate.operation == operation]
        axes.plot([r.size_bytes for r in mine], [r.gb_per_s for r in mine], "o-", label=operation)
    axes.axhline(memcpy, color="grey", linestyle="--", label="cold memcpy")
    axes.set(xscale="log", xlabel="bytes of a message", ylabel="GB/s", ylim=(0, None))
    axes.legend()
    plt.savefig(path, dpi=120, bbox_inches="tight")


def main(
    *, sizes: Sequence[int], operations: Sequence[str], total: int, scattered: bool, out: str | None,
    plot: str | None,
) -> int:  # fmt: skip
    """Measure, print the table, write JSON and plot; the process's status."""
    try:
        memcpy, rates = measure(sizes, operations, total, scattered=scattered)
        Console(width=None if sys.stdout.isatty() else 100).print(_table(memcpy, rates))
        if out is not None:
            document = {
                "machine": platform.processor() or platform.machine(),
                "memcpy_gb_per_s": memcpy,
                "scattered": scattered,
                "rates": [asdict(rate) for rate in rates],
            }
            Path(out).write_text(json.dumps(document, indent=1) + "\n")
        if plot is not None:
            _plot(plot, memcpy, rates)
    except BenchError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 1
    return 0

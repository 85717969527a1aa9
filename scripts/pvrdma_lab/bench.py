"""scripts/bench: bytes from one device's guest memory to another's, through real servers, against plain memcpy.

Server processes meet in a fabric folder. This process is all their QEMUs and all their guests' drivers (the fakes of
tests/), and sleeps while they work. memcpy is measured in the same run, between the same memories, walking them so
that the caches do not help. No number here contains a vCPU's exits, QEMU, or interrupts in a guest.
"""

import argparse
import ctypes
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from pvrdma_lab import bench_figures as figures
from pvrdma_lab.bench_report import plot, table, write_json
from pvrdma_lab.bench_rig import KIB, MIB, BenchError, RigOptions

SIZES: Final = (64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_GROWTH_SIZES: Final = (64, 4 * KIB, MIB)
OPERATIONS: Final = ("WRITE", "READ", "SEND")
WHAT: Final = ("rates", "latency", "qps", "servers", "idle", "growth")
_PR_SET_TIMERSLACK: Final = 29


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="bench",
        description="Servers without guests: RDMA between the memories of devices over the shared-memory fabric, "
        "against cold memcpy in the same run. `bench guests --help` is about guests, `bench old --help` about "
        "QEMU's old device.",
    )
    made.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"of {', '.join(WHAT)} (default: rates)",
    )
    made.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="of messages")
    made.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    made.add_argument(
        "--window", type=int, metavar="N", help="messages under way (default: by size, 128 at most)"
    )
    made.add_argument(
        "--total", type=int, default=256, metavar="MIB",
        help="to move per figure (default: %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of which the best counts (default: 3)"
    )
    made.add_argument(
        "--scattered", action="store_true", help="no two pages of guest memory in a row"
    )
    made.add_argument(
        "--doorbells", choices=("mapped", "trapped"), default="mapped", help="as of the server"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    made.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw rates (.svg or .png; needs matplotlib)"
    )
    return made


def _rates(folder: Path, asked: argparse.Namespace, found: dict[str, Any]) -> None:
    options = RigOptions(scattered=asked.scattered, trapped=asked.doorbells == "trapped")
    sizes = asked.sizes or SIZES
    memcpy, rates = figures.rates(
        folder, options, asked.operations, sizes, asked.total * MIB,
        window=asked.window, repeats=asked.repeats,
    )  # fmt: skip
    found["memcpy_gb_per_s"], found["rates"] = memcpy, rates
    found["scattered"], found["doorbells"] = asked.scattered, asked.doorbells


def _latency(folder: Path, asked: argparse.Namespace, found: dict[str, Any]) -> None:
    options = RigOptions(trapped=asked.doorbells == "trapped")
    found["latency"] = figures.latencies(folder, options, asked.sizes or (64, 4 * KIB, 64 * KIB))


def _qps(folder: Path, asked: argparse.Namespace, found: dict[str, Any]) -> None:
    options = RigOptions(trapped=asked.doorbells == "trapped")
    found["qps"] = figures.queue_pairs(folder, options, (1, 4, 16, 64, 256, 500))


def _servers(folder: Path, asked: argparse.Namespace, found: dict[str, Any]) -> None:
    options = RigOptions(trapped=asked.doorbells == "trapped")
    found["servers"] = figures.servers(folder, options, (2, 4, 8), asked.sizes or (64, MIB))


def _idle(folder: Path, _asked: argparse.Namespace, found: dict[str, Any]) -> None:
    found["idle"] = figures.idle(folder, (0, 1, 64, 1000))


def _growth(folder: Path, asked: argparse.Namespace, found: dict[str, Any]) -> None:
    found["growth"] = figures.growth(folder, asked.sizes or _GROWTH_SIZES, asked.total * MIB)


_MEASURE: dict[str, Callable[[Path, argparse.Namespace, dict[str, Any]], None]] = {
    "rates": _rates,
    "latency": _latency,
    "qps": _qps,
    "servers": _servers,
    "idle": _idle,
    "growth": _growth,
}
_TITLES: Final = {
    "rates": "device to device, two servers on one host; cold memcpy {memcpy:.1f} GB/s",
    "latency": "a WRITE there and one back",
    "qps": "WRITEs over many queue pairs",
    "servers": "WRITEs around a ring of servers",
    "idle": "a server that has nothing to do",
    "growth": "a stream beside what is not used, over the same without it",
}


def main(arguments: Sequence[str]) -> int:
    """Measure, print tables, write JSON and plot; the process's status."""
    command_line = parser()
    asked = command_line.parse_args(arguments)
    chosen = asked.what or ["rates"]
    for what in chosen:
        if what not in WHAT:
            command_line.error(f"{what}: choose of {', '.join(WHAT)}")
    # Sleeping 50 us takes 50 us, and not 100.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    console = Console(width=None if sys.stdout.isatty() else 110)
    found: dict[str, Any] = {}
    try:
        for what in chosen:
            with tempfile.TemporaryDirectory(prefix="pvrdma-bench-") as folder:
                _MEASURE[what](Path(folder), asked, found)
            title = _TITLES[what].format(memcpy=found.get("memcpy_gb_per_s", 0.0))
            console.print(table(title, found[what]))
        if asked.json is not None:
            write_json(asked.json, found)
        if asked.plot is not None and "rates" in found:
            plot(asked.plot, found["memcpy_gb_per_s"], found["rates"])
    except BenchError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 1
    return 0

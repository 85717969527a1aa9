"""scripts/bench old: SEND by QEMU 7.2's own pvrdma device and by ours, on the same rxe, in one run.

The guests and their rxe host are emulated, one in the other. What is measured is done by tests/old_bench.py in there.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pvrdma_lab.bench_report import circumstances, markdown_table, size_text
from pvrdma_lab.bench_rig import KIB, MIB, BenchError
from pvrdma_lab.host import HostVm
from pvrdma_lab.old_qemu import RUN
from pvrdma_lab.state import LabError, locked

SIZES: Final = (64, 4 * KIB, 64 * KIB, MIB)
_LIMIT_S: Final = 1800.0
_HEADING: Final = ("size", "program", "old", "ours", "ours over old", "server CPU, us a message")


def _figures(vm: HostVm, wanted: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = " ".join(str(size) for size in wanted.sizes)
    words = f"--repeats {wanted.repeats} --messages {wanted.messages} --sizes {sizes}"
    command = vm.project(f"PYTHONPATH=.:tests python3 tests/old_bench.py {words}")
    lines: list[bytes] = []
    with vm.popen(command, _LIMIT_S) as running:
        running.stream(lines.append, sys.stderr.buffer.write)
        status = running.wait(_LIMIT_S + 30).status
    sys.stderr.flush()
    if status:
        raise BenchError(f"tests/old_bench.py ended with status {status} in the rxe host")
    return [json.loads(line) for line in b"".join(lines).splitlines()]


def rows(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A heading, then for each program and size the medians of both devices, and their ratio."""
    found = [list(_HEADING)]
    for program, size in sorted({(f["program"], f["size_bytes"]) for f in figures}):
        of, unit = ("mib_per_s", "MiB/s") if program.endswith("_bw") else ("usec", "us")

        def values(device: str, of: str, name: str = program, size: int = size) -> list[float]:
            one = (device, name, size)
            return [
                f[of] / (f["messages"] / 1e6 if of == "server_s" else 1)
                for f in figures
                if (f["device"], f["program"], f["size_bytes"]) == one
            ]

        old, ours = statistics.median(values("old", of)), statistics.median(values("ours", of))
        cpu = statistics.median(values("ours", "server_s"))
        found.append([
            size_text(size), program, f"{old:.2f} {unit}", f"{ours:.2f} {unit}", f"{ours / old:.2f}", f"{cpu:.0f}",
        ])  # fmt: skip
    return found


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench old",
        description="QEMU 7.2's pvrdma device and ours on the same rxe, each in a guest of the rxe host. Needs root.",
    )
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", metavar="BYTES", default=list(SIZES), help="of messages")
    add(
        "--messages",
        type=int,
        default=2000,
        help="of a figure (default: %(default)s); 64 MiB at most",
    )
    add("--repeats", type=int, default=3, help="of which the median counts (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures here, too")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure, print, write; the process's status."""
    wanted = _parse(argv)
    vm = HostVm()
    try:
        with locked("rxe-host-tests"):
            ran_before = vm.alive
            try:
                vm.up()
                vm.add_old_qemu()
                version = vm.check(f"{RUN} --version | head -1; uname -r").splitlines()
                figures = _figures(vm, wanted)
            finally:
                if not ran_before:
                    vm.down()
    except (BenchError, LabError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(markdown_table(rows(figures)))
    if wanted.json:
        inside = {"old_qemu": version[0], "rxe_host_kernel": version[1]}
        document = {"circumstances": {**circumstances(), **inside}, "figures": figures}
        wanted.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0

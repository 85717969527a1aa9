"""Tests that run inside the rxe host: boots it, copies the clone in, runs pytest there, fetches the report.

Usage: python -m pvrdma_lab.host_tests (host|nested) [--report FILE] [words for pytest]. `scripts/test host` and
`scripts/test nested` call it. The machine is shut down at the end, unless it ran before.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from pvrdma_lab.host import HostVm
from pvrdma_lab.state import LabError, locked

_REPORT = "/tmp/report.xml"
# Steps of bootstrap that the modes need.
HOST_STEPS = ("qemu", "rxe-host", "rxe-initrd", "rxe-extension")
NESTED_STEPS = (*HOST_STEPS, "tiny-kernel", "nested-initrd")
# pyroute2 0.9 under Python 3.14: ctypes deprecates what its structures use.
_PYTEST = "python3 -m pytest -v -p no:cacheprovider -p no:hypothesispytest -W 'ignore:Due to:DeprecationWarning'"


@dataclass(frozen=True, slots=True)
class Run:
    """One pytest of a mode.

    Attributes:
        words: what pytest is told.
        environment: variables, as a shell takes them before a command.
        limit_s: seconds for all of it.
    """

    words: str
    environment: str = ""
    limit_s: float = 900.0


RUNS = {
    # The backend contract, the very same tests that the embedded backend passes; then guests on real servers.
    "host": Run("--timeout 120 tests/contract tests/host", "PVRDMA_IBV_DEVICE=rxe0", 1500.0),
    "nested": Run("--timeout 700 tests/nested", "", 1500.0),
}


def run(mode: str, report: Path | None, more: list[str]) -> int:
    """Runs a mode's tests; returns pytest's status. One run at a time: there is one machine and its devices."""
    with locked("rxe-host-tests"):
        return _run(mode, report, more)


def _run(mode: str, report: Path | None, more: list[str]) -> int:
    vm = HostVm()
    ran_before = vm.alive
    try:
        print(f"rxe host: up in {vm.up():.0f} s", flush=True)
        return _pytest(vm, RUNS[mode], report, more)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if not ran_before:
            vm.down()


def _pytest(vm: HostVm, what: Run, report: Path | None, more: list[str]) -> int:
    words = f"{what.environment} {_PYTEST} --junitxml={_REPORT} {what.words} {shlex.join(more)}"
    with vm.popen(vm.project(words), what.limit_s) as running:
        running.stream(sys.stdout.buffer.write, sys.stdout.buffer.write)
        result = running.wait(what.limit_s + 30)
    sys.stdout.flush()
    if report is not None:
        text = vm.run(f"cat {_REPORT}").stdout
        if text:
            report.write_text(text)
    return result.status


def main(argv: list[str]) -> int:
    """Runs the command line; returns the process's status."""
    parser = argparse.ArgumentParser(prog="host_tests")
    parser.add_argument("mode", choices=list(RUNS))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--junitxml", dest="report", type=Path, help=argparse.SUPPRESS)
    arguments, more = parser.parse_known_args(argv)
    return run(arguments.mode, arguments.report, more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

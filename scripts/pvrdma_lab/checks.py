"""scripts/test: the set-up, then every check of a mode, each with its time; a last line with the counts.

Standard library only: it runs before the virtualenv exists. A new kind of test is a new entry of MODES.
"""

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.host_tests import HOST_STEPS, NESTED_STEPS
from pvrdma_lab.prepare import GUEST_STEPS, SERVICE_STEPS, set_up, venv_python


@dataclass(frozen=True, slots=True)
class Check:
    """One program to run.

    Attributes:
        name: what the output calls it; also its report's file name.
        module: the Python module that is the program.
        arguments: its words.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it takes pytest's words and writes a report with counts."""
        return self.module in ("pytest", "pvrdma_lab.host_tests")


@dataclass(frozen=True, slots=True)
class Mode:
    """What one word of the command line stands for.

    Attributes:
        title: for --help.
        steps: set-up steps it needs.
        checks: what it runs, in order.
    """

    title: str
    steps: tuple[str, ...]
    checks: tuple[Check, ...]


# -v: one line per test, for tests that take long enough to wonder.
MODES = {
    "fast": Mode(
        "lint, types, and all tests without guests: unit tests, libvfio-user with a Python client, the lab's own",
        ("venv",),
        (
            Check("lint", "ruff", ("check",)),
            Check("format", "ruff", ("format", "--check")),
            Check("types", "mypy"),
            Check(
                "tests",
                "pytest",
                ("-m", "not (guest or host or nested or service or stress)", "--durations=5"),
            ),
        ),
    ),
    "guest": Mode(
        "Linux guests on a real QEMU and the server",
        GUEST_STEPS,
        (
            Check(
                "guests",
                "pytest",
                ("-v", "--durations=10", "-m", "not (matrix or soak or stress)", "tests/vm"),
            ),
        ),
    ),
    "soak": Mode(
        "five minutes of verified traffic around a ring of three guests; no part of all",
        GUEST_STEPS,
        (Check("soak", "pytest", ("-v", "-m", "soak", "tests/vm")),),
    ),
    "stress": Mode(
        "programs that sleep on completion events, in guests and without; -- --stress-seconds N each; no part of all",
        GUEST_STEPS,
        (
            Check(
                "stress",
                "pytest",
                ("-v", "-m", "stress", "--stress-seconds=60", "tests/vfio", "tests/vm"),
            ),
        ),
    ),
    "matrix": Mode(
        "every program of perftest with every size and option in a guest; not part of all",
        GUEST_STEPS,
        (Check("matrix", "pytest", ("-v", "--durations=10", "-m", "matrix", "tests/vm")),),
    ),
    "host": Mode(
        "inside a machine with RDMA (rxe, in a VM): the contract over host verbs, guests in Python on real servers",
        ("venv", *HOST_STEPS),
        (Check("host", "pvrdma_lab.host_tests", ("host",)),),
    ),
    "nested": Mode(
        "a Linux guest inside that machine, and verbs programs between the two",
        ("venv", *NESTED_STEPS),
        (Check("nested", "pvrdma_lab.host_tests", ("nested",)),),
    ),
    "service": Mode(
        "a machine with systemd (in a VM): installed by the quick start's words, run as a service, a guest on it",
        ("venv", *SERVICE_STEPS),
        (Check("service", "pytest", ("-v", "--durations=5", "-m", "service", "tests/service")),),
    ),
}
ALL = tuple(mode for mode in MODES if mode not in ("matrix", "soak", "stress"))


@dataclass(slots=True)
class Outcome:
    """What came out: tests, and each lint or type check as one."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, passed: int, failed: int, skipped: int = 0) -> None:
        self.passed += passed
        self.failed += failed
        self.skipped += skipped
        if failed:
            self.failures.append(name)

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="test",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Does the set-up (scripts/bootstrap) and runs the tests.",
        epilog="modes:\n"
        + "".join(f"  {name:<7} {mode.title}\n" for name, mode in MODES.items())
        + f"  {'all':<7} {' and '.join(ALL)} (the default)\n"
        "\nWords after -- go to pytest: scripts/test guest -- -k reboot -x\n",
    )
    parser.add_argument("mode", nargs="?", default="all", choices=[*MODES, "all"])
    own, more = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    )
    arguments = parser.parse_args(own)
    arguments.pytest = more
    return arguments


def say(text: str) -> None:
    print(text, flush=True)


def report_counts(report: Path) -> tuple[int, int, int]:
    """Returns passed, failed and skipped of a JUnit report; one failure if pytest wrote none."""
    try:
        root = ET.parse(report).getroot()
    except (FileNotFoundError, ET.ParseError):
        return 0, 1, 0
    total, bad, skipped = 0, 0, 0
    for suite in root.iter("testsuite"):
        total += int(suite.get("tests", 0))
        bad += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    # A test that fails and whose teardown then fails, too, counts as two errors of one test.
    return max(0, total - bad - skipped), bad, skipped


def run_check(check: Check, more: Sequence[str], outcome: Outcome) -> None:
    """Runs one check, its output to ours, and adds its counts."""
    argv = [venv_python(), "-m", check.module, *check.arguments]
    report = paths.log_folder() / f"test-{check.name}.xml"
    if check.counts:
        report.unlink(missing_ok=True)
        argv += [f"--junitxml={report}", *more]
    say(f"=== {check.name}: {check.module} {' '.join([*check.arguments, *more])}".rstrip())
    started = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(paths.REPOSITORY / "scripts"),
    }
    status = subprocess.run(argv, cwd=paths.REPOSITORY, env=environment, check=False).returncode
    if check.counts:
        passed, failed, skipped = report_counts(report)
        failed = failed or int(status != 0)
    else:
        passed, failed, skipped = int(status == 0), int(status != 0), 0
    outcome.add(check.name, passed, failed, skipped)
    word = "failed" if status else "passed"
    say(f"=== {check.name}: {word} in {time.monotonic() - started:.1f} s")


def main(argv: list[str]) -> int:
    """Runs the command line; returns the process's status."""
    arguments = _parse(argv)
    modes = ALL if arguments.mode == "all" else (arguments.mode,)
    started = time.monotonic()
    outcome = Outcome()
    try:
        for name in modes:
            say(f"=== {name}: {MODES[name].title}")
            if not set_up(MODES[name].steps):
                outcome.add(f"set-up for {name}", 0, 1)
                continue
            for check in MODES[name].checks:
                run_check(check, arguments.pytest if check.counts else (), outcome)
    except KeyboardInterrupt:
        say("test: interrupted")
        return 130
    if outcome.failures:
        say(f"test: failed: {', '.join(outcome.failures)}")
    say(f"===== {outcome} in {time.monotonic() - started:.2f}s =====")
    return 1 if outcome.failed else 0


def run() -> None:
    """Runs the command line of scripts/test."""
    sys.exit(main(sys.argv[1:]))

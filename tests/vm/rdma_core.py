"""rdma-core's own Python tests in a guest: run them, and compare with the list of what each one does.

Read first: rdma_core_expected.toml. The tests are Debian's, in the guest's /usr/share/doc/rdma-core/tests.
"""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from pvrdma_lab import Guest

_HERE = Path(__file__).parent
_FOLDER = "/tmp/rdma-core"
_SOURCE = "/usr/share/doc/rdma-core/tests"
_TIMEOUT_S = 500


class Group(NamedTuple):
    """Tests that are skipped, or fail, for one reason; `message` is what such a test says (a regular expression)."""

    name: str
    outcome: str
    message: str
    why: str
    tests: tuple[str, ...]


class Expected(NamedTuple):
    """The list: every test is in `passed` or in one group."""

    passed: tuple[str, ...]
    groups: tuple[Group, ...]


class Outcome(NamedTuple):
    """What a test did; `why` is its message."""

    id: str
    outcome: str
    why: str


def expected() -> Expected:
    data = tomllib.loads((_HERE / "rdma_core_expected.toml").read_text())
    groups = [Group(**{**group, "tests": tuple(group["tests"])}) for group in data["group"]]
    return Expected(tuple(data["passed"]), tuple(groups))


def run(guest: Guest) -> list[Outcome]:
    """Runs all tests; takes a minute under TCG."""
    # The tests of huge pages skip themselves without.
    guest.check(f"echo 8 >/proc/sys/vm/nr_hugepages; mkdir -p {_FOLDER}; cp -r {_SOURCE} {_FOLDER}")
    guest.write_file(f"{_FOLDER}/runner.py", (_HERE / "rdma_core_runner.py").read_bytes())
    output = guest.check(
        f"cd {_FOLDER} && python3 runner.py --dev vmw_pvrdma0 --gid 1 2>errors.txt", _TIMEOUT_S
    )
    guest.check("echo 0 >/proc/sys/vm/nr_hugepages")
    return [Outcome(**json.loads(line)) for line in output.splitlines()]


def differences(want: Expected, outcomes: list[Outcome]) -> list[str]:
    """What is not as the list says, a line each: new failures, vanished skips, tests that came, went, or ran twice."""
    groups = {test: group for group in want.groups for test in group.tests}
    known = Counter([*want.passed, *groups])
    seen = Counter(outcome.id for outcome in outcomes)
    found = [f"{name}: listed {known[name]}x, ran {seen[name]}x" for name in sorted(known | seen)
             if (known[name], seen[name]) != (1, 1)]  # fmt: skip
    for test in outcomes:
        group = groups.get(test.id)
        if group is None:
            wanted = test.outcome == "passed"
        else:
            wanted = test.outcome == group.outcome and bool(re.fullmatch(group.message, test.why))
        if not wanted:
            place = group.name if group else "passed"
            found.append(f"{test.id}: listed under {place}, {test.outcome} ({test.why})")
    return found


def markdown(want: Expected) -> str:
    """The list as docs/conformance.md shows it."""
    counts = Counter({"passed": len(want.passed)})
    for group in want.groups:
        counts[group.outcome] += len(group.tests)
    total = counts.total()
    lines = [
        f"Of {total} tests, {counts['passed']} pass, {counts['skipped']} skip themselves, {counts['failed']} fail.",
        "",
        "| Reason | Tests | Outcome |",
        "|---|---:|---|",
    ]
    lines += [f"| {group.why} | {len(group.tests)} | {group.outcome} |" for group in want.groups]
    for group in want.groups:
        lines += ["", f"### {group.name}", "", group.why, ""]
        by_class: dict[str, list[str]] = {}
        for name in group.tests:
            owner, _, test = name.rpartition(".")
            by_class.setdefault(owner, []).append(test.removeprefix("test_"))
        lines += [f"- {owner}: {', '.join(names)}" for owner, names in by_class.items()]
    lines += ["", "### passed", ""]
    by_module = Counter(name.partition(".")[0] for name in want.passed)
    lines += [", ".join(f"{module} {count}" for module, count in by_module.items()) + ".", ""]
    return "\n".join(lines)

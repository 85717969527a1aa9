"""scripts/test and scripts/demo without guests: modes, counts, and what they say."""

from pathlib import Path

import pytest
from pvrdma_lab import checks, demo
from pvrdma_lab.checks import MODES, Check, Outcome, report_counts
from pvrdma_lab.programs import Measured

REPORT = """<?xml version="1.0"?><testsuites>
<testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="1"/></testsuites>"""


def test_counts_of_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert report_counts(report) == (4, 3, 3)


@pytest.mark.parametrize("text", [None, "", "<testsuites>"])
def test_a_run_without_a_report_is_a_failure(tmp_path: Path, text: str | None) -> None:
    report = tmp_path / "report.xml"
    if text is not None:
        report.write_text(text)
    assert report_counts(report) == (0, 1, 0)


def test_the_last_line_is_what_runners_read() -> None:
    outcome = Outcome()
    outcome.add("lint", 1, 0)
    outcome.add("tests", 20, 2, 3)
    assert str(outcome) == "21 passed, 2 failed, 3 skipped"
    assert outcome.failures == ["tests"]


def test_every_mode_runs_something() -> None:
    for mode in MODES.values():
        assert mode.checks
        assert mode.steps
    names = [check.name for mode in MODES.values() for check in mode.checks]
    assert len(names) == len(set(names))


def test_a_failed_check_fails_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome()
    checks.run_check(Check("nothing", "no_such_module"), (), outcome)
    assert (outcome.passed, outcome.failed) == (0, 1)
    assert "nothing: failed" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (100_001, "100001 B"), (1 << 20, "1 MiB")],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert demo.size_text(size_bytes) == text


def test_results_for_people() -> None:
    assert demo.result_text(Measured(1, 1, 12.34, None, "")) == "12.3 MiB/s"
    assert demo.result_text(Measured(1, 1, 12.34, 5678.0, "")) == "5.68 ms"
    assert demo.result_text(Measured(1, 1, None, None, "")) == ""


def test_the_demo_shows_each_step_once() -> None:
    names = [step.name for step in demo.STEPS]
    assert len(names) == len(set(names))

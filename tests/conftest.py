"""What all tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stress-seconds", type=float, default=15.0,
        help="how long each stress test goes on (default: %(default)s; scripts/test stress: 60)",
    )  # fmt: skip


@pytest.fixture
def stress_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--stress-seconds"))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: pytest's own, with the test's name and a run number, is too long for UNIX sockets."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder:
        yield Path(folder)

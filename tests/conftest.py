"""What all tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: pytest's own, with the test's name and a run number, is too long for UNIX sockets."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder:
        yield Path(folder)

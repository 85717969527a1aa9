"""Guests for tests: one lab per module, its server's state compared around each test, logs with each failure.

Read first: vm/server_state.py. A failed module's logs stay below the cache's run folder; pytest's output names them.
"""

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from pvrdma_lab import Guest, Lab
from vm.server_state import assert_same, complaints, held

_HERE = Path(__file__).parent
# A boot takes 10 to 60 s, and a polling program its share of one emulated CPU.
_TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("guest")
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    guest = getattr(item, "funcargs", {}).get("guest")
    if report.failed and isinstance(guest, Guest):
        report.sections.append(("guest", str(guest.error(report.when, "logs at the failure"))))
    return report


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """One guest; the parameter, if any, is the server's --doorbells. A module may say SMP and MEMORY_MIB."""
    doorbells = getattr(request, "param", "mapped")
    module = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    failed_before = request.session.testsfailed
    # The pid: another clone, or another user, may test at the same time.
    name = f"{module}-{doorbells[0]}-{os.getpid()}"
    smp = getattr(request.module, "SMP", 1)
    memory_mib = getattr(request.module, "MEMORY_MIB", 512)
    arguments = ("--doorbells", doorbells)
    with Lab(name, guests=1, smp=smp, memory_mib=memory_mib, server_args=arguments) as lab:
        complaints(lab["a"])
        yield lab
    if request.session.testsfailed == failed_before:
        shutil.rmtree(lab.folder)


@pytest.fixture
def guest(lab: Lab) -> Guest:
    return lab["a"]


@pytest.fixture
def settled(guest: Guest) -> Iterator[None]:
    """After the test the server holds what it held before, and the guest's kernel has not complained."""
    before = held(guest)
    yield
    assert_same(guest, before)
    assert complaints(guest) == []

"""Guests for tests: one lab per module, its servers' state compared around each test, logs with each failure.

A module, or a test, says with `vm.pairs.labs` what kinds of lab it wants; without, it gets one guest. Read first:
vm/pairs.py, vm/server_state.py. A failed module's logs stay below the cache's run folder; pytest's output names them.
"""

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from pvrdma_lab import Guest, Lab
from pvrdma_lab.programs import pingpong
from vm.pairs import KINDS, Ends
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
    lab = getattr(item, "funcargs", {}).get("lab")
    if report.failed and isinstance(lab, Lab):
        for guest in lab:
            logs = str(guest.error(report.when, "logs at the failure"))
            report.sections.append((f"guest {guest.name}", logs))
    return report


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab of a kind (`vm.pairs.labs`). A module may say the SMP of its only guest, and MEMORY_MIB of each."""
    name = getattr(request, "param", "mapped")
    kind = KINDS[name]
    module = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    failed_before = request.session.testsfailed
    # The pid: another clone, or another user, may test at the same time. Short: it is part of sockets' paths.
    folder = f"{module[:12]}-{name[:2]}-{os.getpid()}"
    smp = getattr(request.module, "SMP", 1) if kind.guests == 1 else 1
    memory_mib = getattr(request.module, "MEMORY_MIB", 512)
    arguments = ("--doorbells", kind.doorbells)
    with Lab(
        folder, guests=kind.guests, smp=smp, memory_mib=memory_mib, server_args=arguments
    ) as lab:
        for guest in lab:
            complaints(guest)
        if kind.guests > 1:
            # Servers meet at the first message; what a link holds is no leak.
            pingpong(lab["a"], lab["b"], 64, 1)
        yield lab
    if request.session.testsfailed == failed_before:
        shutil.rmtree(lab.folder)


@pytest.fixture
def guest(lab: Lab) -> Guest:
    return lab["a"]


@pytest.fixture
def ends(lab: Lab) -> Ends:
    """Where servers and clients run: the lab's first and last guest, which may be one."""
    *_, last = lab
    return Ends(lab["a"], last)


@pytest.fixture
def settled(lab: Lab) -> Iterator[None]:
    """After the test the servers hold what they held before, and no guest's kernel has complained."""
    before = {guest.name: held(guest) for guest in lab}
    yield
    for guest in lab:
        assert_same(guest, before[guest.name])
        assert complaints(guest) == []

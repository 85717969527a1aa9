"""The machine with systemd, and the project installed and set up in it by the quick start's own commands."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pvrdma_lab.service_vm import ServiceVm
from pvrdma_lab.steps import locked
from service.machine import UNIT, Machine
from source_archive import build, copy_clone

# Set, it leaves the machine running: scripts/lab has nothing to do with it, `ServiceVm().remove()` ends it.
_KEEP = "PVRDMA_KEEP_SERVICE"
_HERE = Path(__file__).parent
# Installation and boot are the first test's.
_TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("service")
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine, up, with what section "Install" installs."""
    folder = tmp_path_factory.mktemp("source")
    archive = build("build_sdist", copy_clone(folder / "clone"), folder / "archive")
    with locked("service-tests"):
        vm = ServiceVm()
        vm.down()
        try:
            installation = vm.install(archive)
            vm.up()
            yield Machine(vm, installation)
        finally:
            if not os.environ.get(_KEEP):
                vm.remove()


@pytest.fixture(scope="session")
def served(machine: Machine) -> Machine:
    """The machine once "Set up the service" and "Give a virtual machine its device" were followed."""
    machine.follow("Set up the service")
    machine.follow("Give a virtual machine its device")
    return machine


@pytest.fixture
def running(served: Machine) -> Machine:
    """The same with the service running, whatever the test before did to it."""
    served.check(f"systemctl reset-failed {UNIT} || true; systemctl start {UNIT}")
    return served

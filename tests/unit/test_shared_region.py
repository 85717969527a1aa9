"""The device shared region, and all that can be wrong with it."""

import errno

import pytest
import structlog
from guest import (
    PAGE,
    Machine,
    PageDir,
    nothing_left,
)
from unit.bed import prepared, publish, write
from unit.fake_backend import FakeBackend

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import Reg
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.device import MAX_DEVICE_RING_PAGES, State

IMR_ALL = 0xFFFF_FFFF


@pytest.fixture
def machine() -> Machine:
    return Machine(FakeBackend(), config=DeviceConfig(max_uar=8))


# --- the shared region: CVE-2021-3607, 2021-3608, 2023-1544 --------------------------------------------------------

RING_PAGES_FIELD = pytest.mark.parametrize("field", [32, 48], ids=["async", "notifications"])


@RING_PAGES_FIELD
@pytest.mark.parametrize("pages", [0, 1, MAX_DEVICE_RING_PAGES + 1, 511, 512, 513, 0xFFFF_FFFF])
def test_cve_2021_3607_and_2023_1544_ring_lengths(machine: Machine, field: int, pages: int) -> None:
    driver = prepared(machine)
    machine.ram.write32(driver.dsr + field, pages)
    assert publish(driver) == errno.EFAULT
    assert machine.device.state is State.RESET
    assert driver.read_dsr().caps.mode == driver.read_dsr().caps.gid_types == 0  # no caps
    assert write(machine, Reg.REQUEST, 0) == errno.ENODEV


@RING_PAGES_FIELD
@pytest.mark.parametrize("pages", [2, 3, 4, MAX_DEVICE_RING_PAGES])
def test_ring_lengths_that_are_fine(machine: Machine, field: int, pages: int) -> None:
    driver = prepared(machine)
    ring = PageDir.alloc(machine.ram, pages)
    machine.ram.write32(driver.dsr + field, pages)
    machine.ram.write(driver.dsr + field + 8, ring.dir_dma.to_bytes(8, "little"))
    assert publish(driver) == 0


@RING_PAGES_FIELD
@pytest.mark.parametrize("step", ["directory", "table", 0, 1, 2, 3])
@pytest.mark.parametrize("address", [0, 0x123, 0x7777_0000_0000])
def test_cve_2021_3608_a_page_that_cannot_be_mapped(
    machine: Machine, field: int, step: str | int, address: int
) -> None:
    driver = prepared(machine)
    ring = driver.async_dir if field == 32 else driver.cqn_dir
    if isinstance(step, int):
        ring.set_entry(step, address)
    elif step == "table":
        machine.ram.write(ring.dir_dma, address.to_bytes(8, "little"))
    else:
        machine.ram.write(driver.dsr + field + 8, address.to_bytes(8, "little"))
    users = len(machine.device.memory._users)
    assert publish(driver) == errno.EFAULT
    assert machine.device.state is State.RESET
    assert len(machine.device.memory._users) == users
    assert nothing_left(machine.counts())


@pytest.mark.parametrize("field", [16, 24], ids=["command slot", "response slot"])
@pytest.mark.parametrize("address", [0, 0x10_0800, 0x7777_0000_0000, 0xFFFF_FFFF_FFFF_F000])
def test_slots_that_are_nowhere(machine: Machine, field: int, address: int) -> None:
    driver = prepared(machine)
    machine.ram.write(driver.dsr + field, address.to_bytes(8, "little"))
    assert publish(driver) == errno.EFAULT


@pytest.mark.parametrize("dsr", [0, 0x7777_0000_0000, 0xFFFF_FFFF_FFFF_FFFF])
def test_a_region_that_is_nowhere(machine: Machine, dsr: int) -> None:
    driver = prepared(machine)
    driver.dsr = dsr
    assert publish(driver) == errno.EFAULT


def test_a_region_anywhere_in_its_page(machine: Machine) -> None:
    driver = prepared(machine)
    raw = machine.ram.read(driver.dsr, 280)
    for offset in (8, 1024, PAGE - 280):
        machine.ram.write(driver.dsr + offset, raw)
        write(machine, Reg.DSRLOW, (driver.dsr + offset) & 0xFFFF_FFFF)
        assert write(machine, Reg.DSRHIGH, driver.dsr >> 32) == 0
        assert machine.ram.read(driver.dsr + offset + 72, 208) == api.DEVICE_CAPS.pack(
            machine.device.caps
        )
    write(machine, Reg.DSRLOW, (driver.dsr + PAGE - 272) & 0xFFFF_FFFF)
    assert write(machine, Reg.DSRHIGH, driver.dsr >> 32) == errno.EFAULT


def test_ram_that_is_not_shared_is_recognised(machine: Machine) -> None:
    """The server then sees a page of zeros, whatever the guest wrote."""
    driver = prepared(machine)
    machine.ram.write(driver.dsr, bytes(280))
    with structlog.testing.capture_logs() as log:
        assert publish(driver) == errno.EFAULT
    assert machine.device.state is State.RESET
    assert "share=on" in log[-1]["error"]  # what to do about it


def test_read_only_memory_is_no_place_for_it(machine: Machine) -> None:
    driver = prepared(machine)
    machine.unmap_ram()
    machine.device.dma_map(
        machine.ram.iova, machine.ram.size, machine.ram.view.toreadonly(), writable=False
    )
    assert publish(driver) == errno.EFAULT


def test_only_dsrhigh_publishes(machine: Machine) -> None:
    driver = prepared(machine)
    driver.write_reg(Reg.DSRLOW, driver.dsr)
    assert machine.device.state is State.RESET

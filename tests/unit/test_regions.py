"""BAR1 and BAR2: accesses of every size and alignment, and doorbells split out of stores."""

import struct

import pytest
from guest import PAGE, Machine, Qp, UserProcess
from hypothesis import given
from hypothesis import strategies as st
from unit.fake_backend import FakeBackend

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_dev_api import Reg
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.regions import REGISTERS_SIZE, uar_bar_size

MAX_UAR = 8


@pytest.fixture
def machine() -> Machine:
    return Machine(FakeBackend(), config=DeviceConfig(max_uar=MAX_UAR))


@pytest.mark.parametrize("bar", [0, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 8, 16, PAGE])
def test_cve_2018_20191_every_bar_can_be_read(machine: Machine, bar: int, length: int) -> None:
    machine.boot()
    for offset in (
        0,
        1,
        2,
        3,
        4,
        0x14,
        0x24,
        0x27,
        0x28,
        PAGE - 4,
        PAGE - 1,
        PAGE,
        1 << 20,
        1 << 40,
    ):
        assert len(machine.regions.bar_read(bar, offset, length)) == length


def test_doorbells_read_as_zero(machine: Machine) -> None:
    UserProcess(machine.boot())
    machine.write32(2, PAGE + 4, 0xFFFF_FFFF)
    assert machine.regions.bar_read(2, PAGE, 16) == bytes(16)


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (2, 2)])
def test_registers_are_read_whole(machine: Machine, offset: int, length: int) -> None:
    """A partial read would clear ICR for nobody."""
    assert machine.regions.bar_read(1, offset, length) == bytes(length)


def test_a_wide_read_is_its_words(machine: Machine) -> None:
    machine.write32(1, Reg.MACL, 0x1111_1111)
    machine.write32(1, Reg.MACH, 0x2222_2222)
    assert machine.regions.bar_read(1, Reg.MACL, 8) == b"\x11" * 4 + b"\x22" * 4


@pytest.mark.parametrize("bar", [1, 2])
@pytest.mark.parametrize(
    "data", [b"\0", b"\0\0", b"\0\0\0", bytes(5), bytes(7), bytes(12), bytes(4096)]
)
def test_stores_of_other_sizes_are_counted_and_do_nothing(
    machine: Machine, bar: int, data: bytes
) -> None:
    machine.boot()
    before = machine.errors()
    machine.regions.bar_write(bar, 0x0C, data)
    assert machine.errors() == before + 1


@pytest.mark.parametrize("offset", [1, 2, 3, 0x0D, 0x0E, 0x0F])
def test_unaligned_stores_are_counted_and_do_nothing(machine: Machine, offset: int) -> None:
    machine.boot()
    machine.regions.bar_write(1, offset, struct.pack("<I", api.DeviceCtl.RESET))
    assert machine.errors() == 1
    assert machine.device.counters.resets == 1  # the boot's own


def test_a_64_bit_store_is_two_words_low_first(machine: Machine) -> None:
    driver = machine.boot()
    machine.device.reset("test")
    driver.ram.write(driver.dsr, api.DEVICE_SHARED_REGION64.pack(driver.make_dsr()))
    machine.regions.bar_write(1, Reg.DSRLOW, struct.pack("<Q", driver.dsr))
    assert driver.read_dsr().caps == machine.device.caps


def test_a_64_bit_doorbell_is_a_qp_and_a_cq_doorbell(machine: Machine) -> None:
    user = UserProcess(machine.boot())
    qp = Qp(user)
    before = machine.device.counters.doorbells
    words = struct.pack("<II", qp.handle | abi.UAR_QP_RECV, qp.send_cq.handle | abi.UAR_CQ_POLL)
    machine.regions.bar_write(2, user.uar_page * PAGE, words)
    assert machine.device.counters.doorbells == before + 2
    assert machine.device.counters.polls == 1
    assert machine.errors() == 0


@pytest.mark.parametrize("offset", [MAX_UAR * PAGE, uar_bar_size(MAX_UAR) - 4, 1 << 30])
def test_beyond_the_doorbell_pages_there_is_nothing(machine: Machine, offset: int) -> None:
    machine.boot()
    machine.write32(2, offset, 0xFFFF_FFFF)
    assert machine.device.counters.doorbells == 0


def test_the_bars_are_what_the_driver_needs() -> None:
    assert REGISTERS_SIZE >= 0x28
    for max_uar in (1, 8, 256):
        size = uar_bar_size(max_uar)
        assert size >= max_uar * PAGE
        assert size & (size - 1) == 0


@given(
    st.sampled_from([0, 1, 2, 7]),
    st.integers(0, uar_bar_size(MAX_UAR) + 64),
    st.binary(max_size=20),
)
def test_any_access_is_answered(bar: int, offset: int, data: bytes) -> None:
    machine = Machine(FakeBackend(), config=DeviceConfig(max_uar=MAX_UAR))
    try:
        UserProcess(machine.boot())
        machine.regions.bar_write(bar, offset, data)
        assert len(machine.regions.bar_read(bar, offset, len(data))) == len(data)
    finally:
        machine.ram.close()

"""The device's life: probe and remove, every register in every state, interrupts, reset."""

import errno
from collections.abc import Callable

import pytest
from guest import (
    PAGE,
    CommandFailed,
    CommandTimeout,
    GuestRam,
    Kernel,
    Machine,
    Pd,
    ProbeError,
    Qp,
    UserProcess,
    nothing_left,
)
from unit.bed import prepared, publish, read, write
from unit.fake_backend import LIMITS, FakeBackend

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import DeviceCtl, Reg
from pvrdma_server.caps import DeviceConfig

IMR_ALL = 0xFFFF_FFFF


@pytest.fixture
def machine() -> Machine:
    return Machine(FakeBackend(), config=DeviceConfig(max_uar=8))


# --- probe and remove ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [17, 18, 19, 20, 21, 1000])
def test_probe_and_remove_in_every_version(version: int) -> None:
    config = DeviceConfig(roce_version=1 if version == 17 else 2, max_uar=8)
    machine = Machine(FakeBackend(), config=config)
    pages = machine.ram.free_page_count
    for _ in range(3):
        driver = machine.boot(driver_version=version)
        assert machine.device.state.value == "active"
        assert driver.dsr_version == min(20, version)
        Pd(Kernel(driver))
        driver.remove()
        assert machine.device.state.value == "reset"
        assert nothing_left(machine.counts())
    assert machine.ram.free_page_count == pages


def test_a_version_17_driver_refuses_roce_v2(machine: Machine) -> None:
    with pytest.raises(ProbeError, match="RoCE"):
        machine.boot(driver_version=17)


@pytest.mark.parametrize("version", [18, 19, 20])
def test_roce_v1_is_for_every_driver(version: int) -> None:
    machine = Machine(FakeBackend(), config=DeviceConfig(roce_version=1))
    assert machine.boot(driver_version=version).caps.gid_types == api.GidType.ROCE_V1


def test_caps_are_in_memory_when_dsrhigh_returns(machine: Machine) -> None:
    caps = machine.boot().caps
    assert caps == machine.device.caps
    assert caps.node_guid == LIMITS.node_guid
    assert (caps.mode, caps.gid_types, caps.phys_port_cnt) == (0, 2, 1)
    assert (caps.max_qp, caps.max_cq, caps.max_uar) == (64, 64, 8)
    for size in (caps.max_qp_wr, caps.max_sge, caps.max_sge_rd, caps.max_cqe, caps.max_uar):
        assert size & (size - 1) == 0
    assert caps.max_sge <= 128
    assert caps.max_qp <= 65535
    assert caps.gid_tbl_len <= 256


def test_bus_addresses_beyond_4_gib() -> None:
    machine = Machine(FakeBackend(), ram=GuestRam(iova=0x12_3400_0000))
    driver = machine.boot()
    assert driver.dsr > 1 << 32
    qp = Qp(UserProcess(driver))
    assert qp.query().cap.max_send_wr == 16


def test_a_second_driver_takes_over_without_a_word(machine: Machine) -> None:
    """Kexec: the old one never said goodbye."""
    Qp(UserProcess(machine.boot()))
    second = machine.boot()
    assert nothing_left(machine.counts())
    assert second.link_up() == 0


def test_link_up_reads_zero_after_a_failed_command(machine: Machine) -> None:
    driver = machine.boot()
    with pytest.raises(CommandFailed):
        driver.post_bytes(api.CMD_HDR.pack(api.CmdHdr(0, 99)), ack=None)
    assert driver.read_reg(Reg.ERR) == errno.EOPNOTSUPP
    assert driver.link_up() == 0


def test_one_vector_or_intx_asks_icr(machine: Machine) -> None:
    driver = machine.boot(vectors=1)
    assert Pd(Kernel(driver)).handle
    assert driver.read_reg(Reg.ICR) == 0


# --- every register in every state: CVE-2022-1050 ------------------------------------------------------------------


def fresh(machine: Machine) -> None:
    """Nothing was written yet."""


def mapped(machine: Machine) -> None:
    assert publish(prepared(machine)) == 0


def active(machine: Machine) -> None:
    machine.boot()


def failed(machine: Machine) -> None:
    driver = machine.boot()
    driver.ram.write32(driver.dsr + 32, 0)  # the async ring has no pages any more
    assert publish(driver)


def after_reset(machine: Machine) -> None:
    Qp(UserProcess(machine.boot()))
    write(machine, Reg.CTL, DeviceCtl.RESET)


def after_memory_left(machine: Machine) -> None:
    machine.boot()
    machine.unmap_ram()


STATES: dict[str, Callable[[Machine], None]] = {
    f.__name__: f for f in (fresh, mapped, active, failed, after_reset, after_memory_left)
}
every_state = pytest.mark.parametrize("state", STATES)


@every_state
@pytest.mark.parametrize("offset", range(0, 0x40, 4))
def test_cve_2022_1050_any_store_in_any_state(machine: Machine, state: str, offset: int) -> None:
    STATES[state](machine)
    for value in (0, 1, 2, 3, 0x1000, 0x8000_0000, 0xFFFF_FFFF):
        machine.write32(1, offset, value)
        for at in range(0, 0x40, 4):
            assert 0 <= read(machine, at) <= 0xFFFF_FFFF
    machine.map_ram()
    machine.write32(1, Reg.IMR, 0)
    write(machine, Reg.CTL, DeviceCtl.RESET)
    assert nothing_left(machine.counts())


@every_state
def test_version_reads_20_in_any_state(machine: Machine, state: str) -> None:
    STATES[state](machine)
    assert read(machine, Reg.VERSION) == 20


@pytest.mark.parametrize("state", ["fresh", "failed", "after_reset"])
def test_cve_2022_1050_no_command_without_a_shared_region(machine: Machine, state: str) -> None:
    STATES[state](machine)
    assert write(machine, Reg.REQUEST, 0) == errno.ENODEV
    assert machine.take_interrupts() == set()
    assert write(machine, Reg.CTL, DeviceCtl.ACTIVATE) == errno.EINVAL
    assert write(machine, Reg.CTL, DeviceCtl.UNQUIESCE) == errno.EINVAL


def test_no_command_while_its_memory_is_gone(machine: Machine) -> None:
    after_memory_left(machine)
    assert write(machine, Reg.REQUEST, 0) == errno.EFAULT
    machine.map_ram()
    assert write(machine, Reg.REQUEST, 0) == errno.EINVAL  # the slot is all zeros: port 0


@pytest.mark.parametrize("value", [3, 4, 0x7FFF_FFFF, 0xFFFF_FFFF])
@every_state
def test_controls_that_do_not_exist(machine: Machine, state: str, value: int) -> None:
    STATES[state](machine)
    assert write(machine, Reg.CTL, value) == errno.EINVAL


def test_the_mac_is_kept(machine: Machine) -> None:
    write(machine, Reg.MACL, 0x1234_5678)
    write(machine, Reg.MACH, 0x9ABC)
    assert (read(machine, Reg.MACL), read(machine, Reg.MACH)) == (0x1234_5678, 0x9ABC)


def test_write_only_registers_read_as_zero(machine: Machine) -> None:
    active(machine)
    for reg in (Reg.DSRLOW, Reg.DSRHIGH, Reg.CTL, Reg.REQUEST):
        assert read(machine, reg) == 0


def test_reset_reads_as_reset(machine: Machine) -> None:
    after_reset(machine)
    assert [read(machine, reg) for reg in (Reg.ERR, Reg.ICR, Reg.IMR)] == [0, 0, 0]


# --- interrupts ----------------------------------------------------------------------------------------------------


def test_masked_interrupts_wait(machine: Machine) -> None:
    driver = machine.boot()
    driver.write_reg(Reg.IMR, IMR_ALL)
    assert driver.read_reg(Reg.IMR) == IMR_ALL
    request = api.CMD_HDR.pack(api.CmdHdr(0, api.Cmd.QUERY_PORT)) + b"\1"
    with pytest.raises(CommandTimeout):
        driver.post_bytes(request, ack=0x8000_0000)
    assert machine.take_interrupts() == set()
    driver.write_reg(Reg.IMR, 0)
    assert machine.take_interrupts() == {0}
    driver.write_reg(Reg.IMR, 0)
    assert machine.take_interrupts() == set()


def test_icr_is_one_for_a_response_and_read_to_clear(machine: Machine) -> None:
    driver = machine.boot()
    qp = Qp(UserProcess(driver))
    qp.send_cq.arm()
    machine.device.async_event(9, 1)
    driver.read_reg(Reg.ICR)
    qp.query()
    assert driver.read_reg(Reg.ICR) == 1
    assert driver.read_reg(Reg.ICR) == 0


def test_reset_drops_pending_interrupts(machine: Machine) -> None:
    driver = machine.boot()
    driver.write_reg(Reg.IMR, IMR_ALL)
    machine.device.async_event(9, 1)
    machine.device.progress(1)
    driver.write_reg(Reg.CTL, DeviceCtl.RESET)
    driver.write_reg(Reg.IMR, 0)
    assert machine.take_interrupts() == set()


def test_events_without_a_driver_are_dropped(machine: Machine) -> None:
    machine.device.async_event(9, 1)
    machine.device.progress(1)
    driver = machine.boot()
    assert driver.take_events() == []


def test_vectors_the_guest_has_not_enabled(machine: Machine) -> None:
    driver = machine.boot()
    machine.msix_enabled = False
    request = api.CMD_HDR.pack(api.CmdHdr(0, api.Cmd.QUERY_PORT)) + b"\1"
    with pytest.raises(CommandTimeout):
        driver.post_bytes(request, ack=0x8000_0000)


# --- reset ---------------------------------------------------------------------------------------------------------


def test_reset_leaves_nothing(machine: Machine) -> None:
    driver = machine.boot()
    kernel, user = Kernel(driver), UserProcess(driver)
    kernel.add_gid(bytes(range(16)))
    qp = Qp(user)
    user.mr(PAGE)
    backend = machine.device.backend
    assert isinstance(backend, FakeBackend)
    driver.write_reg(Reg.CTL, DeviceCtl.RESET)
    assert nothing_left(machine.counts())
    assert not +backend.alive
    assert backend.resets
    assert not machine.device.waits_for_guest
    qp.ring_send()
    qp.send_cq.poll()
    assert write(machine, Reg.REQUEST, 0) == errno.ENODEV


def test_memory_is_not_written_after_reset(machine: Machine) -> None:
    """The driver frees rings, slots and region right after CTL=RESET."""
    driver = machine.boot()
    qp = Qp(UserProcess(driver))
    driver.write_reg(Reg.CTL, DeviceCtl.RESET)
    before = machine.ram.read(machine.ram.iova, machine.ram.size)
    machine.device.async_event(9, 1)
    qp.ring_send()
    machine.device.progress(1)
    machine.device.look_at_rings()
    driver.write_reg(Reg.REQUEST, 0)
    assert machine.ram.read(machine.ram.iova, machine.ram.size) == before

"""A booted machine over the recording backend, good requests for tests to spoil, and bare registers."""

import errno
from collections.abc import Callable

import pytest
from guest import (
    PAGE,
    CommandFailed,
    Cq,
    Driver,
    Kernel,
    Machine,
    PageDir,
    Qp,
    UserProcess,
)
from unit.fake_backend import FakeBackend, FakeQp

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import Reg
from pvrdma_server.abi.pvrdma_verbs import SrqAttr
from pvrdma_server.caps import DeviceConfig

GID = bytes.fromhex("fe80000000000000020000fffe000001")
OTHER_GID = bytes.fromhex("00000000000000000000ffff0a000001")
NOBODY = 0x7777


class Bed:
    """A booted machine over the recording backend."""

    def __init__(self, version: int = 20, *, roce: int | None = None) -> None:
        self.backend = FakeBackend()
        roce_version = roce or (1 if version == 17 else 2)
        self.machine = Machine(
            self.backend, config=DeviceConfig(roce_version=roce_version, max_uar=8)
        )
        self.driver = self.machine.boot(driver_version=version)
        self.kernel = Kernel(self.driver)
        self.ram = self.machine.ram

    def refused(self, expected: int, act: Callable[[], object]) -> None:
        """`act` fails with `expected` in ERR, without vector 0, and leaves no object behind."""
        before, alive = self.machine.counts(), dict(self.backend.alive)
        self.driver.interrupt()
        self.driver.interrupts.clear()
        with pytest.raises(CommandFailed) as caught:
            act()
        self.driver.interrupt()
        assert errno.errorcode[caught.value.err] == errno.errorcode[expected]
        assert 0 not in self.driver.interrupts
        assert self.machine.counts() == before
        assert +self.backend.alive == {k: v for k, v in alive.items() if v}

    def refuse_bytes(self, expected: int, cmd: int, body: bytes = b"") -> None:
        head = api.CMD_HDR.pack(api.CmdHdr(0, cmd))
        self.refused(expected, lambda: self.driver.post_bytes(head + body, ack=None))


def mr_request(user: UserProcess, **change: int) -> api.CmdCreateMr:
    pages = PageDir.alloc(user.driver.ram, 3)
    start = 0x7F00_0000_0800
    good = api.CmdCreateMr(start, 2 * PAGE, pages.dir_dma, user.pd.handle, 7, 0, 3)
    return good._replace(**change)


def cq_request(bed: Bed, **change: int) -> api.CmdCreateCq:
    pages = PageDir.alloc(bed.ram, 3)
    return api.CmdCreateCq(pages.dir_dma, 0, 128, 3)._replace(**change)


def srq_request(user: UserProcess) -> api.CmdCreateSrq:
    pages = PageDir.alloc(user.driver.ram, 2)
    return api.CmdCreateSrq(pages.dir_dma, user.pd.handle, 2, SrqAttr(16, 4, 0), 0)


def shared_cq(user: UserProcess) -> Cq:
    if not hasattr(user, "shared"):
        user.shared = user.cq()  # type: ignore[attr-defined]
    return user.shared  # type: ignore[attr-defined, no-any-return]


def ready(qp: Qp) -> Qp:
    """RTS, without a peer."""
    qp.to_init()
    qp.to_rtr(dgid=GID)
    qp.to_rts()
    return qp


def backend_of(bed: Bed, qp: Qp) -> FakeQp:
    return bed.backend.qps[qp.qpn]


def read(machine: Machine, reg: int) -> int:
    return machine.read32(api.PciResource.REG, reg)


def write(machine: Machine, reg: int, value: int) -> int:
    """Store, and what ERR reads then."""
    machine.write32(api.PciResource.REG, reg, value)
    return read(machine, Reg.ERR)


def prepared(machine: Machine) -> Driver:
    """A driver that has its memory but has published nothing."""
    driver = Driver(machine, machine.ram)
    driver.dsr_version = 20
    driver._alloc_shared()
    return driver


def publish(driver: Driver) -> int:
    """DSRLOW, DSRHIGH; what ERR reads then."""
    driver.write_reg(Reg.DSRLOW, driver.dsr & 0xFFFF_FFFF)
    driver.write_reg(Reg.DSRHIGH, driver.dsr >> 32)
    return driver.read_reg(Reg.ERR)

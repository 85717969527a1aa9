"""A guest that means harm: whatever it does, nothing is raised, little is logged, and a reset leaves nothing.

The eleven CVEs of QEMU's removed device, and where each is tested:

    2018-20123  this file, test_cve_2018_20123_*
    2018-20124  test_qp_ops.py, test_queues.py
    2018-20125  test_cmd_queues.py
    2018-20126  test_cmd_handles.py
    2018-20191  test_regions.py
    2018-20216  test_rings.py, test_queues.py
    2021-3582   test_commands.py
    2021-3607   test_shared_region.py (with 2023-1544)
    2021-3608   test_shared_region.py
    2022-1050   test_device.py
    2023-1544   test_shared_region.py
"""

import errno
from collections.abc import Callable

import pytest
import structlog
from guest import (
    Machine,
    Qp,
    World,
)
from unit.bed import GID, Bed
from unit.fake_backend import FakeBackend

from pvrdma_server.abi.pvrdma_dev_api import DeviceCtl, Reg
from pvrdma_server.journal import MAX_GUEST_WARNINGS

# --- the log -------------------------------------------------------------------------------------------------------


def illegal_acts(bed: Bed) -> list[Callable[[int], None]]:
    """Cheap ways to err, each with a number that makes it look new."""
    device = bed.machine.device
    return [
        lambda n: device.doorbell(1, 0, n & 0xFFFFFF),
        lambda n: device.doorbell(n & 7, 4, 0xC000_0000 | n),
        lambda n: device.doorbell(1, 8 + (n & 0xFF0), n),
        lambda n: device.write_register(Reg.CTL, 3 + n),
        lambda n: device.write_register(0x100 + 4 * n, n),
        lambda n: device.write_register(Reg.REQUEST, 1 + n),
        lambda n: bed.machine.regions.bar_write(1, n, b"abc"),
        lambda n: device.dma_map(bed.ram.iova, n, None, writable=True),
    ]


def test_a_flood_of_errors_is_a_trickle_in_the_log(bed: Bed) -> None:
    acts = illegal_acts(bed)
    before = bed.machine.errors()
    with structlog.testing.capture_logs() as log:
        for number in range(100_000 // len(acts)):
            for act in acts:
                act(number)
    assert bed.machine.errors() == before + 100_000
    assert 1 <= len(log) <= MAX_GUEST_WARNINGS
    assert all(entry["log_level"] == "warning" for entry in log)


def test_a_flood_of_resets_is_a_trickle_in_the_log(bed: Bed) -> None:
    """Publishing and resetting without end is no error, but it must not fill a disk either."""
    driver = bed.driver
    with structlog.testing.capture_logs() as log:
        for _ in range(5_000):
            driver.write_reg(Reg.DSRHIGH, driver.dsr >> 32)
            driver.write_reg(Reg.CTL, DeviceCtl.ACTIVATE)
            driver.write_reg(Reg.CTL, DeviceCtl.RESET)
    assert len(log) <= MAX_GUEST_WARNINGS


def test_what_is_logged_once_names_the_object_and_the_error(bed: Bed) -> None:
    with structlog.testing.capture_logs() as log:
        for _ in range(3):
            bed.machine.device.doorbell(3, 0, 0x1234)
    (entry,) = log
    assert (entry["event"], entry["what"], entry["kind"]) == (
        "guest_error",
        "doorbell",
        "bad_handle",
    )
    assert "0x1234" in entry["error"]


# --- a bad backend -------------------------------------------------------------------------------------------------


def test_cve_2018_20123_a_device_without_a_backend_starts_nothing() -> None:
    class Broken(FakeBackend):
        def attach(self, memory: object) -> None:
            raise OSError(errno.ENODEV, "no such device")

    for _ in range(100):
        machines = World()
        with pytest.raises(OSError, match="no such device"):
            Machine(Broken(), world=machines)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EIO])
def test_a_backend_that_cannot_stop_a_queue_pair(bed: Bed, qp: Qp, number: int) -> None:
    """Found while a full CQ stops its queue pairs: there is no command that could carry the error."""
    other = Qp(qp.ctx, send_cq=qp.ctx.cq(1))
    other.to_init()
    other.to_rtr(dgid=GID)
    other.to_rts()
    other.send()
    bed.backend.fail_next["modify_qp"] = number
    other.send()
    assert other.query().qp_state == 6
    other.destroy()

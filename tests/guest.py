"""The driver side: all a test needs to be a guest.

    machine = Machine(backend)
    driver = machine.boot()
    process = UserProcess(driver)
    mr = process.mr(8192)
    qp = Qp(process)
    qp.send(mr.sge(0, 100), wr_id=1)
    assert qp.send_cq.wait_one().status == WcStatus.SUCCESS

`guest_ram` is memory, page directories and ring arithmetic; `guest_driver` probe, commands and interrupts;
`guest_verbs` PDs, regions and CQs; `guest_qp` and `guest_srq` queues; `guest_machine` a device in this process. Any
other `Bus` (tests/vfu_client.py's, over a socket) carries the same driver.
"""

from guest_driver import Bus, CommandFailed, CommandTimeout, Driver, Nothing, ProbeError
from guest_machine import Clock, Machine, World, nothing_left
from guest_qp import (
    NO_ATTR,
    RC_INIT,
    RC_RTR,
    RC_RTS,
    SIGNALED,
    UD_INIT,
    UD_RTR,
    UD_RTS,
    Qp,
    connect,
    create_qp,
)
from guest_ram import INVALID_IDX, PAGE, GuestRam, PageDir, RingWords, idx_inc, idx_valid
from guest_srq import Ah, QueueFull, Srq
from guest_verbs import ALL_ACCESS, Buffer, Context, Cq, Frmr, Kernel, Mr, Pd, Remote, UserProcess

__all__ = [
    "ALL_ACCESS",
    "INVALID_IDX",
    "NO_ATTR",
    "PAGE",
    "RC_INIT",
    "RC_RTR",
    "RC_RTS",
    "SIGNALED",
    "UD_INIT",
    "UD_RTR",
    "UD_RTS",
    "Ah",
    "Buffer",
    "Bus",
    "Clock",
    "CommandFailed",
    "CommandTimeout",
    "Context",
    "Cq",
    "Driver",
    "Frmr",
    "GuestRam",
    "Kernel",
    "Machine",
    "Mr",
    "Nothing",
    "PageDir",
    "Pd",
    "ProbeError",
    "Qp",
    "QueueFull",
    "Remote",
    "RingWords",
    "Srq",
    "UserProcess",
    "World",
    "connect",
    "create_qp",
    "idx_inc",
    "idx_valid",
    "nothing_left",
]

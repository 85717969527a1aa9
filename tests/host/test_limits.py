"""What a host may lack: each ends in an error that names what to change, and the server goes on."""

import errno
import gc
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from guest import CommandFailed, GuestRam, Kernel, Machine, Qp, UserProcess, connect
from host_peer import v4_gid
from host_server import HostServer

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus
from pvrdma_server.backend_ibv import IbvBackend, IbvConfig
from pvrdma_server.gid_sync import GidSync, Policy

pytestmark = pytest.mark.host
OK = int(WcStatus.SUCCESS)
WAIT_S = 30.0
NOBODY = 65534
_DEVICE_FATAL = 8  # enum ibv_event_type
PINNED_BYTES = 256 << 10
AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "prlimit", f"--memlock={PINNED_BYTES}:{PINNED_BYTES}",
)  # fmt: skip


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that nobody may write to."""
    folder = Path(tempfile.mkdtemp(prefix="pvrdma-"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def test_memory_that_may_not_be_pinned(open_folder: Path) -> None:
    """RLIMIT_MEMLOCK holds for a server without CAP_IPC_LOCK only, so it runs as nobody."""
    server = HostServer(open_folder, "rxe0", "10.9.0.1", policy="check", under=AS_NOBODY)
    server.start()
    bus = server.connect()
    process = UserProcess(bus.boot())
    small = process.mr(8192)
    with pytest.raises(CommandFailed) as caught:
        process.mr(4 * PINNED_BYTES)
    assert caught.value.err == errno.ENOMEM
    (told,) = server.events("host_verb_failed")
    assert f"RLIMIT_MEMLOCK {PINNED_BYTES} bytes" in told["error"]
    assert "LimitMEMLOCK=infinity" in told["error"]
    assert small.length == process.mr(8192).length, "what fits is still registered"
    bus.close()
    assert server.end() == 0, server.log.read_text()


@pytest.fixture
def passing_device() -> Iterator[str]:
    """A third rxe device, which a test may take away."""

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True)

    ip("link add d9 mtu 4200 type dummy")
    try:
        ip("address add 10.9.9.1/24 dev d9")
        ip("link set d9 up")
        subprocess.run(["rdma", "link", "add", "rxe9", "type", "rxe", "netdev", "d9"], check=True)
        yield "rxe9"
    finally:
        with suppress(subprocess.CalledProcessError):
            subprocess.run(
                ["rdma", "link", "delete", "rxe9"], check=True, stderr=subprocess.DEVNULL
            )
        ip("link delete d9")


def test_rxe_that_is_taken_away_waits_for_the_server(passing_device: str, tmp_path: Path) -> None:
    """The kernel lets go of an rxe only when nobody has it open; until then the guest works on."""
    server = HostServer(tmp_path, passing_device, "10.9.9.1", policy="check")
    server.start()
    removal: subprocess.Popen[bytes] | None = None
    try:
        bus = server.connect()
        kernel = Kernel(bus.boot())
        kernel.add_gid(server.gid)
        process = UserProcess(kernel.driver)
        a, b = Qp(process), Qp(process)
        connect(a, b, server.gid, server.gid)
        memory = process.mr(8192)
        removal = subprocess.Popen(["rdma", "link", "delete", passing_device])
        for number in range(20):
            a.write(memory.sge(0, 4096), to=memory.remote(4096), wr_id=number)
            assert a.send_cq.wait_one().status == OK
        assert removal.poll() is None
        bus.close()
    finally:
        # Whatever went wrong: a server that stays would hold the device, and what takes it away, for ever.
        status = server.end()
    assert status == 0, server.log.read_text()
    assert removal.wait(WAIT_S) == 0


class FailingDevice:
    """A guest on rxe0 in this process, whose events of the device come out of a pipe.

    rxe never fails, so the test says what an HCA's kernel says: the descriptor of asynchronous events is replaced.
    """

    def __init__(self) -> None:
        before = event_fds()
        keeper = GidSync(Policy.CHECK, None, None)
        self.backend = IbvBackend(IbvConfig("rxe0", 1, bytes(8)), keeper)
        (self._fd,) = event_fds() - before
        self.machine = Machine(self.backend, ram=GuestRam(memfd=True))
        self.backend.on_event = self.machine.device.async_event
        self._say = -1

    def take_over(self) -> None:
        """From now on events come from here. The verbs pass the descriptor on, so no object can be made any more."""
        events, self._say = os.pipe2(os.O_NONBLOCK)
        os.dup2(events, self._fd)
        os.close(events)
        with select.epoll.fromfd(os.dup(self.backend.wait_fd)) as watched:
            watched.register(self._fd, select.EPOLLIN)

    def say(self, kind: int) -> None:
        """Source: rdma/ib_user_verbs.h, struct ib_uverbs_async_event_desc: element, event_type, reserved."""
        os.write(self._say, struct.pack("=QII", 0, kind, 0))

    def unplug(self) -> None:
        """The other end is gone: the descriptor has EPOLLHUP."""
        os.close(self._say)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._say)
        self.machine.device.reset("the test ends")
        self.backend.close()
        self.machine.ram.close()
        gc.collect()


def event_fds() -> set[int]:
    """This process's descriptors of asynchronous events."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "[infinibandevent]" in os.readlink(f"/proc/self/fd/{entry}"):
                found.add(int(entry))
    return found


@pytest.mark.parametrize("how", ["event", "hang-up"])
def test_device_that_fails(how: str) -> None:
    device = FailingDevice()
    machine, gid = device.machine, v4_gid("10.9.0.1")
    kernel = Kernel(machine.boot())
    kernel.add_gid(gid)
    process = UserProcess(kernel.driver)
    a, b = Qp(process), Qp(process)
    connect(a, b, gid, gid)
    memory = process.mr(8192)
    b.post_recv(memory.sge(), wr_id=77)
    a.write(memory.sge(0, 4096), to=memory.remote(4096), wr_id=1)
    deadline = time.monotonic() + WAIT_S
    while not (done := a.send_cq.poll()):
        assert time.monotonic() < deadline
        machine.device.progress(1 << 20)
    assert [(wc.status, wc.wr_id) for wc in done] == [(OK, 1)]
    kernel.driver.take_events()
    device.take_over()
    if how == "event":
        device.say(_DEVICE_FATAL)
    else:
        device.unplug()
    assert not machine.device.progress(1 << 20)
    assert [event.type for event in kernel.driver.take_events()] == [EqeType.DEVICE_FATAL]
    assert [(wc.status, wc.wr_id) for wc in b.recv_cq.poll()] == [(WcStatus.WR_FLUSH_ERR, 77)]
    a.write(memory.sge(0, 4096), to=memory.remote(4096), wr_id=2)
    assert [(wc.status, wc.wr_id) for wc in a.send_cq.poll()] == [(WcStatus.WR_FLUSH_ERR, 2)]
    for qp in (a, b):
        qp.destroy()
    device.close()

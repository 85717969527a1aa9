"""What a host may lack: each ends in an error that names what to change, and the server goes on."""

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from guest import CommandFailed, Kernel, Qp, UserProcess, connect
from host_server import HostServer

from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus

pytestmark = pytest.mark.host
OK = int(WcStatus.SUCCESS)
WAIT_S = 30.0
NOBODY = 65534
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

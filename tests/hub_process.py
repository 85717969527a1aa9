"""A MAD hub as a process in the rxe host, and who has the CM class of which device there."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pvrdma_server.errors import ConfigError
from pvrdma_server.status import read_status

START_S = 120.0
_RUN = "from pvrdma_server.mad_hub.cli import main; main()"


class HubProcess:
    """One hub in `folder`, of a device, or of none."""

    def __init__(self, folder: Path, device: str | None = "rxe0") -> None:
        self.device = device
        self.socket = str(folder / "hub.sock")
        self.old_mux = str(folder / "mux.sock")
        self.log = folder / "hub.log"
        self._status = str(folder / "hub.status")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, umad: str = "ready") -> None:
        """Start it and wait until it serves, and its status says this of umad."""
        argv = [
            sys.executable, "-c", _RUN, "--socket", self.socket, "--status-socket", self._status,
            "--old-mux-socket", self.old_mux,
        ]  # fmt: skip
        argv += [] if self.device is None else ["--ibdev", self.device]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        self.wait_for("umad", lambda status: umad in status["umad"], START_S)

    def end(self, *, kill: bool = False) -> int:
        """SIGTERM or SIGKILL; the process's status."""
        assert self._process is not None
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        return self._process.wait(30)

    def status(self) -> dict[str, Any]:
        return read_status(self._status)

    def client(self, name: str) -> dict[str, Any]:
        """What the status says of the client whose name ends so."""
        (found,) = (c for c in self.status()["clients"] if c["name"].endswith(name))
        entry: dict[str, Any] = found
        return entry

    def wait_for(self, what: str, condition: Any, timeout_s: float = 30.0) -> dict[str, Any]:
        """The first status that fulfils a condition."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        now: dict[str, Any] = {}
        while True:
            try:
                if condition(now := self.status()):
                    return now
            except (ConfigError, KeyError, ValueError):
                pass  # it does not serve yet
            assert self._process.poll() is None, f"the hub has ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"hub: not {what}: {now}\n{self.log.read_text()}"
            time.sleep(0.05)


def kernel_has_cm(device: str) -> bool:
    """Whether the kernel's ib_cm serves the device's port: its counters are there then."""
    return Path(f"/sys/class/infiniband/{device}/ports/1/cm_rx_msgs").exists()


def unload_cm() -> None:
    subprocess.run(["modprobe", "-r", "rdma_ucm", "rdma_cm", "ib_cm"], check=True)


def load_cm() -> None:
    subprocess.run(["modprobe", "rdma_ucm"], check=True)


@contextmanager
def hub_before_cm(folder: Path) -> Iterator[HubProcess]:
    """A hub, which has the CM class of rxe0; ib_cm, loaded after it, has rxe1's."""
    if kernel_has_cm("rxe0"):
        unload_cm()
    made = HubProcess(folder)
    try:
        made.start()
        load_cm()
        assert not kernel_has_cm("rxe0")
        assert kernel_has_cm("rxe1")
        yield made
    finally:
        status = made.end()
    assert status == 0, made.log.read_text()


def cm_ids(device: str, netns: str = "peer") -> list[dict[str, Any]]:
    """The connection manager's objects of a device, listeners too, as `rdma resource` tells them."""
    argv = [
        "ip",
        "netns",
        "exec",
        netns,
        "rdma",
        "-j",
        "resource",
        "show",
        "cm_id",
        "link",
        device,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    return found

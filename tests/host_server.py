"""A server process on one of the rxe host's devices, for tests that run inside it (scripts/test host and nested)."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guest_ram import GuestRam
from host_peer import v4_gid
from vfu_bus import VfuBus

from pvrdma_server.status import read_status

START_S = 120.0


class HostServer:
    """A server process on one host device. `under` is a command that runs the server as its own words say."""

    def __init__(
        self,
        folder: Path,
        device: str,
        address: str,
        *,
        netns: str | None = None,
        policy: str = "add",
        more: Sequence[str] = (),
        under: Sequence[str] = (),
    ) -> None:
        self.gid = v4_gid(address)
        self.address = address
        self.device = device
        self.folder = folder
        self.netns = netns
        self.policy = policy
        self.more = more
        self.under = under
        self.socket = str(folder / "vfio.sock")
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it says that it is ready: its sockets all answer then."""
        argv = [] if self.netns is None else ["ip", "netns", "exec", self.netns]
        argv += [
            *self.under, sys.executable, "-m", "pvrdma_server", "--socket-path", self.socket, "--backend", "ibv",
            "--ibdev", self.device, "--gid-policy", self.policy, "--state-dir", str(self.folder),
            "--status-socket", str(self.folder / "status.sock"), *self.more,
        ]  # fmt: skip
        Path(self.socket).unlink(missing_ok=True)
        lives = len(self.events("ready")) if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while len(self.events("ready")) == lives:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server does not come up:\n{self.log.read_text()}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, *, kill: bool = False) -> int:
        """SIGTERM or SIGKILL; the process's status."""
        assert self._process is not None
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        return self._process.wait(30)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = read_status(str(self.folder / "status.sock"))
        return status

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's records of one event."""
        records = (
            json.loads(line)
            for line in self.log.read_text().splitlines()
            if line.startswith("{") and line.endswith("}")
        )
        return [record for record in records if record.get("event") == name]

    def connect(self) -> VfuBus:
        return VfuBus(self.socket, GuestRam(32 << 20, memfd=True))

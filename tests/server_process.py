"""A server with the embedded backend as a process of its own, to be killed, stopped and started again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pvrdma_server.status import read_status

ROOT = Path(__file__).parents[1]
_START_S = 60.0
# Looks at something that comes by itself, in seconds.
_LOOK_S = 0.01


class ServerProcess:
    """One server in `folder`, in the fabric `folder/fabric`; `words` are more arguments for it."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.folder, self.name, self._words = folder, name, words
        self.socket = str(folder / f"{name}.sock")
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        Path(self.socket).unlink(missing_ok=True)
        before = len(self.events("ready"))
        argv = [
            sys.executable, "-m", "pvrdma_server", "--socket-path", self.socket, "--name", self.name,
            "--fabric", str(self.folder / "fabric"), "--status-socket", str(self.folder / self.name),
            *self._words,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        # Its socket is there a moment before it listens.
        while len(self.events("ready")) == before:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(_LOOK_S)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, *, kill: bool = False) -> int | None:
        """SIGKILL or SIGTERM; the status. Nothing when it has ended."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        process.kill() if kill else process.terminate()
        process.send_signal(signal.SIGCONT)
        return process.wait(30)

    def status(self) -> dict[str, Any]:
        return read_status(str(self.folder / self.name))

    def wait_for(self, what: str, condition: Any, timeout_s: float = 20.0) -> dict[str, Any]:
        """The first status that fulfils a condition."""
        deadline = time.monotonic() + timeout_s
        while not condition(now := self.status()):
            assert time.monotonic() < deadline, f"{self.name}: not {what}: {now}"
            time.sleep(_LOOK_S)
        return now

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's records of one event."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        records = (json.loads(line) for line in lines if line.startswith("{"))
        return [record for record in records if record.get("event") == name]

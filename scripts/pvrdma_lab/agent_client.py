"""The host's end of the guest agent: runs a shell command in a guest over one TCP connection.

The protocol stands in scripts/guest/agent.py. Closing the connection kills the command.
"""

import base64
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

# The agent ends a command at its time limit; this much later we stop waiting for the agent.
AGENT_GRACE_S = 10.0
TIMEOUT_STATUS = 124  # as timeout(1)


class AgentError(Exception):
    """The guest's agent does not answer, or the connection broke."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished command.

    Attributes:
        command: what ran.
        status: exit status; 128 + N if signal N ended it; 124 if its time was up.
        stdout: standard output, undecodable bytes replaced.
        stderr: standard error, likewise.
        seconds: wall-clock seconds.
    """

    command: str
    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == 0


Sink = Callable[[bytes], object]


class Running:
    """A command running in a guest; use it as a context manager, or call kill() or wait()."""

    def __init__(
        self, port: int, command: str, timeout_s: float | None, stdin: bytes | None
    ) -> None:
        self.command = command
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._out = bytearray()
        self._err = bytearray()
        self._status: int | None = None
        self._broken: str | None = None
        self._sinks: dict[bytes, Sink] = {}
        request = {
            "command": command,
            "timeout_s": timeout_s,
            "stdin": None if stdin is None else base64.b64encode(stdin).decode(),
            "line_buffered": True,
        }
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            self._socket.settimeout(None)
        except OSError as error:
            raise AgentError(f"guest agent on port {port}: {error}") from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def stdout(self) -> str:
        """What the command has written to its standard output so far."""
        with self._changed:
            return self._out.decode(errors="replace")

    @property
    def stderr(self) -> str:
        with self._changed:
            return self._err.decode(errors="replace")

    def poll(self) -> int | None:
        """Returns the exit status, None while it runs.

        Raises:
            AgentError: the connection broke.
        """
        with self._changed:
            return self._poll()

    def _poll(self) -> int | None:
        if self._status is None and self._broken:
            raise AgentError(f"{self.command}: {self._broken}")
        return self._status

    def wait(self, timeout_s: float | None = None) -> Result:
        """Waits for the command's end.

        Raises:
            AgentError: the connection broke.
            TimeoutError: it still runs after `timeout_s` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._poll() is not None, timeout_s):
                raise TimeoutError(f"still running after {timeout_s} s: {self.command}")
            assert self._status is not None
            out, err = self._out.decode(errors="replace"), self._err.decode(errors="replace")
            return Result(self.command, self._status, out, err, time.monotonic() - self._started)

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        """Waits until the command has printed (on either output) what the regular expression finds.

        Raises:
            AgentError: the connection broke.
            TimeoutError: it did not in time, or the command ended without.
        """
        found: re.Match[str] | None = None

        def seen() -> bool:
            nonlocal found
            text = (self._out + b"\n" + self._err).decode(errors="replace")
            found = re.search(pattern, text, re.M)
            return found is not None or self._poll() is not None

        with self._changed:
            self._changed.wait_for(seen, timeout_s)
            if found is None:
                state = "still runs" if self._status is None else f"ended with {self._status}"
                text = (self._out + self._err).decode(errors="replace")[-2000:]
                raise TimeoutError(
                    f"no {pattern!r} in {timeout_s} s; {self.command} {state}:\n{text}"
                )
            return found

    def stream(self, stdout: Sink, stderr: Sink) -> None:
        """Hands output on as it comes; what came before is handed on first."""
        with self._changed:
            self._sinks = {b"o": stdout, b"e": stderr}
            stdout(bytes(self._out))
            stderr(bytes(self._err))

    def kill(self) -> None:
        """Kills the command's process group in the guest, if it still runs."""
        # shutdown, not close: the reader thread sits in recv on this descriptor.
        with suppress(OSError):  # already disconnected
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        broken = "the guest's agent closed the connection"
        try:
            with self._socket.makefile("rb") as file:
                while header := file.read(5):
                    self._take(header[:1], file.read(int.from_bytes(header[1:], "big")))
        except OSError as error:
            broken = str(error)
        with self._changed:
            self._broken = broken
            self._changed.notify_all()

    def _take(self, kind: bytes, data: bytes) -> None:
        with self._changed:
            if kind == b"x":
                end = json.loads(data)
                status = end["status"]
                self._status = (
                    TIMEOUT_STATUS if end["timed_out"] else status if status >= 0 else 128 - status
                )
            else:
                (self._out if kind == b"o" else self._err).extend(data)
                if kind in self._sinks:
                    self._sinks[kind](data)
            self._changed.notify_all()


def run(port: int, command: str, timeout_s: float, stdin: bytes | None = None) -> Result:
    """Runs a command in a guest to its end; at `timeout_s` seconds it is killed and has status 124.

    Raises:
        AgentError: the agent does not answer.
    """
    with Running(port, command, timeout_s, stdin) as running:
        try:
            return running.wait(timeout_s + AGENT_GRACE_S)
        except TimeoutError as error:
            raise AgentError(f"the agent is silent: {error}") from error


def answers(port: int, timeout_s: float) -> bool:
    """Tells whether the agent runs a command within the time."""
    try:
        with Running(port, "true", timeout_s, None) as running:
            return running.wait(timeout_s).ok
    except (AgentError, TimeoutError):
        return False

"""Processes that outlive the command that started them, found again by pid and start time.

A pid alone may belong to a stranger by the time we look; with its start time (and the machine's boot) it cannot.
"""

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


def _start_time(pid: int) -> str | None:
    """Returns a process's start time in clock ticks since boot, with the boot's id; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the name, may hold blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{boot}-{fields[19]}"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of ours.

    Attributes:
        pid: its pid.
        started: boot and start time, which tell it from a later process with the same pid.
    """

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.started

    def kill(self, sign: signal.Signals = signal.SIGKILL, timeout_s: float = 10.0) -> bool:
        """Signals the process and waits for its end; does nothing to a stranger.

        Returns:
            True if it is gone.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # Checked after the pidfd exists: from here on the fd cannot come to mean another process.
            if not self.alive:
                return True
            signal.pidfd_send_signal(fd, sign)
            ready, _, _ = select.select([fd], [], [], timeout_s)
            self._reap()
            return bool(ready)
        except ProcessLookupError:
            return True
        finally:
            os.close(fd)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Asks with SIGTERM, then takes SIGKILL."""
        if not self.kill(signal.SIGTERM, timeout_s):
            self.kill()

    def _reap(self) -> None:
        # Only if this very process is its parent, as in a test that holds a lab.
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return


def spawn(
    argv: Sequence[str],
    *,
    stdout: Path,
    stderr: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Process:
    """Starts a process in a session of its own, its outputs appended to files."""
    with stdout.open("ab") as out, stderr.open("ab") as err:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            env=None if env is None else {**os.environ, **env}, cwd=cwd,
        )  # fmt: skip
    started = _start_time(child.pid) or "gone"
    # We reap it ourselves if we are still there; Popen would warn of a child still running.
    child.returncode = 0
    return Process(child.pid, started)

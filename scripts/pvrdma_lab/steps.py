"""What every set-up step shares: a log, a lock, progress lines, and building beside the final name.

A step is found (its artefact exists under its key) or built. Building happens in a hidden sibling folder that is
renamed into place, so an interrupted run leaves nothing that looks finished, and the whole cache may be deleted.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from pvrdma_lab import paths

HEARTBEAT_S = 10.0
# For mmdebstrap to unmount what it mounted, once interrupted.
ENDING_S = 20.0


class StepError(Exception):
    """A step that failed: what failed, and what to do about it."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice


# A command whose whole process group is ended when its parent dies.
_GROUP = (
    "setpriv", "--pdeathsig", "TERM", "--",
    "sh", "-c", 'trap "trap - TERM; kill -TERM 0" TERM; "$@" & wait $!', "sh",
)  # fmt: skip


class StepLog:
    """A step's log file, and the way to run commands into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("wb", buffering=0)

    def close(self) -> None:
        self._file.close()

    def say(self, text: str) -> None:
        self._file.write(f"{text}\n".encode())

    def last_line(self) -> str:
        """Returns the last line written, to show what a long step is busy with."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - 2000))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:100]

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        advice: str = "",
    ) -> None:
        """Runs a command into the log.

        Raises:
            StepError: the command is missing or its status is not 0.
        """
        command = [str(word) for word in argv]
        self.say(f"$ {' '.join(command)}")
        if shutil.which(command[0]) is None:
            raise StepError(f"cannot run {command[0]}: there is no such program", advice)
        status = self._run_group(command, env, cwd)
        if status:
            raise StepError(f"{Path(command[0]).name} ended with status {status}", advice)

    def _run_group(
        self, command: list[str], env: Mapping[str, str] | None, cwd: Path | None
    ) -> int:
        """Runs a command in a process group that ends with us, however we end: mmdebstrap has many children.

        An exception may come before Popen has returned, when nobody knows whom to end; then, as after a SIGKILL,
        the death of this process ends the group by the shell's trap.
        """
        environment = None if env is None else {**os.environ, **env}
        with subprocess.Popen(
            [*_GROUP, *command], start_new_session=True, env=environment, cwd=cwd,
            stdin=subprocess.DEVNULL, stdout=self._file, stderr=self._file,
        ) as child:  # fmt: skip
            try:
                return child.wait()
            except BaseException:
                os.killpg(child.pid, signal.SIGTERM)
                try:
                    child.wait(ENDING_S)
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
                raise

    def output(self, argv: Sequence[str | Path]) -> str:
        """Runs a command, its standard error into the log; returns its standard output."""
        command = [str(word) for word in argv]
        self.say(f"$ {' '.join(command)}")
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._file,
            check=False,
        )
        if done.returncode:
            raise StepError(f"{Path(command[0]).name} ended with status {done.returncode}")
        return done.stdout.decode()


class Step(Protocol):
    """One step of the set-up."""

    name: str
    title: str

    def find(self) -> Path | None:
        """Returns the finished artefact, or None if it has to be built."""

    def build(self, log: StepLog) -> None:
        """Makes what find() looks for."""


def remove_tree(path: Path) -> None:
    """Removes a tree, first whatever an interrupted chroot left mounted in it."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    inside = [fields[4] for line in mounts if (fields := line.split())[4].startswith(f"{path}/")]
    for mount in sorted(inside, reverse=True):
        subprocess.run(["umount", "-l", mount], check=True)
    shutil.rmtree(path)


@contextmanager
def built_beside(target: Path) -> Iterator[Path]:
    """Gives an empty folder beside `target` and renames it there when the block succeeds.

    The caller holds the step's lock, so other temporary siblings are what a killed run left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{target.name}.tmp-*"):
        remove_tree(stale)
    beside = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    beside.mkdir()
    try:
        yield beside
        beside.rename(target)
    except BaseException:
        remove_tree(beside)
        raise


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds a named lock of the cache; says so if another run has it."""
    path = paths.cache_folder() / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"    {name}: another run is at it; waiting for its lock {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    # Standard output belongs to results (--print-env).
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _heartbeat(step: Step, log: StepLog, started: float) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            _say(f"    {step.name}: {time.monotonic() - started:.0f} s: {log.last_line()}")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_step(step: Step, position: str) -> None:
    """Finds or builds one step's artefact, with progress lines.

    Raises:
        StepError: it failed; the message names the log.
    """
    started = time.monotonic()
    found = step.find()
    if found is not None:
        _say(f"{position} {step.name}: found in {time.monotonic() - started:.1f} s: {found}")
        return None
    with locked(step.name):
        if step.find() is not None:
            return run_step(step, position)
        _say(f"{position} {step.name}: {step.title} ...")
        log = StepLog(paths.log_folder() / f"{step.name}.log")
        try:
            with _heartbeat(step, log, started):
                step.build(log)
        except StepError as error:
            advice = error.advice or f"read the log, then: scripts/bootstrap --only {step.name}"
            tail = "\n".join(log.path.read_text(errors="replace").splitlines()[-15:])
            message = f"{tail}\nbootstrap: step {step.name} failed: {error.what} (log: {log.path}); {advice}"
            raise StepError(message) from error
        finally:
            log.close()
    _say(f"{position} {step.name}: done in {time.monotonic() - started:.1f} s")
    return None

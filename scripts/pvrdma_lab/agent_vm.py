"""A virtual machine of ours that is reached through the lab's agent only: no device, no network but the agent's.

It runs under TCG, so nothing of it depends on the machine's own kernel. Its disk forgets everything when it ends.
"""

import dataclasses
import json
import shlex
import time
from pathlib import Path

from pvrdma_lab import agent_client, paths
from pvrdma_lab.agent_client import AgentError, Result, Running
from pvrdma_lab.guest import READY, free_port
from pvrdma_lab.process import Process, spawn
from pvrdma_lab.qemu_tree import find_qemu
from pvrdma_lab.state import LabError

BOOT_TIMEOUT_S = 180.0


@dataclasses.dataclass(frozen=True, slots=True)
class BootFiles:
    """What it takes to boot one."""

    kernel: Path
    initrd: Path
    image: Path


class AgentVm:
    """One such machine; `name` is unique, and a machine that runs is found again by it."""

    def __init__(self, name: str, memory_mib: int, kernel_args: tuple[str, ...]) -> None:
        self.name = name
        self.folder = paths.run_folder() / name
        self.port = 0
        self._memory_mib = memory_mib
        self._kernel_args = kernel_args
        self._process: Process | None = None
        self._load()

    # -- life --

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    def boot(self, files: BootFiles) -> float:
        """Starts it and waits for its agent. Returns the seconds that took.

        Raises:
            LabError: it did not come up; with the end of its console.
        """
        started = time.monotonic()
        self._start(files)
        self._wait_ready(started + BOOT_TIMEOUT_S)
        return time.monotonic() - started

    def down(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.stop()
        self._state.unlink(missing_ok=True)

    # -- commands --

    def run(self, command: str, timeout_s: float = 60.0, stdin: bytes | None = None) -> Result:
        """Runs a shell command and waits for it; at the time limit it is killed and has status 124."""
        try:
            return agent_client.run(self.port, command, timeout_s, stdin)
        except AgentError as error:
            raise self.error(str(error)) from error

    def check(self, command: str, timeout_s: float = 60.0, stdin: bytes | None = None) -> str:
        """Runs a command that must succeed; returns its standard output.

        Raises:
            LabError: its status is not 0; with its output.
        """
        result = self.run(command, timeout_s, stdin)
        if not result.ok:
            raise LabError(
                f"{self.name}: status {result.status} after {result.seconds:.1f} s: {command}\n"
                f"{result.stdout[-4000:]}{result.stderr[-4000:]}"
            )
        return result.stdout

    def popen(self, command: str, timeout_s: float | None = None) -> Running:
        """Starts a command and returns at once; leaving the `with` block ends it."""
        try:
            return Running(self.port, command, timeout_s, None)
        except AgentError as error:
            raise self.error(str(error)) from error

    # -- inside --

    def console(self) -> str:
        try:
            return (self.folder / "console.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def error(self, what: str) -> LabError:
        """Returns an error that carries the end of the console."""
        tail = "\n".join(self.console().splitlines()[-30:])
        console = self.folder / "console.log"
        return LabError(f"{self.name}: {what}\n--- console: {console}\n{tail}")

    @property
    def _state(self) -> Path:
        return self.folder / "host.json"

    def _start(self, files: BootFiles) -> None:
        qemu = find_qemu()
        if qemu is None:
            raise LabError("QEMU is not built: run scripts/bootstrap")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "console.log").unlink(missing_ok=True)
        self.port = free_port()
        words = ["console=ttyS0", "quiet", "panic=0", "mitigations=off", "random.trust_cpu=on"]
        argv = [
            *qemu.argv, "-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg,thread=multi",
            "-cpu", "max", "-smp", "2", "-m", str(self._memory_mib), "-machine", "q35",
            "-name", f"{self.name},debug-threads=on",
            "-kernel", str(files.kernel), "-initrd", str(files.initrd),
            "-append", " ".join([*words, f"lab.name={self.name}", *self._kernel_args]),
            "-chardev", f"file,id=console,path={self.folder / 'console.log'}", "-serial", "chardev:console",
            "-drive", f"if=none,id=root,file={files.image},format=raw,snapshot=on,file.locking=off",
            "-device", "virtio-blk-pci,drive=root",
            "-netdev", f"user,id=manage,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-10.0.2.15:7077",
            "-device", "virtio-net-pci,netdev=manage,romfile=",
        ]  # fmt: skip
        log = self.folder / "qemu.log"
        log.write_text(f"$ {shlex.join(argv)}\n")
        self._process = spawn(argv, stdout=log, stderr=log, env=qemu.environment)
        state = {"port": self.port, "process": dataclasses.asdict(self._process)}
        self._state.write_text(json.dumps(state))

    def _load(self) -> None:
        try:
            state = json.loads(self._state.read_text())
        except (FileNotFoundError, ValueError):
            return
        self.port, self._process = state["port"], Process(**state["process"])

    def _wait_ready(self, deadline: float) -> None:
        while READY not in self.console():
            if not self.alive:
                raise self.error(f"QEMU ended: {(self.folder / 'qemu.log').read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise self.error("it did not come up in time")
            time.sleep(0.1)
        while not agent_client.answers(self.port, 5.0):
            if time.monotonic() > deadline:
                raise self.error("its agent does not answer")

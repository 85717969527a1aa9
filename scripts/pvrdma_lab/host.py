"""The rxe host: one virtual machine that plays an RDMA host, with this clone's files copied in.

It runs under TCG, so nothing of it depends on the machine's own kernel. Commands go through the same agent that lab
guests have. `sync` copies the clone; `scripts/host/setup` in it makes the rxe devices.
"""

import dataclasses
import io
import json
import shlex
import tarfile
import time

from pvrdma_lab import agent_client, paths
from pvrdma_lab.agent_client import AgentError, Result, Running
from pvrdma_lab.guest import READY, free_port
from pvrdma_lab.host_image import find_extension, find_host
from pvrdma_lab.nested_image import find_nested
from pvrdma_lab.process import Process, spawn
from pvrdma_lab.qemu_tree import find_qemu
from pvrdma_lab.state import LabError

MEMORY_MIB = 2048
BOOT_TIMEOUT_S = 180.0
# Where the clone lies in the virtual machine.
PROJECT = "/pvrdma"
_SHARED = ("pvrdma_server", "tests", "scripts", "pyproject.toml")
_UNSHARED_SUFFIXES = (".so", ".pyc")


class HostVm:
    """The rxe host of this cache; there is at most one."""

    def __init__(self) -> None:
        self.folder = paths.run_folder() / "rxe-host"
        self.port = 0
        self._process: Process | None = None
        self._load()

    # -- life --

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    def up(self) -> float:
        """Boots it, unless it runs, and copies the clone in. Returns the seconds that took.

        Raises:
            LabError: it did not come up; with the end of its console.
        """
        started = time.monotonic()
        if not self.alive:
            self._start()
            self._wait_ready(started + BOOT_TIMEOUT_S)
        self.sync()
        self.check(f"{PROJECT}/scripts/host/setup", timeout_s=120)
        return time.monotonic() - started

    def down(self) -> None:
        """Ends it; its disk forgets everything."""
        if self._process is not None:
            self._process.stop()
        (self.folder / "host.json").unlink(missing_ok=True)

    def sync(self) -> None:
        """Copies the clone, the compiled extension and the nested guest's files in, over what is there."""
        extension = find_extension()
        if extension is None:
            raise LabError(
                "the C extension for the rxe host is out of date: run scripts/bootstrap --only rxe-extension"
            )
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name in _SHARED:
                tar.add(paths.REPOSITORY / name, name, filter=_shareable)
            for library in extension.iterdir():
                tar.add(library, f"pvrdma_server/{library.name}")
        self.check(
            # What Python has compiled stays, for as long as its source is the same.
            f"mkdir -p {PROJECT} && find {PROJECT} -type f ! -name '*.pyc' -delete && tar xf - -C {PROJECT}",
            stdin=archive.getvalue(),
        )
        nested = find_nested()
        if nested is not None and not self.run(f"test -e /nested/{nested.key}").ok:
            for path in (nested.kernel, nested.initrd):
                self.check(
                    f"mkdir -p /nested; cat >/nested/{path.name}",
                    stdin=path.read_bytes(),
                    timeout_s=120,
                )
            self.check(f"touch /nested/{nested.key}")

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
                f"rxe host: status {result.status} after {result.seconds:.1f} s: {command}\n"
                f"{result.stdout[-4000:]}{result.stderr[-4000:]}"
            )
        return result.stdout

    def popen(self, command: str, timeout_s: float | None = None) -> Running:
        """Starts a command and returns at once; leaving the `with` block ends it."""
        try:
            return Running(self.port, command, timeout_s, None)
        except AgentError as error:
            raise self.error(str(error)) from error

    def project(self, command: str) -> str:
        """Returns the words that run a command in the clone's folder."""
        return f"cd {PROJECT} && PYTHONPATH={PROJECT} {command}"

    # -- inside --

    def console(self) -> str:
        try:
            return (self.folder / "console.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def error(self, what: str) -> LabError:
        """Returns an error that carries the end of the console."""
        tail = "\n".join(self.console().splitlines()[-30:])
        return LabError(f"rxe host: {what}\n--- console: {self.folder / 'console.log'}\n{tail}")

    def _start(self) -> None:
        qemu, files = find_qemu(), find_host()
        if qemu is None or files is None:
            raise LabError("QEMU or the rxe host's files are not built: run scripts/bootstrap")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "console.log").unlink(missing_ok=True)
        self.port = free_port()
        words = "console=ttyS0 quiet panic=0 mitigations=off random.trust_cpu=on lab.name=rxe-host lab.modules=none"
        argv = [
            *qemu.argv, "-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg,thread=multi",
            "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MIB), "-machine", "q35", "-name", "rxe-host,debug-threads=on",
            "-kernel", str(files.kernel), "-initrd", str(files.initrd), "-append", words,
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
        (self.folder / "host.json").write_text(json.dumps(state))

    def _load(self) -> None:
        try:
            state = json.loads((self.folder / "host.json").read_text())
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


def _shareable(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if info.name.endswith(_UNSHARED_SUFFIXES) or "__pycache__" in info.name:
        return None
    info.uid = info.gid = 0
    return info

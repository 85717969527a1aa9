"""One guest of a lab: its server, its QEMU, and commands in it."""

import json
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from pvrdma_lab import agent_client, paths, qmp
from pvrdma_lab.agent_client import AgentError, Result, Running
from pvrdma_lab.guest_image import find_guest
from pvrdma_lab.process import spawn
from pvrdma_lab.python_env import find_venv
from pvrdma_lab.qemu_command import Machine, command, mac_address, network
from pvrdma_lab.qemu_tree import find_qemu
from pvrdma_lab.state import GuestState, LabError, LabState

READY = "] ready"
BOOT_TIMEOUT_S = 120.0
SERVER_START_S = 20.0
PING_S = 5.0
POLL_S = 0.05
_PORT_TAKEN = "Could not set up host forwarding rule"
_DEAD_CONSOLE = ("Kernel panic", "lab: failed: no /dev/vda", "lab: failed: mount")


class GuestCommandError(LabError):
    """A command in a guest that check() wanted to succeed; `result` is what it did."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


class Guest:
    """A guest; made by Lab."""

    def __init__(self, lab: LabState, state: GuestState) -> None:
        self._lab = lab
        self._state = state
        self.name = state.name
        self.ip = state.ip
        self.mac = mac_address(state.index)
        self.folder = lab.folder / state.name

    def __repr__(self) -> str:
        return f"<Guest {self._lab.name}/{self.name}>"

    # -- commands in the guest --

    def run(self, command: str, timeout_s: float = 60.0, stdin: bytes | None = None) -> Result:
        """Runs a shell command (bash) and waits for it; at the time limit it is killed and has status 124.

        Raises:
            LabError: the agent does not answer; with the ends of the logs.
        """
        try:
            return agent_client.run(self._state.agent_port, command, timeout_s, stdin)
        except AgentError as error:
            raise self.error("run", str(error)) from error

    def check(self, command: str, timeout_s: float = 60.0, stdin: bytes | None = None) -> str:
        """Runs a command that must succeed; returns its standard output.

        Raises:
            GuestCommandError: its status is not 0; with its output and the ends of the logs.
        """
        result = self.run(command, timeout_s, stdin)
        if not result.ok:
            output = f"{result.stdout[-3000:]}{result.stderr[-3000:]}".rstrip()
            text = f"status {result.status} after {result.seconds:.1f} s: {command}\n{output}"
            raise GuestCommandError(str(self.error("check", text)), result)
        return result.stdout

    def popen(
        self, command: str, timeout_s: float | None = None, stdin: bytes | None = None
    ) -> Running:
        """Starts a command and returns at once; leaving the `with` block, or kill(), ends it."""
        try:
            return Running(self._state.agent_port, command, timeout_s, stdin)
        except AgentError as error:
            raise self.error("popen", str(error)) from error

    def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file in the guest."""
        quoted = shlex.quote(path)
        self.check(f"cat >{quoted} && chmod {mode:o} {quoted}", stdin=data)

    def read_file(self, path: str) -> str:
        return self.check(f"cat {shlex.quote(path)}")

    # -- processes --

    @property
    def server_alive(self) -> bool:
        return self._state.server is not None and self._state.server.alive

    @property
    def qemu_alive(self) -> bool:
        return self._state.qemu is not None and self._state.qemu.alive

    @property
    def server_pid(self) -> int | None:
        return self._state.server.pid if self._state.server else None

    @property
    def qemu_pid(self) -> int | None:
        return self._state.qemu.pid if self._state.qemu else None

    @property
    def accelerator(self) -> str:
        """QEMU's -accel."""
        return self._lab.accel

    @property
    def agent_port(self) -> int:
        return self._state.agent_port

    def start_server(self) -> None:
        """Starts the guest's pvrdma-server and waits until its socket is there.

        Raises:
            LabError: it is there already, ended at once, or made no socket in time.
        """
        if self.server_alive:
            raise LabError(f"guest {self.name} has a server already (pid {self.server_pid})")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        self._state.server = spawn(
            self._server_command(), cwd=paths.REPOSITORY,
            stdout=self.folder / "server.out", stderr=self.folder / "server.log",
        )  # fmt: skip
        self._lab.save()
        deadline = time.monotonic() + SERVER_START_S
        while not self._socket.exists():
            if not self.server_alive:
                raise self.error("start server", "it ended at once")
            if time.monotonic() > deadline:
                raise self.error(
                    "start server", f"no socket {self._socket} after {SERVER_START_S:.0f} s"
                )
            time.sleep(POLL_S / 5)

    def stop_server(self) -> None:
        """Ends the server with SIGTERM, or SIGKILL after some seconds."""
        if self._state.server:
            self._state.server.stop()

    def kill_server(self) -> None:
        """Ends the server as a crash would: SIGKILL."""
        if self._state.server:
            self._state.server.kill()

    def restart_server(self) -> None:
        """Stops and starts the server. QEMU's client does not come back by itself: restart QEMU too for a device."""
        self.stop_server()
        self.start_server()

    def start_qemu(self) -> None:
        """Starts QEMU and returns at once; wait_ready() waits for the guest."""
        if self.qemu_alive:
            raise LabError(f"guest {self.name} runs already (pid {self.qemu_pid})")
        qemu, files = find_qemu(), find_guest()
        if qemu is None or files is None:
            raise LabError("QEMU or the guest's files are not built: run scripts/bootstrap")
        if self._lab.options.server and not self.server_alive:
            raise self.error("start QEMU", "its server does not run; start it first")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._state.agent_port = free_port()
        self._mark_console()
        argv = command(qemu, files, self._machine())
        log = self.folder / "qemu.log"
        with log.open("a") as file:
            file.write(f"$ {shlex.join(argv)}\n")
        self._state.qemu = spawn(argv, stdout=log, stderr=log, env=qemu.environment)
        self._lab.save()

    def stop_qemu(self) -> None:
        if self._state.qemu:
            self._state.qemu.stop()

    def kill_qemu(self) -> None:
        """Ends QEMU as a crash would: SIGKILL."""
        if self._state.qemu:
            self._state.qemu.kill()

    def wait_ready(self, timeout_s: float = BOOT_TIMEOUT_S) -> float:
        """Waits until the guest has booted and its agent runs commands.

        Returns:
            Seconds waited.

        Raises:
            LabError: QEMU or the server ended, the guest's kernel panicked, or the time is up.
        """
        started = time.monotonic()
        retries = 3
        while READY not in self.console():
            if not self.qemu_alive:
                if _PORT_TAKEN in self.tail("qemu", 5) and retries:
                    retries -= 1
                    self.start_qemu()
                    continue
                raise self.error("boot", "QEMU ended")
            if any(text in self.console() for text in _DEAD_CONSOLE):
                raise self.error("boot", "the guest died")
            if self._lab.options.server and not self.server_alive:
                raise self.error("boot", "the server ended")
            if time.monotonic() - started > timeout_s:
                raise self.error("boot", f"no agent after {timeout_s:.0f} s")
            time.sleep(POLL_S)
        while not agent_client.answers(self._state.agent_port, PING_S):
            if time.monotonic() - started > timeout_s:
                raise self.error("boot", f"the agent does not answer after {timeout_s:.0f} s")
        return time.monotonic() - started

    def wait_off(self, timeout_s: float = 30.0) -> None:
        """Waits until QEMU has ended, as after poweroff -f in the guest.

        Raises:
            LabError: it still runs after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while self.qemu_alive:
            if time.monotonic() > deadline:
                raise self.error("power off", f"QEMU still runs after {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def reboot(self, timeout_s: float = BOOT_TIMEOUT_S, command: str = "reboot -f") -> None:
        """Reboots the guest at once (no unmount, no module unload) and waits until it is up again.

        Args:
            timeout_s: for the boot.
            command: what reboots it.
        """
        self._mark_console()
        self._lab.save()
        with self.popen(command):
            self.wait_ready(timeout_s)

    def reset(self, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Presses the machine's reset button, which no driver hears of, and waits until the guest is up again."""
        self._mark_console()
        self._lab.save()
        self.qmp("system_reset")
        self.wait_ready(timeout_s)

    def qmp(self, command: str, **arguments: Any) -> Any:
        """Executes a QMP command in the guest's QEMU (stop, cont, system_reset, ...)."""
        return qmp.execute(self.folder / "qmp.sock", command, arguments)

    @property
    def status_socket(self) -> Path:
        """The server's status socket (only with this clone's own server)."""
        return self.folder / "status.sock"

    # -- logs --

    def log_path(self, which: str) -> Path:
        """Returns the path of a log: server, console or qemu."""
        return self.folder / f"{which}.log"

    def console(self) -> str:
        """Returns the console since the guest last began to boot."""
        try:
            with self.log_path("console").open("rb") as file:
                file.seek(self._state.console_mark)
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def tail(self, which: str, lines: int = 40) -> str:
        """Returns the last lines of a log."""
        try:
            with self.log_path(which).open("rb") as file:
                file.seek(max(0, self.log_path(which).stat().st_size - 200 * lines))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def server_events(self, last: int | None = None) -> list[dict[str, Any]]:
        """Returns the server's log as records; a line that is not JSON (a traceback) is {"event": line}."""
        try:
            lines = self.log_path("server").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [_record(line) for line in (lines[-last:] if last else lines)]

    def error(self, step: str, what: str) -> LabError:
        """Returns an error that carries the ends of this guest's logs."""
        parts = [f"lab {self._lab.name}, guest {self.name}, {step}: {what}"]
        wanted = (("console", 30), ("server", 20), ("qemu", 6))
        for which, lines in wanted:
            if text := self.tail(which, lines):
                parts.append(f"--- {which}: {self.log_path(which)}\n{text}")
        return LabError("\n".join(parts))

    # -- inside --

    @property
    def _socket(self) -> Path:
        return self.folder / "vfio.sock"

    def _mark_console(self) -> None:
        log = self.log_path("console")
        self._state.console_mark = log.stat().st_size if log.exists() else 0

    def _server_command(self) -> list[str]:
        options = self._lab.options
        base = list(options.server_command)
        own = []
        if not base:
            base = [server_python(), "-m", "pvrdma_server"]
            own = [
                "--name",
                f"{self._lab.name}-{self.name}",
                "--status-socket",
                str(self.status_socket),
            ]
            if "ibv" not in options.server_args:
                own += ["--fabric", str(self._lab.folder / "fabric")]
        more = [self._filled_in(word) for word in options.server_args]
        return [*base, "--socket-path", str(self._socket), *own, *more]

    def _filled_in(self, word: str) -> str:
        """An argument with what stands for this guest; other braces stay, for QEMU's may be JSON."""
        values = {
            "name": self.name, "index": self._state.index, "ip": self.ip, "mac": self.mac,
            "folder": self.folder, "lab": self._lab.folder,
        }  # fmt: skip
        for key, value in values.items():
            word = word.replace(f"{{{key}}}", str(value))
        return word

    def _machine(self) -> Machine:
        lab, state = self._lab, self._state
        names = [guest.name for guest in lab.guests]
        return Machine(
            name=self.name, index=state.index, address=f"{self.ip}/24",
            hosts={guest.name: guest.ip for guest in lab.guests},
            memory_mib=lab.options.memory_mib, smp=lab.options.smp, agent_port=state.agent_port,
            network=network(lab.folder, names, self.name, lab.group_port),
            vfio_socket=self._socket if lab.options.server else None,
            folder=self.folder, accel=lab.accel,
            extra=tuple(map(self._filled_in, lab.options.qemu_args)),
            kernel_args=lab.options.kernel_args,
        )  # fmt: skip


def server_python() -> str:
    """Returns the interpreter for the server: ours if it is a virtualenv's, else bootstrap's."""
    if sys.prefix != sys.base_prefix:
        return sys.executable
    venv = find_venv()
    if venv is None:
        raise LabError(
            "no virtualenv for the server, or it is out of date: run scripts/bootstrap --only venv"
        )
    return str(venv / "bin/python")


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """Returns a port that is free on 127.0.0.1 at this moment."""
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    return record if isinstance(record, dict) else {"event": line}


def clear(folder: Path) -> None:
    """Removes a run folder with its logs and sockets."""
    if folder.exists():
        shutil.rmtree(folder)

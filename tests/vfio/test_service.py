"""One server process as a service: its file, its sockets, what it tells systemd; a guest's driver on it for company."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from guest import Kernel, Qp, connect
from guest_ram import GuestRam
from prometheus_client.parser import text_string_to_metric_families
from vfu_bus import VfuBus

from pvrdma_server.ctl import main as ctl
from pvrdma_server.errors import ConfigError
from pvrdma_server.status import ask

ROOT = Path(__file__).parents[2]
GID = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
_LONG_S = 60.0


class Service:
    """A server with a file in `folder`, and the manager that listens to it.

    Args:
        folder: for its sockets and its file.
        more: lines of the file, beside its sockets.
    """

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder = folder
        self.socket = str(folder / "vm1.sock")
        self.control = str(folder / "control")
        self.file = folder / "vm1.toml"
        self.configure(more)
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "notify"))
        self.manager.settimeout(_LONG_S)
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, more: str) -> None:
        self.file.write_text(f'status-socket = "{self.control}"\nsocket-path = "{self.socket}"\n{more}\n')  # fmt: skip

    def start(self, *words: str, **popen: Any) -> None:
        env = {**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify"), **popen.pop("env", {})}
        argv = [sys.executable, "-m", "pvrdma_server", "--config", str(self.file), *words]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                popen.pop("argv", argv), cwd=ROOT, stdout=log, stderr=log, env=env, **popen
            )

    def hears(self, wanted: str) -> None:
        """Wait for a message."""
        while wanted not in self.manager.recv(4096).decode().splitlines():
            pass

    def falls_silent(self) -> bool:
        """Whether nothing comes for as long as the socket waits."""
        for _ in range(1000):
            try:
                self.manager.recv(4096)
            except TimeoutError:
                return True
        return False

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> int:
        process, self.process = self.process, None
        assert process is not None
        process.terminate()
        return process.wait(_LONG_S)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def wait_for_record(self, event: str) -> dict[str, Any]:
        deadline = time.monotonic() + _LONG_S
        while True:
            found = [record for record in self.records() if record["event"] == event]
            if found:
                return found[-1]
            assert time.monotonic() < deadline, f"no {event} in {self.log.read_text()}"
            time.sleep(0.01)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(_LONG_S)
        self.manager.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(more: str = "") -> Service:
        made.append(Service(tmp_path, more))
        return made[-1]

    yield make
    for service in made:
        service.close()


def guest_on(path: str) -> VfuBus:
    """A guest with a GID and a queue pair connected to itself, which has sent something."""
    bus = VfuBus(path, GuestRam(24 << 20, memfd=True), timeout_s=_LONG_S)
    kernel = Kernel(bus.boot())
    kernel.add_gid(GID)
    left, right = Qp(kernel), Qp(kernel)
    connect(left, right, GID, GID)
    memory = kernel.pd.reg_mr(8192)
    right.post_recv(memory.sge(4096), wr_id=1)
    left.send(memory.sge(0, 100), wr_id=2)
    right.recv_cq.wait_one()
    return bus


def run_ctl(*words: str) -> str:
    result = CliRunner().invoke(ctl, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_service_from_start_to_stop(make: Callable[..., Service], tmp_path: Path) -> None:
    service = make('log-level = "warning"\nmetrics-socket = "metrics"\n[limits]\nmax_qp = 99')
    service.start("--log-level", "info", "--metrics-socket", str(tmp_path / "m"))
    service.hears("READY=1")
    assert Path(service.socket).is_socket()
    assert (tmp_path / "m").is_socket()
    status = ask(service.control, "status")
    assert (status["name"], status["log_level"], status["connected"]) == ("vm1", "info", False)
    assert service.end() == 0
    service.hears("STOPPING=1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "notify", "vm1.toml"]
    assert [record["event"] for record in service.records()] == ["ready", "stopping", "stopped"]


def test_status_top_and_metrics_of_a_guest(make: Callable[..., Service]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = make(f'metrics-listen = "127.0.0.1:{port}"')
    service.start()
    service.hears("READY=1")
    with guest_on(service.socket) as bus:
        objects = ask(service.control, "objects")
        assert [qp["state"] for qp in objects["qps"]] == ["RTS", "RTS"]
        assert [(qp["sends"], qp["receives"]) for qp in objects["qps"]] == [(1, 0), (0, 1)]
        assert objects["gids"][0]["address"] == "::ffff:10.0.0.1"
        text = run_ctl("status", service.control, "--show", "all")
        for part in ("attached", "::ffff:10.0.0.1", "RTS", "kernel", "Memory regions"):
            assert part in text
        document = json.loads(run_ctl("status", service.control, "--json"))
        assert document["tables"]["gids"] == objects["gids"]
        assert "Busiest" in run_ctl("top", service.control, "--interval", "0.01", "--count", "2")
        looks = run_ctl("top", service.control, "--interval", "0.01", "--count", "2", "--json")
        assert [json.loads(line)["status"]["state"] for line in looks.splitlines()] == ["active"] * 2  # fmt: skip
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_LONG_S) as page:
            text = page.read().decode()
        values = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values["pvrdma_objects", "qps"] == 2
        assert values["pvrdma_device_state", "active"] == 1
        assert values["pvrdma_sent_bytes_total",] >= 100
        bus.ram.close()
    assert service.end() == 0


def test_requests_with_nonsense_are_refused(make: Callable[..., Service]) -> None:
    service = make()
    service.start()
    service.hears("READY=1")
    for words in (["log-level", service.control, "loud"], ["status", service.control, "--limit", "0"],
                  ["top", service.control, "--interval", "0"], ["status", f"{service.control}x"]):  # fmt: skip
        assert CliRunner().invoke(ctl, words).exit_code != 0
    levels: list[Any] = [None, 3, [], "loud"]
    for level in levels:
        with pytest.raises(ConfigError, match='"level" must be one of'):
            ask(service.control, "log-level", level=level)
    for limit in (None, True, 0, "9", 1 << 40):
        with pytest.raises(ConfigError, match='"limit" must be a number'):
            ask(service.control, "objects", limit=limit)
    kinds: list[Any] = [None, "qps", [[]], ["qps", "status"], {"qps": 1}]
    for value in kinds:
        with pytest.raises(ConfigError, match='"kinds" must be an array'):
            ask(service.control, "objects", kinds=value)
    assert ask(service.control, "objects", limit=1)["qps"] == []
    assert ask(service.control, "objects", kinds=["gids"]).keys() == {"gids", "left_out"}
    assert service.end() == 0


def test_the_log_level_changes_while_it_runs(make: Callable[..., Service]) -> None:
    service = make('log-level = "error"')
    service.start()
    service.hears("READY=1")
    assert run_ctl("log-level", service.control) == "error\n"
    assert run_ctl("log-level", service.control, "info") == "info (was error)\n"
    with VfuBus(service.socket, GuestRam(memfd=True), timeout_s=_LONG_S) as bus:
        bus.boot()
        service.wait_for_record("device_active")
        bus.ram.close()
    assert service.end() == 0


def test_sighup_reads_the_file_again(make: Callable[..., Service]) -> None:
    service = make()
    service.start()
    service.hears("READY=1")
    service.configure('log-level = "debug"\nroce-version = 1')
    service.send(signal.SIGHUP)
    service.hears("RELOADING=1")
    service.hears("READY=1")
    assert ask(service.control, "status")["log_level"] == "debug"
    assert service.wait_for_record("restart_needed")["keys"] == ["roce-version"]
    for text, why in (
        ("log-level = 7", "log-level = 7: a string is wanted"),
        ('log-level = "error"\nbackend = "ibv"', "--backend ibv needs --ibdev"),
    ):
        service.configure(text)
        service.send(signal.SIGHUP)
        service.hears("RELOADING=1")
        service.hears("READY=1")
        assert why in service.wait_for_record("reload_failed")["error"]
    assert ask(service.control, "status")["log_level"] == "debug"
    assert service.end() == 0


def test_signs_of_life_come_and_end_when_the_server_hangs(make: Callable[..., Service]) -> None:
    service = make()
    service.start(env={"WATCHDOG_USEC": "400000"})
    for _ in range(4):
        service.hears("WATCHDOG=1")
    service.hears("STATUS=QEMU not attached, device reset, 0 queue pairs, 0 GIDs")
    service.send(signal.SIGSTOP)
    service.manager.settimeout(1.0)
    assert service.falls_silent()
    service.send(signal.SIGCONT)
    service.manager.settimeout(_LONG_S)
    service.hears("WATCHDOG=1")
    assert service.end() == 0


# What systemd does: the socket becomes descriptor 3, its variables name the process.
_ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "pvrdma_server", "--config", *sys.argv[2:]])
"""


def activate(service: Service, listener: socket.socket) -> None:
    argv = [sys.executable, "-c", _ACTIVATE, str(listener.fileno()), str(service.file)]
    service.start(argv=argv, pass_fds=(listener.fileno(),))


def test_a_socket_that_systemd_passes_is_served_and_outlives_the_server(
    make: Callable[..., Service],
) -> None:
    service = make()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(service.socket)
        listener.listen()
        for _ in range(2):
            activate(service, listener)
            # The client that comes before the server is ready waits.
            with VfuBus(service.socket, GuestRam(memfd=True), timeout_s=_LONG_S) as bus:
                bus.boot()
                assert ask(service.control, "status")["name"] == "vm1"
                service.hears("READY=1")
                service.send(signal.SIGHUP)
                service.wait_for_record("reloaded")
                bus.ram.close()
            assert service.end() == 0
            assert Path(service.socket).is_socket()
    assert not any(record["event"] == "restart_needed" for record in service.records())


def test_an_inherited_socket_names_the_vm_as_its_path_would(make: Callable[..., Service]) -> None:
    service = make()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(service.socket)
        listener.listen()
        fd = listener.fileno()
        words = ["--fd", str(fd), "--status-socket", service.control]
        service.start(argv=[sys.executable, "-m", "pvrdma_server", *words], pass_fds=(fd,))
        service.hears("READY=1")
    assert ask(service.control, "status")["name"] == service.socket
    assert service.end() == 0


def test_a_socket_at_another_path_than_the_files_is_refused(make: Callable[..., Service]) -> None:
    service = make()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(service.socket + "2")
        listener.listen()
        activate(service, listener)
        assert service.process is not None
        assert service.process.wait(_LONG_S) == 78
    assert f"systemd passes a socket at {service.socket}2, but --socket-path is" in service.log.read_text()  # fmt: skip

"""--check and qemu-args: what is found on a host, on made-up hosts; and what QEMU is told."""

import json
import os
import resource
import socket
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pvrdma_server import qemu_args
from pvrdma_server.check import Finding, Host, check_server
from pvrdma_server.cli import main
from pvrdma_server.errors import ConfigError
from pvrdma_server.settings import Settings

DEVICES = 'name "vfio-user-pci", bus PCI\nname "vmxnet3", bus PCI\n'


def qemu(version: str = "11.1.3", devices: str = DEVICES) -> Callable[[list[str]], str]:
    def ask(argv: list[str]) -> str:
        return f"QEMU emulator version {version} (Debian)\n" if argv[1] == "--version" else devices

    return ask


class FakeHost(Host):
    """A host in a folder; `missing` modules cannot be imported, `limits` are its limits of resources."""

    def __init__(
        self, root: Path, missing: tuple[str, ...] = (), ask: qemu_args.Run | None = None
    ) -> None:
        super().__init__(root, self._load, ask or qemu(), lambda: "/usr/bin/qemu-system-x86_64")
        self._missing = missing
        self.limits = {resource.RLIMIT_NOFILE: 4096, resource.RLIMIT_MEMLOCK: -1}

    def _load(self, name: str) -> object:
        if name in self._missing:
            raise ImportError(f"No module named {name!r}")
        return object()

    def limit(self, which: int) -> int:
        return self.limits[which]

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def with_rxe(self) -> "FakeHost":
        """A device that is up, with a GID."""
        port = "sys/class/infiniband/rxe0/ports/1"
        self.write("sys/module/ib_uverbs/version")
        self.write("proc/sys/vm/max_map_count", "1048576\n")
        self.write("proc/self/status", "Name:\tx\nCapEff:\t0000000000001000\n")
        self.write(f"{port}/link_layer", "Ethernet\n")
        self.write(f"{port}/state", "4: ACTIVE\n")
        self.write(f"{port}/gid_attrs/types/0", "IB/RoCE v1\n")
        self.write(f"{port}/gid_attrs/types/1", "RoCE v2\n")
        self.write("sys/class/infiniband_verbs/uverbs3/ibdev", "rxe0\n")
        self.write("sys/class/infiniband_verbs/abi_version", "6\n")
        self.write("dev/infiniband/uverbs3")
        return self


def soft(folder: Path, **more: Any) -> Settings:
    return Settings(socket_path=str(folder / "vm.sock"), **more)


def ibv(folder: Path, **more: Any) -> Settings:
    return soft(folder, backend="ibv", ibdev="rxe0", **more)


def bad(findings: list[Finding]) -> list[str]:
    """Subjects of what is not well, errors with an exclamation mark."""
    return [
        f"{finding.subject}{'!' if finding.is_error else ''}"
        for finding in findings
        if finding.advice
    ]


def test_all_is_well(tmp_path: Path) -> None:
    host = FakeHost(tmp_path).with_rxe()
    for settings in (soft(tmp_path), ibv(tmp_path, gid_policy="add", state_dir=str(tmp_path))):
        findings = check_server(settings, None, host)
        assert bad(findings) == []
        assert all(str(finding).startswith("ok ") for finding in findings)


RXE = "sys/class/infiniband/rxe0"
PORT = f"{RXE}/ports/1"
UVERBS = "sys/class/infiniband_verbs/uverbs3/ibdev"
Change = Callable[[FakeHost], object]


def write(path: str, text: str) -> Change:
    return lambda host: host.write(path, text)


def move(path: str, to: str) -> Change:
    return lambda host: (host.root / path).rename(host.root / to)


def limit(which: int, value: int) -> Change:
    return lambda host: host.limits.update({which: value})


@pytest.mark.parametrize(
    ("change", "expected", "advice"),
    [
        (move("sys/module/ib_uverbs", "gone"), "module ib_uverbs!", "modprobe ib_uverbs"),
        (move(RXE, "sys/class/infiniband/mlx5_2"), "device rxe0!", "there are: mlx5_2"),
        (
            move("sys/class/infiniband", "gone"),
            "device rxe0!",
            "there are none: load the HCA's driver",
        ),
        (move(PORT, f"{RXE}/ports/2"), "port 1 of rxe0!", "there are 2"),
        (write(f"{PORT}/state", "1: DOWN"), "port 1 of rxe0", "set its netdev up"),
        (write(f"{PORT}/link_layer", "InfiniBand"), "port 1 of rxe0!", "RoCE port is needed"),
        (move(f"{PORT}/gid_attrs/types/1", "gone"), "GIDs of rxe0", "give its netdev an address"),
        (move("dev/infiniband/uverbs3", "gone"), "/dev/infiniband/uverbs3!", "group of the node"),
        (write(UVERBS, "x"), "verbs of rxe0!", "modprobe ib_uverbs"),
        (
            write("proc/sys/vm/max_map_count", "65530"),
            "vm.max_map_count",
            "vm.max_map_count=1048576",
        ),
        (move("proc/sys/vm/max_map_count", "gone"), "vm.max_map_count", "look with sysctl"),
        (write("proc/self/status", "CapEff:\t0fff"), "CAP_NET_ADMIN!", "AmbientCapabilities="),
        (limit(resource.RLIMIT_MEMLOCK, 65536), "RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity"),
        (limit(resource.RLIMIT_NOFILE, 256), "RLIMIT_NOFILE", "LimitNOFILE="),
    ],
)
def test_one_thing_is_wrong(tmp_path: Path, change: Change, expected: str, advice: str) -> None:
    host = FakeHost(tmp_path).with_rxe()
    change(host)
    findings = check_server(ibv(tmp_path, gid_policy="add"), None, host)
    assert bad(findings) == [expected]
    (line,) = [str(finding) for finding in findings if finding.advice]
    assert advice in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("missing", "subject"),
    [
        ("pvrdma_server.vfio_user", "libvfio-user!"), ("prometheus_client", "prometheus_client!"), ("h11", "h11!"),
        ("pvrdma_server.backend_ibv", "pyverbs!"), ("pyroute2", "pyroute2!"),
    ],
)  # fmt: skip
def test_a_library_is_missing(tmp_path: Path, missing: str, subject: str) -> None:
    host = FakeHost(tmp_path, (missing,)).with_rxe()
    settings = ibv(tmp_path, gid_policy="add", metrics_listen=("127.0.0.1", 1))
    assert bad(check_server(settings, None, host)) == [subject]


def test_libraries_of_what_is_not_used_are_not_missed(tmp_path: Path) -> None:
    host = FakeHost(tmp_path, ("prometheus_client", "h11", "pvrdma_server.backend_ibv", "pyroute2"))
    assert bad(check_server(soft(tmp_path), None, host)) == []


def test_folders_and_sockets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(
        socket_path=str(tmp_path / "none" / "s"),
        status_socket=str(tmp_path / "file"),
        metrics_socket=str(tmp_path / ("x" * 108)),
        fabric=str(tmp_path / "none" / "fabric"),
    )
    assert bad(check_server(settings, None, FakeHost(tmp_path))) == [
        f"socket-path folder {tmp_path}/none!",
        f"status-socket {tmp_path}/file!",
        f"metrics-socket {tmp_path}/{'x' * 108}!",
        f"fabric folder {tmp_path}/none!",
    ]


def test_a_live_socket_is_found_without_a_connection_and_a_stale_one_is_well(tmp_path: Path) -> None:  # fmt: skip
    path = tmp_path / "vm.sock"
    host = FakeHost(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert bad(check_server(soft(tmp_path), None, host)) == [f"socket-path {path}"]
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert bad(check_server(soft(tmp_path), None, host)) == []
    assert path.is_socket()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = bad(check_server(soft(tmp_path), None, FakeHost(tmp_path)))
    assert found == [f"socket-path folder {tmp_path}!"]


def test_a_fabric_folder_that_the_server_would_refuse(tmp_path: Path) -> None:
    folder = tmp_path / "fabric"
    folder.mkdir()
    folder.chmod(0o777)
    settings = soft(tmp_path, fabric=str(folder))
    assert bad(check_server(settings, None, FakeHost(tmp_path))) == [f"fabric folder {folder}!"]
    folder.chmod(0o775)
    assert bad(check_server(settings, None, FakeHost(tmp_path))) == []


@pytest.mark.parametrize("option", ["mad-hub", "old-mux"])
@pytest.mark.parametrize("listens", [True, False])
def test_a_hub(tmp_path: Path, listens: bool, option: str) -> None:
    path = str(tmp_path / "hub.sock")
    host = FakeHost(tmp_path).with_rxe()
    with socket.socket(socket.AF_UNIX) as hub:
        hub.bind(path)
        if listens:
            hub.listen()
        else:
            hub.close()
        found = bad(check_server(ibv(tmp_path, **{option.replace("-", "_"): path}), None, host))
    assert found == ([] if listens else [f"{option} {path}"])


def test_a_limit_that_is_lowered_is_said_so(tmp_path: Path) -> None:
    settings = soft(tmp_path, limits=(("max_qp", 100_000), ("max_cq", 7)))
    findings = check_server(settings, None, FakeHost(tmp_path))
    assert bad(findings) == ["limit max_qp"]
    assert "100000 becomes 65535" in str(findings[1])


def test_settings_that_do_not_go_together_are_a_finding(tmp_path: Path) -> None:
    settings = Settings(socket_path=str(tmp_path / "s"), backend="ibv", ibdev=None)
    found = bad(check_server(settings, Path("/etc/vm.toml"), FakeHost(tmp_path)))
    assert found[0] == "configuration /etc/vm.toml!"


@pytest.mark.parametrize(
    ("ask", "advice"),
    [
        (qemu("10.0.7"), "is QEMU 10.0.7, which cannot attach a vfio-user device"),
        (qemu(devices='name "vmxnet3"'), "has no vfio-user-pci: it was left out of this build"),
        (qemu(devices='name "vfio-user-pci"'), "has no vmxnet3"),
        (lambda _: "hello", "is no QEMU: --version prints 'hello'"),
    ],
)
def test_a_qemu_that_will_not_do(tmp_path: Path, ask: qemu_args.Run, advice: str) -> None:
    findings = check_server(soft(tmp_path), None, FakeHost(tmp_path, ask=ask))
    assert bad(findings) == ["QEMU!"]
    assert advice in str(findings[-1])
    assert str(findings[-1]).count("; ") == 1


def test_no_qemu_is_a_warning(tmp_path: Path) -> None:
    def none() -> str:
        raise ConfigError("none")

    host = FakeHost(tmp_path)
    host.find_qemu = none
    assert bad(check_server(soft(tmp_path), None, host)) == ["QEMU"]


def test_the_real_host_can_be_looked_at(tmp_path: Path) -> None:
    findings = check_server(soft(tmp_path))
    assert {"libvfio-user", "RLIMIT_NOFILE"} <= {finding.subject for finding in findings}
    assert not any(finding.is_error for finding in findings if finding.subject != "QEMU")


@pytest.mark.parametrize("broken", [False, True])
def test_the_status_of_check(tmp_path: Path, broken: bool) -> None:
    program(tmp_path, "QEMU emulator version 11.1.3")
    path = str(tmp_path / "none" / "s" if broken else tmp_path / "s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        result = CliRunner().invoke(main, ["--socket-path", path, "--check"])
    assert result.exit_code == int(broken), result.output
    assert not os.path.exists(path)


# --- qemu-args -------------------------------------------------------------------------------------------------------


def program(folder: Path, version: str) -> str:
    """A program that says which QEMU it is."""
    path = folder / "qemu-system-x86_64"
    answer = f"case $1 in --version) echo '{version}';; *) echo '{DEVICES}';; esac"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def qemu_args_of(folder: Path, *words: str, version: str = "QEMU emulator version 10.1.0") -> Result:  # fmt: skip
    return CliRunner().invoke(main, ["qemu-args", "--qemu", program(folder, version), *words])


def test_words_for_a_shell_and_as_json_are_the_same(tmp_path: Path) -> None:
    words = ["--socket-path", "/run/it's/vm1.sock", "--memory", "8G", "--slot", "16"]
    shell = qemu_args_of(tmp_path, *words)
    as_json = qemu_args_of(tmp_path, *words, "--json")
    assert shell.exit_code == as_json.exit_code == 0
    argv = json.loads(as_json.output)
    script = f"printf '%s\\n' {shell.output}"
    echoed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert echoed.stdout.splitlines() == argv
    assert json.loads(argv[-1]) == {
        "driver": "vfio-user-pci",
        "bus": "pcie.0",
        "addr": "10.1",
        "socket": {"type": "unix", "path": "/run/it's/vm1.sock"},
    }
    assert "memory-backend-memfd,id=pvrdma-ram,size=8G,share=on" in argv
    assert "q35,memory-backend=pvrdma-ram" in argv
    assert any(word.startswith("vmxnet3,") and "addr=10.0,multifunction=on" in word for word in argv)  # fmt: skip


def test_a_snippet_for_libvirt(tmp_path: Path) -> None:
    result = qemu_args_of(tmp_path, "--socket-path", "/run/it's/&.sock", "--libvirt", "--memory", "512M")  # fmt: skip
    domain = ET.fromstring(f"<domain xmlns:qemu='q'>{result.output}</domain>")
    found = domain.find("memory")
    assert found is not None
    assert (found.get("unit"), found.text) == ("MiB", "512")
    address = domain.find("interface/address")
    assert address is not None
    wanted = {"slot": "0x05", "function": "0x0", "multifunction": "on"}
    assert wanted.items() <= address.attrib.items()
    words = [word.get("value") for word in domain.iterfind("{q}commandline/{q}arg")]
    assert words[0] == "-device"
    assert json.loads(str(words[1]))["socket"]["path"] == "/run/it's/&.sock"


def test_the_path_comes_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "vm1.toml"
    file.write_text('socket-path = "/run/pvrdma/vm1.sock"')
    assert "/run/pvrdma/vm1.sock" in qemu_args_of(tmp_path, "--config", str(file)).output
    file.write_text('name = "vm1"')
    assert "has no socket-path" in qemu_args_of(tmp_path, "--config", str(file)).output


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--socket-path", "/s", "--memory", "4"], "--memory 4: a number and M or G"),
        (["--socket-path", "/s", "--slot", "31"], "--slot 31: 1 to 30"),
        (["--socket-path", "/s", "--libvirt", "--json"], "exclude each other"),
        ([], "give --config or --socket-path"),
        (["--socket-path", "/s", "--qemu", "/not/there"], "no QEMU: /not/there not found"),
    ],
)
def test_what_cannot_be_printed(tmp_path: Path, words: list[str], complaint: str) -> None:
    result = qemu_args_of(tmp_path, *words)
    assert result.exit_code != 0
    assert complaint in result.output


def test_a_qemu_that_is_too_old_is_refused_by_name(tmp_path: Path) -> None:
    result = qemu_args_of(tmp_path, "--socket-path", "/s", version="QEMU emulator version 9.2.1")
    assert result.exit_code == 1
    assert "is QEMU 9.2.1, which cannot attach a vfio-user device" in result.output
    assert "QEMU 10.1 or newer is needed" in result.output


def test_a_program_that_fails_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--version fails: it ends with status 1"):
        qemu_args.qemu_version("/bin/false")

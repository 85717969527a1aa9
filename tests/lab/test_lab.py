"""The lab without guests: state, processes, QEMU's command line, servers."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pvrdma_lab import Lab, LabError, paths, state
from pvrdma_lab.guest_image import GuestFiles
from pvrdma_lab.process import Process, spawn
from pvrdma_lab.qemu_command import Machine, command, network
from pvrdma_lab.qemu_tree import Qemu
from pvrdma_lab.state import LabState, Options

SERVER = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
print('{"event": "starting", "args": "%s"}' % " ".join(sys.argv[3:]), file=sys.stderr, flush=True)
listener.bind(sys.argv[2])
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PVRDMA_CACHE", str(tmp_path / "c"))
    # The path may be too long for sockets: then labs lie outside pytest's folder.
    folder = paths.run_folder()
    yield tmp_path / "c"
    shutil.rmtree(folder, ignore_errors=True)


def sleeper(tmp_path: Path, *argv: str) -> Process:
    return spawn(argv or ("sleep", "60"), stdout=tmp_path / "out", stderr=tmp_path / "err")


def test_process_is_killed_and_seen_gone(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    assert process.alive
    assert process.kill()
    assert not process.alive
    assert process.kill()


def test_stranger_with_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    stale = Process(process.pid, "another-start")
    assert not stale.alive
    assert stale.kill()
    assert process.alive
    process.kill()


def test_stop_takes_sigkill_for_one_that_does_not_listen(tmp_path: Path) -> None:
    process = sleeper(tmp_path, "sh", "-c", "trap '' TERM; echo on; while :; do sleep 0.1; done")
    deadline = time.monotonic() + 10
    while "on" not in (tmp_path / "out").read_text():
        assert time.monotonic() < deadline
    process.stop(timeout_s=0.2)
    assert not process.alive


def test_processes_are_found_again_from_the_state(tmp_path: Path) -> None:
    lab = LabState.fresh("again", Options(guests=2, server_args=("--a", "b")))
    lab.folder.mkdir(parents=True)
    lab.guests[1].qemu = process = sleeper(tmp_path)
    lab.save()
    loaded = state.load("again")
    assert loaded == lab
    assert [found.alive for found in loaded.processes()] == [True]
    assert state.names() == ["again"]
    process.kill(signal.SIGTERM)
    loaded.forget()
    assert state.load("again") is None


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 25, "-x"])
def test_names_that_are_no_folder_names(name: str) -> None:
    with pytest.raises(LabError, match="not a lab's name"):
        Lab(name)


def test_broken_state_is_an_error_not_a_traceback() -> None:
    lab = LabState.fresh("broken", Options())
    lab.folder.mkdir(parents=True)
    (lab.folder / state.FILE_NAME).write_text('{"name": 1}')
    with pytest.raises(LabError, match="is not a lab's state"):
        state.load("broken")


def test_unknown_lab_and_guest() -> None:
    with pytest.raises(LabError, match="there is no lab"):
        Lab.load("nobody")
    with pytest.raises(LabError, match="has no guest 'z'; it has a b"):
        Lab("two")["z"]


def machine(folder: Path, vfio_socket: Path | None) -> Machine:
    return Machine(
        name="a", index=0, address="10.77.0.1/24", hosts={"a": "10.77.0.1", "b": "10.77.0.2"}, memory_mib=256,
        smp=2, agent_port=4000, network="dgram,x=y", vfio_socket=vfio_socket, folder=folder, accel="tcg",
        extra=("-S",),
    )  # fmt: skip


def qemu_command(folder: Path, vfio_socket: Path | None) -> list[str]:
    files = GuestFiles(Path("/k"), Path("/i"), Path("/r"))
    return command(Qemu(("qemu",), Path("/qemu")), files, machine(folder, vfio_socket))


def test_device_is_function_1_beside_the_vmxnet3(tmp_path: Path) -> None:
    argv = qemu_command(tmp_path, tmp_path / "vfio.sock")
    devices = [argv[at + 1] for at, word in enumerate(argv) if word == "-device"]
    (nic,) = [device for device in devices if device.startswith("vmxnet3")]
    assert "addr=5.0,multifunction=on" in nic
    ours = json.loads(devices[-1])
    assert (ours["driver"], ours["addr"]) == ("vfio-user-pci", "5.1")
    assert ours["socket"] == {"type": "unix", "path": str(tmp_path / "vfio.sock")}
    assert argv[-1] == "-S"


def test_ram_is_shared_and_the_kernel_knows_who_it_is(tmp_path: Path) -> None:
    argv = qemu_command(tmp_path, None)
    assert "memory-backend-memfd,id=ram,size=256M,share=on" in argv
    kernel = argv[argv.index("-append") + 1]
    assert "lab.ip=10.77.0.1/24 lab.hosts=a:10.77.0.1,b:10.77.0.2" in kernel
    assert "vfio-user-pci" not in " ".join(argv)


def test_network_of_two_is_private_and_of_more_on_loopback(tmp_path: Path) -> None:
    assert network(tmp_path, ["a", "b"], "b", 0).endswith(f"remote.path={tmp_path}/a/net.sock")
    assert network(tmp_path, ["a"], "a", 0).endswith(f"remote.path={tmp_path}/none/net.sock")
    assert "localaddr=127.0.0.1" in network(tmp_path, ["a", "b", "c"], "c", 5000)


def test_server_starts_restarts_and_logs() -> None:
    args = ("--node", "{index}-{name}-{ip}")
    guest = Lab("srv", server_command=(sys.executable, "-c", SERVER), server_args=args)["b"]
    guest.start_server()
    first = guest.server_pid
    with pytest.raises(LabError, match="has a server already"):
        guest.start_server()
    guest.restart_server()
    assert guest.server_alive
    assert guest.server_pid != first
    guest.kill_server()
    assert not guest.server_alive
    assert [event["event"] for event in guest.server_events()] == ["starting"] * 2
    assert guest.server_events(last=1)[0]["args"] == "--node 1-b-10.77.0.2"


def test_server_that_ends_at_once_shows_its_log() -> None:
    failing = (sys.executable, "-c", "import sys; sys.exit('no device here')")
    guest = Lab("bad", server_command=failing)["a"]
    with pytest.raises(LabError, match=r"start server: it ended at once[^$]*no device here"):
        guest.start_server()
    assert guest.server_events() == [{"event": "no device here"}]


def test_spawned_process_has_a_session_of_its_own(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    assert os.getsid(process.pid) == process.pid
    process.kill()

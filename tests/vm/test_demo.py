"""scripts/demo as people run it: the table, or what failed; and no guest left behind either way."""

import os
import signal
import subprocess

import pytest
from pvrdma_lab import paths, state

DEMO = str(paths.REPOSITORY / "scripts" / "demo")


@pytest.fixture
def name() -> str:
    return f"demo-{os.getpid()}"


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [DEMO, "--name", name, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=400)


def assert_all_ended(name: str) -> None:
    assert state.load(name) is None


def test_table(name: str) -> None:
    done = run(name)
    assert done.returncode == 0, done.stderr
    for program in (
        "ibv_devinfo",
        "ibv_rc_pingpong -c",
        "ib_write_bw",
        "ib_read_bw",
        "ib_send_bw",
        "ib_atomic_bw",
        "ib_write_lat",
        "ib_read_lat",
        "ib_send_lat",
        "ib_atomic_lat",
        "rping",
        "nvme connect, dd",
    ):
        assert f"│ {program} " in done.stdout
    assert "no error, no object left" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("demo: all ")
    assert_all_ended(name)


def test_a_step_that_fails(name: str) -> None:
    """The device has a protection domain for the kernel and one more; the first program wants two."""
    done = run(name, "--server-args", "--limit max_pd=2")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("demo: failed: ")
    assert "rdma_check" in last
    # What it takes to see why: the guest's console, and the server's last events.
    assert "--- console:" in done.stderr
    assert "--- server:" in done.stderr
    assert "device_active" in done.stderr
    assert_all_ended(name)


def test_a_server_that_does_not_start(name: str) -> None:
    done = run(name, "--server-args=--no-such-option")
    assert done.returncode == 1
    assert "No such option" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("demo: failed: ")
    assert_all_ended(name)


def test_interrupted(name: str) -> None:
    with subprocess.Popen([DEMO, "--name", name], stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "booting" in line:
                demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 130
    assert line == "demo: interrupted; the guests are down\n"
    assert_all_ended(name)

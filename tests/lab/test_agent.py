"""The guest's agent and its client, both real, on this machine instead of in a guest."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pvrdma_lab import agent_client, paths
from pvrdma_lab.agent_client import AgentError, Running
from pvrdma_lab.guest import free_port


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    chosen = free_port()
    argv = [
        sys.executable,
        str(paths.GUEST_FILES / "agent.py"),
        "--address",
        "127.0.0.1",
        "--port",
        str(chosen),
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert b"ready" in agent.stdout.readline()
        yield chosen
        agent.kill()


def test_output_and_status(port: int) -> None:
    result = agent_client.run(port, "echo out; echo err >&2; exit 3", 10)
    assert (result.status, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not result.ok


def test_signal_becomes_a_shell_status(port: int) -> None:
    assert agent_client.run(port, "kill -TERM $$", 10).status == 128 + 15


def test_time_limit_kills_and_keeps_output(port: int) -> None:
    result = agent_client.run(port, "echo first; sleep 60", 0.3)
    assert (result.status, result.stdout) == (agent_client.TIMEOUT_STATUS, "first\n")


def test_stdin_and_large_output(port: int) -> None:
    data = bytes(range(256)) * 4096
    result = agent_client.run(
        port, "sha256sum; head -c 3000000 /dev/zero | tr '\\0' x", 30, stdin=data
    )
    assert result.ok
    assert len(result.stdout.splitlines()[1]) == 3_000_000


def test_background_child_does_not_hold_the_exit(port: int) -> None:
    result = agent_client.run(port, "sleep 60 & echo $!", 30)
    assert result.ok
    assert result.seconds < 20
    agent_client.run(port, f"kill {result.stdout.strip()}", 10)


def test_kill_ends_the_whole_group(port: int, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with Running(
        port, f"sleep 60 & echo $! >{pid_file}; echo started; wait", None, None
    ) as running:
        running.wait_for("started", 10)
        assert running.poll() is None
    pid = pid_file.read_text().strip()
    gone = agent_client.run(port, f"while kill -0 {pid} 2>/dev/null; do sleep 0.05; done", 20)
    assert gone.ok


def test_lines_come_as_they_are_written(port: int) -> None:
    command = f"{sys.executable} -c 'import time; print(\"one line\"); time.sleep(60)'"
    with Running(port, command, None, None) as running:
        assert running.wait_for("^one (.*)$", 20)[1] == "line"


def test_wait_for_says_what_came_instead(port: int) -> None:
    expected = pytest.raises(TimeoutError, match=r"ended with 4:\nsomething")
    with Running(port, "echo something; exit 4", None, None) as running, expected:
        running.wait_for("another", 10)


def test_wait_times_out_and_the_command_goes_on(port: int) -> None:
    with Running(port, "sleep 60", None, None) as running:
        with pytest.raises(TimeoutError, match="still running"):
            running.wait(0.1)
        assert running.poll() is None


def test_stream_hands_on_everything(port: int) -> None:
    out, err = bytearray(), bytearray()
    with Running(port, "for i in 1 2 3; do echo $i; echo e$i >&2; done", None, None) as running:
        running.stream(out.extend, err.extend)
        assert running.wait(10).ok
    assert (bytes(out), bytes(err)) == (b"1\n2\n3\n", b"e1\ne2\ne3\n")


def test_many_at_the_same_time(port: int) -> None:
    with ThreadPoolExecutor(12) as pool:
        results = list(
            pool.map(lambda n: agent_client.run(port, f"sleep 0.2; echo {n}", 30), range(12))
        )
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(12)]


def test_nobody_there() -> None:
    nobody = free_port()
    assert not agent_client.answers(nobody, 1)
    with pytest.raises(AgentError, match="guest agent on port"):
        agent_client.run(nobody, "true", 1)

"""The words of `pvrdma-server qemu-args`, given to a real QEMU: it attaches the device."""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from pvrdma_lab.qemu_tree import find_qemu
from server_process import ServerProcess

from pvrdma_server import qemu_args
from pvrdma_server.check import Host, check_server
from pvrdma_server.cli import main
from pvrdma_server.settings import Settings


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The lab's QEMU as one program."""
    qemu = find_qemu()
    assert qemu is not None
    path = tmp_path / "qemu-system-x86_64"
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in qemu.environment.items())
    path.write_text(f'#!/bin/sh\n{settings} exec {shlex.join(qemu.argv)} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, "vm1")
    process.start()
    yield process
    process.end()


def test_a_real_qemu_attaches_the_device(program: str, server: ServerProcess) -> None:
    words = ["--socket-path", server.socket, "--qemu", program, "--memory", "64M", "--slot", "16"]
    result = CliRunner().invoke(main, ["qemu-args", *words, "--json"])
    assert result.exit_code == 0, result.output
    argv = [program, "-nodefaults", "-display", "none", "-S", *json.loads(result.output)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, env={**os.environ}) as qemu:
        try:
            server.wait_for("connected", lambda status: status["connected"] or qemu.poll(), 120)
            assert qemu.poll() is None, qemu.stderr and qemu.stderr.read()
            status = server.wait_for("given memory", lambda status: status["dma_regions"], 120)
        finally:
            qemu.terminate()
    assert status["vfio_user"]["protocol_errors"] == 0


def test_check_finds_that_qemu_well(program: str, tmp_path: Path) -> None:
    host = Host(find_qemu=lambda: program)
    finding = check_server(Settings(socket_path=str(tmp_path / "s")), None, host)[-1]
    version = qemu_args.version_text(qemu_args.qemu_version(program))
    assert str(finding) == f"ok      QEMU: {program} is {version}"

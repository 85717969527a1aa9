"""What an operator sees of a server on a real device: the guest's GIDs beside the host's, metrics' port, --check."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guest import Kernel
from host_peer import v4_gid
from host_server import HostServer

from pvrdma_server.check import check_server
from pvrdma_server.settings import Settings
from pvrdma_server.status import ask

pytestmark = pytest.mark.host
# An address that no netdev of the host has, and one that d0 has.
NOWHERE, THERE = "10.9.0.77", "10.9.0.1"


@pytest.fixture
def checking(tmp_path: Path) -> Iterator[HostServer]:
    """A server that may not add addresses."""
    server = HostServer(tmp_path, "rxe0", NOWHERE, policy="check")
    server.start()
    yield server
    assert server.end() == 0


def gids_of(server: HostServer) -> list[dict[str, Any]]:
    gids: list[dict[str, Any]] = ask(str(server.folder / "status.sock"), "objects")["gids"]
    return gids


def drawn(server: HostServer) -> str:
    words = "from pvrdma_server.ctl import main; main()"
    argv = [sys.executable, "-c", words, "status", str(server.folder / "status.sock")]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_gids_beside_the_hosts(checking: HostServer) -> None:
    bus = checking.connect()
    kernel = Kernel(bus.boot())
    kernel.add_gid(v4_gid(THERE))
    kernel.add_gid(v4_gid(NOWHERE), index=1)
    there, nowhere = gids_of(checking)
    assert there["address"] == f"::ffff:{THERE}"
    assert (there["host"]["device"], there["host"]["port"], there["host"]["netdev"]) == ("rxe0", 1, "d0")  # fmt: skip
    index = there["host"]["gid_index"]
    gids = Path("/sys/class/infiniband/rxe0/ports/1/gids")
    assert bytes.fromhex((gids / str(index)).read_text().strip().replace(":", "")) == v4_gid(THERE)
    assert nowhere["host"]["gid_index"] is None
    assert "MISSING: add this address to d0" in drawn(checking)
    bus.close()


def test_the_port_is_the_hosts(checking: HostServer) -> None:
    assert checking.status()["port"] == {"state": "ACTIVE", "mtu": 4096}


def test_check_finds_the_device_well(tmp_path: Path) -> None:
    common: dict[str, Any] = {"socket_path": str(tmp_path / "s"), "backend": "ibv"}
    findings = check_server(Settings(ibdev="rxe0", gid_policy="add", state_dir="/tmp", **common))
    assert [str(finding) for finding in findings if finding.is_error] == []
    found = {finding.subject for finding in findings if not finding.advice}
    assert {"device rxe0", "port 1 of rxe0", "GIDs of rxe0", "pyverbs", "CAP_NET_ADMIN", "QEMU"} <= found  # fmt: skip
    findings = check_server(Settings(ibdev="mlx5_9", **common))
    assert [finding.subject for finding in findings if finding.is_error] == ["device mlx5_9"]

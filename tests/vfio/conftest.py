"""Fixtures: a real server on a real socket."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vfu_server import Server


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "vm.sock")


@pytest.fixture
def start_server(socket_path: str) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        servers.append(Server(socket_path, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()

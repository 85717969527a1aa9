"""Servers on the rxe host's devices, for tests that run inside it (scripts/test host)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from host_server import HostServer

GUEST_A, GUEST_B = "10.9.0.101", "10.9.0.102"


def _server(folder: Path, device: str, address: str, netns: str | None) -> Iterator[HostServer]:
    server = HostServer(folder, device, address, netns=netns)
    server.start()
    yield server
    assert server.end() == 0, server.log.read_text()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServer]:
    """A server on rxe0."""
    yield from _server(tmp_path_factory.mktemp("a"), "rxe0", GUEST_A, None)


@pytest.fixture(scope="session")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServer]:
    """A server on rxe1, the other host's device."""
    yield from _server(tmp_path_factory.mktemp("b"), "rxe1", GUEST_B, "peer")

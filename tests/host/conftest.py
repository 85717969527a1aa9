"""Servers on the rxe host's devices, for tests that run inside it (scripts/test host)."""

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from host_cm import ADDRESSES, END_S, Guest, booted, make_server
from host_peer import PEER_DEVICE
from host_server import HostServer
from hub_process import HubProcess, cm_ids, hub_before_cm

# They import the backend itself, and with it pyverbs, which the rxe host has.
collect_ignore = [] if find_spec("pyverbs") else ["test_in_process.py"]

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


# --- connection management -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """The hub on rxe0, and ib_cm behind it."""
    with hub_before_cm(tmp_path_factory.mktemp("h")) as made:
        yield made


@pytest.fixture(scope="module")
def servers(
    hub: HubProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HostServer, ...]]:
    made = tuple(make_server(tmp_path_factory.mktemp("s"), hub, at) for at in ADDRESSES)
    for server in made:
        server.start()
    yield made
    for server in made:
        assert server.end() == 0, server.log.read_text()


@pytest.fixture
def guest(servers: tuple[HostServer, ...]) -> Iterator[Guest]:
    with booted(servers[0]) as made:
        yield made


@pytest.fixture
def other(servers: tuple[HostServer, ...]) -> Iterator[Guest]:
    with booted(servers[1]) as made:
        yield made


@pytest.fixture
def nothing_stays(hub: HubProcess) -> Iterator[None]:
    """Every test leaves neither bare metal nor hub with a connection."""
    yield
    hub.wait_for("idle", lambda now: not any(c["connections"] for c in now["clients"]))
    deadline = time.monotonic() + END_S
    while left := cm_ids(PEER_DEVICE):
        assert time.monotonic() < deadline, f"bare metal still has {left}"
        time.sleep(0.1)

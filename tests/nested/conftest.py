"""One guest for all tests in the rxe host: it takes a minute or two to boot."""

from collections.abc import Iterator

import pytest
from host_server import HostServer
from hub_process import HubProcess, hub_before_cm
from nested_guest import RDMA_ADDRESS, NestedGuest


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """The MAD hub, which has the CM class of rxe0; ib_cm, loaded after it, has rxe1's."""
    with hub_before_cm(tmp_path_factory.mktemp("h")) as made:
        yield made


@pytest.fixture(scope="session")
def server(hub: HubProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServer]:
    """A server on rxe0."""
    made = HostServer(
        tmp_path_factory.mktemp("s"), "rxe0", RDMA_ADDRESS, more=("--mad-hub", hub.socket)
    )
    made.start()
    yield made
    assert made.end() == 0, made.log.read_text()


@pytest.fixture(scope="session")
def guest(server: HostServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NestedGuest]:
    """A Linux guest on it."""
    made = NestedGuest(tmp_path_factory.mktemp("g"), server.socket)
    try:
        yield made.booted()
    finally:
        made.close()

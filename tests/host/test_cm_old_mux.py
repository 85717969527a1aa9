"""A guest's connection management through the old mux protocol, on real rxe; and over a VLAN of the host's netdev."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_cm import ADDRESSES, Guest, booted, connects, is_connected_to
from host_server import HostServer
from hub_process import HubProcess

pytestmark = [
    pytest.mark.host,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("nothing_stays"),
]
VLAN = 7
VLAN_PEER, VLAN_GUEST = "10.9.7.2", "10.9.7.121"


def server(folder: Path, address: str, option: str, path: str) -> Iterator[HostServer]:
    """A server on rxe0 with a way to the network."""
    made = HostServer(folder, "rxe0", address, more=(option, path, "--name", address))
    made.start()
    yield made
    assert made.end() == 0, made.log.read_text()


@pytest.fixture(scope="module")
def old_guest(hub: HubProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """A guest whose server takes the hub for an rdmacm-mux."""
    folder = tmp_path_factory.mktemp("old")
    for made in server(folder, ADDRESSES[0], "--old-mux", hub.old_mux):
        with booted(made) as guest:
            yield guest


@pytest.mark.parametrize("guest_is", ["client", "server"])
def test_through_the_old_protocol(old_guest: Guest, hub: HubProcess, guest_is: str) -> None:
    before = hub.status()["counters"]
    assert old_guest.relay()["hub"] == "rdmacm-mux"
    name = f"(pid {old_guest.server.pid})"
    if guest_is == "client":
        connects(old_guest, lambda: hub.client(name)["established"] == 1)
    else:
        is_connected_to(old_guest)
    after = hub.status()["counters"]
    assert after["drops"] == before["drops"]
    assert after["to_network"] - before["to_network"] >= 2


# --- VLAN ------------------------------------------------------------------------------------------------------------


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@pytest.fixture(scope="module")
def vlan() -> Iterator[None]:
    """One VLAN over the netdevs of both devices, with the guest's address on ours."""
    for prefix, netdev, address in (("", "d0", VLAN_GUEST), ("-n peer", "d1", VLAN_PEER)):
        ip(f"{prefix} link add link {netdev} name {netdev}.{VLAN} type vlan id {VLAN}")
        ip(f"{prefix} addr add {address}/24 dev {netdev}.{VLAN}")
        ip(f"{prefix} link set {netdev}.{VLAN} up")
    yield
    ip(f"link del d0.{VLAN}")
    ip(f"-n peer link del d1.{VLAN}")


@pytest.fixture(scope="module")
def vlan_guest(
    hub: HubProcess, vlan: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guest]:
    for made in server(tmp_path_factory.mktemp("vlan"), VLAN_GUEST, "--mad-hub", hub.socket):
        with booted(made) as guest:
            yield guest


@pytest.mark.parametrize("guest_is", ["client", "server"])
def test_over_a_vlan(vlan_guest: Guest, hub: HubProcess, guest_is: str) -> None:
    if guest_is == "client":
        connects(vlan_guest, lambda: hub.client(VLAN_GUEST)["established"] == 1, VLAN_PEER)
    else:
        is_connected_to(vlan_guest, VLAN_PEER)
    assert vlan_guest.relay()["hub_dropped"] == {}

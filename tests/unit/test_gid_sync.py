"""The addresses behind GIDs: what is added, what is taken away, and what a crash leaves."""

import errno
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pvrdma_server.gid_sync import Address, GidSync, Policy, address_of_gid

V4 = bytes(10) + b"\xff\xff" + bytes([10, 9, 0, 7])
LINK_LOCAL = bytes.fromhex("fe80000000000000505400fffe770001")
GLOBAL = bytes.fromhex("20010db8000000000000000000000007")


class FakeNetlink:
    """A netdev's addresses; `refuses` is the errno of every addition."""

    def __init__(self, *there: Address, refuses: int = 0) -> None:
        self.addresses = set(there)
        self.refuses = refuses

    def add(self, address: Address) -> None:
        if self.refuses:
            raise OSError(self.refuses, "refused")
        if address in self.addresses:
            raise OSError(errno.EEXIST, "exists")
        self.addresses.add(address)

    def remove(self, address: Address) -> None:
        if address not in self.addresses:
            raise OSError(errno.EADDRNOTAVAIL, "not there")
        self.addresses.remove(address)


@pytest.mark.parametrize(
    ("gid", "address", "prefix"),
    [
        (V4, "10.9.0.7", 32),
        (LINK_LOCAL, "fe80::5054:ff:fe77:1", 64),
        (GLOBAL, "2001:db8::7", 128),
    ],
)
def test_address_of_gid(gid: bytes, address: str, prefix: int) -> None:
    assert address_of_gid("eth7", gid) == Address("eth7", address, prefix)


def test_added_and_taken_away(tmp_path: Path) -> None:
    netlink, marker = FakeNetlink(), tmp_path / "gids.json"
    sync = GidSync(Policy.ADD, marker, netlink)
    assert sync.add("d0", V4)
    assert sync.add("d0", GLOBAL)
    assert netlink.addresses == {address_of_gid("d0", V4), address_of_gid("d0", GLOBAL)}
    assert json.loads(marker.read_text()) == [["d0", "10.9.0.7", 32], ["d0", "2001:db8::7", 128]]
    sync.remove(V4)
    sync.remove(V4)
    assert netlink.addresses == {address_of_gid("d0", GLOBAL)}
    sync.clear()
    assert not netlink.addresses
    assert not marker.exists()


def test_an_address_that_was_there_stays() -> None:
    theirs = address_of_gid("d0", V4)
    netlink = FakeNetlink(theirs)
    sync = GidSync(Policy.ADD, None, netlink)
    assert sync.add("d0", V4)
    sync.clear()
    assert netlink.addresses == {theirs}


def test_the_next_start_cleans_up_after_a_crash(tmp_path: Path) -> None:
    netlink, marker = FakeNetlink(), tmp_path / "gids.json"
    GidSync(Policy.ADD, marker, netlink).add("d0", V4)
    assert netlink.addresses
    GidSync(Policy.ADD, marker, netlink)
    assert not netlink.addresses
    assert not marker.exists()


def test_a_marker_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    marker = tmp_path / "gids.json"
    marker.write_text("{")
    with capture_logs() as logs:
        GidSync(Policy.ADD, marker, FakeNetlink())
    assert [log["event"] for log in logs] == ["gid_marker_unreadable"]


def test_without_the_right_it_says_what_is_needed() -> None:
    netlink = FakeNetlink(refuses=errno.EPERM)
    with capture_logs() as logs:
        assert not GidSync(Policy.ADD, None, netlink).add("d0", V4)
    (log,) = logs
    assert log["address"] == "10.9.0.7/32 on d0"
    assert "CAP_NET_ADMIN" in log["why"]


def test_policy_check_changes_nothing_and_says_it_once() -> None:
    netlink = FakeNetlink()
    sync = GidSync(Policy.CHECK, None, netlink)
    with capture_logs() as logs:
        assert not sync.add("d0", V4)
        assert not sync.add("d0", V4)
    assert [log["event"] for log in logs] == ["gid_address_missing"]
    assert not netlink.addresses

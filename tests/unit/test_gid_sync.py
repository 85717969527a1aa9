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


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENODEV])
def test_what_is_not_a_matter_of_rights_does_not_ask_for_them(error: int) -> None:
    with capture_logs() as logs:
        assert not GidSync(Policy.ADD, None, FakeNetlink(refuses=error)).add("d0", V4)
    assert "CAP_NET_ADMIN" not in logs[0]["why"]


@pytest.mark.parametrize("last", ["127.0.0.1", "224.0.0.1", "0.0.0.0", "255.255.255.255"])
def test_what_is_no_host_s_address_is_not_added(last: str) -> None:
    netlink = FakeNetlink()
    gid = V4[:12] + bytes(int(part) for part in last.split("."))
    assert not GidSync(Policy.ADD, None, netlink).add("d0", gid)
    for v6 in (bytes(15) + b"\x01", bytes(16), b"\xff\x02" + bytes(14)):
        assert not GidSync(Policy.ADD, None, netlink).add("d0", v6)
    assert not netlink.addresses


def test_no_address_without_its_marker(tmp_path: Path) -> None:
    """What a crash would leave for ever is not added, and a full disk ends no server."""
    netlink = FakeNetlink()
    sync = GidSync(Policy.ADD, tmp_path / "gone" / "gids.json", netlink)
    with capture_logs() as logs:
        assert not sync.add("d0", V4)
    assert not netlink.addresses
    assert "--state-dir" in logs[-1]["why"]


def test_a_marker_that_cannot_be_written_later_is_reported_once(tmp_path: Path) -> None:
    folder, netlink = tmp_path / "state", FakeNetlink()
    folder.mkdir()
    sync = GidSync(Policy.ADD, folder / "gids.json", netlink)
    for gid in (V4, GLOBAL, LINK_LOCAL):
        assert sync.add("d0", gid)
    (folder / "gids.json").unlink()
    folder.rmdir()
    with capture_logs() as logs:
        sync.clear()
    assert not netlink.addresses
    assert [log["event"] for log in logs].count("gid_marker_not_written") == 1


@pytest.mark.parametrize("policy", list(Policy))
def test_a_guest_with_many_addresses_fills_no_log(policy: Policy) -> None:
    sync = GidSync(policy, None, FakeNetlink())
    with capture_logs() as logs:
        for number in range(2000):
            gid = GLOBAL[:12] + number.to_bytes(4, "big")
            sync.add("d0", gid)
            sync.remove(gid)
    assert 100 < len(logs) <= 256

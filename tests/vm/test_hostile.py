"""A guest that means harm: it hurts itself, and costs the server one warning per kind of mischief and a counter."""

from pathlib import Path

import pytest
from pvrdma_lab import Guest, Lab
from pvrdma_lab.programs import pingpong, rdma_check
from vm.server_state import (
    assert_same,
    complaints,
    guest_errors,
    held,
    status,
    wait_until,
    warnings,
)

pytestmark = pytest.mark.parametrize("lab", ["mapped", "trapped"], indirect=True, scope="module")

PROGRAMS = Path(__file__).parent / "programs"
SEEDS = [1, 2, 3]


@pytest.fixture(scope="module")
def programs(lab: Lab) -> None:
    for name in ("hostile.py", "hostile_root.py"):
        lab["a"].write_file(f"/tmp/{name}", (PROGRAMS / name).read_bytes())


def assert_each_kind_is_logged_once(guest: Guest) -> None:
    kinds = [(event.get("what"), event.get("kind"), event["event"]) for event in warnings(guest)]
    assert len(kinds) == len(set(kinds)), kinds
    assert len(kinds) <= 20


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_process(guest: Guest, seed: int) -> None:
    before = held(guest)
    server = guest.server_pid
    assert "done" in guest.check(f"python3 /tmp/hostile.py {seed} 4", 120)
    assert_same(guest, before)
    assert guest.server_alive
    assert guest.server_pid == server
    assert guest_errors(guest)
    assert_each_kind_is_logged_once(guest)
    pingpong(guest, guest, 4097, 50, "-e")


@pytest.mark.usefixtures("programs")
def test_others_notice_nothing(guest: Guest) -> None:
    """A program that works, checks every byte, and does so while the hostile one rings its doorbells."""
    before = held(guest)
    with guest.popen("for i in $(seq 100); do python3 /tmp/hostile.py $i 1; done") as hostile:
        hostile.wait_for("done", 120)
        for _ in range(2):
            rdma_check(guest, 1, 4097, 100_001)
        pingpong(guest, guest, 4097, 50, "-e")
        assert hostile.poll() is None
    assert_same(guest, before)
    assert_each_kind_is_logged_once(guest)


def test_the_kernel_complains_of_nothing(guest: Guest) -> None:
    assert complaints(guest) == []


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_root(guest: Guest, seed: int) -> None:
    """A driver that means harm instead of vmw_pvrdma, and then vmw_pvrdma again."""
    before = held(guest)
    commands = sum(status(guest)["device"]["commands"].values())
    guest.check("rmmod vmw_pvrdma")
    assert "done" in guest.check(f"python3 /tmp/hostile_root.py {seed} 3000", 120)
    assert guest.server_alive
    # It was no noise at the door: some of it were commands that the device carried out or refused.
    assert sum(status(guest)["device"]["commands"].values()) > commands + 100
    assert_each_kind_is_logged_once(guest)
    guest.check("modprobe vmw_pvrdma")
    wait_until(guest, "GIDs", lambda now: now["objects"] == before.objects)
    pingpong(guest, guest, 4097, 50, "-e")
    assert_same(guest, before)
    assert status(guest)["state"] == "active"

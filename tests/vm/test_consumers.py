"""The kernel's own users of the device, both ends in one guest: NVMe-oF, NFS, RDS; and why SMC-R is none of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pvrdma_lab import Guest
from vm.server_state import complaints, guest_errors, held, status, wait_until

SMP = 2
MEMORY_MIB = 1024
PROGRAMS = Path(__file__).parent / "programs"
SECOND_ADDRESS = "10.78.0.1"


@pytest.fixture(autouse=True)
def same_but_pooled_cqs(guest: Guest) -> Iterator[None]:
    """The server holds what it held before; only CQs of the kernel's pool stay until the driver goes."""
    before = held(guest)
    yield
    wanted = {name: count for name, count in before.objects.items() if name != "cqs"}
    wait_until(guest, "no object left", lambda now: wanted.items() <= now["objects"].items())
    assert held(guest).fds == before.fds


def run(guest: Guest, program: str, *arguments: str, timeout_s: float = 120.0) -> str:
    shell = "bash" if program.endswith(".sh") else "python3"
    guest.write_file(f"/tmp/{program}", (PROGRAMS / program).read_bytes())
    return guest.check(f"{shell} /tmp/{program} {' '.join(arguments)}", timeout_s)


def test_nvme(guest: Guest) -> None:
    output = run(guest, "nvme.sh", guest.ip)
    # An admin queue and two for data, each with its two ends here.
    assert "queue pairs: 6" in output
    assert "the same" in output
    assert complaints(guest) == []


def test_nfs(guest: Guest) -> None:
    output = run(guest, "nfs.sh", guest.ip)
    assert "proto=rdma" in output
    assert "the same" in output
    assert complaints(guest) == []


def test_rds(guest: Guest) -> None:
    guest.check(f"ip address add {SECOND_ADDRESS}/24 dev eth0; modprobe -a rds rds_rdma")
    assert "10 datagrams the same" in run(guest, "rds.py", guest.ip, SECOND_ADDRESS)
    log = guest.check("dmesg")
    guest.check(f"modprobe -r rds_rdma rds; ip address del {SECOND_ADDRESS}/24 dev eth0")
    # Not by the kernel's loopback: by a connection of the device, seen from both ends.
    assert "RDS/IB: Active conn connected" in log
    assert "RDS/IB: Passive conn connected" in log
    assert complaints(guest) == []


def test_smc_finds_no_device_for_an_address_of_its_own(guest: Guest) -> None:
    """SMC-R takes the device of the route's interface, and the route to an own address is the loopback's."""
    before = status(guest)["device"]["commands"].get("create_qp")
    guest.check("modprobe smc")
    assert "the same" in run(guest, "smc.py", guest.ip)
    guest.check("modprobe -r smc")
    assert status(guest)["device"]["commands"].get("create_qp") == before
    assert all("smc: " in line for line in complaints(guest))


def test_no_consumer_did_wrong(guest: Guest) -> None:
    assert guest_errors(guest) == {}
    assert status(guest)["device"]["events_dropped"] == 0


def test_the_driver_leaves_nothing(guest: Guest) -> None:
    """The last of the module."""
    before = held(guest).objects
    guest.check("rmmod vmw_pvrdma")
    assert not any(status(guest)["objects"].values())
    guest.check("modprobe vmw_pvrdma")
    wanted = {name: count for name, count in before.items() if name != "cqs"}
    wait_until(guest, "GIDs", lambda now: wanted.items() <= now["objects"].items())

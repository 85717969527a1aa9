"""The kernel's own users of the device, within a guest and between two: NVMe-oF, NFS, RDS."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pvrdma_lab import Lab
from vm.pairs import Ends, labs, pair
from vm.server_state import assert_no_errors, complaints, held, status, wait_until

pytestmark = labs("mapped", "two")

SMP = 2
MEMORY_MIB = 1024
PROGRAMS = Path(__file__).parent / "programs"
SECOND_ADDRESS = "10.78.0.1"


def holds(objects: dict[str, int]) -> Callable[[dict[str, Any]], bool]:
    """A condition on a server's status: these objects, and any CQs."""
    wanted = {name: count for name, count in objects.items() if name != "cqs"}
    return lambda now: wanted.items() <= now["objects"].items()


@pytest.fixture(autouse=True)
def same_but_pooled_cqs(lab: Lab) -> Iterator[None]:
    """The servers hold what they held before; only CQs of the kernel's pool stay until the driver goes."""
    before = {guest.name: held(guest) for guest in lab}
    yield
    for guest in lab:
        wait_until(guest, "no object left", holds(before[guest.name].objects))
        assert held(guest).fds == before[guest.name].fds


@pytest.fixture(autouse=True)
def scripts(lab: Lab) -> None:
    for guest in lab:
        for program in ("nfs.sh", "nvme.sh", "rds.py"):
            guest.write_file(f"/tmp/{program}", (PROGRAMS / program).read_bytes())


def assert_quiet(lab: Lab) -> None:
    for guest in lab:
        assert complaints(guest) == []


def sums(*outputs: str) -> set[str]:
    """What sha256sum printed in them."""
    return {found for output in outputs for found in re.findall(r"^[0-9a-f]{64}\b", output, re.M)}


def test_nvme(lab: Lab, ends: Ends) -> None:
    ends.server.check(f"bash /tmp/nvme.sh serve {ends.server.ip}")
    copied = ends.client.check(f"bash /tmp/nvme.sh copy {ends.server.ip}", 120)
    # An admin queue and one for data per CPU; each has two ends.
    assert f"queue pairs: {6 if ends.same else 2}" in copied
    on_disk = ends.server.check("bash /tmp/nvme.sh sum")
    ends.server.check("bash /tmp/nvme.sh end")
    assert len(sums(copied, on_disk)) == 1
    assert_quiet(lab)


def test_nfs(lab: Lab, ends: Ends) -> None:
    ends.server.check("bash /tmp/nfs.sh serve")
    copied = ends.client.check(f"bash /tmp/nfs.sh copy {ends.server.ip}", 120)
    assert "proto=rdma" in copied
    on_disk = ends.server.check("sha256sum /tmp/export/file")
    ends.server.check("bash /tmp/nfs.sh end")
    assert len(sums(copied, on_disk)) == 1
    assert_quiet(lab)


def test_rds(lab: Lab, ends: Ends) -> None:
    asking = SECOND_ADDRESS if ends.same else ends.client.ip
    ends.client.check(f"ip address replace {asking}/24 dev eth0")
    for guest in lab:
        guest.check("modprobe -a rds rds_rdma")
    echo, ask = f"echo {ends.server.ip}", f"ask {asking} {ends.server.ip}"
    listens = "test -e /tmp/rds.ready"
    asked = pair(ends, f"python3 /tmp/rds.py {echo}", f"python3 /tmp/rds.py {ask}", listens)[1]
    assert "10 datagrams the same" in asked
    logs = [guest.check("dmesg") for guest in ends]
    for guest in lab:
        guest.check("modprobe -r rds_rdma rds")
    if ends.same:
        ends.client.check(f"ip address del {asking}/24 dev eth0")
    # Not by the kernel's loopback, nor TCP: by a connection of the device, seen from both ends.
    assert "RDS/IB: Passive conn connected" in logs[0]
    assert "RDS/IB: Active conn connected" in logs[1]
    assert_quiet(lab)


def test_no_consumer_did_wrong(lab: Lab) -> None:
    for guest in lab:
        assert_no_errors(guest)


def test_the_driver_leaves_nothing(lab: Lab) -> None:
    """The last of the module."""
    for guest in lab:
        before = held(guest).objects
        guest.check("rmmod vmw_pvrdma")
        assert not any(status(guest)["objects"].values())
        guest.check("modprobe vmw_pvrdma")
        wait_until(guest, "GIDs", holds(before))

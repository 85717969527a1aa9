"""Capabilities are true: a program uses what is advertised up to the maximum, together. Limits are configuration."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pvrdma_lab import Guest, Lab
from vm.server_state import assert_same, complaints, guest_errors, held, status

PROGRAM = Path(__file__).parent / "programs" / "limits.py"
# A region costs the guest's kernel three pages: the default of 65536 needs a guest with more memory.
LIMITS = {"max_mr": 4096, "max_cq": 300, "gid_table_len": 3}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    words = [word for name, value in LIMITS.items() for word in ("--limit", f"{name}={value}")]
    with Lab(f"limits-{os.getpid()}", guests=1, server_args=words) as lab:
        lab["a"].write_file("/root/limits.py", PROGRAM.read_bytes())
        complaints(lab["a"])
        yield lab
    shutil.rmtree(lab.folder, ignore_errors=True)


def advertised(guest: Guest) -> dict[str, int]:
    fields = re.findall(r"^\s*(\w+):\s+(\d+)", guest.check("ibv_devinfo -v"), re.M)
    return {name: int(value) for name, value in fields}


def test_limits_are_configuration(guest: Guest) -> None:
    caps = advertised(guest)
    assert {name: caps[name] for name in ("max_mr", "max_cq")} == {"max_mr": 4096, "max_cq": 300}
    assert caps["gid_tbl_len"] == 3


def test_the_largest_queues_with_the_longest_lists(guest: Guest) -> None:
    before = held(guest)
    caps = advertised(guest)
    output = guest.check("python3 /root/limits.py vmw_pvrdma0 1 depths", 300)
    depth = caps["max_qp_wr"]
    assert output.splitlines() == [f"receives {depth}", f"sends {depth}", "done"]
    assert guest_errors(guest) == {}
    assert_same(guest, before)


def test_as_many_objects_as_advertised_all_at_once(guest: Guest) -> None:
    """The kernel's own count too: its QP1, its CQ, its protection domain, its region."""
    before = held(guest)
    caps = advertised(guest)
    with guest.popen("sleep 200 | python3 /root/limits.py vmw_pvrdma0 1 counts") as running:
        running.wait_for("^full", 200)
        objects = status(guest)["objects"]
        guest.check("pkill -x sleep")
        assert running.wait(200).ok
    for kind in ("qp", "cq", "srq", "pd", "mr"):
        assert objects[f"{kind}s"] == caps[f"max_{kind}"], kind
    assert_same(guest, before)


def test_more_addresses_than_gids(guest: Guest) -> None:
    """The kernel counts the table's places, so the device is not even asked; what is there still works."""
    guest.check("for i in 1 2 3 4; do ip address add 10.98.0.$i/32 dev eth0; done")
    assert len(status(guest)["gids"]) == 3
    guest.check("for i in 1 2 3 4; do ip address del 10.98.0.$i/32 dev eth0; done")
    assert len(status(guest)["gids"]) == 2

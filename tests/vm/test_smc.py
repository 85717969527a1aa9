"""SMC-R between two guests, and why it does not use the device. The last test leaves a guest that only ends.

See docs/conformance.md.
"""

from pathlib import Path

import pytest
from pvrdma_lab import Guest, Lab
from pvrdma_lab.programs import listens_on_port
from vm.pairs import Ends, labs, pair
from vm.server_state import assert_no_errors, complaints, status

pytestmark = labs("two")

PROGRAM = Path(__file__).parent / "programs" / "smc.py"
LISTENS = listens_on_port(5555)


@pytest.fixture
def echo(ends: Ends) -> str:
    """The command of a stream's server."""
    for guest in ends:
        guest.write_file("/tmp/smc.py", PROGRAM.read_bytes())
        guest.check("modprobe smc")
    return f"python3 /tmp/smc.py echo {ends.server.ip}"


@pytest.fixture
def ask(ends: Ends) -> str:
    """The command of its client."""
    return f"python3 /tmp/smc.py ask {ends.server.ip}"


def work(guest: Guest) -> tuple[int, int]:
    """Queue pairs made so far, and bytes sent."""
    now = status(guest)
    return int(now["device"]["commands"]["create_qp"]), int(now["backend"]["tx_bytes"])


def test_the_first_version_wants_another_gid(lab: Lab, ends: Ends, echo: str, ask: str) -> None:
    """SMC-R takes RoCE v1 GIDs only: it declines, and the stream goes over TCP."""
    before = [work(guest) for guest in lab]
    assert "the same" in pair(ends, echo, ask, LISTENS)[1]
    for guest in lab:
        guest.check("modprobe -r smc")
        assert all("smc: " in line for line in complaints(guest))
    assert [work(guest) for guest in lab] == before


def test_the_second_is_stopped_by_the_driver(lab: Lab, ends: Ends, echo: str, ask: str) -> None:
    """SMC-Rv2 finds the device, and asks a queue pair that it has just made for its sizes.

    The driver answers for a queue pair in RESET by itself, and says 0; so SMC fills in none of its work requests. What
    should be its first SEND goes out as zeros: a WRITE of nothing that wants no completion. SMC waits for one for ever.
    """
    for guest in lab:
        guest.check("python3 /tmp/smc.py eid PVRDMA")
    before = [work(guest) for guest in lab]
    with ends.server.popen(echo, 60) as server:
        ends.server.check(f"until {LISTENS}; do sleep 0.1; done")
        asked = ends.client.run(ask, 60)
        assert "TimeoutError" in server.wait(60).stderr
    assert "TimeoutError" in asked.stderr
    assert [work(guest) for guest in lab] == [(made + 1, sent) for made, sent in before]
    for guest in lab:
        assert_no_errors(guest)

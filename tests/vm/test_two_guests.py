"""Two guests with a server each, over the shared-memory fabric: who owns a GID, and ends that vanish in mid-traffic.

What runs between two guests is in test_programs.py, test_libraries.py and test_consumers.py.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pvrdma_lab import Guest, Lab
from pvrdma_lab.agent_client import Running
from pvrdma_lab.programs import GID_INDEX, PORT, listens_on_port, pingpong, rping
from vm.pairs import labs
from vm.server_state import assert_same, complaints, guest_errors, held, status, wait_until

pytestmark = labs("two")

# Far longer than perftest's retries take: 8 times 67 ms.
PATIENCE_S = 30.0


@pytest.fixture
def a(lab: Lab) -> Guest:
    return lab["a"]


@pytest.fixture
def b(lab: Lab) -> Guest:
    return lab["b"]


def peers(guest: Guest) -> list[str]:
    return [peer["state"] for peer in status(guest)["fabric"]["peers"]]


def works(a: Guest, b: Guest) -> None:
    """Both directions, with verbs and with the connection manager."""
    pingpong(a, b, 4097, 50, "-e")
    rping(b, a, 1000, 5)


def test_a_gid_has_one_owner(a: Guest, b: Guest) -> None:
    """Both take one address: b's server says who holds the GID, and b's kernel that it did not get it."""
    before = held(a), held(b)
    a.check("ip address add 10.99.0.9/24 dev eth0")
    wait_until(a, "a third GID", lambda now: len(now["gids"]) == 3)
    b.check("ip address add 10.99.0.9/24 dev eth0")
    assert len(status(b)["gids"]) == 2
    assert any(f"is held by {a.folder.parent.name}-a" in str(e) for e in b.server_events())
    assert any("could not" in line or "fail" in line for line in complaints(b))
    for guest in (a, b):
        guest.check("ip address del 10.99.0.9/24 dev eth0")
    assert_same(a, before[0])
    assert_same(b, before[1])
    works(a, b)


WRITES = f"ib_write_bw -F -x {GID_INDEX} -s 65536 --run_infinitely -D 1"
PINGPONG = f"ibv_rc_pingpong -e -g {GID_INDEX} -s 65536 -n 100000000"


def moves(guest: Guest) -> None:
    """Returns once messages leave."""
    start = status(guest)["backend"]["tx_messages"]
    wait_until(guest, "traffic", lambda now: now["backend"]["tx_messages"] > start + 50)


@contextmanager
def traffic(a: Guest, b: Guest, words: str = WRITES) -> Iterator[Running]:
    """A program on each side that goes on for ever; traffic moves when the block begins. Yields a's.

    WRITES always has something outstanding, so its peer's end shows as a completion; PINGPONG may just be waiting for
    a message that never comes, on this device as on any.
    """
    with b.popen(words) as server:
        # ibv_rc_pingpong prints its address before it listens.
        b.check(f"until {listens_on_port(PORT)}; do sleep 0.1; done", PATIENCE_S)
        assert server.poll() is None
        with a.popen(f"{words} {b.ip}") as client:
            moves(a)
            yield client


def failed_by_timeout(client: Running) -> None:
    done = client.wait(PATIENCE_S)
    assert done.status != 0
    assert "Failed status 12" in done.stdout + done.stderr, done


def send(guest: Guest, number: signal.Signals) -> None:
    assert guest.server_pid is not None
    os.kill(guest.server_pid, number)


def test_a_stopped_server(a: Guest, b: Guest) -> None:
    """SIGSTOP longer than the retries: error completions on the other side; SIGCONT: all is well without a restart."""
    before = held(a)
    with traffic(a, b) as client:
        send(b, signal.SIGSTOP)
        try:
            failed_by_timeout(client)
        finally:
            send(b, signal.SIGCONT)
    assert_same(a, before)
    works(a, b)


@contextmanager
def stopped_qemu(guest: Guest) -> Iterator[None]:
    assert guest.qemu_pid is not None
    os.kill(guest.qemu_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(guest.qemu_pid, signal.SIGCONT)


def test_a_stopped_qemu_delays(a: Guest, b: Guest) -> None:
    """A guest that does not run posts no receives: its peer waits (RNR), and nothing is lost when it goes on."""
    with traffic(a, b, PINGPONG) as client:
        with stopped_qemu(b):
            time.sleep(1.0)
        moves(a)
        assert client.poll() is None
    works(a, b)


def test_a_stopped_qemu_takes_writes(a: Guest, b: Guest) -> None:
    """Its memory is there, as that of a machine whose CPU has stopped: WRITEs need nobody there."""
    with traffic(a, b) as client:
        with stopped_qemu(b):
            moves(a)
        assert client.poll() is None
    works(a, b)


def test_a_killed_server(a: Guest, b: Guest) -> None:
    with traffic(a, b) as client:
        b.kill_server()
        failed_by_timeout(client)
        wait_until(a, "no peer", lambda now: now["fabric"]["peers"] == [])
    b.stop_qemu()
    b.start_server()
    b.start_qemu()
    b.wait_ready()
    works(a, b)
    assert peers(a) == ["up"]


def test_a_killed_qemu(a: Guest, b: Guest) -> None:
    before = held(a)
    with traffic(a, b) as client:
        b.kill_qemu()
        failed_by_timeout(client)
    assert_same(a, before)
    b.start_qemu()
    b.wait_ready()
    works(a, b)
    assert_same(a, before)


def test_no_server_complains(lab: Lab) -> None:
    for guest in lab:
        assert guest_errors(guest) == {}

"""Two guests with a server each, over the shared-memory fabric: programs, storage, and ends that vanish in mid-traffic.

The tests share two guests and run in file order; from `test_a_stopped_server` on they end processes under traffic.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pvrdma_lab import Guest, Lab
from pvrdma_lab.agent_client import Running
from pvrdma_lab.programs import GID_INDEX, perftest, pingpong, rping, run_pair
from pvrdma_lab.storage import nvme_copy
from vm.server_state import assert_same, complaints, guest_errors, held, status, wait_until

MIB = 1 << 20
# Far longer than perftest's retries take: 8 times 67 ms.
PATIENCE_S = 30.0
_LISTENS = "rdma resource show cm_id | grep -q LISTEN"


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    failed_before = request.session.testsfailed
    with Lab(f"two-{os.getpid()}", guests=2) as lab:
        for guest in lab:
            complaints(guest)
        # Servers meet at the first message; what a link holds is no leak.
        pingpong(lab["a"], lab["b"], 64, 1)
        yield lab
    if request.session.testsfailed == failed_before:
        shutil.rmtree(lab.folder)


@pytest.fixture
def a(lab: Lab) -> Guest:
    return lab["a"]


@pytest.fixture
def b(lab: Lab) -> Guest:
    return lab["b"]


@pytest.fixture
def guest(lab: Lab) -> Guest:
    return lab["a"]


@pytest.fixture
def settled(lab: Lab) -> Iterator[None]:
    """After the test both servers hold what they held before, and no kernel has complained."""
    before = {guest.name: held(guest) for guest in lab}
    yield
    for guest in lab:
        assert_same(guest, before[guest.name])
        assert complaints(guest) == []


def peers(guest: Guest) -> list[str]:
    return [peer["state"] for peer in status(guest)["fabric"]["peers"]]


def works(a: Guest, b: Guest) -> None:
    """Both directions, with verbs and with the connection manager."""
    pingpong(a, b, 4097, 50, "-e")
    rping(b, a, 1000, 5)


# -- programs -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("size_bytes", [1, 4096, 100_001, 8 * MIB])
def test_pingpong(a: Guest, b: Guest, size_bytes: int) -> None:
    pingpong(a, b, size_bytes, 20, "-e")


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("program", ["ibv_rc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong"])
@pytest.mark.parametrize("options", ["", "-e"])
def test_pingpongs(a: Guest, b: Guest, program: str, options: str) -> None:
    pingpong(b, a, 2048, 100, options, program=program)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw", "ib_send_bw"])
@pytest.mark.parametrize("size_bytes", [2, 4096, MIB])
def test_bandwidth(a: Guest, b: Guest, program: str, size_bytes: int) -> None:
    perftest(a, b, program, size_bytes, 200)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("options", ["-b", "-t 1", "-e"])
def test_bandwidth_options(a: Guest, b: Guest, options: str) -> None:
    perftest(a, b, "ib_send_bw", 65_536, 100, options)


@pytest.mark.usefixtures("settled")
def test_bandwidth_over_rdma_cm(a: Guest, b: Guest) -> None:
    words = "ib_send_bw -F -R -e -n 100 -s 4096"
    with a.popen(words, 90) as server:
        server.wait_for("Waiting for client")
        b.check(f"{words} {a.ip}", 90)
        assert server.wait(90).ok


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("program", ["ib_write_lat", "ib_read_lat", "ib_send_lat", "ib_atomic_lat"])
def test_latency(a: Guest, b: Guest, program: str) -> None:
    assert (perftest(a, b, program, 8, 50).usec or 0) > 0


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kind", ["FETCH_AND_ADD", "CMP_AND_SWAP"])
def test_atomics(a: Guest, b: Guest, kind: str) -> None:
    perftest(a, b, "ib_atomic_bw", 8, 200, f"-A {kind}")


@pytest.mark.usefixtures("settled")
def test_rping_both_ways(a: Guest, b: Guest) -> None:
    rping(a, b, 4096, 20)
    rping(b, a, 65_535, 20)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("program", ["ucmatose", "udaddy"])
def test_connection_manager_programs(a: Guest, b: Guest, program: str) -> None:
    words = f"{program} -c 3 -C 10"
    for output in run_pair(program, a, b, (words, f"{words} -s {a.ip}"), _LISTENS, 60):
        assert "return status 0" in output


def test_nvme_over_fabrics(a: Guest, b: Guest) -> None:
    nvme_copy(a, b, 16)


def test_no_program_did_wrong(lab: Lab) -> None:
    for guest in lab:
        assert guest_errors(guest) == {}
        now = status(guest)
        assert now["backend"]["bad_message"] == now["backend"]["wrong_peer"] == 0
        assert [peer["lost_messages"] for peer in now["fabric"]["peers"]] == [0]


# -- ends that vanish -----------------------------------------------------------------------------


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


@contextmanager
def traffic(a: Guest, b: Guest, words: str = WRITES) -> Iterator[Running]:
    """A program on each side that goes on for ever; traffic moves when the block begins. Yields a's.

    WRITES always has something outstanding, so its peer's end shows as a completion; PINGPONG may just be waiting for
    a message that never comes, on this device as on any.
    """
    start = status(a)["backend"]["tx_messages"]
    with b.popen(words) as server:
        server.wait_for("local address|Waiting for client")
        with a.popen(f"{words} {b.ip}") as client:
            wait_until(a, "traffic", lambda now: now["backend"]["tx_messages"] > start + 50)
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


def test_a_stopped_qemu_delays(a: Guest, b: Guest) -> None:
    """A guest that does not run posts no receives: its peer waits (RNR), and nothing is lost when it goes on."""
    assert b.qemu_pid is not None
    with traffic(a, b, PINGPONG) as client:
        os.kill(b.qemu_pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(b.qemu_pid, signal.SIGCONT)
        start = status(a)["backend"]["tx_messages"]
        wait_until(a, "traffic", lambda now: now["backend"]["tx_messages"] > start + 50)
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

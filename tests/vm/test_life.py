"""What a guest goes through: driver reloads, link down and up, killed programs, reboots, a killed QEMU, SIGTERM.

The tests share one guest and run in file order; the last two end its QEMU and its server.
"""

import os
import signal
import time

import pytest
from pvrdma_lab import Guest
from pvrdma_lab.agent_client import Running
from pvrdma_lab.programs import GID_INDEX, perftest, pingpong, rdma_check, rping
from vm.server_state import (
    assert_same,
    complaints,
    guest_errors,
    held,
    status,
    wait_until,
    warnings,
)

RELOADS = 10


def works(guest: Guest) -> None:
    """One program of each kind: verbs and the connection manager."""
    pingpong(guest, guest, 4097, 50, "-e")
    rping(guest, guest, 1000, 5)


@pytest.mark.usefixtures("settled")
def test_works_after_boot(guest: Guest) -> None:
    works(guest)


@pytest.mark.usefixtures("settled")
def test_driver_reloads(guest: Guest) -> None:
    before = held(guest)
    resets = status(guest)["device"]["resets"]
    for _ in range(RELOADS):
        guest.check("rmmod vmw_pvrdma")
        unloaded = status(guest)
        assert not any(unloaded["objects"].values()), unloaded["objects"]
        assert unloaded["state"] == "reset"
        guest.check("modprobe vmw_pvrdma")
        # GIDs come a moment after the device.
        wait_until(guest, "GIDs", lambda now: now["objects"] == before.objects)
    assert status(guest)["device"]["resets"] >= resets + RELOADS
    assert_same(guest, before)
    works(guest)


@pytest.mark.usefixtures("settled")
def test_link_goes_down_and_comes_up(guest: Guest) -> None:
    before = held(guest)
    with guest.popen("ibv_asyncwatch") as watch:
        watch.wait_for("vmw_pvrdma0: async event FD")
        guest.check("ip link set eth0 down")
        watch.wait_for("port error|PORT_ERR")
        guest.check("ip link set eth0 up")
        watch.wait_for("port active|PORT_ACTIVE")
    assert_same(guest, before)
    works(guest)


@pytest.mark.usefixtures("settled")
def test_link_goes_down_during_traffic(guest: Guest) -> None:
    with traffic(guest) as running:
        guest.check("ip link set eth0 down; ip link set eth0 up")
        moving(guest)
        assert running.poll() is None
    works(guest)


def traffic(guest: Guest) -> Running:
    """Two processes that send for ever, one agent command; killing it sends SIGKILL to both."""
    words = f"ibv_rc_pingpong -e -g {GID_INDEX} -s 16384 -n 100000000 -p 18600"
    port = f"{18600:04X}"
    running = guest.popen(
        f"{words} & until grep -qs ':{port} [0-9A-F:]* 0A ' /proc/net/tcp*; do sleep 0.05; done; {words} {guest.ip}"
    )
    moving(guest)
    return running


def moving(guest: Guest) -> None:
    """Returns once traffic moves: two processes, and their completion events reach the guest."""
    start = status(guest)["device"]["interrupts"]
    wait_until(
        guest,
        "traffic of two processes",
        lambda now: now["objects"]["contexts"] >= 2 and now["device"]["interrupts"] > start + 20,
    )


@pytest.mark.usefixtures("settled")
def test_programs_killed_in_mid_traffic_leave_nothing(guest: Guest) -> None:
    before = held(guest)
    for _ in range(3):
        with traffic(guest):
            assert held(guest).objects != before.objects
        assert_same(guest, before)
    works(guest)


@pytest.mark.usefixtures("settled")
def test_one_end_killed_fails_the_other_end_only(guest: Guest) -> None:
    words = f"ib_write_bw -F -x {GID_INDEX} -s 65536 --run_infinitely -D 2"
    before = status(guest)["objects"]["qps"]
    with guest.popen(words) as server:
        server.wait_for("Waiting for client")
        with guest.popen(f"{words} {guest.ip}") as client:
            wait_until(guest, "two queue pairs", lambda now: now["objects"]["qps"] == before + 2)
            client.wait_for("#bytes")
            guest.check("pkill -9 -f 'ib_write_bw.*run_infinitely.*2$'")
            assert server.wait(60).status != 0
            # WRITE to a queue pair that is gone: an error completion, or the TCP side's end; never silence.
            assert client.wait(60).status != 0
    works(guest)


@pytest.mark.usefixtures("settled")
def test_unload_is_refused_while_a_program_runs(guest: Guest) -> None:
    with traffic(guest):
        assert guest.run("rmmod vmw_pvrdma").status != 0
        moving(guest)


def test_reboot(guest: Guest) -> None:
    before = held(guest)
    for _ in range(2):
        guest.reboot()
        assert_same(guest, before)
        assert complaints(guest) == []
    works(guest)
    assert_same(guest, before)


def test_reboot_in_mid_traffic(guest: Guest) -> None:
    before = held(guest)
    with traffic(guest):
        guest.reboot()
    assert_same(guest, before)
    works(guest)
    assert complaints(guest) == []


def test_reset_by_qemu(guest: Guest) -> None:
    """No driver says good-bye: the machine's reset button, in mid-traffic."""
    before = held(guest)
    with traffic(guest):
        guest.reset()
    assert_same(guest, before)
    works(guest)


def test_killed_qemu_leaves_a_server_that_serves_the_next(guest: Guest) -> None:
    before = held(guest)
    server = guest.server_pid
    with traffic(guest):
        guest.kill_qemu()
    gone = wait_until(guest, "client gone", lambda now: not now["connected"])
    assert not any(gone["objects"].values()), gone["objects"]
    assert (gone["dma_regions"], gone["state"]) == (0, "reset")
    guest.start_qemu()
    guest.wait_ready()
    assert_same(guest, before)
    rdma_check(guest)
    works(guest)
    perftest(guest, guest, "ib_write_bw", 65_536)
    assert guest.server_pid == server
    assert status(guest)["vfio_user"]["attaches"] == 2
    assert_same(guest, before)


def test_no_guest_error_and_no_warning_in_all_this(guest: Guest) -> None:
    assert guest_errors(guest) == {}
    assert warnings(guest) == []


def test_sigterm_stops_the_server_cleanly(guest: Guest) -> None:
    """With QEMU attached and traffic moving; the processes are ours, so we reap the server and see its status."""
    with traffic(guest):
        pid = guest.server_pid
        assert pid is not None
        started = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    assert time.monotonic() - started < 10
    assert not (guest.folder / "vfio.sock").exists()
    assert not guest.status_socket.exists()
    assert guest.server_events()[-1]["event"] == "stopped"
    assert guest.qemu_alive

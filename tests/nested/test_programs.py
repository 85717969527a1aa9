"""A real guest on the real server on rxe, and the rxe host's own programs: each as client and as server."""

import time
from pathlib import Path
from typing import Any

import pytest
from host_peer import PEER_DEVICE, PEER_GID_INDEX, in_peer
from host_server import HostServer
from nested_guest import FORWARDED_PORT, GUEST_TCP, PEER_TCP, RDMA_ADDRESS, NestedGuest

pytestmark = [pytest.mark.nested, pytest.mark.timeout(400)]
GUEST_DEVICE = "vmw_pvrdma0"
GUEST_GID_INDEX = "1"
LISTEN_S = 60.0
PINGPONG = "-n 50 -s 1024"
# The data of a bandwidth test is small: it runs on a processor emulated twice.
PERFTEST = "-F -n 40 -s 4096"


class Program:
    """One program and its words on both sides; `index` is its option for the GID."""

    def __init__(self, name: str, words: str, index: str) -> None:
        self.name = name
        self.words = words
        self.index = index

    def guest(self) -> str:
        return f"{self.name} -d {GUEST_DEVICE} {self.index} {GUEST_GID_INDEX} -p {FORWARDED_PORT} {self.words}"

    def peer(self) -> str:
        return f"{self.name} -d {PEER_DEVICE} {self.index} {PEER_GID_INDEX} -p {FORWARDED_PORT} {self.words}"


PROGRAMS = [
    Program("ibv_rc_pingpong", f"{PINGPONG} -c", "-g"),
    Program("ibv_ud_pingpong", PINGPONG, "-g"),
    Program("ibv_srq_pingpong", f"{PINGPONG} -q 4", "-g"),
    Program("ib_write_bw", PERFTEST, "-x"),
    Program("ib_read_bw", PERFTEST, "-x"),
    Program("ib_atomic_lat", "-F -n 40", "-x"),
]


def test_device(guest: NestedGuest) -> None:
    done = guest.run("ibv_devinfo -v")
    assert done.status == 0, guest.error(done.output)
    assert "PORT_ACTIVE" in done.output
    assert f"::ffff:{RDMA_ADDRESS}" in done.output, done.output


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_guest_is_client(guest: NestedGuest, server: HostServer, program: Program) -> None:
    peer = in_peer(program.peer().split())
    wait_for_listener()
    done = guest.run(f"{program.guest()} {PEER_TCP}")
    output, _ = peer.communicate(timeout=30)
    assert (done.status, peer.returncode) == (0, 0), report(done, output, server)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_guest_is_server(guest: NestedGuest, server: HostServer, program: Program) -> None:
    guest.run("rm -f /tmp/status")
    guest.run(f"sh -c '(timeout 90 {program.guest()} >/tmp/log 2>&1; echo $? >/tmp/status) &'")
    guest.wait_until(f"netstat -ltn | grep -q :{FORWARDED_PORT}", LISTEN_S)
    peer = in_peer([*program.peer().split(), GUEST_TCP])
    output, _ = peer.communicate(timeout=90)
    guest.wait_until("test -e /tmp/status", LISTEN_S)
    done = guest.run("sh -c 'cat /tmp/log; exit $(cat /tmp/status)'")
    assert (done.status, peer.returncode) == (0, 0), report(done, output, server)


def wait_for_listener() -> None:
    """Until somebody in the peer's namespace listens on the programs' port."""
    deadline = time.monotonic() + LISTEN_S
    wanted = f":{FORWARDED_PORT} "
    while wanted not in in_peer(["ss", "-Hltn"]).communicate()[0]:
        assert time.monotonic() < deadline, "the peer's program does not listen"
        time.sleep(0.1)


def report(done: Any, output: str, server: HostServer) -> str:
    log = "\n".join(Path(server.log).read_text().splitlines()[-15:])
    return f"guest: {done}\npeer: {output}\nserver: {log}"

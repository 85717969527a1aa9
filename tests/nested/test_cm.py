"""rdma_cm's programs between a real guest and bare metal, through the MAD hub: each as client and as server."""

import time
from typing import Any, NamedTuple

import pytest
from host_peer import PEER_ADDRESS, PEER_DEVICE, ended, in_peer
from host_server import HostServer
from hub_process import HubProcess, cm_ids
from nested_guest import RDMA_ADDRESS, NestedGuest

pytestmark = [pytest.mark.nested, pytest.mark.timeout(600)]
LISTEN_S = 90.0
RUN_S = 180


class Program(NamedTuple):
    """A program's words: as server at `here`, as client from `here` to `there`."""

    name: str
    server: str
    client: str

    def serve(self, here: str) -> str:
        return f"{self.name} {self.server.format(here=here)}"

    def connect(self, here: str, there: str) -> str:
        return f"{self.name} {self.client.format(here=here, there=there)}"


PROGRAMS = [
    # Five pings of 100 bytes, each validated: SEND, READ and WRITE. A server has 64 bytes unless it is told.
    Program("rping", "-s -a {here} -C 5 -S 100 -V", "-c -I {here} -a {there} -C 5 -S 100 -V"),
    Program("ucmatose", "-b {here}", "-b {here} -s {there}"),
    Program("ucmatose", "-b {here} -c 20 -C 0", "-b {here} -s {there} -c 20 -C 0"),
    Program("udaddy", "-b {here}", "-b {here} -s {there}"),
]
NAMES = ["rping", "ucmatose", "ucmatose_20", "udaddy"]


def until_bare_metal_listens(process: Any) -> None:
    deadline = time.monotonic() + LISTEN_S
    while not any(entry["state"] == "LISTEN" for entry in cm_ids(PEER_DEVICE)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "bare metal does not listen"
        time.sleep(0.1)


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_guest_is_client(
    guest: NestedGuest, server: HostServer, hub: HubProcess, program: Program
) -> None:
    with ended(in_peer(program.serve(PEER_ADDRESS).split())) as peer:
        until_bare_metal_listens(peer)
        done = guest.run(program.connect(RDMA_ADDRESS, PEER_ADDRESS), RUN_S)
        output, _ = peer.communicate(timeout=RUN_S)
    assert (done.status, peer.returncode) == (0, 0), report(done, output, server, hub)
    nothing_stays(hub)


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_guest_is_server(
    guest: NestedGuest, server: HostServer, hub: HubProcess, program: Program
) -> None:
    guest.run("rm -f /tmp/status")
    serve = f"timeout {RUN_S} {program.serve(RDMA_ADDRESS)}"
    guest.run(f"sh -c '({serve} >/tmp/log 2>&1; echo $? >/tmp/status) &'")
    guest.wait_until("rdma resource show cm_id | grep -q LISTEN", LISTEN_S)
    with ended(in_peer(program.connect(PEER_ADDRESS, RDMA_ADDRESS).split())) as peer:
        output, _ = peer.communicate(timeout=RUN_S)
    guest.wait_until("test -e /tmp/status", RUN_S)
    done = guest.run("sh -c 'cat /tmp/log; exit $(cat /tmp/status)'")
    assert (done.status, peer.returncode) == (0, 0), report(done, output, server, hub)
    nothing_stays(hub)


def nothing_stays(hub: HubProcess) -> None:
    """Neither the hub nor bare metal has a connection left."""
    hub.wait_for("idle", lambda now: not any(c["connections"] for c in now["clients"]))
    deadline = time.monotonic() + LISTEN_S
    while left := cm_ids(PEER_DEVICE):
        assert time.monotonic() < deadline, f"bare metal still has {left}"
        time.sleep(0.1)


def report(done: Any, output: str, server: HostServer, hub: HubProcess) -> str:
    logs = [path.read_text()[-2000:] for path in (server.log, hub.log)]
    return f"guest: {done}\npeer: {output}\nserver: {logs[0]}\nhub: {logs[1]}"

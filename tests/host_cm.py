"""A guest in Python whose connection manager talks to rdma_cm's own programs on bare metal, in the rxe host."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guest import Kernel, Qp, UserProcess
from guest_cm import CmAgent, Connection, accept, connect
from host_peer import PEER_ADDRESS, PEER_DEVICE, ended, in_peer, v4_gid
from host_server import HostServer
from hub_process import HubProcess, cm_ids

from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus

OK = int(WcStatus.SUCCESS)
ADDRESSES = ("10.9.0.121", "10.9.0.122")
UCMATOSE_PORT = 7471
# What the programs send: so many messages of such length, both ways.
MESSAGES, LENGTH = 10, 100
END_S = 90.0


def make_server(folder: Path, hub: HubProcess, address: str) -> HostServer:
    """A server on rxe0 that is not started yet; the hub calls it by its address."""
    return HostServer(folder, "rxe0", address, more=("--mad-hub", hub.socket, "--name", address))


class Guest:
    """A guest with its driver loaded, its GID, and its connection manager, whose ids start as every guest's do."""

    def __init__(self, server: HostServer, first_id: int = 1) -> None:
        self.server = server
        self.gid: bytes = server.gid
        self.bus = server.connect()
        self.driver = self.bus.boot()
        self.kernel = Kernel(self.driver)
        self.kernel.add_gid(self.gid)
        self.agent = CmAgent(self.kernel, self.gid, first_id=first_id)
        self.process = UserProcess(self.driver)

    def relay(self) -> dict[str, Any]:
        relay: dict[str, Any] = self.server.status()["mad_relay"]
        return relay

    def close(self) -> None:
        self.bus.close()


@contextmanager
def booted(server: HostServer) -> Iterator[Guest]:
    guest = Guest(server)
    try:
        yield guest
    finally:
        guest.close()


class Program:
    """A program of rdmacm-utils on bare metal."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def finish(self) -> str:
        output, _ = self.process.communicate(timeout=END_S)
        assert self.process.returncode == 0, output
        return output


@contextmanager
def bare_metal(words: str, *, listens: bool = False) -> Iterator[Program]:
    """A running program; a server is waited for until it listens."""
    with ended(in_peer(words.split())) as process:
        deadline = time.monotonic() + END_S
        while listens and not any(entry["state"] == "LISTEN" for entry in cm_ids(PEER_DEVICE)):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"{words} does not listen"
            time.sleep(0.05)
        yield Program(process)


def ucmatose(more: str = "", address: str = PEER_ADDRESS) -> str:
    return f"ucmatose -b {address} {more}"


def exchange(connection: Connection, buffer: Any, *, first: bool) -> None:
    """The game of ucmatose: the server sends, then the client."""
    qp = connection.qp

    def send() -> None:
        for number in range(MESSAGES):
            qp.send(buffer.sge(), wr_id=number)
        assert {wc.status for wc in qp.send_cq.wait(MESSAGES)} == {OK}

    if first:
        send()
    received = qp.recv_cq.wait(MESSAGES)
    assert [(wc.status, wc.byte_len) for wc in received] == [(OK, LENGTH)] * MESSAGES
    if not first:
        send()


def rc_qp(guest: Guest) -> tuple[Qp, Any]:
    """A queue pair with the program's receives posted, and its memory."""
    buffer = guest.process.mr(LENGTH)
    qp = Qp(guest.process, recv_cq=guest.process.cq())
    qp.to_init()
    for number in range(MESSAGES):
        qp.post_recv(buffer.sge(), wr_id=number)
    return qp, buffer


def connects(guest: Guest, check: Callable[[], bool], address: str = PEER_ADDRESS) -> None:
    """The guest is ucmatose's client; `check` holds while it is connected."""
    with bare_metal(ucmatose(address=address), listens=True) as program:
        qp, buffer = rc_qp(guest)
        connection = connect(guest.agent, qp, v4_gid(address), UCMATOSE_PORT)
        assert check()
        exchange(connection, buffer, first=False)
        connection.await_disconnect()
        program.finish()


def is_connected_to(guest: Guest, address: str = PEER_ADDRESS) -> None:
    """The guest is ucmatose's server."""
    with bare_metal(ucmatose(f"-s {guest.server.address}", address)) as program:
        qp, buffer = rc_qp(guest)
        connection = accept(guest.agent, qp, UCMATOSE_PORT).finish()
        exchange(connection, buffer, first=True)
        connection.disconnect()
        program.finish()

"""perftest of the rxe host against the guest, which speaks its TCP handshake: as client and as server."""

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
from guest import Kernel, Qp, Remote, UserProcess
from host_peer import PEER_ADDRESS, PEER_DEVICE, PEER_GID_INDEX, connect_tcp, ended, in_peer, v4_gid
from perftest_peer import BUFFER_BYTES, Conversation, Keys

from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus

pytestmark = pytest.mark.host
OK = int(WcStatus.SUCCESS)
COUNT, SIZE = 60, BUFFER_BYTES
QUEUE = 16
PSN = 0x4321
CLIENT_PORT, SERVER_PORT = 18520, 18521
PROGRAM_S = 60.0


class Guest(NamedTuple):
    """A guest's half of a test: a queue pair, its memory, and how it is to be found."""

    qp: Qp
    memory: Any
    me: Keys

    def connect(self, peer: Keys) -> None:
        self.qp.to_init()
        self.qp.to_rtr(dest_qpn=peer.qpn, dgid=v4_gid(PEER_ADDRESS), rq_psn=peer.psn, path_mtu=5)
        self.qp.to_rts(sq_psn=PSN)


@pytest.fixture
def guest(server: Any) -> Iterator[Guest]:
    bus = server.connect()
    kernel = Kernel(bus.boot())
    kernel.add_gid(server.gid)
    process = UserProcess(kernel.driver)
    qp, memory = Qp(process, max_wr=QUEUE), process.mr(2 * SIZE)
    yield Guest(qp, memory, Keys(4, qp.qpn, PSN, memory.rkey, memory.addr, server.gid))
    bus.close()


@contextmanager
def talking(program: str, *, guest_is_client: bool) -> Iterator[Conversation]:
    """The program, started, and the conversation with it. It must end well, and have moved what was asked."""
    words = [
        program, "-d", PEER_DEVICE, "-x", PEER_GID_INDEX, "-F", "-n", str(COUNT), "-s", str(SIZE),
    ]  # fmt: skip
    with ExitStack() as stack:
        if guest_is_client:
            running = stack.enter_context(ended(in_peer([*words, "-p", str(CLIENT_PORT)])))
            sock = stack.enter_context(connect_tcp(CLIENT_PORT))
        else:
            listener = stack.enter_context(socket.create_server(("10.9.0.1", SERVER_PORT)))
            listener.settimeout(PROGRAM_S)
            argv = [*words, "-p", str(SERVER_PORT), "10.9.0.1"]
            running = stack.enter_context(ended(in_peer(argv)))
            sock = stack.enter_context(listener.accept()[0])
        sock.settimeout(PROGRAM_S)
        talk = Conversation(sock, first=guest_is_client)
        talk.greet()
        try:
            yield talk
        except (OSError, AssertionError) as e:
            running.kill()
            raise AssertionError(f"{e}; the program says: {running.communicate()[0]}") from e
        output, _ = running.communicate(timeout=PROGRAM_S)
        assert running.returncode == 0, output
        assert re.search(rf"^\s*{SIZE}\s+{COUNT}\s", output, re.MULTILINE), output


def work(guest: Guest, post: Any) -> None:
    """Call `post(number)` COUNT times, the queue kept full; every completion must be a success, in order."""
    posted = done = 0
    while done < COUNT:
        while posted < COUNT and posted - done < QUEUE:
            post(posted)
            posted += 1
        for wc in guest.qp.send_cq.wait(1):
            assert (wc.status, wc.wr_id) == (OK, done)
            done += 1


@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw"])
def test_guest_is_client(guest: Guest, program: str) -> None:
    guest.memory.write(b"guest" * 100)
    with talking(program, guest_is_client=True) as talk:
        peer = talk.keys(guest.me)
        guest.connect(peer)
        talk.keys(guest.me)
        talk.keys(guest.me)
        there = Remote(peer.addr, peer.rkey)
        local = guest.memory.sge(0, SIZE)
        if program == "ib_write_bw":
            work(guest, lambda number: guest.qp.write(local, to=there, wr_id=number))
        else:
            work(guest, lambda number: guest.qp.read(local, frm=there, wr_id=number))
        talk.keys(guest.me)
        talk.report(SIZE, COUNT)
        talk.keys(guest.me)
    if program == "ib_read_bw":
        assert guest.memory.read(0, SIZE).count(0) < SIZE // 2, "the program's data is random"


@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw"])
def test_guest_is_server(guest: Guest, program: str) -> None:
    with talking(program, guest_is_client=False) as talk:
        guest.connect(talk.keys(guest.me))
        for _ in range(2):
            talk.keys(guest.me)
        talk.keys(guest.me)
        talk.report(SIZE, COUNT)
        talk.keys(guest.me)
    if program == "ib_write_bw":
        assert guest.memory.read(0, SIZE).count(0) < SIZE // 2, "the program's data is random"


def test_send_to_program(guest: Guest) -> None:
    with talking("ib_send_bw", guest_is_client=True) as talk:
        guest.connect(talk.keys(guest.me))
        for _ in range(3):
            talk.keys(guest.me)
        work(guest, lambda number: guest.qp.send(guest.memory.sge(0, SIZE), wr_id=number))
        talk.keys(guest.me)


def test_send_from_program(guest: Guest) -> None:
    qp, into = guest.qp, guest.memory.sge(0, SIZE)
    with talking("ib_send_bw", guest_is_client=False) as talk:
        guest.connect(talk.keys(guest.me))
        for number in range(QUEUE):
            qp.post_recv(into, wr_id=number)
        for _ in range(3):
            talk.keys(guest.me)
        taken = 0
        while taken < COUNT:
            for wc in qp.recv_cq.wait(1):
                assert (wc.status, wc.wr_id, wc.byte_len) == (OK, taken, SIZE)
                qp.post_recv(into, wr_id=taken + QUEUE)
                taken += 1
        talk.keys(guest.me)

"""Connection management through the MAD hub, on real rxe: guests in Python, and rdma_cm's own programs as bare metal.

The hub has the CM class of rxe0, the VMs' device; the kernel's ib_cm, loaded after it, has rxe1's.
"""

import errno
from contextlib import ExitStack
from pathlib import Path

import cm
import pytest
from cm import A
from guest import CommandFailed, Cq, Qp
from guest_cm import (
    Rejected,
    accept,
    connect,
    request,
)
from guest_srq import Ah
from host_cm import (
    ADDRESSES,
    END_S,
    LENGTH,
    MESSAGES,
    OK,
    UCMATOSE_PORT,
    Guest,
    bare_metal,
    booted,
    connects,
    exchange,
    is_connected_to,
    make_server,
    rc_qp,
    ucmatose,
)
from host_peer import PEER_ADDRESS, v4_gid
from host_server import HostServer
from hub_process import HubProcess

from pvrdma_server.abi.pvrdma_verbs import QpType

pytestmark = [
    pytest.mark.host,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("nothing_stays"),
]
PEER_GID = v4_gid(PEER_ADDRESS)
UDADDY_PORT = 7174
MANY = 200


# --- both directions -------------------------------------------------------------------------------------------------


def test_guest_connects_to_ucmatose(guest: Guest, hub: HubProcess) -> None:
    connects(guest, lambda: hub.client(ADDRESSES[0])["established"] == 1)
    relay = guest.relay()
    assert relay["state"] == "connected"
    assert relay["gids"][guest.gid.hex()]["state"] == "owned"
    assert relay["hub_dropped"] == {}


def test_ucmatose_connects_to_guest(guest: Guest) -> None:
    is_connected_to(guest)


@pytest.mark.parametrize("role", ["client", "server"])
def test_udaddy(guest: Guest, role: str) -> None:
    """Datagrams: SIDR_REQ and SIDR_REP instead of a connection."""
    agent, process = guest.agent, guest.process
    service = cm.service_id(cm.PS_UDP, UDADDY_PORT)
    qp = Qp(process, QpType.UD, recv_cq=process.cq())
    buffer, message = process.mr(40 + LENGTH), process.mr(LENGTH)
    words = f"udaddy -b {PEER_ADDRESS}"
    with ExitStack() as stack:
        if role == "client":
            program = stack.enter_context(bare_metal(words, listens=True))
            private = cm.cma_header(guest.gid, PEER_GID, 4000)
            asked = cm.sidr_req(agent.new_tid(), agent.new_id(), service, private=private)
            answer = agent.converse(
                asked,
                PEER_GID,
                lambda m: m.attr_id == A.SIDR_REP and m.local_id == asked.local_id,
            ).message
            assert answer.status == 0
            qpn, qkey = answer.qpn, answer.qkey
        else:
            program = stack.enter_context(bare_metal(f"{words} -s {guest.server.address}"))
            qkey = 0x01234567  # RDMA_UDP_QKEY
        qp.ready(qkey=qkey)
        for number in range(MESSAGES):
            qp.post_recv(buffer.sge(), wr_id=number)
        imm = qp.qpn.to_bytes(4, "big")
        if role == "client":
            for number in range(MESSAGES):
                qp.send_to(Ah(PEER_GID), qpn, message.sge(), wr_id=number, imm=imm, qkey=qkey)
        else:
            request, sgid = agent.wait(lambda m: m.attr_id == A.SIDR_REQ)
            assert (request.service_id, sgid) == (service, PEER_GID)
            reply = cm.sidr_rep(request.tid, request.local_id, service, qp.qpn, qkey)
            agent.send(reply, sgid)
        received = qp.recv_cq.wait(MESSAGES)
        assert [(wc.status, wc.byte_len) for wc in received] == [(OK, 40 + LENGTH)] * MESSAGES
        if role == "server":
            qpn = int.from_bytes(received[0].imm_data, "big")
            for number in range(MESSAGES):
                qp.send_to(Ah(PEER_GID), qpn, message.sge(), wr_id=number, imm=imm, qkey=qkey)
        assert {wc.status for wc in qp.send_cq.wait(MESSAGES)} == {OK}
        program.finish()


def test_two_guests_connect_to_each_other(guest: Guest, other: Guest, hub: HubProcess) -> None:
    before = hub.status()["counters"]
    (a, memory_a), (b, memory_b) = rc_qp(guest), rc_qp(other)
    asked = request(guest.agent, a, other.gid, UCMATOSE_PORT)
    asked.send()
    accepted = accept(other.agent, b, UCMATOSE_PORT)
    other.agent.send(accepted.reply, guest.gid)
    client = asked.establish(guest.agent.wait_kind(A.REP, to=asked.message.local_id))
    server = accepted.finish()
    a.send(memory_a.sge(), wr_id=1)
    b.send(memory_b.sge(), wr_id=2)
    assert a.recv_cq.wait_one().status == b.recv_cq.wait_one().status == OK
    server.agent.send(cm.dreq(99, server.local_id, server.remote_id, a.qpn), guest.gid)
    client.await_disconnect()
    other.agent.wait(server.is_mine(A.DREP))
    after = hub.status()["counters"]
    assert after["switched"] - before["switched"] >= 5
    assert after["to_network"] == before["to_network"]


def test_a_guest_connects_to_itself(guest: Guest) -> None:
    (a, memory), (b, _) = rc_qp(guest), rc_qp(guest)
    asked = request(guest.agent, a, guest.gid, UCMATOSE_PORT)
    asked.send()
    accepted = accept(guest.agent, b, UCMATOSE_PORT)
    guest.agent.send(accepted.reply, guest.gid)
    asked.establish(guest.agent.wait_kind(A.REP, to=asked.message.local_id))
    accepted.finish()
    a.send(memory.sge(), wr_id=1)
    assert b.recv_cq.wait_one().status == OK


# --- what the old mux got wrong --------------------------------------------------------------------------------------


def test_equal_comm_ids_of_two_guests(guest: Guest, other: Guest, hub: HubProcess) -> None:
    """Both guests' ids are the same numbers, and their handshakes with one server overlap."""
    with bare_metal(ucmatose("-c 2"), listens=True) as program:
        ends = [(one, *rc_qp(one)) for one in (guest, other)]
        asked = [request(one.agent, qp, PEER_GID, UCMATOSE_PORT) for one, qp, _ in ends]
        assert len({each.message.local_id for each in asked}) == 1
        for each in asked:
            each.send()
        connections = [each.finish() for each in reversed(asked)][::-1]
        assert [hub.client(at)["established"] for at in ADDRESSES] == [1, 1]
        for connection, (_, _, buffer) in zip(connections, ends, strict=True):
            exchange(connection, buffer, first=False)
        for connection in connections:
            connection.await_disconnect()
        program.finish()


def test_a_refused_connection(guest: Guest) -> None:
    """REJ, and a REQ that comes twice while the first is under way."""
    qp, _ = rc_qp(guest)
    with pytest.raises(Rejected) as refused:
        connect(guest.agent, qp, PEER_GID, 7999)  # nobody listens there
    assert refused.value.reason == 8
    with bare_metal(ucmatose(f"-s {guest.server.address}")) as program:
        arrived = guest.agent.wait_kind(A.REQ)
        message = cm.rej(arrived.message.tid, 77, arrived.message.local_id, 28)
        guest.agent.send(message, arrived.sgid)
        output, _ = program.process.communicate(timeout=END_S)
        assert "RDMA_CM_EVENT_REJECTED" in output


def test_mra_keeps_the_other_end_waiting(guest: Guest) -> None:
    with bare_metal(ucmatose(f"-s {guest.server.address}")) as program:
        qp, buffer = rc_qp(guest)
        arrived = guest.agent.wait_kind(A.REQ)
        before = guest.relay()["hub_dropped"]
        mra = cm.pair(A.MRA, arrived.message.tid, guest.agent.new_id(), arrived.message.local_id)
        guest.agent.send(mra, arrived.sgid)
        connection = accept(guest.agent, qp, UCMATOSE_PORT, arrived).finish()
        exchange(connection, buffer, first=True)
        connection.disconnect()
        program.finish()
        assert guest.relay()["hub_dropped"] == before


def test_another_guest_s_gid_is_refused(guest: Guest, other: Guest) -> None:
    with pytest.raises(CommandFailed) as refused:
        other.kernel.add_gid(guest.gid, 1)
    assert refused.value.err == errno.EADDRINUSE
    assert other.server.events("gid_refused")[-1]["gid"] == guest.gid.hex()
    # Its address did not come to the host's port a second time, and goes with its owner's GID alone.
    assert guest.relay()["gids"][guest.gid.hex()]["state"] == "owned"


# --- who dies --------------------------------------------------------------------------------------------------------


def test_hub_dies_while_a_guest_is_asked(guest: Guest, hub: HubProcess) -> None:
    with bare_metal(ucmatose(f"-s {guest.server.address}")) as program:
        qp, buffer = rc_qp(guest)
        arrived = guest.agent.wait_kind(A.REQ)
        hub.end(kill=True)
        accepted = accept(guest.agent, qp, UCMATOSE_PORT, arrived)
        guest.agent.send(accepted.reply, arrived.sgid)  # lost
        hub.start()
        connection = accepted.finish()
        exchange(connection, buffer, first=True)
        connection.disconnect()
        program.finish()
    assert guest.relay()["links"] > 1
    assert guest.relay()["gids"][guest.gid.hex()]["state"] == "owned"


def test_hub_dies_while_a_guest_asks(guest: Guest, hub: HubProcess) -> None:
    with bare_metal(ucmatose(), listens=True) as program:
        qp, buffer = rc_qp(guest)
        asked = request(guest.agent, qp, PEER_GID, UCMATOSE_PORT)
        asked.send()
        hub.end(kill=True)
        hub.start()
        connection = asked.finish()
        exchange(connection, buffer, first=False)
        connection.await_disconnect()
        program.finish()


@pytest.mark.parametrize("established", [False, True], ids=["handshake", "established"])
def test_server_dies(hub: HubProcess, tmp_path: Path, established: bool) -> None:
    """Bare metal is told by the hub, long before any timeout, and the server's next life takes the GID again."""
    server = make_server(tmp_path, hub, "10.9.0.125")
    server.start()
    guest = Guest(server)
    with bare_metal(ucmatose(f"-s {server.address} -C 0")) as program:
        qp, _ = rc_qp(guest)
        arrived = guest.agent.wait_kind(A.REQ)
        if established:
            accept(guest.agent, qp, UCMATOSE_PORT, arrived).finish()
        server.end(kill=True)
        output, _ = program.process.communicate(timeout=END_S)
        assert ("RDMA_CM_EVENT_REJECTED" in output) != established, output
    guest.close()
    if established:
        server.start()
        with booted(server) as again:
            assert again.relay()["gids"][server.gid.hex()]["state"] == "owned"
        assert server.end() == 0


@pytest.mark.parametrize("established", [False, True], ids=["handshake", "established"])
def test_bare_metal_dies(guest: Guest, established: bool) -> None:
    with bare_metal(ucmatose(f"-s {guest.server.address}")) as program:
        qp, _ = rc_qp(guest)
        arrived = guest.agent.wait_kind(A.REQ)
        if established:
            connection = accept(guest.agent, qp, UCMATOSE_PORT, arrived).finish()
        program.process.kill()
        if established:
            connection.await_disconnect()
        else:
            assert guest.agent.wait_kind(A.REJ).message.reason == 4


def test_guest_s_machine_ends(servers: tuple[HostServer, ...], hub: HubProcess) -> None:
    """QEMU is gone without a word: the GID is given up, and bare metal is told."""
    gone = Guest(servers[0])
    with bare_metal(ucmatose(f"-s {gone.server.address} -C 0")) as program:
        qp, _ = rc_qp(gone)
        accept(gone.agent, qp, UCMATOSE_PORT).finish()
        gone.close()
        program.process.communicate(timeout=END_S)
    hub.wait_for("given up", lambda _: hub.client(ADDRESSES[0])["gids"] == {})


# --- many ------------------------------------------------------------------------------------------------------------


def many_qps(guest: Guest) -> list[Qp]:
    cq = Cq(guest.process, 1024)
    return [Qp(guest.process, send_cq=cq, max_wr=1, max_sge=1) for _ in range(MANY)]


def test_many_connections_at_once_from_the_guest(guest: Guest, hub: HubProcess) -> None:
    before = hub.status()["process"]["fds"]
    with bare_metal(ucmatose(f"-c {MANY} -C 0"), listens=True) as program:
        asked = [request(guest.agent, qp, PEER_GID, UCMATOSE_PORT) for qp in many_qps(guest)]
        for each in asked:
            each.send()
        connections = [each.finish() for each in asked]
        for connection in connections:
            connection.await_disconnect()
        program.finish()
    assert hub.status()["process"]["fds"] <= before


def test_many_connections_at_once_to_the_guest(guest: Guest) -> None:
    with bare_metal(ucmatose(f"-s {guest.server.address} -c {MANY} -C 0")) as program:
        accepted = []
        for qp in many_qps(guest):
            each = accept(guest.agent, qp, UCMATOSE_PORT)
            guest.agent.send(each.reply, PEER_GID)
            accepted.append(each)
        connections = [each.finish() for each in accepted]
        for connection in connections:
            connection.disconnect()
        program.finish()


# --- the host's ib_cm ------------------------------------------------------------------------------------------------


def test_a_hub_where_ib_cm_has_the_class_says_so(hub: HubProcess, tmp_path: Path) -> None:
    second = HubProcess(tmp_path, "rxe1")
    second.start(umad="ib_cm")
    assert second.end() == 0
    assert "ib_cm" in second.log.read_text()

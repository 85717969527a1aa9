"""Verbs programs of two machines over the embedded backend, from WQE bytes to CQE bytes: RC, UD, GSI, SRQ."""

import pytest
from guest import (
    PAGE,
    Ah,
    Nothing,
    Qp,
    Srq,
    connect,
)
from unit.vms import Ends, Pair, Vm, pattern, rc

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpType, SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import WcFlags, WcOpcode

QKEY = 0x11111111
IMM = bytes.fromhex("a1b2c3d4")


# --- RC ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 100, PAGE, 3 * PAGE + 17, 300_000])
def test_rc_send(pair: Pair, length: int) -> None:
    ends = rc(pair)
    source = ends.a.pd.reg_mr(length or 1, offset=123)
    target = ends.b.pd.reg_mr(length or 1, offset=3000)
    source.write(pattern(length))
    ends.b.post_recv(target.sge(0, length), wr_id=7)
    ends.a.send(source.sge(0, length), wr_id=5)
    sent, received = ends.a.send_cq.wait_one(), ends.b.recv_cq.wait_one()
    assert (sent.wr_id, sent.status, sent.opcode, sent.qp) == (5, 0, WcOpcode.SEND, ends.a.handle)
    assert (received.wr_id, received.status, received.byte_len) == (7, 0, length)
    assert (received.opcode, received.qp) == (WcOpcode.RECV, ends.b.handle)
    assert target.read(0, length) == pattern(length)


def test_rc_send_gathers_and_scatters(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(4 * PAGE), ends.b.pd.reg_mr(4 * PAGE)
    source.write(pattern(4 * PAGE))
    ends.b.post_recv(target.sge(10, 5000), target.sge(6000, 100), target.sge(9000, 3000))
    ends.a.send(
        source.sge(1, 99), source.sge(4090, 12), source.sge(8000, 0), source.sge(8000, 5500)
    )
    received = ends.b.recv_cq.wait_one()
    data = pattern(4 * PAGE)
    wanted = data[1:100] + data[4090:4102] + data[8000:13500]
    got = target.read(10, 5000) + target.read(6000, 100) + target.read(9000, 3000)
    assert received.byte_len == len(wanted)
    assert got[: len(wanted)] == wanted


def test_immediate_data_arrives(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    source.write(b"payload")
    for number in range(2):
        ends.b.post_recv(target.sge(), wr_id=number)
    ends.a.send(source.sge(0, 7), imm=IMM)
    ends.a.write(source.sge(0, 7), to=target.remote(100), imm=IMM)
    first, second = ends.b.recv_cq.wait(2)
    assert (first.opcode, first.imm_data, first.wc_flags) == (WcOpcode.RECV, IMM, WcFlags.WITH_IMM)
    assert (second.opcode, second.imm_data) == (WcOpcode.RECV_RDMA_WITH_IMM, IMM)
    assert (second.wc_flags, second.byte_len) == (WcFlags.WITH_IMM, 7)
    assert target.read(0, 7) == target.read(100, 7) == b"payload"


def test_write_and_read(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(20_000, offset=11), ends.b.pd.reg_mr(20_000, offset=4000)
    source.write(pattern(20_000))
    ends.a.write(source.sge(0, 9999), to=target.remote(5), wr_id=1)
    ends.a.read(source.sge(10_000, 9999), frm=target.remote(5), wr_id=2)
    done = ends.a.send_cq.wait(2)
    assert [(wc.wr_id, wc.status, wc.opcode) for wc in done] == [
        (1, 0, WcOpcode.RDMA_WRITE),
        (2, 0, WcOpcode.RDMA_READ),
    ]
    assert target.read(5, 9999) == source.read(10_000, 9999) == pattern(9999)
    assert ends.b.recv_cq.poll() == []


def test_atomics(pair: Pair) -> None:
    ends = rc(pair)
    local, remote = ends.a.pd.reg_mr(64), ends.b.pd.reg_mr(64)
    remote.write64(40, 8)
    ends.a.fetch_add(local.sge(0, 8), remote.remote(8), 2, wr_id=1)
    ends.a.cmp_swp(local.sge(8, 8), remote.remote(8), 42, 99, wr_id=2)
    ends.a.cmp_swp(local.sge(16, 8), remote.remote(8), 42, 7, wr_id=3)
    done = ends.a.send_cq.wait(3)
    assert [wc.opcode for wc in done] == [
        WcOpcode.FETCH_ADD,
        WcOpcode.COMP_SWAP,
        WcOpcode.COMP_SWAP,
    ]
    assert [wc.status for wc in done] == [0, 0, 0]
    assert [local.read64(at) for at in (0, 8, 16)] == [40, 42, 99]
    assert remote.read64(8) == 99


def test_a_loopback_within_one_machine(pair: Pair) -> None:
    first, second = Qp(pair.a.process()), Qp(pair.a.process())
    connect(first, second, pair.a.gid, pair.a.gid)
    source, target = first.pd.reg_mr(PAGE), second.pd.reg_mr(PAGE)
    source.write(b"within")
    first.write(source.sge(0, 6), to=target.remote())
    assert first.send_cq.wait_one().status == 0
    assert target.read(0, 6) == b"within"


def test_many_messages_in_order(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    seen: list[bytes] = []
    for round_ in range(40):
        for slot in range(16):
            source.write(bytes([round_, slot]), 2 * slot)
            ends.b.post_recv(target.sge(2 * slot, 2), wr_id=slot)
        for slot in range(16):
            ends.a.send(source.sge(2 * slot, 2), flags=0 if slot < 15 else SendFlags.SIGNALED)
        for wc in ends.b.recv_cq.wait(16):
            seen.append(target.read(2 * wc.wr_id, 2))
        ends.a.send_cq.wait_one()
    assert seen == [bytes([round_, slot]) for round_ in range(40) for slot in range(16)]


# --- notifications -------------------------------------------------------------------------------------------------


def test_arm_and_arm_solicited_across_machines(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    for _ in range(3):
        ends.b.post_recv(target.sge())
    ends.b.recv_cq.arm(solicited=True)
    ends.a.send(source.sge(0, 1))
    ends.a.send_cq.wait_one()
    assert ends.b.recv_cq.notified() == 0
    ends.a.send(source.sge(0, 1), flags=SendFlags.SIGNALED | SendFlags.SOLICITED)
    ends.a.send_cq.wait_one()
    assert ends.b.recv_cq.wait_notified() == 1
    ends.b.recv_cq.arm()
    ends.a.send(source.sge(0, 1))
    assert ends.b.recv_cq.wait_notified() == 1
    assert len(ends.b.recv_cq.wait(3)) == 3


def test_the_first_message_establishes_communication(pair: Pair) -> None:
    ends = Ends(*(Qp(vm.process()) for vm in pair))
    for mine, other, vm in ((ends.a, ends.b, pair.b), (ends.b, ends.a, pair.a)):
        mine.to_init()
        mine.to_rtr(dest_qpn=other.qpn, dgid=vm.gid)
    ends.a.to_rts()
    source, target = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    ends.b.post_recv(target.sge())
    ends.a.send(source.sge(0, 1))
    ends.b.recv_cq.wait_one()
    assert api.Eqe(EqeType.COMM_EST, ends.b.handle) in pair.b.driver.take_events()


# --- datagrams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("imm", [None, IMM])
def test_ud(pair: Pair, imm: bytes | None) -> None:
    a, b = (Qp(vm.process(), QpType.UD).ready() for vm in pair)
    source, target = a.pd.reg_mr(PAGE), b.pd.reg_mr(PAGE)
    source.write(b"datagram")
    b.post_recv(target.sge(), wr_id=3)
    ah = Ah(pair.b.gid, hop_limit=7, traffic_class=0x20, flow_label=0x12345)
    a.send_to(ah, b.qpn, source.sge(0, 8), imm=imm)
    assert a.send_cq.wait_one().status == 0
    got = b.recv_cq.wait_one()
    assert (got.wr_id, got.status, got.byte_len, got.src_qp) == (3, 0, 48, a.qpn)
    assert got.wc_flags == WcFlags.GRH | (WcFlags.WITH_IMM if imm else 0)
    grh = target.read(0, 40)
    assert target.read(40, 8) == b"datagram"
    assert (grh[8:24], grh[24:40]) == (pair.a.gid, pair.b.gid)
    assert grh[7] == 7
    assert int.from_bytes(grh[:4], "big") == 6 << 28 | 0x20 << 20 | 0x12345


def test_ud_with_the_wrong_qkey_is_dropped(pair: Pair) -> None:
    a, b = (Qp(vm.process(), QpType.UD).ready() for vm in pair)
    source, target = a.pd.reg_mr(PAGE), b.pd.reg_mr(PAGE)
    b.post_recv(target.sge())
    a.send_to(Ah(pair.b.gid), b.qpn, source.sge(0, 8), qkey=QKEY + 1)
    assert a.send_cq.wait_one().status == 0
    with pytest.raises(Nothing):
        b.recv_cq.wait_one()


def gsi(vm: Vm) -> Qp:
    """QP1 as ib_mad makes it: the kernel's, on its own CQ, attributes without a port."""
    qp = Qp(vm.kernel, QpType.GSI)
    return qp.ready(qkey=0x8001_0000)


def test_gsi(pair: Pair) -> None:
    """MADs as ib_mad posts them: header and data by bus address, 296 bytes to receive into."""
    a, b = gsi(pair.a), gsi(pair.b)
    assert a.qpn == b.qpn == 1
    out, into = pair.a.kernel.buffer(PAGE), pair.b.kernel.buffer(PAGE)
    mad = pattern(256)
    out.write(mad)
    b.post_recv(into.sge(1000, 296), wr_id=1)
    a.send_to(Ah(pair.b.gid), 1, out.sge(0, 24), out.sge(24, 232), qkey=0x8001_0000)
    assert a.send_cq.wait_one().status == 0
    got = b.recv_cq.wait_one()
    assert (got.status, got.byte_len, got.src_qp, got.qp) == (0, 296, 1, b.handle)
    assert got.wc_flags & WcFlags.GRH
    assert got.wc_flags & WcFlags.WITH_NETWORK_HDR_TYPE
    assert got.network_hdr_type == 2
    grh = into.read(1000, 40)
    assert (grh[8:24], grh[24:40]) == (pair.a.gid, pair.b.gid)
    assert into.read(1040, 256) == mad
    # The answer goes where the GRH says.
    back = pair.a.kernel.buffer(PAGE)
    a.post_recv(back.sge(0, 296))
    b.send_to(Ah(grh[8:24]), got.src_qp, into.sge(1040, 256), qkey=0x8001_0000)
    assert a.recv_cq.wait(1)[0].status == 0
    assert back.read(40, 256) == mad


# --- SRQ -----------------------------------------------------------------------------------------------------------


def test_srq_of_two_queue_pairs(pair: Pair) -> None:
    receiver = pair.b.process()
    srq, target = Srq(receiver), receiver.mr(PAGE)
    cq = receiver.cq()
    senders = [Qp(pair.a.process()) for _ in range(2)]
    members = [Qp(receiver, send_cq=cq, srq=srq) for _ in range(2)]
    for sender, member in zip(senders, members, strict=True):
        connect(sender, member, pair.a.gid, pair.b.gid)
    for number in range(4):
        srq.post_recv(target.sge(8 * number, 8), wr_id=number)
    srq.arm_limit(2)
    for number in range(3):
        sender = senders[number % 2]
        source = sender.pd.reg_mr(8)
        source.write(bytes([number]) * 8)
        sender.send(source.sge())
        sender.send_cq.wait_one()
    got = cq.wait(3)
    assert [(wc.wr_id, wc.qp) for wc in got] == [(n, members[n % 2].handle) for n in range(3)]
    assert target.read(0, 24) == b"\0" * 8 + b"\1" * 8 + b"\2" * 8
    assert api.Eqe(EqeType.SRQ_LIMIT_REACHED, srq.handle) in pair.b.driver.take_events()

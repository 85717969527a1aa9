"""UD and GSI: what arrives, and what is silently dropped."""

import pytest
from fake_owner import GSI_QKEY, Bench, FakeQp

from pvrdma_server.abi.mad import parse_grh_area
from pvrdma_server.abi.pvrdma_verbs import QpType
from pvrdma_server.abi.vmw_pvrdma_abi import NetworkHdrType, WcFlags, WcOpcode, WcStatus, WrOpcode

OK = int(WcStatus.SUCCESS)


def ud_pair(bench: Bench) -> tuple[FakeQp, FakeQp]:
    left, right = bench.a.qp(QpType.UD), bench.b.qp(QpType.UD)
    left.start_datagrams()
    right.start_datagrams()
    return left, right


@pytest.mark.parametrize("size", [0, 1, 256, 4096])
def test_datagram(bench: Bench, size: int) -> None:
    left, right = ud_pair(bench)
    source, target = bench.a.buffer(4096), bench.b.buffer(5000)
    source.fill(bytes(range(256)) * 16)
    into = right.recv(target.sge())
    wr = left.datagram(source.sge(0, size), right)
    bench.settle()
    assert left.statuses == [(wr, OK)]
    (wc,) = right.owner.received
    assert (wc.wr_id, wc.status, wc.opcode) == (into, OK, WcOpcode.RECV)
    assert (wc.byte_len, wc.src_qp, wc.wc_flags) == (size + 40, left.qp.qpn, WcFlags.GRH)
    assert wc.network_hdr_type == NetworkHdrType.IPV4
    assert parse_grh_area(target.data(0, 40)) == (bench.a.gid, bench.b.gid)
    assert target.data(40, size) == source.data(0, size)


def test_gsi(bench: Bench) -> None:
    if bench.a.backend is bench.b.backend:
        pytest.skip("one backend has one QP1")
    left, right = bench.a.qp(QpType.GSI), bench.b.qp(QpType.GSI)
    assert (left.qp.qpn, right.qp.qpn) == (1, 1)
    left.start_datagrams(0)
    right.start_datagrams(0)
    source, target = bench.a.buffer(256), bench.b.buffer(296)
    source.fill(b"mad!" * 64)
    right.recv(target.sge())
    wr = left.datagram(source.sge(), right, GSI_QKEY)
    bench.settle()
    assert left.statuses == [(wr, OK)]
    (wc,) = right.owner.received
    assert (wc.status, wc.byte_len, wc.src_qp) == (OK, 296, 1)
    assert target.data(40) == b"mad!" * 64


def test_immediate(bench: Bench) -> None:
    left, right = ud_pair(bench)
    source, target = bench.a.buffer(64), bench.b.buffer(200)
    right.recv(target.sge())
    left.datagram(source.sge(), right, opcode=WrOpcode.SEND_WITH_IMM, imm=b"\x00\x00\x12\x34")
    bench.settle()
    (wc,) = right.owner.received
    assert (wc.imm, wc.wc_flags) == (b"\x00\x00\x12\x34", WcFlags.GRH | WcFlags.WITH_IMM)

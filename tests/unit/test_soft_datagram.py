"""UD: the faults of either side; a datagram that cannot be delivered is silently gone."""

from collections.abc import Callable

import pytest
from fake_owner import GSI_QKEY, RAM_BASE, Bench, FakeQp, gid_v4
from soft_bench import soft_bench

from pvrdma_server.abi.mad import parse_grh_area
from pvrdma_server.abi.pvrdma_dev_api import GidType
from pvrdma_server.abi.pvrdma_verbs import QpState, QpType
from pvrdma_server.abi.vmw_pvrdma_abi import NetworkHdrType, Sge, WcStatus, WrOpcode
from pvrdma_server.backend import Rdma, Refused, Ud
from pvrdma_server.errors import BackendError

S = WcStatus


def ud_pair(bench: Bench) -> tuple[FakeQp, FakeQp]:
    left, right = bench.a.qp(QpType.UD), bench.b.qp(QpType.UD)
    left.start_datagrams()
    right.start_datagrams()
    return left, right


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (lambda q, p, s: q.datagram(s._replace(length=4097), p), S.LOC_LEN_ERR),
        (lambda q, p, s: q.datagram(s._replace(lkey=1), p), S.LOC_PROT_ERR),
        (lambda q, p, s: q.post(WrOpcode.SEND, (), Refused(S.LOC_QP_OP_ERR, "")), S.LOC_QP_OP_ERR),
        (lambda q, p, s: q.post(WrOpcode.RDMA_WRITE, (), Rdma(0, 0)), S.LOC_QP_OP_ERR),
        (lambda q, p, s: q.post(WrOpcode.SEND, (), None), S.LOC_QP_OP_ERR),
    ],
    ids=["too_long", "bad_lkey", "refused", "rdma", "no_address"],
)
def test_send_faults_stop_the_send_queue_only(
    act: Callable[[FakeQp, FakeQp, Sge], int], status: WcStatus
) -> None:
    bench = soft_bench()
    left, right = ud_pair(bench)
    source, target = bench.a.buffer(8192), bench.b.buffer(8192)
    bad = act(left, right, source.sge(0, 64))
    flushed = left.datagram(source.sge(0, 64), right)
    bench.settle()
    assert left.statuses == [(bad, status), (flushed, S.WR_FLUSH_ERR)]
    assert left.owner.states == [QpState.SQE]
    left.recv(bench.a.buffer(200).sge())
    right.datagram(target.sge(0, 64), left)
    bench.settle()
    assert [s for _, s in left.recv_statuses] == [S.SUCCESS]
    left.modify(qp_state=int(QpState.RTS))
    right.recv(target.sge())
    again = left.datagram(source.sge(0, 64), right)
    bench.settle()
    assert left.statuses[-1] == (again, S.SUCCESS)
    assert [s for _, s in right.recv_statuses] == [S.SUCCESS]


def drops(bench: Bench, left: FakeQp, right: FakeQp, **change: object) -> None:
    source = bench.a.buffer(64)
    wr = left.datagram(source.sge(), right)
    posted = left.owner.sends.pop()
    arm = posted.arm
    assert isinstance(arm, Ud)
    av = arm.av._replace(**{k: v for k, v in change.items() if k in arm.av._fields})  # type: ignore[arg-type]
    arm = arm._replace(**{k: v for k, v in change.items() if k in arm._fields}, av=av)  # type: ignore[arg-type]
    left.owner.sends.append(posted._replace(arm=arm))
    bench.settle()
    assert left.statuses[-1] == (wr, S.SUCCESS)
    assert right.owner.received == []
    assert right.owner.states == left.owner.states == []


@pytest.mark.parametrize(
    "change",
    [
        {"dgid": gid_v4(99)},
        {"dgid": b"\xff\x02" + bytes(14)},
        {"sgid_index": 5},
        {"remote_qpn": 900},
        {"remote_qpn": 0xFFFFFFFF},
        {"qkey": 0x4321},
    ],
    ids=["unknown_gid", "multicast", "no_source_gid", "unknown_qp", "wild_qp", "wrong_qkey"],
)
def test_undeliverable_is_silently_dropped(change: dict[str, object]) -> None:
    bench = soft_bench()
    left, right = ud_pair(bench)
    right.recv(bench.b.buffer(200).sge())
    drops(bench, left, right, **change)


def test_no_buffer_and_short_buffer() -> None:
    bench = soft_bench()
    left, right = ud_pair(bench)
    drops(bench, left, right)
    buffer = bench.b.buffer(200)
    into = right.recv(buffer.sge(0, 103))
    drops(bench, left, right)
    left.datagram(bench.a.buffer(63).sge(), right)
    bench.settle()
    assert right.recv_statuses == [(into, S.SUCCESS)]


def test_qkey_with_the_high_bit_means_the_senders_own() -> None:
    bench = soft_bench()
    left, right = ud_pair(bench)
    right.recv(bench.b.buffer(200).sge())
    left.datagram(bench.a.buffer(64).sge(), right, 0x8000_0001)
    bench.settle()
    assert [s for _, s in right.recv_statuses] == [S.SUCCESS]


@pytest.mark.parametrize("refused", [0, S.LOC_QP_OP_ERR])
def test_bad_receive_ends_its_own_qp(refused: int) -> None:
    bench = soft_bench()
    left, right = ud_pair(bench)
    first = right.recv(Sge(0x1000, 4096, 0x1234), refused=refused)
    second = right.recv()
    left.datagram(bench.a.buffer(64).sge(), right)
    bench.settle()
    expected = refused or S.LOC_PROT_ERR
    assert right.recv_statuses == [(first, expected), (second, S.WR_FLUSH_ERR)]
    assert right.owner.states == [QpState.ERR]
    assert [s for _, s in left.statuses] == [S.SUCCESS]


@pytest.mark.parametrize(
    ("gids", "gid_type", "network"),
    [
        ((gid_v4(5), gid_v4(6)), GidType.ROCE_V2, NetworkHdrType.IPV4),
        ((gid_v4(5), gid_v4(6)), GidType.ROCE_V1, NetworkHdrType.ROCE_V1),
        ((b"\xfe\x80" + b"\1" * 14, b"\xfe\x80" + b"\2" * 14), GidType.ROCE_V2, NetworkHdrType.IPV6),
        ((b"\xfe\x80" + b"\1" * 14, b"\xfe\x80" + b"\2" * 14), GidType.ROCE_V1, 0),
    ],
    ids=["v2_ipv4", "v1_mapped", "v2_ipv6", "v1"],
)  # fmt: skip
def test_network_header(gids: tuple[bytes, bytes], gid_type: GidType, network: int) -> None:
    bench = soft_bench()
    for station, gid in zip((bench.a, bench.b), gids, strict=True):
        station.backend.add_gid(0, gid, gid_type)
        station.gid = gid
    left, right = ud_pair(bench)
    target = bench.b.buffer(200)
    right.recv(target.sge())
    left.datagram(bench.a.buffer(64).sge(), right)
    bench.settle()
    (wc,) = right.owner.received
    assert wc.network_hdr_type == network
    area = target.data(0, 40)
    assert parse_grh_area(area) == gids
    if network == NetworkHdrType.IPV4:
        assert (area[20], area[21], area[28]) == (0x45, 7, 64)
    else:
        assert area[:4] == (6 << 28 | 7 << 20 | 0x12345).to_bytes(4, "big")
        assert area[6:8] == bytes([0x1B if gid_type == GidType.ROCE_V1 else 17, 64])


def test_datagram_is_a_copy() -> None:
    """The send completes at once, so what the guest does to its buffer then changes nothing."""
    bench = soft_bench()
    left, right = ud_pair(bench)
    source, target = bench.a.buffer(64), bench.b.buffer(200)
    source.fill(b"before" * 10)
    right.recv(target.sge())
    left.datagram(source.sge(), right)
    bench.a.backend.progress(1)
    source.fill(b"after!" * 10)
    bench.settle()
    assert target.data(40, 60) == b"before" * 10


def test_carrier_without_room_holds_datagrams_back() -> None:
    bench = soft_bench()
    left, right = ud_pair(bench)
    source, target = bench.a.buffer(64), bench.b.buffer(200)
    posted = [left.datagram(source.sge(), right) for _ in range(1000)]
    for _ in posted:
        right.recv(target.sge())
    while bench.a.backend.progress(1 << 20):
        pass
    assert 0 < len(left.owner.sent) < 1000
    bench.settle()
    assert left.statuses == [(wr, S.SUCCESS) for wr in posted]
    assert len(right.owner.received) == 1000


def test_flush_of_a_datagram_qp() -> None:
    bench = soft_bench()
    left, right = ud_pair(bench)
    receives = [left.recv() for _ in range(3)]
    sends = [left.datagram(bench.a.buffer(64).sge(), right) for _ in range(3)]
    left.modify(qp_state=int(QpState.ERR))
    bench.settle()
    assert left.statuses == [(wr, S.WR_FLUSH_ERR) for wr in sends]
    assert left.recv_statuses == [(wr, S.WR_FLUSH_ERR) for wr in receives]


def test_unmapped_memory() -> None:
    bench = soft_bench()
    left, right = ud_pair(bench)
    source = bench.a.buffer(64)
    bench.a.memory.remove_region(RAM_BASE, len(bench.a.ram))
    left.datagram(source.sge(), right)
    bench.settle()
    assert [s for _, s in left.statuses] == [S.LOC_PROT_ERR]


def test_queue_pair_one_reaches_itself() -> None:
    """rdma_cm between two programs of one guest."""
    bench = soft_bench()
    gsi = bench.a.qp(QpType.GSI)
    gsi.start_datagrams(0)
    source, target = bench.a.buffer(256), bench.a.buffer(296)
    source.fill(b"REQ!" * 64)
    gsi.recv(target.sge())
    gsi.datagram(source.sge(), gsi, GSI_QKEY)
    bench.settle()
    assert [s for _, s in gsi.statuses] == [s for _, s in gsi.recv_statuses] == [S.SUCCESS]
    assert target.data(40) == source.data()


def test_there_is_one_queue_pair_one() -> None:
    bench = soft_bench()
    bench.a.qp(QpType.GSI)
    with pytest.raises(BackendError):
        bench.a.qp(QpType.GSI)


def test_a_users_qp_cannot_speak_to_queue_pair_one() -> None:
    """Its own Q_Key goes out in place of QP1's, which has the high bit set."""
    bench = soft_bench()
    gsi, user = bench.b.qp(QpType.GSI), bench.a.qp(QpType.UD)
    gsi.start_datagrams(0)
    user.start_datagrams(0x1234)
    gsi.recv(bench.b.buffer(296).sge())
    user.datagram(bench.a.buffer(256).sge(), gsi, GSI_QKEY)
    bench.settle()
    assert gsi.owner.received == []

"""QP1 in software: MADs out of a guest's memory and into it, and what becomes of those that go nowhere."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from fake_owner import FakeOwner, gid_v4
from gsi_bench import BASE, DMA_KEY, MINE, PEER, SEAM, Qp1, from_peer, sge, to_gid
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.abi.mad import GRH_SIZE, MAD_SIZE, build_grh_area, parse_grh_area
from pvrdma_server.abi.pvrdma_dev_api import GidType
from pvrdma_server.abi.pvrdma_verbs import QpState
from pvrdma_server.abi.vmw_pvrdma_abi import NetworkHdrType, Sge, WcFlags, WcStatus, WrOpcode
from pvrdma_server.backend import Rdma, Refused, Ud
from pvrdma_server.errors import BackendError
from pvrdma_server.gsi import MAX_WAITING, RECEIVE_BYTES, TURN
from pvrdma_server.mad_frames import Datagram

S = WcStatus
MAD = bytes(range(256))
LOCAL = bytes.fromhex("fe80000000000000020000fffe000001")


def statuses(bench: Qp1) -> list[tuple[int, int]]:
    return [(wc.wr_id, wc.status) for wc in bench.owner.sent]


def recv_statuses(bench: Qp1) -> list[tuple[int, int]]:
    return [(wc.wr_id, wc.status) for wc in bench.owner.received]


# --- sends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[256], [24, 256], [1, 2, 3, 255, 256], [0, 24, 24, 256]], ids=str)
def test_any_split_is_one_mad(cuts: list[int]) -> None:
    bench = Qp1()
    start = SEAM - 100  # over the seam of two DMA regions
    bench.write(start, MAD)
    ends = [0, *cuts]
    parts = [sge(start + a, b - a) for a, b in pairwise(ends)]
    wr = bench.send(*parts)
    assert statuses(bench) == [(wr, S.SUCCESS)]
    (sent,) = bench.carrier.sent
    assert sent == Datagram(
        MINE, PEER, MAD, flow_label=0x12345, traffic_class=7, hop_limit=64, network_type=1
    )
    assert bench.gsi.counters.sent == 1


@pytest.mark.parametrize("length", [24, 100, 255])
def test_a_short_mad_is_filled_up(length: int) -> None:
    bench = Qp1()
    bench.write(BASE, MAD)
    bench.send(sge(BASE, length))
    assert bench.carrier.sent[0].payload == MAD[:length].ljust(MAD_SIZE, b"\0")


@pytest.mark.parametrize(
    ("sges", "status"),
    [
        ([sge(BASE, 23)], S.LOC_LEN_ERR),
        ([sge(BASE, 257)], S.LOC_LEN_ERR),
        ([sge(BASE, 24), sge(BASE, 0xFFFFFFFF)], S.LOC_LEN_ERR),
        ([], S.LOC_LEN_ERR),
        ([sge(BASE, 256, DMA_KEY + 1)], S.LOC_PROT_ERR),
        ([sge(BASE, 24), sge(BASE, 232, 7)], S.LOC_PROT_ERR),
        ([sge(0, 256)], S.LOC_PROT_ERR),
        ([sge(SEAM + 4 * 4096 - 1, 256)], S.LOC_PROT_ERR),
        ([sge((1 << 64) - 10, 256)], S.LOC_PROT_ERR),
    ],
)
def test_what_is_no_mad_completes_with_its_error(sges: list[Sge], status: WcStatus) -> None:
    bench = Qp1()
    bad = bench.send(*sges, signaled=False)
    behind = bench.send(sge(BASE, 256))
    assert statuses(bench) == [(bad, status), (behind, S.WR_FLUSH_ERR)]
    assert bench.owner.states == [QpState.SQE]
    assert bench.carrier.sent == []
    # ib_mad brings the queue pair back and goes on.
    bench.to(QpState.RTS)
    again = bench.send(sge(BASE, 256))
    assert statuses(bench)[-1] == (again, S.SUCCESS)
    assert len(bench.carrier.sent) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"arm": Refused(int(S.LOC_QP_OP_ERR), "")},
        {"arm": Rdma(0, 0)},
        {"opcode": WrOpcode.RDMA_WRITE},
        {"opcode": WrOpcode.SEND_WITH_IMM},
    ],
    ids=str,
)
def test_other_requests_are_refused(more: dict[str, object]) -> None:
    bench = Qp1()
    wr = bench.send(sge(BASE, 256), **more)  # type: ignore[arg-type]
    assert statuses(bench) == [(wr, S.LOC_QP_OP_ERR)]


def test_a_key_lives_as_long_as_its_region() -> None:
    bench = Qp1()
    bench.keys.clear()
    wr = bench.send(sge(BASE, 256))
    assert statuses(bench) == [(wr, S.LOC_PROT_ERR)]


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        (to_gid(PEER, index=3), "no_source_gid"),
        (to_gid(b"\xff" + bytes(15)), "multicast"),
        (to_gid(PEER, qpn=2), "not_qp1"),
        (to_gid(PEER, qkey=0x1234), "not_qp1"),
    ],
    ids=["sgid_index", "multicast", "other_qp", "other_qkey"],
)
def test_what_has_no_way_completes_and_is_counted(arm: object, reason: str) -> None:
    bench = Qp1()
    wr = bench.send(sge(BASE, 256), arm=arm)  # type: ignore[arg-type]
    assert statuses(bench) == [(wr, S.SUCCESS)]
    assert bench.dropped == {reason: 1}
    assert bench.carrier.sent == []


def test_a_key_of_the_own_queue_pair() -> None:
    bench = Qp1()
    bench.send(sge(BASE, 256), arm=to_gid(PEER, qkey=0xFFFFFFFF))
    assert len(bench.carrier.sent) == 1


def test_without_a_link_requests_complete_all_the_same() -> None:
    bench = Qp1()
    bench.carrier.linked = False
    wr = bench.send(sge(BASE, 256))
    assert statuses(bench) == [(wr, S.SUCCESS)]
    assert bench.dropped == {"no_carrier": 1}


def test_only_signalled_ones_complete() -> None:
    bench = Qp1()
    bench.send(sge(BASE, 256), signaled=False)
    assert statuses(bench) == []
    assert len(bench.carrier.sent) == 1


def test_nothing_is_sent_before_rts_and_all_of_it_then() -> None:
    bench = Qp1(QpState.RTR)
    bench.send(sge(BASE, 256))
    assert bench.carrier.sent == []
    bench.to(QpState.RTS)
    assert len(bench.carrier.sent) == 1


def test_a_long_queue_takes_several_turns() -> None:
    bench = Qp1(QpState.RTR)
    for _ in range(3 * TURN):
        bench.send(sge(BASE, 256))
    bench.to(QpState.RTS)
    assert len(bench.carrier.sent) == TURN
    assert bench.woken
    bench.work()
    assert len(bench.carrier.sent) == 3 * TURN


# --- receives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sgid", "dgid", "kind", "network"),
    [
        (PEER, MINE, 0, NetworkHdrType.ROCE_V1),
        (LOCAL, LOCAL, 0, NetworkHdrType.ROCE_V1),
        (PEER, MINE, 1, NetworkHdrType.IPV4),
        (LOCAL, LOCAL, 2, NetworkHdrType.IPV6),
        # A kind that the GIDs deny is not believed: the guest would take the header for another.
        (LOCAL, LOCAL, 1, NetworkHdrType.IPV6),
        (PEER, MINE, 2, NetworkHdrType.IPV4),
    ],
)
def test_a_receive_begins_with_the_whole_header(
    sgid: bytes, dgid: bytes, kind: int, network: NetworkHdrType
) -> None:
    bench = Qp1()
    bench.gsi.add_gid(1, LOCAL, GidType.ROCE_V2)
    address = SEAM - 20  # the header lies over the seam
    wr = bench.recv(sge(address, RECEIVE_BYTES))
    bench.gsi.receive(
        Datagram(
            sgid, dgid, MAD, flow_label=5, traffic_class=6, hop_limit=9, network_type=kind, sl=2
        )
    )
    assert bench.woken
    bench.work()
    (wc,) = bench.owner.received
    assert (wc.wr_id, wc.status, wc.byte_len) == (wr, S.SUCCESS, RECEIVE_BYTES)
    assert (wc.src_qp, wc.wc_flags, wc.network_hdr_type) == (1, WcFlags.GRH, network)
    assert (wc.sl, wc.pkey_index, bench.owner.solicited) == (2, 0, [True])
    area = bench.read(address, GRH_SIZE)
    assert parse_grh_area(area) == (sgid, dgid)
    assert area == build_grh_area(
        sgid, dgid, MAD_SIZE, roce_v2=bool(kind), traffic_class=6, flow_label=5, hop_limit=9
    )
    assert bench.read(address + GRH_SIZE, MAD_SIZE) == MAD


def test_any_number_of_elements() -> None:
    bench = Qp1()
    bench.recv(sge(BASE, 10), sge(BASE + 4096, 0), sge(BASE + 8192, 50), sge(SEAM, 1000))
    bench.gsi.receive(from_peer(MAD))
    bench.work()
    got = bench.read(BASE, 10) + bench.read(BASE + 8192, 50) + bench.read(SEAM, 236)
    assert got[GRH_SIZE:] == MAD
    assert bench.read(SEAM + 236, 100) == bytes(100)


def test_a_short_mad_is_filled_up_on_arrival() -> None:
    bench = Qp1()
    bench.write(BASE, b"\xee" * RECEIVE_BYTES)
    bench.recv(sge(BASE, RECEIVE_BYTES))
    bench.gsi.receive(from_peer(MAD[:30]))
    bench.work()
    assert bench.owner.received[0].byte_len == RECEIVE_BYTES
    assert bench.read(BASE + GRH_SIZE, MAD_SIZE) == MAD[:30] + bytes(226)


def test_without_a_receive_datagrams_wait_in_order_up_to_a_number() -> None:
    bench = Qp1()
    for number in range(MAX_WAITING + 5):
        bench.gsi.receive(from_peer(number.to_bytes(4, "big") + MAD[4:]))
    assert bench.dropped == {"no_buffer": 5}
    assert bench.gsi.facts()["waiting"] == MAX_WAITING
    for number in range(MAX_WAITING + 1):
        bench.recv(sge(BASE, RECEIVE_BYTES))
        if number < MAX_WAITING:
            assert bench.read(BASE + GRH_SIZE, 4) == number.to_bytes(4, "big")
    assert len(bench.owner.received) == MAX_WAITING
    assert len(bench.owner.recvs) == 1


def test_a_receive_that_is_too_short_serves_nobody_and_is_flushed() -> None:
    bench = Qp1()
    short = bench.recv(sge(BASE, RECEIVE_BYTES - 1))
    bench.gsi.receive(from_peer())
    bench.work()
    bench.gsi.receive(from_peer())
    bench.work()
    assert bench.dropped == {"too_long": 2}
    bench.to(QpState.ERR)
    assert recv_statuses(bench) == [(short, S.WR_FLUSH_ERR)]


@pytest.mark.parametrize(
    ("posted", "refused", "status"),
    [
        (sge(BASE, RECEIVE_BYTES, 5), 0, S.LOC_PROT_ERR),
        (sge(SEAM + 4 * 4096 - 100, RECEIVE_BYTES), 0, S.LOC_PROT_ERR),
        (sge(BASE, RECEIVE_BYTES), int(S.LOC_QP_OP_ERR), S.LOC_QP_OP_ERR),
    ],
    ids=["key", "address", "refused"],
)
def test_a_bad_receive_stops_the_queue_pair(posted: Sge, refused: int, status: WcStatus) -> None:
    bench = Qp1()
    bad, good = bench.recv(posted, refused=refused), bench.recv(sge(BASE, RECEIVE_BYTES))
    bench.gsi.receive(from_peer())
    bench.work()
    assert recv_statuses(bench) == [(bad, status), (good, S.WR_FLUSH_ERR)]
    assert bench.owner.states == [QpState.ERR]
    wr = bench.send(sge(BASE, 256))
    assert statuses(bench) == [(wr, S.WR_FLUSH_ERR)]


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (from_peer(dgid=PEER), "unknown_gid"),
        (from_peer(dst_qp=2), "not_qp1"),
        (from_peer(bytes(23)), "malformed"),
        (from_peer(bytes(257)), "malformed"),
    ],
    ids=["gid", "qp", "short", "long"],
)
def test_what_is_not_for_us_is_dropped(datagram: Datagram, reason: str) -> None:
    bench = Qp1()
    bench.recv(sge(BASE, RECEIVE_BYTES))
    bench.gsi.receive(datagram)
    bench.work()
    assert bench.dropped == {reason: 1}
    assert bench.owner.received == []


@pytest.mark.parametrize("state", [QpState.RESET, QpState.INIT, QpState.ERR])
def test_a_queue_pair_that_is_not_up_gets_nothing(state: QpState) -> None:
    bench = Qp1(state)
    bench.gsi.receive(from_peer())
    assert bench.dropped == {"not_ready": 1}


def test_without_a_queue_pair_nothing_waits() -> None:
    bench = Qp1()
    bench.qp.destroy()
    bench.gsi.receive(from_peer())
    assert bench.dropped == {"not_ready": 1}
    assert not bench.gsi.progress()


@pytest.mark.parametrize("end", ["destroy", "reset_qp", "reset_device"])
def test_what_waits_is_forgotten(end: str) -> None:
    bench = Qp1()
    bench.gsi.receive(from_peer())
    act: Callable[[], None] = {
        "destroy": bench.qp.destroy,
        "reset_qp": lambda: bench.to(QpState.RESET),
        "reset_device": bench.gsi.reset,
    }[end]
    act()
    assert not bench.gsi.waiting
    assert bench.dropped == {"forgotten": 1}


def test_flush_of_both_queues_is_complete() -> None:
    bench = Qp1(QpState.RTR)
    sends = [bench.send(sge(BASE, 256)) for _ in range(2 * TURN)]
    recvs = [bench.recv(sge(BASE, RECEIVE_BYTES)) for _ in range(2 * TURN)]
    bench.to(QpState.ERR)
    bench.work()
    assert statuses(bench) == [(wr, S.WR_FLUSH_ERR) for wr in sends]
    assert recv_statuses(bench) == [(wr, S.WR_FLUSH_ERR) for wr in recvs]


# --- GIDs ------------------------------------------------------------------------------------------------------------


def test_gids_are_claimed_once_and_given_up_with_the_last() -> None:
    bench = Qp1()
    bench.gsi.add_gid(1, MINE, GidType.ROCE_V2)
    assert bench.carrier.claimed == [MINE]
    bench.gsi.remove_gid(0)
    assert bench.carrier.claimed == [MINE]
    bench.gsi.remove_gid(1)
    bench.gsi.remove_gid(1)
    assert bench.carrier.claimed == []
    bench.gsi.add_gid(0, LOCAL, GidType.ROCE_V2)
    bench.gsi.reset()
    assert bench.carrier.claimed == []


def test_a_gid_of_another_is_not_ours() -> None:
    bench = Qp1()
    bench.carrier.taken.add(LOCAL)
    with pytest.raises(BackendError):
        bench.gsi.add_gid(1, LOCAL, GidType.ROCE_V2)
    bench.send(sge(BASE, 256), arm=to_gid(PEER, index=1))
    assert bench.dropped == {"no_source_gid": 1}
    assert bench.carrier.claimed == [MINE]


@pytest.mark.parametrize("gid_type", GidType)
def test_what_goes_to_oneself_comes_back_without_a_carrier(gid_type: GidType) -> None:
    bench = Qp1(gid_type=gid_type)
    bench.carrier.linked = False
    bench.write(BASE, MAD)
    bench.recv(sge(BASE + 4096, RECEIVE_BYTES))
    bench.send(sge(BASE, 256), arm=to_gid(MINE))
    bench.work()
    assert bench.gsi.counters.looped == bench.gsi.counters.received == 1
    assert parse_grh_area(bench.read(BASE + 4096, GRH_SIZE)) == (MINE, MINE)
    expected = NetworkHdrType.IPV4 if gid_type == GidType.ROCE_V2 else NetworkHdrType.ROCE_V1
    assert bench.owner.received[0].network_hdr_type == expected


def test_there_is_one_qp1() -> None:
    bench = Qp1()
    with pytest.raises(BackendError):
        bench.gsi.create_qp(FakeOwner(), bench.memory, bench.keys)
    bench.qp.destroy()
    bench.gsi.create_qp(FakeOwner(), bench.memory, bench.keys)


# --- anything --------------------------------------------------------------------------------------------------------

addresses = st.sampled_from([0, BASE, SEAM - 1, SEAM - 300, SEAM + 4 * 4096 - 296, (1 << 64) - 1])
sges = st.builds(
    Sge,
    addresses,
    st.sampled_from([0, 1, 24, 232, 256, 296, 4096, 0xFFFFFFFF]),
    st.sampled_from([DMA_KEY, 0]),
)
arms = st.builds(
    to_gid,
    st.sampled_from([MINE, PEER, b"\xff" * 16]),
    index=st.integers(0, 255),
    qpn=st.integers(0, 2),
    qkey=st.integers(0, 0xFFFFFFFF),
)
numbers = {
    "src_qp": st.integers(0, 0xFFFFFFFF),
    "dst_qp": st.integers(0, 2),
    "qkey": st.integers(0, 0xFFFFFFFF),
    "flow_label": st.integers(0, 0xFFFFFFFF),
    "pkey_index": st.integers(0, 0xFFFF),
    "sl": st.integers(0, 255),
    "traffic_class": st.integers(0, 255),
    "hop_limit": st.integers(0, 255),
    "network_type": st.integers(0, 255),
}
datagrams = st.builds(
    Datagram,
    st.binary(min_size=16, max_size=16),
    st.sampled_from([MINE, PEER, gid_v4(9)]),
    st.binary(max_size=256),
    **numbers,
)
acts = st.one_of(
    st.tuples(st.just("send"), st.lists(sges, max_size=4), arms),
    st.tuples(st.just("recv"), st.lists(sges, max_size=4)),
    st.tuples(st.just("arrive"), datagrams),
    st.tuples(st.just("to"), st.sampled_from(list(QpState))),
)


@given(st.lists(acts, max_size=30))
def test_every_datagram_is_delivered_or_counted(steps: list[tuple[object, ...]]) -> None:
    bench = Qp1()
    arrived = 0
    for step in steps:
        match step:
            case ("send", list() as parts, Ud() as arm):
                bench.send(*parts, arm=arm)
            case ("recv", list() as parts):
                bench.recv(*parts)
            case ("arrive", Datagram() as datagram):
                bench.gsi.receive(datagram)
                arrived += 1
            case ("to", QpState() as state):
                bench.to(state)
        bench.work()
    counters = bench.gsi.counters
    delivered = counters.sent + counters.received + len(bench.gsi.waiting)
    left = arrived + sum(wc.status == S.SUCCESS for wc in bench.owner.sent)
    assert left == delivered + sum(counters.dropped.values())
    assert counters.received == sum(wc.status == S.SUCCESS for wc in bench.owner.received)
    assert counters.sent == len(bench.carrier.sent)

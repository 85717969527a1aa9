"""The hub's core: who owns what, where datagrams go, and what rdmacm-mux got wrong.

Tests named test_1_ to test_10_ are the known defects of rdmacm-mux, in the order of docs/mad-relay.md; those that need
sockets or umad are in the neighbouring files under the same names.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import structlog
from unit.fake_mad_hub import Bed
from unit.mads import (
    GID_A,
    GID_B,
    GID_C,
    GID_C_LOCAL,
    GID_NET,
    GUID_A,
    cm_mad,
    drep,
    dreq,
    mad_header,
    rej,
    rep,
    req,
    rtu,
    sidr_rep,
    sidr_req,
)

from pvrdma_server.abi.ibta_vol1_c12 import CM_DREQ, CM_IDS, CM_REJ, CmRejected, CmRejReason
from pvrdma_server.abi.mad import MAD_HDR, CmAttrId
from pvrdma_server.mad_frames import (
    Datagram,
    DropReason,
    Ok,
    RefuseCode,
    Refused,
    Register,
    Unregister,
)
from pvrdma_server.mad_hub.cm import RELAYED, parse
from pvrdma_server.mad_hub.connections import ConnectionTable
from pvrdma_server.mad_hub.switch import MAX_GIDS, MAX_HELD


@pytest.fixture
def events() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
def bed(events: list[MutableMapping[str, Any]]) -> Bed:
    return Bed()


def attr(payload: bytes) -> int:
    return MAD_HDR.unpack_from(payload).attr_id


# --- the defects of rdmacm-mux ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("attr_id", sorted(RELAYED), ids=lambda a: CmAttrId(a).name)
def test_1_every_message_passes_between_vms_and_both_ways_over_the_network(
    bed: Bed, attr_id: int
) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    payload = cm_mad(attr_id, 5, 6)
    a.send(GID_B, payload)
    assert b.payloads() == [payload]
    a.send(GID_NET, payload)
    assert [d.payload for d in bed.to_network()] == [payload]
    bed.from_network(GID_NET, GID_A, payload)
    assert a.payloads() == [payload]
    assert bed.dropped == {}


def test_2_two_vms_with_equal_comm_ids_get_each_their_own_replies(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_NET, req(7, GID_A, GID_NET))
    b.send(GID_NET, req(7, GID_B, GID_NET))
    bed.from_network(GID_NET, GID_B, rep(0x51, 7))
    bed.from_network(GID_NET, GID_A, rep(0x50, 7))
    assert b.payloads() == [rep(0x51, 7)]
    assert a.payloads() == [rep(0x50, 7)]


def test_2_equal_comm_ids_of_both_vms_and_of_their_peers(bed: Bed) -> None:
    """Each connects to the other with the same ids everywhere, and then the network to both."""
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_B, req(7, GID_A, GID_B))
    b.send(GID_A, req(7, GID_B, GID_A))
    b.send(GID_A, rep(8, 7))
    a.send(GID_B, rep(8, 7))
    for vm in (a, b):
        bed.from_network(GID_NET, vm.gid, req(7, GID_NET, vm.gid))
    assert [attr(p) for p in a.payloads()] == [CmAttrId.REQ, CmAttrId.REP, CmAttrId.REQ]
    assert [attr(p) for p in b.payloads()] == [CmAttrId.REQ, CmAttrId.REP, CmAttrId.REQ]
    assert (len(a.client.connections), len(b.client.connections)) == (3, 3)


def test_3_a_dreq_after_ten_minutes_idle_arrives(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    connect(bed, a.send, GID_A)
    bed.clock.now_s += 600
    bed.from_network(GID_NET, GID_A, dreq(0x50, 7, 0x11))
    # Even where only the comm id tells whose it is.
    bed.from_network(GID_NET, bytes(16), dreq(0x50, 7, 0x11, tid=3))
    assert [attr(p) for p in a.payloads()] == [CmAttrId.REP, CmAttrId.DREQ, CmAttrId.DREQ]
    a.send(GID_NET, drep(7, 0x50))
    assert len(a.client.connections) == 0


def test_4_one_interface_id_under_two_prefixes_is_two_gids(bed: Bed) -> None:
    a, b = bed.vm("a", GID_C), bed.vm("b", GID_C_LOCAL)
    bed.from_network(GID_NET, GID_C_LOCAL, req(1, GID_NET, GID_C_LOCAL))
    bed.from_network(GID_NET, GID_C, req(2, GID_NET, GID_C))
    assert [CM_IDS.unpack_from(p).local for p in a.payloads()] == [2]
    assert [CM_IDS.unpack_from(p).local for p in b.payloads()] == [1]


# --- GIDs ------------------------------------------------------------------------------------------------------------


def test_a_claim_of_anothers_gid_is_refused_and_names_the_holder(bed: Bed) -> None:
    bed.vm("web-1", GID_A)
    b = bed.vm("web-2", GID_B)
    answer = b.register(GID_A)
    assert isinstance(answer, Refused)
    assert (answer.gid, answer.code) == (GID_A, RefuseCode.HELD_BY_ANOTHER)
    assert "held by web-1" in answer.text
    assert "0000:0000:0000:0000:0000:ffff:0a09:0001" in answer.text
    assert bed.switch.counters.refusals == {"held_by_another": 1}


def test_a_client_sends_only_from_its_own_gids(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_B, req(1, GID_B, GID_B), sgid=GID_B)
    a.send(GID_B, req(1, GID_C, GID_B), sgid=GID_C)
    assert b.take() == []
    assert a.drops() == [DropReason.NOT_OWNER] * 2
    assert bed.dropped == {"not_owner": 2}


def test_a_client_unregisters_only_its_own_gids(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    for gid in (GID_B, GID_C):
        answer = a.unregister(gid)
        assert isinstance(answer, Refused)
        assert answer.code == RefuseCode.NOT_REGISTERED
    bed.from_network(GID_NET, GID_B, req(1, GID_NET, GID_B))
    assert len(b.take()) == 1


def test_a_freed_gid_can_be_had(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b")
    assert a.unregister(GID_A) == Ok(GID_A)
    assert b.register(GID_A) == Ok(GID_A)
    b.die()
    assert a.register(GID_A) == Ok(GID_A)


def test_registering_twice_is_fine(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    assert a.register(GID_A, 1) == Ok(GID_A)
    assert a.client.gids == {GID_A: 1}


def test_a_holder_that_has_hung_up_does_not_keep_its_successor_out(bed: Bed) -> None:
    old = bed.vm("vm1", GID_A)
    old.outbox.is_gone = True
    new = bed.vm("vm1")
    assert new.register(GID_A) == Ok(GID_A)
    assert not old.client.attached
    assert old.outbox.closed
    bed.from_network(GID_NET, GID_A, req(1, GID_NET, GID_A))
    assert len(new.take()) == 1
    old.die()
    assert new.client.gids


@pytest.mark.parametrize(
    ("gid", "gid_type"),
    [(bytes(16), 2), (b"\xff" + bytes(15), 2), (GID_A, 0), (GID_A, 3)],
)
def test_gids_that_are_nobodys_are_refused(bed: Bed, gid: bytes, gid_type: int) -> None:
    a = bed.vm("a", GID_A)
    answer = a.register(gid, gid_type)
    assert isinstance(answer, Refused)
    assert answer.code == RefuseCode.BAD_GID
    assert a.client.gids == {GID_A: 2}


def test_there_is_a_limit_to_gids(bed: Bed) -> None:
    a = bed.vm("a")
    for number in range(MAX_GIDS):
        assert a.register(GID_A[:14] + number.to_bytes(2, "big")) == Ok(
            GID_A[:14] + number.to_bytes(2, "big")
        )
    answer = a.register(GID_B[:12] + b"\x01\x01\x01\x01")
    assert isinstance(answer, Refused)
    assert answer.code == RefuseCode.TOO_MANY


def test_a_client_that_asks_and_never_reads_is_ended(bed: Bed) -> None:
    a = bed.vm("a", GID_A, room=2)
    a.outbox.messages += [Ok(GID_A)] * 20
    bed.switch.received(a.client, Register(GID_B, 2))
    assert a.outbox.closed
    assert not a.client.attached


# --- where datagrams go ----------------------------------------------------------------------------------------------


def test_datagrams_between_vms_are_switched_with_umad_and_without(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_B, req(1, GID_A, GID_B), flow_label=3, traffic_class=4, hop_limit=5, sl=6)
    bed.switch.uplink = None
    a.send(GID_B, rtu(1, 2))
    first, second = b.take()
    assert first == Datagram(
        GID_A, GID_B, req(1, GID_A, GID_B), flow_label=3, traffic_class=4, hop_limit=5, sl=6
    )
    assert second.payload == rtu(1, 2)
    assert bed.uplink.sent == []
    assert bed.switch.counters.switched == 2


def test_others_go_out_in_the_clients_lane_or_nowhere(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b")
    assert b.register(GID_B, 1) == Ok(GID_B)
    a.send(GID_NET, req(1, GID_A, GID_NET))
    b.send(GID_NET, req(1, GID_B, GID_NET), sgid=GID_B)
    lanes = [(lane, gid_type, d.sgid) for lane, gid_type, d in bed.uplink.sent]
    assert lanes == [(a.client.lane, 2, GID_A), (b.client.lane, 1, GID_B)]
    assert a.client.lane != b.client.lane
    bed.switch.uplink = None
    a.send(GID_NET, req(1, GID_A, GID_NET))
    assert a.drops() == [DropReason.NO_ROUTE]
    assert bed.dropped == {"no_route": 1}


def test_an_uplink_that_refuses_at_once_or_later(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    bed.uplink.refuse = DropReason.QUEUE_FULL
    a.send(GID_NET, req(1, GID_A, GID_NET))
    bed.uplink.refuse = None
    a.send(GID_NET, req(1, GID_A, GID_NET))
    ((lane, _, datagram),) = bed.uplink.sent
    bed.switch.send_failed(lane, datagram, "no route to host")
    assert a.drops() == [DropReason.QUEUE_FULL, DropReason.SEND_FAILED]
    assert bed.switch.counters.to_network == 0
    a.die()
    bed.switch.send_failed(lane, datagram, "no route to host")
    assert bed.dropped == {"queue_full": 1, "send_failed": 2}


def test_a_vm_reaches_itself(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    a.send(GID_A, req(1, GID_A, GID_A))
    a.send(GID_A, rep(2, 1))
    a.send(GID_A, rtu(1, 2))
    assert len(a.payloads()) == 3
    assert [c.established for c in a.client.connections] == [True, True]
    a.send(GID_A, dreq(1, 2, 0x22))
    a.send(GID_A, drep(2, 1))
    assert len(a.client.connections) == 0


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", DropReason.MALFORMED),
        (mad_header(CmAttrId.REQ)[:23], DropReason.MALFORMED),
        (mad_header(CmAttrId.REQ), DropReason.MALFORMED),
        (mad_header(CmAttrId.SIDR_REP), DropReason.MALFORMED),
        (cm_mad(CmAttrId.RTU, 1, 2)[:31], DropReason.MALFORMED),
        (mad_header(CmAttrId.REQ, mgmt_class=3).ljust(256, b"\0"), DropReason.NOT_CM),
        (mad_header(CmAttrId.REQ, version=1).ljust(256, b"\0"), DropReason.NOT_CM),
        (mad_header(CmAttrId.CLASS_PORT_INFO).ljust(256, b"\0"), DropReason.NOT_CM),
        (mad_header(0x1B).ljust(256, b"\0"), DropReason.NOT_CM),
    ],
)
def test_what_is_no_cm_message_is_dropped_and_counted(
    bed: Bed, payload: bytes, reason: DropReason
) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_B, payload)
    bed.from_network(GID_NET, GID_B, payload)
    assert b.take() == []
    assert a.drops() == [reason]
    assert bed.dropped == {reason.name.lower(): 2}


def test_short_mads_are_carried_if_their_ids_are_there(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    short = [sidr_rep(1)[:28], rtu(1, 2)[:32], req(3, GID_A, GID_B)[:28]]
    for payload in short:
        a.send(GID_B, payload)
    assert b.payloads() == short


@pytest.mark.parametrize(("src_qp", "dst_qp"), [(0, 1), (1, 0), (2, 1), (1, 77)])
def test_other_queue_pairs_are_not_relayed(bed: Bed, src_qp: int, dst_qp: int) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_B, req(1, GID_A, GID_B), src_qp=src_qp, dst_qp=dst_qp)
    assert b.take() == []
    assert bed.dropped == {"not_cm": 1}


def test_retries_and_duplicates_pass_unharmed(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    conversation = [
        (a, req(1, GID_A, GID_B, tid=5)),
        (a, req(1, GID_A, GID_B, tid=5)),
        (b, cm_mad(CmAttrId.MRA, 9, 1, tid=5)),
        (b, rep(9, 1, tid=5)),
        (b, rep(9, 1, tid=5)),
        (a, rtu(1, 9, tid=5)),
        (a, rtu(1, 9, tid=5)),
        (a, req(1, GID_A, GID_B, tid=5)),
    ]
    for vm, payload in conversation:
        vm.send(GID_B if vm is a else GID_A, payload)
    assert b.payloads() == [p for vm, p in conversation if vm is a]
    assert a.payloads() == [p for vm, p in conversation if vm is b]
    assert [c.established for c in (*a.client.connections, *b.client.connections)] == [True, True]


def test_a_rej_of_a_duplicated_req_arrives(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_B, req(1, GID_A, GID_B))
    b.send(GID_A, rej(0, 1))
    b.send(GID_A, rej(0, 1))
    assert a.payloads() == [rej(0, 1)] * 2
    assert len(a.client.connections) == 0


def test_ipv4_mapped_gids_and_92_bytes_of_private_data(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    payload = req(1, GID_A, GID_B)[:164] + bytes(range(92))
    a.send(GID_B, payload)
    assert b.payloads() == [payload]


def test_a_slow_client_loses_its_own_datagrams_only(bed: Bed) -> None:
    a, slow, c = bed.vm("a", GID_A), bed.vm("slow", GID_B), bed.vm("c", GID_C)
    slow.outbox.room = 3
    for number in range(10):
        a.send(GID_B, req(number + 1, GID_A, GID_B))
        a.send(GID_C, req(number + 1, GID_A, GID_C))
    assert (len(slow.take()), len(c.take())) == (3, 10)
    assert bed.dropped == {"queue_full": 7}
    assert slow.client.not_read == 7
    assert a.drops() == [DropReason.QUEUE_FULL] * 7


# --- the address does not tell ---------------------------------------------------------------------------------------


def connect(
    bed: Bed, send: Callable[..., None], sgid: bytes, local_id: int = 7, peer_id: int = 0x50
) -> None:
    """A connection from a VM to the network."""
    send(GID_NET, req(local_id, sgid, GID_NET))
    bed.from_network(GID_NET, sgid, rep(peer_id, local_id))
    send(GID_NET, rtu(local_id, peer_id))
    bed.to_network()


UNKNOWN = bytes(16)


def test_requests_for_an_unknown_gid_go_where_they_say(bed: Bed) -> None:
    a, c = bed.vm("a", GID_A), bed.vm("c", GID_C)
    bed.from_network(GID_NET, UNKNOWN, req(1, GID_NET, GID_A))
    bed.from_network(GID_NET, UNKNOWN, sidr_req(2, GID_NET, GID_A))
    bed.from_network(GID_NET, UNKNOWN, sidr_req(3, GID_NET, GID_C))
    assert [d.dgid for d in a.take()] == [GID_A, GID_A]
    assert [d.dgid for d in c.take()] == [GID_C]
    assert bed.switch.counters.by_comm_id == 3


def test_replies_for_an_unknown_gid_go_by_comm_id_of_the_client(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_NET, req(7, GID_A, GID_NET))
    b.send(GID_NET, sidr_req(7, GID_B, GID_NET))
    bed.from_network(GID_NET, UNKNOWN, rep(0x50, 7))
    bed.from_network(GID_NET, UNKNOWN, sidr_rep(7))
    assert [(d.dgid, d.payload) for d in a.take()] == [(GID_A, rep(0x50, 7))]
    assert [(d.dgid, d.payload) for d in b.take()] == [(GID_B, sidr_rep(7))]


def test_an_ambiguous_comm_id_is_nobodys(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    for vm in (a, b):
        vm.send(GID_NET, req(7, vm.gid, GID_NET))
    bed.from_network(GID_NET, UNKNOWN, rep(0x50, 7))
    bed.from_network(GID_C, UNKNOWN, rep(0x50, 7))
    assert a.take() == b.take() == []
    assert bed.dropped == {"unknown_receiver": 2}


# --- lifetimes -------------------------------------------------------------------------------------------------------


def test_an_entry_lives_from_req_to_drep_or_rej(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    a.send(GID_B, req(1, GID_A, GID_B))
    b.send(GID_A, rep(2, 1))
    a.send(GID_B, rtu(1, 2))
    assert (len(a.client.connections), len(b.client.connections)) == (1, 1)
    b.send(GID_A, dreq(2, 1, 0x11))
    assert len(a.client.connections) == 1
    a.send(GID_B, drep(1, 2))
    assert (len(a.client.connections), len(b.client.connections)) == (0, 0)
    a.send(GID_B, req(3, GID_A, GID_B, tid=9))
    b.send(GID_A, rej(0, 3))
    assert (len(a.client.connections), len(b.client.connections)) == (0, 0)


def test_a_comm_id_that_is_used_again_is_a_new_connection(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    connect(bed, a.send, GID_A)
    a.send(GID_NET, req(7, GID_A, GID_NET, tid=99))
    assert [c.established for c in a.client.connections] == [False]


def test_there_is_a_bound_on_connections_and_the_oldest_goes() -> None:
    table = ConnectionTable(max_connections=3, max_sidr=2)
    for number in range(1, 6):
        table.sent(Datagram(GID_A, GID_B, b""), parse(req(number, GID_A, GID_B)))
        table.sent(Datagram(GID_A, GID_B, b""), parse(sidr_req(number, GID_A, GID_B)))
    assert [c.local_id for c in table] == [3, 4, 5]
    assert table.evicted == 2
    waits = [table.waits_for(GID_B, parse(sidr_rep(n))) is not None for n in range(1, 6)]
    assert waits == [False, False, False, True, True]
    waits = [table.waits_for(GID_B, parse(rep(9, n))) is not None for n in range(1, 6)]
    assert waits == [False, False, True, True, True]


def test_an_evicted_connection_still_works(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    a.client.connections = ConnectionTable(max_connections=1)
    connect(bed, a.send, GID_A, local_id=7, peer_id=0x50)
    connect(bed, a.send, GID_A, local_id=8, peer_id=0x51)
    a.take()
    bed.from_network(GID_NET, GID_A, dreq(0x50, 7, 0x11))
    assert a.payloads() == [dreq(0x50, 7, 0x11)]


# --- a client is gone ------------------------------------------------------------------------------------------------


def test_peers_of_established_connections_get_a_dreq(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    connect(bed, a.send, GID_A)
    a.send(GID_B, req(8, GID_A, GID_B))
    b.send(GID_A, rep(9, 8, qpn=0x22))
    a.send(GID_B, rtu(8, 9))
    bed.from_network(GID_NET, GID_A, req(3, GID_NET, GID_A, qpn=0x33))
    a.send(GID_NET, rep(4, 3))
    bed.from_network(GID_NET, GID_A, rtu(3, 4))
    b.take()
    bed.to_network()
    a.die()
    farewells = bed.to_network() + b.take()
    assert [(d.sgid, d.dgid) for d in farewells] == [
        (GID_A, GID_NET),
        (GID_A, GID_NET),
        (GID_A, GID_B),
    ]
    told = [CM_DREQ.unpack(d.payload) for d in farewells]
    # The receiver looks for its comm ids, and ignores a DREQ that does not name its own queue pair.
    assert [(t.local_comm_id, t.remote_comm_id, t.remote_qpn >> 8) for t in told] == [
        (7, 0x50, 0x22),
        (4, 3, 0x33),
        (8, 9, 0x22),
    ]
    assert {attr(d.payload) for d in farewells} == {CmAttrId.DREQ}
    tids = {MAD_HDR.unpack_from(d.payload).tid for d in farewells}
    assert len(tids) == 3
    assert bed.switch.counters.farewells == 3


def farewell_rej(bed: Bed) -> tuple[int, int, int, int, bytes]:
    (datagram,) = bed.to_network()
    assert attr(datagram.payload) == CmAttrId.REJ
    rej = CM_REJ.unpack(datagram.payload)
    ari = rej.ari[: rej.info_length >> 1]
    return rej.local_comm_id, rej.remote_comm_id, rej.message_rejected >> 6, rej.reason, ari


@pytest.mark.parametrize("mra", [False, True])
def test_dies_after_its_req(bed: Bed, mra: bool) -> None:
    """The peer, whose id we may not know, finds the REQ by our GUID and id."""
    a = bed.vm("a", GID_A)
    a.send(GID_NET, req(7, GID_A, GID_NET))
    if mra:
        bed.from_network(GID_NET, GID_A, cm_mad(CmAttrId.MRA, 0x50, 7))
    bed.to_network()
    a.die()
    assert farewell_rej(bed) == (7, 0, CmRejected.OTHER, CmRejReason.TIMEOUT, GUID_A)


def test_dies_between_the_peers_rep_and_its_rtu(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    a.send(GID_NET, req(7, GID_A, GID_NET))
    bed.from_network(GID_NET, GID_A, rep(0x50, 7))
    bed.to_network()
    a.die()
    assert farewell_rej(bed) == (7, 0x50, CmRejected.REP, CmRejReason.CONSUMER_DEFINED, b"")


@pytest.mark.parametrize("mra", [False, True])
def test_dies_with_a_req_unanswered(bed: Bed, mra: bool) -> None:
    a = bed.vm("a", GID_A)
    bed.from_network(GID_NET, GID_A, req(3, GID_NET, GID_A))
    if mra:
        a.send(GID_NET, cm_mad(CmAttrId.MRA, 4, 3))
    bed.to_network()
    a.die()
    expected = (4 if mra else 0, 3, CmRejected.REQ, CmRejReason.CONSUMER_DEFINED, b"")
    assert farewell_rej(bed) == expected


def test_dies_between_its_rep_and_the_peers_rtu(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    bed.from_network(GID_NET, GID_A, req(3, GID_NET, GID_A))
    a.send(GID_NET, rep(4, 3))
    bed.to_network()
    a.die()
    assert farewell_rej(bed) == (4, 3, CmRejected.OTHER, CmRejReason.CONSUMER_DEFINED, b"")


def test_nobody_is_told_of_what_is_over(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    connect(bed, a.send, GID_A)
    bed.from_network(GID_NET, GID_A, drep(0x50, 7))
    a.die()
    assert bed.to_network() == []
    assert bed.uplink.left == [a.client.lane]


def test_a_vm_that_is_gone_is_not_told_of_itself(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    a.send(GID_A, req(1, GID_A, GID_A))
    a.die()
    assert bed.to_network() == []
    assert bed.dropped == {}


def test_an_unregistered_gid_ends_its_connections_and_no_others(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A, GID_C), bed.vm("b", GID_B)
    for gid, local_id in ((GID_A, 1), (GID_C, 2)):
        a.send(GID_B, req(local_id, gid, GID_B), sgid=gid)
        b.send(gid, rep(local_id + 10, local_id))
        a.send(GID_B, rtu(local_id, local_id + 10), sgid=gid)
    b.take()
    a.unregister(GID_A)
    assert [CM_IDS.unpack_from(d.payload) for d in b.take()] == [(1, 11)]
    assert [c.local_id for c in a.client.connections] == [2]


def test_the_answer_to_unregister_waits_until_the_farewells_are_out(bed: Bed) -> None:
    """The server then takes the address off the host's port, without which nothing can be sent from it."""
    a = bed.vm("a", GID_A, GID_C)
    connect(bed, a.send, GID_A)
    a.take()
    bed.switch.received(a.client, Unregister(GID_A))
    bed.switch.received(a.client, Register(GID_B, 2))
    bed.switch.received(a.client, Unregister(GID_C))
    assert a.outbox.messages == []
    assert len(bed.to_network()) == 1
    bed.uplink.waiting.pop()()
    assert a.outbox.messages == [Ok(GID_A), Ok(GID_B), Ok(GID_C)]
    assert bed.uplink.waiting == []


def test_two_waits_are_two(bed: Bed) -> None:
    a = bed.vm("a", GID_A, GID_C)
    connect(bed, a.send, GID_A)
    a.gid = GID_C
    connect(bed, a.send, GID_C, local_id=8)
    a.take()
    bed.switch.received(a.client, Unregister(GID_A))
    bed.switch.received(a.client, Unregister(GID_C))
    bed.uplink.waiting.pop(0)()
    assert a.outbox.messages == []
    bed.uplink.waiting.pop(0)()
    assert a.outbox.messages == [Ok(GID_A), Ok(GID_C)]


def test_answers_do_not_wait_for_an_uplink_that_is_gone(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    connect(bed, a.send, GID_A)
    a.take()
    bed.switch.received(a.client, Unregister(GID_A))
    bed.switch.unplug()
    assert a.outbox.messages == [Ok(GID_A)]
    assert a.register(GID_B) == Ok(GID_B)
    bed.uplink.waiting.pop()()
    assert a.outbox.messages == [Ok(GID_A)]


def test_there_is_a_bound_on_answers_that_wait(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    connect(bed, a.send, GID_A)
    a.take()
    bed.switch.received(a.client, Unregister(GID_A))
    for _ in range(MAX_HELD):
        bed.switch.received(a.client, Unregister(GID_C))
    assert len(a.outbox.messages) > MAX_HELD
    assert a.client.held == []


def test_farewells_reach_a_peer_whose_queue_is_full(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    for number in range(1, 21):
        a.send(GID_B, req(number, GID_A, GID_B))
        b.send(GID_A, rep(100 + number, number))
        a.send(GID_B, rtu(number, 100 + number))
    b.take()
    b.outbox.room = 2
    a.send(GID_B, rtu(1, 101))
    a.send(GID_B, rtu(1, 101))
    a.die()
    assert [attr(p) for p in b.payloads()[2:]] == [CmAttrId.DREQ] * 18
    assert bed.dropped == {"queue_full": 2}


def test_without_a_way_farewells_are_counted(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    connect(bed, a.send, GID_A)
    bed.switch.unplug()
    a.die()
    assert bed.dropped == {"no_route": 1}


def test_leaving_twice_is_leaving_once(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    a.die()
    b = bed.vm("b", GID_A)
    a.die()
    assert b.client.gids == {GID_A: 2}
    assert bed.uplink.left == [a.client.lane]


def test_200_connections_in_parallel(bed: Bed) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    for number in range(1, 201):
        a.send(GID_B, req(number, GID_A, GID_B, tid=number))
    for payload in b.payloads():
        ids, tid = CM_IDS.unpack_from(payload), MAD_HDR.unpack_from(payload).tid
        b.send(GID_A, rep(1000 + ids.local, ids.local, tid=tid))
    for payload in a.payloads():
        ids = CM_IDS.unpack_from(payload)
        a.send(GID_B, rtu(ids.remote, ids.local))
    assert a.client.connections.established == b.client.connections.established == 200
    for number in range(1, 201):
        b.send(GID_A, dreq(1000 + number, number, 0x11))
        a.send(GID_B, drep(number, 1000 + number))
    assert len(a.client.connections) == len(b.client.connections) == 0
    assert bed.dropped == {}


# --- log and status --------------------------------------------------------------------------------------------------


def test_drops_are_logged_once_in_a_while_with_how_many_were_left_out(
    bed: Bed, events: list[MutableMapping[str, Any]]
) -> None:
    a, b = bed.vm("a", GID_A), bed.vm("b", GID_B)
    events.clear()
    for _ in range(1000):
        a.send(GID_B, b"")
    b.send(GID_A, b"")
    bed.clock.now_s += 31
    a.send(GID_B, b"")
    lines = [(e["client"], e["why"], e.get("left_out")) for e in events]
    assert lines == [
        ("a", "malformed", None),
        ("b", "malformed", None),
        ("a", "malformed", 999),
    ]


def test_snapshot(bed: Bed) -> None:
    a = bed.vm("a", GID_A)
    connect(bed, a.send, GID_A)
    a.send(GID_B, b"")
    (client,) = bed.switch.snapshot()["clients"]
    assert client == {
        "name": "a",
        "gids": {GID_A.hex(): 2},
        "connections": 1,
        "established": 1,
        "connections_evicted": 0,
        "sent": 3,
        "received": 1,
        "not_read": 0,
        "drops": {"malformed": 1},
    }
    assert bed.switch.snapshot()["counters"] == {
        "switched": 0,
        "to_network": 2,
        "from_network": 1,
        "by_comm_id": 0,
        "farewells": 0,
        "drops": {"malformed": 1},
        "refusals": {},
    }

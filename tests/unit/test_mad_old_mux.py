"""The old protocol: its two ends against each other, cut anywhere, and what rdmacm-mux and QEMU are known to send."""

import errno
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.mads import GID_A, GID_B, GID_C, cm_mad, rep, req, rtu, sidr_rep, sidr_req

from pvrdma_server.abi.mad import CmAttrId
from pvrdma_server.abi.rdmacm_mux import MUX_MSG, MUX_MSG_SIZE, MuxErrCode, MuxMsgType, MuxOpCode
from pvrdma_server.mad_frames import (
    Datagram,
    Dropped,
    DropReason,
    FrameError,
    Ok,
    Receive,
    RefuseCode,
    Refused,
    Register,
    Send,
    Unregister,
)
from pvrdma_server.mad_hub.cm import parse
from pvrdma_server.mad_hub.connections import ConnectionTable
from pvrdma_server.mad_hub.old_mux import OldMuxConnection
from pvrdma_server.mad_old_mux import OldMuxDialect

INDEX = {GID_A: 3, GID_B: 4, GID_C: 5}


def ends() -> tuple[OldMuxDialect, OldMuxConnection]:
    return OldMuxDialect(INDEX.__getitem__), OldMuxConnection(ConnectionTable())


def registered(client: OldMuxDialect, hub: OldMuxConnection, gid: bytes) -> None:
    assert hub.receive_data(client.encode(Register(gid, 2))) == [Register(gid, 2)]
    assert hub.encode(Ok(gid)) == b""
    assert client.receive_data(hub.respond()) == [Ok(gid)]


def test_register_and_unregister() -> None:
    client, hub = ends()
    registered(client, hub, GID_A)
    assert hub.receive_data(client.encode(Unregister(GID_A))) == [Unregister(GID_A)]
    hub.encode(Ok(GID_A))
    assert client.receive_data(hub.respond()) == [Ok(GID_A)]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (RefuseCode.HELD_BY_ANOTHER, MuxErrCode.EACCES),
        (RefuseCode.NOT_REGISTERED, MuxErrCode.ENOTFOUND),
        (RefuseCode.BAD_GID, MuxErrCode.EINVAL),
    ],
)
def test_refusals_have_the_muxs_codes(code: RefuseCode, error: MuxErrCode) -> None:
    client, hub = ends()
    hub.receive_data(client.encode(Register(GID_A, 2)))
    hub.encode(Refused(GID_A, code, "because"))
    response = hub.respond()
    assert MUX_MSG.unpack(response).err_code == error
    (answer,) = client.receive_data(response)
    assert isinstance(answer, Refused)
    assert (answer.gid, answer.code) == (GID_A, code)


def test_registering_again_is_eexist_which_is_fine() -> None:
    client, hub = ends()
    registered(client, hub, GID_A)
    hub.receive_data(client.encode(Register(GID_A, 2)))
    hub.encode(Ok(GID_A))
    response = hub.respond()
    assert MUX_MSG.unpack(response).err_code == MuxErrCode.EEXIST
    assert client.receive_data(response) == [Ok(GID_A)]


@pytest.mark.parametrize(("own", "network_type"), [(GID_A, 1), (GID_C, 2)], ids=["v4", "v6"])
def test_a_mad_from_client_to_hub(own: bytes, network_type: int) -> None:
    client, hub = ends()
    registered(client, hub, own)
    datagram = Datagram(
        own,
        GID_B,
        req(7, own, GID_B),
        flow_label=5,
        traffic_class=9,
        sl=1,
        network_type=network_type,
    )
    raw = client.encode(Send(datagram))
    message = MUX_MSG.unpack(raw)
    assert (message.msg_type, message.op_code) == (MuxMsgType.REQ, MuxOpCode.MAD)
    umad = message.umad
    assert (umad.gid_index, umad.gid, umad.grh_present) == (INDEX[own], GID_B, 1)
    assert umad.qpn == b"\0\0\0\1"
    assert hub.receive_data(raw) == [Send(datagram)]
    assert client.receive_data(hub.respond()) == []


def test_a_gid_that_the_host_lacks_sends_nothing() -> None:
    client = OldMuxDialect(lambda gid: None)
    assert client.encode(Send(Datagram(GID_A, GID_B, req(7, GID_A, GID_B)))) == b""
    hub = OldMuxConnection(ConnectionTable())
    assert hub.receive_data(client.encode(Register(GID_A, 2))) == [Register(GID_A, 2)]
    hub.encode(Ok(GID_A))
    assert client.receive_data(hub.respond()) == [Ok(GID_A)]


def test_a_dropped_mad_is_einval_and_only_that_one() -> None:
    client, hub = ends()
    for _ in range(2):
        hub.receive_data(client.encode(Send(Datagram(GID_A, GID_B, b""))))
    hub.encode(Dropped(DropReason.NO_ROUTE, GID_B))
    assert client.receive_data(hub.respond()) == [Dropped(DropReason.SEND_FAILED, GID_B)]
    assert client.receive_data(hub.respond()) == []


def test_a_mad_from_hub_to_client() -> None:
    client, hub = ends()
    registered(client, hub, GID_A)
    datagram = Datagram(GID_B, GID_A, req(7, GID_B, GID_A), network_type=1, hop_limit=3, sl=2)
    raw = hub.encode(Receive(datagram))
    assert MUX_MSG.unpack(raw).umad.gid == GID_B
    assert client.receive_data(raw) == [Receive(datagram)]


def test_the_mux_gives_only_the_interface_id_of_our_gid() -> None:
    client, hub = ends()
    registered(client, hub, GID_C)
    raw = bytearray(hub.encode(Receive(Datagram(GID_B, GID_C, b"x"))))
    raw[8:16] = bytes(8)
    (received,) = client.receive_data(bytes(raw))
    assert isinstance(received, Receive)
    assert received.datagram.dgid == GID_C
    raw[8:24] = bytes(16)
    assert client.receive_data(bytes(raw)) == []


def test_what_the_host_s_umad_reports_back_to_the_mux_is_nobodys() -> None:
    """The mux sends with a timeout, and hands the report (with a status) on as if it were a MAD from the network."""
    client, hub = ends()
    registered(client, hub, GID_A)
    message = MUX_MSG.unpack(hub.encode(Receive(Datagram(GID_B, GID_A, rtu(1, 2)))))
    reported = message.umad._replace(status=errno.ETIMEDOUT)
    assert client.receive_data(MUX_MSG.pack(message._replace(umad=reported))) == []
    assert len(client.receive_data(MUX_MSG.pack(message))) == 1


def from_qemu(sgid: bytes, payload: bytes) -> bytes:
    """As QEMU's mad_send: the address is the sender's own GID."""
    client = OldMuxDialect(lambda _: 1)
    raw = bytearray(client.encode(Send(Datagram(sgid, sgid, payload))))
    assert bytes(raw[72:88]) == sgid
    return bytes(raw)


def test_qemu_sends_to_itself_and_the_mad_tells_where_to() -> None:
    table = ConnectionTable()
    client, hub = OldMuxDialect(lambda _: 1), OldMuxConnection(table)
    registered(client, hub, GID_A)

    def destination(payload: bytes) -> bytes:
        (message,) = hub.receive_data(from_qemu(GID_A, payload))
        assert isinstance(message, Send)
        hub.respond()
        table.sent(message.datagram, parse(message.datagram.payload))
        return message.datagram.dgid

    assert destination(req(7, GID_A, GID_B)) == GID_B
    assert destination(sidr_req(8, GID_A, GID_C)) == GID_C
    assert destination(sidr_req(9, GID_A, GID_B)) == GID_B
    reply = rep(0x70, 7)
    table.received(Datagram(GID_B, GID_A, reply), parse(reply))
    assert destination(rtu(7, 0x70)) == GID_B
    # As the passive side, of two peers with the same comm id.
    for peer, tid in ((GID_B, 1), (GID_C, 2)):
        question = req(5, peer, GID_A, tid=tid)
        table.received(Datagram(peer, GID_A, question), parse(question))
    assert destination(rep(0x90, 5, tid=2)) == GID_C
    assert destination(rep(0x91, 5, tid=1)) == GID_B
    assert destination(cm_mad(CmAttrId.DREQ, 0x90, 5, tid=77)) == GID_C
    for peer, tid in ((GID_B, 3), (GID_C, 4)):
        question = sidr_req(6, peer, GID_A, tid=tid)
        table.received(Datagram(peer, GID_A, question), parse(question))
    assert destination(sidr_rep(6, tid=3)) == GID_B
    assert destination(sidr_rep(6, tid=4)) == GID_C
    # Of nothing that is known: the hub will have no route, or deliver it to the sender.
    assert destination(rtu(1234, 5678)) == GID_A


def test_7_a_stream_cut_anywhere_is_put_together() -> None:
    client, hub = ends()
    stream = client.encode(Register(GID_A, 2)) + client.encode(Register(GID_B, 2))
    received = []
    for byte in stream:
        received += hub.receive_data(bytes((byte,)))
    assert received == [Register(GID_A, 2), Register(GID_B, 2)]


@pytest.mark.parametrize("length", [1, 8, 359, 361, 719])
def test_a_stream_that_ends_inside_a_message_is_an_error(length: int) -> None:
    client, hub = ends()
    stream = client.encode(Register(GID_A, 2)) * 2
    hub.receive_data(stream[:length])
    with pytest.raises(FrameError, match="truncated"):
        hub.receive_data(b"")


def test_what_is_no_request_ends_the_connection() -> None:
    _, hub = ends()
    with pytest.raises(FrameError, match="no request"):
        hub.receive_data(struct.pack("<i", 1).ljust(MUX_MSG_SIZE, b"\0"))
    with pytest.raises(FrameError, match="no request"):
        hub.receive_data(bytes(MUX_MSG_SIZE))


@pytest.mark.parametrize("length", [-1, 257, 0x7FFFFFFF])
def test_a_length_out_of_range_is_answered_einval(length: int) -> None:
    client, hub = ends()
    raw = bytearray(client.encode(Send(Datagram(GID_A, GID_B, b""))))
    raw[32:36] = struct.pack("<i", length)
    (message,) = hub.receive_data(bytes(raw))
    assert isinstance(message, Send)
    assert message.datagram.payload == b""
    hub.encode(Dropped(DropReason.MALFORMED, GID_B))
    assert MUX_MSG.unpack(hub.respond()).err_code == MuxErrCode.EINVAL


def test_an_unknown_operation_is_answered_einval() -> None:
    _, hub = ends()
    raw = struct.pack("<ii", 0, 3).ljust(MUX_MSG_SIZE, b"\0")
    (message,) = hub.receive_data(raw)
    assert isinstance(message, Send)
    hub.encode(Dropped(DropReason.MALFORMED, bytes(16)))
    assert MUX_MSG.unpack(hub.respond()).err_code == MuxErrCode.EINVAL


def test_4_a_registration_by_interface_id_alone_is_link_local() -> None:
    _, hub = ends()
    link_local = bytes.fromhex("fe80000000000000") + GID_C[8:]
    raw = struct.pack("<ii16s", 0, 0, bytes(8) + GID_C[8:]).ljust(MUX_MSG_SIZE, b"\0")
    assert hub.receive_data(raw) == [Register(link_local, 2)]
    hub.encode(Ok(link_local))
    hub.respond()
    raw = struct.pack("<ii16s", 0, 1, bytes(8) + GID_C[8:]).ljust(MUX_MSG_SIZE, b"\0")
    assert hub.receive_data(raw) == [Unregister(link_local)]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (struct.pack("<i", 2), "unexpected"),
        (struct.pack("<ii", 0, 0), "unexpected"),
        (struct.pack("<i", 1), "unexpected"),
        (struct.pack("<ii24si", 0, 2, bytes(24), 257), "bad_length"),
        (struct.pack("<ii24si", 0, 2, bytes(24), -1), "bad_length"),
    ],
)
def test_a_mux_that_talks_nonsense_ends_the_link(message: bytes, kind: str) -> None:
    client, _ = ends()
    with pytest.raises(FrameError, match=kind):
        client.receive_data(message.ljust(MUX_MSG_SIZE, b"\0"))
    assert client.failed is not None


def test_a_refusal_the_mux_has_no_name_for() -> None:
    client, _ = ends()
    client.encode(Register(GID_A, 2))
    raw = struct.pack("<ii16si", 1, 0, GID_A, -5).ljust(MUX_MSG_SIZE, b"\0")
    assert client.receive_data(raw) == [Refused(GID_A, RefuseCode.BAD_GID, "rdmacm-mux: error -5")]


@given(st.lists(st.binary(max_size=800), max_size=4), st.booleans())
def test_any_bytes_give_messages_or_a_frame_error(chunks: list[bytes], at_hub: bool) -> None:
    client, hub = ends()
    for chunk in chunks:
        with suppress(FrameError):
            (hub if at_hub else client).receive_data(chunk)


@given(st.binary(min_size=348, max_size=348), st.integers(0, 1), st.integers(-1, 4))
def test_any_message_has_its_answer(rest: bytes, kind: int, op_code: int) -> None:
    _, hub = ends()
    raw = struct.pack("<ii", kind, op_code) + rest + bytes(4)
    with suppress(FrameError):
        assert len(hub.receive_data(raw)) == 1
        assert len(hub.respond()) == MUX_MSG_SIZE

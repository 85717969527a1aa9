"""A server's side of the old protocol: QEMU's `rdmacm-mux` as the host's side, where it is what a host has.

Contract: sans-I/O, one `OldMuxDialect` per connection; implements `mad_dialect.Dialect`, so messages are those of
`mad_frames`. Unlike QEMU's device, it gives each MAD its own destination.

What the mux cannot do, this cannot either: it drops MRA, LAP and APR, forgets a connection after ten idle seconds, so
that the peer's DREQ is lost, confuses clients that use the same comm ids, and knows GIDs by their lower 64 bits.

Source: contrib/rdmacm-mux/main.c and hw/rdma/rdma_backend.c of QEMU 9.0.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from pvrdma_server.abi.ib_user_mad import USER_MAD_HDR_SIZE, UserMadHdr
from pvrdma_server.abi.mad import network_hdr_type
from pvrdma_server.abi.rdmacm_mux import (
    MUX_MAD_SIZE,
    MUX_MSG,
    MUX_MSG_SIZE,
    MuxErrCode,
    MuxMsg,
    MuxMsgType,
    MuxOpCode,
)
from pvrdma_server.mad_frames import (
    Datagram,
    Dropped,
    DropReason,
    FrameError,
    Message,
    Ok,
    Receive,
    RefuseCode,
    Refused,
    Register,
    Send,
    Unregister,
)

QP1_QKEY: Final = 0x80010000
_ROCE_V2: Final = 2
_INTERFACE_ID: Final = slice(8, 16)
_NO_MAD: Final = bytes(MUX_MAD_SIZE)
_NO_UMAD: Final = UserMadHdr(
    id=0,
    status=0,
    timeout_ms=0,
    retries=0,
    length=0,
    qpn=bytes(4),
    qkey=bytes(4),
    lid=bytes(2),
    sl=0,
    path_bits=0,
    grh_present=0,
    gid_index=0,
    hop_limit=0,
    traffic_class=0,
    gid=bytes(16),
    flow_label=bytes(4),
    pkey_index=0,
)
_REFUSALS: Final = {
    MuxErrCode.EACCES: (RefuseCode.HELD_BY_ANOTHER, "rdmacm-mux: another VM has this interface id"),
    MuxErrCode.ENOTFOUND: (RefuseCode.NOT_REGISTERED, "rdmacm-mux: not registered"),
}


class OldMuxDialect:
    """See the module's contract.

    Args:
        gid_index: where the host's table has a GID (16 bytes, wire order), if it has; the mux does not look it up.

    Attributes:
        failed: why the connection must end, once it must.
        peer_name: the mux says none.
    """

    peer_name = "rdmacm-mux"

    def __init__(self, gid_index: Callable[[bytes], int | None]) -> None:
        self.failed: FrameError | None = None
        self._gid_index = gid_index
        self._gids: dict[bytes, int] = {}
        self._asked: deque[Register | Unregister | Send] = deque()
        self._buffer = b""

    def hello(self, name: str) -> bytes:
        """See `mad_dialect.Dialect`."""
        return b""

    def encode(self, message: Register | Unregister | Send) -> bytes:
        """See `mad_dialect.Dialect`. Every message is a request that the mux answers, in order.

        A datagram from a GID that the host lacks is none: the mux would send it from another's.
        """
        match message:
            case Register(gid):
                data = _request(MuxOpCode.REG, gid)
            case Unregister(gid):
                data = _request(MuxOpCode.UNREG, gid)
            case Send(datagram):
                index = self._gid_index(datagram.sgid)
                if index is None:
                    return b""
                data = _mad(datagram, index)
        self._asked.append(message)
        return data

    def receive_data(self, data: bytes) -> list[Message]:
        """See `mad_frames.Connection.receive_data`."""
        if self.failed is not None:
            raise self.failed
        messages: list[Message] = []
        try:
            if not data and self._buffer:
                raise FrameError("truncated", f"the stream ends after {len(self._buffer)} bytes")
            stream = self._buffer + data
            whole = len(stream) - len(stream) % MUX_MSG_SIZE
            for start in range(0, whole, MUX_MSG_SIZE):
                message = self._message(MUX_MSG.unpack_from(stream, start))
                if message is not None:
                    messages.append(message)
            self._buffer = stream[whole:]
        except FrameError as e:
            self.failed, self._buffer = e, b""
            if not messages:
                raise
        return messages

    def _message(self, message: MuxMsg) -> Message | None:
        if message.msg_type == MuxMsgType.RESP:
            return self._response(message.err_code)
        if message.msg_type != MuxMsgType.REQ or message.op_code != MuxOpCode.MAD:
            raise FrameError("unexpected", f"type {message.msg_type}, operation {message.op_code}")
        if not 0 <= message.umad_len <= MUX_MAD_SIZE:
            raise FrameError("bad_length", f"a MAD of {message.umad_len} bytes")
        return self._received(message)

    def _response(self, error: int) -> Message | None:
        if not self._asked:
            raise FrameError("unexpected", "a response without a request")
        asked = self._asked.popleft()
        if isinstance(asked, Send):
            return Dropped(DropReason.SEND_FAILED, asked.datagram.dgid) if error else None
        # EEXIST: this connection has it already.
        if error not in (MuxErrCode.OK, MuxErrCode.EEXIST):
            code, text = _REFUSALS.get(
                MuxErrCode(error) if error in list(MuxErrCode) else MuxErrCode.EINVAL,
                (RefuseCode.BAD_GID, f"rdmacm-mux: error {error}"),
            )
            return Refused(asked.gid, code, text)
        if isinstance(asked, Register):
            self._gids[asked.gid] = asked.gid_type
        else:
            self._gids.pop(asked.gid, None)
        return Ok(asked.gid)

    def _received(self, message: MuxMsg) -> Message | None:
        """A MAD from the network; the mux fills in only the lower half of our GID.

        It sends with a timeout, so umad reports each message of ours back, with a status: those are nobody's.
        """
        if message.umad.status:
            return None
        wanted = message.sgid[_INTERFACE_ID]
        found = [gid for gid in self._gids if gid[_INTERFACE_ID] == wanted]
        if not found:
            return None  # for a GID that we have given up meanwhile
        dgid, umad = found[0], message.umad
        roce_v2 = self._gids[dgid] == _ROCE_V2
        return Receive(
            Datagram(
                sgid=umad.gid,
                dgid=dgid,
                payload=message.mad[: message.umad_len],
                src_qp=int.from_bytes(umad.qpn, "big"),
                flow_label=int.from_bytes(umad.flow_label, "big") & 0xFFFFF,
                pkey_index=umad.pkey_index,
                sl=umad.sl,
                traffic_class=umad.traffic_class,
                hop_limit=umad.hop_limit,
                network_type=int(network_hdr_type(umad.gid, dgid, roce_v2=roce_v2)),
            )
        )


def _mad(datagram: Datagram, gid_index: int) -> bytes:
    length = len(datagram.payload)
    umad = _NO_UMAD._replace(
        length=USER_MAD_HDR_SIZE + length,
        qpn=datagram.dst_qp.to_bytes(4, "big"),
        qkey=QP1_QKEY.to_bytes(4, "big"),
        sl=datagram.sl,
        grh_present=1,
        gid_index=gid_index,
        hop_limit=datagram.hop_limit,
        traffic_class=datagram.traffic_class,
        gid=datagram.dgid,
        flow_label=(datagram.flow_label & 0xFFFFF).to_bytes(4, "big"),
        pkey_index=datagram.pkey_index,
    )
    mad = datagram.payload.ljust(MUX_MAD_SIZE, b"\0")
    return MUX_MSG.pack(
        MuxMsg(MuxMsgType.REQ, MuxOpCode.MAD, datagram.sgid, MuxErrCode.OK, length, umad, mad)
    )


def _request(op_code: MuxOpCode, gid: bytes) -> bytes:
    return MUX_MSG.pack(MuxMsg(MuxMsgType.REQ, op_code, gid, MuxErrCode.OK, 0, _NO_UMAD, _NO_MAD))

"""The hub's side of the old protocol, by which QEMU's pvrdma devices talked to `rdmacm-mux`.

Contract: sans-I/O: bytes in, messages of `mad_frames` out, and back. Every request is one message and gets one
response, which is the request with its type and error changed: the caller handles each message, gives its answer to
`encode`, and then sends what `respond` returns. Messages are 360 bytes; a stream that ends inside one, or one that is
no request, ends the connection. A request that cannot be understood is an empty datagram, which nobody carries.

QEMU's device sends every MAD to itself: the address it gives is its own GID. Where a MAD is for is then told by the
MAD: a REQ and a SIDR_REQ name their destination, the others belong to a connection that the hub has seen begin.
"""

from collections import deque
from typing import Final

from pvrdma_server.abi.ib_user_mad import USER_MAD_HDR_SIZE, UserMadHdr
from pvrdma_server.abi.mad import is_v4_mapped, network_hdr_type
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
from pvrdma_server.mad_hub.cm import NO_GID, NotRelayed, parse
from pvrdma_server.mad_hub.connections import ConnectionTable

# What GIDs of old clients are taken for: their protocol does not say, and hosts have each GID as both.
ROCE_V2: Final = 2
_INTERFACE_ID: Final = slice(8, 16)
_LINK_LOCAL: Final = bytes.fromhex("fe80000000000000")
# RdmaCmMuxErrCode of what was refused; everything else is EINVAL.
_ERRORS: Final[dict[int, MuxErrCode]] = {
    RefuseCode.HELD_BY_ANOTHER: MuxErrCode.EACCES,
    RefuseCode.NOT_REGISTERED: MuxErrCode.ENOTFOUND,
}


class OldMuxConnection:
    """One connection of an old client.

    Args:
        connections: the client's, which tell where its MADs are for.

    Attributes:
        peer_name: what logs call it; the protocol has no names.
        failed: why the connection must end, once it must.
    """

    peer_name = "an old QEMU"

    def __init__(self, connections: ConnectionTable) -> None:
        self.failed: FrameError | None = None
        self._connections = connections
        self._gids: list[bytes] = []
        self._buffer = b""
        self._requests: deque[MuxMsg] = deque()
        self._error = MuxErrCode.OK

    def receive_data(self, data: bytes) -> list[Message]:
        """As `mad_frames.Connection.receive_data`."""
        if self.failed is not None:
            raise self.failed
        messages: list[Message] = []
        try:
            if not data and self._buffer:
                raise FrameError("truncated", f"the stream ends after {len(self._buffer)} bytes")
            stream = self._buffer + data
            whole = len(stream) - len(stream) % MUX_MSG_SIZE
            for start in range(0, whole, MUX_MSG_SIZE):
                messages.append(self._message(MUX_MSG.unpack_from(stream, start)))
            self._buffer = stream[whole:]
        except FrameError as e:
            self.failed, self._buffer = e, b""
            if not messages:
                raise
        return messages

    def encode(self, message: Message) -> bytes:
        """The bytes of a datagram for the client; an answer has none yet, see `respond`."""
        match message:
            case Receive(datagram):
                return _mad_message(datagram)
            case Ok(gid):
                self._done(gid)
            case Refused(_, code, _):
                self._error = _ERRORS.get(code, MuxErrCode.EINVAL)
            case Dropped():
                self._error = MuxErrCode.EINVAL
        return b""

    def respond(self) -> bytes:
        """The response to the oldest request without one, with the error that `encode` was told of since the last."""
        request = self._requests.popleft()
        error, self._error = self._error, MuxErrCode.OK
        return MUX_MSG.pack(request._replace(msg_type=MuxMsgType.RESP, err_code=error))

    def _message(self, message: MuxMsg) -> Message:
        if message.msg_type != MuxMsgType.REQ:
            raise FrameError("unexpected", f"message type {message.msg_type} is no request")
        self._requests.append(message)
        match message.op_code:
            case MuxOpCode.REG:
                return Register(_whole_gid(message.sgid), ROCE_V2)
            case MuxOpCode.UNREG:
                return Unregister(self._own(message.sgid))
            case MuxOpCode.MAD if 0 <= message.umad_len <= MUX_MAD_SIZE:
                return Send(self._datagram(message))
        return Send(Datagram(self._own(message.sgid), NO_GID, b""))

    def _datagram(self, message: MuxMsg) -> Datagram:
        umad, payload = message.umad, message.mad[: message.umad_len]
        sgid, dgid = self._own(message.sgid), self._destination(umad.gid, payload)
        return Datagram(
            sgid=sgid,
            dgid=dgid,
            payload=payload,
            dst_qp=int.from_bytes(umad.qpn, "big"),
            flow_label=int.from_bytes(umad.flow_label, "big") & 0xFFFFF,
            pkey_index=umad.pkey_index,
            sl=umad.sl,
            traffic_class=umad.traffic_class,
            hop_limit=umad.hop_limit,
            # RoCE v2, as which these GIDs are registered: a new guest drops what came as v1.
            network_type=int(network_hdr_type(sgid, dgid, roce_v2=True)),
        )

    def _destination(self, given: bytes, payload: bytes) -> bytes:
        if given not in (*self._gids, NO_GID):
            return given
        try:
            cm = parse(payload)
        except NotRelayed:
            return given
        if cm.destination != NO_GID:
            return cm.destination
        return self._connections.peer_of(cm) or given

    def _own(self, sgid: bytes) -> bytes:
        """The client's GID that `sgid` means, of which only the interface id need be right."""
        if sgid in self._gids:
            return sgid
        found = [gid for gid in self._gids if gid[_INTERFACE_ID] == sgid[_INTERFACE_ID]]
        return found[0] if len(found) == 1 else sgid

    def _done(self, gid: bytes) -> None:
        """A registration or its end was granted."""
        if self._requests[0].op_code == MuxOpCode.UNREG:
            self._gids.remove(gid)
        elif gid in self._gids:
            self._error = MuxErrCode.EEXIST  # as the mux said it
        else:
            self._gids.append(gid)


def _whole_gid(gid: bytes) -> bytes:
    """The mux knows 64-bit interface ids only; of a client that gives no more, they are link-local ones."""
    if gid[:8] == bytes(8) and not is_v4_mapped(gid):
        return _LINK_LOCAL + gid[_INTERFACE_ID]
    return gid


def _mad_message(datagram: Datagram) -> bytes:
    length = len(datagram.payload)
    umad = UserMadHdr(
        id=0,
        status=0,
        timeout_ms=0,
        retries=0,
        length=USER_MAD_HDR_SIZE + length,
        qpn=datagram.src_qp.to_bytes(4, "big"),
        qkey=bytes(4),
        lid=bytes(2),
        sl=datagram.sl,
        path_bits=0,
        grh_present=1,
        gid_index=0,
        hop_limit=datagram.hop_limit,
        traffic_class=datagram.traffic_class,
        gid=datagram.sgid,
        flow_label=datagram.flow_label.to_bytes(4, "big"),
        pkey_index=datagram.pkey_index,
    )
    mad = datagram.payload.ljust(MUX_MAD_SIZE, b"\0")
    message = MuxMsg(MuxMsgType.REQ, MuxOpCode.MAD, datagram.dgid, MuxErrCode.OK, length, umad, mad)
    return MUX_MSG.pack(message)

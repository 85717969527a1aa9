"""QP1 in software, for a backend whose own QP1 belongs to the host's kernel: datagrams out of guest memory and into it.

Contract: sans-I/O. The guest's QP1 behaves as on a port with nothing else in it: a request completes when its MAD has
been handed on, and what cannot be delivered is dropped and counted, as a network would. A carrier takes what is for
others (mad_relay); what the guest sends to a GID of its own comes back at once, carrier or not. A turn is bounded:
`on_work` is called when one has left something to do, and `progress` does it.

MADs have 256 bytes on the wire. A shorter one that has a header is filled up with zeros, a longer one is refused.

Source: InfiniBand Architecture Specification vol. 1, 13.4 (MADs), 13.5.3.3 (QP1). ib_mad in the guest posts sends of 2
elements (header, data) and receives of one (40 bytes and a MAD), all with the DMA key of its protection domain.
"""

import errno
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from pvrdma_server.abi.mad import (
    GRH_SIZE,
    GSI_QKEY,
    GSI_QPN,
    MAD_HDR_SIZE,
    MAD_SIZE,
    OWN_QKEY,
    build_grh_area,
    network_hdr_type,
)
from pvrdma_server.abi.pvrdma_dev_api import GidType
from pvrdma_server.abi.pvrdma_verbs import QpAttr, QpState
from pvrdma_server.abi.vmw_pvrdma_abi import (
    NetworkHdrType,
    Sge,
    WcFlags,
    WcOpcode,
    WcStatus,
    WrOpcode,
)
from pvrdma_server.backend import Completion, QpOwner, RecvWr, Refused, SendWr, Ud
from pvrdma_server.errors import BackendError, BadGuestAddress, BadWqe
from pvrdma_server.guest_memory import GuestMemory
from pvrdma_server.mad_frames import Datagram

# Datagrams that wait for the guest to post receives: as many as ib_mad posts, and then some. Stops peers from
# filling our memory while a guest does not look.
MAX_WAITING: Final = 512
# Requests, or receives, handled in one turn: some hundred microseconds.
TURN: Final = 32
RECEIVE_BYTES: Final = GRH_SIZE + MAD_SIZE
_MULTICAST: Final = 0xFF
_SENDING: Final = (int(QpState.RTS), int(QpState.SQE), int(QpState.ERR))
_RECEIVING: Final = (int(QpState.RTR), int(QpState.RTS), int(QpState.SQD), int(QpState.SQE))
_FLUSHED: Final = int(WcStatus.WR_FLUSH_ERR)


class MadCarrier(Protocol):
    """Takes a guest's datagrams to other VMs and hosts. Returns at once, but for `claim`, which may ask around."""

    def claim(self, gid: bytes, gid_type: int) -> None:
        """Have datagrams for `gid` come here. Raises BackendError (EADDRINUSE): it is another's."""

    def release(self, gid: bytes) -> None:
        """Give `gid` up."""

    def send(self, datagram: Datagram) -> bool:
        """Carry a datagram whose source is a claimed GID; false when there is no way out."""


class NoCarrier:
    """Nobody is out there. Implements `MadCarrier`."""

    def claim(self, gid: bytes, gid_type: int) -> None:
        """See `MadCarrier`."""

    def release(self, gid: bytes) -> None:
        """See `MadCarrier`."""

    def send(self, datagram: Datagram) -> bool:
        """See `MadCarrier`."""
        return False


@dataclass(slots=True)
class GsiCounters:
    """Datagrams since the server started; `dropped` by reason."""

    sent: int = 0
    received: int = 0
    looped: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class _Gid(NamedTuple):
    gid: bytes
    gid_type: int


class Gsi:
    """QP1's side of one port, whether or not the guest has made its QP1.

    Args:
        carrier: takes datagrams to others; its user hands those from others to `receive`.

    Attributes:
        on_work: called when `progress` has something to do.
    """

    def __init__(self, carrier: MadCarrier | None = None) -> None:
        self.counters = GsiCounters()
        self.on_work: Callable[[], None] = _nothing
        self.waiting: deque[Datagram] = deque()
        self._carrier = carrier or NoCarrier()
        self._gids: dict[int, _Gid] = {}
        self._qp: GsiQp | None = None

    def facts(self) -> dict[str, object]:
        """For the status document."""
        counters = self.counters
        return {
            "sent": counters.sent,
            "received": counters.received,
            "looped": counters.looped,
            "dropped": dict(counters.dropped),
            "waiting": len(self.waiting),
        }

    # --- GIDs ------------------------------------------------------------------------------------------------------

    def add_gid(self, index: int, gid: bytes, gid_type: int) -> None:
        """Own `gid`. Raises BackendError (EADDRINUSE): another VM has it."""
        if not self._has(gid):
            self._carrier.claim(gid, gid_type)
        self._gids[index] = _Gid(gid, gid_type)

    def remove_gid(self, index: int) -> None:
        """Give the GID at `index` up, if there is one."""
        entry = self._gids.pop(index, None)
        if entry is not None and not self._has(entry.gid):
            self._carrier.release(entry.gid)

    def reset(self) -> None:
        """Give every GID up and forget what waits."""
        for index in list(self._gids):
            self.remove_gid(index)
        self.forget_waiting()

    def _has(self, gid: bytes) -> bool:
        return any(entry.gid == gid for entry in self._gids.values())

    # --- QP1 -------------------------------------------------------------------------------------------------------

    def create_qp(self, owner: QpOwner, memory: GuestMemory, dma_keys: Container[int]) -> "GsiQp":
        """QP1. `dma_keys` are those of its protection domain, as they come and go.

        Raises:
            BackendError: EBUSY, there is one already.
        """
        if self._qp is not None:
            raise BackendError(errno.EBUSY, "ibv_create_qp", "there is one QP1")
        self._qp = GsiQp(self, owner, memory, dma_keys)
        return self._qp

    def forget_qp(self) -> None:
        """QP1 is gone."""
        self._qp = None
        self.forget_waiting()

    def progress(self) -> bool:
        """Do what is ready, a turn of it; true when there is more."""
        return self._qp is not None and self._qp.turn()

    # --- datagrams -------------------------------------------------------------------------------------------------

    def drop(self, reason: str, count: int = 1) -> None:
        """Count datagrams that go nowhere."""
        self.counters.dropped[reason] += count

    def forget_waiting(self) -> None:
        """The guest will not take what waits."""
        if self.waiting:
            self.drop("forgotten", len(self.waiting))
            self.waiting.clear()

    def route(self, arm: Ud, payload: bytes) -> None:
        """Send a MAD of the guest's on its way, or drop it."""
        source = self._gids.get(arm.av.sgid_index)
        qkey = GSI_QKEY if arm.qkey & OWN_QKEY else arm.qkey
        if source is None:
            self.drop("no_source_gid")
        elif arm.av.dgid[0] == _MULTICAST:
            self.drop("multicast")
        elif arm.remote_qpn != GSI_QPN or qkey != GSI_QKEY:
            self.drop("not_qp1")
        else:
            self._send(_datagram(source, arm, payload))

    def _send(self, datagram: Datagram) -> None:
        if self._has(datagram.dgid):
            self.counters.looped += 1
            self.receive(datagram)
        elif self._carrier.send(datagram):
            self.counters.sent += 1
        else:
            self.drop("no_carrier")

    def receive(self, datagram: Datagram) -> None:
        """A datagram for the guest, from anywhere: it waits for a receive, or is dropped."""
        if not self._has(datagram.dgid):
            self.drop("unknown_gid")
        elif datagram.dst_qp != GSI_QPN:
            self.drop("not_qp1")
        elif not MAD_HDR_SIZE <= len(datagram.payload) <= MAD_SIZE:
            self.drop("malformed")
        elif self._qp is None or self._qp.state not in _RECEIVING:
            self.drop("not_ready")
        elif len(self.waiting) >= MAX_WAITING:
            self.drop("no_buffer")
        else:
            self.waiting.append(datagram)
            self.on_work()


class GsiQp:
    """QP1. Implements `backend.BackendQp`."""

    qpn = GSI_QPN

    def __init__(
        self, gsi: Gsi, owner: QpOwner, memory: GuestMemory, dma_keys: Container[int]
    ) -> None:
        self.state = int(QpState.RESET)
        self._gsi = gsi
        self._owner = owner
        self._memory = memory
        self._dma_keys = dma_keys
        # Taken out of the guest's ring, and not used yet.
        self._recv: RecvWr | None = None

    def modify(self, attr: QpAttr, mask: int) -> None:
        """See `backend.BackendQp`."""
        self.state = attr.qp_state
        if self.state == QpState.RESET:
            self._recv = None
        if self.state not in _RECEIVING:
            self._gsi.forget_waiting()
        self._turn_or_tell()

    def query(self, attr: QpAttr) -> QpAttr:
        """See `backend.BackendQp`."""
        return attr

    def send_doorbell(self) -> None:
        """See `backend.BackendQp`."""
        self._turn_or_tell()

    def recv_doorbell(self) -> None:
        """See `backend.BackendQp`."""
        self._turn_or_tell()

    def destroy(self) -> None:
        """See `backend.BackendQp`."""
        self._gsi.forget_qp()

    def _turn_or_tell(self) -> None:
        if self.turn():
            self._gsi.on_work()

    def turn(self) -> bool:
        """A bounded turn at both queues; true when there is more to do."""
        more = self._send_turn()
        return self._recv_turn() or more

    # --- sends -----------------------------------------------------------------------------------------------------

    def _send_turn(self) -> bool:
        for _ in range(TURN):
            if self.state not in _SENDING:
                return False
            wr = self._owner.pop_send()
            if wr is None:
                return False
            self._execute(wr)
        return True

    def _execute(self, wr: SendWr) -> None:
        status = 0
        if self.state == QpState.RTS:
            try:
                self._gsi.route(*self._decode_untrusted(wr))
            except BadWqe as e:
                status = e.status
                self.state = int(QpState.SQE)
                self._owner.state_changed(self.state)
        else:
            status = _FLUSHED
        if wr.signaled or status:
            self._owner.complete_send(Completion(wr.wr_id, status, int(WcOpcode.SEND)))

    def _decode_untrusted(self, wr: SendWr) -> tuple[Ud, bytes]:
        arm = wr.arm
        if isinstance(arm, Refused):
            raise BadWqe(arm.status, arm.why)
        if not isinstance(arm, Ud) or wr.opcode != WrOpcode.SEND:
            raise BadWqe(WcStatus.LOC_QP_OP_ERR, "not a datagram")
        length = sum(sge.length for sge in wr.sges)
        if not MAD_HDR_SIZE <= length <= MAD_SIZE:
            raise BadWqe(WcStatus.LOC_LEN_ERR, f"a MAD of {length} bytes")
        views = self._views_untrusted(wr.sges, length, writable=False)
        return arm, b"".join(views).ljust(MAD_SIZE, b"\0")

    def _views_untrusted(
        self, sges: Sequence[Sge], length: int, *, writable: bool
    ) -> list[memoryview]:
        """The first `length` bytes of elements that hold as many; their addresses are bus addresses."""
        views: list[memoryview] = []
        for sge in sges:
            take = min(length, sge.length)
            if not take:
                continue
            if sge.lkey not in self._dma_keys:
                raise BadWqe(WcStatus.LOC_PROT_ERR, f"key {sge.lkey:#x} is no DMA key")
            try:
                views += self._memory.views_untrusted(sge.addr, take, writable=writable)
            except BadGuestAddress as e:
                raise BadWqe(WcStatus.LOC_PROT_ERR, str(e)) from e
            length -= take
        return views

    # --- receives --------------------------------------------------------------------------------------------------

    def _recv_turn(self) -> bool:
        for _ in range(TURN):
            flushing = self.state == QpState.ERR
            if not flushing and not (self._gsi.waiting and self.state in _RECEIVING):
                return False
            wr = self._take_recv()
            if wr is None:
                return False
            if flushing:
                self._complete_recv(wr, _FLUSHED)
            else:
                self._deliver(wr, self._gsi.waiting.popleft())
        return True

    def _take_recv(self) -> RecvWr | None:
        wr, self._recv = self._recv, None
        return wr if wr is not None else self._owner.pop_recv()

    def _deliver(self, wr: RecvWr, datagram: Datagram) -> None:
        if wr.refused:
            self._fail(wr, wr.refused)
            return
        if sum(sge.length for sge in wr.sges) < RECEIVE_BYTES:
            # As with UD: what is too long for its receive is lost, and the receive serves the next.
            self._gsi.drop("too_long")
            self._recv = wr
            return
        try:
            target = self._views_untrusted(wr.sges, RECEIVE_BYTES, writable=True)
        except BadWqe as e:
            self._fail(wr, e.status)
            return
        _scatter(target, _grh_area(datagram) + datagram.payload.ljust(MAD_SIZE, b"\0"))
        self._gsi.counters.received += 1
        wc = Completion(
            wr.wr_id, 0, int(WcOpcode.RECV), RECEIVE_BYTES, src_qp=datagram.src_qp & 0xFFFFFF,
            wc_flags=int(WcFlags.GRH), sl=datagram.sl,
            network_hdr_type=int(_network_hdr_type(datagram)),
        )  # fmt: skip
        self._owner.complete_recv(wc, solicited=True)

    def _fail(self, wr: RecvWr, status: int) -> None:
        self._complete_recv(wr, status)
        self._gsi.drop("bad_buffer")
        self.state = int(QpState.ERR)
        self._gsi.forget_waiting()
        self._owner.state_changed(self.state)
        self._gsi.on_work()  # the send queue is to be flushed, too

    def _complete_recv(self, wr: RecvWr, status: int) -> None:
        self._owner.complete_recv(Completion(wr.wr_id, status, int(WcOpcode.RECV)), solicited=True)


def _nothing() -> None:
    return None


def _scatter(views: Sequence[memoryview], data: bytes) -> None:
    for view in views:
        view[:], data = data[: len(view)], data[len(view) :]


def _datagram(source: _Gid, arm: Ud, payload: bytes) -> Datagram:
    av = arm.av
    kind = network_hdr_type(source.gid, av.dgid, roce_v2=source.gid_type == GidType.ROCE_V2)
    return Datagram(
        source.gid, av.dgid, payload, flow_label=av.flow_label & 0xFFFFF, sl=0,
        traffic_class=av.traffic_class & 0xFF, hop_limit=av.hop_limit & 0xFF, network_type=int(kind),
    )  # fmt: skip


def _roce_v2(datagram: Datagram) -> bool:
    return datagram.network_type != NetworkHdrType.ROCE_V1


def _grh_area(datagram: Datagram) -> bytes:
    return build_grh_area(
        datagram.sgid,
        datagram.dgid,
        MAD_SIZE,
        roce_v2=_roce_v2(datagram),
        traffic_class=datagram.traffic_class,
        flow_label=datagram.flow_label,
        hop_limit=datagram.hop_limit,
    )


def _network_hdr_type(datagram: Datagram) -> NetworkHdrType:
    return network_hdr_type(datagram.sgid, datagram.dgid, roce_v2=_roce_v2(datagram))

"""A guest's QP1 without a device around it: memory in two DMA regions, an owner, a carrier that takes notes."""

from fake_owner import FakeOwner, attributes, gid_v4

from pvrdma_server.abi.mad import GSI_QKEY, MAD_SIZE
from pvrdma_server.abi.pvrdma_dev_api import GidType
from pvrdma_server.abi.pvrdma_verbs import QpState
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WrOpcode
from pvrdma_server.backend import AddressVector, Arm, RecvWr, SendWr, Ud
from pvrdma_server.errors import BackendError
from pvrdma_server.gsi import Gsi, MadCarrier
from pvrdma_server.guest_memory import PAGE_SIZE, GuestMemory
from pvrdma_server.mad_frames import Datagram

BASE = 0x10_0000
# Where the two regions meet.
SEAM = BASE + 4 * PAGE_SIZE
DMA_KEY = 0xFFFFF000
MINE, PEER = gid_v4(1), gid_v4(2)


class FakeCarrier:
    """Keeps what is sent. Implements `gsi.MadCarrier`."""

    def __init__(self) -> None:
        self.sent: list[Datagram] = []
        self.claimed: list[bytes] = []
        self.taken: set[bytes] = set()
        self.linked = True

    def claim(self, gid: bytes, gid_type: int) -> None:
        if gid in self.taken:
            raise BackendError(98, "claim", "another's")
        self.claimed.append(gid)

    def release(self, gid: bytes) -> None:
        self.claimed.remove(gid)

    def send(self, datagram: Datagram) -> bool:
        if self.linked:
            self.sent.append(datagram)
        return self.linked


class Qp1:
    """One guest's QP1, in RTS unless told otherwise, with GID `MINE` at index 0."""

    def __init__(
        self,
        state: int = QpState.RTS,
        gid_type: int = GidType.ROCE_V2,
        carrier: MadCarrier | None = None,
    ) -> None:
        self.memory = GuestMemory()
        self.ram = [memoryview(bytearray(4 * PAGE_SIZE)) for _ in range(2)]
        for number, part in enumerate(self.ram):
            self.memory.add_region(BASE + number * len(part), len(part), part, writable=True)
        self.carrier = FakeCarrier()
        self.gsi = Gsi(carrier or self.carrier)
        self.woken = 0
        self.gsi.on_work = self._wake
        self.gsi.add_gid(0, MINE, gid_type)
        self.owner = FakeOwner()
        self.keys = {DMA_KEY}
        self.qp = self.gsi.create_qp(self.owner, self.memory, self.keys)
        self.next_id = 1
        if state != QpState.RESET:
            self.to(state)

    def _wake(self) -> None:
        self.woken += 1

    def to(self, state: int) -> None:
        self.qp.modify(attributes(qp_state=int(state)), 1)

    def write(self, address: int, data: bytes) -> None:
        for view in self.memory.views_untrusted(address, len(data)):
            view[:], data = data[: len(view)], data[len(view) :]

    def read(self, address: int, length: int) -> bytes:
        return b"".join(map(bytes, self.memory.views_untrusted(address, length)))

    def send(
        self,
        *sges: Sge,
        arm: Arm = None,
        opcode: int = WrOpcode.SEND,
        signaled: bool = True,
    ) -> int:
        wr_id, self.next_id = self.next_id, self.next_id + 1
        wr = SendWr(wr_id, int(opcode), 0, signaled, bytes(4), sges, arm or to_gid(PEER))
        self.owner.sends.append(wr)
        self.qp.send_doorbell()
        return wr_id

    def recv(self, *sges: Sge, refused: int = 0) -> int:
        wr_id, self.next_id = self.next_id, self.next_id + 1
        self.owner.recvs.append(RecvWr(wr_id, sges, refused))
        self.qp.recv_doorbell()
        return wr_id

    def work(self) -> None:
        while self.gsi.progress():
            pass

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.gsi.counters.dropped)


def to_gid(
    dgid: bytes, *, index: int = 0, qpn: int = 1, qkey: int = GSI_QKEY, hop_limit: int = 64
) -> Ud:
    return Ud(qpn, qkey, AddressVector(1, 1, dgid, index, hop_limit, 7, 0x12345, bytes(6)))


def sge(address: int, length: int, key: int = DMA_KEY) -> Sge:
    return Sge(address, length, key)


def from_peer(payload: bytes = bytes(MAD_SIZE), **more: object) -> Datagram:
    datagram = Datagram(PEER, MINE, payload, network_type=1)
    return datagram._replace(**more)  # type: ignore[arg-type]

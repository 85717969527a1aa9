"""The core's side of a backend, for tests: owners, a guest's memory, a clock, connected QPs.

A `Station` is one guest on one backend; a `Bench` has one or two of them and a clock that moves
only when told. Nothing here knows which backend it drives.
"""

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from pvrdma_server.abi.pvrdma_dev_api import GidType
from pvrdma_server.abi.pvrdma_verbs import (
    AhAttr,
    GlobalRoute,
    QpAttr,
    QpAttrMask,
    QpCap,
    QpState,
    QpType,
    SendFlags,
)
from pvrdma_server.abi.vmw_pvrdma_abi import SGE, SQ_WQE_RDMA, Sge, SqWqeRdma, WrOpcode
from pvrdma_server.backend import (
    AddressVector,
    Arm,
    Atomic,
    BackendMr,
    BackendPd,
    BackendQp,
    BackendSrq,
    Completion,
    Done,
    QpInit,
    Rdma,
    RdmaBackend,
    RecvWr,
    SendEntries,
    SendWr,
    Ud,
)
from pvrdma_server.guest_memory import PAGE_SIZE, GuestMemory, GuestPages
from pvrdma_server.qp_ops import sq_entry_size

RAM_BASE = 0x4000_0000
ALL_ACCESS = 15
GSI_QKEY = 0x8001_0000
# The ring that a `FakeOwner` makes believe to have.
MAX_SGE, INDEX_MASK = 11, 0x3FF
ENTRY_SIZE = sq_entry_size(MAX_SGE)


def gid_v4(last: int) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes([10, 0, 0, last])


@dataclass(slots=True)
class FakeClock:
    now_ns: int = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


@dataclass(slots=True)
class Bell:
    """An `on_work` that counts."""

    rings: int = 0

    def __call__(self) -> None:
        self.rings += 1


def _looks_like_an_rdma(wr: SendWr) -> bool:
    return (wr.arm is None or isinstance(wr.arm, Rdma)) and len(wr.sges) <= MAX_SGE


def _entry(wr: SendWr) -> bytes:
    arm = wr.arm if isinstance(wr.arm, Rdma) else Rdma(0, 0)
    flags = wr.send_flags & ~SendFlags.SIGNALED | (SendFlags.SIGNALED if wr.signaled else 0)
    header = SqWqeRdma(
        wr.wr_id, len(wr.sges), 0, wr.opcode, flags, wr.imm, arm.remote_addr, arm.rkey
    )
    sges = b"".join(SGE.pack(sge) for sge in wr.sges)
    return (SQ_WQE_RDMA.pack(header) + sges).ljust(ENTRY_SIZE, b"\xee")


def _some_of(receives: deque[RecvWr], most: int) -> list[RecvWr]:
    """Not all that there are, as where a ring ends."""
    return [receives.popleft() for _ in range(min(most, len(receives), 7))]


@dataclass(slots=True)
class FakeOwner:
    """A QP's owner: posted work in deques, what the backend reported in lists."""

    sends: deque[SendWr] = field(default_factory=deque)
    recvs: deque[RecvWr] = field(default_factory=deque)
    sent: list[Completion] = field(default_factory=list)
    received: list[Completion] = field(default_factory=list)
    solicited: list[bool] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    gone: bool = False

    def pop_send(self) -> SendWr | None:
        assert not self.gone
        return self.sends.popleft() if self.sends else None

    def pop_recv(self) -> RecvWr | None:
        assert not self.gone
        return self.recvs.popleft() if self.recvs else None

    def pop_recvs(self, most: int) -> list[RecvWr]:
        assert not self.gone
        return _some_of(self.recvs, most)

    def peek_sends(self) -> SendEntries | None:
        """The requests in front that look like an RDMA, as entries of a ring; those behind are not posted yet."""
        assert not self.gone
        front = list(takewhile(_looks_like_an_rdma, islice(self.sends, 50)))
        if not front:
            return None
        head = INDEX_MASK - 1
        tail = (head + len(front)) & INDEX_MASK
        state = memoryview(bytearray(struct.pack("<II", tail, head))).cast("I")
        slots = memoryview(bytearray(b"".join(map(_entry, front))))
        return SendEntries(state, head, INDEX_MASK, [slots], ENTRY_SIZE, signal_all=False)

    def took_sends(self, count: int) -> None:
        for _ in range(count):
            self.sends.popleft()

    def send_lane(self) -> None:
        return None  # no completion queue in memory

    def drove(self, sends: int, completions: int) -> None:
        raise AssertionError("there is no lane")

    def complete_send(self, wc: Completion) -> None:
        assert not self.gone
        self.sent.append(wc)

    def complete_sends(self, done: Sequence[Done]) -> None:
        for wr_id, opcode, length in done:
            self.complete_send(Completion(wr_id, 0, opcode, length))

    def complete_recv(self, wc: Completion, *, solicited: bool) -> None:
        assert not self.gone
        self.received.append(wc)
        self.solicited.append(solicited)

    def complete_recvs(self, wcs: Sequence[Completion]) -> None:
        for wc in wcs:
            self.complete_recv(wc, solicited=True)

    def state_changed(self, state: int) -> None:
        assert not self.gone
        self.states.append(int(state))

    def raise_event(self, event: int) -> None:
        assert not self.gone
        self.events.append(int(event))


@dataclass(slots=True)
class FakeSrqOwner:
    recvs: deque[RecvWr] = field(default_factory=deque)
    limit_checks: int = 0

    def pop_recv(self) -> RecvWr | None:
        return self.recvs.popleft() if self.recvs else None

    def pop_recvs(self, most: int) -> list[RecvWr]:
        return _some_of(self.recvs, most)

    def check_limit(self) -> None:
        self.limit_checks += 1


def attributes(**fields: Any) -> QpAttr:
    """Attributes of a freshly reset QP, with some replaced."""
    route = GlobalRoute(bytes(16), 0, 0, 64, 0)
    ah = AhAttr(route, 0, 0, 0, 0, 0, 1, 1, bytes(6))
    cap = QpCap(0, 0, 0, 0, 0)
    numbers: list[Any] = [0] * 22
    blank = QpAttr._make([*numbers, cap, ah, ah])
    return blank._replace(**fields)


@dataclass(slots=True)
class FakeQp:
    """A QP with its owner and merged attributes, as the core keeps them."""

    station: "Station"
    owner: FakeOwner
    qp: BackendQp
    attr: QpAttr
    next_id: int = 1

    def modify(self, mask: int = 0, **fields: Any) -> None:
        if "qp_state" in fields:
            mask |= QpAttrMask.STATE
        self.attr = self.attr._replace(**fields)
        self.qp.modify(self.attr, mask)

    def connect(self, peer: "FakeQp", **fields: Any) -> None:
        """RESET to RTS towards `peer`, with sensible attributes unless told otherwise."""
        route = self.attr.ah_attr.grh._replace(dgid=peer.station.gid)
        values: dict[str, Any] = {
            "path_mtu": 5, "rq_psn": 0xFFFFFE, "sq_psn": 0xFFFFFE, "dest_qp_num": peer.qp.qpn,
            "qp_access_flags": ALL_ACCESS, "max_rd_atomic": 4, "max_dest_rd_atomic": 4,
            "min_rnr_timer": 12, "timeout": 14, "retry_cnt": 3, "rnr_retry": 3,
            "ah_attr": self.attr.ah_attr._replace(grh=route),
        }  # fmt: skip
        self.modify(0, **(values | fields | {"qp_state": int(QpState.INIT)}))
        self.modify(qp_state=int(QpState.RTR))
        self.modify(qp_state=int(QpState.RTS))

    def start_datagrams(self, qkey: int = 0x1234) -> None:
        """RESET to RTS of a UD or GSI QP."""
        self.modify(qp_state=int(QpState.INIT), qkey=qkey)
        self.modify(qp_state=int(QpState.RTR))
        self.modify(qp_state=int(QpState.RTS))

    def post(
        self,
        opcode: int,
        sges: tuple[Sge, ...] = (),
        arm: Arm = None,
        flags: int = SendFlags.SIGNALED,
        imm: bytes = bytes(4),
    ) -> int:
        wr_id, self.next_id = self.next_id, self.next_id + 1
        signaled = bool(flags & SendFlags.SIGNALED)
        self.owner.sends.append(
            SendWr(wr_id, int(opcode), int(flags), signaled, imm, tuple(sges), arm)
        )
        self.qp.send_doorbell()
        return wr_id

    def send(self, *sges: Sge, **kwargs: Any) -> int:
        return self.post(WrOpcode.SEND, sges, **kwargs)

    def write(self, sge: Sge, target: int, rkey: int, **kwargs: Any) -> int:
        return self.post(WrOpcode.RDMA_WRITE, (sge,), Rdma(target, rkey), **kwargs)

    def read(self, sge: Sge, source: int, rkey: int, **kwargs: Any) -> int:
        return self.post(WrOpcode.RDMA_READ, (sge,), Rdma(source, rkey), **kwargs)

    def fetch_add(self, sge: Sge, target: int, rkey: int, add: int, **kwargs: Any) -> int:
        arm = Atomic(target, add, 0, rkey)
        return self.post(WrOpcode.ATOMIC_FETCH_AND_ADD, (sge,), arm, **kwargs)

    def cmp_swap(self, sge: Sge, target: int, rkey: int, compare: int, swap: int) -> int:
        arm = Atomic(target, compare, swap, rkey)
        return self.post(WrOpcode.ATOMIC_CMP_AND_SWP, (sge,), arm)

    def datagram(
        self, sge: Sge, peer: "FakeQp", qkey: int = 0x1234, *, opcode: int = WrOpcode.SEND,
        **kwargs: Any,
    ) -> int:  # fmt: skip
        av = AddressVector(1, 1, peer.station.gid, 0, 64, 7, 0x12345, bytes(6))
        arm = Ud(peer.qp.qpn, qkey, av)
        return self.post(opcode, (sge,), arm, **kwargs)

    def recv(self, *sges: Sge, refused: int = 0) -> int:
        wr_id, self.next_id = self.next_id, self.next_id + 1
        self.owner.recvs.append(RecvWr(wr_id, tuple(sges), refused))
        self.qp.recv_doorbell()
        return wr_id

    def destroy(self) -> None:
        self.qp.destroy()
        self.owner.gone = True

    @property
    def statuses(self) -> list[tuple[int, int]]:
        """(wr_id, status) of every send completion."""
        return [(wc.wr_id, int(wc.status)) for wc in self.owner.sent]

    @property
    def recv_statuses(self) -> list[tuple[int, int]]:
        return [(wc.wr_id, int(wc.status)) for wc in self.owner.received]


class Station:
    """A guest: its memory (one region of RAM), a kernel PD, a GID."""

    def __init__(
        self, backend: RdmaBackend, number: int, *, size: int = 8 << 20, attach: bool = True,
        memory: GuestMemory | None = None, ram: bytearray | None = None,
    ) -> None:  # fmt: skip
        self.backend = backend
        self.ram = bytearray(size) if ram is None else ram
        self.memory = memory or GuestMemory()
        self._next_page = 1
        self.gid = gid_v4(number)
        if attach:
            self.memory.add_region(RAM_BASE, len(self.ram), memoryview(self.ram), writable=True)
            backend.attach(self.memory)
            backend.add_gid(0, self.gid, GidType.ROCE_V2)
        self.pd = backend.create_pd(privileged=True)

    def pages(self, npages: int, *, scattered: bool = False) -> list[int]:
        """Unused guest pages, adjacent or in reverse order."""
        first, self._next_page = self._next_page, self._next_page + npages
        pages = [RAM_BASE + page * PAGE_SIZE for page in range(first, first + npages)]
        return pages[::-1] if scattered else pages

    def buffer(
        self, length: int, access: int = ALL_ACCESS, *, start: int = 0x7F00_0000_0100,
        scattered: bool = False, pd: BackendPd | None = None,
    ) -> "Buffer":  # fmt: skip
        """Registered memory at guest virtual address `start`."""
        npages = (start % PAGE_SIZE + length + PAGE_SIZE - 1) // PAGE_SIZE
        pages = GuestPages(
            self.memory, self.pages(max(npages, 1), scattered=scattered), writable=True
        )
        mr = self.backend.reg_mr(
            pd or self.pd, start=start, length=length, access=access, pages=pages
        )
        return Buffer(mr, pages, start, length)

    def qp(
        self, qp_type: int = QpType.RC, *, srq: BackendSrq | None = None,
        pd: BackendPd | None = None, max_send_wr: int = 64, owner: FakeOwner | None = None,
    ) -> FakeQp:  # fmt: skip
        owner = owner or FakeOwner()
        init = QpInit(int(qp_type), max_send_wr, 64, 16, 16, False)
        return FakeQp(
            self, owner, self.backend.create_qp(pd or self.pd, owner, init, srq), attributes()
        )


@dataclass(slots=True)
class Buffer:
    """A memory region with its bytes."""

    mr: BackendMr
    pages: GuestPages
    start: int
    length: int

    @property
    def rkey(self) -> int:
        return self.mr.rkey

    def sge(self, offset: int = 0, length: int | None = None) -> Sge:
        return Sge(
            self.start + offset, self.length - offset if length is None else length, self.mr.lkey
        )

    def at(self, offset: int = 0) -> int:
        return self.start + offset

    def _views(self, offset: int, length: int) -> list[memoryview]:
        return self.pages.views_untrusted(self.start % PAGE_SIZE + offset, length)

    def fill(self, data: bytes, offset: int = 0) -> None:
        for view in self._views(offset, len(data)):
            view[:], data = data[: len(view)], data[len(view) :]

    def data(self, offset: int = 0, length: int | None = None) -> bytes:
        length = self.length - offset if length is None else length
        return b"".join(bytes(view) for view in self._views(offset, length))


@dataclass(slots=True)
class Bench:
    """Two guests whose backends reach each other (or are one), and the clock.

    `woken` counts the backends' calls of `on_work`; `settle` lets them work until none is made.
    """

    clock: FakeClock
    a: Station
    b: Station
    woken: "Bell"
    close: Callable[[], None]
    step_budget: int = 1 << 20
    # Host verbs do not say of a received message whether its sender asked for an event.
    tells_solicited: bool = True
    # Whether a request that is at fault by itself also stops those before it that are under way.
    stops_at_once: bool = False
    # Whether a responder reports requests that its queue pair does not allow by an event, too.
    reports_disallowed: bool = True
    # Where a fault is told otherwise: fields of `test_faults.Case` to replace, by the case's name.
    differs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def backends(self) -> list[RdmaBackend]:
        first, second = self.a.backend, self.b.backend
        return [first] if first is second else [first, second]

    def settle(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            before = self.woken.rings
            busy = [backend.progress(self.step_budget) for backend in self.backends]
            if not any(busy) and self.woken.rings == before:
                return
        raise AssertionError("the backends never come to rest")

    def deadline_ns(self) -> int | None:
        deadlines = [backend.next_deadline_ns() for backend in self.backends]
        return min((d for d in deadlines if d is not None), default=None)

    def elapse(self, limit: int = 1000) -> None:
        """Let time pass from deadline to deadline until nothing waits for time."""
        self.settle()
        for _ in range(limit):
            deadline = self.deadline_ns()
            if deadline is None:
                return
            self.clock.now_ns = max(self.clock.now_ns, deadline)
            self.settle()
        raise AssertionError("deadlines without end")

    def pair(self, **fields: Any) -> tuple[FakeQp, FakeQp]:
        """Two connected RC QPs."""
        left, right = self.a.qp(), self.b.qp()
        left.connect(right, **fields)
        right.connect(left, **fields)
        return left, right

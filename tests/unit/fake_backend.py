"""A backend that carries nothing and records everything, for tests of the device core alone.

Contract: keeps every promise of `backend.RdmaBackend`: takes work only when its state allows, flushes in order, calls
no owner after `destroy`. Counts what is alive, so that a leak shows. `fail_next` makes a verb fail.
"""

import errno
from collections import Counter, deque
from dataclasses import dataclass, field

from pvrdma_server.abi.pvrdma_verbs import (
    Mtu,
    PortAttr,
    PortPhysState,
    PortSpeed,
    PortState,
    PortWidth,
    QpAttr,
    QpState,
    QpType,
)
from pvrdma_server.abi.vmw_pvrdma_abi import WcOpcode, WcStatus
from pvrdma_server.backend import (
    BackendLimits,
    BackendPd,
    BackendSrq,
    Completion,
    QpInit,
    QpOwner,
    RecvWr,
    Refused,
    SendWr,
    SrqOwner,
)
from pvrdma_server.errors import BackendError
from pvrdma_server.guest_memory import GuestMemory, GuestPages

LIMITS = BackendLimits(
    max_qp=64,
    max_qp_wr=256,
    max_sge=8,
    max_cq=64,
    max_cqe=1024,
    max_mr=64,
    max_mr_size=1 << 30,
    max_pd=32,
    max_ah=1000,
    max_srq=16,
    max_srq_wr=256,
    max_srq_sge=8,
    max_qp_rd_atom=16,
    max_qp_init_rd_atom=8,
    max_fast_reg_pages=64,
    max_msg_size=1 << 30,
    gid_table_len=16,
    local_ca_ack_delay=15,
    atomics=True,
    memory_management=True,
    node_guid=bytes.fromhex("0250560000fffe01"),
)
PORT = PortAttr(
    state=PortState.ACTIVE,
    max_mtu=Mtu.MTU_4096,
    active_mtu=Mtu.MTU_1024,
    gid_tbl_len=0,
    port_cap_flags=0,
    max_msg_sz=1 << 30,
    bad_pkey_cntr=0,
    qkey_viol_cntr=0,
    pkey_tbl_len=0,
    lid=0,
    sm_lid=0,
    lmc=0,
    max_vl_num=1,
    sm_sl=0,
    subnet_timeout=0,
    init_type_reply=0,
    active_width=PortWidth.WIDTH_4X,
    active_speed=PortSpeed.EDR,
    phys_state=PortPhysState.LINK_UP,
)


@dataclass(slots=True, eq=False)
class FakePd:
    backend: "FakeBackend"
    privileged: bool

    def destroy(self) -> None:
        self.backend.alive["pd"] -= 1


@dataclass(slots=True, eq=False)
class FakeMr:
    """`kind` is "user", "dma" or "frmr"."""

    backend: "FakeBackend"
    kind: str
    lkey: int
    rkey: int
    start: int = 0
    length: int = 0
    access: int = 0
    pages: GuestPages | None = None
    max_pages: int = 0

    def destroy(self) -> None:
        self.backend.alive["mr"] -= 1


@dataclass(slots=True, eq=False)
class FakeSrq:
    backend: "FakeBackend"
    owner: SrqOwner
    doorbells: int = 0
    held: int = 0

    def recv_doorbell(self) -> None:
        self.doorbells += 1

    def destroy(self) -> None:
        self.backend.alive["srq"] -= 1


@dataclass(slots=True, eq=False)
class FakeQp:
    """`sent` are the requests taken; with `answer` each one completes at once."""

    backend: "FakeBackend"
    owner: QpOwner
    init: QpInit
    qpn: int
    srq: BackendSrq | None
    answer: bool = True
    state: int = QpState.RESET
    sent: list[SendWr] = field(default_factory=list)
    modified: list[tuple[QpAttr, int]] = field(default_factory=list)
    recv_doorbells: int = 0
    destroyed: bool = False

    def modify(self, attr: QpAttr, mask: int) -> None:
        self.backend.maybe_fail("modify_qp")
        self.modified.append((attr, mask))
        self.state = attr.qp_state
        self.send_doorbell()
        if self.state == QpState.ERR:
            self.recv_doorbell()

    def query(self, attr: QpAttr) -> QpAttr:
        return attr._replace(sq_draining=0)

    def send_doorbell(self) -> None:
        if self.state not in (QpState.RTS, QpState.SQD, QpState.SQE, QpState.ERR):
            return
        while self.state != QpState.SQD and (wr := self.owner.pop_send()):
            self.sent.append(wr)
            if isinstance(wr.arm, Refused) and self.state == QpState.RTS:
                self.complete(wr, wr.arm.status)
                self.state = QpState.ERR
                self.owner.state_changed(QpState.ERR)
                self.recv_doorbell()
            elif self.state != QpState.RTS:
                self.complete(wr, WcStatus.WR_FLUSH_ERR)
            elif wr.signaled and self.answer:
                self.complete(wr, WcStatus.SUCCESS)

    def complete(self, wr: SendWr, status: int) -> None:
        self.owner.complete_send(Completion(wr.wr_id, status, WcOpcode.SEND))

    def recv_doorbell(self) -> None:
        self.recv_doorbells += 1
        while self.state == QpState.ERR and (wr := self.owner.pop_recv()):
            self.owner.complete_recv(
                Completion(wr.wr_id, WcStatus.WR_FLUSH_ERR, WcOpcode.RECV), solicited=False
            )

    def arrive(
        self, *, byte_len: int = 0, solicited: bool = False, flags: int = 0
    ) -> RecvWr | None:
        """A message arrives and takes a receive."""
        wr = self.srq.owner.pop_recv() if isinstance(self.srq, FakeSrq) else self.owner.pop_recv()
        if wr is not None:
            status = wr.refused or WcStatus.SUCCESS
            wc = Completion(wr.wr_id, status, WcOpcode.RECV, byte_len, wc_flags=flags)
            self.owner.complete_recv(wc, solicited=solicited)
        return wr

    def destroy(self) -> None:
        self.destroyed = True
        self.state = QpState.RESET
        self.backend.alive["qp"] -= 1
        self.backend.free_qpn(self.qpn)


class FakeBackend:
    """See the module."""

    def __init__(self, limits: BackendLimits = LIMITS) -> None:
        self.limits = limits
        self.alive: Counter[str] = Counter()
        self.qps: dict[int, FakeQp] = {}
        self.srqs: list[FakeSrq] = []
        self.mrs: list[FakeMr] = []
        self.pds: list[FakePd] = []
        self.gids: dict[int, tuple[bytes, int]] = {}
        self.fail_next: dict[str, int] = {}
        self.progress_calls = 0
        self.resets = 0
        self._free_qpns = deque(range(2, limits.max_qp + 1))
        self._next_key = 0x100

    def maybe_fail(self, verb: str) -> None:
        """Fail `verb` once if a test asked for it."""
        number = self.fail_next.pop(verb, 0)
        if number:
            raise BackendError(number, verb)

    def attach(self, memory: GuestMemory) -> None:
        self.memory = memory

    def query_port(self) -> PortAttr:
        self.maybe_fail("query_port")
        return PORT

    def add_gid(self, index: int, gid: bytes, gid_type: int) -> None:
        self.maybe_fail("add_gid")
        if any(index != i and gid == g for i, (g, _) in self.gids.items()):
            raise BackendError(errno.EADDRINUSE, "add_gid")
        self.gids[index] = (gid, gid_type)

    def remove_gid(self, index: int) -> None:
        self.gids.pop(index, None)

    def create_pd(self, *, privileged: bool) -> FakePd:
        self.maybe_fail("create_pd")
        self.alive["pd"] += 1
        self.pds = [*self.pds[-9:], FakePd(self, privileged)]
        return self.pds[-1]

    def reg_mr(
        self, pd: BackendPd, *, start: int, length: int, access: int, pages: GuestPages
    ) -> FakeMr:
        return self._mr("user", start=start, length=length, access=access, pages=pages)

    def reg_dma_mr(self, pd: BackendPd, *, access: int) -> FakeMr:
        return self._mr("dma", access=access)

    def alloc_fast_reg_mr(self, pd: BackendPd, *, max_pages: int) -> FakeMr:
        return self._mr("frmr", max_pages=max_pages)

    def _mr(
        self,
        kind: str,
        *,
        start: int = 0,
        length: int = 0,
        access: int = 0,
        pages: GuestPages | None = None,
        max_pages: int = 0,
    ) -> FakeMr:
        self.maybe_fail("reg_mr")
        self.alive["mr"] += 1
        self._next_key += 0x100
        key = self._next_key
        mr = FakeMr(self, kind, key, key, start, length, access, pages, max_pages)
        self.mrs = [*self.mrs[-9:], mr]
        return mr

    def create_srq(self, pd: BackendPd, owner: SrqOwner, *, max_wr: int, max_sge: int) -> FakeSrq:
        self.maybe_fail("create_srq")
        self.alive["srq"] += 1
        self.srqs = [*self.srqs[-9:], FakeSrq(self, owner)]
        return self.srqs[-1]

    def create_qp(
        self, pd: BackendPd, owner: QpOwner, init: QpInit, srq: BackendSrq | None
    ) -> FakeQp:
        self.maybe_fail("create_qp")
        qpn = (
            1
            if init.qp_type == QpType.GSI
            else (self._free_qpns.popleft() if self._free_qpns else 0)
        )
        if qpn in self.qps or not qpn:
            raise BackendError(errno.EBUSY if qpn else errno.ENOMEM, "create_qp")
        self.alive["qp"] += 1
        qp = FakeQp(self, owner, init, qpn, srq)
        self.qps[qpn] = qp
        return qp

    def add_qpns(self, count: int) -> None:
        """Have QPNs beyond the device's limit, as a host's HCA has."""
        self._free_qpns.extend(range(self.limits.max_qp + 1, self.limits.max_qp + 1 + count))

    def free_qpn(self, qpn: int) -> None:
        """Forget a QP; its number is used again as late as possible."""
        del self.qps[qpn]
        if qpn > 1:
            self._free_qpns.append(qpn)

    def progress(self, budget_bytes: int) -> bool:
        self.progress_calls += 1
        return False

    def next_deadline_ns(self) -> int | None:
        return None

    def reset(self) -> None:
        self.resets += 1
        self.gids.clear()

    def close(self) -> None:
        self.reset()

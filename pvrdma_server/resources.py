"""The device's objects: handles, user contexts, protection domains, regions, queues, queue pairs, GIDs.

Contract: objects know their owner and their rings, and speak to the backend and to `DeviceHooks`; they know nothing of
commands, registers or doorbells. A lookup fed by the guest raises `BadHandle`.

A destroy always destroys, and takes what depended on the object with it: the driver ignores the answer of every destroy
command and frees the memory anyway, so an object left alive would write into pages that are no longer its own. In a
healthy guest nothing is left by then; what is was created by a command whose issuer was interrupted by a signal.

Handles are dense and small, for the driver and rdma-core index tables with them unchecked, and are reused as late as
possible. Source: drv pvrdma_qp.c `qp_tbl[handle % max_qp]` and `qp_tbl[handle]`; lib `qp_tbl[handle & 0xFFFF]`.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpAttr, QpState
from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus
from pvrdma_server.backend import (
    BackendMr,
    BackendPd,
    BackendQp,
    BackendSrq,
    Completion,
    RecvWr,
    Refused,
    SendWr,
)
from pvrdma_server.errors import BadGuestAddress, BadHandle, BadRingIndex, BadWqe, GuestError
from pvrdma_server.guest_memory import GuestMemory
from pvrdma_server.qp_ops import (
    SendRules,
    encode_cqe,
    parse_recv_untrusted,
    parse_send_untrusted,
    wr_id_of,
)
from pvrdma_server.rings import ConsumerRing, ProducerRing

T = TypeVar("T")


class TableFull(GuestError):
    """Every handle of a table is in use."""

    kind = "table_full"


class HandleTable(Generic[T]):
    """Objects by handle, first <= handle < limit."""

    __slots__ = ("_free", "_items", "_next", "kind", "limit")

    def __init__(self, kind: str, first: int, limit: int) -> None:
        self.kind = kind
        self.limit = limit
        self._next = first
        self._free: deque[int] = deque()
        self._items: dict[int, T] = {}

    def reserve(self) -> int:
        """A handle that no object has; give it back with `release` or fill it with `put`.

        Raises:
            TableFull: the guest has as many objects as the device advertises.
        """
        if self._next < self.limit:
            self._next += 1
            return self._next - 1
        if not self._free:
            raise TableFull(f"all {self.limit} {self.kind} handles are in use")
        return self._free.popleft()

    def claim(self, handle: int) -> int:
        """Reserve just that handle, in a table from which nobody calls `reserve`.

        Raises:
            TableFull: it is in use or beyond the limit.
        """
        if handle >= self.limit or handle in self._items:
            raise TableFull(f"{self.kind} handle {handle} is in use or not below {self.limit}")
        return handle

    def release(self, handle: int) -> None:
        """Give back a reserved handle."""
        self._free.append(handle)

    def put(self, handle: int, item: T) -> None:
        """Fill a reserved handle."""
        self._items[handle] = item

    def get_untrusted(self, handle: int) -> T:
        """The object with that handle.

        Raises:
            BadHandle: there is none.
        """
        item = self._items.get(handle)
        if item is None:
            raise BadHandle(f"no {self.kind} {handle:#x}")
        return item

    def find(self, handle: int) -> T | None:
        """The object with that handle, or None."""
        return self._items.get(handle)

    def pop_untrusted(self, handle: int) -> T:
        """Take the object out and free its handle. Raises BadHandle as `get_untrusted`."""
        item = self.get_untrusted(handle)
        del self._items[handle]
        self._free.append(handle)
        return item

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._items.values()))


class DeviceHooks(Protocol):
    """What objects report to the device."""

    def cq_notify(self, cq: "Cq") -> None:
        """An armed CQ has something: tell the guest."""

    def cq_failed(self, cq: "Cq") -> None:
        """A CQ overflowed or its ring is corrupt: its queue pairs must stop."""

    def async_event(self, event: int, info: int) -> None:
        """Queue an asynchronous event for the guest."""

    def guest_error(self, what: str, error: GuestError) -> None:
        """Count and, the first time, log an illegal act of the guest."""

    def work_missed(self) -> None:
        """A ring's memory is unmapped at the moment: look at the rings again when memory returns."""


@dataclass(slots=True, eq=False)
class UserContext:
    """A process of the guest that opened the device; it owns one doorbell page."""

    handle: int
    uar_page: int


@dataclass(slots=True, eq=False)
class Pd:
    """A protection domain. `ctx` is None for the guest kernel's own."""

    handle: int
    ctx: UserContext | None
    backend: BackendPd


@dataclass(slots=True, eq=False)
class Mr:
    """A memory region; its keys are the backend's."""

    handle: int
    pd: Pd
    backend: BackendMr


@dataclass(slots=True, eq=False)
class Gid:
    """An entry of the guest's GID table."""

    gid: bytes
    gid_type: int


class Armed(IntEnum):
    """What a CQ waits for before it notifies."""

    NO = 0
    SOLICITED = 1
    NEXT = 2


@dataclass(slots=True, eq=False)
class Cq:
    """A completion queue: publishes completions, and notifies once per arm.

    `backlog` holds completions for the moments in which the client has the ring's memory unmapped.
    """

    handle: int
    ctx: UserContext | None
    ring: ProducerRing
    hooks: DeviceHooks
    armed: int = Armed.NO
    failed: bool = False
    backlog: deque[tuple[bytes, bool]] = field(default_factory=deque)

    def complete(self, cqe: bytes, *, solicited: bool) -> None:
        """Publish one encoded completion; `solicited` also for every unsuccessful one.

        Order: body, index, then the notification.
        """
        if self.failed:
            return
        if self.backlog or not self._publish(cqe):
            self.backlog.append((cqe, solicited))
            if len(self.backlog) > self.ring.capacity:
                self._fail()
            return
        if self.armed and (solicited or self.armed == Armed.NEXT):
            self.armed = Armed.NO
            self.hooks.cq_notify(self)

    def memory_returned(self) -> None:
        """Publish what had to wait for unmapped memory."""
        waiting, self.backlog = self.backlog, deque()
        for cqe, solicited in waiting:
            self.complete(cqe, solicited=solicited)

    def _publish(self, cqe: bytes) -> bool:
        try:
            if not self.ring.push_untrusted(cqe):
                self._fail()
        except BadGuestAddress:
            return False
        except BadRingIndex as e:
            self.hooks.guest_error("cq", e)
            self._fail()
        return True

    def _fail(self) -> None:
        self.failed = True
        self.backlog.clear()
        self.hooks.async_event(EqeType.CQ_ERR, self.handle)
        self.hooks.cq_failed(self)


def pop_or_report(ring: ConsumerRing, hooks: DeviceHooks, what: str) -> bytes | None:
    """The next entry of a ring; None when there is none, or none to be had, which is then reported."""
    try:
        return ring.pop_untrusted()
    except BadGuestAddress:
        hooks.work_missed()
    except BadRingIndex as e:
        hooks.guest_error(what, e)
    return None


class Receiver:
    """Takes receive work requests out of a ring; shared by queue pairs and shared receive queues."""

    __slots__ = ("hooks", "max_sge", "ring", "what")

    def __init__(self, ring: ConsumerRing, max_sge: int, hooks: DeviceHooks, what: str) -> None:
        self.ring = ring
        self.max_sge = max_sge
        self.hooks = hooks
        self.what = what

    def pop(self) -> RecvWr | None:
        wqe = pop_or_report(self.ring, self.hooks, self.what)
        if wqe is None:
            return None
        try:
            return parse_recv_untrusted(wqe, self.max_sge)
        except BadWqe as e:
            self.hooks.guest_error(self.what, e)
            return RecvWr(wr_id_of(wqe), (), e.status)

    def used(self) -> int:
        try:
            return self.ring.used_untrusted()
        except GuestError:
            return 0


@dataclass(slots=True, eq=False)
class Srq:
    """A shared receive queue. Implements `backend.SrqOwner`."""

    handle: int
    pd: Pd
    receiver: Receiver
    hooks: DeviceHooks
    max_wr: int
    max_sge: int
    limit: int = 0
    backend: BackendSrq = field(init=False)

    def pop_recv(self) -> RecvWr | None:
        """Take the next posted receive; raises SRQ_LIMIT_REACHED once when fewer than `limit` are left."""
        wr = self.receiver.pop()
        if wr is not None:
            self.check_limit()
        return wr

    def check_limit(self) -> None:
        """Fire and disarm the limit if it has been reached."""
        if self.limit and self.receiver.used() < self.limit:
            self.limit = 0
            self.hooks.async_event(EqeType.SRQ_LIMIT_REACHED, self.handle)


class QpQueues(NamedTuple):
    """What a queue pair is built of."""

    sq: ConsumerRing
    rq: ConsumerRing | None
    rules: SendRules
    max_recv_sge: int


class Qp:
    """A queue pair. Implements `backend.QpOwner`: offers work from its rings, publishes completions."""

    __slots__ = (
        "_hooks",
        "_memory",
        "_receiver",
        "_rules",
        "attr",
        "backend",
        "destroyed",
        "handle",
        "pd",
        "qp_type",
        "recv_cq",
        "send_cq",
        "sq",
        "srq",
    )

    backend: BackendQp

    def __init__(
        self,
        *,
        qp_type: int,
        pd: Pd,
        send_cq: Cq,
        recv_cq: Cq,
        srq: Srq | None,
        queues: QpQueues,
        attr: QpAttr,
        memory: GuestMemory,
        hooks: DeviceHooks,
    ) -> None:
        self.handle = 0
        self.qp_type = qp_type
        self.pd = pd
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.srq = srq
        self.sq = queues.sq
        self.attr = attr
        self.destroyed = False
        self._rules = queues.rules
        self._memory = memory
        self._hooks = hooks
        self._receiver = (
            Receiver(queues.rq, queues.max_recv_sge, hooks, "rq") if queues.rq else None
        )

    @property
    def state(self) -> int:
        """The QP's `QpState`."""
        return self.attr.qp_state

    def pop_send(self) -> SendWr | None:
        """See `backend.QpOwner`."""
        wqe = pop_or_report(self.sq, self._hooks, "sq")
        if wqe is None:
            return None
        try:
            return parse_send_untrusted(wqe, self._rules, self._memory)
        except BadWqe as e:
            self._hooks.guest_error("sq", e)
            return SendWr(wr_id_of(wqe), 0, 0, True, bytes(4), (), Refused(e.status, str(e)))

    def pop_recv(self) -> RecvWr | None:
        """See `backend.QpOwner`."""
        return self._receiver.pop() if self._receiver else None

    def complete_send(self, wc: Completion) -> None:
        """See `backend.QpOwner`."""
        self._complete(self.send_cq, wc, wc.status != WcStatus.SUCCESS)

    def complete_recv(self, wc: Completion, *, solicited: bool) -> None:
        """See `backend.QpOwner`."""
        self._complete(self.recv_cq, wc, solicited or wc.status != WcStatus.SUCCESS)

    def _complete(self, cq: Cq, wc: Completion, solicited: bool) -> None:
        # The guest never consumes a completion of a handle that it has freed: its CQ would be stuck for ever.
        if not self.destroyed:
            cq.complete(encode_cqe(wc, self.handle, kernel=cq.ctx is None), solicited=solicited)

    def state_changed(self, state: int) -> None:
        """See `backend.QpOwner`."""
        self.attr = self.attr._replace(qp_state=state, cur_qp_state=state)

    def raise_event(self, event: int) -> None:
        """See `backend.QpOwner`."""
        if not self.destroyed:
            self._hooks.async_event(event, self.handle)

    def to_error(self) -> None:
        """Move to ERR on the device's own account and flush."""
        if not self.destroyed and self.state not in (QpState.RESET, QpState.ERR):
            self.state_changed(QpState.ERR)
            self.backend.modify(self.attr, 1)

    def destroy(self) -> None:
        """Stop; nothing is published for this queue pair once this returns."""
        self.destroyed = True
        self.backend.destroy()


class TableSizes(NamedTuple):
    """How many objects of each kind the guest may have; handles stay below these."""

    contexts: int
    pds: int
    mrs: int
    cqs: int
    srqs: int
    qps: int


class Resources:
    """All objects of one driver instance; `clear` leaves none."""

    __slots__ = ("contexts", "cqs", "gids", "mrs", "pds", "qps", "srqs")

    def __init__(self, sizes: TableSizes) -> None:
        # Context 0 means "the kernel" in CREATE_PD and CREATE_CQ; QP handle 0 means "use the QPN" to rdma-core.
        self.contexts: HandleTable[UserContext] = HandleTable("user context", 1, sizes.contexts)
        self.pds: HandleTable[Pd] = HandleTable("PD", 1, sizes.pds)
        self.mrs: HandleTable[Mr] = HandleTable("MR", 1, sizes.mrs + 1)
        self.cqs: HandleTable[Cq] = HandleTable("CQ", 0, sizes.cqs)
        self.srqs: HandleTable[Srq] = HandleTable("SRQ", 0, sizes.srqs)
        self.qps: HandleTable[Qp] = HandleTable("QP", 1, sizes.qps)
        self.gids: dict[int, Gid] = {}

    def destroy_qp(self, handle: int) -> None:
        """Raises BadHandle."""
        self.qps.pop_untrusted(handle).destroy()

    def destroy_srq(self, handle: int) -> None:
        """Destroy an SRQ and the queue pairs that receive from it. Raises BadHandle."""
        srq = self.srqs.pop_untrusted(handle)
        self._destroy_qps(lambda qp: qp.srq is srq)
        srq.backend.destroy()

    def destroy_cq(self, handle: int) -> None:
        """Destroy a CQ and the queue pairs that complete into it. Raises BadHandle."""
        cq = self.cqs.pop_untrusted(handle)
        self._destroy_qps(lambda qp: cq in (qp.send_cq, qp.recv_cq))
        cq.failed = True

    def destroy_mr(self, handle: int) -> None:
        """Raises BadHandle."""
        self.mrs.pop_untrusted(handle).backend.destroy()

    def destroy_pd(self, handle: int) -> None:
        """Destroy a PD and everything in it. Raises BadHandle."""
        pd = self.pds.pop_untrusted(handle)
        self._destroy_qps(lambda qp: qp.pd is pd)
        for srq in self.srqs:
            if srq.pd is pd:
                self.destroy_srq(srq.handle)
        for mr in self.mrs:
            if mr.pd is pd:
                self.destroy_mr(mr.handle)
        pd.backend.destroy()

    def destroy_context(self, handle: int) -> None:
        """Destroy a user context and everything its process left. Raises BadHandle."""
        ctx = self.contexts.pop_untrusted(handle)
        for pd in self.pds:
            if pd.ctx is ctx:
                self.destroy_pd(pd.handle)
        for cq in self.cqs:
            if cq.ctx is ctx:
                self.destroy_cq(cq.handle)

    def clear(self) -> None:
        """Destroy everything, as a device reset does."""
        for pd in self.pds:
            self.destroy_pd(pd.handle)
        for cq in self.cqs:
            self.destroy_cq(cq.handle)
        for ctx in self.contexts:
            self.destroy_context(ctx.handle)
        self.gids.clear()

    def counts(self) -> dict[str, int]:
        """Live objects by kind, for counters and leak checks."""
        return {
            "contexts": len(self.contexts),
            "pds": len(self.pds),
            "mrs": len(self.mrs),
            "cqs": len(self.cqs),
            "srqs": len(self.srqs),
            "qps": len(self.qps),
            "gids": len(self.gids),
        }

    def _destroy_qps(self, doomed: "QpFilter") -> None:
        for qp in self.qps:
            if doomed(qp):
                self.destroy_qp(qp.handle)


class QpFilter(Protocol):
    """Chooses queue pairs."""

    def __call__(self, qp: Qp) -> bool:
        """Whether `qp` is chosen."""

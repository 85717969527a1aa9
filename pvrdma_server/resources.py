"""Handles, and the tables of a driver instance's objects: who depends on whom, and how they go.

Contract: a lookup fed by the guest raises `BadHandle`. A destroy always destroys, and takes what depended on the object
with it: the driver ignores the answer of every destroy command and frees the memory anyway, so an object left alive
would write into pages that are no longer its own. In a healthy guest nothing is left by then; what is was created by a
command whose issuer was interrupted by a signal.

Handles are dense and small, for the driver and rdma-core index tables with them unchecked, and are reused as late as
possible. Source: drv pvrdma_qp.c `qp_tbl[handle % max_qp]` and `qp_tbl[handle]`; lib `qp_tbl[handle & 0xFFFF]`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from pvrdma_server.errors import BadHandle, TableFullError
from pvrdma_server.objects import Cq, Gid, Mr, Pd, Qp, Srq, UserContext

T = TypeVar("T")


class HandleTable(Generic[T]):
    """Objects by handle, first <= handle < limit."""

    __slots__ = ("_first", "_free", "_items", "_next", "kind", "limit")

    def __init__(self, kind: str, first: int, limit: int) -> None:
        self.kind = kind
        self.limit = limit
        self._first = self._next = first
        self._free: deque[int] = deque()
        self._items: dict[int, T] = {}

    def reserve(self) -> int:
        """A handle that no object has; give it back with `release` or fill it with `put`.

        Raises:
            TableFullError: the guest has as many objects as the device advertises.
        """
        if self._next < self.limit:
            self._next += 1
            return self._next - 1
        if not self._free:
            raise TableFullError(f"all {self.limit} {self.kind} handles are in use")
        return self._free.popleft()

    def claim(self, handle: int) -> int:
        """Reserve just that handle: one below the first, or in a table from which nobody calls `reserve`.

        Raises:
            TableFullError: it is in use or beyond the limit.
        """
        if handle >= self.limit or handle in self._items:
            raise TableFullError(f"{self.kind} handle {handle} is in use or not below {self.limit}")
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
        # Otherwise it was claimed, not reserved, and a list of those would grow for ever.
        if self._first <= handle < self._next:
            self._free.append(handle)
        return item

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._items.values()))


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
        # Context 0 means "the kernel" in CREATE_PD and CREATE_CQ; QP handle 0 means "use the QPN" to rdma-core, and is
        # QP1's: handles must be below max_qp, and so many queue pairs there can be.
        self.contexts: HandleTable[UserContext] = HandleTable("user context", 1, sizes.contexts)
        self.pds: HandleTable[Pd] = HandleTable("PD", 1, sizes.pds + 1)
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
        srq.destroy()

    def destroy_cq(self, handle: int) -> None:
        """Destroy a CQ and the queue pairs that complete into it. Raises BadHandle."""
        cq = self.cqs.pop_untrusted(handle)
        self._destroy_qps(lambda qp: cq in (qp.send_cq, qp.recv_cq))
        cq.failed = True
        cq.hooks.cq_gone(cq)

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

    def _destroy_qps(self, doomed: Callable[[Qp], bool]) -> None:
        for qp in self.qps:
            if doomed(qp):
                self.destroy_qp(qp.handle)

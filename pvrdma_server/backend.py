"""What the device core asks of a backend, what a backend may ask of the core, and the values that pass between them.

Contract: everything here is called from one thread, returns at once and does no blocking I/O. The core never holds a
queue of work: it *offers* work (`QpOwner.pop_send`, `pop_recv` and their like read the guest's rings), the backend
takes as much as it has room for, now or later. So a guest's ring is the only queue, its size the only limit, and a
flush finds everything.

A backend reports through the owner objects it was given, synchronously, from inside `progress` or from inside the call
that caused it. Order per queue is the order of posting.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from pvrdma_server.abi.pvrdma_verbs import PortAttr, QpAttr
from pvrdma_server.abi.vmw_pvrdma_abi import Sge
from pvrdma_server.guest_memory import GuestMemory, GuestPages


class Rdma(NamedTuple):
    """Arm of RDMA_WRITE, RDMA_WRITE_WITH_IMM and RDMA_READ."""

    remote_addr: int
    rkey: int


class Atomic(NamedTuple):
    """Arm of ATOMIC_CMP_AND_SWP and ATOMIC_FETCH_AND_ADD; operands are 64-bit host-order integers."""

    remote_addr: int
    compare_add: int
    swap: int
    rkey: int


class AddressVector(NamedTuple):
    """Where a datagram goes. `dgid` is 16 bytes in wire order; `pd_handle` and `port` are as the guest wrote them."""

    pd_handle: int
    port: int
    dgid: bytes
    sgid_index: int
    hop_limit: int
    traffic_class: int
    flow_label: int
    dmac: bytes


class Ud(NamedTuple):
    """Arm of SEND and SEND_WITH_IMM on UD and GSI queue pairs."""

    remote_qpn: int
    qkey: int
    av: AddressVector


class FastReg(NamedTuple):
    """Arm of FAST_REG_MR. `pages` are page addresses, copied from the guest when the WQE was taken."""

    iova: int
    pages: tuple[int, ...]
    length: int
    access: int
    rkey: int


class Invalidate(NamedTuple):
    """Arm of SEND_WITH_INV and LOCAL_INV."""

    rkey: int


class Refused(NamedTuple):
    """Arm of a WQE that could not be decoded: it completes with `status` when its turn comes."""

    status: int
    why: str


Arm = Rdma | Atomic | Ud | FastReg | Invalidate | Refused | None


class SendWr(NamedTuple):
    """One send work request. `imm` is 4 bytes in wire order; `opcode` a WrOpcode, `send_flags` SendFlags bits.

    Signalling is resolved: `signaled` is true when success must produce a completion (flag or sq_sig_all).
    """

    wr_id: int
    opcode: int
    send_flags: int
    signaled: bool
    imm: bytes
    sges: tuple[Sge, ...]
    arm: Arm


class RecvWr(NamedTuple):
    """One receive work request. `refused` is 0 or the WcStatus with which it must complete when a message takes it."""

    wr_id: int
    sges: tuple[Sge, ...]
    refused: int = 0


class Completion(NamedTuple):
    """One completion. `opcode` is a WcOpcode, `imm` 4 bytes in wire order (or the little-endian rkey invalidated)."""

    wr_id: int
    status: int
    opcode: int
    byte_len: int = 0
    imm: bytes = bytes(4)
    src_qp: int = 0
    wc_flags: int = 0
    vendor_err: int = 0
    pkey_index: int = 0
    sl: int = 0
    network_hdr_type: int = 0


Done: TypeAlias = tuple[int, int, int]
"""A send that succeeded: wr_id, WcOpcode, byte_len."""


class SendEntries(NamedTuple):
    """Produced entries as they lie in guest memory, for who takes many in one go.

    Attributes:
        prod_tail: a view that begins with the guest's index, which may move.
        cons_head: our index, of the first entry.
        index_mask: what indices run modulo, less one.
        rows: slots from the first on around the ring, used or not, row by row; not always all of them.
        entry_size: bytes of an entry.
        signal_all: every one of them completes with a completion.
    """

    prod_tail: memoryview
    cons_head: int
    index_mask: int
    rows: Sequence[memoryview]
    entry_size: int
    signal_all: bool

    @property
    def slots(self) -> memoryview:
        """The first row."""
        return self.rows[0]


class CompletionSlots(NamedTuple):
    """Where the next completions of a queue pair's sends go, for who publishes them many in one go.

    Attributes:
        prod_tail: a view that begins with our index and the guest's.
        tail: our index, of the first slot.
        index_mask: what indices run modulo, less one.
        capacity: of the queue.
        rows: slots from the first on around the ring, row by row; not always all of them.
        template: a successful completion of an RDMA WRITE, but for its wr_id (8 bytes at 0) and byte_len (4 at 24).
        report: somebody waits to be told: not too many in one go.
    """

    prod_tail: memoryview
    tail: int
    index_mask: int
    capacity: int
    rows: Sequence[memoryview]
    template: bytes
    report: bool


class SendLane(NamedTuple):
    """Both ends of a queue pair's sends. `watch_token`: who watches for entries in it (-1: nobody)."""

    entries: SendEntries
    completions: CompletionSlots
    watch_token: int


class QpInit(NamedTuple):
    """What a queue pair is created with, checked against the limits. `srq` is the backend's SRQ or None."""

    qp_type: int
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    sq_sig_all: bool


class QpOwner(Protocol):
    """The device's queue pair as its backend sees it."""

    def pop_send(self) -> SendWr | None:
        """Take the next posted send, or None. The ring slot is free afterwards, whatever becomes of the request."""

    def peek_sends(self) -> SendEntries | None:
        """What is posted, where it lies, for a backend that takes simple requests many at a time; None: use `pop_send`.

        Whoever takes of them the first so many says so with `took_sends`, and decodes and checks them as `pop_send`
        would. The entries may change at any time.
        """

    def took_sends(self, count: int) -> None:
        """The first `count` of what `peek_sends` returned were taken; their slots are free."""

    def send_lane(self) -> SendLane | None:
        """The send queue, posted or not yet, and where its completions go, for a backend that does both at once.

        Whoever does, moves the indices himself, and then says so with `drove`. None: there is no such way now.
        """

    def drove(self, sends: int, completions: int) -> None:
        """So many were taken, and so many published, of what `send_lane` returned."""

    def pop_recv(self) -> RecvWr | None:
        """Take the next posted receive from the QP's own receive queue, or None."""

    def pop_recvs(self, most: int) -> list[RecvWr]:
        """Take some of the next posted receives, up to `most`; none only if there is none."""

    def complete_send(self, wc: Completion) -> None:
        """Publish a completion of the send queue. Called for signalled, failed and flushed requests only."""

    def complete_sends(self, done: Sequence[Done]) -> None:
        """Publish successful completions of signalled requests, as `complete_send` one after the other would."""

    def complete_recv(self, wc: Completion, *, solicited: bool) -> None:
        """Publish a completion of the receive queue (of its own RQ or of its SRQ)."""

    def complete_recvs(self, wcs: Sequence[Completion]) -> None:
        """Publish solicited completions, as `complete_recv` one after the other would."""

    def state_changed(self, state: int) -> None:
        """The backend moved the QP to `state` (ERR, SQE or SQD drained) by itself."""

    def raise_event(self, event: int) -> None:
        """Raise an asynchronous event (EqeType) of this QP, such as COMM_EST, REQ_ERR, ACCESS_ERR, LAST_WQE."""


class SrqOwner(Protocol):
    """The device's shared receive queue as its backend sees it."""

    def pop_recv(self) -> RecvWr | None:
        """Take the next posted receive, or None. Raises the SRQ limit event itself."""

    def pop_recvs(self, most: int) -> list[RecvWr]:
        """Take some, up to `most`, none only if there is none; `held` counts them at once, then comes `check_limit`."""

    def check_limit(self) -> None:
        """A message has used a receive that `held` counted: raise the SRQ limit event if it was the one too many."""


class BackendQp(Protocol):
    """A queue pair of a backend."""

    qpn: int

    def modify(self, attr: QpAttr, mask: int) -> None:
        """Apply attributes that the core found legal. `attr` is the merged state: every attribute as it now stands.

        Raises:
            BackendError: nothing has changed.
        """

    def query(self, attr: QpAttr) -> QpAttr:
        """`attr` with what only the backend knows (psn counters, sq_draining) filled in."""

    def send_doorbell(self) -> None:
        """Sends may have been posted. Short: take note, start."""

    def recv_doorbell(self) -> None:
        """Receives may have been posted."""

    def destroy(self) -> None:
        """Give everything back. The owner is not called again once this returns."""


class BackendSrq(Protocol):
    """A shared receive queue of a backend."""

    @property
    def held(self) -> int:
        """Receives taken from the guest's ring that no message has used yet: to the guest they are still posted."""

    def recv_doorbell(self) -> None:
        """Receives may have been posted."""

    def destroy(self) -> None:
        """Give everything back."""


class BackendPd(Protocol):
    """A protection domain of a backend."""

    def destroy(self) -> None:
        """Give everything back. The core has destroyed what was in it."""


class BackendMr(Protocol):
    """A memory region of a backend; keys are what the guest is told."""

    lkey: int
    rkey: int

    def destroy(self) -> None:
        """Invalidate the keys, now and for ever."""


class HostGidFacts(NamedTuple):
    """What a GID of the guest is on the host, for people.

    Attributes:
        device: the host's RDMA device.
        port: its port.
        gid_index: the host's index of the GID; None when the port lacks it, and the GID does not work.
        netdev: where the address behind the GID belongs.
    """

    device: str
    port: int
    gid_index: int | None
    netdev: str


class BackendLimits(NamedTuple):
    """What a backend can carry; the device advertises no more, and clamps to what the guest's driver survives."""

    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_mr_size: int
    max_pd: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_fast_reg_pages: int
    max_msg_size: int
    gid_table_len: int
    local_ca_ack_delay: int
    atomics: bool
    memory_management: bool
    node_guid: bytes


class RdmaBackend(Protocol):
    """A host RDMA device, or the embedded one."""

    limits: BackendLimits

    def attach(self, memory: GuestMemory) -> None:
        """Bind to one guest's memory, before anything is created."""

    def query_port(self) -> PortAttr:
        """The port's attributes at this moment (gid_tbl_len and pkey_tbl_len are the device's business)."""

    def add_gid(self, index: int, gid: bytes, gid_type: int) -> None:
        """Own `gid` (16 bytes, wire order) at `index`. Raises BackendError, for instance EADDRINUSE."""

    def remove_gid(self, index: int) -> None:
        """Give the GID at `index` up; nothing when there is none."""

    def create_pd(self, *, privileged: bool) -> BackendPd:
        """A protection domain; `privileged` ones (the guest kernel's) may use DMA keys, FAST_REG_MR and LOCAL_INV."""

    def reg_mr(
        self, pd: BackendPd, *, start: int, length: int, access: int, pages: GuestPages
    ) -> BackendMr:
        """Register guest pages: virtual address `start` is byte `start % 4096` of the first page."""

    def reg_dma_mr(self, pd: BackendPd, *, access: int) -> BackendMr:
        """Register all of guest memory by bus address (kernel PDs only)."""

    def alloc_fast_reg_mr(self, pd: BackendPd, *, max_pages: int) -> BackendMr:
        """Keys without memory, to be bound by FAST_REG_MR work requests."""

    def create_srq(
        self, pd: BackendPd, owner: SrqOwner, *, max_wr: int, max_sge: int
    ) -> BackendSrq:
        """A shared receive queue."""

    def create_qp(
        self, pd: BackendPd, owner: QpOwner, init: QpInit, srq: BackendSrq | None
    ) -> BackendQp:
        """A queue pair in state RESET."""

    def progress(self, budget_bytes: int) -> bool:
        """Do work that is ready, about `budget_bytes` of copying at most; true when more is ready now."""

    def next_deadline_ns(self) -> int | None:
        """Monotonic time (ns) at which `progress` must be called even if nothing happens, or None."""

    def reset(self) -> None:
        """Forget GIDs and peers, as after a device reset. Objects were destroyed before."""

    def close(self) -> None:
        """Give everything back; the backend is not used again."""


class HostBackend(RdmaBackend, Protocol):
    """A backend over a device of the host, which works by itself and says by a descriptor when it has done something.

    Attributes:
        wait_fd: readable when `progress` has something to do.
        on_event: called with events of port and device (EqeType, port number) for the guest.
    """

    wait_fd: int
    on_event: Callable[[int, int], None]

    def gid_facts(self) -> dict[int, HostGidFacts]:
        """The guest's GIDs on the host, by the guest's index; empty when the host does not answer."""

"""The objects a guest makes: user contexts, protection domains, regions, completion queues, SRQs, queue pairs, GIDs.

Contract: an object knows its owner and its ring, and speaks to the backend and to `DeviceHooks`. It publishes in the
order body, index, notification, and nothing once it is destroyed or failed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpAttr, QpState
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcOpcode, WcStatus
from pvrdma_server.backend import (
    BackendMr,
    BackendPd,
    BackendQp,
    BackendSrq,
    Completion,
    CompletionSlots,
    Done,
    RecvWr,
    Refused,
    SendEntries,
    SendLane,
    SendWr,
)
from pvrdma_server.errors import BackendError, BadGuestAddress, BadRingIndex, BadWqe, GuestError
from pvrdma_server.guest_memory import GuestMemory
from pvrdma_server.qp_ops import (
    SendRules,
    encode_cqe,
    encode_done,
    parse_recv_untrusted,
    parse_send_untrusted,
    plain_recvs,
    wr_id_of,
)
from pvrdma_server.rings import ConsumerRing, ProducerRing


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

    def watch(self, ring: ConsumerRing, bell: Callable[[], None]) -> None:
        """A process's ring came to life; where its doorbells are not heard, `bell` is called for its entries."""

    def unwatch(self, ring: ConsumerRing) -> None:
        """The ring of `watch` is no more."""

    def ring_drained(self, token: int) -> None:
        """A watched ring was found empty (or may have work again): its next entry must be noticed."""

    def cq_published(self, cq: "Cq") -> None:
        """A moderated CQ has a new completion."""

    def qp_failed(self, qp: "Qp") -> None:
        """A queue of the queue pair is corrupt: it must stop."""

    def cq_gone(self, cq: "Cq") -> None:
        """A CQ was destroyed: its memory is the guest's again, its handle soon somebody else's."""

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
    length_bytes: int = 0


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
    """A completion queue: publishes completions, and notifies once per arm, or by moderation (see watches.py).

    `backlog` holds completions for the moments in which the client has the ring's memory unmapped.
    """

    handle: int
    ctx: UserContext | None
    ring: ProducerRing
    hooks: DeviceHooks
    moderated: bool = False
    notified_head: int | None = None
    armed: int = Armed.NO
    failed: bool = False
    backlog: deque[tuple[bytes, bool]] = field(default_factory=deque)

    def complete(self, cqes: bytes, *, solicited: bool) -> None:
        """Publish encoded completions, one or more in a row; `solicited` also for every unsuccessful one.

        Order: bodies, index, then the notification, one for all of them.
        """
        if self.failed:
            return
        if self.backlog or not self._publish(cqes):
            size = self.ring.entry_size
            self.backlog.extend(
                (cqes[at : at + size], solicited) for at in range(0, len(cqes), size)
            )
            if len(self.backlog) > self.ring.capacity:
                self._fail()
            return
        self._published(solicited=solicited)

    def _published(self, *, solicited: bool) -> None:
        if self.moderated:
            self.hooks.cq_published(self)
        elif self.armed and (solicited or self.armed == Armed.NEXT):
            self.armed = Armed.NO
            self.hooks.cq_notify(self)

    def slots(self, template: bytes) -> CompletionSlots | None:
        """See `backend.CompletionSlots`; None when completions cannot be published just so."""
        if self.failed or self.backlog:
            return None
        try:
            words, index, mask, rows = self.ring.rows_untrusted()
        except GuestError:
            return None  # who completes something will say so
        report = not self.moderated and self.armed == Armed.NEXT
        return CompletionSlots(words, index, mask, self.ring.capacity, rows, template, report)

    def filled_slots(self) -> None:
        """Completions were published in what `slots` gave; none of them is solicited."""
        with suppress(GuestError):
            self.ring.used_untrusted()  # so that `seen_head` is of now
        self._published(solicited=False)

    def memory_returned(self) -> None:
        """Publish what had to wait for unmapped memory."""
        waiting, self.backlog = self.backlog, deque()
        for cqe, solicited in waiting:
            self.complete(cqe, solicited=solicited)

    def _publish(self, cqes: bytes) -> bool:
        try:
            if not self.ring.push_all_untrusted(cqes):
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


def pop_or_report(
    ring: ConsumerRing, hooks: DeviceHooks, what: str, corrupt: Callable[[], None], most: int = 1
) -> bytes | None:
    """The next entries of a ring, up to `most`; None when there is none, or none to be had, which is then reported.

    `corrupt` is called when the ring's indices cannot be any, so that nothing will ever come from it again.
    """
    try:
        entries = ring.pop_untrusted(most)
    except BadGuestAddress:
        hooks.work_missed()
        return None
    except BadRingIndex as e:
        hooks.guest_error(what, e)
        corrupt()
        return None
    if entries is None and ring.watch_token is not None:
        hooks.ring_drained(ring.watch_token)
    return entries


class Receiver:
    """Takes receive work requests out of a ring; shared by queue pairs and shared receive queues."""

    __slots__ = ("corrupt", "hooks", "max_sge", "ring", "what")

    corrupt: Callable[[], None]

    def __init__(self, ring: ConsumerRing, max_sge: int, hooks: DeviceHooks, what: str) -> None:
        self.ring = ring
        self.max_sge = max_sge
        self.hooks = hooks
        self.what = what

    def pop(self) -> RecvWr | None:
        """The next receive; one that cannot be decoded comes with the status it must complete with."""
        wqe = pop_or_report(self.ring, self.hooks, self.what, self.corrupt)
        return None if wqe is None else self._decode(wqe)

    def pop_all(self, most: int) -> list[RecvWr]:
        """The next receives, as `pop` would give them: up to `most` that lie in a row."""
        entries = pop_or_report(self.ring, self.hooks, self.what, self.corrupt, most)
        if entries is None:
            return []
        size, decode = self.ring.entry_size, self._decode
        return [
            RecvWr(wr_id, (Sge(addr, length, lkey),))
            if num_sge == 1
            else decode(entries[number * size : (number + 1) * size])
            for number, (wr_id, num_sge, addr, length, lkey) in enumerate(
                plain_recvs(entries, size)
            )
        ]

    def _decode(self, wqe: bytes) -> RecvWr:
        try:
            return parse_recv_untrusted(wqe, self.max_sge)
        except BadWqe as e:
            self.hooks.guest_error(self.what, e)
            return RecvWr(wr_id_of(wqe), (), e.status)

    def used(self) -> int:
        """Receives posted and not taken; 0 for a ring that cannot be read."""
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
    failed: bool = False
    backend: BackendSrq = field(init=False)

    def __post_init__(self) -> None:
        self.receiver.corrupt = self._corrupt

    def _corrupt(self) -> None:
        if not self.failed:
            self.failed = True
            self.hooks.async_event(EqeType.SRQ_ERR, self.handle)

    def start(self, backend: BackendSrq) -> None:
        """Take the backend's half; receives are taken from now on."""
        self.backend = backend
        if self.pd.ctx is not None:
            self.hooks.watch(self.receiver.ring, backend.recv_doorbell)

    def destroy(self) -> None:
        """Stop; no receive is taken once this returns."""
        self.hooks.unwatch(self.receiver.ring)
        self.backend.destroy()

    def pop_recv(self) -> RecvWr | None:
        """Take the next posted receive; raises SRQ_LIMIT_REACHED once when fewer than `limit` are left."""
        wr = self.receiver.pop()
        if wr is not None:
            self.check_limit()
        return wr

    def pop_recvs(self, most: int) -> list[RecvWr]:
        """See `backend.SrqOwner`."""
        return self.receiver.pop_all(most)

    def check_limit(self) -> None:
        """Fire and disarm the limit if it has been reached."""
        # What a host device has taken and not used is still posted, to the guest.
        if self.limit and self.receiver.used() + self.backend.held < self.limit:
            self.limit = 0
            self.hooks.async_event(EqeType.SRQ_LIMIT_REACHED, self.handle)


class QpQueues(NamedTuple):
    """What a queue pair is built of."""

    sq: ConsumerRing
    rq: ConsumerRing | None
    rules: SendRules
    max_recv_sge: int


class Qp:
    """A queue pair. Implements `backend.QpOwner`: offers work from its rings, publishes completions.

    Attributes:
        sends: work requests taken from its send queue.
        receives: receives completed, its own and its SRQ's.
        errors: unsuccessful completions, flushed ones included.
    """

    __slots__ = (
        "_hooks",
        "_memory",
        "_receiver",
        "_rules",
        "_write_done",
        "attr",
        "backend",
        "destroyed",
        "errors",
        "handle",
        "pd",
        "qp_type",
        "receives",
        "recv_cq",
        "send_cq",
        "sends",
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
        self.sends = self.receives = self.errors = 0
        self.destroyed = False
        self._write_done: bytes | None = None
        self._rules = queues.rules
        self._memory = memory
        self._hooks = hooks
        self._receiver = (
            Receiver(queues.rq, queues.max_recv_sge, hooks, "rq") if queues.rq else None
        )
        if self._receiver is not None:
            self._receiver.corrupt = self._corrupt

    @property
    def state(self) -> int:
        """The QP's `QpState`."""
        return self.attr.qp_state

    def pop_send(self) -> SendWr | None:
        """See `backend.QpOwner`."""
        wqe = pop_or_report(self.sq, self._hooks, "sq", self._corrupt)
        if wqe is None:
            return None
        self.sends += 1
        try:
            return parse_send_untrusted(wqe, self._rules, self._memory)
        except BadWqe as e:
            self._hooks.guest_error("sq", e)
            return SendWr(wr_id_of(wqe), 0, 0, True, bytes(4), (), Refused(e.status, str(e)))

    def peek_sends(self) -> SendEntries | None:
        """See `backend.QpOwner`."""
        try:
            peeked = self.sq.peek_untrusted()
        except GuestError:
            return None  # `pop_send` will say so
        return None if peeked is None else self._entries(peeked)

    def _entries(self, peeked: tuple[memoryview, int, int, list[memoryview]]) -> SendEntries:
        return SendEntries(*peeked, self.sq.entry_size, self._rules.sq_sig_all)

    def took_sends(self, count: int) -> None:
        """See `backend.QpOwner`."""
        self.sends += count
        with suppress(GuestError):
            self.sq.skip_untrusted(count)

    def send_lane(self) -> SendLane | None:
        """See `backend.QpOwner`."""
        if self._write_done is None:
            self._write_done = encode_done(((0, int(WcOpcode.RDMA_WRITE), 0),), self.handle)
        done = None if self.destroyed else self.send_cq.slots(self._write_done)
        if done is None:
            return None
        try:
            entries = self._entries(self.sq.rows_untrusted())
        except GuestError:
            return None  # `pop_send` will say so
        token = self.sq.watch_token
        return SendLane(entries, done, -1 if token is None else token)

    def drove(self, sends: int, completions: int) -> None:
        """See `backend.QpOwner`."""
        self.sends += sends
        if completions:
            self.send_cq.filled_slots()

    def pop_recv(self) -> RecvWr | None:
        """See `backend.QpOwner`."""
        return self._receiver.pop() if self._receiver else None

    def pop_recvs(self, most: int) -> list[RecvWr]:
        """See `backend.QpOwner`."""
        return self._receiver.pop_all(most) if self._receiver else []

    def complete_send(self, wc: Completion) -> None:
        """See `backend.QpOwner`."""
        self._complete(self.send_cq, wc, wc.status != WcStatus.SUCCESS)

    def complete_sends(self, done: Sequence[Done]) -> None:
        """See `backend.QpOwner`."""
        if not self.destroyed:
            self.send_cq.complete(encode_done(done, self.handle), solicited=False)

    def complete_recv(self, wc: Completion, *, solicited: bool) -> None:
        """See `backend.QpOwner`."""
        self.receives += 1
        self._complete(self.recv_cq, wc, solicited or wc.status != WcStatus.SUCCESS)

    def complete_recvs(self, wcs: Sequence[Completion]) -> None:
        """See `backend.QpOwner`."""
        self.receives += len(wcs)
        if not self.destroyed:
            cq, handle = self.recv_cq, self.handle
            kernel = cq.ctx is None
            cqes = [encode_cqe(wc, handle, kernel=kernel) for wc in wcs]
            cq.complete(b"".join(cqes), solicited=True)

    def _complete(self, cq: Cq, wc: Completion, solicited: bool) -> None:
        if wc.status:
            self.errors += 1
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

    def start(self, backend: BackendQp) -> None:
        """Take the backend's half; work is offered from now on."""
        self.backend = backend
        if self.pd.ctx is not None:
            self._hooks.watch(self.sq, backend.send_doorbell)
            if self._receiver is not None:
                self._hooks.watch(self._receiver.ring, backend.recv_doorbell)

    def look_again(self) -> None:
        """What lies in the rings may be wanted now, after a change of state."""
        for ring in self._rings():
            if ring.watch_token is not None:
                self._hooks.ring_drained(ring.watch_token)

    def _rings(self) -> list[ConsumerRing]:
        return [self.sq, self._receiver.ring] if self._receiver else [self.sq]

    def _corrupt(self) -> None:
        self._hooks.qp_failed(self)

    def to_error(self) -> None:
        """Move to ERR on the device's own account and flush."""
        if not self.destroyed and self.state not in (QpState.RESET, QpState.ERR):
            self.state_changed(QpState.ERR)
            # No command waits that could carry a failure; the guest sees ERR either way, and destroys what it sees.
            with suppress(BackendError):
                self.backend.modify(self.attr, 1)
            self.look_again()

    def destroy(self) -> None:
        """Stop; nothing is published for this queue pair once this returns."""
        self.destroyed = True
        for ring in self._rings():
            self._hooks.unwatch(ring)
        self.backend.destroy()

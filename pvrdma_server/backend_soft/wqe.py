"""A send request taken from the ring, and the order all of a QP's requests are in.

Contract: `SendQueue` is pure bookkeeping. In posting order it holds `unacked` (sent whole),
`current` (being sent), `resend` (to be sent again after a go-back) and `held` (taken, but waiting
for earlier ones); requests leave at the head only.
"""

from collections import deque

from pvrdma_server.abi.vmw_pvrdma_abi import Sge
from pvrdma_server.backend import Rdma, SendWr
from pvrdma_server.backend_soft.codes import OP_READ, OP_WRITE, SIGNALED
from pvrdma_server.backend_soft.fast_path import SENT, Posted
from pvrdma_server.backend_soft.wire import NO_IMM, READ_REQUEST, WRITE


class Wqe:
    """A request with its PSNs `first`..`last` (none when `last` < `first`).

    `next` is the PSN to send next; `answered` whether a READ's or atomic's response is complete,
    or nothing has to be sent (any more); `received` a READ's bytes so far; `flying` bytes sent and
    not acknowledged; `status` the failure it must complete with. `kind`, `flags`, `total`, `rkey`
    and `remote_addr` are its message header's.
    """

    __slots__ = (
        "answered", "first", "flags", "flying", "kind", "last", "next", "received", "remote_addr",
        "rkey", "status", "total", "wr",
    )  # fmt: skip

    def __init__(self, wr: SendWr, first: int) -> None:
        self.wr = wr
        self.first = self.next = first
        self.last = first - 1
        self.answered = False
        self.kind = self.flags = self.total = self.received = self.flying = self.status = 0
        self.rkey = self.remote_addr = 0


class SentMany:
    """WRITEs, or READs, sent in one call: `first`..`last` with a `SENT` record each, completed from the front.

    `received` bytes of the first READ have come. `wqes` makes ordinary requests of those that are left, for whatever is
    not the usual end.
    """

    __slots__ = ("first", "flying", "kind", "last", "lkey", "received", "records", "signal_all")

    def __init__(
        self, posted: Posted, first: int, kind: int, lkey: int, *, signal_all: bool
    ) -> None:
        self.records = posted.records
        self.first, self.last = first, first + posted.messages - 1
        self.flying, self.signal_all, self.received = posted.length_bytes, signal_all, 0
        self.kind, self.lkey = kind, lkey

    @property
    def first_last(self) -> int:
        """The last PSN of the first that is left."""
        messages: int = SENT.unpack_from(self.records)[-1]
        return self.first + messages - 1

    def __len__(self) -> int:
        return len(self.records) // SENT.size

    def joins(self, before: "SentMany") -> bool:
        """Whether READs follow READs, which then are one for `before`: its data comes in one go."""
        if self.kind != READ_REQUEST or before.kind != READ_REQUEST or self.lkey != before.lkey:
            return False
        return before.last + 1 == self.first and before.signal_all == self.signal_all

    def take(self, psn: int) -> tuple[int, list[tuple[int, int]]]:
        """Drop all that end with `psn` at the latest: (bytes sent, (wr_id, length) of each that is signalled)."""
        length_bytes, count, first, signalled = 0, 0, self.first, []
        for wr_id, _, _, length, _, flags, messages in SENT.iter_unpack(self.records):
            if first + messages - 1 > psn:
                break
            first += messages
            count += 1
            length_bytes += length
            if flags & SIGNALED or self.signal_all:
                signalled.append((wr_id, length))
        self.records = self.records[count * SENT.size :]
        self.first = first
        if self.kind == READ_REQUEST:
            length_bytes = 0
        self.flying -= length_bytes
        return length_bytes, signalled

    def wqes(self) -> list[Wqe]:
        """The requests that are left, as if each had been sent by itself."""
        found, psn, reads = [], self.first, self.kind == READ_REQUEST
        for wr_id, remote_addr, address, length, rkey, flags, messages in SENT.iter_unpack(
            self.records
        ):
            wr = SendWr(
                wr_id, OP_READ if reads else OP_WRITE, flags, self.signal_all or bool(flags & SIGNALED), NO_IMM,
                (Sge(address, length, self.lkey),), Rdma(remote_addr, rkey),
            )  # fmt: skip
            wqe = Wqe(wr, psn)
            psn += messages
            wqe.kind, wqe.last, wqe.next = self.kind, psn - 1, psn
            wqe.total, wqe.flying = length, 0 if reads else length
            wqe.remote_addr, wqe.rkey = remote_addr, rkey
            found.append(wqe)
        if found:
            found[0].received = self.received
        return found


class SendQueue:
    """The requests of one QP that were taken and are not completed."""

    __slots__ = ("current", "flying", "held", "more", "resend", "unacked")

    def __init__(self) -> None:
        self.unacked: deque[Wqe | SentMany] = deque()
        # How many requests `unacked` holds beside one for each of its elements.
        self.more = 0
        self.resend: deque[Wqe] = deque()
        self.current: Wqe | None = None
        self.held: SendWr | None = None
        self.flying = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way (a held request has not begun)."""
        return not self.unacked and self.current is None and not self.resend

    def clear(self) -> None:
        """Forget everything without completion."""
        self.unacked.clear()
        self.resend.clear()
        self.current = self.held = None
        self.flying = self.more = 0

    @property
    def taken(self) -> int:
        """Requests that were sent whole."""
        return len(self.unacked) + self.more

    def add_many(self, many: SentMany) -> None:
        """They were sent."""
        last = self.unacked[-1] if self.unacked else None
        if type(last) is SentMany and many.joins(last):
            last.records += many.records
            last.last = many.last
            self.more += len(many)
            return
        self.unacked.append(many)
        self.more += len(many) - 1
        self.flying += many.flying

    def become(self, records: bytes, first: int, psn: int, lkey: int, *, signal_all: bool) -> None:
        """A lane has left these `SENT` records of WRITEs under way, of the PSNs from `first` on and before `psn`."""
        self.unacked.clear()
        self.flying = self.more = 0
        if records:
            length_bytes = sum(length for _, _, _, length, *_ in SENT.iter_unpack(records))
            posted = Posted(psn - first, length_bytes, 0, records)
            self.add_many(SentMany(posted, first, WRITE, lkey, signal_all=signal_all))

    def many_at_head(self) -> SentMany | None:
        """The oldest requests, if they were sent by the short cut."""
        first = self.unacked[0] if self.unacked else None
        return first if type(first) is SentMany else None

    def take_many(self, many: SentMany, psn: int) -> list[tuple[int, int]]:
        """Those at the head up to `psn` are done; (wr_id, length) of the signalled ones."""
        before = len(many)
        length_bytes, signalled = many.take(psn)
        self.flying -= length_bytes
        self.more -= before - len(many)
        if not len(many):
            self.unacked.popleft()
            self.more += 1
        return signalled

    @property
    def first(self) -> Wqe | None:
        """The oldest request, if it was sent whole and by itself."""
        first = self.unacked[0] if self.unacked else None
        return first if type(first) is Wqe else None

    def head(self) -> Wqe | None:
        """The oldest request."""
        if self.unacked:
            first = self.unacked[0]
            if type(first) is SentMany:
                self.unacked.popleft()
                self.more -= len(first) - 1
                self.unacked.extendleft(reversed(first.wqes()))
                return self.head()
            assert type(first) is Wqe
            return first
        if self.current is not None:
            return self.current
        return self.resend[0] if self.resend else None

    def drop_head(self) -> None:
        """Take the oldest request out, which `head` has returned."""
        unacked = self.unacked
        if unacked:
            wqe = unacked.popleft()
            assert type(wqe) is Wqe
        elif self.current is not None:
            wqe, self.current = self.current, None
        else:
            wqe = self.resend.popleft()
        self.flying -= wqe.flying

    def next_resend(self, unacked_psn: int) -> Wqe | None:
        """Make the next request to repeat current, from `unacked_psn` on; None: no more."""
        while self.resend:
            wqe = self.resend.popleft()
            if not wqe.answered:
                self.current = wqe
                wqe.next = max(wqe.first, unacked_psn)
                return wqe
            self.unacked.append(wqe)
        return None

    def go_back(self, psn: int) -> None:
        """Have everything from `psn` on sent again."""
        if self.current is not None:
            self.resend.appendleft(self.current)
            self.current = None
        while self.unacked and self.unacked[-1].last >= psn:
            last = self.unacked.pop()
            if type(last) is SentMany:
                self.more -= len(last) - 1
                self.unacked.extend(last.wqes())
            else:
                assert type(last) is Wqe
                self.resend.appendleft(last)
        for wqe in self.resend:
            wqe.flying = 0
        self.flying = 0

    def acknowledge_part(self, acked: int, psn: int, chunk_bytes: int) -> None:
        """Not only `acked` but also `psn` has arrived: less of the head is on its way."""
        wqe = self.head()
        if wqe is not None and psn < wqe.last and wqe.flying:
            count = psn - max(acked, wqe.first - 1)
            part = min(wqe.flying, count * chunk_bytes)
            wqe.flying -= part
            self.flying -= part

    def pop_any(self) -> SendWr | None:
        """The oldest request whatever its state, or the held one, for a flush."""
        wqe = self.head()
        if wqe is not None:
            self.drop_head()
            return wqe.wr
        wr, self.held = self.held, None
        return wr

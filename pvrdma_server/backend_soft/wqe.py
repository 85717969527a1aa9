"""A send request taken from the ring, and the order all of a QP's requests are in.

Contract: `SendQueue` is pure bookkeeping. In posting order it holds `unacked` (sent whole),
`current` (being sent), `resend` (to be sent again after a go-back) and `held` (taken, but waiting
for earlier ones); requests leave at the head only.
"""

from collections import deque

from pvrdma_server.backend import SendWr


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


class SendQueue:
    """The requests of one QP that were taken and are not completed."""

    __slots__ = ("current", "flying", "held", "resend", "unacked")

    def __init__(self) -> None:
        self.unacked: deque[Wqe] = deque()
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
        self.flying = 0

    def head(self) -> Wqe | None:
        """The oldest request."""
        if self.unacked:
            return self.unacked[0]
        if self.current is not None:
            return self.current
        return self.resend[0] if self.resend else None

    def drop_head(self) -> None:
        """Take the oldest request out; there must be one."""
        unacked = self.unacked
        if unacked:
            wqe = unacked.popleft()
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
            self.resend.appendleft(self.unacked.pop())
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

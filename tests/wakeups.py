"""Programs that sleep on completion events, many at once on two servers: arm, look once more, sleep.

Whoever sleeps while a completion that came after its arm lies there has lost a wake-up. The programs do what real ones
do (ibv_req_notify_cq, ibv_poll_cq, ibv_get_cq_event) in random orders, with requests on their way at each step; a
device that loses one wake-up in a million stops one of them for good.
"""

import random
import time
from collections.abc import Sequence

from guest import SIGNALED, Context, Mr, Qp, UserProcess, connect

from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus

# Longer than any scheduler's mood: nobody who sleeps with a completion waiting is just late.
PATIENCE_S = 30.0
MESSAGE_BYTES = 64
_DEPTH = 16
_MOST_AT_ONCE = 4


class LostWakeup(Exception):
    """A program sleeps, and what it sleeps for is there."""


class MappedProcess(UserProcess):
    """A process whose doorbell page is memory: what it stores there is seen by nobody."""

    def ring_uar(self, offset: int, value: int) -> None:
        pass


class Program:
    """One program: a CQ, and a queue pair on it that is connected to another program's, on another server.

    Attributes:
        races: how often it armed while completions were on their way.
        sleeps: how often it slept.
        spurious: events without a completion.
    """

    def __init__(self, ctx: Context, dice: random.Random) -> None:
        self.cq = ctx.cq(4 * _DEPTH)
        self.qp = Qp(ctx, send_cq=self.cq, max_wr=_DEPTH)
        self.memory: Mr = ctx.pd.reg_mr(2 * MESSAGE_BYTES)
        self.peer = self
        self.races = self.sleeps = self.spurious = 0
        self._dice = dice
        self._events = 0
        self._due = 0
        self._slept_at: float | None = None
        ctx.driver.comp_handlers[self.cq.handle] = self._on_event

    def join(self, peer: "Program", gid: bytes, peer_gid: bytes) -> None:
        """Connect two programs."""
        connect(self.qp, peer.qp, gid, peer_gid)
        self.peer, peer.peer = peer, self

    def step(self) -> None:
        """Go on, unless asleep."""
        if self._slept_at is not None:
            if not self._events:
                self._check()
                return
            self._events -= 1
            self._slept_at = None
            self._wake()
        dice = self._dice.random()
        if self._due < _MOST_AT_ONCE and dice < 0.5:
            self._post()
        self._arm()
        if self._due < _MOST_AT_ONCE and (dice >= 0.5 or not self._due):
            self._post()
        # A program may leave some for the next event; it must not sleep then.
        if self._take(self._dice.randint(1, 2 * _MOST_AT_ONCE)):
            return
        if self._due:
            self.sleeps += 1
            self._slept_at = time.monotonic()

    def _on_event(self) -> None:
        self._events += 1

    def _wake(self) -> None:
        self._arm()
        if not self._take(1):
            self.spurious += 1

    def _arm(self) -> None:
        self.races += self._due > 0
        self.cq.arm()

    def _post(self) -> None:
        """One or two messages: a WRITE completes here, a SEND at both ends."""
        peer = self.peer
        for _ in range(self._dice.randint(1, 2)):
            local = self.memory.sge(0, MESSAGE_BYTES)
            if self._dice.random() < 0.5 and peer._due < _MOST_AT_ONCE:
                peer.qp.post_recv(peer.memory.sge(MESSAGE_BYTES, MESSAGE_BYTES))
                self.qp.send(local, flags=SIGNALED)
                peer._due += 1
            else:
                self.qp.write(local, to=peer.memory.remote(MESSAGE_BYTES), flags=SIGNALED)
            self._due += 1

    def _take(self, most: int) -> int:
        found = self.cq.poll(most)
        for cqe in found:
            assert cqe.status == WcStatus.SUCCESS, cqe
        self._due -= len(found)
        return len(found)

    def _check(self) -> None:
        assert self._slept_at is not None
        if time.monotonic() > self._slept_at + PATIENCE_S:
            ring = self.cq.ring
            what = "its completion is there" if ring.has_data()[0] else "no completion came"
            raise LostWakeup(
                f"CQ {self.cq.handle}, {self._due} due: {what}; producer {ring.prod_tail}, consumer {ring.cons_head}, "
                f"after {self.races} races"
            )


def run(programs: Sequence[Program], *, seconds: float, races: int = 0) -> None:
    """Let them all go on until the time is over and so many races were run.

    Raises:
        LostWakeup: one sleeps for ever.
    """
    drivers = {program.cq.ctx.driver for program in programs}
    end = time.monotonic() + seconds
    while time.monotonic() < end or sum(program.races for program in programs) < races:
        for program in programs:
            program.step()
            for driver in drivers:
                driver.interrupt()

"""The loads of scripts/bench: streams of messages with a window, and a ball that goes to and fro.

Contract: see `bench_rig`; times are wall-clock seconds, CPU times those of the servers alone.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pvrdma_lab.bench_rig import DEPTH, MIB, BenchError, BenchQp, ServerProcess

_STALLED_S = 30.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What a run took: messages, wall-clock seconds, and CPU seconds of all servers together."""

    messages: int
    seconds: float
    cpu_s: float


class Stream:
    """One queue pair that sends to another.

    Args:
        window: messages under way at most.
        every: one in so many is signalled; divides the window.
    """

    def __init__(
        self, qp: BenchQp, peer: BenchQp, operation: str, size: int, window: int, every: int
    ) -> None:
        self.qp, self.peer, self.size = qp, peer, size
        self.window, self.every = window, every
        self.receives = operation == "SEND"
        qp.fill_sends(operation, size, peer, every)
        if self.receives:
            peer.fill_receives(size)
            peer.top_up()
        self.posted = self.done = self.limit = 0

    def start(self, messages: int) -> None:
        """Post the first window of `messages`, a multiple of `every`."""
        self.limit, self.done = messages, 0
        self.posted = min(self.window, messages)
        self.qp.post(self.posted)

    def look(self) -> bool:
        """Take completions, post what the window allows; True when all is done."""
        came = self.qp.sends.take() * self.every
        if self.receives:
            self.peer.top_up()
        if came:
            self.done += came
            more = min(self.limit, self.done + self.window) - self.posted
            if more:
                self.posted += more
                self.qp.post(more)
        return self.done >= self.limit


def messages_for(size: int, total: int, every: int) -> int:
    """How many messages of a run: `total` bytes of them, within what a completion queue can show afterwards."""
    wanted = max(16, min(total // size, 64 * 1024))
    return max(every, wanted // every * every)


def run(
    streams: Sequence[Stream], servers: Sequence[ServerProcess], messages: int, look_s: float
) -> Taken:
    """`messages` over each stream, all at once.

    Raises:
        BenchError: it stands still, or a request failed.
    """
    cpu = sum(server.cpu_s() for server in servers)
    waiting = list(streams)
    started = time.perf_counter()
    for stream in streams:
        stream.start(messages)
    while waiting:
        time.sleep(look_s)
        waiting = [stream for stream in waiting if not stream.look()]
        if time.perf_counter() - started > _STALLED_S:
            raise BenchError(f"{len(waiting)} streams are not through after {_STALLED_S:.0f} s")
    seconds = time.perf_counter() - started
    cpu = sum(server.cpu_s() for server in servers) - cpu
    for stream in streams:
        stream.qp.sends.check_last(messages // stream.every)
    return Taken(messages * len(streams), seconds, cpu)


def window_of(size: int) -> int:
    """A window as a program that wants bandwidth posts it: 128 messages, or 64 MiB if that is less."""
    return max(4, min(128, 64 * MIB // size))


def cpu_and_work(servers: Sequence[ServerProcess]) -> tuple[float, float]:
    """CPU seconds of all of them so far, and those of them that were not spent looking for work."""
    work = sum(server.work_s() for server in servers)
    return sum(server.cpu_s() for server in servers), work


class PingPong:
    """Two queue pairs that WRITE to one another in turn; each side watches the last byte of its memory."""

    def __init__(self, a: BenchQp, b: BenchQp, size: int) -> None:
        self.sides = (a, b)
        self.size = size
        for qp, peer in ((a, b), (b, a)):
            qp.fill_sends("WRITE", size, peer, 1)
        self.turn = 0

    def once(self, wait: Callable[[], None]) -> None:
        """A message there and one back; `wait` is called between two looks."""
        self.turn += 1
        ball = self.turn & 0xFF
        for qp, peer in (self.sides, self.sides[::-1]):
            last = qp.at(qp.sq.prod_tail & (DEPTH - 1), self.size) + self.size - 1
            target = peer.station.ram.data
            target[last] = ~ball & 0xFF
            qp.station.ram.data[last] = ball
            qp.post(1)
            deadline = time.monotonic() + _STALLED_S
            while target[last] != ball:
                wait()
                if time.monotonic() > deadline:
                    raise BenchError("the ball did not arrive")
        for qp in self.sides:
            qp.sends.take()


def ping_pong(
    game: PingPong, servers: Sequence[ServerProcess], rounds: int, pause_s: float
) -> tuple[list[float], float, float]:
    """One-way seconds of each round, servers' CPU seconds per message, and those that are work. Pauses come first."""
    times = []
    cpu, work = cpu_and_work(servers)
    for _ in range(rounds):
        if pause_s:
            time.sleep(pause_s)
        started = time.perf_counter()
        game.once(os.sched_yield)
        times.append((time.perf_counter() - started) / 2)
    cpu_after, work_after = cpu_and_work(servers)
    return times, (cpu_after - cpu) / rounds / 2, (work_after - work) / rounds / 2

"""What rings need beside Python: both forms do the same."""

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pvrdma_server.backend_soft import native
from pvrdma_server.backend_soft.native import CLinger, Linger, Lingered, PythonLinger

SHORT_NS, LONG_NS = 1000, 20_000_000_000


class Words:
    """Two indices and the byte, and who looks at them."""

    def __init__(self, make: type[PythonLinger | CLinger]) -> None:
        self.head, self.room = (memoryview(bytearray(64)).cast("Q") for _ in range(2))
        self.stop = bytearray(1)
        self.signalled = memoryview(self.stop).toreadonly()
        self.look_in_c: tuple[int, int] | None = None
        self.linger: Linger = make(self.head, self.room, self)


@pytest.fixture(params=[PythonLinger, CLinger])
def words(request: pytest.FixtureRequest) -> Words:
    if request.param is CLinger and native.extension is None:
        pytest.skip("the extension is not built")
    return Words(request.param)


def test_nothing_happens_and_time_is_up(words: Words) -> None:
    assert words.linger.wait(0, 0, SHORT_NS) == Lingered.NOTHING


def test_a_message_or_room_ends_it(words: Words) -> None:
    words.head[0] = 64
    assert words.linger.wait(0, 0, LONG_NS) == Lingered.CHANGED
    assert words.linger.wait(64, 0, SHORT_NS) == Lingered.NOTHING
    words.room[0] = 128
    assert words.linger.wait(64, 0, LONG_NS) == Lingered.CHANGED
    # Nobody waits for room: it may change as it likes.
    assert words.linger.wait(64, None, SHORT_NS) == Lingered.NOTHING


def test_something_to_do_elsewhere_ends_it(words: Words) -> None:
    words.stop[0] = 1
    assert words.linger.wait(0, 0, LONG_NS) == Lingered.STOPPED
    words.stop[0] = 0
    assert words.linger.wait(0, 0, SHORT_NS) == Lingered.NOTHING


def test_indices_are_64_bits(words: Words) -> None:
    words.head[0] = (1 << 64) - 64
    assert words.linger.wait((1 << 64) - 64, None, SHORT_NS) == Lingered.NOTHING


def test_views_are_let_go(words: Words) -> None:
    words.linger.release()
    words.head.release()
    words.room.release()


def test_without_the_byte() -> None:
    head, room = (memoryview(bytearray(8)).cast("Q") for _ in range(2))
    linger = native.make_linger(head, room, None)
    assert linger.wait(0, None, SHORT_NS) == Lingered.NOTHING


# --- manners: who else wants the CPU ----------------------------------------------------------------------------------

# Whatever else runs on this machine takes its share: what is shown has to be seen once within so long.
TRIES_S = 30.0


@contextmanager
def another_on_our_cpu(turn: Callable[[memoryview], None]) -> Iterator[memoryview]:
    """A process that does its `turn` all the time, and shares one CPU with us, and memory of 8 bytes."""
    before = os.sched_getaffinity(0)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    shared = memoryview(memory).cast("Q")
    os.sched_setaffinity(0, {min(before)})
    child = os.fork()
    if not child:
        while True:
            turn(shared)
    try:
        yield shared
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, before)


def cooperates(shared: memoryview) -> None:
    shared[0] += 1
    os.sched_yield()


def test_who_waits_for_our_cpu_gets_it(words: Words) -> None:
    # Without that it would have its share of the time, and so some turns in 100 ms.
    deadline = time.monotonic() + TRIES_S
    with another_on_our_cpu(cooperates) as turns:
        while True:
            before = turns[0]
            assert words.linger.wait(0, 0, 100_000_000) == Lingered.NOTHING
            if turns[0] - before > 2000:
                break
            assert time.monotonic() < deadline, f"{turns[0] - before} turns"


def test_who_keeps_our_cpu_gets_it_seldom(words: Words) -> None:
    # A yield costs a slice. With one at each look, next to nothing would be left for looking.
    deadline = time.monotonic() + TRIES_S
    with another_on_our_cpu(lambda _: None):
        while True:
            wall, own = time.monotonic(), time.thread_time()
            for _ in range(20):
                words.linger.wait(0, 0, 10_000_000)
            share = (time.thread_time() - own) / (time.monotonic() - wall)
            if share > 0.15:
                break
            assert time.monotonic() < deadline, f"{share:.3f} of the CPU"

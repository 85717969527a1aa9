"""Watching index words: the same tests over the watcher in C and its twin in Python."""

import ctypes
import mmap
import os
import random
import select
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pvrdma_server import watcher as module
from pvrdma_server.watcher import (
    MAX_WATCHED,
    CWatcher,
    PythonWatcher,
    RingWatcher,
    SleepPolicy,
    make_watcher,
)

# Only failures wait this long.
PATIENCE_S = 20.0
# Long enough for both to have looked again many times, if they still did.
QUIET_S = 0.05
TAIL, HEAD = 0, 1

needs_c = pytest.mark.skipif(module._extension is None, reason="pvrdma_server._watch is not built")


def c_watcher() -> RingWatcher:
    return CWatcher()


def spinning() -> RingWatcher:
    return CWatcher(SleepPolicy(spin_ns=200_000))


def sleepy() -> RingWatcher:
    """Looks once an hour, so whatever is seen promptly was seen without the timer."""
    hour_ns = 3600 * 10**9
    return CWatcher(SleepPolicy(0, hour_ns, hour_ns))


def quiet() -> RingWatcher:
    """Sleeps as after a long quiet time from the start."""
    return CWatcher(SleepPolicy(0, 1, 1, 20_000_000))


def python_watcher() -> RingWatcher:
    return PythonWatcher()


KINDS = [
    pytest.param(c_watcher, marks=needs_c),
    pytest.param(spinning, marks=needs_c),
    pytest.param(quiet, marks=needs_c),
    pytest.param(python_watcher),
]


@pytest.fixture(params=KINDS)
def watcher(request: pytest.FixtureRequest) -> Iterator[RingWatcher]:
    made: RingWatcher = request.param()
    yield made
    made.close()


class Rings:
    """Ring states side by side in a mapping of their own."""

    def __init__(self, number: int = 1) -> None:
        self.memory = mmap.mmap(-1, 8 * number)
        self.words = memoryview(self.memory).cast("I")

    def state(self, ring: int = 0) -> memoryview:
        return memoryview(self.memory)[8 * ring : 8 * ring + 8]

    def post(self, ring: int = 0) -> None:
        self.words[2 * ring + TAIL] = (self.words[2 * ring + TAIL] + 1) & 0xFFFF_FFFF

    def drain(self, ring: int = 0) -> None:
        self.words[2 * ring + HEAD] = self.words[2 * ring + TAIL]

    def unmap(self) -> None:
        """Raises BufferError when anybody still has a view."""
        self.words.release()
        self.memory.close()


@pytest.fixture
def rings() -> Iterator[Rings]:
    made = Rings(4)
    yield made
    made.unmap()


def readable(watcher: RingWatcher, timeout_s: float = PATIENCE_S) -> bool:
    return bool(select.select([watcher.fd], [], [], timeout_s)[0])


def next_fired(watcher: RingWatcher) -> list[int]:
    assert readable(watcher)
    return watcher.fired()


def serve(watcher: RingWatcher, rings: Rings, token: int) -> None:
    """The first ring, and none else, has fired."""
    assert next_fired(watcher) == [token]
    rings.drain()
    watcher.rearm(token)


# --- firing -----------------------------------------------------------------------------------------------------------


def test_fires_once_until_rearmed(watcher: RingWatcher, rings: Rings) -> None:
    token = watcher.add(rings.state())
    assert not readable(watcher, QUIET_S)
    rings.post()
    assert next_fired(watcher) == [token]
    rings.post()
    assert not readable(watcher, QUIET_S)
    assert watcher.fired() == []
    rings.drain()
    watcher.rearm(token)
    assert not readable(watcher, QUIET_S)
    rings.post()
    assert next_fired(watcher) == [token]
    watcher.close()


def test_the_byte_says_what_the_descriptor_says(watcher: RingWatcher, rings: Rings) -> None:
    watcher.add(rings.state())
    assert watcher.signalled[0] == 0
    rings.post()
    assert readable(watcher)
    assert watcher.signalled[0] == 1
    watcher.fired()
    assert watcher.signalled[0] == 0
    signalled = watcher.signalled
    watcher.close()
    assert signalled[0] == 0


def test_rearm_fires_when_words_differ_already(watcher: RingWatcher, rings: Rings) -> None:
    token = watcher.add(rings.state())
    for _ in range(100):
        rings.post()
        assert next_fired(watcher) == [token]
        rings.drain()
        rings.post()
        watcher.rearm(token)
        serve(watcher, rings, token)
    watcher.close()


def test_add_fires_when_words_differ_already(watcher: RingWatcher, rings: Rings) -> None:
    rings.post(1)
    quiet, busy = watcher.add(rings.state(0)), watcher.add(rings.state(1))
    assert quiet != busy
    assert next_fired(watcher) == [busy]
    watcher.close()


@needs_c
def test_add_and_rearm_wait_for_no_timer(rings: Rings) -> None:
    watcher = sleepy()
    watcher.add(rings.state(0))
    rings.post(1)
    token = watcher.add(rings.state(1))
    for _ in range(100):
        assert next_fired(watcher) == [token]
        watcher.rearm(token)
    watcher.close()


def test_a_waiting_rearm_is_no_second_firing(watcher: RingWatcher, rings: Rings) -> None:
    token = watcher.add(rings.state())
    watcher.rearm(token)
    rings.post()
    assert readable(watcher)
    watcher.rearm(token)
    assert watcher.fired() == [token]
    assert watcher.fired() == []
    watcher.close()


@pytest.mark.parametrize(
    ("tail", "head", "differ"),
    [
        (0, 0, False),
        (0xFFFF_FFFF, 0xFFFF_FFFF, False),
        (0, 0xFFFF_FFFF, True),
        (0xFFFF_FFFF, 0, True),
        (0x8000_0000, 0x7FFF_FFFF, True),
        (1, 0x0100_0000, True),
    ],
)
def test_only_equality_counts(
    watcher: RingWatcher, rings: Rings, tail: int, head: int, differ: bool
) -> None:
    rings.words[TAIL], rings.words[HEAD] = tail, head
    watcher.add(rings.state())
    assert readable(watcher, PATIENCE_S if differ else QUIET_S) == differ
    watcher.close()


def test_an_index_that_wraps_is_seen(watcher: RingWatcher, rings: Rings) -> None:
    rings.words[TAIL] = rings.words[HEAD] = 0xFFFF_FFFF
    token = watcher.add(rings.state())
    rings.post()
    assert next_fired(watcher) == [token]
    watcher.close()


def test_many_rings_at_once(watcher: RingWatcher) -> None:
    rings = Rings(1000)
    tokens = [watcher.add(rings.state(i)) for i in range(1000)]
    for ring in range(0, 1000, 2):
        rings.post(ring)
    seen: list[int] = []
    while len(seen) < 500:
        seen += next_fired(watcher)
    assert sorted(seen) == sorted(tokens[::2])
    watcher.close()
    rings.unmap()


# --- registration -----------------------------------------------------------------------------------------------------


def test_remove_lets_the_memory_go(watcher: RingWatcher) -> None:
    rings = Rings()
    token = watcher.add(rings.state())
    rings.post()
    assert readable(watcher)
    watcher.remove(token)
    rings.unmap()
    assert watcher.fired() == []
    watcher.remove(token)
    watcher.rearm(token)


def test_the_callers_view_stays_its_own(watcher: RingWatcher, rings: Rings) -> None:
    state = rings.state()
    watcher.remove(watcher.add(state))
    assert bytes(state) == bytes(8)
    state.release()


def test_close_with_entries(watcher: RingWatcher) -> None:
    rings = Rings(2)
    watcher.add(rings.state(0))
    watcher.add(rings.state(1))
    rings.post(1)
    watcher.close()
    rings.unmap()
    watcher.close()
    assert watcher.fired() == []
    watcher.rearm(0)
    watcher.remove(0)
    watcher.set_deadline(1)
    with pytest.raises(ValueError, match="closed"):
        watcher.add(memoryview(bytes(8)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_watcher_stops(kind: Callable[[], RingWatcher]) -> None:
    rings = Rings()
    watcher = kind()
    watcher.add(rings.state())
    fd = watcher.fd
    del watcher
    rings.unmap()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_refuses_what_is_no_ring_state(watcher: RingWatcher) -> None:
    with pytest.raises(ValueError, match="8 contiguous bytes"):
        watcher.add(memoryview(bytes(12)))
    with pytest.raises(ValueError, match="8 contiguous bytes"):
        watcher.add(memoryview(bytes(16))[::2])


@needs_c
def test_refuses_unaligned_words() -> None:
    watcher = CWatcher()
    with pytest.raises(ValueError, match="aligned"):
        watcher.add(memoryview(bytes(16))[1:9])
    watcher.close()


def test_there_is_a_limit_and_slots_come_back(watcher: RingWatcher) -> None:
    rings = Rings()
    state = rings.state()
    tokens = [watcher.add(state) for _ in range(MAX_WATCHED)]
    with pytest.raises(OSError, match="No space left"):
        watcher.add(state)
    watcher.remove(tokens.pop(100))
    again = watcher.add(state)
    assert again not in tokens
    for token in [*tokens, again]:
        watcher.remove(token)
    state.release()
    rings.unmap()


@needs_c
def test_a_token_that_outlived_its_ring_means_nothing(rings: Rings) -> None:
    watcher = CWatcher()
    old = watcher.add(rings.state(0))
    watcher.remove(old)
    rings.post(1)
    new = watcher.add(rings.state(1))
    assert new & 0xFFFF == old & 0xFFFF, "the slot is used again"
    assert next_fired(watcher) == [new]
    watcher.rearm(old)
    watcher.remove(old)
    assert watcher.fired() == []
    watcher.rearm(new)
    assert next_fired(watcher) == [new]
    watcher.close()


# --- deadline ---------------------------------------------------------------------------------------------------------


def test_deadline(watcher: RingWatcher) -> None:
    for delay_ns in (0, 300_000, 5_000_000):
        when_ns = time.monotonic_ns() + delay_ns
        watcher.set_deadline(when_ns)
        assert next_fired(watcher) == []
        assert when_ns <= time.monotonic_ns() < when_ns + PATIENCE_S * 1e9 / 2
        assert not readable(watcher, 0), "once"


def test_a_deadline_that_passed_long_ago(watcher: RingWatcher) -> None:
    for when_ns in (-5, 0, 1):
        watcher.set_deadline(when_ns)
        assert next_fired(watcher) == []


def test_an_earlier_deadline_replaces_a_later_one(watcher: RingWatcher, rings: Rings) -> None:
    watcher.add(rings.state())
    watcher.set_deadline(time.monotonic_ns() + 3600 * 10**9)
    assert not readable(watcher, QUIET_S)
    watcher.set_deadline(time.monotonic_ns() + 1_000_000)
    assert next_fired(watcher) == []
    watcher.close()


def test_a_deadline_can_be_cancelled_and_moved_away(watcher: RingWatcher) -> None:
    for later_ns in (None, time.monotonic_ns() + 3600 * 10**9):
        watcher.set_deadline(time.monotonic_ns() + int(QUIET_S * 1e9))
        watcher.set_deadline(later_ns)
        assert not readable(watcher, 2 * QUIET_S)


def test_rings_fire_beside_a_deadline(watcher: RingWatcher, rings: Rings) -> None:
    token = watcher.add(rings.state())
    when_ns = time.monotonic_ns() + 10_000_000
    watcher.set_deadline(when_ns)
    rings.post()
    seen: list[int] = []
    while time.monotonic_ns() < when_ns or not seen:
        seen += next_fired(watcher)
    assert seen == [token]
    watcher.close()


# --- who looks by itself ----------------------------------------------------------------------------------------------


def looks(watcher: RingWatcher, but: int = -1) -> bool:
    """As the fabric's C does."""
    assert watcher.look_in_c is not None
    look, watch = watcher.look_in_c
    return bool(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(look)(watch, but))


@needs_c
def test_who_attends_finds_by_itself_what_fires(rings: Rings) -> None:
    watcher = sleepy()
    token, other = (watcher.add(rings.state(ring)) for ring in (0, 1))
    watcher.attend()
    assert not looks(watcher)
    rings.post(0)
    assert not looks(watcher, but=token)
    assert looks(watcher, but=other)
    assert watcher.signalled[0] == 1
    assert looks(watcher, but=token)  # until it is taken
    assert next_fired(watcher) == [token]
    assert not looks(watcher)
    rings.drain(0)
    watcher.rearm(token)
    rings.post(0)
    assert watcher.look()
    assert next_fired(watcher) == [token]
    assert not watcher.look()
    watcher.leave()
    watcher.close()
    assert not watcher.look()


def test_who_attends_sees_what_the_thread_found(watcher: RingWatcher, rings: Rings) -> None:
    token = watcher.add(rings.state())
    watcher.attend()
    assert not watcher.look()
    rings.post()
    deadline = time.monotonic() + 10
    while not watcher.look():
        assert time.monotonic() < deadline
    assert next_fired(watcher) == [token]
    watcher.leave()
    watcher.close()


def test_who_attends_and_does_not_look_is_told_as_well(watcher: RingWatcher, rings: Rings) -> None:
    token = watcher.add(rings.state())
    watcher.attend()
    for _ in range(20):
        rings.post()
        serve(watcher, rings, token)
    watcher.leave()
    watcher.close()


def test_what_came_before_one_left_is_seen(watcher: RingWatcher, rings: Rings) -> None:
    token = watcher.add(rings.state())
    rings.post()
    for _ in range(100):
        watcher.attend()
        serve(watcher, rings, token)
        rings.post()
        watcher.leave()
    watcher.close()


@needs_c
def test_who_attends_looks_at_many_rings_in_turn() -> None:
    # By itself it finds one within 16 looks; the thread would within a millisecond. At a busy time either may be late.
    rings, watcher, deadline = Rings(1000), sleepy(), time.monotonic() + 30
    tokens = [watcher.add(rings.state(ring)) for ring in range(1000)]
    watcher.attend()
    while True:
        took = []
        for ring in random.sample(range(1000), 51):
            assert not watcher.look()
            posted = time.perf_counter()
            rings.post(ring)
            while not watcher.look():
                assert time.monotonic() < deadline
            took.append(time.perf_counter() - posted)
            assert next_fired(watcher) == [tokens[ring]]
            rings.drain(ring)
            watcher.rearm(tokens[ring])
        if statistics.median(took) < 200e-6:
            break
        assert time.monotonic() < deadline, f"median {statistics.median(took):.6f} s"
    watcher.leave()
    watcher.close()
    rings.unmap()


@needs_c
def test_more_rings_than_one_looks_at_are_left_to_the_thread() -> None:
    rings, watcher = Rings(4097), c_watcher()
    tokens = [watcher.add(rings.state(ring)) for ring in range(4097)]
    watcher.attend()
    rings.post(4096)
    assert next_fired(watcher) == [tokens[4096]]
    rings.drain(4096)
    watcher.rearm(tokens[4096])
    watcher.leave()
    watcher.close()
    rings.unmap()


# --- races ------------------------------------------------------------------------------------------------------------


class Background:
    """A thread whose failure fails the test."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._body()
        except BaseException as failure:
            self._failure = failure

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._failure:
            raise self._failure


def test_no_post_is_lost(watcher: RingWatcher, rings: Rings) -> None:
    """The next post races with the rearm: it is let loose just before."""
    posts = 3000
    allowed = threading.Semaphore(1)
    token = watcher.add(rings.state())

    def guest() -> None:
        for _ in range(posts):
            assert allowed.acquire(timeout=PATIENCE_S)
            rings.post()

    writer = Background(guest)
    while rings.words[HEAD] < posts:
        assert next_fired(watcher) == [token]
        assert rings.words[TAIL] == rings.words[HEAD] + 1
        rings.drain()
        allowed.release()
        watcher.rearm(token)
    writer.join()
    watcher.close()


@pytest.mark.parametrize("attends", [False, True], ids=["", "attended"])
def test_no_post_of_a_stream_is_lost(watcher: RingWatcher, rings: Rings, attends: bool) -> None:
    """A guest that does not wait: whatever is posted last must be seen."""
    posts = 20_000
    token = watcher.add(rings.state())

    def guest() -> None:
        for _ in range(posts):
            rings.post()

    writer = Background(guest)
    while rings.words[HEAD] < posts:
        assert next_fired(watcher) == [token]
        if attends:
            watcher.attend()
        rings.drain()
        watcher.rearm(token)
        while watcher.signalled[0]:
            assert watcher.fired() == [token]
            rings.drain()
            watcher.rearm(token)
        if attends:
            watcher.leave()
    writer.join()
    watcher.close()


def test_add_and_remove_during_traffic(watcher: RingWatcher) -> None:
    """Every other mapping goes away right after its `remove`; a late read of its words would be a segfault."""
    stop = threading.Event()
    steady = Rings(4)
    tokens = [watcher.add(steady.state(i)) for i in range(4)]

    def guest() -> None:
        while not stop.wait(0.0001):
            for ring in range(4):
                steady.post(ring)

    writer = Background(guest)
    for turn in range(10_000):
        passing = Rings() if turn % 2 else None
        state = (passing or steady).state()
        token = watcher.add(state)
        state.release()
        if passing and turn % 3:
            passing.post()
        for fired in watcher.fired():
            watcher.rearm(fired)
        watcher.remove(token)
        if passing:
            passing.unmap()
    stop.set()
    writer.join()
    for token in tokens:
        watcher.remove(token)
    steady.unmap()


# --- cost and choice --------------------------------------------------------------------------------------------------


def test_idle_rings_cost_little(watcher: RingWatcher) -> None:
    """Measured below 1 % of a core in C, 2 % in Python; the bound is for busy machines."""
    rings = Rings(64)
    for ring in range(64):
        watcher.add(rings.state(ring))
    assert not readable(watcher, QUIET_S)
    start_ns = time.process_time_ns()
    assert not readable(watcher, 0.5)
    assert time.process_time_ns() - start_ns < 0.2 * 0.5e9
    watcher.close()
    rings.unmap()


def test_make_watcher() -> None:
    preferred, twin = make_watcher(), make_watcher("python")
    assert isinstance(preferred, PythonWatcher if module._extension is None else CWatcher)
    assert isinstance(twin, PythonWatcher)
    preferred.close()
    twin.close()


@needs_c
def test_both_have_the_same_limit() -> None:
    assert module._extension.lib.WATCH_LIMIT == MAX_WATCHED

"""Lanes: two machines, each served by a thread of its own, so that C on both sides waits for the other."""

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guest import SIGNALED, Machine, Mr, Qp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.test_fast_path import SIZE, Two, ids, no_trouble

from pvrdma_server.backend_soft import native, shm_link
from pvrdma_server.backend_soft.lane import Driver, Drove

pytestmark = pytest.mark.skipif(native.extension is None, reason="the extension is not built")
WAIT_S = 8.0
HALF = SIZE // 2
BUDGET = 4 << 20


class Nobody:
    """A `Looker` that never sees anything."""

    look_in_c: tuple[int, int] | None = None

    def __init__(self) -> None:
        self.signalled = memoryview(bytearray(1))


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What came of all lanes."""
    sums: Counter[str] = Counter()
    drive = Driver.drive_untrusted

    def spy(self: Driver, *args: object) -> Drove:
        drove = drive(self, *args)  # type: ignore[arg-type]
        sums.update(landed=drove.landed, posted=drove.posted, acks=drove.acks)
        sums.update(answered=drove.answered, completions=drove.completions, calls=1)
        return drove

    monkeypatch.setattr(Driver, "drive_untrusted", spy)
    return sums


@contextmanager
def served(two: Two) -> Iterator[None]:
    """Both devices at work."""
    stop, failed = threading.Event(), []

    def serve(machine: Machine) -> None:
        try:
            while not stop.is_set():
                machine.device.look_at_rings()
                machine.device.progress(BUDGET)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=serve, args=(machine,)) for machine in two.machines]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed


@pytest.fixture(params=[False, True], ids=["what asks for it", "all signalled"])
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    # Wait for the peer each time, whether or not it paid before, and longer than three threads share an interpreter.
    monkeypatch.setattr(shm_link, "_LINGER_PROBE", 1)
    monkeypatch.setattr(shm_link, "LINGER_NS", 3_000_000)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    with tempfile.TemporaryDirectory(prefix="pvrdma-fabric-") as folder:
        made = Two(folder, in_a_row=True, sq_sig_all=request.param)
        for backend in made.backends:
            backend.fabric.yield_to(Nobody())
        # Time stands still here, so nothing would be sent again that was lost because the servers had not met.
        made.write(0, 8, 0)
        made.go()
        for qp in (made.a, made.b):
            # A doorbell would have this thread do the device's work, too: only the serving thread does.
            qp.ring_send = lambda: None  # type: ignore[method-assign]
            qp.send_cq.ring_doorbell = lambda bits: None  # type: ignore[method-assign]
        made.target.write(random.Random(8).randbytes(SIZE))
        yield made
        made.close()
    sys.setswitchinterval(interval_s)


class Side:
    """A guest that WRITEs out of its upper half into its peer's lower half."""

    def __init__(self, qp: Qp, own: Mr, peer: Mr) -> None:
        self.qp, self.own, self.peer = qp, own, peer
        self.posted: list[bool] = []
        self.done: list[int] = []
        self.model = bytearray(peer.read(0, HALF))
        self.source = own.read(HALF, HALF)

    def write(self, at: int, length: int, to: int, signalled: bool) -> None:
        """Post one."""
        self.qp.write(
            self.own.sge(HALF + at, length), to=self.peer.remote(to), wr_id=len(self.posted),
            flags=SIGNALED if signalled else 0,
        )  # fmt: skip
        self.posted.append(signalled)
        self.model[to : to + length] = self.source[at : at + length]

    def look(self) -> None:
        """Take completions."""
        self.done += ids(self.qp.send_cq.poll())

    def wait(self, below: int = 1) -> None:
        """Until fewer than so many are under way, as far as completions tell."""
        deadline = time.monotonic() + WAIT_S
        while len(self.posted) - 1 - (self.done[-1] if self.done else -1) >= below:
            assert time.monotonic() < deadline, f"{self.done[-1:]} of {len(self.posted)} are done"
            time.sleep(0)
            self.look()

    def check(self, *, sq_sig_all: bool) -> None:
        """All that was to complete did, in order, and what was to land did, and nothing else."""
        asked = [number for number, signalled in enumerate(self.posted) if signalled]
        assert self.done == (list(range(len(self.posted))) if sq_sig_all else asked)
        assert self.peer.read(0, HALF) == self.model


def sides(two: Two) -> tuple[Side, Side]:
    return Side(two.a, two.source, two.target), Side(two.b, two.target, two.source)


def test_a_ball_to_and_fro(two: Two, drives: Counter[str]) -> None:
    both = sides(two)
    with served(two):
        for turn in range(200):
            side = both[turn % 2]
            side.write(64 * turn, 64, 64 * turn, signalled=True)
            deadline = time.monotonic() + WAIT_S
            while side.peer.read(64 * turn, 64) != side.source[64 * turn : 64 * turn + 64]:
                assert time.monotonic() < deadline, f"ball {turn} did not arrive"
                time.sleep(0)
        for side in both:
            side.wait()
    for side in both:
        side.check(sq_sig_all=two.sq_sig_all)
    assert min(drives[what] for what in ("landed", "posted", "acks", "answered", "completions"))
    no_trouble(two)


@pytest.mark.parametrize("length", [1, 64, 4096, 65536, HALF])
def test_streams_both_ways(two: Two, length: int) -> None:
    both, generator = sides(two), random.Random(length)
    with served(two):
        for number in range(600):
            for side in both:
                at, to = (generator.randrange(HALF - length + 1) for _ in range(2))
                side.write(at, length, to, signalled=number % 5 == 4)
            if number % 10 == 9:
                for side in both:
                    side.wait(below=30)
        for side in both:
            side.wait()
    for side in both:
        side.check(sq_sig_all=two.sq_sig_all)
    no_trouble(two)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.booleans(), st.booleans(), st.integers(0, HALF - 9000), st.integers(0, 9000),
            st.integers(0, HALF - 9000), st.integers(0, 20),
        ),
        max_size=150,
    )
)  # fmt: skip
def test_any_writes_land_as_in_a_model(
    two: Two, requests: list[tuple[bool, bool, int, int, int, int]]
) -> None:
    both = sides(two)
    with served(two):
        for which, signalled, at, length, to, pause in requests:
            both[which].write(at, length, to, signalled=signalled)
            if pause > 17:
                time.sleep(pause * 1e-5)
        for side in both:
            side.write(0, 8, 0, signalled=True)
            side.wait()
    for side in both:
        side.check(sq_sig_all=two.sq_sig_all)
    no_trouble(two)

"""No wake-up is lost: programs that sleep on events of real servers, in either kind of doorbells.

`scripts/test stress` runs it for long (--stress-seconds). A kept run is in tests/vm/transcripts/stress.txt.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from guest import Context, Kernel, UserProcess
from guest_ram import GuestRam
from server_process import ServerProcess
from vfu_bus import VfuBus
from wakeups import MappedProcess, Program, run

KINDS = {"mapped": MappedProcess, "trapped": UserProcess, "kernel": Kernel}
RACES = 1000
PAIRS = 4


def gid_of(number: int) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes([10, 0, 0, number])


@contextmanager
def context(folder: Path, kind: str, number: int) -> Iterator[Context]:
    """Whoever sleeps, on a server of its own."""
    doorbells = "trapped" if kind == "trapped" else "mapped"
    server = ServerProcess(folder, f"vm{number}", "--doorbells", doorbells)
    server.start()
    try:
        with VfuBus(server.socket, GuestRam(24 << 20, memfd=True)) as bus:
            kernel = Kernel(bus.boot())
            kernel.add_gid(gid_of(number))
            yield kernel if kind == "kernel" else KINDS[kind](kernel.driver)
            assert server.status()["device"]["guest_errors"] == {}
            bus.ram.close()
    finally:
        server.end()


def race(folder: Path, kind: str, seconds: float, seed: int) -> str:
    """Runs programs of a kind between two servers; what they did."""
    dice = random.Random(seed)
    with context(folder, kind, 1) as left, context(folder, kind, 2) as right:
        programs: list[Program] = []
        for _ in range(PAIRS):
            pair = Program(left, dice), Program(right, dice)
            pair[0].join(pair[1], gid_of(1), gid_of(2))
            programs += pair
        run(programs, seconds=seconds, races=RACES)
    races, sleeps, spurious = (
        sum(getattr(program, name) for program in programs)
        for name in ("races", "sleeps", "spurious")
    )
    assert sleeps > RACES / 100
    return f"{kind}: {races} races of arm and completion, {sleeps} sleeps, {spurious} events in vain; seed {seed}"


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_sleeps_for_ever(tmp_path: Path, kind: str) -> None:
    race(tmp_path, kind, 0.0, seed=1)


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_sleeps_for_ever_in_hours(
    tmp_path: Path, kind: str, stress_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    done = race(tmp_path, kind, stress_seconds, seed=random.getrandbits(32))
    with capsys.disabled():
        print(f"\n{stress_seconds:.0f} s, {done}")

"""What scripts/bench measures, one function a figure; each returns plain records."""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from guest import PAGE, Mr

from pvrdma_lab.bench_load import PingPong, Stream, Taken, messages_for, ping_pong, run, window_of
from pvrdma_lab.bench_rig import (
    KIB,
    MIB,
    REGION,
    SMALL_DEPTH,
    BenchError,
    BenchQp,
    BenchRam,
    RigOptions,
    Station,
    connected,
    connected_idle,
    connected_small,
    rig,
)

# Between two looks at completions: often enough for small windows, seldom enough to leave the cores to the servers.
_LOOK_S = 0.0005
_QUICK_LOOK_S = 0.00005
_IDLE_S = 3.0
_PAUSE_S = 0.01
_RING = 4 * MIB
_STEP = 64 * KIB
_COPIES_S = 20.0
_TURNS = 25
_ROUNDS = 2000


@dataclass(frozen=True, slots=True)
class Rate:
    """A stream, over what was measured right before and after it; CPU time is that of both servers."""

    operation: str
    size_bytes: int
    window: int
    messages_per_s: float
    gb_per_s: float
    memcpy_gb_per_s: float
    of_memcpy: float
    two_copies_gb_per_s: float
    cpu_us_per_message: float


@dataclass(frozen=True, slots=True)
class Latency:
    """A WRITE there and one back. Awake: without a pause between them. CPU time is that of both servers.

    `work_us_per_message`: without what they looked for work, at rings of peers and of the guest.
    """

    size_bytes: int
    awake: bool
    one_way_us: float
    best_us: float
    cpu_us_per_message: float
    work_us_per_message: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Several streams of WRITEs at once, all together."""

    queue_pairs: int
    servers: int
    size_bytes: int
    messages_per_s: float
    gb_per_s: float
    cpu_us_per_message: float


@dataclass(frozen=True, slots=True)
class Idle:
    """A server that has nothing to do: share of a core, and memory that is its own."""

    doorbells: str
    queue_pairs: int
    cpu_percent: float
    memory_mib: float


@dataclass(frozen=True, slots=True)
class Growth:
    """A stream beside things that are not used, over one without them: medians of `_TURNS` by turns.

    1.0: they cost nothing. The middle half of the CPU ratios is from `cpu_low` to `cpu_high`.
    """

    beside: str
    size_bytes: int
    cpu_ratio: float
    cpu_low: float
    cpu_high: float
    rate_ratio: float


def memcpy_gb_per_s(a: BenchRam, b: BenchRam) -> float:
    """Copying 1 MiB pieces from all over one memory to another: the median of seven walks."""
    found = []
    for _ in range(7):
        started = time.perf_counter()
        for at in range(0, REGION, MIB):
            b.data[at : at + MIB] = a.data[at : at + MIB]
        found.append(REGION / (time.perf_counter() - started) / 1e9)
    return statistics.median(found)


def two_copies_gb_per_s(a: BenchRam, b: BenchRam) -> float:
    """The same through a ring, by two processes that do nothing else: what is left of memcpy between two CPUs.

    Raises:
        BenchError: one of them does not go on.
    """
    ring = mmap.mmap(-1, PAGE + _RING)
    words, data = memoryview(ring)[:PAGE].cast("Q"), memoryview(ring)[PAGE:]
    # The first walk only has the kernel map the memory into the new process.
    head, tail, first, total = 0, 64, REGION, 4 * REGION
    deadline = time.monotonic() + _COPIES_S

    def wait(word: int, least: int) -> None:
        while words[word] < least:
            if time.monotonic() > deadline:
                raise BenchError("two copies at once do not end")

    def consume() -> None:
        for at in range(0, total, _STEP):
            wait(head, at + _STEP)
            to, out_of = at % REGION, at % _RING
            b.data[to : to + _STEP] = data[out_of : out_of + _STEP]
            words[tail] = at + _STEP

    consumer = os.fork()
    if not consumer:
        try:
            consume()
        finally:
            os._exit(0)
    try:
        for at in range(0, total, _STEP):
            wait(tail, max(0, at + _STEP - _RING))
            if at == first:
                started = time.perf_counter()
            out_of, to = at % REGION, at % _RING
            data[to : to + _STEP] = a.data[out_of : out_of + _STEP]
            words[head] = at + _STEP
        wait(tail, total)
        return (total - first) / (time.perf_counter() - started) / 1e9
    finally:
        os.waitpid(consumer, 0)


def _stream(
    pair: tuple[BenchQp, BenchQp], operation: str, size: int, window: int, total: int
) -> Callable[[], Taken]:
    """A stream, of which each call is a run."""
    every = max(1, min(16, window // 4))
    stream = Stream(*pair, operation, size, window, every)
    look_s = _LOOK_S if size * window > 4 * MIB else _QUICK_LOOK_S
    servers = [qp.station.server for qp in pair]
    return partial(run, [stream], servers, messages_for(size, total, every), look_s)


def rates(
    folder: Path, options: RigOptions, operations: Sequence[str], sizes: Sequence[int], total: int,
    *, window: int | None, repeats: int,
) -> tuple[float, list[Rate]]:  # fmt: skip
    """memcpy's GB/s, the median of all, and the streams, each between two measurements of what copying costs."""
    found, memcpys = [], []

    def copying() -> tuple[float, float]:
        return memcpy_gb_per_s(a.ram, b.ram), two_copies_gb_per_s(a.ram, b.ram)

    with rig(folder, options) as (a, b):
        before = copying()
        for operation in operations:
            for size in sizes:
                pair = connected(a, b)
                chosen = window or window_of(size)
                once = _stream(pair, operation, size, chosen, total)
                taken = min((once() for _ in range(repeats)), key=lambda each: each.seconds)
                for qp in pair:
                    qp.destroy()
                after = copying()
                memcpy, two_copies = ((x + y) / 2 for x, y in zip(before, after, strict=True))
                found.append(_rate(operation, size, chosen, taken, memcpy, two_copies))
                memcpys.append(before[0])
                before = after
    return statistics.median(memcpys), found


def _rate(
    operation: str, size: int, window: int, taken: Taken, memcpy: float, two_copies: float
) -> Rate:
    per_s = taken.messages / taken.seconds
    cpu_us = taken.cpu_s / taken.messages * 1e6
    gb_per_s = size * per_s / 1e9
    ratio = gb_per_s / memcpy
    return Rate(operation, size, window, per_s, gb_per_s, memcpy, ratio, two_copies, cpu_us)


def latencies(folder: Path, options: RigOptions, sizes: Sequence[int]) -> list[Latency]:
    """One message at a time, to and fro."""
    found = []
    with rig(folder, options) as (a, b):
        pair = connected(a, b)
        servers = (a.server, b.server)
        for size in sizes:
            game = PingPong(*pair, size)
            ping_pong(game, servers, _ROUNDS, 0.0)  # the first touch of memory costs faults
            for awake in (True, False):
                rounds, pause_s = (_ROUNDS, 0.0) if awake else (100, _PAUSE_S)
                times, *cpu_s = ping_pong(game, servers, rounds, pause_s)
                us = (1e6 * s for s in (statistics.median(times), min(times), *cpu_s))
                found.append(Latency(size, awake, *us))
    return found


def _together(streams: Sequence[Stream], stations: Sequence[Station], messages: int) -> Taken:
    servers = [station.server for station in stations]
    taken = [run(streams, servers, messages, _LOOK_S) for _ in range(3)]
    return min(taken, key=lambda each: each.seconds)


def queue_pairs(folder: Path, options: RigOptions, counts: Sequence[int]) -> list[Scale]:
    """64-byte WRITEs over ever more queue pairs between the same two servers, 16 each under way."""
    found = []
    with rig(folder, options) as (a, b):
        streams: list[Stream] = []
        for count in counts:
            while len(streams) < count:
                pair = connected_small(a, b)
                streams.append(Stream(*pair, "WRITE", 64, SMALL_DEPTH, 4))
            messages = max(1, 32 * KIB // count // SMALL_DEPTH) * SMALL_DEPTH
            taken = _together(streams, (a, b), messages)
            found.append(_scale(count, 2, 64, taken))
    return found


def servers(
    folder: Path, options: RigOptions, counts: Sequence[int], sizes: Sequence[int]
) -> list[Scale]:
    """Ever more servers in a ring, each of which WRITEs to the next."""
    found = []
    for count in counts:
        at = folder / str(count)
        at.mkdir()
        with rig(at, RigOptions(count, options.scattered, options.trapped)) as stations:
            pairs = [connected(stations[n - 1], stations[n]) for n in range(count)]
            for size in sizes:
                window = window_of(size)
                streams = [Stream(*pair, "WRITE", size, window, 16) for pair in pairs]
                messages = messages_for(size, 128 * MIB, 16)
                taken = _together(streams, stations, messages)
                found.append(_scale(count, count, size, taken))
    return found


def _scale(pairs: int, count: int, size: int, taken: Taken) -> Scale:
    per_s = taken.messages / taken.seconds
    cpu_us = taken.cpu_s / taken.messages * 1e6
    return Scale(pairs, count, size, per_s, per_s * size / 1e9, cpu_us)


def idle(folder: Path, counts: Sequence[int]) -> list[Idle]:
    """A server whose guest has so many connected queue pairs, and does nothing."""
    found = []
    for trapped in (True, False):
        at = folder / f"trapped-{trapped}"
        at.mkdir()
        with rig(at, RigOptions(trapped=trapped)) as (a, b):
            made = 0
            for count in counts:
                for _ in range(count - made):
                    connected_idle(a, b)
                made = count
                time.sleep(_PAUSE_S)
                before = a.server.cpu_s()
                time.sleep(_IDLE_S)
                percent = 100 * (a.server.cpu_s() - before) / _IDLE_S
                name = "trapped" if trapped else "mapped"
                found.append(Idle(name, count, percent, a.server.own_memory_mib()))
    return found


def growth(folder: Path, sizes: Sequence[int], total: int) -> list[Growth]:
    """Streams without and with a thousand idle queue pairs, a hundred regions, eight peers, by turns."""
    found = []
    for beside, count in (("1000 queue pairs", 2), ("100 regions", 2), ("8 peers", 9)):
        at, plain = (
            folder / f"{beside.replace(' ', '-')}-{which}" for which in ("with", "without")
        )
        at.mkdir()
        plain.mkdir()
        with rig(plain, RigOptions(2)) as without, rig(at, RigOptions(count)) as stations:
            a, b = stations[:2]
            pairs = connected(*without), connected(a, b)
            if beside == "1000 queue pairs":
                for _ in range(1000):
                    connected_idle(a, b)
            elif beside == "100 regions":
                _regions(a, 100)
                _regions(b, 100)
            else:
                for other in stations[2:]:
                    _greet(connected_small(a, other))
            found += [_grown(beside, pairs, size, total) for size in sizes]
    return found


def _grown(beside: str, pairs: Sequence[tuple[BenchQp, BenchQp]], size: int, total: int) -> Growth:
    one, two = (_stream(pair, "WRITE", size, window_of(size), total) for pair in pairs)
    one(), two()  # the first touch of memory costs faults
    turns = [(one(), two()) for _ in range(_TURNS)]
    cpu = [b.cpu_s / a.cpu_s for a, b in turns]
    rate = statistics.median(a.seconds / b.seconds for a, b in turns)
    low, middle, high = statistics.quantiles(cpu, n=4)
    return Growth(beside, size, middle, low, high, rate)


def _regions(station: Station, count: int) -> list[Mr]:
    return [station.process.mr(4 * PAGE) for _ in range(count)]


def _greet(pair: tuple[BenchQp, BenchQp]) -> None:
    # The first message makes the link.
    stream = Stream(*pair, "WRITE", 64, 4, 4)
    run([stream], [qp.station.server for qp in pair], 4, _LOOK_S)

"""What `bench guests` makes of its figures: tables, what they are to each other, JSON, a plot."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table

from pvrdma_lab.bench_report import circumstances, markdown_table, size_text
from pvrdma_lab.bench_rig import KIB, MIB, BenchError

DEVICE, TCP = "pvrdma", "tcp"
NETWORKS: Final = (DEVICE, "rxe/virtio-net", "rxe/vmxnet3", "tcp/virtio-net", "tcp/vmxnet3")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement.

    Attributes:
        network: of NETWORKS.
        program: perftest's, or iperf3.
        size_bytes: of a message; of iperf3's writes.
        mib_per_s: mean bandwidth; None for a latency.
        usec: mean time of a message one way (of a READ, there and back); None for a bandwidth.
    """

    network: str
    program: str
    size_bytes: int
    mib_per_s: float | None = None
    usec: float | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """What two figures of a run should be to each other."""

    what: str
    wanted: float
    ratio: float | None


def goals(figures: Sequence[Figure]) -> list[Goal]:
    """What the figures should be to each other."""
    by = {(f.network, f.program, f.size_bytes): f.mib_per_s or f.usec for f in figures}

    def ratio(one: tuple[str, str, int], other: tuple[str, str, int]) -> float | None:
        above, below = by.get(one), by.get(other)
        return above / below if above and below else None

    write, latency = "ib_write_bw", "ib_write_lat"
    mine = (DEVICE, write, MIB)
    return [
        Goal("1 MiB over rxe on virtio-net", 10, ratio(mine, ("rxe/virtio-net", write, MIB))),
        Goal("1 MiB over rxe on vmxnet3", 10, ratio(mine, ("rxe/vmxnet3", write, MIB))),
        Goal("1 MiB over TCP on virtio-net", 3, ratio(mine, ("tcp/virtio-net", "iperf3", MIB))),
        Goal("1 MiB over TCP on vmxnet3", 3, ratio(mine, ("tcp/vmxnet3", "iperf3", MIB))),
        Goal("latency of 4 KiB of rxe on virtio-net over ours", 3,
             ratio(("rxe/virtio-net", latency, 4 * KIB), (DEVICE, latency, 4 * KIB))),
        Goal("latency of 4 KiB of rxe on vmxnet3 over ours", 3,
             ratio(("rxe/vmxnet3", latency, 4 * KIB), (DEVICE, latency, 4 * KIB))),
        Goal("64 KiB over 1 MiB", 0.5, ratio((DEVICE, write, 64 * KIB), mine)),
    ]  # fmt: skip


def rows(figures: Sequence[Figure]) -> list[list[str]]:
    """A heading, then a row for each program and size, with a column for each network that was measured."""
    networks = [name for name in NETWORKS if any(figure.network == name for figure in figures)]
    found = [["program", "size", *networks]]
    for program, size in dict.fromkeys((f.program, f.size_bytes) for f in figures):
        cells = {f.network: f for f in figures if (f.program, f.size_bytes) == (program, size)}
        found.append([program, size_text(size), *(_cell(cells.get(name)) for name in networks)])
    return found


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    return f"{figure.mib_per_s:.1f}" if figure.mib_per_s is not None else f"{figure.usec:.1f} us"


def goal_rows(figures: Sequence[Figure]) -> list[list[str]]:
    """A heading, then a row for each goal."""
    found = [["one over the other", "wanted", "found"]]
    for goal in goals(figures):
        ratio = "not measured" if goal.ratio is None else f"{goal.ratio:.2g}"
        found.append([goal.what, f"{goal.wanted:g}", ratio])
    return found


def tables(figures: Sequence[Figure]) -> list[Table]:
    """The figures, and what they are to each other, for a terminal."""
    return [
        _table("two guests: MiB/s, and us where it says so", rows(figures)),
        _table("goals", goal_rows(figures)),
    ]


def _table(title: str, cells: list[list[str]]) -> Table:
    heading, *others = cells
    shown = Table(title=title, title_justify="left")
    for number, word in enumerate(heading):
        shown.add_column(word, justify="right" if number else "left")
    for row in others:
        shown.add_row(*row)
    return shown


def markdown(figures: Sequence[Figure]) -> str:
    """The same for docs/performance.md."""
    return f"{markdown_table(rows(figures))}\n\n{markdown_table(goal_rows(figures))}"


def document(figures: Sequence[Figure], lab: dict[str, Any]) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "circumstances": {**circumstances(), **lab},
        "figures": [asdict(figure) for figure in figures],
        "goals": [asdict(goal) for goal in goals(figures)],
    }


def plot(path: str, figures: Sequence[Figure]) -> None:
    """Bandwidths by size. Raises BenchError without matplotlib."""
    try:
        from matplotlib import pyplot as plt  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None
    _, axes = plt.subplots(figsize=(8, 5))
    lines = dict.fromkeys((f.network, f.program) for f in figures if f.mib_per_s is not None)
    for network, program in lines:
        points = sorted(
            (f.size_bytes, f.mib_per_s)
            for f in figures
            if (f.network, f.program) == (network, program) and f.mib_per_s is not None
        )
        axes.plot(*zip(*points, strict=True), "o-", label=f"{network} {program}")
    axes.set(xscale="log", yscale="log", xlabel="bytes of a message", ylabel="MiB/s")
    axes.legend(fontsize="small")
    plt.savefig(path, dpi=120, bbox_inches="tight")

"""What scripts/bench shows of its figures: tables, JSON with machine, date and commit, and a plot."""

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from pvrdma_lab import paths
from pvrdma_lab.bench_figures import Rate
from pvrdma_lab.bench_rig import KIB, MIB, BenchError


def size_text(size: int) -> str:
    """Returns 64 B, 4 KiB, 1 MiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """Returns a heading and rows as Markdown; all columns but the first are numbers."""
    lines = [f"| {' | '.join(row)} |" for row in cells]
    lines.insert(1, f"|---|{'---:|' * (len(cells[0]) - 1)}")
    return "\n".join(lines)


_FORMATS = {
    "size_bytes": ("size", size_text),
    "messages_per_s": ("messages/s", "{:,.0f}".format),
    "gb_per_s": ("GB/s", "{:.2f}".format),
    "memcpy_gb_per_s": ("memcpy GB/s", "{:.1f}".format),
    "of_memcpy": ("of memcpy", "{:.2f}".format),
    "two_copies_gb_per_s": ("2 copies", "{:.1f}".format),
    "cpu_us_per_message": ("CPU us/message", "{:.1f}".format),
    "work_us_per_message": ("of it work", "{:.1f}".format),
    "one_way_us": ("one way us", "{:.1f}".format),
    "best_us": ("best us", "{:.1f}".format),
    "cpu_percent": ("% of a core", "{:.2f}".format),
    "memory_mib": ("own memory MiB", "{:.1f}".format),
    "cpu_ratio": ("CPU ratio", "{:.2f}".format),
    "cpu_low": ("of half from", "{:.2f}".format),
    "cpu_high": ("to", "{:.2f}".format),
    "rate_ratio": ("rate ratio", "{:.2f}".format),
}


def table(title: str, records: Sequence[Any]) -> Table:
    """A table of records of one class."""
    found = Table(title=title, title_justify="left")
    names = [record.name for record in fields(records[0])]
    for name in names:
        heading = _FORMATS.get(name, (name.replace("_", " "), str))[0]
        found.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        cells = [_FORMATS.get(name, ("", str))[1](getattr(record, name)) for name in names]
        found.add_row(*cells)
    return found


def circumstances() -> dict[str, Any]:
    """Where and when this was measured, and of what."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=paths.REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git.stdout.strip() or "unknown",
        "load": round(os.getloadavg()[0], 2),
    }


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Figures by name, lists of records among them, with their circumstances."""
    document: dict[str, Any] = {"circumstances": circumstances()}
    for name, value in figures.items():
        document[name] = [asdict(each) for each in value] if isinstance(value, list) else value
    path.write_text(json.dumps(document, indent=1) + "\n")


def plot(path: Path, memcpy: float, rates: Sequence[Rate]) -> None:
    """Bandwidth over message size; the file's ending says which format.

    Raises:
        BenchError: matplotlib is missing.
    """
    try:
        from matplotlib import pyplot as plt  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None
    figure, axes = plt.subplots(figsize=(8, 5))
    for operation in dict.fromkeys(rate.operation for rate in rates):
        mine = [rate for rate in rates if rate.operation == operation]
        axes.plot([r.size_bytes for r in mine], [r.gb_per_s for r in mine], "o-", label=operation)
    axes.axhline(memcpy, color="grey", linestyle="--", label="cold memcpy")
    copies = statistics.median(rate.two_copies_gb_per_s for rate in rates)
    axes.axhline(copies, color="grey", linestyle=":", label="two copies at once")
    sizes = sorted({rate.size_bytes for rate in rates})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
    axes.set(xlabel="size of a message", ylabel="GB/s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")

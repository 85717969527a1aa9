"""scripts/bench guests: two guests, and what people would use between them, side by side in one run.

This device; soft-RoCE (rxe) in the guests over a virtio-net and over a vmxnet3; TCP over both. The two cards hang
on taps of one bridge, with the offloads that QEMU has there, so TCP's segments are as large as its sockets make them.
Figures are perftest's and iperf3's own. For each size all networks are measured one after the other, so that what else
the machine does meanwhile meets all of them.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from pvrdma_lab import paths
from pvrdma_lab.demo import size_text
from pvrdma_lab.guest import Guest
from pvrdma_lab.lab import Lab
from pvrdma_lab.programs import GID_INDEX, PORT, listens_on_port, run_pair
from pvrdma_lab.state import LabError

KIB, MIB = 1 << 10, 1 << 20
SIZES: Final = (64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
LATENCY_SIZES: Final = (64, 4 * KIB, 64 * KIB)
OPERATIONS: Final = ("write", "read", "send")
DEVICE, TCP = "pvrdma", "tcp"
NETWORKS: Final = (DEVICE, "rxe/virtio-net", "rxe/vmxnet3", "tcp/virtio-net", "tcp/vmxnet3")
_CARDS: Final = {"virtio-net": ("v", "virtio-net-pci", 78), "vmxnet3": ("x", "vmxnet3", 79)}
_BRIDGE: Final = "pvrdma-bench"
_IPERF_PORT: Final = 5201
_GRACE_S: Final = 60.0


class BenchError(Exception):
    """The bridge cannot be made, or a program printed no figure."""


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


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def _bridge(mtu: int) -> Iterator[None]:
    """A bridge with a tap for each card of each guest, within the block. Needs root."""
    taps = [f"pvb{letter}{guest}" for letter, _, _ in _CARDS.values() for guest in "ab"]
    _ip("link", "add", _BRIDGE, "mtu", str(mtu), "type", "bridge")
    try:
        for tap in taps:
            _ip("tuntap", "add", tap, "mode", "tap", "vnet_hdr")
            _ip("link", "set", tap, "mtu", str(mtu), "master", _BRIDGE, "up")
        _ip("link", "set", _BRIDGE, "up")
        yield
    finally:
        for tap in taps:
            subprocess.run(["ip", "link", "del", tap], capture_output=True, check=False)
        _ip("link", "del", _BRIDGE)


def _card_words() -> list[str]:
    words = []
    for letter, model, number in _CARDS.values():
        tap = f"tap,id={letter},ifname=pvb{letter}{{name}},script=no,downscript=no,vnet_hdr=on"
        mac = f"52:54:00:{number}:00:0{{index}}"
        words += ["-netdev", tap, "-device", f"{model},netdev={letter},mac={mac},romfile="]
    return words


def _configure(guest: Guest, index: int, mtu: int) -> None:
    """Addresses for the two cards, and an rxe on each. The lab's init has given them those of other cards."""
    for letter, _, number in _CARDS.values():
        guest.check(
            f"dev=$(ip -o link | awk -F'[ :]+' '/52:54:00:{number}:/ {{print $2}}'); "
            f"ip link set $dev name bench{letter} 2>/dev/null || "
            f"{{ ip link set $dev down; ip link set $dev name bench{letter}; }}; "
            f"ip address flush dev bench{letter}; ip link set bench{letter} mtu {mtu} up; "
            f"ip address add 10.{number}.0.{index + 1}/24 dev bench{letter}"
        )
    guest.check("modprobe rdma_rxe")
    for letter in "vx":
        guest.check(f"rdma link add rxe{letter} type rxe netdev bench{letter}")


def _gid_index(guest: Guest, device: str) -> int:
    """The index of the GID that follows from the device's IPv4 address."""
    gids = f"/sys/class/infiniband/{device}/ports/1/gids"
    lines = guest.check(f"grep -l 0000:0000:0000:0000:0000:ffff {gids}/* || true").split()
    if not lines:
        raise BenchError(f"guest {guest.name}: {device} has no GID of an IPv4 address")
    return int(lines[0].rpartition("/")[2])


class Bed:
    """Two guests, ready."""

    def __init__(self, lab: Lab, seconds: int) -> None:
        self.server, self.client = lab
        self.seconds = seconds

    def bandwidth(self, network: str, operation: str, size: int) -> Figure:
        """ib_*_bw, or iperf3 for TCP."""
        kind, _, card = network.partition("/")
        if kind == TCP:
            return Figure(network, "iperf3", size, mib_per_s=self._iperf(card, size))
        program = f"ib_{operation}_bw"
        # #bytes #iterations BW-peak BW-average: MiB/s
        found = self._perftest(network, program, size, r"\s+\d+\s+[\d.]+\s+([\d.]+)")
        return Figure(network, program, size, mib_per_s=float(found))

    def latency(self, network: str, operation: str, size: int) -> Figure:
        """ib_*_lat."""
        program = f"ib_{operation}_lat"
        # #bytes #iterations t_avg
        found = self._perftest(network, program, size, r"\s+\d+\s+([\d.]+)")
        return Figure(network, program, size, usec=float(found))

    def _perftest(self, network: str, program: str, size: int, figure: str) -> str:
        _, _, card = network.partition("/")
        if card:
            letter, _, number = _CARDS[card]
            device, address = f"rxe{letter}", f"10.{number}.0.1"
            index = _gid_index(self.server, device), _gid_index(self.client, device)
        else:
            device, address, index = "vmw_pvrdma0", self.server.ip, (GID_INDEX, GID_INDEX)
        # -D measures its middle half: a quarter of the time at either end is left out.
        words = [f"{program} -F -d {device} -x {x} -s {size} -D {self.seconds}" for x in index]
        commands = words[0], f"{words[1]} {address}"
        output = self._pair(network, commands, listens_on_port(PORT))
        return _found(rf"^\s*{size}{figure}", output)

    def _iperf(self, card: str, size: int) -> float:
        address = f"10.{_CARDS[card][2]}.0.1"
        commands = (
            f"iperf3 -s -1 -B {address}",
            f"iperf3 -c {address} -t {self.seconds} -O 0.5 -l {min(size, MIB)} -J",
        )
        output = self._pair(f"{TCP}/{card}", commands, listens_on_port(_IPERF_PORT))
        received: float = json.loads(output)["end"]["sum_received"]["bits_per_second"]
        return received / 8 / MIB

    def _pair(self, step: str, commands: tuple[str, str], listens: str) -> str:
        timeout_s = self.seconds + _GRACE_S
        return run_pair(step, self.server, self.client, commands, listens, timeout_s)[1]


def _found(pattern: str, output: str) -> str:
    match = re.search(pattern, output, re.M)
    if match is None:
        raise BenchError(f"no {pattern!r} in:\n{output[-2000:]}")
    return match[1]


@contextmanager
def bed(seconds: int, mtu: int) -> Iterator[Bed]:
    """Two guests with all networks, within the block."""
    lab = Lab(f"bench-{os.getpid()}", guests=2, memory_mib=1024, qemu_args=_card_words())
    with _bridge(mtu), lab:
        for index, guest in enumerate(lab):
            _configure(guest, index, mtu)
        yield Bed(lab, seconds)


def measure(
    guests: Bed, sizes: Sequence[int], operations: Sequence[str], networks: Sequence[str],
    say: Callable[[str], None],
) -> list[Figure]:  # fmt: skip
    """Every figure, size by size."""
    figures: list[Figure] = []

    def take(
        program: Callable[[str, str, int], Figure], network: str, what: str, size: int
    ) -> None:
        # A network over which nothing gets through is a result, too, and none for the others.
        try:
            figure = program(network, what, size)
        except BenchError as error:
            say(f"{network}: {what} {size_text(size)}: left out: {error}")
            return
        figures.append(figure)
        value = (
            f"{figure.mib_per_s:.1f} MiB/s"
            if figure.mib_per_s is not None
            else f"{figure.usec:.1f} us"
        )
        say(f"{network}: {figure.program} {size_text(size)}: {value}")

    rdma = [network for network in networks if not network.startswith(TCP)]
    for size in sizes:
        for operation in operations:
            for network in rdma:
                take(guests.bandwidth, network, operation, size)
        for network in networks:
            if network.startswith(TCP):
                take(guests.bandwidth, network, TCP, size)
    for size in (size for size in LATENCY_SIZES if size in sizes):
        for operation in operations:
            for network in rdma:
                take(guests.latency, network, operation, size)
    return figures


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


def table(figures: Sequence[Figure]) -> Table:
    """The figures for a terminal."""
    heading, *others = rows(figures)
    shown = Table(title="two guests: MiB/s, and us where it says so", title_justify="left")
    for number, word in enumerate(heading):
        shown.add_column(word, justify="right" if number else "left")
    for row in others:
        shown.add_row(*row)
    return shown


def markdown(figures: Sequence[Figure]) -> str:
    """The figures and goals for docs/performance.md."""
    heading, *others = (f"| {' | '.join(row)} |" for row in rows(figures))
    rule = f"|---|{'---:|' * (heading.count('|') - 2)}"
    lines = [
        heading,
        rule,
        *others,
        "",
        "| one over the other | wanted | found |",
        "|---|---:|---:|",
    ]
    for goal in goals(figures):
        found = "not measured" if goal.ratio is None else f"{goal.ratio:.2g}"
        lines.append(f"| {goal.what} | {goal.wanted:g} | {found} |")
    return "\n".join(lines)


def document(figures: Sequence[Figure], lab: dict[str, Any]) -> dict[str, Any]:
    """What is written as JSON."""
    commit = subprocess.run(
        ["git", "-C", paths.REPOSITORY, "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        **lab,
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


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench guests",
        description="Two guests: this device, rxe in the guests and TCP over virtio-net and vmxnet3. Needs root.",
    )
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", metavar="BYTES", default=list(SIZES), help="of messages")
    add("--operations", nargs="+", choices=OPERATIONS, default=["write"])
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    add("--seconds", type=int, default=2, help="of each figure (default: %(default)s)")
    add("--mtu", type=int, default=1500, help="of the two cards (default: %(default)s)")
    add(
        "--markdown",
        action="store_true",
        help="print them as Markdown, too, with what they are to each other",
    )
    add("--json", metavar="FILE", help="write the figures here, too")
    add("--plot", metavar="FILE", help="draw them (needs matplotlib)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure, print, write; the process's status."""
    wanted = _parse(argv)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        with bed(wanted.seconds, wanted.mtu) as guests:
            figures = measure(guests, wanted.sizes, wanted.operations, wanted.networks, say)
            lab = {
                "accelerator": guests.server.accelerator,
                "mtu": wanted.mtu,
                "seconds": wanted.seconds,
            }
        Console(width=None if sys.stdout.isatty() else 120).print(table(figures))
        if wanted.markdown:
            print(markdown(figures))
        if wanted.json:
            Path(wanted.json).write_text(json.dumps(document(figures, lab), indent=1) + "\n")
        if wanted.plot:
            plot(wanted.plot, figures)
    except (BenchError, LabError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0

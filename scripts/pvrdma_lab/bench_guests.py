"""scripts/bench guests: two guests, and what people would use between them, side by side in one run.

This device; soft-RoCE (rxe) in the guests over a virtio-net and over a vmxnet3; TCP over both. Each kind of card has a
bridge of its own, for Linux answers for an address on every card that hears the question, and rxe, unlike TCP, takes
only what comes by the right card. The taps have the offloads that QEMU has there, so TCP's segments are as large as its
sockets make them. Figures are perftest's and iperf3's own. For each size all networks are measured one after the other,
so that what else the machine does meanwhile meets all of them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console

from pvrdma_lab.bench_guests_report import (
    NETWORKS,
    TCP,
    Figure,
    document,
    markdown,
    plot,
    tables,
)
from pvrdma_lab.bench_report import size_text
from pvrdma_lab.bench_rig import KIB, MIB, BenchError
from pvrdma_lab.guest import Guest
from pvrdma_lab.lab import Lab
from pvrdma_lab.programs import GID_INDEX, PORT, listens_on_port, run_pair
from pvrdma_lab.state import LabError

SIZES: Final = (64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
LATENCY_SIZES: Final = (64, 4 * KIB, 64 * KIB)
OPERATIONS: Final = ("write", "read", "send")
_CARDS: Final = {"virtio-net": ("v", "virtio-net-pci", 78), "vmxnet3": ("x", "vmxnet3", 79)}
_IPERF_PORT: Final = 5201
_GRACE_S: Final = 60.0


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def _bridges(mtu: int) -> Iterator[None]:
    """A bridge for each kind of card, with a tap for each guest, within the block. Needs root."""
    links: list[str] = []

    def add(link: str, *words: str) -> None:
        _ip(*words)
        links.append(link)

    try:
        for letter, _, _ in _CARDS.values():
            bridge = f"pvbridge{letter}"
            add(bridge, "link", "add", bridge, "mtu", str(mtu), "type", "bridge")
            for guest in "ab":
                tap = f"pvb{letter}{guest}"
                add(tap, "tuntap", "add", tap, "mode", "tap", "vnet_hdr")
                _ip("link", "set", tap, "mtu", str(mtu), "master", bridge, "up")
            _ip("link", "set", bridge, "up")
        yield
    finally:
        for link in reversed(links):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)


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
        if not float(found):
            raise BenchError(f"{network}: {program}: nothing got through in {self.seconds} s")
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
    with _bridges(mtu), lab:
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
    add(
        "--mtu",
        type=int,
        default=9000,
        help="of the two cards (default: %(default)s; vmxnet3 has no larger)",
    )
    add("--markdown", action="store_true", help="print the tables as Markdown, too")
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
        Console(width=None if sys.stdout.isatty() else 120).print(*tables(figures))
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

"""The old pvrdma device of QEMU 7.2 and ours, each in a guest of its own on one rxe; runs inside the rxe host.

`scripts/bench old` starts it. Both guests are up all the time and take turns, figure by figure; the one whose turn it
is not sleeps. The other end is perftest on the rxe host itself. What the old device can do is SEND, from one QP.

Prints a line of JSON for each figure, and says each on standard error.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from host_peer import PEER_DEVICE, PEER_GID_INDEX, ended, in_peer
from host_server import HostServer
from hub_process import hub_before_cm
from nested_guest import PEER_TCP, RDMA_ADDRESS, NestedGuest
from old_guest import old_guest

OLD, OURS = "old", "ours"
GUEST_DEVICE = "vmw_pvrdma0"
GUEST_GID_INDEX = "1"
LISTEN_S = 60.0
RUN_S = 180
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# The old device completes every request, signalled or not: so every one is signalled.
_BANDWIDTH = "-Q 1 -t 32 -r 64"
_MESSAGES = {"ib_send_bw": 1, "ib_send_lat": 2}
# A ping-pong takes far longer than a message of a stream. Programs that sleep (-e) stand still on the old device.
_SHARE = {"ib_send_bw": 1, "ib_send_lat": 8}
_MOST_BYTES = 64 << 20
_SMALL = 8 << 10
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement.

    Attributes:
        device: old or ours.
        program: perftest's.
        size_bytes: of a message.
        messages: how many went, both ways together.
        mib_per_s: mean bandwidth; None for a latency.
        usec: half of the mean time there and back; None for a bandwidth.
        server_s: CPU time of our server meanwhile, all of perftest; 0 for the old device, which QEMU is itself.
    """

    device: str
    program: str
    size_bytes: int
    messages: int
    mib_per_s: float | None
    usec: float | None
    server_s: float


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Station:
    """A guest, and the process that is its device if that is not QEMU."""

    name: str
    guest: NestedGuest
    server: HostServer | None

    def server_seconds(self) -> float:
        """Source: proc(5), utime and stime of stat."""
        if self.server is None:
            return 0.0
        words = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS_PER_S


def measure(station: Station, program: str, size: int, count: int) -> Figure:
    """Perftest from the guest to the rxe host; the figure is the rxe host's, whose clock is emulated once only.

    Perftest divides its clock's ticks by a rate that it measures first. If it trusts none, it goes on with zero
    and has no figure: it is run again then.
    """
    for _ in range(_TRIES):
        before = station.server_seconds()
        output = perftest(station, program, size, count)
        spent = station.server_seconds() - before
        if value := mean(program, size, output):
            bandwidth, latency = (value, None) if program == "ib_send_bw" else (None, value)
            messages = count * _MESSAGES[program]
            return Figure(
                station.name, program, size, messages, bandwidth, latency, round(spent, 2)
            )
        say(
            f"{station.name}: {program} of {size} bytes: perftest has no clock that it trusts; again"
        )
    raise RuntimeError(f"{station.name}: {program}: no figure in {_TRIES} runs: {output}")


def perftest(station: Station, program: str, size: int, count: int) -> str:
    """What it prints in the rxe host, once both ends are through."""
    guest = station.guest
    words = f"-F -s {size} -n {count} -I 0 -m 1024 -p {guest.port}".split()
    words += _BANDWIDTH.split() if program == "ib_send_bw" else []
    command = f"{program} -d {GUEST_DEVICE} -x {GUEST_GID_INDEX} {' '.join(words)} {PEER_TCP}"
    with ended(in_peer([program, "-d", PEER_DEVICE, "-x", PEER_GID_INDEX, *words])) as peer:
        wait_for_listener(guest.port)
        done = guest.run(command, RUN_S)
        if done.status:
            peer.kill()
        output, _ = peer.communicate(timeout=RUN_S)
    if done.status:
        raise RuntimeError(f"{station.name}: {command}: {done}\npeer: {output}")
    return str(output)


def mean(program: str, size: int, output: str) -> float | None:
    """MiB/s or us, from perftest's line; None if there is none, 0 or infinity.

    After size and iterations come BW-peak, BW-average and millions of messages/s; or t_min, t_max, t_typical, t_avg.
    """
    line = re.search(rf"^\s*{size}\s+\d+\s+(.*)", output, re.M)
    if line is None:
        return None
    values = [float(word) for word in line[1].split()]
    if program == "ib_send_lat":
        return values[3] if 0 < values[3] < math.inf else None
    # Bandwidth has two decimals, the rate of messages has six.
    small = size < _SMALL
    return (values[2] * 1e6 * size / (1 << 20) if small else values[1]) or None


def wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + LISTEN_S
    while f":{port} " not in in_peer(["ss", "-Hltn"]).communicate()[0]:
        if time.monotonic() > deadline:
            raise RuntimeError("perftest of the rxe host does not listen")
        time.sleep(0.1)


@contextmanager
def stations(folder: Path) -> Iterator[list[Station]]:
    """Both guests, within the block."""
    with ExitStack() as stack:
        hub = stack.enter_context(hub_before_cm(_made(folder / "hub")))
        server = HostServer(
            _made(folder / "server"), "rxe0", RDMA_ADDRESS, more=("--mad-hub", hub.socket)
        )
        server.start()
        stack.callback(server.end)
        say("booting both guests")
        old = stack.enter_context(old_guest(_made(folder / OLD), hub))
        ours = NestedGuest(_made(folder / OURS), server.socket)
        stack.callback(ours.close)
        yield [Station(OLD, old.booted(), None), Station(OURS, ours.booted(), server)]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="old_bench")
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--messages", type=int, required=True, help="of a bandwidth")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, stations(Path(folder)) as both:
        for _, size, program in product(range(wanted.repeats), wanted.sizes, _SHARE):
            count = max(64, min(wanted.messages // _SHARE[program], _MOST_BYTES // size))
            for station in both:
                figure = measure(station, program, size, count)
                say(f"{figure}")
                print(json.dumps(asdict(figure)), flush=True)


if __name__ == "__main__":
    main()

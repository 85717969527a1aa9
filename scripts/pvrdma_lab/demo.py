"""scripts/demo: two servers, two guests, and RDMA between them, as one table. Runs in bootstrap's virtualenv."""

import fcntl
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from rich.console import Console
from rich.table import Table

from pvrdma_lab import paths
from pvrdma_lab.guest import Guest
from pvrdma_lab.lab import Lab
from pvrdma_lab.programs import Measured, perftest, pingpong, rdma_check, rping
from pvrdma_lab.state import LabError
from pvrdma_lab.storage import nvme_copy
from pvrdma_server.errors import PvrdmaError
from pvrdma_server.status import read_status

_KIB, _MIB = 1 << 10, 1 << 20
_INTERRUPTED = 130
# Objects that a program leaves are gone once its process is torn down; the driver takes a moment.
_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the demo's table.

    Attributes:
        program: what ran.
        shows: what of the device it shows.
        size: of a message, for people.
        count: how many messages.
        result: what was measured.
        check: how it was verified.
    """

    program: str
    shows: str
    size: str = ""
    count: str = ""
    result: str = ""
    check: str = ""


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One thing to show: its name, and what does it, with a program on each of two guests."""

    name: str
    run: Callable[[Guest, Guest], Row]


def size_text(size_bytes: int) -> str:
    """Returns a size for people: 64 KiB, 1 MiB, 100001 B."""
    for unit, name in ((_MIB, "MiB"), (_KIB, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def result_text(measured: Measured) -> str:
    """Returns what was measured, for people."""
    if measured.mib_per_s is not None and measured.usec is None:
        return f"{measured.mib_per_s:.1f} MiB/s"
    if measured.usec is not None:
        return f"{measured.usec / 1000:.2f} ms"
    return ""


def _row(program: str, shows: str, check: str, measured: Measured) -> Row:
    size, count = size_text(measured.size_bytes), str(measured.iterations)
    return Row(program, shows, size, count, result_text(measured), check)


def _devinfo(_: Guest, guest: Guest) -> Row:
    output = guest.check("ibv_devinfo")
    fields = dict(re.findall(r"^\s*([a-z_]+):\s+(.*?)\s*$", output, re.M))
    if "ACTIVE" not in fields.get("state", ""):
        raise guest.error("ibv_devinfo", f"the port is not active:\n{output}")
    what = f"{fields.get('hca_id')}, {fields.get('link_layer')}, MTU {fields.get('active_mtu')}"
    return Row("ibv_devinfo", "driver bound, port up", result=what, check=fields["state"])


def _pingpong(size_bytes: int, options: str, shows: str) -> DemoStep:
    def run(server: Guest, client: Guest) -> Row:
        measured = pingpong(server, client, size_bytes, 50, options)
        return _row(
            f"ibv_rc_pingpong -c {options}".rstrip(), shows, "one byte of every page", measured
        )

    return DemoStep(f"ibv_rc_pingpong -c {options} {size_text(size_bytes)}", run)


def _perftest(program: str, size_bytes: int, shows: str, iterations: int = 200) -> DemoStep:
    def run(server: Guest, client: Guest) -> Row:
        # Enough to see a rate, few enough for an emulated CPU.
        measured = perftest(server, client, program, size_bytes, iterations)
        return _row(program, shows, "all completions", measured)

    return DemoStep(f"{program} {size_text(size_bytes)}", run)


def _verify(_: Guest, guest: Guest) -> Row:
    checks, moved = rdma_check(guest)
    shows = "SEND, WRITE, READ, atomics"
    return Row(
        "rdma_check.py",
        shows,
        "1 B-1 MiB",
        str(checks),
        f"{moved} random bytes",
        "every byte compared",
    )


def _rping(server: Guest, client: Guest) -> Row:
    measured = rping(server, client, 4096, 20)
    return _row("rping", "rdma_cm, SEND, READ, WRITE", "every byte compared", measured)


def _nvme(target: Guest, host: Guest) -> Row:
    measured = nvme_copy(target, host, 16)
    row = _row("nvme connect, dd", "NVMe-oF: b uses a's disk", "every byte compared", measured)
    return replace(row, count="there, back")


STEPS: tuple[DemoStep, ...] = (
    DemoStep("ibv_devinfo", _devinfo),
    DemoStep("rdma_check.py", _verify),
    _pingpong(64, "", "RC SEND, polling"),
    _pingpong(4096, "-e", "RC SEND, completion events"),
    _pingpong(100_001, "-e", "an odd size"),
    _pingpong(_MIB, "-e", "a megabyte"),
    *(
        _perftest(program, size_bytes, shows)
        for program, shows in (
            ("ib_write_bw", "RDMA WRITE"),
            ("ib_read_bw", "RDMA READ"),
            ("ib_send_bw", "SEND"),
        )
        for size_bytes in (4 * _KIB, 64 * _KIB, _MIB)
    ),
    _perftest("ib_atomic_bw", 8, "fetch and add"),
    *(
        _perftest(program, 8, shows, 50)
        for program, shows in (
            ("ib_write_lat", "RDMA WRITE"),
            ("ib_read_lat", "RDMA READ"),
            ("ib_send_lat", "SEND"),
            ("ib_atomic_lat", "fetch and add"),
        )
    ),
    DemoStep("rping", _rping),
)
# After the look at what is left: the target's kernel keeps completion queues in a pool, for the next connection.
STORAGE = DemoStep("NVMe-oF", _nvme)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _settled(guest: Guest, before: dict[str, int]) -> Row:
    """Compares the server's objects with those before the first program."""
    deadline = time.monotonic() + _SETTLE_S
    while (status := read_status(str(guest.status_socket)))["objects"] != before:
        if time.monotonic() > deadline:
            raise guest.error("server", f"objects: {before} before, now {status['objects']}")
        time.sleep(0.1)
    device = status["device"]
    if errors := device["guest_errors"]:
        raise guest.error("server", f"it counted errors of the guest: {errors}")
    what = f"{device['doorbells']} doorbells, {device['interrupts']} interrupts"
    return Row(
        "pvrdma-server status",
        f"{guest.name} after all of these",
        result=what,
        check="no error, no object left",
    )


def table(rows: list[Row], title: str) -> Table:
    """Returns the rows as a table for a terminal."""
    shown = Table(title=title, title_justify="left")
    for heading in ("program in the guests", "shows"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("size", "messages", "result"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("verified", no_wrap=True)
    for row in rows:
        shown.add_row(row.program, row.shows, row.size, row.count, row.result, row.check)
    return shown


def _run_steps(server: Guest, client: Guest) -> list[Row]:
    before = {guest.name: read_status(str(guest.status_socket)) for guest in (server, client)}
    rows = []
    for number, step in enumerate((*STEPS, STORAGE), 1):
        if step is STORAGE:
            rows += [_settled(guest, before[guest.name]["objects"]) for guest in (server, client)]
        started = time.monotonic()
        row = step.run(server, client)
        rows.append(row)
        _say(
            f"[{number}/{len(STEPS) + 1}] {step.name}: {row.result or 'ok'} ({time.monotonic() - started:.1f} s)"
        )
    return rows


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Keeps a second demo of the same name from ending this one's guest."""
    path = paths.run_folder() / f".{name}.demo"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError(
                f"another demo runs as lab {name!r}; wait for it, or choose another --name"
            ) from None
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _show(name: str, server_args: list[str]) -> None:
    started = time.monotonic()
    _say("demo: booting two guests (half a minute without KVM) ...")
    with _alone(name), Lab(name, guests=2, server_args=server_args) as lab:
        booted = time.monotonic() - started
        _say(f"demo: guests up in {booted:.1f} s ({lab.state.accel})")
        rows = _run_steps(lab["a"], lab["b"])
        kernel = lab["a"].check("uname -r").strip()
    title = (
        f"two guests, two pvrdma-servers, embedded backend; "
        f"Linux {kernel} on {lab.state.accel}, booted in {booted:.0f} s"
    )
    # A pipe has no width; a table cut at 80 columns says nothing.
    width = None if sys.stdout.isatty() else 150
    Console(width=width).print(table(rows, title))
    print(
        f"demo: all {len(STEPS) + 1} steps verified in {time.monotonic() - started:.0f} s",
        flush=True,
    )


def main(name: str, server_args: str) -> int:
    """Runs the demo; returns the process's status.

    Args:
        name: the lab's.
        server_args: more words for the server, as a shell would split them.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    os.umask(0o022)
    try:
        _show(name, shlex.split(server_args))
    except (LabError, PvrdmaError) as error:
        _say(str(error))
        _say(f"demo: failed: {str(error).splitlines()[0]}")
        return 1
    except KeyboardInterrupt:
        _say("demo: interrupted; the guests are down")
        return _INTERRUPTED
    return 0

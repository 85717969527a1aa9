"""What a guest's server holds, by its own counters; and that it holds the same as before."""

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pvrdma_lab.guest import Guest

from pvrdma_server.status import read_status

# A process's objects go when the guest's kernel tears it down, a moment after its exit was seen.
SETTLE_S = 30.0
# malloc takes and gives back arenas and large blocks as it likes; a leak of one per test would pass this soon.
MAPPINGS_SLACK = 6

_DRIVER = re.compile(
    r"vmw_pvrdma|infiniband|\bib_|rdma|uverbs|BUG|WARNING|Call Trace|Oops|hung|blocked for"
)
# What every load of a module that Debian did not build says.
_HARMLESS = re.compile(r"loading out-of-tree module taints|module verification failed")


class Held(NamedTuple):
    """What must be the same before and after. `mappings` may differ by MAPPINGS_SLACK."""

    objects: dict[str, int]
    dma_regions: int
    fds: int
    mappings: int

    def like(self, other: "Held") -> bool:
        return self[:3] == other[:3] and abs(self.mappings - other.mappings) <= MAPPINGS_SLACK


def status(guest: Guest) -> dict[str, Any]:
    return read_status(str(guest.status_socket))


def held(guest: Guest) -> Held:
    now = status(guest)
    process = now["process"]
    return Held(now["objects"], now["dma_regions"], process["fds"], process["mappings"])


def wait_until(
    guest: Guest,
    what: str,
    condition: Callable[[dict[str, Any]], bool],
    timeout_s: float = SETTLE_S,
) -> dict[str, Any]:
    """Waits until the server's status fulfils a condition; returns that status."""
    deadline = time.monotonic() + timeout_s
    while not condition(now := status(guest)):
        if time.monotonic() > deadline:
            raise guest.error("status", f"not within {timeout_s:.0f} s: {what}; it is {now}")
        time.sleep(0.1)
    return now


def assert_same(guest: Guest, before: Held) -> None:
    """Waits until the server holds what it held before: no object, region, fd or mapping is left."""
    deadline = time.monotonic() + SETTLE_S
    while not before.like(now := held(guest)):
        if time.monotonic() > deadline:
            raise guest.error("leak", f"the server held {before}, now {now}")
        time.sleep(0.1)


def guest_errors(guest: Guest) -> dict[str, int]:
    errors: dict[str, int] = status(guest)["device"]["guest_errors"]
    return errors


def assert_no_errors(guest: Guest) -> None:
    """The server has counted no error of its guest, and lost no event and no message."""
    now = status(guest)
    assert now["device"]["guest_errors"] == {}
    assert now["device"]["events_dropped"] == 0
    assert now["backend"]["bad_message"] == now["backend"]["wrong_peer"] == 0
    assert [peer for peer in now["fabric"]["peers"] if peer["lost_messages"]] == []


def warnings(guest: Guest) -> list[dict[str, Any]]:
    """The server's log lines that are no mere information."""
    return [event for event in guest.server_events() if event.get("level", "error") != "info"]


def complaints(guest: Guest) -> list[str]:
    """Warnings and errors of the guest's kernel that concern RDMA, since the last call; clears the kernel's log."""
    lines = guest.check("dmesg --level=emerg,alert,crit,err,warn; dmesg -C").splitlines()
    return [line for line in lines if _DRIVER.search(line) and not _HARMLESS.search(line)]

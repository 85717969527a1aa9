"""The contract's bench over a real host device, for conftest.py: where PVRDMA_IBV_DEVICE names one.

Real hardware takes its own time: `settle` sleeps on the backends' descriptors, not on a clock, and comes to rest when
they have been silent for a while.
"""

import gc
import mmap
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_owner import Bell, Bench, FakeClock, Station

from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus
from pvrdma_server.backend_ibv import IbvBackend, IbvConfig
from pvrdma_server.gid_sync import GidSync, Policy

RAM_SIZE = 8 << 20
# Longer than a retransmission timer with the contract's `timeout` of 14 (67 ms), and than rxe's deferred work.
SILENCE_S = 0.15
# How long every CPU must have had nothing to do meanwhile. On a machine that has too much to do the kernel's deferred
# work comes late, and with it what the other end says of a request that is completed already.
REST_S = 0.1
# How long requests under way may stay so before the bench believes that nothing comes.
PATIENCE_S = 3.0


class IbvBench(Bench):
    """A bench that waits for real devices."""

    def settle(self, limit: int = 100_000) -> None:
        poller = select.poll()
        backends = [backend for backend in self.backends if isinstance(backend, IbvBackend)]
        for backend in backends:
            poller.register(backend.wait_fd, select.POLLIN)
        silent_s, idle_s = 0.0, _idle_s()
        for _ in range(limit):
            busy = [backend.progress(self.step_budget) for backend in backends]
            if any(busy) or poller.poll(1000 * SILENCE_S):
                silent_s, idle_s = 0.0, _idle_s()
                continue
            silent_s += SILENCE_S
            if silent_s > PATIENCE_S:
                return
            rested = all(now - then >= REST_S for now, then in zip(_idle_s(), idle_s, strict=True))
            if rested and not any(backend.under_way for backend in backends):
                return
        raise AssertionError("the backends never come to rest")

    def elapse(self, limit: int = 1000) -> None:
        self.settle(limit)


def _idle_s() -> list[float]:
    """How long each CPU has been idle since the machine's start. Source: proc(5), /proc/stat."""
    lines = Path("/proc/stat").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("cpu") and line[3] != " "]
    return [(int(word[4]) + int(word[5])) / os.sysconf("SC_CLK_TCK") for word in words]


def _backend(device: str) -> IbvBackend:
    # scripts/host/setup has given the device the contract's addresses.
    keeper = GidSync(Policy.CHECK, None, None)
    return IbvBackend(IbvConfig(device, 1, bytes(range(8))), keeper)


def _station(backend: IbvBackend, number: int) -> Station:
    fd = os.memfd_create("guest-ram")
    os.ftruncate(fd, RAM_SIZE)
    ram: Any = mmap.mmap(fd, RAM_SIZE)
    os.close(fd)
    return Station(backend, number, ram=ram)


def _close(*backends: IbvBackend) -> None:
    for backend in backends:
        backend.close()
    # A guest's memory hangs on cycles of views and regions, and there is a guest for every test.
    gc.collect()


def _bench(first: IbvBackend, second: IbvBackend | None) -> Bench:
    a = _station(first, 1)
    b = a if second is None else _station(second, 2)
    both = (first,) if second is None else (first, second)
    return IbvBench(
        FakeClock(), a, b, Bell(), lambda: _close(*both), tells_solicited=False,
        stops_at_once=True, reports_disallowed=False, differs=RXE,
    )  # fmt: skip


def loopback() -> Bench:
    """One guest that talks to itself."""
    return _bench(_backend(os.environ["PVRDMA_IBV_DEVICE"]), None)


def pair() -> Bench:
    """Two guests on one host device."""
    device = os.environ["PVRDMA_IBV_DEVICE"]
    return _bench(_backend(device), _backend(device))


BENCHES: dict[str, Callable[[], Bench]] = {"ibv-loopback": loopback, "ibv-pair": pair}

# What rxe says of a fault instead.
RXE: dict[str, dict[str, Any]] = {
    "send_too_long": {"status": WcStatus.REM_OP_ERR, "recv": WcStatus.LOC_QP_OP_ERR},
    "atomic_misaligned": {"status": WcStatus.LOC_QP_OP_ERR, "events": (), "right_errs": False},
}
# What is not for host verbs, or not for rxe, by test.
_NO_FAST_REG = "FAST_REG_MR and LOCAL_INV are not offered over host verbs"
DIFFERENCES = {
    "test_fast_registration_life": _NO_FAST_REG,
    "test_registration_is_used_by_the_next_request": _NO_FAST_REG,
    "test_bad_fast_registration": _NO_FAST_REG,
    "test_queue_pairs_run_out": "a host device has a million queue pairs",
    "test_gids_are_owned": "GIDs are the host port's; tests/host adds and removes real ones",
    "test_gsi": "QP1 goes nowhere without a relay",
    "test_remote_invalidate_of_what_may_not_be": "rxe lets a peer invalidate a user's region",
    "test_more_reads_than_the_responder_allows": "rxe takes more reads than it has said",
    "test_fault[write_imm_to_refused]": "the host uses a receive up without looking where no data goes to it",
}


def difference(nodeid: str) -> str | None:
    """Why a contract test is not for host verbs, or None."""
    name = nodeid.rpartition("::")[2]
    function, _, parameters = name.partition("[")
    case = parameters.removesuffix("]").split("-", 2)[-1]
    return DIFFERENCES.get(function) or DIFFERENCES.get(f"{function}[{case}]")

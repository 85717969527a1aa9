"""The contract's bench over a real host device, for conftest.py: where PVRDMA_IBV_DEVICE names one.

Real hardware takes its own time: `settle` sleeps on the backends' descriptors, not on a clock, and comes to rest when
they have been silent for a while.
"""

import gc
import mmap
import os
import select
from collections.abc import Callable
from typing import Any

from fake_owner import Bell, Bench, FakeClock, Station

from pvrdma_server.backend_ibv import IbvBackend, IbvConfig
from pvrdma_server.gid_sync import GidSync, Policy

RAM_SIZE = 8 << 20
# Longer than a retransmission timer with the contract's `timeout` of 14 (67 ms), and than rxe's deferred work.
SILENCE_S = 0.15


class IbvBench(Bench):
    """A bench that waits for real devices."""

    def settle(self, limit: int = 100_000) -> None:
        poller = select.poll()
        for backend in self.backends:
            assert isinstance(backend, IbvBackend)
            poller.register(backend.wait_fd, select.POLLIN)
        for _ in range(limit):
            busy = [backend.progress(self.step_budget) for backend in self.backends]
            if not any(busy) and not poller.poll(1000 * SILENCE_S):
                return
        raise AssertionError("the backends never come to rest")

    def elapse(self, limit: int = 1000) -> None:
        self.settle(limit)


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


def loopback() -> Bench:
    """One guest that talks to itself."""
    backend = _backend(os.environ["PVRDMA_IBV_DEVICE"])
    station = _station(backend, 1)
    return IbvBench(
        FakeClock(), station, station, Bell(), lambda: _close(backend), tells_solicited=False
    )


def pair() -> Bench:
    """Two guests on one host device."""
    first, second = (_backend(os.environ["PVRDMA_IBV_DEVICE"]) for _ in range(2))

    stations = _station(first, 1), _station(second, 2)
    return IbvBench(
        FakeClock(), *stations, Bell(), lambda: _close(first, second), tells_solicited=False
    )


BENCHES: dict[str, Callable[[], Bench]] = {"ibv-loopback": loopback, "ibv-pair": pair}

# What the contract asks of the embedded backend alone, by test: host verbs promise less, or rxe keeps less.
_NO_FAST_REG = "FAST_REG_MR and LOCAL_INV are not offered over host verbs"
_RXE_STOPS = "rxe stops at a local error at once, and flushes requests before it that are under way"
_RXE_STATUS = "rxe reports this error by another status"
_AHEAD = "the host takes requests ahead of messages"
DIFFERENCES = {
    "test_users_get_no_memory_operations": _NO_FAST_REG,
    "test_fast_registration_life": _NO_FAST_REG,
    "test_registration_is_used_by_the_next_request": _NO_FAST_REG,
    "test_bad_fast_registration": _NO_FAST_REG,
    "test_remote_invalidate_of_what_may_not_be": _NO_FAST_REG,
    "test_keys_are_not_reused_soon": _NO_FAST_REG,
    "test_queue_pairs_run_out": "a host device has a million queue pairs",
    "test_gid_table": "GIDs are the host port's; tests/host adds and removes real ones",
    "test_gsi": "QP1s of two backends meet in the MAD hub only; tests/host/test_cm.py has it",
    "test_shared_receive_queue": _AHEAD,
    "test_immediate": _AHEAD,
    "test_flush_is_complete_and_in_order": _AHEAD,
    "test_datagram": "RoCE v2 over IPv4 delivers the IPv4 header in the GRH's last 20 bytes",
    "test_memory_unmapped_below_a_region": "a region stays registered while the client maps its memory anew",
    "test_srq_receive_in_use_is_flushed_before_last_wqe": _RXE_STATUS,
    "test_operation_not_enabled_on_the_qp": "rxe raises no event for it",
    "test_more_reads_than_the_responder_allows": "rxe takes more reads than it has said",
    "test_fault[send_to_refused]": "a receive the host will not take stops its queue pair at once",
    "test_fault[write_imm_to_refused]": "a receive the host will not take stops its queue pair at once",
    "test_fault[wrong_arm]": "the core never makes such a request",
} | {
    f"test_fault[{case}]": _RXE_STOPS
    for case in (
        "send_unknown_lkey", "send_other_pd", "send_beyond_region", "send_before_region",
        "send_wrapping_address", "read_into_unwritable", "atomic_into_unwritable",
    )
} | {
    f"test_fault[{case}]": _RXE_STATUS
    for case in (
        "atomic_result_too_short", "message_too_long", "send_too_long", "send_to_bad_lkey",
        "send_to_unwritable", "atomic_misaligned",
    )
}  # fmt: skip


def difference(nodeid: str) -> str | None:
    """Why a contract test is not for host verbs, or None."""
    name = nodeid.rpartition("::")[2]
    function, _, parameters = name.partition("[")
    case = parameters.removesuffix("]").split("-", 2)[-1]
    return DIFFERENCES.get(function) or DIFFERENCES.get(f"{function}[{case}]")

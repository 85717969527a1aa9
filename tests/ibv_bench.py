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

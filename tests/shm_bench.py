"""A bench of two embedded backends over the shared-memory fabric: a folder, sockets and rings as in servers."""

import select
import shutil
import tempfile
from typing import Any

from fake_owner import Bell, Bench, FakeClock, Station

from pvrdma_server.backend_soft import SoftBackend, SoftConfig
from pvrdma_server.backend_soft.shm_fabric import ShmFabric


def is_ready(*fabrics: ShmFabric) -> bool:
    """Whether any of them has something to do."""
    poller = select.poll()
    for fabric in fabrics:
        poller.register(fabric.fd, select.POLLIN)
    return bool(poller.poll(0))


class PumpedBackend(SoftBackend):
    """A backend that does its fabric's I/O in `progress`, as the tasks of a server do beside it."""

    def __init__(self, fabric: ShmFabric, clock: FakeClock, **options: Any) -> None:
        super().__init__(clock_ns=clock, fabric=fabric, **options)
        self.fabric, self.clock = fabric, clock
        self.all = [fabric]

    def progress(self, budget_bytes: int) -> bool:
        self.fabric.ready()
        return super().progress(budget_bytes) or is_ready(*self.all)

    def next_deadline_ns(self) -> int | None:
        own = super().next_deadline_ns()
        timeout_s = self.fabric.timeout_s
        if timeout_s is None:
            return own
        tick = self.clock.now_ns + int(timeout_s * 1e9)
        return tick if own is None else min(own, tick)

    def close(self) -> None:
        super().close()
        self.fabric.close()


def shm_pair(folder: str, clock: FakeClock, bell: Bell, **config: Any) -> list[PumpedBackend]:
    """Two backends that meet in `folder`."""
    backends = [
        PumpedBackend(
            ShmFabric(folder, name, clock_ns=clock),
            clock,
            on_work=bell,
            config=SoftConfig(name=name, **config),
        )
        for name in ("vm1", "vm2")
    ]
    for backend in backends:
        backend.all = [each.fabric for each in backends]
    return backends


def shm_bench(*, size: int = 8 << 20, **config: Any) -> Bench:
    """Two guests on two backends."""
    folder = tempfile.mkdtemp(prefix="pvrdma-fabric-")
    clock, bell = FakeClock(), Bell()
    first, second = shm_pair(folder, clock, bell, **config)

    def close() -> None:
        first.close()
        second.close()
        shutil.rmtree(folder)

    return Bench(clock, Station(first, 1, size=size), Station(second, 2, size=size), bell, close)

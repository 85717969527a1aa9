"""The benches every backend must pass the contract on; a backend adds its makers to `BENCHES`."""

import os
from collections.abc import Callable, Iterator

import pytest
from fake_owner import Bell, Bench, FakeClock, Station
from shm_bench import shm_bench

from pvrdma_server.backend_soft import LocalFabric, SoftBackend, SoftConfig


def soft_loopback() -> Bench:
    clock, bell = FakeClock(), Bell()
    backend = SoftBackend(clock_ns=clock, on_work=bell, config=SoftConfig(chunk_bytes=64 << 10))
    station = Station(backend, 1)
    return Bench(clock, station, station, bell, backend.close)


def soft_pair() -> Bench:
    clock, fabric, bell = FakeClock(), LocalFabric(), Bell()
    config = SoftConfig(chunk_bytes=64 << 10)
    first = SoftBackend(clock_ns=clock, on_work=bell, fabric=fabric, config=config)
    second = SoftBackend(clock_ns=clock, on_work=bell, fabric=fabric, config=config)

    def close() -> None:
        first.close()
        second.close()

    return Bench(clock, Station(first, 1), Station(second, 2), bell, close)


SOFT_BENCHES: dict[str, Callable[[], Bench]] = {
    "loopback": soft_loopback,
    "pair": soft_pair,
    "shm": lambda: shm_bench(chunk_bytes=64 << 10),
}
BENCHES = SOFT_BENCHES
if "PVRDMA_IBV_DEVICE" in os.environ:
    import ibv_bench

    BENCHES = ibv_bench.BENCHES


@pytest.fixture(params=list(BENCHES))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = BENCHES[request.param]()
    yield made
    made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if BENCHES is not SOFT_BENCHES and (why := ibv_bench.difference(item.nodeid)):
            item.add_marker(pytest.mark.skip(reason=why))

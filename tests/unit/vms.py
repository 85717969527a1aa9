"""Two virtual machines over the embedded backend, and connected queue pairs in them."""

from typing import NamedTuple

from guest import (
    Driver,
    Kernel,
    Machine,
    Qp,
    UserProcess,
    World,
    connect,
)

from pvrdma_server.backend_soft import LocalFabric, SoftBackend, SoftConfig
from pvrdma_server.caps import DeviceConfig

GIDS = [bytes.fromhex(f"fe80000000000000020000fffe00000{n}") for n in (1, 2)]


class Vm:
    """One machine, its driver and its kernel."""

    def __init__(self, world: World, fabric: LocalFabric, number: int) -> None:
        config = SoftConfig(name=f"vm{number}", node_guid=bytes([2, 0, 0, 255, 254, 0, 0, number]))
        backend = SoftBackend(
            clock_ns=world.clock, fabric=fabric, on_work=world.wake, config=config
        )
        self.machine = Machine(backend, world=world, config=DeviceConfig(max_uar=8))
        self.driver: Driver = self.machine.boot()
        self.kernel = Kernel(self.driver)
        self.gid = GIDS[number]
        self.kernel.add_gid(self.gid)

    def process(self) -> UserProcess:
        return UserProcess(self.driver)


class Pair(NamedTuple):
    """Two machines of one host."""

    a: Vm
    b: Vm


class Ends(NamedTuple):
    """A connected pair of RC queue pairs of two processes, with 64 KiB of memory each."""

    a: Qp
    b: Qp


def rc(pair: Pair, *, in_kernel: bool = False, **options: object) -> Ends:
    owners = [vm.kernel if in_kernel else vm.process() for vm in pair]
    ends = Ends(*(Qp(owner, **options) for owner in owners))  # type: ignore[arg-type]
    connect(ends.a, ends.b, pair.a.gid, pair.b.gid)
    return ends


def pattern(length: int, seed: int = 1) -> bytes:
    return bytes((seed + 7 * n) & 0xFF for n in range(length))

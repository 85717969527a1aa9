"""A virtual machine in this process: RAM, a device behind `Regions`, and the bus between a driver and it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from guest_driver import Driver
from guest_ram import GuestRam

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.backend import RdmaBackend
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.device import PvrdmaDevice
from pvrdma_server.regions import Regions
from pvrdma_server.watches import RingWatch

BUDGET_BYTES = 1 << 20


@dataclass(slots=True)
class Clock:
    """Time that passes when a test says so; nanoseconds."""

    now_ns: int = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


@dataclass(slots=True)
class World:
    """The machines that know each other, and their time."""

    clock: Clock = field(default_factory=Clock)
    machines: "list[Machine]" = field(default_factory=list)
    woken: bool = False

    def wake(self) -> None:
        """A backend has something to do (its `on_work`)."""
        self.woken = True

    def wait(self) -> bool:
        """Run every device until all are idle; if all were idle already, let time pass to the next deadline."""
        if self.run():
            return True
        deadlines = [m.device.backend.next_deadline_ns() for m in self.machines]
        known = [deadline for deadline in deadlines if deadline is not None]
        if not known:
            return False
        self.clock.now_ns = max(self.clock.now_ns, min(known))
        self.run()
        return True

    def run(self) -> bool:
        """Run every device until all are idle; whether there was anything to do."""
        anything, more = False, 1
        while more or self.woken:
            self.woken = False
            more = sum(machine.device.progress(BUDGET_BYTES) for machine in self.machines)
            anything |= bool(more or self.woken)
        return anything


class Machine:
    """One VM. Implements `guest_driver.Bus` and the device's `InterruptSink`."""

    def __init__(
        self,
        backend: RdmaBackend,
        *,
        config: DeviceConfig | None = None,
        ram: GuestRam | None = None,
        world: World | None = None,
        watch: RingWatch | None = None,
    ) -> None:
        self.ram = ram or GuestRam()
        self.world = world or World()
        self.world.machines.append(self)
        self._raised: set[int] = set()
        self.msix_enabled = True
        self.device = PvrdmaDevice(backend, self, config or DeviceConfig(), watch)
        self.regions = Regions(self.device)
        self.map_ram()

    def boot(self, *, driver_version: int = api.PVRDMA_VERSION, vectors: int = 3) -> Driver:
        """Load the driver."""
        return Driver(self, self.ram, driver_version=driver_version, vectors=vectors).probe()

    def map_ram(self) -> None:
        self.device.dma_map(self.ram.iova, self.ram.size, self.ram.view, writable=True)

    def unmap_ram(self) -> None:
        self.device.dma_unmap(self.ram.iova, self.ram.size)

    def counts(self) -> dict[str, int]:
        return self.device.resources.counts()

    def errors(self) -> int:
        """Guest errors counted so far."""
        return sum(self.device.counters.guest_errors.values())

    # --- Bus -------------------------------------------------------------------------------------------------------

    def read32(self, bar: int, offset: int) -> int:
        return int.from_bytes(self.regions.bar_read(bar, offset, 4), "little")

    def write32(self, bar: int, offset: int, value: int) -> None:
        self.regions.bar_write(bar, offset, value.to_bytes(4, "little"))

    def take_interrupts(self) -> set[int]:
        raised, self._raised = self._raised, set()
        return raised

    def wait(self) -> bool:
        return self.world.wait()

    # --- InterruptSink ---------------------------------------------------------------------------------------------

    def trigger(self, vector: int) -> bool:
        if self.msix_enabled:
            self._raised.add(vector)
        return self.msix_enabled


def nothing_left(counts: dict[str, int], but: Sequence[str] = ()) -> bool:
    """No object of any kind, except those kinds."""
    return not any(count for kind, count in counts.items() if kind not in but)

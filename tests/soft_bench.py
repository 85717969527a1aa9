"""Benches of the embedded backend for its own tests: a fabric that loses, doubles and delays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_owner import Bell, Bench, FakeClock, Station

from pvrdma_server.backend_soft import LocalFabric, SoftBackend, SoftConfig
from pvrdma_server.backend_soft.carrier import Endpoint, Fabric
from pvrdma_server.backend_soft.fast_path import Many, Posted
from pvrdma_server.errors import BackendError

OK, DROP, TWICE, LATE, FULL = "ok", "drop", "twice", "late", "full"


@dataclass(slots=True, eq=False)
class FaultyLink:
    """A carrier that does to each message what the fabric's script says next."""

    fabric: "FaultyFabric"
    source: "FaultyPort"
    target: "FaultyPort"

    def send(self, header: bytes, payload: Sequence[memoryview]) -> bool:
        action = next(self.fabric.script, OK)
        message = (self, header, [memoryview(bytes(view)) for view in payload])
        inbox = self.target.inbox
        if action == FULL:
            self.source.refused.append(self)
            return False
        if action == LATE and inbox:
            inbox.insert(len(inbox) - 1, message)
        elif action != DROP:
            inbox.append(message)
        if action == TWICE:
            inbox.append(message)
        self.target.endpoint.wake()
        return True

    def send_many(self, what: Many) -> Posted | None:
        return None


@dataclass(slots=True, eq=False)
class FaultyPort:
    fabric: "FaultyFabric"
    endpoint: Endpoint
    inbox: list[tuple[FaultyLink, bytes, list[memoryview]]] = field(default_factory=list)
    refused: list[FaultyLink] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        return bool(self.inbox or self.refused)

    def claim(self, gid: bytes) -> None:
        if self.fabric.owners.setdefault(gid, self) is not self:
            raise BackendError(98, "add_gid")

    def release(self, gid: bytes) -> None:
        self.fabric.owners.pop(gid, None)

    def route(self, gid: bytes) -> FaultyLink | None:
        owner = self.fabric.owners.get(gid)
        if owner is None:
            return None
        return self.fabric.links.setdefault(
            (id(self), id(owner)), FaultyLink(self.fabric, self, owner)
        )

    def poll(self, messages: int) -> int:
        for link in self.refused[:]:
            self.refused.remove(link)
            self.endpoint.room(link)
        count = min(messages, len(self.inbox))
        for _ in range(count):
            link, header, payload = self.inbox.pop(0)
            back = self.fabric.links.setdefault(
                (id(self), id(link.source)), FaultyLink(self.fabric, self, link.source)
            )
            self.endpoint.receive(back, header, payload)
        return count

    def linger(self) -> bool:
        return False

    def leave(self) -> None:
        self.inbox.clear()


@dataclass(slots=True)
class FaultyFabric:
    script: Iterator[str] = field(default_factory=lambda: iter(()))
    owners: dict[bytes, FaultyPort] = field(default_factory=dict)
    links: dict[tuple[int, int], FaultyLink] = field(default_factory=dict)

    def join(self, endpoint: Endpoint) -> FaultyPort:
        return FaultyPort(self, endpoint)


def soft_bench(*, fabric: Fabric | None = None, size: int = 8 << 20, **config: Any) -> Bench:
    """Two embedded backends on one fabric."""
    clock, bell = FakeClock(), Bell()
    fabric = fabric or LocalFabric()
    made = SoftConfig(**config)
    first, second = (
        SoftBackend(clock_ns=clock, fabric=fabric, on_work=bell, config=made) for _ in range(2)
    )

    def close() -> None:
        first.close()
        second.close()

    return Bench(clock, Station(first, 1, size=size), Station(second, 2, size=size), bell, close)

"""The embedded backend's small parts: messages, copies, keys, timers, links, configuration."""

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvrdma_server.abi.vmw_pvrdma_abi import Sge
from pvrdma_server.backend_soft import LocalFabric, SoftConfig, wire
from pvrdma_server.backend_soft.local_fabric import LINK_MESSAGES
from pvrdma_server.backend_soft.memory import KeyTable, SoftPd
from pvrdma_server.backend_soft.scatter import copy_views, resolve_sges_untrusted
from pvrdma_server.backend_soft.timers import Timers
from pvrdma_server.errors import BackendError, ConfigError, GuestError
from pvrdma_server.guest_memory import GuestMemory, GuestPages

RC_FIELDS = (2, 3, 4, 1, 5, 6, 7, 8, 9, 10, 11, b"imm!", 12, 13, 14)
RC_BYTES = bytes.fromhex(
    "02030401 05000000 06000000 07000000 08000000 09000000 0a00000000000000 0b000000"
    "696d6d21 0c00000000000000 0d00000000000000 0e00000000000000"
)
GID_A, GID_B = bytes(range(16)), bytes(range(16, 32))
DATAGRAM_FIELDS = (9, 3, 64, 1, 5, 6, 2, 8, 0x80010000, b"imm!", 0x700123, GID_A, GID_B)
DATAGRAM_BYTES = (
    bytes.fromhex("09034001 05000000 06000000 02000000 08000000 00000180")
    + b"imm!"
    + bytes.fromhex("23017000")
    + GID_A
    + GID_B
)


def test_rc_header_construct_and_parse() -> None:
    assert wire.pack_rc(*RC_FIELDS) == RC_BYTES
    assert len(RC_BYTES) == wire.HEADER_BYTES
    assert tuple(wire.parse_header_untrusted(RC_BYTES, 8)) == RC_FIELDS


def test_datagram_header_construct_and_parse() -> None:
    assert wire.pack_datagram(*DATAGRAM_FIELDS) == DATAGRAM_BYTES
    assert tuple(wire.parse_header_untrusted(DATAGRAM_BYTES, 8)) == DATAGRAM_FIELDS


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (RC_BYTES, 7),
        (RC_BYTES[:63], 8),
        (RC_BYTES + b"\0", 8),
        (b"\x00" + RC_BYTES[1:], 8),
        (b"\x0a" + RC_BYTES[1:], 8),
        (RC_BYTES[:3] + b"\x02" + RC_BYTES[4:], 8),
        (RC_BYTES[:15] + b"\x01" + RC_BYTES[16:], 8),
        (RC_BYTES[:35] + b"\x41" + RC_BYTES[36:], 8),
        (DATAGRAM_BYTES, 9),
    ],
    ids=[
        "length", "short", "long", "kind_0", "kind_10", "version", "psn", "total", "datagram",
    ],
)  # fmt: skip
def test_header_out_of_bounds(header: bytes, payload: int) -> None:
    with pytest.raises(wire.BadMessage):
        wire.parse_header_untrusted(header, payload)


@given(st.binary(max_size=80), st.integers(0, 1 << 20))
def test_any_header_parses_or_is_refused(header: bytes, payload: int) -> None:
    with contextlib.suppress(GuestError):
        wire.parse_header_untrusted(header, payload)


@given(st.binary(max_size=100), st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)))
def test_copy_between_any_pieces(data: bytes, source_cuts: list[int], cuts: list[int]) -> None:
    target = bytearray(120)
    copy_views(pieces(memoryview(target), cuts), pieces(memoryview(data), source_cuts))
    assert target == data + bytes(120 - len(data))


def pieces(view: memoryview, cuts: list[int]) -> list[memoryview]:
    found = []
    for cut in cuts:
        found.append(view[:cut])
        view = view[cut:]
    return [*found, view]


@dataclass(eq=False)
class Alarm:
    deadline_ns: int | None = None
    queued_ns: int | None = None
    fired: int = 0

    def expired(self) -> None:
        self.fired += 1


def test_timer_moves_later_without_the_heap() -> None:
    timers, alarm = Timers(), Alarm()
    for deadline in range(100, 200):
        timers.set(alarm, deadline)
    assert len(timers._heap) == 1
    assert timers.next_ns() == 100
    timers.fire(198)
    assert alarm.fired == 0
    assert timers.next_ns() == 199
    timers.fire(199)
    assert (alarm.fired, alarm.deadline_ns, timers.next_ns()) == (1, None, None)


def test_timer_moves_earlier_and_is_cancelled() -> None:
    timers, alarm, other = Timers(), Alarm(), Alarm()
    timers.set(alarm, 1000)
    timers.set(alarm, 10)
    timers.set(other, 500)
    assert timers.next_ns() == 10
    alarm.deadline_ns = None
    timers.fire(10)
    assert timers.next_ns() == 500
    timers.fire(2000)
    assert (alarm.fired, other.fired) == (0, 1)
    assert timers.next_ns() is None


def test_alternating_deadlines_leave_nothing_behind() -> None:
    """A guest whose QP goes between a short RNR timer and a long retry timer."""
    timers, alarm = Timers(), Alarm()
    for now in range(10_000):
        timers.set(alarm, now + 10**9)
        timers.set(alarm, now)
        timers.fire(now)
    assert alarm.fired == 10_000
    assert len(timers._heap) <= 65


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100) | st.none()), max_size=40))
def test_timers_fire_when_due(steps: list[tuple[int, int | None]]) -> None:
    timers, alarms = Timers(), [Alarm() for _ in range(4)]
    for who, deadline in steps:
        if deadline is None:
            alarms[who].deadline_ns = None
        else:
            timers.set(alarms[who], deadline)
    due = {i: a.deadline_ns for i, a in enumerate(alarms) if a.deadline_ns is not None}
    for now in range(101):
        at, left = timers.next_ns(), [d for d in due.values() if d >= now]
        assert now <= at <= min(left) if left and at is not None else not left
        timers.fire(now)
        assert [a.fired for a in alarms] == [int(due.get(i, 101) <= now) for i in range(4)]


def keys() -> tuple[KeyTable, SoftPd, GuestMemory]:
    memory = GuestMemory()
    memory.add_region(0x10000, 0x8000, memoryview(bytearray(0x8000)), writable=True)
    return KeyTable(100), SoftPd(True, set()), memory


def test_sge_list_resolution() -> None:
    table, pd, memory = keys()
    pages = GuestPages(memory, [0x12000, 0x11000], writable=True)
    mr = table.add_user(pd, start=0x5010, length=8000, access=1, pages=pages)
    sges = [Sge(0x5010, 10, mr.lkey), Sge(0, 0, 0), Sge(0x5010 + 4000, 200, mr.lkey)]
    whole = resolve_sges_untrusted(table, pd, sges, 0, 210, 1)
    assert [len(view) for view in whole] == [10, 80, 120]
    part = resolve_sges_untrusted(table, pd, sges, 15, 180, 1)
    assert [len(view) for view in part] == [75, 105]


def test_key_with_another_tag_is_another_key() -> None:
    table, pd, memory = keys()
    pages = GuestPages(memory, [0x12000], writable=True)
    mr = table.add_user(pd, start=0, length=4096, access=1, pages=pages)
    table.resolve_untrusted(pd, mr.lkey, 0, 1, 0)
    for key in (mr.lkey ^ 1, mr.lkey ^ 0x100, mr.lkey ^ 0x80, 0, 0xFFFFFFFF):
        with pytest.raises(GuestError):
            table.resolve_untrusted(pd, key, 0, 1, 0)
        with pytest.raises(GuestError):
            table.check_untrusted(pd, key, 0, 1, 0)


def test_regions_run_out_and_indices_come_back() -> None:
    table, pd, _ = keys()
    made = [table.add_fast_reg(pd, max_pages=1) for _ in range(100)]
    with pytest.raises(BackendError):
        table.add_fast_reg(pd, max_pages=1)
    for _ in range(2000):
        made.pop(0).destroy()
        made.append(table.add_fast_reg(pd, max_pages=1))
    assert len(table) == len({mr.lkey >> 8 for mr in made}) == 100


def test_region_that_does_not_fit_its_pages() -> None:
    table, pd, memory = keys()
    pages = GuestPages(memory, [0x12000], writable=True)
    with pytest.raises(BackendError):
        table.add_user(pd, start=0x10, length=4081, access=1, pages=pages)


@dataclass(eq=False)
class Listener:
    name: str = "listener"
    heard: list[bytes] = field(default_factory=list)
    rooms: int = 0
    wakes: int = 0

    def receive(self, _peer: object, header: bytes, _payload: object) -> None:
        self.heard.append(header)

    def offer(self, _peer: object, _qpn: int, _kind: int) -> None:
        return None

    def landed(self, _run: object, _landed: object) -> None:
        raise AssertionError("nothing was offered")

    def lane(self, _peer: object) -> None:
        return None

    def drove(self, _lane: object, _drove: object) -> None:
        raise AssertionError("nothing was offered")

    def room(self, _carrier: object) -> None:
        self.rooms += 1

    def wake(self) -> None:
        self.wakes += 1


def test_link_is_bounded_and_says_when_there_is_room() -> None:
    fabric, here, there = LocalFabric(), Listener(), Listener()
    left, right = fabric.join(here), fabric.join(there)
    right.claim(GID_A)
    link = left.route(GID_A)
    assert link is not None
    assert link is left.route(GID_A)
    for index in range(LINK_MESSAGES):
        assert link.send(b"%d" % index, ())
    assert not link.send(b"too much", ())
    assert there.wakes == 1
    while right.pending:
        right.poll(50)
    assert there.heard == [b"%d" % index for index in range(LINK_MESSAGES)]
    assert here.rooms == 1
    assert link.queued_bytes == 0


def test_a_port_that_leaves_takes_its_gids_along() -> None:
    fabric, here, there = LocalFabric(), Listener(), Listener()
    left, right = fabric.join(here), fabric.join(there)
    right.claim(GID_A)
    link = left.route(GID_A)
    assert link is not None
    while link.send(b"", (memoryview(bytes(100_000)),)):
        pass
    right.leave()
    assert here.rooms == 1
    assert left.route(GID_A) is None
    left.claim(GID_A)
    assert not right.pending


def test_a_talkative_peer_does_not_delay_another() -> None:
    fabric, hub = LocalFabric(), Listener()
    middle = fabric.join(hub)
    middle.claim(GID_A)
    loud, quiet = (fabric.join(Listener()).route(GID_A) for _ in range(2))
    assert loud is not None
    assert quiet is not None
    for _ in range(200):
        loud.send(b"loud", ())
    quiet.send(b"quiet", ())
    middle.poll(32)
    assert b"quiet" in hub.heard


@pytest.mark.parametrize(
    "values",
    [
        {"max_qp": 65536}, {"max_qp": 2}, {"chunk_bytes": 0}, {"chunk_bytes": 1 << 20},
        {"max_msg_size": 2 << 30}, {"max_mr": 1 << 23}, {"node_guid": b""},
    ],
    ids=str,
)  # fmt: skip
def test_bad_configuration(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SoftConfig(**values)  # type: ignore[arg-type]

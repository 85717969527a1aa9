"""What a hostile client or peer may cost the hub and the others: turns, entries, lanes, lines."""

import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from unit.fake_mad_hub import Clock
from unit.mad_hub_bed import HubBed, play
from unit.mads import GID_A, GID_B, GID_C, GID_NET, rep, req, rtu

from pvrdma_server.abi.mad import CmAttrId
from pvrdma_server.mad_frames import Datagram, Send, encode
from pvrdma_server.mad_hub.cm import parse
from pvrdma_server.mad_hub.connections import ConnectionTable
from pvrdma_server.mad_hub.lanes import LEFT_S
from pvrdma_server.mad_hub.quiet_log import INFO_LINES, LOG_INTERVAL_S, MAX_KEYS, QuietLog

AWAY = Datagram(GID_A, GID_B, b"")
BACK = Datagram(GID_B, GID_A, b"")


def asked(table: ConnectionTable, ids: Iterable[int]) -> None:
    """The peer has sent REQs."""
    for number in ids:
        table.received(BACK, parse(req(number, GID_B, GID_A, tid=number)))


# --- entries ---------------------------------------------------------------------------------------------------------


def test_a_flood_of_reqs_costs_no_connection_that_both_ends_wanted() -> None:
    table = ConnectionTable(max_connections=4)
    asked(table, [1])
    table.sent(AWAY, parse(rep(100, 1)))
    table.received(BACK, parse(rtu(1, 100)))
    asked(table, range(2, 50))
    assert [(e.peer_id, e.established) for e in table] == [
        (47, False),
        (48, False),
        (49, False),
        (1, True),
    ]
    assert (len(table), table.established, table.evicted) == (4, 1, 45)
    kinds = [parse(farewell.payload).attr_id for farewell in table.end(GID_A)]
    assert sorted(kinds) == [*[CmAttrId.REJ] * 3, CmAttrId.DREQ]
    assert (len(table), table.established) == (0, 0)


@pytest.mark.parametrize("replied", [False, True], ids=["RTU", "REP and RTU"])
def test_who_asks_cannot_answer_for_the_other(replied: bool) -> None:
    """The peer's own REP and RTU to its own REQ establish nothing."""
    table = ConnectionTable()
    asked(table, [1])
    if replied:
        table.received(BACK, parse(rep(1, 1)))
    table.received(BACK, parse(rtu(1, 1)))
    assert table.established == 0


def test_established_ones_go_when_there_is_nothing_else() -> None:
    table = ConnectionTable(max_connections=2)
    for number in range(1, 4):
        asked(table, [number])
        table.sent(AWAY, parse(rep(100 + number, number)))
        table.received(BACK, parse(rtu(number, 100 + number)))
    assert [e.peer_id for e in table] == [2, 3]
    asked(table, [4, 5, 6])
    assert [e.peer_id for e in table] == [6, 3]


def lines_run(call: Any, *args: object) -> int:
    """How many lines of Python a call takes."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*args)
    finally:
        sys.settrace(before)
    return count


def test_messages_cost_no_more_when_there_are_many_entries() -> None:
    def costs(entries: int) -> list[int]:
        table = ConnectionTable()
        asked(table, range(1, entries))
        table.sent(Datagram(GID_C, GID_B, b""), parse(req(7, GID_C, GID_B)))
        new = parse(req(entries + 1, GID_B, GID_A, tid=0))
        return [
            lines_run(table.end, GID_C),
            lines_run(table.end, GID_C),
            lines_run(table.received, BACK, new),
            lines_run(lambda: table.established),
        ]

    assert costs(10) == costs(1000)


# --- turns -----------------------------------------------------------------------------------------------------------


class Turns(trio.abc.Instrument):
    """The most of something that one step of a task does."""

    def __init__(self, count: Any) -> None:
        self.most = 0
        self._count = count
        self._before = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._before = self._count()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.most = max(self.most, self._count() - self._before)


def test_a_client_that_floods_leaves_others_their_turn(tmp_path: Path) -> None:
    flood = encode(Send(Datagram(GID_A, GID_NET, rtu(1, 2)))) * 500

    async def act(bed: HubBed) -> None:
        async with bed.client("a", GID_A) as a:
            (flooder,) = bed.hub.switch.clients.values()
            turns = Turns(lambda: flooder.sent)
            trio.lowlevel.add_instrument(turns)
            await a.stream.send_all(flood)
            await bed.until(lambda: flooder.sent == 500)
            trio.lowlevel.remove_instrument(turns)
            assert 0 < turns.most <= 16

    play(tmp_path, act, network=False)


# --- lanes -----------------------------------------------------------------------------------------------------------


def test_a_lane_does_not_outlive_its_client_for_long(tmp_path: Path) -> None:
    """A peer that cannot be resolved costs a second a farewell, and a guest may have thousands of such peers."""
    clock = trio.testing.MockClock()

    async def act(bed: HubBed) -> None:
        bed.port.unresolved.add(GID_NET)
        bed.port.resolved.set()
        async with bed.client("a", GID_A) as a:
            for number in range(1, 11):
                await a.send(GID_A, GID_NET, req(number, GID_A, GID_NET))
                await bed.port.outgoing.receive()
            bed.port.resolved.clear()
            bed.port.waiting = trio.Event()
        await bed.port.waiting.wait()
        await bed.until(lambda: bed.hub.switch.counters.farewells == 10)
        clock.jump(LEFT_S)
        bed.port.resolved.set()
        await bed.until(lambda: bed.port.senders_open == 0)
        assert bed.port.outgoing.statistics().current_buffer_used == 1
        assert bed.drops() == {"send_failed": 9}

    play(tmp_path, act, clock=clock)


# --- lines -----------------------------------------------------------------------------------------------------------


def test_names_do_not_flood_the_log() -> None:
    clock = Clock()
    with structlog.testing.capture_logs() as lines:
        log = QuietLog(clock)
        log.info("came", client="first")
        for number in range(2 * MAX_KEYS):
            log.info("came", client=f"vm{number}")
        assert len(lines) == MAX_KEYS
        # Who was known goes on.
        for _ in range(INFO_LINES):
            log.info("came", client="first")
        assert len(lines) == MAX_KEYS + INFO_LINES - 1
        clock.now_s += LOG_INTERVAL_S
        log.info("came", client="another")
        log.info("came", client="first")
        assert [line["client"] for line in lines[-2:]] == ["another", "first"]

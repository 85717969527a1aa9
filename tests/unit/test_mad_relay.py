"""The server's end of the MAD relay and a hub that answers, refuses, is silent, talks nonsense, dies and comes back."""

import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from fake_hub import FakeHub
from gsi_bench import BASE, MINE, PEER, Qp1, from_peer, sge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pvrdma_server import mad_relay
from pvrdma_server.errors import BackendError
from pvrdma_server.mad_dialect import MAX_SAID_BYTES
from pvrdma_server.mad_frames import (
    Datagram,
    Dropped,
    DropReason,
    Ok,
    RefuseCode,
    Refused,
    Register,
    Send,
    Unregister,
)
from pvrdma_server.mad_relay import MAX_OUTGOING_BYTES, MadRelay, NoRelay

DEADLINE_S = 60.0
OTHER = bytes(10) + b"\xff\xff\x0a\x00\x00\x09"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may be slow; no test waits for it in vain."""
    monkeypatch.setattr(mad_relay, "ANSWER_WAIT_S", 30.0)
    monkeypatch.setattr(mad_relay, "PATIENCE_S", 30.0)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    made = FakeHub(tmp_path)
    yield made
    made.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        with trio.fail_after(DEADLINE_S):
            await test()

    trio.run(within)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.002)


@asynccontextmanager
async def running(path: str, *, linked: bool = True) -> AsyncIterator[MadRelay]:
    """A relay whose task runs; what arrives is in its `got`."""
    relay: Any = MadRelay(path, "vm1")
    relay.got = []
    relay.on_datagram = relay.got.append
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        if linked:
            await until(lambda: bool(relay.connected))
        yield relay
        nursery.cancel_scope.cancel()
    relay.close()


def gid_states(relay: MadRelay) -> dict[str, str]:
    gids: Any = relay.facts()["gids"]
    return {gid: entry["state"] for gid, entry in gids.items()}


def test_registers_carries_and_gives_up(hub: FakeHub) -> None:
    async def body() -> None:
        async with running(hub.path) as relay:
            assert hub.clients.get() == "vm1"
            relay.claim(MINE, 2)
            assert hub.next() == Register(MINE, 2)
            assert gid_states(relay) == {MINE.hex(): "owned"}
            out = Datagram(MINE, PEER, bytes(range(256)), flow_label=1, network_type=1)
            assert relay.send(out)
            assert hub.next() == Send(out)
            hub.say(from_peer())
            await until(lambda: bool(relay.got))  # type: ignore[attr-defined]
            assert relay.got == [from_peer()]  # type: ignore[attr-defined]
            relay.release(MINE)
            assert hub.next() == Unregister(MINE)
            relay.release(MINE)
            facts = relay.facts()
            assert (facts["state"], facts["hub"], facts["gids"]) == ("connected", "fake hub", {})
            assert (facts["sent"], facts["received"], facts["links"]) == (1, 1, 1)

    run(body)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (RefuseCode.HELD_BY_ANOTHER, errno.EADDRINUSE),
        (RefuseCode.BAD_GID, errno.EINVAL),
        (RefuseCode.TOO_MANY, errno.ENOSPC),
        (RefuseCode.NOT_REGISTERED, errno.EADDRINUSE),
    ],
)
def test_a_refusal_in_time_fails_the_command(hub: FakeHub, code: RefuseCode, expected: int) -> None:
    hub.refuse[MINE] = code

    async def body() -> None:
        async with running(hub.path) as relay:
            with capture_logs() as logs, pytest.raises(BackendError) as refused:
                relay.claim(MINE, 2)
            assert refused.value.errno == expected
            assert "it is vm7's" in str(refused.value)
            assert gid_states(relay) == {}
            assert [line["log_level"] for line in logs if line["event"] == "gid_refused"] == [
                "error"
            ]
            # Nothing of it is left: the next one is asked for anew.
            hub.refuse.clear()
            relay.claim(MINE, 2)
            assert gid_states(relay) == {MINE.hex(): "owned"}

    run(body)


def test_a_refusal_that_comes_late_is_told_and_asked_again(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mad_relay, "ASK_AGAIN_S", 0.01)
    hub.refuse[MINE] = RefuseCode.HELD_BY_ANOTHER

    async def body() -> None:
        async with running("", linked=False) as relay:
            relay.claim(MINE, 2)  # no link yet: nobody can know
            assert gid_states(relay) == {MINE.hex(): "asked"}
            with capture_logs() as logs:
                relay._path = hub.path
                await until(lambda: gid_states(relay) == {MINE.hex(): "refused"})
                await until(lambda: hub.heard.qsize() > 3)
            facts: Any = relay.facts()
            assert facts["gids"][MINE.hex()]["why"] == "it is vm7's"
            assert [line["event"] for line in logs].count("gid_refused") == 1
            hub.refuse.clear()
            await until(lambda: gid_states(relay) == {MINE.hex(): "owned"})

    run(body)


def test_a_hub_that_does_not_answer_holds_up_one_command_only(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mad_relay, "ANSWER_WAIT_S", 0.01)
    waits: list[float] = []
    wait = MadRelay._wait_for_answers

    def counted(self: MadRelay, wait_s: float) -> None:
        waits.append(wait_s)
        wait(self, wait_s)

    monkeypatch.setattr(MadRelay, "_wait_for_answers", counted)

    async def body() -> None:
        async with running(hub.path) as relay:
            hub.silent = True
            for number in range(50):
                relay.claim(bytes([number + 1]) * 16, 2)
            assert waits == [0.01]
            assert set(gid_states(relay).values()) == {"asked"}
            for _ in range(50):
                question = hub.next()
                assert isinstance(question, Register)
                hub.say(Ok(question.gid))
            await until(lambda: set(gid_states(relay).values()) == {"owned"})

    run(body)


def test_a_hub_that_is_slow_each_time_holds_us_up_for_so_long_only(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest's many GIDs may each have connections to end that take their time."""
    now_s = 0.0
    monkeypatch.setattr(mad_relay, "PATIENCE_S", 2.0)
    monkeypatch.setattr(mad_relay, "time", SimpleNamespace(monotonic=lambda: now_s))
    wait = MadRelay._wait_for_answers

    def slow(self: MadRelay, wait_s: float) -> None:
        nonlocal now_s
        wait(self, 30.0)
        now_s += max(0.0, min(wait_s, 0.9))

    async def body() -> None:
        nonlocal now_s
        async with running(hub.path) as relay:
            for number in range(50):
                relay.claim(bytes([number + 1]) * 16, 2)
            monkeypatch.setattr(MadRelay, "_wait_for_answers", slow)
            for number in range(49):
                relay.release(bytes([number + 1]) * 16)
            assert 2.0 <= now_s <= 2.3
            now_s += 10.0
            before_s = now_s
            relay.release(bytes([50]) * 16)
            assert now_s == before_s + 0.9

    run(body)


def test_a_hub_that_comes_back_learns_everything_again(tmp_path: Path) -> None:
    async def body() -> None:
        hub = FakeHub(tmp_path)
        with capture_logs() as logs:
            async with running(hub.path) as relay:
                relay.claim(MINE, 2)
                relay.claim(OTHER, 1)
                hub.close()
                await until(lambda: not relay.connected)
                assert not relay.send(Datagram(MINE, PEER, bytes(256)))
                assert relay.facts()["send_failed"] == 1
                relay.release(OTHER)
                relay.claim(PEER, 2)
                Path(hub.path).unlink()
                again = FakeHub(tmp_path)
                await until(lambda: relay.connected)
                assert {again.next(), again.next()} == {Register(MINE, 2), Register(PEER, 2)}
                await until(lambda: set(gid_states(relay).values()) == {"owned"})
                assert relay.facts()["links"] == 2
        again.close()
        assert [line["event"] for line in logs].count("mad_hub_connected") == 2
        assert [line["event"] for line in logs].count("mad_hub_lost") == 1

    run(body)


def test_a_hub_that_says_nothing_gets_nothing(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, silent=True)

    async def body() -> None:
        async with running(hub.path, linked=False) as relay:
            assert await trio.to_thread.run_sync(hub.clients.get) == "vm1"
            assert relay.facts()["state"] == "greeting"
            assert not relay.send(Datagram(MINE, PEER, bytes(256)))

    run(body)
    hub.close()


def test_no_hub_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mad_relay, "LAST_RETRY_S", 0.001)
    monkeypatch.setattr(mad_relay, "FIRST_RETRY_S", 0.001)
    tries = []
    connect = MadRelay._connect
    monkeypatch.setattr(MadRelay, "_connect", lambda self: tries.append(1) or connect(self))  # type: ignore[func-returns-value]

    async def body() -> None:
        with capture_logs() as logs:
            async with running(str(tmp_path / "none"), linked=False) as relay:
                await until(lambda: len(tries) > 5)
                assert relay.facts()["state"] == "disconnected"
        assert [line["event"] for line in logs] == ["mad_hub_unreachable"]

    run(body)


def test_what_does_not_fit_waits_and_then_is_lost(hub: FakeHub) -> None:
    async def body() -> None:
        async with running(hub.path) as relay:
            pause = hub.heard.mutex
            out = Datagram(MINE, PEER, bytes(256))
            with pause:  # the hub's thread stops at the first message
                sent = 0
                while relay.send(out):
                    sent += 1
                    assert sent < 10_000
                assert len(relay._outgoing) <= MAX_OUTGOING_BYTES
                assert not relay.send(out)
            for _ in range(sent):
                assert await trio.to_thread.run_sync(hub.next) == Send(out)
            assert relay.send(out)
            assert relay.facts()["send_failed"] == 2

    run(body)


def test_registrations_that_do_not_fit_end_the_link_and_come_with_the_next(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mad_relay, "ANSWER_WAIT_S", 0.01)

    async def body() -> None:
        async with running(hub.path) as relay:
            with hub.heard.mutex:
                while relay.send(Datagram(MINE, PEER, bytes(256))):
                    pass
                while len(relay._outgoing) + MAX_SAID_BYTES <= MAX_OUTGOING_BYTES:
                    relay.claim(MINE, 2)
                    relay.release(MINE)
                relay.claim(OTHER, 2)
            await until(lambda: gid_states(relay) == {OTHER.hex(): "owned"})
            assert relay.facts()["links"] == 2

    run(body)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x63",
        bytes(100),
        Ok(MINE),
        Refused(MINE, 1, ""),
    ],
    ids=["length", "type", "zeros", "answer", "refusal"],
)
def test_nonsense_ends_the_link_and_not_the_relay(hub: FakeHub, nonsense: Any) -> None:
    async def body() -> None:
        async with running(hub.path) as relay:
            hub.say(nonsense)
            await until(lambda: relay.facts()["links"] == 2 and relay.connected)
            assert relay.facts()["protocol_errors"] == 1

    run(body)


def test_what_the_hub_dropped_is_counted_by_reason(hub: FakeHub) -> None:
    async def body() -> None:
        with capture_logs() as logs:
            async with running(hub.path) as relay:
                for reason in (DropReason.NO_ROUTE, DropReason.NO_ROUTE, 77):
                    hub.say(Dropped(reason, PEER))
                await until(lambda: relay.facts()["hub_dropped"] == {"no_route": 2, "unknown": 1})
        dropped = [line["reason"] for line in logs if line["event"] == "mad_dropped"]
        assert dropped == ["no_route", "unknown"]

    run(body)


def test_a_link_that_ends_during_a_claim(hub: FakeHub) -> None:
    async def body() -> None:
        async with running(hub.path) as relay:
            hub.hang_up()
            relay.claim(MINE, 2)
            await until(lambda: gid_states(relay) == {MINE.hex(): "owned"})

    run(body)


def test_without_a_hub_in_the_configuration_the_first_datagram_says_so() -> None:
    bench = Qp1(carrier=NoRelay())
    with capture_logs() as logs:
        bench.send(sge(BASE, 256))
        bench.send(sge(BASE, 256))
    assert [wc.status for wc in bench.owner.sent] == [0, 0]
    assert [line["event"] for line in logs] == ["gsi_send_dropped"]
    assert bench.dropped == {"no_carrier": 2}


def test_gids_are_given_up_after_the_task_and_before_the_link_ends(hub: FakeHub) -> None:
    async def body() -> None:
        relay = MadRelay(hub.path, "vm1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay.run)
            await until(lambda: relay.connected)
            relay.claim(MINE, 2)
            nursery.cancel_scope.cancel()
        relay.release(MINE)
        assert [hub.next(), hub.next()] == [Register(MINE, 2), Unregister(MINE)]
        relay.close()
        relay.close()
        assert not relay.connected

    run(body)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.binary(min_size=1, max_size=64), max_size=4))
def test_whatever_the_hub_sends_the_relay_lives(hub: FakeHub, parts: list[bytes]) -> None:
    async def body() -> None:
        async with running(hub.path) as relay:
            for part in parts:
                hub.say(part)
            hub.hang_up()
            await until(lambda: relay.facts()["links"] > 1 and relay.connected)  # type: ignore[operator]
            relay.claim(MINE, 2)
            await until(lambda: gid_states(relay) == {MINE.hex(): "owned"})

    run(body)

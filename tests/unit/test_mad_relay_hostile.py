"""Arbitrary frames from a hub to a guest: each MAD reaches a receive, waits for one, or is dropped and counted."""

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import structlog
from gsi_bench import BASE, MINE, PEER, Qp1, sge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pvrdma_server.mad_frames import (
    MAX_FRAME_BYTES,
    Connection,
    Datagram,
    Dropped,
    DropReason,
    FrameError,
    Hello,
    Message,
    Ok,
    Receive,
    Refused,
    Role,
    encode,
)
from pvrdma_server.mad_relay import MadRelay

gids = st.sampled_from([MINE] * 3 + [PEER, bytes(16), b"\xff" * 16])
bytes_1 = st.integers(0, 255)
datagrams = st.builds(
    Datagram,
    gids,
    gids,
    st.sampled_from([bytes(256), bytes(24)]) | st.binary(max_size=256),
    src_qp=st.integers(0, 0xFFFFFFFF),
    dst_qp=st.sampled_from([1, 1, 1, 0, 2, 0xFFFFFFFF]),
    qkey=st.integers(0, 0xFFFFFFFF),
    flow_label=st.integers(0, 0xFFFFFFFF),
    pkey_index=st.integers(0, 0xFFFF),
    sl=bytes_1,
    traffic_class=bytes_1,
    hop_limit=bytes_1,
    network_type=bytes_1,
)
# Mostly what a hub may say, so that not every stream ends at once.
said = st.one_of(
    datagrams.map(Receive),
    datagrams.map(Receive),
    st.builds(Dropped, st.sampled_from([*DropReason, 0, 99]), gids),
    st.builds(Ok, gids),
    st.builds(Refused, gids, bytes_1, st.text(max_size=20)),
).map(encode)
bodies = st.binary(min_size=1, max_size=MAX_FRAME_BYTES).map(
    lambda body: len(body).to_bytes(4, "little") + body
)
streams = st.lists(said | said | said | bodies | st.binary(max_size=8), max_size=12)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


def understood(parts: list[bytes]) -> tuple[list[Message], bool]:
    """The messages that count, and whether the link outlives them: the only question asked is that for MINE."""
    wire, messages = Connection(Role.CLIENT), list[Message]()
    asked = deque([MINE])
    for part in parts:
        if not part:
            continue
        parsed: list[Message] = []
        with suppress(FrameError):
            parsed = wire.receive_data(part)
        for message in parsed:
            if isinstance(message, Ok | Refused) and (not asked or asked.popleft() != message.gid):
                return messages, False
            messages.append(message)
        if wire.failed is not None:
            return messages, False
    return messages, True


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=streams, greets=st.sampled_from([True] * 5 + [False]), receives=st.integers(0, 6))
def test_every_mad_is_delivered_or_counted(
    tmp_path: Path, parts: list[bytes], greets: bool, receives: int
) -> None:
    path = tmp_path / "hub"
    path.unlink(missing_ok=True)
    relay = MadRelay(str(path), "vm")
    bench = Qp1(carrier=relay)
    relay.on_datagram = bench.gsi.receive
    for number in range(receives):
        bench.recv(sge(BASE + 512 * number, 296))
    parts = [encode(Hello("hub"))] * greets + parts
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        link = relay._connect()
        assert link is not None
        hub, _ = listener.accept()
    with hub:
        for part in parts:
            hub.sendall(part)
            if part and not relay._read(link):
                break
    bench.work()
    relay.close()
    messages, lives = understood(parts)
    arrived = sum(isinstance(message, Receive) for message in messages)
    ends = bench.gsi.counters.received + len(bench.gsi.waiting) + sum(bench.dropped.values())
    assert arrived == relay.counters.received == ends
    assert len(bench.owner.received) == bench.gsi.counters.received
    assert relay.counters.hub_dropped.total() == sum(isinstance(m, Dropped) for m in messages)
    assert relay.counters.protocol_errors == (not lives)

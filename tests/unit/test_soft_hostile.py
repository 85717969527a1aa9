"""Hostile peers: whatever arrives, only drops, NAKs, and errors of the peer's own QP."""

from dataclasses import fields

from fake_owner import Bench
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from soft_bench import soft_bench

from pvrdma_server.abi.pvrdma_verbs import QpState, QpType
from pvrdma_server.backend_soft import SoftBackend, wire
from pvrdma_server.backend_soft.counters import Counters

GUARD = b"\x5a" * 4096


def backend(bench: Bench, station: int) -> SoftBackend:
    found = bench.backends[station]
    assert isinstance(found, SoftBackend)
    return found


def total(counters: Counters) -> int:
    return sum(getattr(counters, item.name) for item in fields(counters))


class Victim:
    """A backend with a connected QP, a UD QP, and a region nobody was told of."""

    def __init__(self) -> None:
        self.bench = soft_bench(size=1 << 20)
        self.left, self.right = self.bench.pair()
        self.other_left, self.other_right = self.bench.pair()
        self.datagrams = self.bench.b.qp(QpType.UD)
        self.datagrams.start_datagrams()
        self.secret = self.bench.b.buffer(4096, access=1)
        self.secret.fill(GUARD)
        self.backend = backend(self.bench, 1)
        self.peer = self.backend._env.port.route(self.bench.a.gid)
        assert self.peer is not None
        for qp in (self.right, self.datagrams):
            qp.recv(self.bench.b.buffer(4096).sge())

    def receive(self, header: bytes, payload: bytes = b"") -> None:
        assert self.peer is not None
        views = [memoryview(payload)] if payload else []
        self.backend.receive(self.peer, header, views)
        self.bench.settle()

    def check_unharmed(self) -> None:
        """The region is whole, and the other pair of QPs works as if nothing had been."""
        assert self.secret.data() == GUARD
        assert self.other_right.owner.states == []
        self.other_right.recv()
        self.other_left.send()
        self.bench.settle()
        assert [wc.status for wc in self.other_left.owner.sent] == [0]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=130), st.binary(max_size=300))
def test_noise(header: bytes, payload: bytes) -> None:
    victim = Victim()
    victim.receive(header, payload)
    victim.check_unharmed()


u8, u24, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 24, 32, 64))
near = st.integers(0xFFFFFA, 0xFFFFFF) | u24


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.integers(1, 8), u8, u8, near, st.binary(max_size=64), u32,
            u64 | st.integers(0x7F00_0000_0000, 0x7F00_0000_2000), st.integers(0, 1 << 30) | u32,
            u64, u64, u64 | st.integers(0, 100), st.booleans(),
        ),
        max_size=8,
    )
)  # fmt: skip
def test_wild_messages(messages: list[tuple[int, ...]]) -> None:
    """Well-formed headers with wild fields, at a connected QP, from its own peer."""
    victim = Victim()
    for kind, flags, code, psn, payload, key, address, size, one, two, offset, known in messages:
        assert isinstance(payload, bytes)
        rkey = victim.secret.rkey if known else key
        header = wire.pack_rc(
            kind, flags, code, wire.VERSION, victim.right.qp.qpn, victim.left.qp.qpn, psn,
            len(payload), rkey, address, size, bytes(4), one, two, offset,
        )  # fmt: skip
        victim.receive(header, payload)
    victim.check_unharmed()
    assert set(victim.right.owner.states) <= {QpState.ERR}
    assert len(victim.right.owner.states) <= 1


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 5), u8, u32, st.binary(min_size=16, max_size=16), st.binary(max_size=64))
@example(2, 255, 0x1234, bytes(16), b"")
def test_wild_datagrams(qpn: int, flags: int, qkey: int, gid: bytes, payload: bytes) -> None:
    victim = Victim()
    for sgid, dgid in ((gid, victim.bench.b.gid), (victim.bench.a.gid, gid), (gid, gid)):
        header = wire.pack_datagram(
            wire.DATAGRAM, flags, 255, wire.VERSION, qpn, 7, 0xFFFFFFFF, len(payload), qkey,
            bytes(4), 0xFFFFFFFF, sgid, dgid,
        )  # fmt: skip
        victim.receive(header, payload)
    assert victim.datagrams.owner.received == []
    victim.check_unharmed()


def test_every_drop_is_counted() -> None:
    victim = Victim()
    before = total(victim.backend.counters)
    victim.receive(bytes(64))
    victim.receive(b"\xff" * 64)
    victim.receive(b"short")
    assert victim.backend.counters.bad_message == 3
    assert total(victim.backend.counters) == before + 6


def test_spoofed_source_gid_is_dropped() -> None:
    """A peer may speak with its own GIDs only."""
    victim = Victim()
    header = wire.pack_datagram(
        wire.DATAGRAM, 3, 64, wire.VERSION, victim.datagrams.qp.qpn, 7, 2, 0, 0x1234, bytes(4), 0,
        victim.bench.b.gid, victim.bench.b.gid,
    )  # fmt: skip
    victim.receive(header)
    assert victim.backend.counters.wrong_peer == 1
    assert victim.datagrams.owner.received == []


def test_reads_without_end_are_refused() -> None:
    """Small requests for large answers: no more of them than the QP allows."""
    victim = Victim()
    big = victim.bench.b.buffer(256 << 10)
    psn = 0xFFFFFE
    for _ in range(50):
        header = wire.pack_rc(
            wire.READ_REQUEST, 3, 0, wire.VERSION, victim.right.qp.qpn, victim.left.qp.qpn,
            psn & wire.PSN_MASK, 0, big.rkey, big.at(), big.length, bytes(4), 0, 0, 0,
        )  # fmt: skip
        assert victim.peer is not None
        victim.backend.receive(victim.peer, header, ())
        psn += 1
    assert victim.right.owner.states == [QpState.ERR]
    victim.bench.settle()
    victim.check_unharmed()


def test_repeated_reads_do_not_pile_up() -> None:
    victim = Victim()
    big = victim.bench.b.buffer(256 << 10)
    for _ in range(100):
        header = wire.pack_rc(
            wire.READ_REQUEST, 3, 0, wire.VERSION, victim.right.qp.qpn, victim.left.qp.qpn,
            0xFFFFFE, 0, big.rkey, big.at(), big.length, bytes(4), 0, 0, 0,
        )  # fmt: skip
        assert victim.peer is not None
        victim.backend.receive(victim.peer, header, ())
    before = victim.backend.counters.tx_bytes
    victim.bench.settle()
    assert victim.backend.counters.tx_bytes - before == big.length

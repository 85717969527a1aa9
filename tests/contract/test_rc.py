"""RC: every operation, right data, right completions, in order."""

import pytest
from fake_owner import Bench

from pvrdma_server.abi.pvrdma_verbs import SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcFlags, WcOpcode, WcStatus, WrOpcode
from pvrdma_server.backend import Atomic, Rdma

OK = int(WcStatus.SUCCESS)
SIZES = (1, 7, 8, 9, 64, 4096, 65535, 65536, 65537, 300_000)


def pattern(length: int, seed: int = 1) -> bytes:
    return bytes((index * 7 + seed + (index >> 8)) & 0xFF for index in range(length))


@pytest.mark.parametrize("size", SIZES)
def test_write(bench: Bench, size: int) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(size), bench.b.buffer(size + 200, scattered=True)
    source.fill(pattern(size))
    wr = left.write(source.sge(), target.at(100), target.rkey)
    bench.settle()
    assert left.statuses == [(wr, OK)]
    assert left.owner.sent[0].opcode == WcOpcode.RDMA_WRITE
    assert target.data() == bytes(100) + pattern(size) + bytes(100)
    assert right.owner.received == []


@pytest.mark.parametrize("size", SIZES)
def test_read(bench: Bench, size: int) -> None:
    left, _ = bench.pair()
    local, remote = bench.a.buffer(size + 2, scattered=True), bench.b.buffer(size)
    remote.fill(pattern(size))
    wr = left.read(local.sge(1, size), remote.at(), remote.rkey)
    bench.settle()
    assert left.statuses == [(wr, OK)]
    assert (left.owner.sent[0].opcode, left.owner.sent[0].byte_len) == (WcOpcode.RDMA_READ, size)
    assert local.data() == b"\0" + pattern(size) + b"\0"


@pytest.mark.parametrize("size", [0, *SIZES])
def test_send(bench: Bench, size: int) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(size + 1), bench.b.buffer(size + 50)
    source.fill(pattern(size))
    cut = size // 3
    into = right.recv(target.sge(0, cut), target.sge(cut))
    wr = left.send(source.sge(0, cut), source.sge(cut, size - cut))
    bench.settle()
    assert left.statuses == [(wr, OK)]
    assert right.recv_statuses == [(into, OK)]
    wc = right.owner.received[0]
    assert (wc.opcode, wc.byte_len, wc.src_qp) == (WcOpcode.RECV, size, left.qp.qpn)
    assert wc.wc_flags == 0
    assert not bench.tells_solicited or right.owner.solicited == [False]
    assert target.data(0, size) == pattern(size)
    assert target.data(size) == bytes(50)


def test_immediate_and_solicited(bench: Bench) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(100), bench.b.buffer(100)
    first, second = right.recv(target.sge()), right.recv()
    flags = SendFlags.SIGNALED | SendFlags.SOLICITED
    left.post(WrOpcode.SEND_WITH_IMM, (source.sge(),), None, flags, b"\x01\x02\x03\x04")
    left.post(
        WrOpcode.RDMA_WRITE_WITH_IMM, (source.sge(0, 60),), Rdma(target.at(), target.rkey),
        SendFlags.SIGNALED, b"\xaa\xbb\xcc\xdd",
    )  # fmt: skip
    bench.settle()
    assert [wc.status for wc in left.owner.sent] == [OK, OK]
    got = [(wc.wr_id, wc.opcode, wc.byte_len, wc.imm, wc.wc_flags) for wc in right.owner.received]
    assert got == [
        (first, WcOpcode.RECV, 100, b"\x01\x02\x03\x04", WcFlags.WITH_IMM),
        (second, WcOpcode.RECV_RDMA_WITH_IMM, 60, b"\xaa\xbb\xcc\xdd", WcFlags.WITH_IMM),
    ]
    assert not bench.tells_solicited or right.owner.solicited == [True, False]


def test_scatter_of_read_and_atomic(bench: Bench) -> None:
    left, _ = bench.pair()
    local, remote = bench.a.buffer(300_000), bench.b.buffer(200_000)
    remote.fill(pattern(200_000))
    cuts = [(1000, 99_000), (150_000, 0), (150_000, 3), (180_000, 100_997)]
    sges = tuple(local.sge(at, length) for at, length in cuts)
    left.post(WrOpcode.RDMA_READ, sges, Rdma(remote.at(), remote.rkey))
    halves = (local.sge(0, 3), local.sge(8, 5))
    # Fenced: without it, what the READ sees of the atomic is undefined (IBA 10.8.3.3).
    left.post(
        WrOpcode.ATOMIC_FETCH_AND_ADD, halves, Atomic(remote.at(0x100), 1, 0, remote.rkey),
        SendFlags.SIGNALED | SendFlags.FENCE,
    )  # fmt: skip
    bench.settle()
    assert [wc.status for wc in left.owner.sent] == [OK, OK]
    assert b"".join(local.data(at, length) for at, length in cuts) == pattern(200_000)
    assert local.data(0, 3) + local.data(8, 5) == pattern(200_000)[0x100:0x108]


def test_atomics(bench: Bench) -> None:
    left, _ = bench.pair()
    local, remote = bench.a.buffer(64), bench.b.buffer(64)
    remote.fill((2**64 - 2).to_bytes(8, "little"), 8)
    left.fetch_add(local.sge(0, 8), remote.at(8), remote.rkey, 5)
    left.cmp_swap(local.sge(8, 8), remote.at(8), remote.rkey, 3, 77)
    left.cmp_swap(local.sge(16, 8), remote.at(8), remote.rkey, 3, 99)
    bench.settle()
    assert [(wc.status, wc.opcode, wc.byte_len) for wc in left.owner.sent] == [
        (OK, WcOpcode.FETCH_ADD, 8), (OK, WcOpcode.COMP_SWAP, 8), (OK, WcOpcode.COMP_SWAP, 8),
    ]  # fmt: skip
    found = [int.from_bytes(local.data(8 * n, 8), "little") for n in range(3)]
    assert found == [2**64 - 2, 3, 77]
    assert int.from_bytes(remote.data(8, 8), "little") == 77


def test_unsignaled_success_completes_silently(bench: Bench) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(64), bench.b.buffer(64)
    left.write(source.sge(), target.at(), target.rkey, flags=0)
    last = left.write(source.sge(), target.at(), target.rkey)
    bench.settle()
    assert left.statuses == [(last, OK)]
    assert right.owner.events == []


def test_many_requests_complete_in_order(bench: Bench) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(200_000), bench.b.buffer(200_000)
    posted, taken = [], []
    for index in range(300):
        size = (index * 977) % 70_000
        kind = index % 4
        if kind == 0:
            taken.append(right.recv(target.sge()))
            posted.append(left.send(source.sge(0, size)))
        elif kind == 1:
            posted.append(left.write(source.sge(0, size), target.at(), target.rkey))
        elif kind == 2:
            posted.append(left.read(source.sge(0, size), target.at(), target.rkey))
        else:
            posted.append(left.fetch_add(source.sge(0, 8), target.at(0x100), target.rkey, 1))
    bench.settle()
    assert left.statuses == [(wr, OK) for wr in posted]
    assert right.recv_statuses == [(wr, OK) for wr in taken]


def test_zero_length_touches_no_key(bench: Bench) -> None:
    left, right = bench.pair()
    nothing = Sge(0xDEAD_0000, 0, 0xBAD)
    right.recv(Sge(1, 0, 0xBAD))
    left.write(nothing, 0x1234, 0xBAD)
    left.read(nothing, 0x1234, 0xBAD)
    left.send(nothing)
    bench.settle()
    assert [wc.status for wc in left.owner.sent] == [OK] * 3
    assert [wc.status for wc in right.owner.received] == [OK]

"""Whole tables: every (state, event) pair of a queue pair, and every (opcode, key fault) pair on both sides."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from fake_owner import ALL_ACCESS, Bench, Buffer, FakeQp
from soft_bench import soft_bench

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import AccessFlags, QpState
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcStatus, WrOpcode
from pvrdma_server.backend import Arm, Atomic, Rdma

S = WcStatus
STATES = ("INIT", "RTR", "RTS", "SQD", "ERR", "RESET")


def codes(statuses: list[tuple[int, int]]) -> list[int]:
    return [status for _, status in statuses]


# --- keys ----------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """What an opcode needs: rights of the local region and of the remote one (0: it names no remote address)."""

    local: int
    remote: int


OPERATIONS = {
    WrOpcode.SEND: Operation(0, 0),
    WrOpcode.SEND_WITH_IMM: Operation(0, 0),
    WrOpcode.RDMA_WRITE: Operation(0, AccessFlags.REMOTE_WRITE),
    WrOpcode.RDMA_WRITE_WITH_IMM: Operation(0, AccessFlags.REMOTE_WRITE),
    WrOpcode.RDMA_READ: Operation(AccessFlags.LOCAL_WRITE, AccessFlags.REMOTE_READ),
    WrOpcode.ATOMIC_CMP_AND_SWP: Operation(AccessFlags.LOCAL_WRITE, AccessFlags.REMOTE_ATOMIC),
    WrOpcode.ATOMIC_FETCH_AND_ADD: Operation(AccessFlags.LOCAL_WRITE, AccessFlags.REMOTE_ATOMIC),
}
CONSUMES_RECV = {WrOpcode.SEND, WrOpcode.SEND_WITH_IMM, WrOpcode.RDMA_WRITE_WITH_IMM}
REMOTE = [op for op, needs in OPERATIONS.items() if needs.remote]


def arm_of(opcode: WrOpcode, address: int, rkey: int) -> Arm:
    if not OPERATIONS[opcode].remote:
        return None
    if opcode in (WrOpcode.ATOMIC_CMP_AND_SWP, WrOpcode.ATOMIC_FETCH_AND_ADD):
        return Atomic(address, 1, 2, rkey)
    return Rdma(address, rkey)


def _other_pd(bench: Bench, good: Buffer) -> tuple[int, int]:
    pd = bench.b.backend.create_pd(privileged=False)
    other = bench.b.buffer(64, pd=pd)
    return other.at(), other.rkey


def _gone(bench: Bench, good: Buffer) -> tuple[int, int]:
    good.mr.destroy()
    return good.at(), good.rkey


# Ways in which address and key do not fit a region: (address, key) made of a good region of side b.
FAULTS: dict[str, Callable[[Bench, Buffer], tuple[int, int]]] = {
    "unknown_key": lambda _, good: (good.at(), good.rkey ^ 0x5500),
    "wrong_tag": lambda _, good: (good.at(), good.rkey ^ 0x01),
    "other_pd": _other_pd,
    "destroyed": _gone,
    "below": lambda _, good: (good.at() - 8, good.rkey),
    "beyond": lambda _, good: (good.at(64), good.rkey),
    "wraps": lambda _, good: (2**64 - 8, good.rkey),
}


@pytest.fixture
def bench() -> Bench:
    return soft_bench()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("opcode", REMOTE, ids=lambda o: o.name)
def test_every_opcode_with_every_fault_of_the_remote_key(
    bench: Bench, opcode: WrOpcode, fault: str
) -> None:
    left, right = bench.pair()
    source, target = bench.a.buffer(64), bench.b.buffer(64)
    right.recv(bench.b.buffer(64).sge())
    address, rkey = FAULTS[fault](bench, target)
    left.post(opcode, (source.sge(0, 8),), arm_of(opcode, address, rkey))
    bench.elapse()
    assert codes(left.statuses) == [S.REM_ACCESS_ERR]
    assert left.owner.states == [QpState.ERR]
    assert right.owner.states == [QpState.ERR]
    assert right.owner.events == [EqeType.QP_ACCESS_ERR]
    assert codes(right.recv_statuses) == [S.WR_FLUSH_ERR]


@pytest.mark.parametrize("opcode", REMOTE, ids=lambda o: o.name)
@pytest.mark.parametrize("missing", [1, 2, 4, 8])
def test_every_opcode_against_every_right_of_the_remote_region(
    bench: Bench, opcode: WrOpcode, missing: int
) -> None:
    left, right = bench.pair()
    source = bench.a.buffer(64)
    right.recv(bench.b.buffer(64).sge())
    target = bench.b.buffer(64, int(ALL_ACCESS) & ~missing)
    left.post(opcode, (source.sge(0, 8),), arm_of(opcode, target.at(), target.rkey))
    bench.elapse()
    refused = bool(OPERATIONS[opcode].remote & missing)
    assert codes(left.statuses) == [S.REM_ACCESS_ERR if refused else S.SUCCESS]
    assert right.owner.events == ([EqeType.QP_ACCESS_ERR] if refused else [])
    consumed = opcode in CONSUMES_RECV and not refused
    wanted = [S.SUCCESS] if consumed else [S.WR_FLUSH_ERR] if refused else []
    assert codes(right.recv_statuses) == wanted


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("opcode", OPERATIONS, ids=lambda o: o.name)
def test_every_opcode_with_every_fault_of_the_local_key(opcode: WrOpcode, fault: str) -> None:
    bench = soft_bench()
    bench.a, bench.b = bench.b, bench.a  # faults are made on side b
    left, right = bench.b.qp(), bench.a.qp()
    left.connect(right)
    right.connect(left)
    source, target = bench.b.buffer(64), bench.a.buffer(64)
    right.recv(bench.a.buffer(64).sge())
    address, key = FAULTS[fault](bench, source)
    length = 8 if "ATOMIC" in opcode.name else 16
    left.post(opcode, (Sge(address, length, key),), arm_of(opcode, target.at(), target.rkey))
    bench.elapse()
    assert codes(left.statuses) == [S.LOC_PROT_ERR]
    assert left.owner.states == [QpState.ERR]
    assert right.owner.states == []
    assert right.statuses == right.recv_statuses == []


# --- states --------------------------------------------------------------------------------------------------------


def in_state(qp: FakeQp, peer: FakeQp, state: str) -> None:
    """Take a fresh queue pair to `state`."""
    qp.connect(peer)
    if state in ("INIT", "RTR"):
        qp.modify(qp_state=int(QpState.RESET))
        qp.modify(qp_state=int(QpState.INIT))
        if state == "RTR":
            qp.modify(qp_state=int(QpState.RTR))
    elif state != "RTS":
        qp.modify(qp_state=int(QpState[state]))


# What becomes of a send and a receive posted in each state: a status, or None for nothing yet.
POSTED = {
    "RESET": (None, None),
    "INIT": (None, None),
    "RTR": (None, None),
    "RTS": (S.SUCCESS, None),
    "SQD": (None, None),
    "ERR": (S.WR_FLUSH_ERR, S.WR_FLUSH_ERR),
}
# What the sender of a SEND hears of a responder in each state, and what the receive there completes with.
ARRIVED = {
    "RESET": (S.RETRY_EXC_ERR, None),
    "INIT": (S.RETRY_EXC_ERR, None),
    "RTR": (S.SUCCESS, S.SUCCESS),
    "RTS": (S.SUCCESS, S.SUCCESS),
    "SQD": (S.SUCCESS, S.SUCCESS),
    "ERR": (S.RETRY_EXC_ERR, S.WR_FLUSH_ERR),
}


def want(status: WcStatus | None) -> list[WcStatus]:
    return [] if status is None else [status]


@pytest.mark.parametrize("state", STATES)
def test_what_is_posted_in_every_state(bench: Bench, state: str) -> None:
    left, right = bench.a.qp(), bench.b.qp()
    in_state(left, right, state)
    right.connect(left)
    right.recv(bench.b.buffer(64).sge())
    left.recv(bench.a.buffer(64).sge())
    left.send(bench.a.buffer(64).sge())
    bench.elapse()
    send, recv = POSTED[state]
    assert codes(left.statuses) == want(send)
    assert codes(left.recv_statuses) == want(recv)


@pytest.mark.parametrize("state", STATES)
def test_what_arrives_in_every_state(bench: Bench, state: str) -> None:
    left, right = bench.a.qp(), bench.b.qp()
    left.connect(right)
    in_state(right, left, state)
    right.recv(bench.b.buffer(64).sge())
    left.send(bench.a.buffer(64).sge())
    bench.elapse()
    send, recv = ARRIVED[state]
    assert codes(left.statuses) == want(send)
    assert codes(right.recv_statuses) == want(recv)
    assert right.owner.events == ([EqeType.COMM_EST] if state == "RTR" else [])


@pytest.mark.parametrize("state", STATES)
def test_a_fault_of_the_requester_in_every_state(bench: Bench, state: str) -> None:
    left, right = bench.a.qp(), bench.b.qp()
    in_state(left, right, state)
    right.connect(left)
    left.send(Sge(0x1000, 8, 0x1234))
    bench.elapse()
    expected = {"RTS": S.LOC_PROT_ERR, "ERR": S.WR_FLUSH_ERR}.get(state)
    assert codes(left.statuses) == want(expected)
    assert left.owner.states == (
        [QpState.ERR] if state == "RTS" else [QpState.SQD] if state == "SQD" else []
    )


@pytest.mark.parametrize("state", [state for state in STATES if state not in ("RESET", "ERR")])
@pytest.mark.parametrize("target", ["RESET", "ERR"])
def test_every_state_is_left_for_reset_and_error(bench: Bench, state: str, target: str) -> None:
    left, right = bench.a.qp(), bench.b.qp()
    in_state(left, right, state)
    left.recv(bench.a.buffer(64).sge())
    left.modify(qp_state=int(QpState[target]))
    bench.elapse()
    assert codes(left.recv_statuses) == ([S.WR_FLUSH_ERR] if target == "ERR" else [])

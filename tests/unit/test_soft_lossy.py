"""Whatever a carrier loses, doubles, delays or refuses: each request once, in order, right data."""

from itertools import islice

from fake_owner import Bench, Buffer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from soft_bench import DROP, FULL, LATE, OK, TWICE, FaultyFabric, soft_bench

from pvrdma_server.abi.pvrdma_verbs import SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus, WrOpcode
from pvrdma_server.backend import Rdma

SUCCESS = int(WcStatus.SUCCESS)
SLOT = 4096
CHUNK = 700
OPERATIONS = ("send", "send_imm", "write", "write_imm", "read", "add")

operation = st.tuples(
    st.sampled_from(OPERATIONS), st.integers(0, SLOT), st.booleans(), st.booleans()
)
# Few enough faults that no request runs out of its seven retries, with FULL at will.
action = st.sampled_from((OK, OK, OK, DROP, TWICE, LATE, FULL))
script = st.lists(action, max_size=200).map(
    lambda actions: [a if a != DROP or actions[:i].count(DROP) < 7 else OK
                     for i, a in enumerate(actions)]
)  # fmt: skip


class Run:
    """One pair of QPs, every operation with a slot of its own, and what is expected."""

    def __init__(self, faults: list[str], reads_allowed: int) -> None:
        self.bench: Bench = soft_bench(
            fabric=FaultyFabric(iter(faults)), size=1 << 20, chunk_bytes=CHUNK, window_bytes=5000
        )
        # A late message may pass an RNR NAK: let nothing but the losses themselves end a QP.
        self.left, self.right = self.bench.pair(
            retry_cnt=7, rnr_retry=7, max_rd_atomic=3, max_dest_rd_atomic=3
        )
        self.here: Buffer = self.bench.a.buffer(40 * SLOT)
        self.there: Buffer = self.bench.b.buffer(40 * SLOT)
        self.counter: Buffer = self.bench.b.buffer(8)
        self.expected: list[int] = []
        self.received: list[tuple[int, int]] = []
        self.checks: list[tuple[Buffer, int, bytes]] = []
        self.adds = 0

    def post(self, index: int, op: str, size: int, signaled: bool, fence: bool) -> None:
        at = index * SLOT
        data = bytes((index * 31 + n) & 0xFF for n in islice(range(size), size))
        flags = (SendFlags.SIGNALED if signaled else 0) | (SendFlags.FENCE if fence else 0)
        left, sge = self.left, self.here.sge(at, size)
        if op == "read":
            self.there.fill(data, at)
            wr = left.read(sge, self.there.at(at), self.there.rkey, flags=flags)
            self.checks.append((self.here, at, data))
        elif op == "add":
            sge = self.here.sge(at, 8)
            wr = left.fetch_add(sge, self.counter.at(), self.counter.rkey, 1, flags=flags)
            self.checks.append((self.here, at, self.adds.to_bytes(8, "little")))
            self.adds += 1
        else:
            self.here.fill(data, at)
            self.checks.append((self.there, at, data))
            wr = self._post_data(op, at, size, flags)
        if signaled:
            self.expected.append(wr)

    def _post_data(self, op: str, at: int, size: int, flags: int) -> int:
        if op != "write":
            into = self.right.recv(self.there.sge(at, SLOT))
            self.received.append((into, size))
        sges = (self.here.sge(at, size),)
        imm = at.to_bytes(4, "big")
        arm = Rdma(self.there.at(at), self.there.rkey) if op.startswith("write") else None
        opcode = {
            "send": WrOpcode.SEND, "send_imm": WrOpcode.SEND_WITH_IMM,
            "write": WrOpcode.RDMA_WRITE, "write_imm": WrOpcode.RDMA_WRITE_WITH_IMM,
        }[op]  # fmt: skip
        return self.left.post(opcode, sges, arm, flags, imm)

    def check(self) -> None:
        assert self.left.statuses == [(wr, SUCCESS) for wr in self.expected]
        got = [(wc.wr_id, wc.byte_len) for wc in self.right.owner.received]
        assert got == self.received
        assert {wc.status for wc in self.right.owner.received} <= {SUCCESS}
        for buffer, at, data in self.checks:
            assert buffer.data(at, len(data)) == data
        assert int.from_bytes(self.counter.data(), "little") == self.adds
        assert self.left.owner.states == self.right.owner.states == []


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(operation, min_size=1, max_size=30), script)
def test_every_request_completes_once_and_in_order(
    operations: list[tuple[str, int, bool, bool]], faults: list[str]
) -> None:
    run = Run(faults, 3)
    for index, (op, size, signaled, fence) in enumerate(operations):
        run.post(index, op, size, signaled, fence)
    run.bench.elapse()
    run.check()


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(operation, min_size=1, max_size=30), st.integers(0, 2**32))
def test_a_bad_network_may_end_a_qp_but_never_lies(
    operations: list[tuple[str, int, bool, bool]], seed: int
) -> None:
    """Half of all messages lost: some prefix succeeds, then one failure, then flushes."""
    faults = [DROP if (seed * (n + 7) >> n % 19) % 2 else OK for n in range(2000)]
    run = Run(faults, 3)
    posted = []
    for index, (op, size, _, fence) in enumerate(operations):
        run.post(index, op, size, True, fence)
        posted.append(run.expected[-1])
    run.bench.elapse()
    assert [wr for wr, _ in run.left.statuses] == posted
    statuses = [status for _, status in run.left.statuses]
    good = statuses.count(SUCCESS)
    assert statuses[:good] == [SUCCESS] * good
    if good < len(statuses):
        assert statuses[good] == WcStatus.RETRY_EXC_ERR
        assert set(statuses[good + 1 :]) <= {WcStatus.WR_FLUSH_ERR}
    for buffer, at, data in run.checks[:good]:
        assert buffer.data(at, len(data)) == data

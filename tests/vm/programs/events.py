"""Runs in the guest: makes every asynchronous event that a program can make, and says which one came for which object.

One JSON line per step: {"step", "event"}. An event that does not come within TIMEOUT_S ends the program.
"""

import json
import signal
import sys

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

TIMEOUT_S = 20
SIZE = 4096
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class Bench:
    """A device, a domain, a region, and connected queue pairs."""

    def __init__(self, device: str, gid_index: int) -> None:
        self.ctx = Context(name=device)
        self.gid_index = gid_index
        self.gid = self.ctx.query_gid(1, gid_index)
        self.pd = PD(self.ctx)
        self.mr = MR(self.pd, SIZE, ACCESS)
        self.cq = CQ(self.ctx, 64)

    def sge(self) -> SGE:
        return SGE(self.mr.buf, 8, self.mr.lkey)

    def qp(self, cq: CQ | None = None, srq: SRQ | None = None) -> QP:
        init = QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=cq or self.cq, rcq=cq or self.cq, srq=srq,
            cap=QPCap(16, 16, 1, 1), sq_sig_all=1,
        )  # fmt: skip
        return QP(self.pd, init)

    def to_rtr(self, qp: QP, dest: int) -> QPAttr:
        route = GlobalRoute(dgid=self.gid, sgid_index=self.gid_index)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = dest
        attr.path_mtu = e.IBV_MTU_1024
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.rnr_retry, attr.retry_cnt, attr.timeout = 1, 7, 7, 14
        qp.to_rtr(attr)
        return attr

    def pair(self, cq: CQ | None = None, srq: SRQ | None = None) -> tuple[QP, QP]:
        """A sender and a receiver, both ready."""
        sender, receiver = self.qp(cq), self.qp(srq=srq)
        for qp, other in ((sender, receiver), (receiver, sender)):
            attr = self.to_rtr(qp, other.qp_num)
            qp.to_rts(attr)
        return sender, receiver


def say(bench: Bench, step: str) -> None:
    signal.alarm(TIMEOUT_S)  # its default action ends the program: get_async_event blocks in C
    event = bench.ctx.get_async_event()
    signal.alarm(0)
    kind = e.ibv_event_type(event.event_type).name
    print(json.dumps({"step": step, "event": kind}), flush=True)
    event.ack()


def comm_est(bench: Bench) -> None:
    """A message for a receiver that is ready to receive and was not told of the other's readiness to send."""
    sender, receiver = bench.qp(), bench.qp()
    attr = bench.to_rtr(sender, receiver.qp_num)
    bench.to_rtr(receiver, sender.qp_num)
    receiver.post_recv(RecvWR(sg=[bench.sge()], num_sge=1))
    sender.to_rts(attr)
    sender.post_send(SendWR(sg=[bench.sge()], num_sge=1, opcode=e.IBV_WR_SEND))
    say(bench, "message in RTR")


def srq_limit_and_last_wqe(bench: Bench) -> None:
    srq = SRQ(bench.pd, SrqInitAttr(SrqAttr(max_wr=16)))
    sender, receiver = bench.pair(srq=srq)
    for _ in range(4):
        srq.post_recv(RecvWR(sg=[bench.sge()], num_sge=1))
    srq.modify(SrqAttr(srq_limit=3), e.IBV_SRQ_LIMIT)
    for _ in range(2):
        sender.post_send(SendWR(sg=[bench.sge()], num_sge=1, opcode=e.IBV_WR_SEND))
    say(bench, "fewer receives than the limit")
    receiver.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
    say(bench, "a queue pair with an SRQ goes to ERR")


def sq_drained(bench: Bench) -> None:
    sender, receiver = bench.pair()
    receiver.post_recv(RecvWR(sg=[bench.sge()], num_sge=1))
    sender.post_send(SendWR(sg=[bench.sge()], num_sge=1, opcode=e.IBV_WR_SEND))
    attr = QPAttr(qp_state=e.IBV_QPS_SQD)
    attr.en_sqd_async_notify = 1
    sender.modify(attr, e.IBV_QP_STATE | e.IBV_QP_EN_SQD_ASYNC_NOTIFY)
    say(bench, "to SQD")


def access_error(bench: Bench) -> None:
    sender, receiver = bench.pair()
    wr = SendWR(sg=[bench.sge()], num_sge=1, opcode=e.IBV_WR_RDMA_WRITE)
    wr.set_wr_rdma(bench.mr.rkey ^ 0xFFFF00, bench.mr.buf)
    sender.post_send(wr)
    say(bench, "WRITE with a wrong key")
    assert receiver.qp_state == e.IBV_QPS_RTS  # as the program knows it


def cq_overflow(bench: Bench) -> None:
    cq = CQ(bench.ctx, 1)
    sender, receiver = bench.pair(cq=cq)
    for _ in range(3):
        receiver.post_recv(RecvWR(sg=[bench.sge()], num_sge=1))
        sender.post_send(SendWR(sg=[bench.sge()], num_sge=1, opcode=e.IBV_WR_SEND))
    say(bench, "a CQ too small")


def main() -> None:
    bench = Bench(sys.argv[1], int(sys.argv[2]))
    for step in (comm_est, srq_limit_and_last_wqe, sq_drained, access_error, cq_overflow):
        step(bench)


if __name__ == "__main__":
    main()

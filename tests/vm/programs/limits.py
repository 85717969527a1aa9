"""Runs in the guest: uses what the device advertises, up to the maximum, together.

limits.py DEVICE GID-INDEX counts: makes objects of every kind until the device has no more, says "full", and ends at
the end of its standard input.
limits.py DEVICE GID-INDEX depths: fills the largest queues, with the longest lists, to the last entry.
"""

import errno
import sys
import time
from collections.abc import Callable
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
TIMEOUT_S = 200


def fill(name: str, make: Callable[[], Any]) -> list[Any]:
    """Objects until one fails; more than any limit would be a bug of ours."""
    made = []
    started = time.monotonic()
    while True:
        try:
            made.append(make())
        except PyverbsRDMAError as error:
            print(name, len(made), f"{time.monotonic() - started:.1f} s,", error, flush=True)
            return made


def counts(ctx: Context) -> None:
    pd, cq = PD(ctx), CQ(ctx, 1)
    buffer = MR(pd, 4096, ACCESS)
    init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(1, 1, 1, 1))
    kept = [
        fill("qps", lambda: QP(pd, init)),
        fill("cqs", lambda: CQ(ctx, 1)),
        fill("srqs", lambda: SRQ(pd, SrqInitAttr(SrqAttr(max_wr=1)))),
        fill("pds", lambda: PD(ctx)),
        fill("mrs", lambda: MR(pd, 4096, ACCESS, address=buffer.buf)),
    ]
    print("full", flush=True)
    sys.stdin.read()
    # In the order of use: pyverbs' own order of destruction is none.
    for objects in kept:
        for thing in objects:
            thing.close()


def connect(qp: QP, other: QP, ctx: Context, gid_index: int) -> None:
    attr = QPAttr(port_num=1)
    attr.qp_access_flags = ACCESS
    attr.dest_qp_num = other.qp_num
    attr.path_mtu = e.IBV_MTU_1024
    route = GlobalRoute(dgid=ctx.query_gid(1, gid_index), sgid_index=gid_index)
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
    attr.min_rnr_timer, attr.rnr_retry, attr.retry_cnt, attr.timeout = 1, 7, 7, 14
    qp.to_rts(attr)


def post_until_full(post: Callable[[], None]) -> int:
    posted = 0
    while True:
        try:
            post()
        except PyverbsRDMAError as error:
            if error.error_code != errno.ENOMEM:
                raise
            return posted
        posted += 1


def drain(cq: CQ, wanted: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    seen = 0
    while seen < wanted:
        if time.monotonic() > deadline:
            sys.exit(f"{seen} of {wanted} completions")
        for wc in cq.poll(256)[1]:
            if wc.status != e.IBV_WC_SUCCESS:
                sys.exit(f"status {wc.status} after {seen} completions")
            seen += 1


def depths(ctx: Context, gid_index: int) -> None:
    caps = ctx.query_device()
    depth, length = caps.max_qp_wr, caps.max_sge
    pd = PD(ctx)
    mr = MR(pd, 8 * length, ACCESS)
    send_cq, recv_cq = CQ(ctx, caps.max_cqe), CQ(ctx, caps.max_cqe)
    cap = QPCap(depth, depth, length, length)
    init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=send_cq, rcq=recv_cq, cap=cap, sq_sig_all=1)
    sender, receiver = QP(pd, init), QP(pd, init)
    connect(sender, receiver, ctx, gid_index)
    connect(receiver, sender, ctx, gid_index)
    sges = [SGE(mr.buf + 8 * i, 8, mr.lkey) for i in range(length)]
    recv = RecvWR(sg=sges, num_sge=length)
    send = SendWR(sg=sges, num_sge=length, opcode=e.IBV_WR_SEND)
    # Nothing is sent in SQD, so the send queue fills.
    sender.modify(QPAttr(qp_state=e.IBV_QPS_SQD), e.IBV_QP_STATE)
    print("receives", post_until_full(lambda: receiver.post_recv(recv)), flush=True)
    print("sends", post_until_full(lambda: sender.post_send(send)), flush=True)
    sender.modify(QPAttr(qp_state=e.IBV_QPS_RTS), e.IBV_QP_STATE)
    drain(recv_cq, depth)
    drain(send_cq, depth)
    print("done", flush=True)


def main() -> None:
    ctx = Context(name=sys.argv[1])
    if sys.argv[3] == "counts":
        counts(ctx)
    else:
        depths(ctx, int(sys.argv[2]))


if __name__ == "__main__":
    main()

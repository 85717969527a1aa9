"""Two connected RC queue pairs in one process: every operation with random bytes, every byte compared.

Runs in a guest with pyverbs: python3 rdma_check.py [SIZE ...]. The last line is JSON: {"checks": N, "bytes": N}.
The status is 1, with a line that says what was wrong, if one byte, completion or atomic value is.
"""

import json
import os
import random
import struct
import sys
import time
from itertools import pairwise

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

GID_INDEX = 1
SIZES = (1, 7, 4095, 4097, 100_001, 1 << 20)
# Room on both sides of a message, which must stay as it was.
MARGIN = 64
POLL_TIMEOUT_S = 20.0
ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_WRITE
    | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_ATOMIC
)
IMMEDIATE = 0x12345678


class Wrong(Exception):
    """What the device did is not what was asked for."""


class Side:
    """One queue pair with its completion queue and its memory."""

    def __init__(self, context, size):
        self.pd = PD(context)
        self.cq = CQ(context, 64)
        self.mr = MR(self.pd, size + 2 * MARGIN, ACCESS)
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=4, max_recv_sge=4)
        self.qp = QP(
            self.pd,
            QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1),
        )

    def connect(self, other, gid):
        attr = QPAttr(port_num=1)
        attr.path_mtu, attr.dest_qp_num = e.IBV_MTU_1024, other.qp.qp_num
        attr.qp_access_flags = ACCESS
        route = GlobalRoute(dgid=gid, sgid_index=GID_INDEX, hop_limit=64)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 4
        self.qp.to_rts(attr)

    def at(self, offset=0):
        return self.mr.buf + MARGIN + offset

    def sges(self, size, pieces=1):
        """The message in memory as `pieces` scatter/gather elements of unequal length."""
        cuts = [0, *sorted(random.sample(range(1, size), pieces - 1)), size]
        return [SGE(self.at(a), b - a, self.mr.lkey) for a, b in pairwise(cuts)]

    def fill(self, data):
        room = self.mr.length - len(data)
        self.mr.write(b"\xa5" * MARGIN + data + b"\xa5" * (room - MARGIN), self.mr.length)

    def expect(self, data, what):
        room = self.mr.length - len(data) - MARGIN
        if self.mr.read(self.mr.length, 0) != b"\xa5" * MARGIN + data + b"\xa5" * room:
            raise Wrong(f"{what}: memory differs from what was sent")

    def recv(self, sges):
        self.qp.post_recv(RecvWR(wr_id=2, num_sge=len(sges), sg=sges))

    def send(self, opcode, sges, remote=None, immediate=None, atomic=None):
        wr = SendWR(wr_id=1, num_sge=len(sges), sg=sges, opcode=opcode)
        if immediate is not None:
            wr.imm_data = immediate
        if atomic is not None:
            wr.set_wr_atomic(remote.mr.rkey, remote.at(), *atomic)
        elif remote is not None:
            wr.set_wr_rdma(remote.mr.rkey, remote.at())
        self.qp.post_send(wr)

    def completion(self, opcode, size=None, immediate=None):
        deadline = time.monotonic() + POLL_TIMEOUT_S
        while True:
            count, found = self.cq.poll(1)
            if count:
                break
            if time.monotonic() > deadline:
                raise Wrong(f"no completion of opcode {opcode} in {POLL_TIMEOUT_S} s")
        wc = found[0]
        if wc.status != e.IBV_WC_SUCCESS or wc.opcode != opcode:
            raise Wrong(f"completion has status {wc.status}, opcode {wc.opcode}, not {opcode}")
        if size is not None and wc.byte_len != size:
            raise Wrong(f"completion says {wc.byte_len} bytes, not {size}")
        if immediate is not None and wc.imm_data != immediate:
            raise Wrong(f"immediate is {wc.imm_data:#x}, not {immediate:#x}")


def check_send(left, right, data, pieces, immediate):
    left.fill(data)
    right.fill(bytes(len(data)))
    right.recv(right.sges(len(data), pieces))
    opcode = e.IBV_WR_SEND if immediate is None else e.IBV_WR_SEND_WITH_IMM
    left.send(opcode, left.sges(len(data), pieces), immediate=immediate)
    left.completion(e.IBV_WC_SEND)
    right.completion(e.IBV_WC_RECV, len(data), immediate)
    right.expect(data, f"SEND of {len(data)} bytes")


def check_write(left, right, data, pieces, immediate):
    left.fill(data)
    right.fill(bytes(len(data)))
    if immediate is not None:
        # pyverbs wants an SGE; the message does not touch it.
        right.recv(right.sges(1))
    opcode = e.IBV_WR_RDMA_WRITE if immediate is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
    left.send(opcode, left.sges(len(data), pieces), right, immediate)
    left.completion(e.IBV_WC_RDMA_WRITE)
    if immediate is not None:
        right.completion(e.IBV_WC_RECV_RDMA_WITH_IMM, len(data), immediate)
    right.expect(data, f"RDMA WRITE of {len(data)} bytes")


def check_read(left, right, data, pieces):
    right.fill(data)
    left.fill(bytes(len(data)))
    left.send(e.IBV_WR_RDMA_READ, left.sges(len(data), pieces), right)
    left.completion(e.IBV_WC_RDMA_READ)
    left.expect(data, f"RDMA READ of {len(data)} bytes")


def check_atomic(left, right, opcode, work, atomic, before, after):
    right.fill(struct.pack("=Q", before))
    left.fill(bytes(8))
    left.send(opcode, left.sges(8), right, atomic=atomic)
    left.completion(work)
    right.expect(struct.pack("=Q", after), f"atomic {atomic} on {before:#x}")
    left.expect(struct.pack("=Q", before), f"the former value of atomic {atomic}")


def check_atomics(left, right):
    swap, add = e.IBV_WR_ATOMIC_CMP_AND_SWP, e.IBV_WR_ATOMIC_FETCH_AND_ADD
    swapped, added = e.IBV_WC_COMP_SWAP, e.IBV_WC_FETCH_ADD
    big = (1 << 64) - 1
    check_atomic(left, right, add, added, (5, 0), 37, 42)
    check_atomic(left, right, add, added, (2, 0), big, 1)
    check_atomic(left, right, swap, swapped, (7, big), 7, big)
    check_atomic(left, right, swap, swapped, (8, 1), 7, 7)
    return 4


def main():
    sizes = [int(word) for word in sys.argv[1:]] or SIZES
    context = Context(name=get_device_list()[0].name.decode())
    gid = context.query_gid(1, GID_INDEX)
    left, right = Side(context, max(sizes)), Side(context, max(sizes))
    left.connect(right, gid)
    right.connect(left, gid)
    checks, moved = 0, 0
    for size in sizes:
        data = os.urandom(size)
        pieces = min(size, 3)
        check_send(left, right, data, 1, None)
        check_send(right, left, data, pieces, IMMEDIATE)
        check_write(left, right, data, pieces, None)
        check_write(right, left, data, 1, IMMEDIATE)
        check_read(left, right, data, pieces)
        checks += 5
        moved += 5 * size
    checks += check_atomics(left, right)
    print(json.dumps({"checks": checks, "bytes": moved}))


if __name__ == "__main__":
    try:
        main()
    except Wrong as wrong:
        sys.exit(f"rdma_check: {wrong}")

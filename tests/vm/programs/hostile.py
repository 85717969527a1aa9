"""A process of the guest that does everything an ordinary user may do to the device, and none of what it should.

Runs in a guest with pyverbs: python3 hostile.py SEED ROUNDS. It rings the doorbells of everybody's handles, writes
garbage into its own rings and their indices, and ends without tidying up. Prints "done" if it got that far.

Memory is reached through ctypes, since pyverbs would check what we do: the rings are found by a wr_id that is nowhere
else, as the completion and the request that carry it lie in them.
"""

import ctypes
import mmap
import os
import random
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

PAGE = 4096
QP_DOORBELL, CQ_DOORBELL, SRQ_DOORBELL = 0, 1, 2
QP_BITS = (1 << 30, 1 << 31, 3 << 30, 0)
CQ_BITS = (1 << 29, 1 << 30, 1 << 31, 7 << 29)
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
WILD = (0, 1, 2, 15, 16, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF)


def words_at(address: int, count: int) -> Any:
    return (ctypes.c_uint32 * count).from_address(address)


def writable_memory() -> Iterator[tuple[int, int]]:
    """Start and length of what the allocator or the library has mapped, the stack and the device left out."""
    with open("/proc/self/maps") as file:
        for line in file:
            where, rights, *_, name = [*line.split(maxsplit=5), ""][:6]
            if rights == "rw-p" and not name.startswith(("[stack", "[v")):
                start, end = (int(part, 16) for part in where.split("-"))
                yield start, end - start


def find(pattern: bytes) -> list[int]:
    """Addresses of page-aligned occurrences: the first slot of a ring begins a page."""
    found = []
    for start, length in writable_memory():
        for page in range(start, start + length, PAGE):
            if ctypes.string_at(page, len(pattern)) == pattern:
                found.append(page)
    return found


class Victim:
    """A queue pair connected to itself, and where its rings are."""

    def __init__(self, context: Context, rng: random.Random) -> None:
        self.pd = PD(context)
        self.cq = CQ(context, 16)
        self.mr = MR(self.pd, PAGE, ACCESS)
        cap = QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=2, max_recv_sge=2)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1)
        self.qp = QP(self.pd, init)
        attr = QPAttr(port_num=1)
        attr.path_mtu, attr.dest_qp_num, attr.qp_access_flags = (
            e.IBV_MTU_1024,
            self.qp.qp_num,
            ACCESS,
        )
        route = GlobalRoute(dgid=context.query_gid(1, 1), sgid_index=1, hop_limit=64)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 8, 1, 1
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        self.qp.to_rts(attr)
        magic = rng.getrandbits(64)
        self.qp.post_recv(
            RecvWR(wr_id=magic ^ 1, num_sge=1, sg=[SGE(self.mr.buf, 64, self.mr.lkey)])
        )
        write = SendWR(
            wr_id=magic,
            num_sge=1,
            sg=[SGE(self.mr.buf, 64, self.mr.lkey)],
            opcode=e.IBV_WR_RDMA_WRITE,
        )
        write.set_wr_rdma(self.mr.rkey, self.mr.buf)
        self.qp.post_send(write)
        self.wait_for_completion()
        # The completion's queue and the request's: in both the state page is the one before.
        self.rings = find(struct.pack("=Q", magic))
        if len(self.rings) < 2:
            sys.exit(f"found {len(self.rings)} rings, not 2")

    def wait_for_completion(self) -> None:
        deadline = time.monotonic() + 20
        while not self.cq.poll(1)[0]:
            if time.monotonic() > deadline:
                sys.exit("the honest request did not complete")

    def post_garbage(self, rng: random.Random) -> None:
        """Fills slots with garbage that begins like a request, and moves the index as a library would."""
        for slots in self.rings:
            for slot in range(4):
                opcode = rng.choice([*range(20), *WILD])
                body = struct.pack(
                    "=Q6I", rng.getrandbits(64), rng.choice(WILD), 0, opcode, rng.choice(WILD), 0, 0
                ) + rng.randbytes(96)  # fmt: skip
                ctypes.memmove(slots + slot * 128, body, len(body))
            # prod_tail of the send ring, or of the completions.
            words_at(slots - PAGE, 4)[0] += rng.randrange(1, 4)

    def spoil_indices(self, rng: random.Random) -> None:
        for slots in self.rings:
            for index in range(4):
                words_at(slots - PAGE, 4)[index] = rng.choice([*WILD, rng.getrandbits(32)])


def ring_everything(doorbells: Any, rng: random.Random) -> None:
    """Every handle there may be, ours or not, and many there are not."""
    for handle in [*range(600), *(rng.getrandbits(24) for _ in range(100))]:
        doorbells[QP_DOORBELL] = handle | rng.choice(QP_BITS)
        doorbells[CQ_DOORBELL] = handle | rng.choice(CQ_BITS)
        doorbells[SRQ_DOORBELL] = handle | 1 << 30
    for offset in range(3, PAGE // 4, 37):
        doorbells[offset] = rng.getrandbits(32)


def main() -> None:
    rng = random.Random(int(sys.argv[1]))
    context = Context(name="vmw_pvrdma0")
    page = mmap.mmap(context.cmd_fd, PAGE, offset=0)
    doorbells = memoryview(page).cast("I")
    for _ in range(int(sys.argv[2])):
        victim = Victim(context, rng)
        victim.post_garbage(rng)
        ring_everything(doorbells, rng)
        victim.spoil_indices(rng)
        ring_everything(doorbells, rng)
    print("done", flush=True)
    # No destructor runs: the kernel has to tidy up.
    os._exit(0)


if __name__ == "__main__":
    main()

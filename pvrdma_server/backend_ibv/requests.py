"""Guest work requests as the host's: one conversion, one posting of a batch, and what must be freed afterwards.

pyverbs' work requests and elements hold memory that only `close` frees; `post_send` and `post_recv` copy them, so they
are closed right after.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.wr import SGE, RecvWR, SendWR

from pvrdma_server.abi.pvrdma_verbs import SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcOpcode, WrOpcode
from pvrdma_server.backend import Atomic, Invalidate, Rdma, SendWr

_SIGNALED: Final = int(SendFlags.SIGNALED)
# Inline data is the guest's to fetch: it lies in its WQE's buffers, which the host reads like any others.
_PASSED_FLAGS: Final = int(SendFlags.FENCE | SendFlags.SOLICITED)

# guest's opcode -> (ibv_wr_opcode, the completion's opcode)
OPCODES: Final[dict[int, tuple[int, int]]] = {
    int(WrOpcode.RDMA_WRITE): (0, int(WcOpcode.RDMA_WRITE)),
    int(WrOpcode.RDMA_WRITE_WITH_IMM): (1, int(WcOpcode.RDMA_WRITE)),
    int(WrOpcode.SEND): (2, int(WcOpcode.SEND)),
    int(WrOpcode.SEND_WITH_IMM): (3, int(WcOpcode.SEND)),
    int(WrOpcode.RDMA_READ): (4, int(WcOpcode.RDMA_READ)),
    int(WrOpcode.ATOMIC_CMP_AND_SWP): (5, int(WcOpcode.COMP_SWAP)),
    int(WrOpcode.ATOMIC_FETCH_AND_ADD): (6, int(WcOpcode.FETCH_ADD)),
    int(WrOpcode.SEND_WITH_INV): (9, int(WcOpcode.SEND)),
}
ALL_OPCODES: Final = frozenset(OPCODES)
NO_READS: Final = ALL_OPCODES - {
    WrOpcode.RDMA_READ, WrOpcode.ATOMIC_CMP_AND_SWP, WrOpcode.ATOMIC_FETCH_AND_ADD
}  # fmt: skip
_NOTHING: Final = Sge(0, 0, 0)


class Parts:
    """pyverbs objects of one batch, to be closed when it is posted."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: list[Any] = []

    def elements(self, sges: Sequence[Sge]) -> list[Any]:
        """Host elements; at least one, for pyverbs wants one where verbs do not."""
        made = [SGE(sge.addr, sge.length, sge.lkey) for sge in sges or (_NOTHING,)]
        self._made += made
        return made

    def send(self, number: int, wr: SendWr, sges: Sequence[Sge], *, signaled: bool) -> Any:
        """A host send request with work request id `number`."""
        flags = wr.send_flags & _PASSED_FLAGS | (_SIGNALED if signaled else 0)
        made = SendWR(
            wr_id=number, opcode=OPCODES[wr.opcode][0], num_sge=len(sges) or 1,
            imm_data=int.from_bytes(wr.imm, "little"), sg=self.elements(sges), send_flags=flags,
        )  # fmt: skip
        self._made.append(made)
        if not sges:
            made.num_sge = 0
        arm = wr.arm
        if isinstance(arm, Rdma):
            made.set_wr_rdma(arm.rkey, arm.remote_addr)
        elif isinstance(arm, Atomic):
            made.set_wr_atomic(arm.rkey, arm.remote_addr, arm.compare_add, arm.swap)
        elif isinstance(arm, Invalidate):
            made.imm_data = arm.rkey  # the same word of the host's request
        return made

    def recv(self, number: int, sges: Sequence[Sge]) -> Any:
        """A host receive request with work request id `number`."""
        made = RecvWR(number, len(sges) or 1, self.elements(sges))
        self._made.append(made)
        if not sges:
            made.num_sge = 0
        return made

    def close(self) -> None:
        """Free what the batch was made of."""
        for part in self._made:
            part.close()
        self._made.clear()


# Where pyverbs copies the request that failed, memory and all: read for its number, and never closed.
_FAILED_SEND: Final = SendWR(num_sge=1, sg=[SGE(0, 0, 0)])
_FAILED_RECV: Final = RecvWR(0, 1, [SGE(0, 0, 0)])


def post_sends(qp: Any, chain: list[Any]) -> int:
    """Post linked sends; how many the host took (all, unless one of them is not to its liking)."""
    return _post(qp.post_send, chain, _FAILED_SEND)


def post_recvs(queue: Any, chain: list[Any]) -> int:
    """Post linked receives to a queue pair or SRQ; how many the host took."""
    return _post(queue.post_recv, chain, _FAILED_RECV)


def _post(post: Callable[[Any, Any], None], chain: list[Any], spare: Any) -> int:
    if not chain:
        return 0
    for request, following in pairwise(chain):
        request.next_wr = following
    try:
        post(chain[0], spare)
    except PyverbsRDMAError:
        failed = int(spare.wr_id)
        return next((i for i, request in enumerate(chain) if int(request.wr_id) == failed), 0)
    return len(chain)

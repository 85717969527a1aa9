"""Guest work requests as the host's, and their posting.

pyverbs' objects cost more to make than a request costs to post, so `SendChain` keeps a chain of them that is filled in
anew for every batch. Requests with more than one element get objects of their own, which hold memory that only `close`
frees. Posting copies everything.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from struct import Struct
from typing import Any, Final, NamedTuple

from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.wr import SGE, RecvWR, SendWR

from pvrdma_server.abi.pvrdma_verbs import SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import Sge, WcOpcode, WrOpcode
from pvrdma_server.backend import Arm, Atomic, Invalidate, Rdma, Ud
from pvrdma_server.qp_ops import PlainSend

# Requests handed to the host in one call; more would keep a vCPU waiting.
BATCH: Final = 32
_SIGNALED: Final = int(SendFlags.SIGNALED)
# Inline data is the guest's to fetch: it lies in its WQE's buffers, which the host reads like any others.
_PASSED_FLAGS: Final = int(SendFlags.FENCE | SendFlags.SOLICITED)
_KEPT_FLAGS: Final = _PASSED_FLAGS | _SIGNALED

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
# What a queue pair takes: the arm that each opcode must come with.
DATAGRAMS: Final[dict[int, type]] = {int(WrOpcode.SEND): Ud, int(WrOpcode.SEND_WITH_IMM): Ud}
# Requests that need no more than an RDMA's arm, and go a shorter way if they have one element.
PLAIN_NO_READS: Final = frozenset(
    map(
        int,
        (
            WrOpcode.RDMA_WRITE,
            WrOpcode.RDMA_WRITE_WITH_IMM,
            WrOpcode.SEND,
            WrOpcode.SEND_WITH_IMM,
        ),
    )
)
PLAIN: Final = PLAIN_NO_READS | {int(WrOpcode.RDMA_READ)}
NO_READS: Final[dict[int, type]] = {
    int(WrOpcode.RDMA_WRITE): Rdma,
    int(WrOpcode.RDMA_WRITE_WITH_IMM): Rdma,
    int(WrOpcode.SEND): type(None),
    int(WrOpcode.SEND_WITH_IMM): type(None),
    int(WrOpcode.SEND_WITH_INV): Invalidate,
}
CONNECTED: Final[dict[int, type]] = NO_READS | {
    int(WrOpcode.RDMA_READ): Rdma,
    int(WrOpcode.ATOMIC_CMP_AND_SWP): Atomic,
    int(WrOpcode.ATOMIC_FETCH_AND_ADD): Atomic,
}
_NOTHING: Final = Sge(0, 0, 0)


class HostSend(NamedTuple):
    """A send request in the host's terms. `number` is its work request id, `handle` a datagram's address handle."""

    number: int
    opcode: int
    send_flags: int
    signaled: bool
    imm: bytes
    sges: tuple[Sge, ...]
    arm: Arm
    handle: Any


class SendChain:
    """Linked send requests of one element each, in which every batch is posted. A batch takes the chain's end."""

    __slots__ = ("_elements", "_requests")

    def __init__(self) -> None:
        """Once for the life of the process: its memory is never freed."""
        self._elements = [SGE(0, 0, 0) for _ in range(BATCH)]
        self._requests = [SendWR(num_sge=1, sg=[element]) for element in self._elements]
        for request, element in zip(self._requests, self._elements, strict=True):
            request.sg_list = element  # from now on it sees what is written to the element
            _keep_for_ever(element)  # both free the element's memory when they end
        for request, following in pairwise(self._requests):
            request.next_wr = following

    def post_plain(
        self, qp: Any, numbers: Sequence[int], sends: Sequence[PlainSend], signals: int
    ) -> int:
        """As `post`, of sends with opcodes in `PLAIN` and one element.

        The last one is signalled in any case; `signals` is SendFlags.SIGNALED or, if each says so for itself, 0.
        """
        first = BATCH - len(sends)
        requests = self._requests[first:]
        for request, element, number, send in zip(
            requests, self._elements[first:], numbers, sends, strict=True
        ):
            _, _, opcode, flags, ex, remote_addr, rkey, addr, length, lkey = send
            element.addr = addr
            element.length = length
            element.lkey = lkey
            request.num_sge = 1
            request.wr_id = number
            request.opcode = OPCODES[opcode][0]
            request.send_flags = flags & _KEPT_FLAGS | signals
            request.imm_data = ex
            request.set_wr_rdma(rkey, remote_addr)  # no other arm's words
        requests[-1].send_flags = sends[-1][3] & _KEPT_FLAGS | _SIGNALED
        return _post(qp.post_send, requests, _FAILED_SEND)

    def post(self, qp: Any, sends: Sequence[HostSend]) -> int:
        """Post up to `BATCH` sends; how many the host took (all, unless one of them is not to its liking)."""
        if any(len(send.sges) > 1 for send in sends):
            return _post_made(qp, sends)
        first = BATCH - len(sends)
        for request, element, send in zip(
            self._requests[first:], self._elements[first:], sends, strict=True
        ):
            if send.sges:
                element.addr, element.length, element.lkey = send.sges[0]
                request.num_sge = 1
            else:
                request.num_sge = 0
            request.wr_id = send.number
            request.opcode = OPCODES[send.opcode][0]
            _fill(request, send)
        return _post(qp.post_send, self._requests[first:], _FAILED_SEND)


def _fill(request: Any, send: HostSend) -> None:
    request.send_flags = send.send_flags & _PASSED_FLAGS | (_SIGNALED if send.signaled else 0)
    request.imm_data = int.from_bytes(send.imm, "little")
    arm = send.arm
    if isinstance(arm, Rdma):
        request.set_wr_rdma(arm.rkey, arm.remote_addr)
    elif isinstance(arm, Atomic):
        request.set_wr_atomic(arm.rkey, arm.remote_addr, arm.compare_add, arm.swap)
    elif isinstance(arm, Invalidate):
        request.imm_data = arm.rkey  # the same word of the host's request
    elif isinstance(arm, Ud):
        request.set_wr_ud(send.handle, arm.remote_qpn, arm.qkey)


def _post_made(qp: Any, sends: Sequence[HostSend]) -> int:
    chain = []
    for send in sends:
        elements = [SGE(*sge) for sge in send.sges or (_NOTHING,)]
        made = SendWR(
            wr_id=send.number, opcode=OPCODES[send.opcode][0], num_sge=len(elements), sg=elements
        )
        made.num_sge = len(send.sges)
        _fill(made, send)
        chain.append(made)
        for element in elements:
            element.close()
    for request, following in pairwise(chain):
        request.next_wr = following
    try:
        return _post(qp.post_send, chain, _FAILED_SEND)
    finally:
        for made in chain:
            made.close()


class RecvChain:
    """Likewise for receives. pyverbs tells where their elements are, and has nothing else to write them with."""

    __slots__ = ("_elements", "_requests")

    def __init__(self) -> None:
        """Once for the life of the process."""
        self._requests = [RecvWR(0, 1, [SGE(0, 0, 0)]) for _ in range(BATCH)]
        self._elements = [
            (ctypes.c_char * _ELEMENT.size).from_address(request.sg_list)
            for request in self._requests
        ]
        for request, following in pairwise(self._requests):
            request.next_wr = following

    def post(self, queue: Any, receives: Sequence[tuple[int, Sequence[Sge]]]) -> int:
        """As `post_recvs`, up to `BATCH` with one element at most."""
        first = BATCH - len(receives)
        requests = self._requests[first:]
        write = _ELEMENT.pack_into
        for request, memory, (number, sges) in zip(
            requests, self._elements[first:], receives, strict=True
        ):
            request.wr_id = number
            request.num_sge = len(sges)
            if sges:
                write(memory, 0, *sges[0])
        return _post(queue.post_recv, requests, _FAILED_RECV)


# Source: verbs.h, struct ibv_sge.
_ELEMENT: Final = Struct("=QII")
# As _CHAIN in work.py. pyverbs 60 does not tell where a receive's elements are.
_RECV_CHAIN: Final = RecvChain() if hasattr(RecvWR, "sg_list") else None


def post_recvs(queue: Any, receives: Sequence[tuple[int, Sequence[Sge]]]) -> int:
    """Post receives (number, elements) to a queue pair or SRQ; how many the host took."""
    if _RECV_CHAIN is not None and all(len(sges) <= 1 for _, sges in receives):
        return _RECV_CHAIN.post(queue, receives)
    chain = []
    for number, sges in receives:
        elements = [SGE(*sge) for sge in sges or (_NOTHING,)]
        made = RecvWR(
            number, len(elements), elements
        )  # pyverbs wants an element where verbs do not
        made.num_sge = len(sges)
        chain.append(made)
        for element in elements:
            element.close()
    for request, following in pairwise(chain):
        request.next_wr = following
    try:
        return _post(queue.post_recv, chain, _FAILED_RECV)
    finally:
        for made in chain:
            made.close()


def _keep_for_ever(thing: Any) -> Any:
    """An object that shares its C memory with another, and would free it a second time when it ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


# Where pyverbs copies the request that failed, pointer to its elements and all: read for its number only.
_FAILED_SEND: Final = _keep_for_ever(SendWR(num_sge=1, sg=[SGE(0, 0, 0)]))
_FAILED_RECV: Final = _keep_for_ever(RecvWR(0, 1, [SGE(0, 0, 0)]))


def _post(post: Callable[[Any, Any], None], chain: list[Any], spare: Any) -> int:
    if not chain:
        return 0
    try:
        post(chain[0], spare)
    except PyverbsRDMAError:
        failed = int(spare.wr_id)
        return next((i for i, request in enumerate(chain) if int(request.wr_id) == failed), 0)
    return len(chain)

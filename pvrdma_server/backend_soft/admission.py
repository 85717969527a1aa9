"""What a send request of each opcode becomes: its message kind, its PSNs, or its failure.

Contract: `admit` runs once per request, in posting order, when everything before it has at least
been sent. FAST_REG_MR and LOCAL_INV are executed right here.
"""

from collections.abc import Callable, Sequence

from pvrdma_server.abi.vmw_pvrdma_abi import Sge
from pvrdma_server.backend import Atomic, FastReg, Invalidate, Rdma, Refused, SendWr
from pvrdma_server.backend_soft import wire
from pvrdma_server.backend_soft.codes import (
    LOC_LEN_ERR,
    LOC_PROT_ERR,
    LOC_QP_OP_ERR,
    LOCAL_WRITE,
    MW_BIND_ERR,
    OP_CMP_SWAP,
    OP_FAST_REG,
    OP_FETCH_ADD,
    OP_LOCAL_INV,
    OP_READ,
    OP_SEND,
    OP_SEND_IMM,
    OP_SEND_INV,
    OP_WRITE,
    OP_WRITE_IMM,
    SOLICIT,
)
from pvrdma_server.backend_soft.context import QpContext
from pvrdma_server.backend_soft.scatter import sges_length
from pvrdma_server.backend_soft.wqe import Wqe
from pvrdma_server.errors import GuestError


def admit(ctx: QpContext, wr: SendWr, psn: int) -> Wqe:
    """Give a request its PSNs from `psn` on; its `status` tells whether it failed already."""
    wqe = Wqe(wr, psn)
    start = _START.get(wr.opcode)
    if type(wr.arm) is Refused:
        wqe.status = wr.arm.status
    elif start is None:
        wqe.status = LOC_QP_OP_ERR
    else:
        wqe.status = start(ctx, wqe, wr)
    if wqe.status:
        wqe.answered = True
    return wqe


def atomic_operands(wr: SendWr) -> tuple[int, int, int]:
    """(operation code, compare_add, swap) of an admitted atomic."""
    arm = wr.arm
    assert type(arm) is Atomic
    code = wire.ATOMIC_CMP_SWAP if wr.opcode == OP_CMP_SWAP else wire.ATOMIC_FETCH_ADD
    return code, arm.compare_add, arm.swap


def _start_data(ctx: QpContext, wqe: Wqe, wr: SendWr) -> int:
    flags = wire.SOLICITED if wr.send_flags & SOLICIT else 0
    opcode, arm = wr.opcode, wr.arm
    if opcode in (OP_WRITE, OP_WRITE_IMM):
        if type(arm) is not Rdma:
            return LOC_QP_OP_ERR
        wqe.kind = wire.WRITE
        wqe.remote_addr, wqe.rkey = arm
    else:
        wqe.kind = wire.SEND
        if opcode == OP_SEND_INV:
            if type(arm) is not Invalidate:
                return LOC_QP_OP_ERR
            wqe.rkey = arm.rkey
            flags |= wire.WITH_INV
    if opcode in (OP_SEND_IMM, OP_WRITE_IMM):
        flags |= wire.WITH_IMM
    wqe.flags = flags
    config, sges = ctx.env.config, wr.sges
    wqe.total = total = sges[0].length if len(sges) == 1 else sges_length(sges)
    if total > config.max_msg_size:
        return LOC_LEN_ERR
    wqe.last = wqe.first + (total - 1) // config.chunk_bytes if total else wqe.first
    return 0


def _start_read(ctx: QpContext, wqe: Wqe, wr: SendWr) -> int:
    if type(wr.arm) is not Rdma or not ctx.max_rd_atomic:
        return LOC_QP_OP_ERR
    wqe.kind = wire.READ_REQUEST
    wqe.remote_addr, wqe.rkey = wr.arm
    wqe.total = sges_length(wr.sges)
    if wqe.total > ctx.env.config.max_msg_size:
        return LOC_LEN_ERR
    return _start_response(ctx, wqe, wr.sges)


def _start_atomic(ctx: QpContext, wqe: Wqe, wr: SendWr) -> int:
    if type(wr.arm) is not Atomic or not ctx.max_rd_atomic:
        return LOC_QP_OP_ERR
    wqe.kind = wire.ATOMIC_REQUEST
    wqe.remote_addr, wqe.rkey = wr.arm.remote_addr, wr.arm.rkey
    wqe.total = 8
    if sges_length(wr.sges) < 8:
        return LOC_LEN_ERR
    return _start_response(ctx, wqe, wr.sges)


def _start_response(ctx: QpContext, wqe: Wqe, sges: Sequence[Sge]) -> int:
    # Where the response goes is checked before anything is asked for.
    try:
        left = wqe.total
        for sge in sges:
            length = min(left, sge.length)
            ctx.env.keys.check_untrusted(ctx.pd, sge.lkey, sge.addr, length, LOCAL_WRITE)
            left -= length
    except GuestError:
        return LOC_PROT_ERR
    wqe.last = wqe.first
    return 0


def _start_fast_reg(ctx: QpContext, wqe: Wqe, wr: SendWr) -> int:
    # IBA 10.6.5, 11.6.2: without the privilege the operation is illegal on this QP; with it,
    # a region in the wrong state or a bad page list is a memory management operation error,
    # which the verbs report under the number of a failed bind.
    memory = ctx.env.memory
    if not ctx.pd.privileged or type(wr.arm) is not FastReg or memory is None:
        return LOC_QP_OP_ERR
    try:
        ctx.env.keys.fast_reg_untrusted(ctx.pd, memory, wr.arm)
    except GuestError:
        return MW_BIND_ERR
    wqe.answered = True
    return 0


def _start_local_inv(ctx: QpContext, wqe: Wqe, wr: SendWr) -> int:
    if not ctx.pd.privileged or type(wr.arm) is not Invalidate:
        return LOC_QP_OP_ERR
    try:
        ctx.env.keys.invalidate_untrusted(ctx.pd, wr.arm.rkey)
    except GuestError:
        return MW_BIND_ERR
    wqe.answered = True
    return 0


_START: dict[int, Callable[[QpContext, Wqe, SendWr], int]] = {
    OP_WRITE: _start_data,
    OP_WRITE_IMM: _start_data,
    OP_SEND: _start_data,
    OP_SEND_IMM: _start_data,
    OP_SEND_INV: _start_data,
    OP_READ: _start_read,
    OP_CMP_SWAP: _start_atomic,
    OP_FETCH_ADD: _start_atomic,
    OP_LOCAL_INV: _start_local_inv,
    OP_FAST_REG: _start_fast_reg,
}

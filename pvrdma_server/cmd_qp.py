"""The queue pair commands: create, modify, query, destroy.

Contract: as cmd_ring.py. MODIFY_QP keeps every attribute it accepts and refuses, with the reason in the log, what it
would have to ignore (automatic path migration) or what the specification forbids.
"""

import errno
from collections.abc import Callable
from typing import Final

from pvrdma_server import backend as b
from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_verbs import QP_ATTR, QpAttr, QpAttrMask, QpCap, QpState, QpType
from pvrdma_server.cmd_base import (
    IGNORED_ACCESS,
    KNOWN_ACCESS,
    Adapter,
    RefusedResponse,
    check_chunks,
    check_count,
    check_size,
    pages_for,
    queue_pages,
)
from pvrdma_server.errors import BackendError, CommandError, TableFullError
from pvrdma_server.objects import Pd, Qp, QpQueues
from pvrdma_server.qp_ops import rq_entry_size, send_rules, sq_entry_size
from pvrdma_server.qp_state import refusal
from pvrdma_server.resources import Resources
from pvrdma_server.rings import RX_STATE_OFFSET, TX_STATE_OFFSET, ConsumerRing

# The one handle that a process's queue pair cannot have: rdma-core takes it for "use the QPN".
GSI_HANDLE: Final = 0
_NO_ATTR: Final[QpAttr] = QP_ATTR.unpack_from(bytes(QP_ATTR.size))


def create_qp(
    adapter: Adapter, req: api.CmdCreateQp
) -> api.CmdCreateQpResp | api.CmdCreateQpRespV2:
    """CREATE_QP. The answer's layout is that of the driver's version."""
    if req.qp_type not in (QpType.RC, QpType.UD, QpType.GSI):
        raise CommandError(errno.EOPNOTSUPP, f"QP type {req.qp_type}")
    tables = adapter.resources
    pd = tables.pds.get_untrusted(req.pd_handle)
    send_cq = tables.cqs.get_untrusted(req.send_cq_handle)
    recv_cq = tables.cqs.get_untrusted(req.recv_cq_handle)
    srq = tables.srqs.get_untrusted(req.srq_handle) if req.is_srq else None
    if {send_cq.ctx, recv_cq.ctx, srq.pd.ctx if srq else pd.ctx} != {pd.ctx}:
        raise CommandError(errno.EPERM, "PD, CQs and SRQ belong to different processes")
    if req.qp_type == QpType.GSI and pd.ctx is not None:
        raise CommandError(errno.EPERM, "QP1 is the kernel's")
    queues, init = _qp_queues(adapter, req, pd)
    cap = QpCap(init.max_send_wr, init.max_recv_wr, init.max_send_sge, init.max_recv_sge, 0)

    def start() -> Qp:
        qp = Qp(
            qp_type=req.qp_type, pd=pd, send_cq=send_cq, recv_cq=recv_cq, srq=srq, queues=queues,
            attr=_NO_ATTR._replace(cap=cap), memory=adapter.memory, hooks=adapter.hooks,
        )  # fmt: skip
        qp.start(adapter.backend.create_qp(pd.backend, qp, init, srq.backend if srq else None))
        return qp

    separate = adapter.version >= api.QPHANDLE_VERSION
    qp = start() if separate else _start_with_small_qpn(start, tables.qps.limit)
    try:
        qp.handle = _handle(tables, req.qp_type, None if separate else qp.backend.qpn)
    except TableFullError:
        qp.destroy()
        raise
    tables.qps.put(qp.handle, qp)
    if separate:
        return api.CmdCreateQpRespV2(qp.backend.qpn, qp.handle, *cap)
    return api.CmdCreateQpResp(qp.backend.qpn, *cap)


def _start_with_small_qpn(start: Callable[[], Qp], limit: int) -> Qp:
    """Before version 20 the QPN is the handle; one that is too large is held while another is drawn."""
    qp = start()
    if qp.backend.qpn < limit:
        return qp
    try:
        return start()
    finally:
        qp.destroy()


def _handle(tables: Resources, qp_type: int, qpn: int | None) -> int:
    if qpn is not None:
        return tables.qps.claim(qpn)
    return tables.qps.claim(GSI_HANDLE) if qp_type == QpType.GSI else tables.qps.reserve()


def _qp_queues(adapter: Adapter, req: api.CmdCreateQp, pd: Pd) -> tuple[QpQueues, b.QpInit]:
    caps = adapter.caps
    send_wr = check_size("max_send_wr", req.max_send_wr, caps.max_qp_wr)
    send_sge = check_count("max_send_sge", req.max_send_sge, caps.max_sge)
    send_pages = pages_for(send_wr, sq_entry_size(send_sge))
    recv_wr = recv_sge = recv_pages = 0
    if not req.is_srq:
        recv_wr = check_size("max_recv_wr", req.max_recv_wr, caps.max_qp_wr)
        recv_sge = check_count("max_recv_sge", req.max_recv_sge, caps.max_sge)
        recv_pages = pages_for(recv_wr, rq_entry_size(recv_sge))
    check_chunks(req.send_chunks, send_pages)
    check_chunks(req.total_chunks, 1 + req.send_chunks + recv_pages)
    pages = queue_pages(adapter, req.pdir_dma, req.total_chunks)
    rules = send_rules(
        req.qp_type, privileged=pd.ctx is None, max_sge=send_sge, sq_sig_all=bool(req.sq_sig_all)
    )
    sq = ConsumerRing(pages, TX_STATE_OFFSET, 1, sq_entry_size(send_sge), send_wr)
    rq = None
    if not req.is_srq:
        rq = ConsumerRing(
            pages, RX_STATE_OFFSET, 1 + req.send_chunks, rq_entry_size(recv_sge), recv_wr
        )
    init = b.QpInit(req.qp_type, send_wr, recv_wr, send_sge, recv_sge, bool(req.sq_sig_all))
    return QpQueues(sq, rq, rules, recv_sge), init


def modify_qp(adapter: Adapter, req: api.CmdModifyQp) -> RefusedResponse | None:
    """MODIFY_QP. An illegal request is refused in the response, which the driver turns into -EINVAL."""
    qp = adapter.resources.qps.get_untrusted(req.qp_handle)
    why = _modify_refusal(adapter, qp, req.attr_mask, req.attrs)
    if why is not None:
        adapter.hooks.guest_error("modify_qp", CommandError(errno.EINVAL, f"qp {qp.handle}: {why}"))
        return RefusedResponse(errno.EINVAL)
    state = req.attrs.qp_state if req.attr_mask & QpAttrMask.STATE else qp.state
    if state == QpState.RESET:
        attr = _NO_ATTR._replace(cap=qp.attr.cap)
    else:
        attr = _merge(qp.attr, req.attrs, req.attr_mask)._replace(
            qp_state=state, cur_qp_state=state
        )
    try:
        before, qp.attr = qp.attr, attr
        qp.backend.modify(attr, req.attr_mask)
    except BackendError:
        qp.attr = before
        raise
    qp.look_again()
    return None


# mask bit -> attributes it carries. ALT_PATH and a migration state other than "migrated" are refused before.
_CARRIES: Final[dict[int, tuple[str, ...]]] = {
    QpAttrMask.EN_SQD_ASYNC_NOTIFY: ("en_sqd_async_notify",),
    QpAttrMask.ACCESS_FLAGS: ("qp_access_flags",),
    QpAttrMask.PKEY_INDEX: ("pkey_index",),
    QpAttrMask.PORT: ("port_num",),
    QpAttrMask.QKEY: ("qkey",),
    QpAttrMask.AV: ("ah_attr",),
    QpAttrMask.PATH_MTU: ("path_mtu",),
    QpAttrMask.TIMEOUT: ("timeout",),
    QpAttrMask.RETRY_CNT: ("retry_cnt",),
    QpAttrMask.RNR_RETRY: ("rnr_retry",),
    QpAttrMask.RQ_PSN: ("rq_psn",),
    QpAttrMask.MAX_QP_RD_ATOMIC: ("max_rd_atomic",),
    QpAttrMask.MIN_RNR_TIMER: ("min_rnr_timer",),
    QpAttrMask.SQ_PSN: ("sq_psn",),
    QpAttrMask.MAX_DEST_RD_ATOMIC: ("max_dest_rd_atomic",),
    QpAttrMask.DEST_QPN: ("dest_qp_num",),
}


def _merge(old: QpAttr, new: QpAttr, mask: int) -> QpAttr:
    names = [name for bit, carried in _CARRIES.items() if mask & bit for name in carried]
    return old._replace(**{name: getattr(new, name) for name in names})


def _modify_refusal(adapter: Adapter, qp: Qp, mask: int, attr: QpAttr) -> str | None:
    if mask & QpAttrMask.CUR_STATE and attr.cur_qp_state != qp.state:
        return f"the state is {qp.state}, not {attr.cur_qp_state}"
    target = attr.qp_state if mask & QpAttrMask.STATE else qp.state
    why = refusal(qp.qp_type, qp.state, target, mask)
    if why is not None:
        return why
    for bit, check, what in _ATTR_CHECKS:
        if mask & bit and not check(adapter, attr):
            return what
    return None


def _gid_known(adapter: Adapter, attr: QpAttr) -> bool:
    return attr.ah_attr.grh.sgid_index in adapter.resources.gids


_Check = Callable[[Adapter, QpAttr], bool]
_ATTR_CHECKS: Final[tuple[tuple[int, _Check, str], ...]] = (
    (QpAttrMask.PORT, lambda _, t: t.port_num == 1, "there is port 1 only"),
    (QpAttrMask.PKEY_INDEX, lambda _, t: t.pkey_index == 0, "the pkey table has one entry"),
    (QpAttrMask.PATH_MTU, lambda _, t: 1 <= t.path_mtu <= 5, "path MTU codes are 1 to 5"),
    (QpAttrMask.RQ_PSN, lambda _, t: t.rq_psn < 1 << 24, "rq_psn has 24 bits"),
    (QpAttrMask.SQ_PSN, lambda _, t: t.sq_psn < 1 << 24, "sq_psn has 24 bits"),
    (QpAttrMask.DEST_QPN, lambda _, t: t.dest_qp_num < 1 << 24, "dest_qp_num has 24 bits"),
    (QpAttrMask.TIMEOUT, lambda _, t: t.timeout < 32, "timeout has 5 bits"),
    (QpAttrMask.MIN_RNR_TIMER, lambda _, t: t.min_rnr_timer < 32, "min_rnr_timer has 5 bits"),
    (QpAttrMask.RETRY_CNT, lambda _, t: t.retry_cnt < 8, "retry_cnt has 3 bits"),
    (QpAttrMask.RNR_RETRY, lambda _, t: t.rnr_retry < 8, "rnr_retry has 3 bits"),
    (QpAttrMask.ALT_PATH, lambda _, t: False, "no automatic path migration"),
    (QpAttrMask.PATH_MIG_STATE, lambda _, t: t.path_mig_state == 0, "no automatic path migration"),
    (QpAttrMask.CAP, lambda _, t: False, "queue sizes are fixed at creation"),
    (QpAttrMask.AV, _gid_known, "sgid_index names no GID of this port"),
    (
        QpAttrMask.ACCESS_FLAGS,
        lambda _, t: not t.qp_access_flags & ~(KNOWN_ACCESS | IGNORED_ACCESS),
        "unknown access flags",
    ),
    (
        QpAttrMask.MAX_QP_RD_ATOMIC,
        lambda a, t: t.max_rd_atomic <= a.caps.max_qp_init_rd_atom,
        "max_rd_atomic is above the device's",
    ),
    (
        QpAttrMask.MAX_DEST_RD_ATOMIC,
        lambda a, t: t.max_dest_rd_atomic <= a.caps.max_qp_rd_atom,
        "max_dest_rd_atomic is above the device's",
    ),
)


def query_qp(adapter: Adapter, req: api.CmdQueryQp) -> api.CmdQueryQpResp:
    """QUERY_QP: all attributes as they stand, whatever the mask asks for."""
    qp = adapter.resources.qps.get_untrusted(req.qp_handle)
    return api.CmdQueryQpResp(qp.backend.query(qp.attr))


def destroy_qp(adapter: Adapter, req: api.CmdDestroyQp) -> None:
    """DESTROY_QP."""
    adapter.resources.destroy_qp(req.qp_handle)

"""The command slot: decode, a table of handlers, encode; and the two rings on which the device reports by itself.

Contract: `execute_untrusted` takes a snapshot of the request slot and returns the bytes of the response slot; it raises
`CommandError` when the driver must see a failure in ERR. Everything a command does is done when it returns, for the
driver frees pages right after it has read ERR.

Failure travels in the ERR register: the driver looks at `resp.err` for MODIFY_QP only (and turns it into -EINVAL, which
is what an illegal transition deserves), everywhere else a response with ERR 0 is success to it.

Source: drivers/infiniband/hw/vmw_pvrdma/pvrdma_cmd.c, pvrdma_dev_api.h.
"""

import errno
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from pvrdma_server import backend as b
from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.layout import Layout
from pvrdma_server.abi.pvrdma_dev_api import Cmd, MrFlags
from pvrdma_server.abi.pvrdma_verbs import AccessFlags, PortCapFlags, SrqAttr, SrqAttrMask
from pvrdma_server.abi.vmw_pvrdma_abi import CQE_SIZE
from pvrdma_server.cmd_base import (
    IGNORED_ACCESS,
    KNOWN_ACCESS,
    REGION_ACCESS,
    WRITING_ACCESS,
    Adapter,
    RefusedResponse,
    ReservedHandle,
    check_chunks,
    check_count,
    check_size,
    pages_for,
    queue_pages,
)
from pvrdma_server.cmd_qp import create_qp, destroy_qp, modify_qp, query_qp
from pvrdma_server.errors import (
    BackendError,
    BadHandle,
    CommandError,
    GuestError,
    TableFullError,
)
from pvrdma_server.guest_memory import PAGE_SHIFT, PAGE_SIZE, GuestPages, walk_pdir_untrusted
from pvrdma_server.objects import Cq, Gid, Mr, Pd, Receiver, Srq, UserContext
from pvrdma_server.qp_ops import rq_entry_size
from pvrdma_server.rings import RX_STATE_OFFSET, ConsumerRing, ProducerRing

# The only partition of a RoCE port. rdma_cm refuses any other.
DEFAULT_PKEY: Final = 0xFFFF


class Outcome(NamedTuple):
    """The result of a command that did not fail: the response slot, and whether the driver waits for it."""

    response: bytes
    wait: bool


def execute_untrusted(adapter: Adapter, request: bytes) -> Outcome:
    """Execute the command in a snapshot of the request slot.

    Args:
        adapter: the device.
        request: `CMD_REQ_SIZE` bytes.

    Raises:
        CommandError: the command failed; its errno belongs in ERR.
    """
    header = api.CMD_HDR.unpack_from(request)
    entry = COMMANDS.get(header.cmd)
    if entry is None:
        raise CommandError(errno.EOPNOTSUPP, f"command {header.cmd:#x}")
    try:
        body = entry.handler(adapter, entry.request.unpack_from(request))
    except TableFullError as e:
        raise CommandError(errno.ENOMEM, f"{Cmd(header.cmd).name}: {e}") from e
    except BadHandle as e:
        raise CommandError(errno.ENOENT, f"{Cmd(header.cmd).name}: {e}") from e
    except CommandError:
        raise
    except GuestError as e:
        raise CommandError(errno.EFAULT, f"{Cmd(header.cmd).name}: {e}") from e
    except BackendError as e:
        raise CommandError(e.errno, f"{Cmd(header.cmd).name}: {e}") from e
    err = body.err if isinstance(body, RefusedResponse) else 0
    head = api.CMD_RESP_HDR.pack(
        api.CmdRespHdr(response=header.response, ack=api.CMD_FIRST_RESP + header.cmd, err=err)
    )
    for layout in entry.responses:
        if isinstance(body, layout.record):
            return Outcome(head + layout.pack(body)[len(head) :], entry.wait)
    return Outcome(head, entry.wait)


# --- ports, GIDs, contexts, protection domains ---------------------------------------------------------------------


def _check_port(port: int) -> None:
    if port != 1:
        raise CommandError(errno.EINVAL, f"port {port}; there is port 1 only")


def _query_port(adapter: Adapter, req: api.CmdQueryPort) -> api.CmdQueryPortResp:
    _check_port(req.port_num)
    attr = adapter.backend.query_port()
    return api.CmdQueryPortResp(
        attr._replace(
            gid_tbl_len=adapter.caps.gid_tbl_len,
            pkey_tbl_len=1,
            # Without IP_BASED_GIDS rdma-core makes address handles without a MAC address.
            port_cap_flags=attr.port_cap_flags | PortCapFlags.CM_SUP | PortCapFlags.IP_BASED_GIDS,
        )
    )


def _query_pkey(adapter: Adapter, req: api.CmdQueryPkey) -> api.CmdQueryPkeyResp:
    _check_port(req.port_num)
    if req.index:
        raise CommandError(errno.EINVAL, f"pkey index {req.index}; the table has one entry")
    return api.CmdQueryPkeyResp(DEFAULT_PKEY)


def _create_bind(adapter: Adapter, req: api.CmdCreateBind) -> None:
    if req.index >= adapter.caps.gid_tbl_len:
        raise CommandError(errno.EINVAL, f"GID index {req.index} of {adapter.caps.gid_tbl_len}")
    # A version 17 driver knows no types; its one type is RoCE v1.
    gid_type = req.gid_type if adapter.version >= api.ROCEV2_VERSION else api.GidType.ROCE_V1
    if gid_type != adapter.caps.gid_types:
        raise CommandError(
            errno.EINVAL, f"GID type {gid_type}, the device does {adapter.caps.gid_types}"
        )
    if req.index in adapter.resources.gids:
        adapter.backend.remove_gid(req.index)
        del adapter.resources.gids[req.index]
    adapter.backend.add_gid(req.index, req.new_gid, gid_type)
    adapter.resources.gids[req.index] = Gid(req.new_gid, gid_type)


def _destroy_bind(adapter: Adapter, req: api.CmdDestroyBind) -> None:
    gid = adapter.resources.gids.get(req.index)
    if gid is None or gid.gid != req.dest_gid:
        raise CommandError(errno.ENOENT, f"no GID {req.dest_gid.hex()} at index {req.index}")
    del adapter.resources.gids[req.index]
    adapter.backend.remove_gid(req.index)


def _create_uc(adapter: Adapter, req: api.CmdCreateUc64) -> api.CmdCreateUcResp:
    pfn = req.pfn64 if adapter.version >= api.PPN64_VERSION else req.pfn64 & 0xFFFF_FFFF
    page = pfn - adapter.uar_pfn
    if not 1 <= page < adapter.max_uar:
        raise CommandError(errno.EINVAL, f"page frame {pfn:#x} is no doorbell page for a process")
    if any(ctx.uar_page == page for ctx in adapter.resources.contexts):
        raise CommandError(errno.EBUSY, f"doorbell page {page} has an owner")
    handle = adapter.resources.contexts.reserve()
    adapter.resources.contexts.put(handle, UserContext(handle, page))
    return api.CmdCreateUcResp(handle)


def _destroy_uc(adapter: Adapter, req: api.CmdDestroyUc) -> None:
    adapter.resources.destroy_context(req.ctx_handle)


def _context(adapter: Adapter, handle: int) -> UserContext | None:
    return adapter.resources.contexts.get_untrusted(handle) if handle else None


def _create_pd(adapter: Adapter, req: api.CmdCreatePd) -> api.CmdCreatePdResp:
    ctx = _context(adapter, req.ctx_handle)
    with ReservedHandle(adapter.resources.pds) as handle:
        pd = Pd(handle, ctx, adapter.backend.create_pd(privileged=ctx is None))
        adapter.resources.pds.put(handle, pd)
    return api.CmdCreatePdResp(handle)


def _destroy_pd(adapter: Adapter, req: api.CmdDestroyPd) -> None:
    adapter.resources.destroy_pd(req.pd_handle)


# --- memory regions ------------------------------------------------------------------------------------------------


def _create_mr(adapter: Adapter, req: api.CmdCreateMr) -> api.CmdCreateMrResp:
    pd = adapter.resources.pds.get_untrusted(req.pd_handle)
    access = req.access_flags & ~(IGNORED_ACCESS | REGION_ACCESS)
    if access & ~KNOWN_ACCESS:
        raise CommandError(errno.EOPNOTSUPP, f"access flags {access:#x}")
    if access & WRITING_ACCESS and not access & AccessFlags.LOCAL_WRITE:
        raise CommandError(errno.EINVAL, "remote write and atomics need local write")
    with ReservedHandle(adapter.resources.mrs) as handle:
        mr = _MR_KINDS[req.flags](adapter, pd, req, access) if req.flags in _MR_KINDS else None
        if mr is None:
            raise CommandError(errno.EINVAL, f"region flags {req.flags:#x}")
        adapter.resources.mrs.put(handle, Mr(handle, pd, mr, req.length))
    return api.CmdCreateMrResp(handle, mr.lkey, mr.rkey)


def _user_mr(adapter: Adapter, pd: Pd, req: api.CmdCreateMr, access: int) -> b.BackendMr:
    pages = ((req.start & (PAGE_SIZE - 1)) + req.length + PAGE_SIZE - 1) >> PAGE_SHIFT
    if not 0 < req.length <= adapter.caps.max_mr_size or req.start + req.length > 1 << 64:
        raise CommandError(errno.EINVAL, f"region of {req.length:#x} bytes at {req.start:#x}")
    if pages != req.nchunks:
        raise CommandError(errno.EINVAL, f"{req.nchunks} pages for a region that covers {pages}")
    addresses = walk_pdir_untrusted(adapter.memory, req.pdir_dma, pages)
    zero_based = req.access_flags & AccessFlags.ZERO_BASED
    if zero_based and req.start & (PAGE_SIZE - 1):
        # A backend takes the offset in the first page from the address, which would not be zero.
        raise CommandError(errno.EINVAL, f"a zero-based region at {req.start:#x}, not at a page")
    return adapter.backend.reg_mr(
        pd.backend,
        start=0 if zero_based else req.start,
        length=req.length,
        access=access,
        pages=GuestPages(
            adapter.memory, addresses, writable=bool(access & AccessFlags.LOCAL_WRITE)
        ),
    )


def _dma_mr(adapter: Adapter, pd: Pd, req: api.CmdCreateMr, access: int) -> b.BackendMr:
    if pd.ctx is not None or access & ~AccessFlags.LOCAL_WRITE:
        raise CommandError(errno.EPERM, "a DMA region is for kernel PDs and local access only")
    return adapter.backend.reg_dma_mr(pd.backend, access=access)


def _fast_reg_mr(adapter: Adapter, pd: Pd, req: api.CmdCreateMr, access: int) -> b.BackendMr:
    if pd.ctx is not None:
        raise CommandError(errno.EPERM, "a fast registration region is for kernel PDs only")
    if not 1 <= req.nchunks <= adapter.caps.max_fast_reg_page_list_len:
        raise CommandError(errno.EINVAL, f"a page list of {req.nchunks} pages")
    return adapter.backend.alloc_fast_reg_mr(pd.backend, max_pages=req.nchunks)


_MR_KINDS: Final = {0: _user_mr, int(MrFlags.DMA): _dma_mr, int(MrFlags.FRMR): _fast_reg_mr}


def _destroy_mr(adapter: Adapter, req: api.CmdDestroyMr) -> None:
    adapter.resources.destroy_mr(req.mr_handle)


# --- queues --------------------------------------------------------------------------------------------------------


def _create_cq(adapter: Adapter, req: api.CmdCreateCq) -> api.CmdCreateCqResp:
    ctx = _context(adapter, req.ctx_handle)
    cqe = check_size("cqe", req.cqe, adapter.caps.max_cqe)
    pages = 1 + pages_for(cqe, CQE_SIZE)
    check_chunks(req.nchunks, pages)
    with ReservedHandle(adapter.resources.cqs) as handle:
        ring = ProducerRing(
            queue_pages(adapter, req.pdir_dma, pages), RX_STATE_OFFSET, 1, CQE_SIZE, cqe
        )
        moderated = adapter.moderated and ctx is not None
        cq = Cq(handle, ctx, ring, adapter.hooks, moderated)
        adapter.resources.cqs.put(handle, cq)
    return api.CmdCreateCqResp(cq_handle=handle, cqe=cqe)


def _destroy_cq(adapter: Adapter, req: api.CmdDestroyCq) -> None:
    adapter.resources.destroy_cq(req.cq_handle)


def _create_srq(adapter: Adapter, req: api.CmdCreateSrq) -> api.CmdCreateSrqResp:
    pd = adapter.resources.pds.get_untrusted(req.pd_handle)
    if req.srq_type:
        raise CommandError(errno.EOPNOTSUPP, f"SRQ type {req.srq_type}; basic (0) only")
    max_wr = check_size("max_wr", req.attrs.max_wr, adapter.caps.max_srq_wr)
    max_sge = check_count("max_sge", req.attrs.max_sge, adapter.caps.max_srq_sge)
    entry_size = rq_entry_size(max_sge)
    pages = 1 + pages_for(max_wr, entry_size)
    check_chunks(req.nchunks, pages)
    with ReservedHandle(adapter.resources.srqs) as handle:
        ring = ConsumerRing(
            queue_pages(adapter, req.pdir_dma, pages), RX_STATE_OFFSET, 1, entry_size, max_wr
        )
        receiver = Receiver(ring, max_sge, adapter.hooks, f"srq {handle}")
        srq = Srq(handle, pd, receiver, adapter.hooks, max_wr, max_sge)
        srq.start(adapter.backend.create_srq(pd.backend, srq, max_wr=max_wr, max_sge=max_sge))
        adapter.resources.srqs.put(handle, srq)
    return api.CmdCreateSrqResp(handle)


def _modify_srq(adapter: Adapter, req: api.CmdModifySrq) -> None:
    srq = adapter.resources.srqs.get_untrusted(req.srq_handle)
    # int: the complement of an IntFlag has its known bits only.
    if req.attr_mask & ~int(SrqAttrMask.LIMIT):
        raise CommandError(errno.EOPNOTSUPP, f"SRQ attributes {req.attr_mask:#x}")
    if req.attr_mask & SrqAttrMask.LIMIT:
        if req.attrs.srq_limit > srq.max_wr:
            raise CommandError(errno.EINVAL, f"limit {req.attrs.srq_limit} of {srq.max_wr} entries")
        srq.limit = req.attrs.srq_limit
        srq.check_limit()


def _query_srq(adapter: Adapter, req: api.CmdQuerySrq) -> api.CmdQuerySrqResp:
    srq = adapter.resources.srqs.get_untrusted(req.srq_handle)
    return api.CmdQuerySrqResp(SrqAttr(srq.max_wr, srq.max_sge, srq.limit))


def _destroy_srq(adapter: Adapter, req: api.CmdDestroySrq) -> None:
    adapter.resources.destroy_srq(req.srq_handle)


class Command(NamedTuple):
    """How one command is read, done and answered.

    `responses` are the records the handler may return; none is a bare header. `wait`: the driver waits for vector 0.
    """

    request: Layout[Any]
    handler: Callable[[Adapter, Any], Any]
    responses: tuple[Layout[Any], ...]
    wait: bool


# RESIZE_CQ is not here: no driver sends it, and it fails with EOPNOTSUPP like any unknown command.
COMMANDS: Final[dict[int, Command]] = {
    Cmd.QUERY_PORT: Command(api.CMD_QUERY_PORT, _query_port, (api.CMD_QUERY_PORT_RESP,), True),
    Cmd.QUERY_PKEY: Command(api.CMD_QUERY_PKEY, _query_pkey, (api.CMD_QUERY_PKEY_RESP,), True),
    Cmd.CREATE_PD: Command(api.CMD_CREATE_PD, _create_pd, (api.CMD_CREATE_PD_RESP,), True),
    Cmd.DESTROY_PD: Command(api.CMD_DESTROY_PD, _destroy_pd, (), False),
    Cmd.CREATE_MR: Command(api.CMD_CREATE_MR, _create_mr, (api.CMD_CREATE_MR_RESP,), True),
    Cmd.DESTROY_MR: Command(api.CMD_DESTROY_MR, _destroy_mr, (), False),
    Cmd.CREATE_CQ: Command(api.CMD_CREATE_CQ, _create_cq, (api.CMD_CREATE_CQ_RESP,), True),
    Cmd.DESTROY_CQ: Command(api.CMD_DESTROY_CQ, _destroy_cq, (), False),
    Cmd.CREATE_QP: Command(
        api.CMD_CREATE_QP, create_qp, (api.CMD_CREATE_QP_RESP, api.CMD_CREATE_QP_RESP_V2), True
    ),
    Cmd.MODIFY_QP: Command(api.CMD_MODIFY_QP, modify_qp, (), True),
    Cmd.QUERY_QP: Command(api.CMD_QUERY_QP, query_qp, (api.CMD_QUERY_QP_RESP,), True),
    Cmd.DESTROY_QP: Command(api.CMD_DESTROY_QP, destroy_qp, (), False),
    Cmd.CREATE_UC: Command(api.CMD_CREATE_UC64, _create_uc, (api.CMD_CREATE_UC_RESP,), True),
    Cmd.DESTROY_UC: Command(api.CMD_DESTROY_UC, _destroy_uc, (), False),
    Cmd.CREATE_BIND: Command(api.CMD_CREATE_BIND, _create_bind, (), False),
    Cmd.DESTROY_BIND: Command(api.CMD_DESTROY_BIND, _destroy_bind, (), False),
    Cmd.CREATE_SRQ: Command(api.CMD_CREATE_SRQ, _create_srq, (api.CMD_CREATE_SRQ_RESP,), True),
    Cmd.MODIFY_SRQ: Command(api.CMD_MODIFY_SRQ, _modify_srq, (), False),
    Cmd.QUERY_SRQ: Command(api.CMD_QUERY_SRQ, _query_srq, (api.CMD_QUERY_SRQ_RESP,), True),
    Cmd.DESTROY_SRQ: Command(api.CMD_DESTROY_SRQ, _destroy_srq, (), False),
}

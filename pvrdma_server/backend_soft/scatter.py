"""Scatter/gather: SGE lists to views, and the copy between two lists of views.

Contract: lengths are python ints checked against the views themselves, so a wrong length copies
less and never writes elsewhere.
"""

from collections.abc import Sequence

from pvrdma_server.abi.vmw_pvrdma_abi import Sge
from pvrdma_server.backend_soft.memory import KeyTable, SoftPd

TAIL_BYTES = 8


def resolve_sges_untrusted(
    keys: KeyTable, pd: SoftPd, sges: Sequence[Sge], offset: int, length: int, need: int
) -> list[memoryview]:
    """Views of bytes [offset, offset + length) of a scatter/gather list.

    Raises:
        GuestError: a key that does not give `need` there, or a list that is too short.
    """
    if not length:
        return []
    if len(sges) == 1:
        sge = sges[0]
        if offset + length <= sge.length:
            return keys.resolve_untrusted(pd, sge.lkey, sge.addr + offset, length, need)
    views: list[memoryview] = []
    for sge in sges:
        if offset >= sge.length:
            offset -= sge.length
            continue
        take = min(sge.length - offset, length)
        views += keys.resolve_untrusted(pd, sge.lkey, sge.addr + offset, take, need)
        length -= take
        offset = 0
        if not length:
            break
    return views


def sges_length(sges: Sequence[Sge]) -> int:
    """Bytes a scatter/gather list holds."""
    if len(sges) == 1:
        return sges[0].length
    return sum(sge.length for sge in sges)


def total_bytes(views: Sequence[memoryview]) -> int:
    """Bytes that views hold together."""
    if len(views) == 1:
        return len(views[0])
    return sum(map(len, views))


def copy_views(target: Sequence[memoryview], source: Sequence[memoryview]) -> None:
    """Copy `source` over the start of `target`, in order.

    Order: the last 8 bytes land after all others, for they are what a guest polls to see that an
    RDMA WRITE is complete (memcpy may write a tail first).
    """
    if len(target) == 1 and len(source) == 1:
        to, data = target[0], source[0]
        length = len(data)
        if len(to) == length > TAIL_BYTES:
            to[:-TAIL_BYTES] = data[:-TAIL_BYTES]
            to[-TAIL_BYTES:] = data[-TAIL_BYTES:]
            return
    pending: tuple[memoryview, memoryview] | None = None
    for pair in _pairs(target, source):
        if pending:
            pending[0][:] = pending[1]
        pending = pair
    if pending:
        _copy_tail_last(*pending)


def _copy_tail_last(target: memoryview, source: memoryview) -> None:
    if len(source) > TAIL_BYTES:
        target[:-TAIL_BYTES] = source[:-TAIL_BYTES]
        target[-TAIL_BYTES:] = source[-TAIL_BYTES:]
    else:
        target[:] = source


def _pairs(
    target: Sequence[memoryview], source: Sequence[memoryview]
) -> list[tuple[memoryview, memoryview]]:
    pairs = []
    targets, sources = iter(target), iter(source)
    to, data = next(targets, None), next(sources, None)
    while to is not None and data is not None:
        take = min(len(to), len(data))
        if take:
            pairs.append((to[:take], data[:take]))
        to = to[take:] if take < len(to) else next(targets, None)
        data = data[take:] if take < len(data) else next(sources, None)
    return pairs

"""What a running device looks like from outside: its state, its counters, its objects, as JSON values.

Contract: reads only, and returns at once. `status_facts` is small whatever the guest does; `object_facts` is bounded by
its `limit`.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any, Final

from pvrdma_server.abi.pvrdma_dev_api import GidType
from pvrdma_server.abi.pvrdma_verbs import Mtu, PortState, QpState, QpType, mtu_bytes
from pvrdma_server.backend import HostGidFacts, RdmaBackend
from pvrdma_server.device import PvrdmaDevice
from pvrdma_server.errors import BackendError, GuestError
from pvrdma_server.objects import Armed, Cq, Gid, Mr, Pd, Qp, Srq, UserContext

_V4_MAPPED: Final = bytes(10) + b"\xff\xff"
_GID_TYPES: Final = {int(GidType.ROCE_V1): "RoCE v1", int(GidType.ROCE_V2): "RoCE v2"}
# States in which a connected queue pair has a peer; in ERR, the one it had.
_CONNECTED: Final = (QpState.RTR, QpState.RTS, QpState.SQD, QpState.SQE, QpState.ERR)


def plain(counters: Any) -> dict[str, Any]:
    """A dataclass of counters as JSON values."""
    # Not `asdict`: before Python 3.12 it makes a Counter of a Counter's items.
    values = {record.name: getattr(counters, record.name) for record in fields(counters)}
    return {
        name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()
    }


def gid_text(gid: bytes) -> str:
    """A GID (16 bytes, wire order) as people write its address."""
    if gid[:12] == _V4_MAPPED:
        return f"::ffff:{ipaddress.IPv4Address(gid[12:])}"
    return str(ipaddress.IPv6Address(gid))


def status_facts(device: PvrdmaDevice) -> dict[str, Any]:
    """The device in short."""
    return {
        "state": device.state.value,
        "driver_version": device.driver_version,
        "objects": device.resources.counts(),
        "dma_regions": len(device.memory.regions),
        "gids": {
            index: {"gid": gid.gid.hex(), "type": gid.gid_type}
            for index, gid in sorted(device.resources.gids.items())
        },
        "device": plain(device.counters),
        "recent_guest_errors": [error._asdict() for error in device.recent_errors],
    }


def port_facts(backend: RdmaBackend) -> dict[str, Any]:
    """The port as the guest sees it."""
    try:
        attr = backend.query_port()
    except BackendError as e:
        return {"state": "unknown", "error": str(e)}
    return {"state": _name(PortState, attr.state), "mtu": _mtu(attr.active_mtu)}


def gid_rows(gids: Mapping[int, Gid], host: Mapping[int, HostGidFacts]) -> list[dict[str, Any]]:
    """The guest's GID table beside the host's; "host" is None where no host device is behind the guest's."""
    return [
        {
            "index": index,
            "gid": gid.gid.hex(),
            "address": gid_text(gid.gid),
            "type": _GID_TYPES.get(gid.gid_type, str(gid.gid_type)),
            "host": host[index]._asdict() if index in host else None,
        }
        for index, gid in sorted(gids.items())
    ]


def object_facts(device: PvrdmaDevice, limit: int, kinds: Iterable[str]) -> dict[str, Any]:
    """The objects of the kinds named (of OBJECT_KINDS), at most `limit` of each; "left_out" counts the others."""
    facts: dict[str, Any] = {}
    left_out = {}
    for kind in kinds:
        table = getattr(device.resources, kind)
        facts[kind] = [_DESCRIBE[kind](item) for item in islice(table, limit)]
        if len(table) > limit:
            left_out[kind] = len(table) - limit
    return {**facts, "left_out": left_out}


def _owner(ctx: UserContext | None) -> int | None:
    """The user context that owns an object; None is the guest's kernel."""
    return ctx.handle if ctx is not None else None


def _context(ctx: UserContext) -> dict[str, Any]:
    return {"handle": ctx.handle, "uar_page": ctx.uar_page}


def _pd(pd: Pd) -> dict[str, Any]:
    return {"handle": pd.handle, "context": _owner(pd.ctx)}


def _mr(mr: Mr) -> dict[str, Any]:
    return {
        "handle": mr.handle, "pd": mr.pd.handle, "context": _owner(mr.pd.ctx),
        "length_bytes": mr.length_bytes, "lkey": mr.backend.lkey, "rkey": mr.backend.rkey,
    }  # fmt: skip


def _cq(cq: Cq) -> dict[str, Any]:
    try:
        unread = cq.ring.used_untrusted()
    except GuestError:
        unread = None
    return {
        "handle": cq.handle, "context": _owner(cq.ctx), "entries": cq.ring.capacity, "unread": unread,
        "armed": Armed(cq.armed).name.lower(), "moderated": cq.moderated, "failed": cq.failed,
    }  # fmt: skip


def _srq(srq: Srq) -> dict[str, Any]:
    return {
        "handle": srq.handle, "pd": srq.pd.handle, "context": _owner(srq.pd.ctx), "max_wr": srq.max_wr,
        "max_sge": srq.max_sge, "posted": srq.receiver.used(), "limit": srq.limit, "failed": srq.failed,
    }  # fmt: skip


def _qp(qp: Qp) -> dict[str, Any]:
    connected = qp.qp_type == QpType.RC and qp.state in _CONNECTED and qp.attr.dest_qp_num != 0
    return {
        "handle": qp.handle, "qpn": qp.backend.qpn, "type": _name(QpType, qp.qp_type),
        "state": _name(QpState, qp.state), "pd": qp.pd.handle, "context": _owner(qp.pd.ctx),
        "send_cq": qp.send_cq.handle, "recv_cq": qp.recv_cq.handle,
        "srq": qp.srq.handle if qp.srq is not None else None,
        "peer": _peer(qp) if connected else None,
        "sends": qp.sends, "receives": qp.receives, "errors": qp.errors,
    }  # fmt: skip


def _peer(qp: Qp) -> dict[str, Any]:
    grh = qp.attr.ah_attr.grh
    return {
        "qpn": qp.attr.dest_qp_num,
        "address": gid_text(bytes(grh.dgid)),
        "sgid_index": grh.sgid_index,
        "mtu": _mtu(qp.attr.path_mtu),
    }


def _mtu(code: int) -> int | None:
    # A queue pair's is what the guest wrote.
    return mtu_bytes(code) if code in Mtu._value2member_map_ else None


_DESCRIBE: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "contexts": _context,
    "pds": _pd,
    "mrs": _mr,
    "cqs": _cq,
    "srqs": _srq,
    "qps": _qp,
}
OBJECT_KINDS: Final = tuple(_DESCRIBE)


def _name(numbers: Any, value: int) -> str:
    known = value in numbers._value2member_map_
    return str(numbers(value).name) if known else str(value)

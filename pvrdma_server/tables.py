"""A server's state for people: tables of rich, out of the control socket's documents.

Contract: pure functions from documents to renderables; nothing is asked, nothing printed. What came from a guest is
shown as text, never as markup.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_KERNEL: Final = "kernel"
_NONE: Final = "-"
_BAD_STATES: Final = ("ERR", "SQE")
_KIB: Final = 1024
_TRAFFIC: Final = ("rx_messages", "rx_bytes", "tx_messages", "tx_bytes")
# As the field writes them.
_PLURALS: Final = {
    "pds": "PDs", "mrs": "MRs", "cqs": "CQs", "srqs": "SRQs", "qps": "QPs", "gids": "GIDs",
}  # fmt: skip


def status_view(
    status: Mapping[str, Any], objects: Mapping[str, Any], kinds: Sequence[str]
) -> RenderableType:
    """The status, the GIDs, and the tables of objects named in `kinds`."""
    parts: list[RenderableType] = [_summary(status), gid_table(objects["gids"], status)]
    parts += [_TABLES[kind](objects) for kind in kinds if objects[kind]]
    if status["recent_guest_errors"]:
        parts.append(_errors(status["recent_guest_errors"]))
    if status["fabric"] is not None and status["fabric"]["peers"]:
        parts.append(_peers(status["fabric"]))
    left_out = objects["left_out"]
    if left_out:
        text = ", ".join(f"{n} {_PLURALS.get(kind, kind)}" for kind, n in left_out.items())
        parts.append(Text(f"left out: {text}; see more with --limit", style="yellow"))
    return Group(*parts)


def _table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        min_width=len(title),
        box=None,
        pad_edge=False,
    )
    numbers = set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def _add(table: Table, *cells: object, style: str = "") -> None:
    table.add_row(*(Text(_NONE if cell is None else str(cell)) for cell in cells), style=style)


def _summary(status: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    process, port = status["process"], status["port"]
    objects = ", ".join(f"{n} {_PLURALS.get(kind, kind)}" for kind, n in status["objects"].items())
    rows = {
        "server": f"{status['name']}, version {status['version']}, pid {process['pid']}, "
        f"up {duration(status['uptime_s'])}, log level {status['log_level']}",
        "QEMU": "attached" if status["connected"] else "not attached",
        "device": _device_text(status),
        "backend": f"{status['backend_kind']}, port {port['state']}, MTU {port.get('mtu') or _NONE}"
        f"{_fabric_text(status)}",
        "rdma_cm": _relay_text(status),
        "objects": objects,
        "transport": _counts(status["backend"], but=_TRAFFIC),
        "guest errors": _counts(status["device"]["guest_errors"]) or "none",
    }
    for name, text in rows.items():
        if text:
            table.add_row(Text(name, style="bold"), Text(text))
    return table


def _fabric_text(status: Mapping[str, Any]) -> str:
    if status["backend_kind"] != "soft":
        return ""
    fabric = status["fabric"]
    return f", fabric {fabric['folder']}" if fabric is not None else ", no fabric"


def _counts(counters: Mapping[str, int], but: Sequence[str] = ()) -> str:
    """What has been counted at all."""
    return ", ".join(f"{name} {n}" for name, n in counters.items() if n and name not in but)


def _relay_text(status: Mapping[str, Any]) -> str:
    """How connection management gets out of the VM; nothing where that is the fabric's."""
    relay = status.get("mad_relay")
    if relay is not None:
        hub = f", {relay['hub']}" if relay["hub"] else ""
        return f"{relay['state']} at {relay['socket']}{hub}"
    return "no hub (--mad-hub): connects within this VM only" if status.get("gsi") else ""


def _device_text(status: Mapping[str, Any]) -> str:
    version = status["driver_version"]
    driver = f"driver version {version}" if version else "no driver yet"
    return f"{status['state']}, {driver}"


def gid_table(gids: Sequence[Mapping[str, Any]], status: Mapping[str, Any]) -> RenderableType:
    """The guest's GIDs, each with what it is on the host."""
    table = _table(
        "GIDs: the guest's, and where they are on the host",
        *("index", "address", "type", "host device", "host index", "netdev", ""),
        right=["index", "host index"],
    )
    for row in gids:
        host = row["host"]
        if host is None:
            _add(
                table, row["index"], row["address"], row["type"], _embedded(status), None, None, ""
            )
            continue
        note = _trouble(row, status)
        _add(table, row["index"], row["address"], row["type"], f"{host['device']}/{host['port']}",
             host["gid_index"], host["netdev"], note, style="red" if note else "")  # fmt: skip
    if not gids:
        _add(table, None, "none: the guest's vmxnet3 is down, or its driver is not loaded")
    return table


def _trouble(row: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Why a GID does not work; empty if it does."""
    if row["host"]["gid_index"] is None:
        return f"MISSING: add this address to {row['host']['netdev']}"
    claims = (status.get("mad_relay") or {}).get("gids", {})
    claim = claims.get(row["gid"], {})
    return f"refused by the hub: {claim['why']}" if claim.get("state") == "refused" else ""


def _embedded(status: Mapping[str, Any]) -> str:
    if status["backend_kind"] != "soft":
        return "unknown"
    return "fabric" if status["fabric"] is not None else "this server only"


def _owner(context: int | None) -> str:
    return _KERNEL if context is None else f"process {context}"


def qp_table(objects: Mapping[str, Any]) -> Table:
    """Queue pairs with their peers and counts."""
    table = _table("Queue pairs", "handle", "QPN", "type", "state", "owner", "CQs", "SRQ", "peer QPN", "peer", "GID",
                   "MTU", "sends", "receives", "errors",
                   right=["handle", "QPN", "peer QPN", "sends", "receives", "errors"])  # fmt: skip
    for qp in objects["qps"]:
        peer = qp["peer"] or dict.fromkeys(("qpn", "address", "sgid_index", "mtu"))
        _add(
            table, qp["handle"], qp["qpn"], qp["type"], qp["state"], _owner(qp["context"]),
            f"{qp['send_cq']}/{qp['recv_cq']}", qp["srq"], peer["qpn"], peer["address"], peer["sgid_index"],
            peer["mtu"], qp["sends"], qp["receives"], qp["errors"],
            style="red" if qp["state"] in _BAD_STATES else "",
        )  # fmt: skip
    return table


def cq_table(objects: Mapping[str, Any]) -> Table:
    """Completion queues."""
    table = _table("Completion queues", "handle", "owner", "entries", "unread", "armed", "events", "",
                   right=["handle", "entries", "unread"])  # fmt: skip
    for cq in objects["cqs"]:
        events = "moderated" if cq["moderated"] else "by arm"
        _add(table, cq["handle"], _owner(cq["context"]), cq["entries"], cq["unread"], cq["armed"], events,
             "FAILED" if cq["failed"] else "", style="red" if cq["failed"] else "")  # fmt: skip
    return table


def srq_table(objects: Mapping[str, Any]) -> Table:
    """Shared receive queues."""
    table = _table("Shared receive queues", "handle", "owner", "PD", "size", "SGEs", "posted", "limit", "",
                   right=["handle", "PD", "size", "SGEs", "posted", "limit"])  # fmt: skip
    for srq in objects["srqs"]:
        _add(table, srq["handle"], _owner(srq["context"]), srq["pd"], srq["max_wr"], srq["max_sge"], srq["posted"],
             srq["limit"], "FAILED" if srq["failed"] else "", style="red" if srq["failed"] else "")  # fmt: skip
    return table


def mr_table(objects: Mapping[str, Any]) -> Table:
    """Memory regions."""
    table = _table("Memory regions", "handle", "owner", "PD", "length", "lkey", "rkey",
                   right=["handle", "PD", "length"])  # fmt: skip
    for mr in objects["mrs"]:
        _add(table, mr["handle"], _owner(mr["context"]), mr["pd"], _length(mr),
             f"{mr['lkey']:#x}", f"{mr['rkey']:#x}")  # fmt: skip
    return table


def _length(mr: Mapping[str, Any]) -> str:
    # The kernel's region of all memory has no length of its own.
    return size(mr["length_bytes"]) if mr["length_bytes"] else "all"


def pd_table(objects: Mapping[str, Any]) -> Table:
    """Protection domains."""
    table = _table("Protection domains", "handle", "owner", right=["handle"])
    for pd in objects["pds"]:
        _add(table, pd["handle"], _owner(pd["context"]))
    return table


def context_table(objects: Mapping[str, Any]) -> Table:
    """User contexts: the guest's processes that have the device open."""
    table = _table("Processes of the guest", "handle", "doorbell page", right=["handle", "doorbell page"])  # fmt: skip
    for context in objects["contexts"]:
        _add(table, context["handle"], context["uar_page"])
    return table


_TABLES: Final = {
    "qps": qp_table,
    "cqs": cq_table,
    "srqs": srq_table,
    "mrs": mr_table,
    "pds": pd_table,
    "contexts": context_table,
}
KINDS: Final = tuple(_TABLES)


def _errors(errors: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Recent guest errors", "time", "object", "kind", "error")
    for error in errors:
        when = datetime.fromtimestamp(error["time_s"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        _add(table, when, error["what"], error["kind"], error["error"])
    return table


def _peers(fabric: Mapping[str, Any]) -> Table:
    numbers = ("sent", "bytes sent", "received", "bytes received", "bells", "lost")
    table = _table("Servers met in the fabric", "name", "state", *numbers, right=numbers)
    for peer in fabric["peers"]:
        _add(table, peer["name"], peer["state"], peer["sent_messages"], size(peer["sent_bytes"]),
             peer["received_messages"], size(peer["received_bytes"]), peer["bells"], peer["lost_messages"])  # fmt: skip
    return table


# --- rates -----------------------------------------------------------------------------------------------------------


def rate_view(
    before: Mapping[str, Any], after: Mapping[str, Any], qps: Sequence[Mapping[str, Any]]
) -> RenderableType:
    """What changed between two statuses, per second, and the queue pairs that were busiest: rows of `busiest`."""
    if before["process"]["pid"] != after["process"]["pid"]:
        before = after  # it was restarted in between
    seconds = max(after["uptime_s"] - before["uptime_s"], 1e-3)
    table = _table("Per second", "what", "rate", "since the start", right=["rate", "since the start"])  # fmt: skip
    for name, path, form in _RATES:
        old, new = _dig(before, path), _dig(after, path)
        if old is not None and new is not None:
            _add(table, name, form((new - old) / seconds), form(new))
    cpu = (after["process"]["cpu_s"] - before["process"]["cpu_s"]) / seconds
    _add(table, "CPU time of the server", f"{cpu:.1%}", f"{after['process']['cpu_s']:.1f} s")
    return Group(_summary(after), table, _busy(qps, seconds))


def busiest(
    before: Mapping[str, Any], after: Mapping[str, Any], count: int
) -> list[dict[str, Any]]:
    """The queue pairs of two objects documents that did most in between, with what they did ("sends", "receives")."""
    old = {(qp["handle"], qp["qpn"]): qp for qp in before["qps"]}
    rows = []
    for qp in after["qps"]:
        past = old.get((qp["handle"], qp["qpn"]), {})
        done = {key: qp[key] - past.get(key, 0) for key in ("sends", "receives", "errors")}
        # A handle and number that are used again by another queue pair start at zero.
        if all(value >= 0 for value in done.values()):
            rows.append({**qp, **done})
    rows.sort(key=lambda qp: qp["sends"] + qp["receives"], reverse=True)
    return rows[:count]


def _busy(qps: Sequence[Mapping[str, Any]], seconds: float) -> Table:
    table = _table("Busiest queue pairs, per second", "handle", "QPN", "type", "state", "owner", "peer", "sends",
                   "receives", "errors", right=["handle", "QPN", "sends", "receives", "errors"])  # fmt: skip
    for qp in qps:
        peer = qp["peer"]
        _add(table, qp["handle"], qp["qpn"], qp["type"], qp["state"], _owner(qp["context"]),
             f"{peer['address']} {peer['qpn']}" if peer else None,
             *(count_text(qp[key] / seconds) for key in ("sends", "receives", "errors")))  # fmt: skip
    return table


def _dig(document: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = document
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return float(sum(value.values()))
    return value if isinstance(value, int | float) else None


def count_text(value: float) -> str:
    """A number, short."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def size(value: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _KIB:
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= _KIB
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """A time span, short."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )


_RATES: Final = (
    ("bytes sent", ("backend", "tx_bytes"), size),
    ("bytes received", ("backend", "rx_bytes"), size),
    ("messages sent", ("backend", "tx_messages"), count_text),
    ("messages received", ("backend", "rx_messages"), count_text),
    ("retries", ("backend", "retries"), count_text),
    ("commands", ("device", "commands"), count_text),
    ("doorbells trapped", ("device", "doorbells"), count_text),
    ("interrupts", ("device", "interrupts"), count_text),
    ("guest errors", ("device", "guest_errors"), count_text),
    ("vfio-user messages", ("vfio_user", "messages"), count_text),
)

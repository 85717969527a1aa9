"""Metrics for Prometheus: what the status has, in its text format, over HTTP on a UNIX socket or a loopback port.

A scrape reads the status at that moment; nothing is collected in between. Served by trio, in between of everything
else: HTTP by h11, the format by prometheus_client.

Contract: off unless asked for; reads only. Who is slow is dropped after a while, a request that is no GET of /metrics
gets an HTTP error, and nothing that is sent here ends the server. Names are documented in docs/monitoring.md.
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, Final

import h11
import trio
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from pvrdma_server.errors import ConfigError
from pvrdma_server.status import BACKLOG, listen_unix, serve_clients

Snapshot = Callable[[], dict[str, Any]]

_RECEIVE_BYTES: Final = 4096
# The device's states, for a state set.
_STATES: Final = ("reset", "mapped", "active")

# (key in the status, metric, help): counters without labels.
_DEVICE: Final = (
    ("doorbells", "pvrdma_doorbells", "Doorbells that were trapped."),
    ("polls", "pvrdma_cq_polls", "Doorbells that ask for completions, of those trapped."),
    ("interrupts", "pvrdma_interrupts", "Interrupts raised."),
    ("async_events", "pvrdma_async_events", "Asynchronous events queued for the guest."),
    ("events_dropped", "pvrdma_async_events_dropped", "Events that a full ring had no room for."),
    ("resets", "pvrdma_device_resets", "Times the device was reset."),
)
_TRAFFIC: Final = (
    ("rx_messages", "pvrdma_received_messages", "Messages received by the embedded backend."),
    ("rx_bytes", "pvrdma_received_bytes", "Payload bytes received by the embedded backend."),
    ("tx_messages", "pvrdma_sent_messages", "Messages sent by the embedded backend."),
    ("tx_bytes", "pvrdma_sent_bytes", "Payload bytes sent by the embedded backend."),
)
_MADS: Final = (
    ("sent", "pvrdma_mads_sent", "MADs that the guest sent."),
    ("received", "pvrdma_mads_received", "MADs that the guest received."),
)
_CLIENT: Final = (
    ("messages", "pvrdma_vfio_user_messages", "Messages from the vfio-user client."),
    ("attaches", "pvrdma_vfio_user_attaches", "Clients that attached."),
    ("disconnects", "pvrdma_vfio_user_disconnects", "Clients that went."),
    ("refused_clients", "pvrdma_vfio_user_refused_clients", "Clients refused, another being there."),
    ("failed_attaches", "pvrdma_vfio_user_failed_attaches", "Clients that did not get through."),
    ("protocol_errors", "pvrdma_vfio_user_protocol_errors", "Clients that broke the protocol."),
)  # fmt: skip


class StatusCollector(Collector):
    """Metrics out of a status document. `snapshot` returns one."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client's Collector."""
        status = self._snapshot()
        yield from _server(status)
        yield from _counters(status["device"], _DEVICE)
        yield from _counters(status["backend"], _TRAFFIC)
        yield from _counters(status["vfio_user"], _CLIENT)
        yield from _by_label(status)
        yield from _fabric(status["fabric"])
        yield from _connection_management(status)


def _server(status: Mapping[str, Any]) -> Iterator[Metric]:
    about = {key: str(status[key]) for key in ("version", "name", "backend_kind")}
    yield InfoMetricFamily("pvrdma_server", "Which server this is.", about)
    state = {name: name == status["state"] for name in _STATES}
    yield StateSetMetricFamily("pvrdma_device_state", "The device's life as its driver sees it.", state)  # fmt: skip
    connected = float(status["connected"])
    yield GaugeMetricFamily("pvrdma_client_connected", "Whether QEMU is attached.", connected)
    up = float(status["port"]["state"] == "ACTIVE")
    yield GaugeMetricFamily("pvrdma_port_active", "Whether the port is active.", up)
    version = status["driver_version"]
    yield GaugeMetricFamily("pvrdma_driver_version", "ABI version of the guest's driver.", version)
    regions = status["dma_regions"]
    yield GaugeMetricFamily("pvrdma_dma_regions", "Regions of guest memory mapped.", regions)
    objects = GaugeMetricFamily("pvrdma_objects", "Objects of the guest.", labels=["kind"])
    for kind, count in status["objects"].items():
        objects.add_metric([kind], count)
    yield objects


def _counters(
    values: Mapping[str, Any], table: Iterable[tuple[str, str, str]]
) -> Iterator[CounterMetricFamily]:
    for key, name, text in table:
        if key in values:
            yield CounterMetricFamily(name, text, values[key])


def _by_label(status: Mapping[str, Any]) -> Iterator[CounterMetricFamily]:
    device, backend = status["device"], status["backend"]
    traffic = {key for key, _, _ in _TRAFFIC}
    events = {key: count for key, count in backend.items() if key not in traffic}
    for name, text, label, values in (
        ("pvrdma_commands", "Commands of the guest's driver.", "command", device["commands"]),
        ("pvrdma_guest_errors", "Illegal acts of the guest.", "kind", device["guest_errors"]),
        (
            "pvrdma_transport_events",
            "Retries, NAKs, drops of the embedded backend.",
            "event",
            events,
        ),
    ):
        yield _labelled(name, text, label, values)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family


def _fabric(fabric: Mapping[str, Any] | None) -> Iterator[Metric]:
    if fabric is not None:
        up = sum(peer["state"] == "up" for peer in fabric["peers"])
        yield GaugeMetricFamily("pvrdma_fabric_peers", "Servers of this host that are met.", up)


def _connection_management(status: Mapping[str, Any]) -> Iterator[Metric]:
    gsi, relay = status.get("gsi"), status.get("mad_relay")
    if gsi is not None:
        yield from _counters(gsi, _MADS)
        yield _labelled("pvrdma_mads_dropped", "MADs dropped.", "reason", gsi["dropped"])
    if relay is not None:
        connected = float(relay["state"] == "connected")
        yield GaugeMetricFamily(
            "pvrdma_mad_hub_connected", "Whether the MAD hub is met.", connected
        )


class MetricsPage:
    """The page that is served. `snapshot` returns the status."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StatusCollector(snapshot))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page as it is now."""
        return generate_latest(self._registry)


async def serve_metrics(
    socket_path: str | None,
    listen: tuple[str, int] | None,
    snapshot: Snapshot,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve on either or both until cancelled.

    Raises:
        ConfigError: the path or the port cannot be had.
    """
    page = MetricsPage(snapshot)

    async def client(stream: trio.SocketStream) -> None:
        await _serve_client(stream, page)

    async with trio.open_nursery() as nursery:
        if socket_path is not None:
            unix = listen_unix(socket_path, 0o660, "--metrics-socket")
            await nursery.start(_serve, unix, client)
        if listen is not None:
            await nursery.start(_serve, await _listen_tcp(*listen), client)
        task_status.started()


async def _serve(
    listener: trio.socket.SocketType, client: Any, *, task_status: trio.TaskStatus[None]
) -> None:
    await serve_clients(listener, client, task_status)


async def _listen_tcp(host: str, port: int) -> trio.socket.SocketType:
    family = trio.socket.AF_INET6 if ":" in host else trio.socket.AF_INET
    with ExitStack() as stack:
        try:
            listener = trio.socket.socket(family, trio.socket.SOCK_STREAM)
            stack.callback(listener.close)
            listener.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
            await listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as e:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {e.strerror or e}; {_way_out(e)}"
            ) from e
        stack.pop_all()
        return listener


def _way_out(error: OSError) -> str:
    if error.errno == errno.EAFNOSUPPORT:
        return "in a unit: RestrictAddressFamilies=AF_INET AF_INET6 in a drop-in, or use --metrics-socket"
    return "choose another --metrics-listen"


async def _serve_client(stream: trio.SocketStream, page: MetricsPage) -> None:
    """One request, one response, then the connection ends."""
    connection = h11.Connection(h11.SERVER)
    try:
        status, body = _respond(await _next_request(stream, connection), page)
    except h11.RemoteProtocolError as e:
        status, body = e.error_status_hint, f"{e}\n".encode()
    if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    headers = [
        ("Content-Type", CONTENT_TYPE_LATEST if status == 200 else "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    response = h11.Response(
        status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()
    )
    for event in (response, h11.Data(data=body), h11.EndOfMessage()):
        await stream.send_all(connection.send(event) or b"")


async def _next_request(stream: trio.SocketStream, connection: h11.Connection) -> h11.Request:
    # h11 bounds what a request may have of headers.
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await stream.receive_some(_RECEIVE_BYTES))
    if not isinstance(event, h11.Request):
        raise h11.RemoteProtocolError("a request is wanted")
    return event


def _respond(request: h11.Request, page: MetricsPage) -> tuple[int, bytes]:
    if request.target.partition(b"?")[0] != b"/metrics":
        return 404, b"there is /metrics, and nothing else\n"
    if request.method != b"GET":
        return 405, b"GET is wanted\n"
    return 200, page.render()

"""Metrics: what is served, by Prometheus's own parser, and to whom."""

import http.client
import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from pvrdma_server.backend_soft.counters import Counters
from pvrdma_server.errors import ConfigError
from pvrdma_server.metrics import MetricsPage, serve_metrics

STATUS: dict[str, Any] = {
    "version": "1.2.3", "name": "vm1", "backend_kind": "soft", "connected": True, "state": "active",
    "driver_version": 20, "dma_regions": 4, "objects": {"qps": 3, "cqs": 2}, "port": {"state": "ACTIVE", "mtu": 4096},
    "device": {"commands": {"create_qp": 3, "query_port": 9}, "guest_errors": {"bad_wqe": 7}, "doorbells": 11,
               "polls": 5, "interrupts": 6, "async_events": 1, "events_dropped": 0, "resets": 2},
    "backend": {"rx_messages": 1, "rx_bytes": 2, "tx_messages": 3, "tx_bytes": 4, "retries": 5, "naks": 0},
    "vfio_user": {"messages": 100, "attaches": 1, "disconnects": 0, "refused_clients": 0, "failed_attaches": 0,
                  "protocol_errors": 0, "irq_masked": 3},
    "fabric": {"folder": "/f", "peers": [{"state": "up"}, {"state": "greeting"}, {"state": "up"}]},
}  # fmt: skip


def samples(page: bytes) -> dict[tuple[str, str], float]:
    """Values by name and the value of the one label."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_the_page_says_what_the_status_says() -> None:
    found = samples(MetricsPage(lambda: STATUS).render())
    expected = {
        ("pvrdma_server_info", "soft,vm1,1.2.3"): 1,
        ("pvrdma_device_state", "active"): 1,
        ("pvrdma_device_state", "reset"): 0,
        ("pvrdma_client_connected", ""): 1,
        ("pvrdma_port_active", ""): 1,
        ("pvrdma_driver_version", ""): 20,
        ("pvrdma_dma_regions", ""): 4,
        ("pvrdma_objects", "qps"): 3,
        ("pvrdma_commands_total", "query_port"): 9,
        ("pvrdma_guest_errors_total", "bad_wqe"): 7,
        ("pvrdma_doorbells_total", ""): 11,
        ("pvrdma_cq_polls_total", ""): 5,
        ("pvrdma_interrupts_total", ""): 6,
        ("pvrdma_async_events_total", ""): 1,
        ("pvrdma_async_events_dropped_total", ""): 0,
        ("pvrdma_device_resets_total", ""): 2,
        ("pvrdma_received_messages_total", ""): 1,
        ("pvrdma_received_bytes_total", ""): 2,
        ("pvrdma_sent_messages_total", ""): 3,
        ("pvrdma_sent_bytes_total", ""): 4,
        ("pvrdma_transport_events_total", "retries"): 5,
        ("pvrdma_vfio_user_messages_total", ""): 100,
        ("pvrdma_fabric_peers", ""): 2,
    }
    assert expected.items() <= found.items()
    assert found["process_open_fds", ""] > 0


def test_a_host_device_has_no_traffic_of_ours_and_no_fabric() -> None:
    port = {"state": "unknown", "error": "gone"}
    status = {**STATUS, "backend": {}, "fabric": None, "backend_kind": "ibv", "port": port}
    found = samples(MetricsPage(lambda: status).render())
    names = {name for name, _ in found}
    assert found["pvrdma_port_active", ""] == 0
    assert not {"pvrdma_sent_bytes_total", "pvrdma_fabric_peers"} & names


def test_connection_management_over_a_host_device() -> None:
    gsi = {"sent": 4, "received": 5, "looped": 0, "dropped": {"no_buffer": 6}, "waiting": 0}
    status = {**STATUS, "gsi": gsi, "mad_relay": {"state": "connected"}}
    found = samples(MetricsPage(lambda: status).render())
    assert found["pvrdma_mads_sent_total", ""] == 4
    assert found["pvrdma_mads_received_total", ""] == 5
    assert found["pvrdma_mads_dropped_total", "no_buffer"] == 6
    assert found["pvrdma_mad_hub_connected", ""] == 1


def test_names_follow_the_conventions() -> None:
    page = MetricsPage(lambda: STATUS).render().decode()
    for family in text_string_to_metric_families(page):
        assert family.documentation.endswith((".", "process."))
        if family.name.startswith("process_"):
            continue
        assert family.name.startswith("pvrdma_")
        totals = [sample.name.endswith("_total") for sample in family.samples]
        assert all(totals) if family.type == "counter" else not any(totals)


def test_every_transport_event_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    for counter in fields(Counters):
        assert counter.name.startswith(("rx_", "tx_")) or f"`{counter.name}`" in page, counter.name


def test_every_name_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    gsi = {"sent": 0, "received": 0, "dropped": {"x": 1}}
    status = {**STATUS, "gsi": gsi, "mad_relay": {"state": "x"}}
    for name in {name for name, _ in samples(MetricsPage(lambda: status).render())}:
        assert f"`{name}`" in text or name.startswith(("process_", "python_"))


# --- over HTTP -------------------------------------------------------------------------------------------------------


class Running:
    """`serve_metrics` in a thread of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self._thread.start()
        assert self._ready.wait(30)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_metrics, self.path, None, lambda: STATUS)
                self._ready.set()

    def stop(self) -> None:
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    running = Running(str(tmp_path / "metrics"))
    yield running.path
    running.stop()
    assert not os.path.exists(running.path)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        # Blocking: one with a timeout fails at once where others wait to be served.
        self.sock.connect(self._path)


def fetch(path: str, target: str, method: str = "GET") -> tuple[int, str, bytes]:
    connection = UnixConnection(path)
    try:
        connection.request(method, target)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("target", ["/metrics", "/metrics?x=1"])
def test_a_scrape(path: str, target: str) -> None:
    status, kind, body = fetch(path, target)
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert samples(body)["pvrdma_objects", "cqs"] == 2


def test_nothing_else_is_served(path: str) -> None:
    assert fetch(path, "/")[0] == 404
    assert fetch(path, "/metrics/../etc/passwd")[0] == 404
    assert fetch(path, "/metrics", "POST")[0] == 405


@pytest.mark.parametrize(
    "words",
    [
        b"hello\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000,
    ],
)
def test_what_is_no_request_gets_an_error(path: str, words: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(path)
        client.sendall(words)
        assert client.recv(4096).startswith(b"HTTP/1.1 4")
    assert fetch(path, "/metrics")[0] == 200


def test_who_says_nothing_or_goes_away_holds_up_nobody(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        assert fetch(path, "/metrics")[0] == 200


def test_the_group_may_connect(path: str) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660


def test_a_loopback_port_is_served_and_one_that_is_taken_is_said_so() -> None:
    async def live() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port: int = taken.getsockname()[1]
            why = f"127.0.0.1 port {port}: Address already in use; choose another --metrics-listen"
            with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=why)):
                await serve_metrics(None, ("127.0.0.1", port), lambda: STATUS)
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_metrics, None, ("127.0.0.1", port), lambda: STATUS)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                page = b"".join([part async for part in stream])
            assert b"\npvrdma_dma_regions 4.0\n" in page
            nursery.cancel_scope.cancel()

    trio.run(live)

"""The hub as a process: sockets, the host's umad, signals.

Contract: `serve` returns when asked to stop (SIGTERM, SIGINT) and raises ConfigError when it cannot serve as asked.
It serves without umad, and without what is asked of it only if that is umad: VMs then reach each other and not the
network, which is said once, and umad is tried again from time to time, or at SIGHUP.
"""

import os
import resource
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import structlog
import trio

from pvrdma_server.mad_frames import Datagram
from pvrdma_server.mad_hub.lanes import Lanes, Sender
from pvrdma_server.mad_hub.session import Session, peer_credentials
from pvrdma_server.mad_hub.switch import MadSwitch
from pvrdma_server.mad_hub.umad import UmadError
from pvrdma_server.status import listen_unix, process_facts, serve_control
from pvrdma_server.systemd import Notifier

# Connections at a time; each is a descriptor, or two with its lane. Fewer where the limit of descriptors is low.
MAX_CLIENTS: Final = 1024
DESCRIPTORS_A_CLIENT: Final = 2
OWN_DESCRIPTORS: Final = 64
# Connections that wait to be accepted: VMs of a host that all reconnect after a restart of the hub.
BACKLOG: Final = 512
# Between two tries to get the CM class, at first and at most.
RETRY_S: Final = 5.0
MAX_RETRY_S: Final = 300.0


class Receiver(Protocol):
    """Where datagrams of the network come in: `umad.UmadReceiver`, or a test's."""

    fd: int
    reports: int

    def receive(self) -> list[Datagram]:
        """What has come. Raises UmadError when nothing ever will again."""

    def close(self) -> None:
        """Give it back."""


class NetworkPort(Protocol):
    """A port of a host RDMA device: `umad.Umad`, or a test's. Both raise UmadError."""

    name: str

    def open_receiver(self) -> Receiver:
        """Take the CM class."""

    def open_sender(self) -> Sender:
        """A way out."""


class HubConfig(NamedTuple):
    """One hub.

    Attributes:
        socket_path: where servers connect.
        old_mux_path: where clients of the old protocol connect, if any shall.
        status_path: where the status is.
        allowed_uids: users whose processes may connect, besides ours and root.
    """

    socket_path: str
    old_mux_path: str | None = None
    status_path: str | None = None
    allowed_uids: tuple[int, ...] = ()


class MadHub:
    """The running hub.

    Args:
        config: what to serve.
        port: the host's network, or None to switch between VMs only.
        credentials: (pid, uid) of the process behind a socket.

    Attributes:
        ended: why connections have ended.
        max_clients: connections at a time.
    """

    def __init__(
        self,
        config: HubConfig,
        port: NetworkPort | None,
        credentials: Callable[[Any], tuple[int, int]] = peer_credentials,
    ) -> None:
        self.switch = MadSwitch(trio.current_time)
        self._credentials = credentials
        self.ended: Counter[str] = Counter()
        self._config = config
        self._port = port
        self._uids = {os.getuid(), 0, *config.allowed_uids}
        self._log: Any = structlog.get_logger(component="mad_hub")
        self.max_clients = MAX_CLIENTS
        self._umad_state = "not asked for" if port is None else "not yet open"
        self._umad_reports = 0
        self._open_connections = 0
        self._retry = trio.Event()

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled.

        Raises:
            ConfigError: a socket cannot be had.
        """
        async with trio.open_nursery() as nursery:
            config = self._config
            await nursery.start(self._listen, config.socket_path, "--socket", self._serve_client)
            if config.old_mux_path is not None:
                await nursery.start(
                    self._listen, config.old_mux_path, "--old-mux-socket", self._serve_old_client
                )
            if config.status_path is not None:
                await nursery.start(self._serve_status, config.status_path)
            if self._port is not None:
                await nursery.start(self._umad_task, self._port)
            task_status.started()

    def retry_umad(self) -> None:
        """Try umad now, if it is not in use."""
        self._retry.set()

    async def _listen(
        self,
        path: str,
        option: str,
        handler: Callable[[trio.SocketStream], Awaitable[None]],
        task_status: trio.TaskStatus[None],
    ) -> None:
        # Who may come in is told by SO_PEERCRED; where others than we may, everybody can knock.
        mode = 0o666 if self._config.allowed_uids else 0o600
        listener = listen_unix(path, mode, option)
        listener.listen(BACKLOG)
        try:
            async with trio.open_nursery() as nursery:
                listeners = [trio.SocketListener(listener)]
                await nursery.start(trio.serve_listeners, handler, listeners)
                task_status.started()
        finally:
            Path(path).unlink(missing_ok=True)

    async def _serve_status(self, path: str, task_status: trio.TaskStatus[None]) -> None:
        commands = {"status": lambda _: self.snapshot()}
        await serve_control(path, commands, task_status=task_status)

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        hub_name = self._port.name if self._port is not None else "VMs only"
        await self._serve(stream, lambda session: session.serve(hub_name))

    async def _serve_old_client(self, stream: trio.SocketStream) -> None:
        await self._serve(stream, lambda session: session.serve_old())

    async def _serve(
        self, stream: trio.SocketStream, serve: Callable[[Session], Awaitable[str]]
    ) -> None:
        async with stream:
            pid, uid = self._credentials(stream.socket)
            if uid not in self._uids:
                self.ended["not_allowed"] += 1
                self.switch.log.warning(
                    "client_refused",
                    client=f"uid {uid}",
                    key="not_allowed",
                    pid=pid,
                    why="its user may not connect; see --allow-uid",
                )
                return
            if self._open_connections >= self.max_clients:
                self.ended["too_many"] += 1
                return
            session = Session(self.switch, stream, {"pid": pid, "uid": uid})
            self._open_connections += 1
            try:
                reason = await serve(session)
            finally:
                self._open_connections -= 1
            self.ended[reason] += 1
            self.switch.log.info("client_ended", client=session.name, why=reason)

    async def _umad_task(self, port: NetworkPort, task_status: trio.TaskStatus[None]) -> None:
        """Get the CM class and keep it; when it cannot be had, say so once and try again later."""
        receiver = self._open(port)
        task_status.started()
        pause_s = RETRY_S
        while True:
            if receiver is not None:
                await self._use(port, receiver)
                pause_s = RETRY_S
            self._retry = trio.Event()
            with trio.move_on_after(pause_s):
                await self._retry.wait()
                pause_s = RETRY_S
            pause_s = min(2 * pause_s, MAX_RETRY_S)
            receiver = self._open(port)

    def _open(self, port: NetworkPort) -> Receiver | None:
        try:
            receiver = port.open_receiver()
        except UmadError as e:
            self._unavailable(str(e))
            return None
        self._umad_state = "ready"
        self._log.info("umad_ready", device=port.name)
        return receiver

    def _unavailable(self, why: str) -> None:
        if self._umad_state != why:
            self._umad_state = why
            self._log.warning("umad_unavailable", why=why)

    async def _use(self, port: NetworkPort, receiver: Receiver) -> None:
        """Carry datagrams until the device is gone."""
        try:
            async with trio.open_nursery() as nursery:
                self.switch.uplink = Lanes(nursery, port.open_sender, self.switch.send_failed)
                try:
                    await self._receive(receiver)
                except UmadError as e:
                    self._unavailable(str(e))
                nursery.cancel_scope.cancel()
        finally:
            self.switch.unplug()
            receiver.close()

    async def _receive(self, receiver: Receiver) -> None:
        while True:
            await trio.lowlevel.wait_readable(receiver.fd)
            for datagram in receiver.receive():
                self.switch.from_network(datagram)
            self._umad_reports = receiver.reports

    # --- status ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything there is to know from outside, as JSON values."""
        return {
            "device": self._port.name if self._port is not None else None,
            "umad": self._umad_state,
            "umad_reports": self._umad_reports,
            **self.switch.snapshot(),
            "ended": dict(self.ended),
            "process": process_facts(),
        }


def affordable_clients() -> int:
    """How many connections our descriptors are enough for, once their limit is as high as it may be."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return min(MAX_CLIENTS, max(1, (most - OWN_DESCRIPTORS) // DESCRIPTORS_A_CLIENT))


async def serve(config: HubConfig, port: NetworkPort | None) -> None:
    """Run a hub until SIGTERM or SIGINT; SIGHUP has it try umad again.

    Raises:
        ConfigError: it cannot serve as asked.
    """
    hub = MadHub(config, port)
    hub.max_clients = affordable_clients()
    log: Any = structlog.get_logger(component="mad_hub")
    manager = Notifier(os.environ)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(hub.run)
            manager.ready()
            log.info("ready", pid=os.getpid(), socket=config.socket_path)
            async for number in signals:
                if number != signal.SIGHUP:
                    log.info("stopping", signal=signal.Signals(number).name)
                    nursery.cancel_scope.cancel()
                    return
                hub.retry_umad()

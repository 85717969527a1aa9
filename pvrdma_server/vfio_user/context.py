"""The clients of one device: listening, attaching, serving requests, and starting again.

How a client attaches: libvfio-user accepts and negotiates with blocking calls, one client at a time, and leaves further
ones hanging. So the listening socket is ours: every client has its own task until its first message is whole; that
message is then replayed to libvfio-user over a private connection, its answer sent on, and the client's descriptor put
in the place of the private one. Nothing blocks, a silent client disturbs nobody, extra ones are refused at once.
"""

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

import structlog
import trio

from pvrdma_server.errors import TransportError
from pvrdma_server.vfio_user.connection import (
    DMA_MAP,
    MAX_VERSION_MESSAGE,
    REGION_WRITE_MULTI,
    Arrival,
    Listener,
    MessagePeeker,
    hang_up,
    is_gone,
    peer_pid,
)
from pvrdma_server.vfio_user.library import VfuDevice
from pvrdma_server.vfio_user.model import Bar, DeviceModel, PciIdentity, Reporter, VfioCounters

# Requests served before other tasks get their turn.
_BATCH: Final = 64
# Stops a crowd of silent clients from taking all descriptors.
_MAX_WAITING: Final = 8
# struct timeval: a client that does not read its replies holds up its own device, and no longer than this.
_IO_TIMEOUT: Final = struct.pack("ll", 2, 0)


class VfioUserContext:
    """One PCI device on one socket, for one client at a time, one after the other.

    Args:
        model: the device.
        socket_path: where to listen; a stale socket is replaced, a live one refused. None with `listen_fd`.
        listen_fd: a listening socket to take over instead (systemd).
        identity: PCI ids.
        bars: the memory BARs beside BAR 0, which is ours.
        msix_vectors: size of the MSI-X table.
        logger: a structlog logger.
        attach_timeout_s: how long a client may take for its first message, and to complete any message.

    Attributes:
        counters: what happened since the start.

    Raises:
        ConfigError: the socket cannot be had.
        TransportError: it is another server's, or libvfio-user refuses the device.
    """

    def __init__(
        self,
        model: DeviceModel,
        *,
        socket_path: str | None,
        listen_fd: int | None = None,
        identity: PciIdentity,
        bars: Sequence[Bar],
        msix_vectors: int = 3,
        logger: Any = None,
        attach_timeout_s: float = 10.0,
    ) -> None:
        self.counters = VfioCounters()
        self._log = logger or structlog.get_logger()
        self._report = Reporter(self._log, self.counters)
        self._timeout_s = attach_timeout_s
        self._waiting = 0
        self._attached: socket.socket | None = None
        self._detached = trio.Event()
        self._listener = Listener(socket_path, listen_fd)
        try:
            self._device = VfuDevice(
                model,
                identity,
                bars,
                msix_vectors,
                report=self._report,
                counters=self.counters,
            )
        except BaseException:
            self._listener.close()
            raise

    @property
    def connected(self) -> bool:
        """Whether a client is attached."""
        return self._device.connected

    def msix_enabled(self) -> bool:
        """Whether the guest switched MSI-X on."""
        return self._device.msix_enabled

    def trigger(self, vector: int) -> bool:
        """Raise an interrupt: MSI-X, or INTx for vector 0 while MSI-X is off. Only from trio's thread.

        Returns:
            False when the guest has nothing armed there. A masked vector counts as raised and goes out at unmask.
        """
        return self._device.trigger(vector)

    def close(self) -> None:
        """Stop listening, remove our socket's path, free libvfio-user's side. After `serve`; may be called again."""
        self._listener.close()
        self._device.close()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve one client after the other, for ever; cancel to stop.

        Raises:
            BaseException: whatever the device model raised; the device must not go on.
        """
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(self._listener.socket)
                await self._accept(nursery)
        if self._device.failure is not None:
            raise self._device.failure

    async def _accept(self, nursery: trio.Nursery) -> None:
        try:
            client, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: they come back when clients go
            self._report("error", "vfu.accept_failed", error=str(error))
            await trio.sleep(0.1)
            return
        if self._occupied() or self._waiting >= _MAX_WAITING:
            with client:
                self._refuse(client)
        else:
            self._waiting += 1
            nursery.start_soon(self._client, client, nursery.cancel_scope)

    def _occupied(self) -> bool:
        """Whether a client is attached that has not hung up: QEMU may come back before we saw it go."""
        return self._attached is not None and not is_gone(self._attached)

    def _refuse(self, client: socket.socket) -> None:
        self.counters.refused_clients += 1
        why = "another client is attached" if self._attached else "too many wait to attach"
        self._report("warning", "vfu.client_refused", why=why, pid=peer_pid(client))

    async def _client(self, client: socket.socket, server: trio.CancelScope) -> None:
        with client:
            try:
                await self._attach_and_run(client)
            except TransportError as error:
                self.counters.protocol_errors += 1
                self._report("warning", "vfu.client_dropped", why=str(error))
            finally:
                trio.lowlevel.notify_closing(client)
                if self._device.failure is not None:
                    server.cancel()

    async def _attach_and_run(self, client: socket.socket) -> None:
        try:
            greeting = await self._first_message(client)
            while self._attached is not None and not self._occupied():
                await self._detached.wait()
        finally:
            self._waiting -= 1
        if self._attached is not None:
            self._refuse(client)
        elif greeting and self._attach(client, greeting):
            try:
                await self._session(client)
            finally:
                self._detach(client)

    async def _first_message(self, client: socket.socket) -> bytes:
        peeker = MessagePeeker(client, MAX_VERSION_MESSAGE)
        with trio.move_on_after(self._timeout_s) as deadline:
            await trio.lowlevel.wait_readable(client)
            if await _complete(peeker) is Arrival.WHOLE:
                return client.recv(peeker.size, socket.MSG_WAITALL)
        if deadline.cancelled_caught:
            self._attach_failed(f"said nothing for {self._timeout_s} s")
        return b""

    def _attach_failed(self, why: str) -> None:
        self.counters.failed_attaches += 1
        self._report("warning", "vfu.attach_failed", why=why)

    def _attach(self, client: socket.socket, greeting: bytes) -> bool:
        reply, refused = self._device.attach(greeting)
        with contextlib.suppress(OSError):  # a client that is gone is noticed in the session
            client.send(reply, socket.MSG_DONTWAIT)
        if refused:
            self._attach_failed(refused)
            return False
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _IO_TIMEOUT)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _IO_TIMEOUT)
        self._device.adopt(client.fileno())
        self._attached, self._detached = client, trio.Event()
        self._device.memory.attach(peer_pid(client))
        self.counters.attaches += 1
        self._log.info("vfu.attached", pid=peer_pid(client))
        return True

    def _detach(self, client: socket.socket) -> None:
        """Have libvfio-user see the end of the connection unless it has; it then unmaps and resets."""
        self._attached = None
        self._detached.set()
        hang_up(client)
        if self.connected:
            self._device.run()
        self.counters.disconnects += 1
        self._log.info("vfu.detached", messages=self.counters.messages)

    async def _session(self, client: socket.socket) -> None:
        peeker = MessagePeeker(client)
        while self._alive:
            await trio.lowlevel.wait_readable(client)
            if self._run_batch(peeker) is Arrival.PART:
                with trio.move_on_after(self._timeout_s) as deadline:
                    await _complete(peeker)
                if deadline.cancelled_caught:
                    raise TransportError(f"a message stayed incomplete for {self._timeout_s} s")

    @property
    def _alive(self) -> bool:
        return self._device.connected and self._device.failure is None

    def _run_batch(self, peeker: MessagePeeker) -> Arrival:
        for _ in range(_BATCH):
            arrival = peeker.look()
            if arrival is Arrival.WHOLE:
                self.counters.messages += 1
                self._run_message(peeker)
            elif arrival is Arrival.CLOSED:
                self._device.run()
            else:
                return arrival
            if not self._alive:
                break
        return Arrival.NOTHING

    def _run_message(self, peeker: MessagePeeker) -> None:
        if peeker.command == DMA_MAP:
            with peeker.borrowed_fd() as fd:
                self._device.run(fd, peeker.dma_offset())
            return
        if peeker.command == REGION_WRITE_MULTI:
            self._report("error", "vfu.write_multi", advice="never set x-send-queued in QEMU")
        self._device.run()


async def _complete(peeker: MessagePeeker) -> Arrival:
    """Wait until a message is whole. The kernel only tells that something waits, so look again ever more seldom."""
    delay_s = 0.001
    while (arrival := peeker.look()) is Arrival.PART:
        await trio.sleep(delay_s)
        delay_s = min(2 * delay_s, 0.1)
    return arrival

"""Sends to the host's network: each client in a lane of its own, so that what waits in one holds up no other.

Contract: `send` never waits. A send may wait in the kernel for a link address, up to a second; so a lane is a bounded
queue, a thread while it sends, and a umad file of its own. Implements `switch.Uplink`.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import trio

from pvrdma_server.mad_frames import Datagram, DropReason
from pvrdma_server.mad_hub.connections import MAX_CONNECTIONS
from pvrdma_server.mad_hub.switch import HUB_LANE
from pvrdma_server.mad_hub.umad import SendBusy, UmadError

# Datagrams that wait in a client's lane; more is a guest that floods, or one whose peers are all unreachable.
LANE_LENGTH: Final = 256
# The hub's own lane has the farewells of a client that is gone.
HUB_LANE_LENGTH: Final = MAX_CONNECTIONS
# Pauses before a busy send is tried again: the other MAD with its transaction id leaves within microseconds.
BUSY_PAUSES_S: Final = (0.001, 0.004, 0.016, 0.064)


class Sender(Protocol):
    """A way out: `umad.UmadSender`, or a test's."""

    def send(self, gid_type: int, datagram: Datagram) -> None:
        """Send, waiting if need be. Raises UmadError or SendBusy."""

    def close(self) -> None:
        """Give it back."""


class _Parcel(NamedTuple):
    gid_type: int
    datagram: Datagram


class Lanes:
    """See the module's contract.

    Args:
        nursery: where lanes run; they end with it.
        open_sender: opens a way out, or raises UmadError; called in a thread.
        on_failure: called with lane, datagram and reason of what could not be sent.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        open_sender: Callable[[], Sender],
        on_failure: Callable[[int, Datagram, str], None],
    ) -> None:
        self._nursery = nursery
        self._open_sender = open_sender
        self._on_failure = on_failure
        self._queues: dict[int, trio.MemorySendChannel[_Parcel]] = {}

    def send(self, lane: int, gid_type: int, datagram: Datagram) -> DropReason | None:
        """See `switch.Uplink`."""
        queue = self._queues.get(lane)
        if queue is None:
            length = HUB_LANE_LENGTH if lane == HUB_LANE else LANE_LENGTH
            queue, parcels = trio.open_memory_channel[_Parcel](length)
            self._queues[lane] = queue
            self._nursery.start_soon(self._run, lane, parcels)
        try:
            queue.send_nowait(_Parcel(gid_type, datagram))
        except trio.WouldBlock:
            return DropReason.QUEUE_FULL
        return None

    def client_left(self, lane: int) -> None:
        """See `switch.Uplink`. What waits already still goes out."""
        queue = self._queues.pop(lane, None)
        if queue is not None:
            queue.close()

    async def _run(self, lane: int, parcels: trio.MemoryReceiveChannel[_Parcel]) -> None:
        # A limiter of its own: trio's default one is shared, and would be full of sends that wait.
        limiter = trio.CapacityLimiter(1)
        sender: Sender | None = None
        try:
            async for parcel in parcels:
                try:
                    if sender is None:
                        sender = await trio.to_thread.run_sync(self._open_sender, limiter=limiter)
                    await self._send(sender, parcel, limiter)
                except (UmadError, SendBusy) as e:
                    self._on_failure(lane, parcel.datagram, str(e))
        finally:
            if sender is not None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(sender.close, limiter=limiter)

    async def _send(self, sender: Sender, parcel: _Parcel, limiter: trio.CapacityLimiter) -> None:
        for pause_s in BUSY_PAUSES_S:
            try:
                await trio.to_thread.run_sync(sender.send, *parcel, limiter=limiter)
            except SendBusy:
                await trio.sleep(pause_s)
            else:
                return
        await trio.to_thread.run_sync(sender.send, *parcel, limiter=limiter)

"""Sends to the host's network: each client in a lane of its own, so that what waits in one holds up no other.

Contract: `send` never waits. A send may wait in the kernel for a link address, up to a second; so a lane is a bounded
queue, a thread while it sends, and a umad file of its own. Implements `switch.Uplink`.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import trio

from pvrdma_server.mad_frames import Datagram, DropReason
from pvrdma_server.mad_hub.connections import MAX_CONNECTIONS
from pvrdma_server.mad_hub.umad import SendBusy, UmadError

# Datagrams that wait in a lane; more is a guest that floods, or one whose peers are all unreachable.
LANE_LENGTH: Final = 256
# With the farewells of a client that is gone, which nobody repeats.
URGENT_LANE_LENGTH: Final = LANE_LENGTH + MAX_CONNECTIONS
# Sends that may wait in the kernel at the same time, in all lanes: each is a thread. It takes as many VMs whose peers
# are unreachable to hold up another's.
MAX_SENDS: Final = 256
# How long a lane goes on without its client: farewells to peers that cannot be resolved take a second each.
LEFT_S: Final = 60.0
# Pauses before a busy send is tried again: the other MAD with its transaction id leaves within microseconds.
BUSY_PAUSES_S: Final = (0.001, 0.004, 0.016, 0.064)


T = TypeVar("T")


class Sender(Protocol):
    """A way out: `umad.UmadSender`, or a test's."""

    def send(self, gid_type: int, datagram: Datagram) -> None:
        """Send, waiting if need be. Raises UmadError or SendBusy."""

    def close(self) -> None:
        """Give it back."""


class _Parcel(NamedTuple):
    gid_type: int
    datagram: Datagram


class _Mark(NamedTuple):
    """A place in the lane."""

    call: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Lane:
    queue: trio.MemorySendChannel[_Parcel | _Mark]
    scope: trio.CancelScope


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
        self._lanes: dict[int, _Lane] = {}
        # Not trio's default one, which has room for 40.
        self._limiter = trio.CapacityLimiter(MAX_SENDS)

    def send(
        self, lane: int, gid_type: int, datagram: Datagram, *, urgent: bool = False
    ) -> DropReason | None:
        """See `switch.Uplink`."""
        open_lane = self._lanes.get(lane)
        if open_lane is None:
            queue, parcels = trio.open_memory_channel[_Parcel | _Mark](math.inf)
            open_lane = self._lanes[lane] = _Lane(queue, trio.CancelScope())
            self._nursery.start_soon(self._run, lane, parcels, open_lane.scope)
        length = URGENT_LANE_LENGTH if urgent else LANE_LENGTH
        if open_lane.queue.statistics().current_buffer_used >= length:
            return DropReason.QUEUE_FULL
        open_lane.queue.send_nowait(_Parcel(gid_type, datagram))
        return None

    def when_sent(self, lane: int, call: Callable[[], None]) -> None:
        """See `switch.Uplink`."""
        open_lane = self._lanes.get(lane)
        if open_lane is None:
            call()
        else:
            open_lane.queue.send_nowait(_Mark(call))

    def client_left(self, lane: int) -> None:
        """See `switch.Uplink`. What waits already still goes out, for LEFT_S."""
        open_lane = self._lanes.pop(lane, None)
        if open_lane is not None:
            open_lane.queue.close()
            open_lane.scope.deadline = trio.current_time() + LEFT_S

    async def _run(
        self,
        lane: int,
        parcels: trio.MemoryReceiveChannel[_Parcel | _Mark],
        scope: trio.CancelScope,
    ) -> None:
        with scope:
            await self._carry(lane, parcels, scope)

    async def _carry(
        self,
        lane: int,
        parcels: trio.MemoryReceiveChannel[_Parcel | _Mark],
        scope: trio.CancelScope,
    ) -> None:
        sender: Sender | None = None
        unsent: _Parcel | None = None
        try:
            async for parcel in parcels:
                if isinstance(parcel, _Mark):
                    parcel.call()
                    continue
                unsent = parcel
                try:
                    if sender is None:
                        sender = await self._in_thread(self._open_sender)
                    await self._send(sender, parcel)
                except (UmadError, SendBusy) as e:
                    self._on_failure(lane, parcel.datagram, str(e))
                unsent = None
        finally:
            left = scope.cancel_called
            why = "its client has left, and time is up" if left else "the device is gone"
            self._give_up(lane, unsent, parcels, why)
            if sender is not None:
                with trio.CancelScope(shield=True):
                    await self._in_thread(sender.close)

    def _give_up(
        self,
        lane: int,
        parcel: _Parcel | _Mark | None,
        parcels: trio.MemoryReceiveChannel[_Parcel | _Mark],
        why: str,
    ) -> None:
        """The lane ends, maybe with datagrams in it."""
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                if isinstance(parcel, _Parcel):
                    self._on_failure(lane, parcel.datagram, why)
                parcel = parcels.receive_nowait()

    async def _send(self, sender: Sender, parcel: _Parcel) -> None:
        for pause_s in BUSY_PAUSES_S:
            try:
                await self._in_thread(sender.send, *parcel)
            except SendBusy:
                await trio.sleep(pause_s)
            else:
                return
        await self._in_thread(sender.send, *parcel)

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await trio.to_thread.run_sync(call, *args, limiter=self._limiter)

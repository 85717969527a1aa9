"""A real server on a real socket: `VfioUserContext` with a recording device, in trio in a thread of its own."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import trio
from structlog.testing import CapturingLogger

from pvrdma_server.errors import GuestError
from pvrdma_server.vfio_user import (
    Bar,
    MmapArea,
    PciIdentity,
    ResetReason,
    VfioUserContext,
)

IDENTITY = PciIdentity(0x15AD, 0x0820, 0x15AD, 0x0820, 0x028000, 1)
BAR1_SIZE = 0x1000
BAR2_SIZE = 0x10000
PAGE = 4096


class RecordingDevice:
    """A device whose BARs are plain memory and which remembers what it was told."""

    def __init__(self) -> None:
        self.bars = {1: bytearray(BAR1_SIZE), 2: bytearray(BAR2_SIZE)}
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.regions: dict[int, tuple[int, memoryview | None, bool]] = {}
        self.failure: Exception | None = None
        self.refuse_maps = False

    def next_event(self) -> tuple[Any, ...]:
        return self.events.get(timeout=10)

    def wait_for(self, *event: Any) -> None:
        while self.next_event() != event:
            pass

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    def bar_read(self, bar: int, offset: int, length: int) -> bytes:
        self._fail()
        self.events.put(("read", bar, offset, length))
        return bytes(self.bars[bar][offset : offset + length])

    def bar_write(self, bar: int, offset: int, data: bytes) -> None:
        self._fail()
        self.bars[bar][offset : offset + len(data)] = data
        self.events.put(("write", bar, offset, data))

    def dma_map(self, iova: int, length: int, view: memoryview | None, *, writable: bool) -> None:
        self._fail()
        if self.refuse_maps:
            raise GuestError("no")
        self.regions[iova] = (length, view, writable)
        self.events.put(("map", iova, length))

    def dma_unmap(self, iova: int, length: int) -> None:
        assert self.regions.pop(iova)[0] == length
        self.events.put(("unmap", iova, length))

    def reset(self, reason: ResetReason) -> None:
        self._fail()
        self.events.put(("reset", reason))

    def bus_master_changed(self, enabled: bool) -> None:
        self._fail()
        self.events.put(("bus_master", enabled))


class Server:
    """Runs `serve` in a thread; what it raised is in `error` after `stop`."""

    def __init__(self, path: str, **options: Any) -> None:
        self.path = path
        self.device = RecordingDevice()
        self.log = CapturingLogger()
        self.bar2_fd = os.memfd_create("bar2")
        os.ftruncate(self.bar2_fd, BAR2_SIZE)
        bars = (
            Bar(1, BAR1_SIZE, None, (), is_64bit=False),
            Bar(
                2,
                BAR2_SIZE,
                self.bar2_fd,
                (MmapArea(PAGE, BAR2_SIZE - PAGE),),
                is_64bit=False,
            ),
        )
        options.setdefault("socket_path", path)
        options.setdefault("bars", bars)
        self.context = VfioUserContext(self.device, identity=IDENTITY, logger=self.log, **options)
        self.error: BaseException | None = None
        self._scope = trio.CancelScope()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        assert self._ready.wait(10)

    def _main(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # handed to the test
            self.error = error
        self._ready.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._started)

    async def _started(self, task_status: Any) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: self.context.serve(task_status=task_status))
            self._ready.set()
            task_status.started()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run something of the context in trio's thread, as the device core would."""
        return trio.from_thread.run_sync(function, *arguments, trio_token=self._token)

    def trigger(self, vector: int) -> bool:
        triggered: bool = self.call(self.context.trigger, vector)
        return triggered

    def events_logged(self, name: str) -> list[dict[str, Any]]:
        return [c.kwargs for c in self.log.calls if c.args[0] == name]

    def join(self) -> BaseException | None:
        """Wait until the server ends by itself; what it raised."""
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.error

    def stop_serving(self) -> None:
        """Cancel `serve`, as SIGTERM does, and wait for it."""
        if self._thread.is_alive():
            with contextlib.suppress(trio.RunFinishedError):
                trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.stop_serving()
        self.context.close()
        os.close(self.bar2_fd)

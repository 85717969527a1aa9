"""Host completion queues, shared by many queue pairs.

The guest's completion queues are rings in its memory that the core writes; the host's only carry completions to us. A
queue pair reserves as many entries as it can have requests outstanding, so a host queue never overflows.

Contract: `CompletionQueues.drain` hands the completions that are there to `deliver`, some at a time; `armed` is kept by
`settle`, which takes the channel's events and asks for the next one, and then looks once more: no completion is ever
slept over.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pyverbs.cq import CQ, CompChannel
from pyverbs.pyverbs_error import PyverbsError

from pvrdma_server.backend_ibv.host import HostDevice, giving_back, verb

# Entries of one host queue, unless a queue pair needs more or the device has less.
_SIZE: Final = 16384
_POLL_BATCH: Final = 32


@dataclass(slots=True, eq=False)
class HostCq:
    """One host completion queue and its channel."""

    cq: Any
    channel: Any
    size: int
    reserved: int = 0
    armed: bool = False

    @property
    def fd(self) -> int:
        """Readable when an event waits."""
        return int(self.channel.fd)


class CompletionQueues:
    """All host completion queues of one backend."""

    def __init__(self, device: HostDevice, watch: Callable[[int], None]) -> None:
        self._device = device
        self._watch = watch
        self._cqs: list[HostCq] = []
        self._by_fd: dict[int, HostCq] = {}

    @property
    def fds(self) -> list[int]:
        """What is watched."""
        return list(self._by_fd)

    def reserve(self, entries: int) -> HostCq:
        """A queue with `entries` free entries, which are then taken."""
        for cq in self._cqs:
            if cq.size - cq.reserved >= entries:
                cq.reserved += entries
                return cq
        size = min(max(_SIZE, entries), int(self._device.attr.max_cqe))
        with verb("ibv_create_comp_channel"):
            channel = CompChannel(self._device.context)
        os.set_blocking(channel.fd, False)
        with verb("ibv_create_cq"):
            cq = HostCq(CQ(self._device.context, size, None, channel, 0), channel, size, entries)
        self._cqs.append(cq)
        self._by_fd[cq.fd] = cq
        self._watch(cq.fd)
        return cq

    def release(self, cq: HostCq, entries: int) -> None:
        """Give entries back; the queue itself stays for the next queue pair."""
        cq.reserved -= entries

    def drain(self, deliver: Callable[[list[Any]], None], budget: int) -> bool:
        """Deliver completions, `budget` of each queue at most; true when there may be more."""
        more = False
        for cq in self._cqs:
            left = budget
            while left > 0 and cq.reserved:
                try:
                    found, completions = cq.cq.poll(min(left, _POLL_BATCH))
                except PyverbsError:
                    # To enter this first would take longer than to find a queue empty.
                    with verb("ibv_poll_cq"):
                        raise
                if completions:
                    deliver(completions)
                if found < min(left, _POLL_BATCH):
                    break
                left -= found
            more = more or left <= 0
        return more

    def settle(self, readable: set[int]) -> bool:
        """Take events of the channels that are readable and arm what is not; true when something was armed."""
        for fd in readable:
            cq = self._by_fd.get(fd)
            if cq is not None:
                with verb("ibv_get_cq_event"):
                    cq.channel.get_cq_event(cq.cq)
                    cq.cq.ack_events(1)
                cq.armed = False
        newly = False
        for cq in self._cqs:
            if not cq.armed and cq.reserved:
                with verb("ibv_req_notify_cq"):
                    cq.cq.req_notify()
                cq.armed = newly = True
        return newly

    def close(self) -> None:
        """Give everything back."""
        for cq in self._cqs:
            with giving_back("ibv_destroy_cq"):
                cq.cq.close()
                cq.channel.close()
        self._cqs.clear()
        self._by_fd.clear()

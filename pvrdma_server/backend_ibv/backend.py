"""`IbvBackend`: the parts put together, and the host's events.

Contract: see backend.py. `wait_fd` becomes readable when `progress` has something to do; whoever waits on it calls
`progress` then, which takes what made it readable.
"""

import errno
import itertools
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import structlog

from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import PortAttr, QpType
from pvrdma_server.backend import (
    BackendMr,
    BackendPd,
    BackendQp,
    BackendSrq,
    HostGidFacts,
    QpInit,
    QpOwner,
    SrqOwner,
    Ud,
)
from pvrdma_server.backend_ibv.addresses import Addresses, AddressKeeper
from pvrdma_server.backend_ibv.host import (
    EVENT,
    HostDevice,
    HostEvent,
    make_limits,
    make_port_attr,
    verb,
)
from pvrdma_server.backend_ibv.host_qp import HostQp
from pvrdma_server.backend_ibv.memory import IbvPd, Registrar
from pvrdma_server.backend_ibv.qp import IbvQp
from pvrdma_server.backend_ibv.queues import CompletionQueues
from pvrdma_server.backend_ibv.srq import IbvSrq
from pvrdma_server.errors import BackendError, ConfigError
from pvrdma_server.gsi import Gsi
from pvrdma_server.guest_memory import GuestMemory, GuestPages

# Completions taken from one host queue in one `progress`: some hundred microseconds.
_BUDGET: Final = 64
_MAX_EVENTS: Final = 16
_QP_NUM: Final = attrgetter("qp_num")


class IbvConfig(NamedTuple):
    """Which host device, and who the guest's device is.

    Attributes:
        device: name of the host's RDMA device.
        port: its port, from 1.
        node_guid: 8 bytes in wire order, the guest device's own.
    """

    device: str
    port: int
    node_guid: bytes


def _ignore(_event: int, _info: int) -> None:
    return None


class IbvBackend:
    """A host RDMA device. Implements `backend.RdmaBackend`.

    Args:
        config: which device.
        keeper: gives the host's netdev the guest's addresses.
        gsi: QP1 in software, for the host's own belongs to its kernel; without, QP1 reaches this guest alone.

    Raises:
        ConfigError: the device cannot be used.

    Attributes:
        on_event: takes the host's events of port and device (EqeType, port number), for the guest.
        wait_fd: readable when `progress` has something to do.
    """

    def __init__(self, config: IbvConfig, keeper: AddressKeeper, gsi: Gsi | None = None) -> None:
        self._device = HostDevice(config.device, config.port)
        self.port = config.port
        self.limits = make_limits(self._device, config.node_guid)
        self.on_event: Callable[[int, int], None] = _ignore
        self._epoll = select.epoll()
        self.wait_fd = self._epoll.fileno()
        self.cqs = CompletionQueues(self._device, self._watch)
        self.addresses = Addresses(self._device, keeper)
        if self._device.async_fd >= 0:
            self._watch(self._device.async_fd)
        self.number = itertools.count(1).__next__
        self._qps: dict[int, IbvQp] = {}
        # The bell is readable as long as there is one.
        self._flushing: list[HostQp] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch(self._bell)
        self._srqs: set[IbvSrq] = set()
        self._gsi = gsi or Gsi()
        self._lost = False
        self._log: Any = structlog.get_logger(component="backend_ibv", device=config.device)
        self._troubles: set[tuple[str, int]] = set()
        self._log.info("host_device", port=config.port, on_demand=self._device.on_demand)

    def _watch(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    # --- backend.RdmaBackend -----------------------------------------------------------------------------------------

    def attach(self, memory: GuestMemory) -> None:
        """See `backend.RdmaBackend`."""
        self._memory = memory
        self.registrar = Registrar(self._device, memory)

    def query_port(self) -> PortAttr:
        """See `backend.RdmaBackend`."""
        with verb("ibv_query_port"):
            return make_port_attr(self._device.port_attr())

    def add_gid(self, index: int, gid: bytes, gid_type: int) -> None:
        """See `backend.RdmaBackend`."""
        # First who owns it: an address of another VM's must not come to this one's netdev.
        self._gsi.add_gid(index, gid, gid_type)
        self.addresses.add(index, gid, gid_type)

    def remove_gid(self, index: int) -> None:
        """See `backend.RdmaBackend`."""
        # The hub ends the GID's connections, for which the host's port must still have it.
        self._gsi.remove_gid(index)
        self.addresses.remove(index)

    def create_pd(self, *, privileged: bool) -> BackendPd:
        """See `backend.RdmaBackend`."""
        return self.registrar.create_pd(
            privileged=privileged, on_destroy=self.addresses.close_handles
        )

    def reg_mr(
        self, pd: BackendPd, *, start: int, length: int, access: int, pages: GuestPages
    ) -> BackendMr:
        """See `backend.RdmaBackend`."""
        with self._telling():
            return self.registrar.reg_mr(
                _host_pd(pd), start=start, length=length, access=access, pages=pages
            )

    def reg_dma_mr(self, pd: BackendPd, *, access: int) -> BackendMr:
        """See `backend.RdmaBackend`."""
        return self.registrar.reg_dma_mr(_host_pd(pd), access)

    def alloc_fast_reg_mr(self, pd: BackendPd, *, max_pages: int) -> BackendMr:
        """See `backend.RdmaBackend`. Not to be had over host verbs, and not advertised."""
        raise BackendError(
            95, "ibv_alloc_mr", "FAST_REG_MR needs the embedded backend (--backend soft)"
        )

    def create_srq(
        self, pd: BackendPd, owner: SrqOwner, *, max_wr: int, max_sge: int
    ) -> BackendSrq:
        """See `backend.RdmaBackend`."""
        with self._telling():
            srq = IbvSrq(
                _host_pd(pd), owner, self.registrar, max_wr=max_wr, max_sge=max_sge,
                number=self.number, trouble=self.host_trouble,
            )  # fmt: skip
        srq.on_destroy = self._srqs.discard
        self._srqs.add(srq)
        return srq

    def create_qp(
        self, pd: BackendPd, owner: QpOwner, init: QpInit, srq: BackendSrq | None
    ) -> BackendQp:
        """See `backend.RdmaBackend`."""
        if init.qp_type == QpType.GSI:
            return self._gsi.create_qp(owner, self._memory, _host_pd(pd).dma_keys)
        assert srq is None or isinstance(srq, IbvSrq)
        if max(init.max_send_wr, init.max_recv_wr) > self.limits.max_qp_wr:
            raise BackendError(errno.EINVAL, "ibv_create_qp", "a queue beyond the device's limit")
        with self._telling():
            qp = IbvQp(self, _host_pd(pd), owner, init, srq)
        self._qps[qp.qpn] = qp
        return qp

    def progress(self, budget_bytes: int) -> bool:
        """See `backend.RdmaBackend`."""
        more = self._gsi.progress()
        more = self._flush_on() or more
        if self._lost:
            return more
        try:
            return self._work() or more
        except BackendError as e:
            # A device that is there answers these, whatever a guest does; this one goes, and has not said so yet.
            self.host_trouble(e)
            self._lose_device()
            return more

    def _work(self) -> bool:
        more = self._drain()
        ready: set[int] = set()
        for fd, what in self._epoll.poll(0, _MAX_EVENTS):
            if what & (select.EPOLLERR | select.EPOLLHUP):
                self._lose_device()
                return False
            ready.add(fd)
        if self._device.async_fd in ready:
            self._take_events()
        if not self._lost and self.cqs.settle(ready):
            more = self._drain() or more
        return more

    def _flush_on(self) -> bool:
        """Queue pairs in ERR go on with their flush, each for a turn; true when one has not come to its end."""
        if not self._flushing:
            return False
        os.eventfd_read(self._bell)
        turn, self._flushing = self._flushing, []
        for qp in turn:
            if self._qps.get(qp.qpn) is qp:
                qp.refill()
        return bool(self._flushing)

    def _drain(self) -> bool:
        touched: dict[IbvQp, None] = {}

        def deliver(completions: list[Any]) -> None:
            # In the host's order, whose it may be: guests' queue pairs may share a CQ.
            for qpn, of_one in groupby(completions, _QP_NUM):
                qp = self._qps.get(qpn)
                if qp is not None:
                    qp.completed_all(of_one)
                    touched[qp] = None
                else:
                    for wc in of_one:
                        self._give_back(int(wc.wr_id))

        more = self.cqs.drain(deliver, _BUDGET)
        srqs = {qp.srq for qp in touched if qp.srq is not None}
        for srq in srqs:
            srq.recv_doorbell()
        for qp in touched:
            if self._qps.get(qp.qpn) is qp:
                qp.refill()
        return more

    def _give_back(self, number: int) -> None:
        """A queue pair that is gone had taken a receive of an SRQ, which has room for another now."""
        for srq in self._srqs:
            if srq.take(number) is not None:
                return

    @property
    def under_way(self) -> int:
        """Sends that the host has and has not completed."""
        return sum(qp.under_way for qp in self._qps.values())

    def next_deadline_ns(self) -> int | None:
        """See `backend.RdmaBackend`. Nothing here has a clock."""
        return None

    def reset(self) -> None:
        """See `backend.RdmaBackend`."""
        self._gsi.reset()
        self.addresses.clear()

    def close(self) -> None:
        """See `backend.RdmaBackend`."""
        self._gsi.reset()
        self.addresses.clear()
        self.cqs.close()
        self._epoll.close()
        os.close(self._bell)
        self._device.close()

    # --- qp.Surroundings ---------------------------------------------------------------------------------------------

    def host_gid_index(self, index: int) -> int:
        """See `qp.Surroundings`."""
        with self._telling():
            return self.addresses.host_index(index)

    def address_handle(self, pd: IbvPd, ud: Ud) -> Any:
        """See `qp.Surroundings`."""
        return self.addresses.handle(pd, ud)

    def forget_qp(self, qp: HostQp) -> None:
        """See `qp.Surroundings`."""
        self._qps.pop(qp.qpn, None)

    def flush_later(self, qp: HostQp) -> None:
        """See `qp.Surroundings`."""
        if not self._flushing:
            os.eventfd_write(self._bell, 1)
        if qp not in self._flushing:
            self._flushing.append(qp)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Log what the host refuses, with what to change; the guest only learns an errno."""
        try:
            yield
        except BackendError as e:
            self.host_trouble(e)
            raise

    def host_trouble(self, error: BackendError) -> None:
        """See `qp.Surroundings`."""
        key = (error.verb, error.errno)
        if key not in self._troubles:
            self._troubles.add(key)
            self._log.error("host_verb_failed", error=str(error), once=True)

    # --- for people --------------------------------------------------------------------------------------------------

    def gid_facts(self) -> dict[int, HostGidFacts]:
        """See `backend.HostBackend`."""
        try:
            return self.addresses.facts()
        except BackendError as e:
            self.host_trouble(e)
            return {}

    # --- events of the host ------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        while not self._lost and (event := self._device.next_event()) is not None:
            self._take_event(event)

    def _take_event(self, event: HostEvent) -> None:
        kind = event.kind
        if kind in _PORT_EVENTS:
            if event.element in (self.port, 0):
                # Queue pairs' events are not logged: a guest can have as many as it likes.
                self._log.info("host_event", kind=EVENT(kind).name)
                self.addresses.forget_indices()
                self.on_event(_PORT_EVENTS[kind], 1)
        elif kind == EVENT.IBV_EVENT_DEVICE_FATAL:
            self._lose_device()
        else:
            # What was completed before the event comes before it.
            self._drain()
            named = [
                qp for qp in self._qps.values() if event.element and qp.address == event.element
            ]
            for qp in named or list(self._qps.values()):
                _tell_qp(qp, kind, named=bool(named))

    def _lose_device(self) -> None:
        """The host device is gone. What is under way ends, and nothing goes on; objects can still be destroyed."""
        self._lost = True
        self._log.error(
            "host_device_lost",
            why="the host device failed or was removed: bring it back, restart this server, plug the VM's device anew",
        )
        for fd in (self._device.async_fd, *self.cqs.fds):
            if fd >= 0:
                self._epoll.unregister(fd)
        for qp in list(self._qps.values()):
            qp.device_lost()
        self.on_event(int(EqeType.DEVICE_FATAL), 1)


def _tell_qp(qp: IbvQp, kind: int, *, named: bool) -> None:
    """An event of this queue pair, or of one that the host does not name: then it looks whether it is the one."""
    if kind == EVENT.IBV_EVENT_QP_LAST_WQE_REACHED:
        qp.last_wqe(named=named)
    elif kind == EVENT.IBV_EVENT_SQ_DRAINED:
        qp.drained()
    elif kind == EVENT.IBV_EVENT_COMM_EST and named:
        qp.established()
    elif kind in _QP_ERRORS:
        qp.fatal(_QP_ERRORS[kind], named=named)


# SRQ limits are the core's own to watch; COMM_EST also shows in the first receive that completes before RTS.
_QP_ERRORS: Final = {
    int(EVENT.IBV_EVENT_QP_FATAL): int(EqeType.QP_FATAL),
    # Of the host's queue, not the guest's: whose queue pairs have failed with it.
    int(EVENT.IBV_EVENT_CQ_ERR): int(EqeType.QP_FATAL),
    int(EVENT.IBV_EVENT_SRQ_ERR): int(EqeType.QP_FATAL),
    int(EVENT.IBV_EVENT_QP_REQ_ERR): int(EqeType.QP_REQ_ERR),
    int(EVENT.IBV_EVENT_QP_ACCESS_ERR): int(EqeType.QP_ACCESS_ERR),
}
_PORT_EVENTS: Final = {
    int(EVENT.IBV_EVENT_PORT_ACTIVE): int(EqeType.PORT_ACTIVE),
    int(EVENT.IBV_EVENT_PORT_ERR): int(EqeType.PORT_ERR),
    int(EVENT.IBV_EVENT_GID_CHANGE): int(EqeType.GID_CHANGE),
}


def _host_pd(pd: BackendPd) -> IbvPd:
    if not isinstance(pd, IbvPd):
        raise ConfigError("a protection domain of another backend")
    return pd

"""The backend in this process, on rxe0: events and failures that rxe never has, and what must not take for ever."""

import errno
import gc
import os
import select
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from guest import Ah, CommandFailed, GuestRam, Kernel, Machine, Qp, UserProcess, connect
from host_peer import v4_gid
from structlog.testing import capture_logs

from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpState, QpType, SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import WcStatus
from pvrdma_server.backend_ibv import IbvBackend, IbvConfig
from pvrdma_server.backend_ibv.addresses import Addresses
from pvrdma_server.backend_ibv.host import HostEvent, HostGid
from pvrdma_server.errors import BackendError
from pvrdma_server.gid_sync import GidSync, Policy

pytestmark = pytest.mark.host
OK, FLUSHED = int(WcStatus.SUCCESS), int(WcStatus.WR_FLUSH_ERR)
WAIT_S = 30.0
GID = v4_gid("10.9.0.1")
# enum ibv_event_type
_QP_FATAL, _DEVICE_FATAL = 1, 8
_LONG_RING = 512


class FailingDevice:
    """A guest on rxe0 in this process, whose events of the device come out of a pipe.

    rxe never fails, so the test says what an HCA's kernel says: the descriptor of asynchronous events is replaced.
    """

    def __init__(self) -> None:
        before = event_fds()
        keeper = GidSync(Policy.CHECK, None, None)
        self.backend = IbvBackend(IbvConfig("rxe0", 1, bytes(8)), keeper)
        (self._fd,) = event_fds() - before
        self.machine = Machine(self.backend, ram=GuestRam(memfd=True))
        self.backend.on_event = self.machine.device.async_event
        self._say = self._kept = -1

    def take_over(self) -> None:
        """From now on events come from here. The verbs pass the descriptor on, so no object can be made any more."""
        events, self._say = os.pipe2(os.O_NONBLOCK)
        os.dup2(events, self._fd)
        os.close(events)
        with select.epoll.fromfd(os.dup(self.backend.wait_fd)) as watched:
            watched.register(self._fd, select.EPOLLIN)

    def say(self, kind: int) -> None:
        """Source: rdma/ib_user_verbs.h, struct ib_uverbs_async_event_desc: element, event_type, reserved."""
        os.write(self._say, struct.pack("=QII", 0, kind, 0))

    def unplug(self) -> None:
        """The other end is gone: the descriptor has EPOLLHUP."""
        os.close(self._say)

    def break_verbs(self) -> None:
        """Every command to the kernel fails from now on with EIO, as it does once the driver has let go."""
        master, slave = os.openpty()
        os.close(master)
        commands = self.backend._device.context.cmd_fd
        self._kept = os.dup(commands)
        os.dup2(slave, commands)
        os.close(slave)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._say)
        if self._kept >= 0:
            # pyverbs' objects complain when they end and cannot be given back.
            os.dup2(self._kept, self.backend._device.context.cmd_fd)
            os.close(self._kept)
        self.machine.device.reset("the test ends")
        self.backend.close()
        self.machine.ram.close()
        gc.collect()


def event_fds() -> set[int]:
    """This process's descriptors of asynchronous events."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "[infinibandevent]" in os.readlink(f"/proc/self/fd/{entry}"):
                found.add(int(entry))
    return found


@pytest.fixture
def device() -> Iterator[FailingDevice]:
    made = FailingDevice()
    yield made
    made.close()


class Pair:
    """Two connected queue pairs of one process."""

    def __init__(self, device: FailingDevice, max_wr: int = 16) -> None:
        self.kernel = Kernel(device.machine.boot())
        self.kernel.add_gid(GID)
        self.process = UserProcess(self.kernel.driver)
        self.cq = self.process.cq(4 * max_wr)
        self.a, self.b = (Qp(self.process, max_wr=max_wr, send_cq=self.cq) for _ in range(2))
        connect(self.a, self.b, GID, GID)
        self.memory = self.process.mr(8192)

    def write(self, wr_id: int) -> None:
        self.a.write(self.memory.sge(0, 4096), to=self.memory.remote(4096), wr_id=wr_id)

    def post_silently(self, wr_id: int) -> None:
        """A write, without a doorbell."""
        to = self.memory.remote(4096)
        request = abi.SqWqeRdma(
            wr_id, 1, 0, abi.WrOpcode.RDMA_WRITE, SendFlags.SIGNALED, bytes(4), to.addr, to.rkey
        )
        self.a.post_raw(abi.SQ_WQE_RDMA.pack(request), [self.memory.sge(0, 4096)], doorbell=False)

    def events(self) -> list[tuple[int, int]]:
        return [(event.type, event.info) for event in self.kernel.driver.take_events()]


def at_work(device: FailingDevice, pair: Pair) -> None:
    """A receive is posted, and a write has been completed."""
    pair.b.post_recv(pair.memory.sge(), wr_id=77)
    pair.write(1)
    deadline = time.monotonic() + WAIT_S
    while not (done := pair.a.send_cq.poll()):
        assert time.monotonic() < deadline
        device.machine.device.progress(1 << 20)
    assert [(wc.status, wc.wr_id) for wc in done] == [(OK, 1)]
    pair.events()


@pytest.mark.parametrize("how", ["event", "hang-up", "verb"])
def test_device_that_fails(device: FailingDevice, how: str) -> None:
    pair, progress = Pair(device), device.machine.device.progress
    at_work(device, pair)
    if how == "verb":
        # The completion of another write waits, and asking for the next one's event is what fails.
        pair.post_silently(3)
        host_qp(device, pair.a).send_doorbell()
        assert select.select([device.backend.wait_fd], [], [], WAIT_S)[0]
        device.break_verbs()
    else:
        device.take_over()
        if how == "event":
            device.say(_DEVICE_FATAL)
        else:
            device.unplug()
    progress(1 << 20)
    assert not progress(1 << 20)
    assert pair.events() == [(EqeType.DEVICE_FATAL, 1)]
    done = [(wc.status, wc.wr_id) for wc in pair.cq.poll()]
    assert done == [*([(OK, 3)] if how == "verb" else []), (FLUSHED, 77)]
    pair.write(2)
    assert [(wc.status, wc.wr_id) for wc in pair.cq.poll()] == [(FLUSHED, 2)]
    for qp in (pair.a, pair.b):
        qp.destroy()


def host_qp(device: FailingDevice, qp: Qp) -> Any:
    return device.backend._qps[qp.qpn]


def test_fatal_event_of_a_queue_pair_reaches_it_alone(device: FailingDevice) -> None:
    pair = Pair(device)
    at_work(device, pair)
    # Not out of the pipe: the library counts the events of an object, and waits for the last when it ends.
    device.backend._take_event(HostEvent(_QP_FATAL, host_qp(device, pair.a).address))
    device.machine.device.progress(1 << 20)
    assert pair.events() == [(EqeType.QP_FATAL, pair.a.handle)]
    assert (pair.a.query().qp_state, pair.b.query().qp_state) == (QpState.ERR, QpState.RTS)


def test_a_long_flush_takes_turns(device: FailingDevice) -> None:
    """A process that posts as fast as it is flushed must not keep the rest of its guest waiting."""
    pair, count = Pair(device, _LONG_RING), _LONG_RING - 2
    pair.b.to_error()
    while device.machine.device.progress(1 << 20):
        pass
    for number in range(count):
        pair.b.post_recv(pair.memory.sge(), wr_id=number, doorbell=False)
    pair.b.ring_recv()
    # Nobody calls `progress` after a receive's doorbell: the descriptor says that there is more to do.
    assert pair.cq.ring.has_data()[0] < count
    wait_fd = device.backend.wait_fd
    assert select.select([wait_fd], [], [], 0)[0]
    while device.machine.device.progress(1 << 20):
        assert select.select([wait_fd], [], [], 0)[0]
    assert not select.select([wait_fd], [], [], 0)[0]
    assert [(wc.status, wc.wr_id) for wc in pair.cq.poll()] == [(FLUSHED, n) for n in range(count)]
    for number in range(count):
        pair.b.send(pair.memory.sge(), wr_id=number, doorbell=False)
    pair.b.ring_send()
    assert device.machine.device.more_work
    while device.machine.device.progress(1 << 20):
        pass
    assert [(wc.status, wc.wr_id) for wc in pair.cq.poll()] == [(FLUSHED, n) for n in range(count)]


def test_peer_that_does_not_answer_is_named(device: FailingDevice) -> None:
    qp = Qp(Pair(device).process)
    qp.to_init()
    with capture_logs() as logs, pytest.raises(CommandFailed) as caught:
        qp.to_rtr(dest_qpn=1, dgid=v4_gid("10.9.0.77"))
    assert caught.value.err in (errno.ETIMEDOUT, errno.EHOSTUNREACH)
    assert "peer 0000:0000:0000:0000:0000:ffff:0a09:004d: nobody answers there" in logs[0]["error"]


@pytest.mark.parametrize(("version", "sl", "network"), [(4, 2, 1), (6, 1, 2)])
@pytest.mark.parametrize("who", ["process", "kernel"])
def test_datagrams_tell_what_they_came_with(
    device: FailingDevice, who: str, version: int, sl: int, network: int
) -> None:
    """A process finds it in place of the service level."""
    there = [entry.gid for entry in device.backend._device.gids() if entry.gid_type == 2]
    gid = GID if version == 4 else next(gid for gid in there if gid[:2] == b"\xfe\x80")
    kernel = Kernel(device.machine.boot())
    kernel.add_gid(gid)
    ctx: Any = kernel if who == "kernel" else UserProcess(kernel.driver)
    a, b = (Qp(ctx, QpType.UD).ready() for _ in range(2))
    buffer = kernel.buffer(4096) if who == "kernel" else ctx.mr(4096, offset=8)
    b.post_recv(buffer.sge(0, 16), buffer.sge(16, 84), wr_id=1)
    a.send_to(Ah(gid), b.qpn, buffer.sge(200, 60), wr_id=2)
    deadline = time.monotonic() + WAIT_S
    while not (done := b.recv_cq.poll()):
        assert time.monotonic() < deadline
    (wc,) = done
    assert (wc.status, wc.wr_id, wc.byte_len) == (OK, 1, 100)
    assert wc.network_hdr_type == network
    assert who == "kernel" or wc.sl == sl


class Port:
    """A host's port: its GID table, and how often somebody looked at it."""

    name, port = "hca0", 1

    def __init__(self) -> None:
        self.looks = 0
        self.appears_at = 1 << 30

    def gids(self) -> list[HostGid]:
        self.looks += 1
        return [HostGid(7, GID, 2, 0)] if self.looks >= self.appears_at else []


class Keeper:
    """Implements `AddressKeeper`."""

    def __init__(self, *, may: bool) -> None:
        self.may = may
        self.added = 0

    def add(self, netdev: str, gid: bytes) -> bool:
        self.added += self.may
        return self.may

    def remove(self, gid: bytes) -> bool:
        return self.may

    def clear(self) -> bool:
        return self.may


def refused(addresses: Addresses) -> bool:
    with pytest.raises(BackendError) as caught:
        addresses.host_index(0)
    return caught.value.errno == errno.EADDRNOTAVAIL


def test_gid_of_a_new_address_is_waited_for_once() -> None:
    port: Any = Port()
    addresses = Addresses(port, Keeper(may=True))
    addresses.add(0, GID, 2)
    port.appears_at = port.looks + 5
    assert addresses.host_index(0) == 7
    port.appears_at = 1 << 30
    addresses.forget_indices()
    port.looks = 0
    assert refused(addresses)
    assert port.looks < 5


def test_gid_that_may_not_be_added_is_not_waited_for() -> None:
    port: Any = Port()
    addresses = Addresses(port, Keeper(may=False))
    addresses.add(0, GID, 2)
    port.looks = 0
    assert refused(addresses)
    assert port.looks < 5


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_gid_that_is_given_up_and_wanted_again_at_once(how: str) -> None:
    """The kernel still shows the GID of the address that it has just taken away."""
    port: Any = Port()
    keeper = Keeper(may=True)
    addresses = Addresses(port, keeper)
    addresses.add(0, GID, 2)
    port.appears_at = 0
    if how == "remove":
        addresses.remove(0)
    else:
        addresses.clear()
    addresses.add(0, GID, 2)
    assert keeper.added == 2

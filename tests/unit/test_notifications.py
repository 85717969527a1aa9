"""Notifications, CQ overflow and events: nothing lost, nothing overrun, nothing piled up."""

import pytest
from guest import (
    Qp,
    RingWords,
    Srq,
    UserProcess,
)
from unit.bed import Bed, backend_of, ready

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpState
from pvrdma_server.abi.vmw_pvrdma_abi import WcFlags, WcStatus
from pvrdma_server.reports import MAX_WAITING

NOTIFICATION_CAPACITY = 1024
EVENT_CAPACITY = 512


# --- notifications -------------------------------------------------------------------------------------------------


def test_one_notification_per_arm(bed: Bed, qp: Qp) -> None:
    cq = qp.send_cq
    qp.send()
    assert cq.notified() == 0
    cq.arm()
    assert cq.notified() == 0
    for _ in range(3):
        qp.send()
    assert cq.notified() == 1
    cq.arm()
    qp.send()
    assert cq.notified() == 1


def test_arming_tells_what_was_missed(bed: Bed, qp: Qp) -> None:
    qp.send()
    assert qp.send_cq.arm()
    qp.send_cq.poll()
    assert not qp.send_cq.arm()


@pytest.mark.parametrize(
    ("solicited", "status", "expected"),
    [(False, WcStatus.SUCCESS, 0), (True, WcStatus.SUCCESS, 1), (False, WcStatus.LOC_LEN_ERR, 1)],
)
def test_armed_for_solicited(bed: Bed, qp: Qp, solicited: bool, status: int, expected: int) -> None:
    """An unsuccessful completion counts as solicited."""
    qp.recv_cq.arm(solicited=True)
    qp.send()
    assert qp.recv_cq.notified() == 0
    qp.post_recv(num_sge=0 if status == WcStatus.SUCCESS else 99)
    backend_of(bed, qp).arrive(solicited=solicited)
    bed.machine.device.progress(1)
    assert qp.recv_cq.notified() == expected


def test_arm_beats_arm_solicited(bed: Bed, qp: Qp) -> None:
    qp.send_cq.arm()
    qp.send_cq.arm(solicited=True)
    qp.send()
    assert qp.send_cq.notified() == 1


def test_a_handler_that_arms_again_is_called_again(bed: Bed, qp: Qp) -> None:
    """The handler runs before the driver advances cons_head: two entries of one CQ at a time."""
    seen: list[int] = []

    def handler() -> None:
        seen.extend(wc.wr_id for wc in qp.send_cq.poll())
        qp.send_cq.arm()
        if len(seen) < 3000:
            qp.send(wr_id=len(seen))

    bed.driver.comp_handlers[qp.send_cq.handle] = handler
    qp.send_cq.arm()
    qp.send(wr_id=0)
    while bed.driver.interrupt():
        pass
    assert seen == list(range(3000))


def test_a_notification_ring_that_nobody_drains(bed: Bed, qp: Qp) -> None:
    """It is never overrun, nothing piles up here, and nothing is lost when the guest wakes up."""
    cq = qp.send_cq
    for _ in range(2 * NOTIFICATION_CAPACITY):
        cq.arm()
        qp.send()
        cq.poll()
    used = (bed.driver.cqn_ring.prod_tail - bed.driver.cqn_ring.cons_head) % 2048
    assert used == NOTIFICATION_CAPACITY
    assert bed.machine.device.waits_for_guest
    assert len(bed.machine.device._reports._cqs) == 1
    assert len(bed.driver.drain_notifications()) == NOTIFICATION_CAPACITY
    bed.machine.device.progress(1)
    assert bed.driver.drain_notifications() == [cq.handle]
    assert not bed.machine.device.waits_for_guest


# --- CQ overflow ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corrupt", [False, True])
def test_an_overflown_cq_stops_its_queue_pairs(
    bed: Bed, user: UserProcess, qp: Qp, corrupt: bool
) -> None:
    cq = user.cq(4)
    first, second = ready(Qp(user, send_cq=cq)), ready(Qp(user, recv_cq=cq))
    second.post_recv(wr_id=50)
    if corrupt:
        cq.ring.cons_head = 0xFFFF_FFFF
    for number in range(5):
        first.send(wr_id=number)
    assert bed.driver.take_events() == [api.Eqe(EqeType.CQ_ERR, cq.handle)]
    assert [q.query().qp_state for q in (first, second, qp)] == [
        QpState.ERR,
        QpState.ERR,
        QpState.RTS,
    ]
    if corrupt:
        cq.ring.cons_head = 0
    assert [wc.wr_id for wc in cq.poll()] == ([] if corrupt else [0, 1, 2, 3])
    first.send(wr_id=9)
    assert cq.poll() == []  # a failed CQ takes nothing any more
    cq.destroy()
    assert bed.machine.counts()["qps"] == 1


def test_a_cq_that_is_exactly_full_is_fine(bed: Bed, user: UserProcess, qp: Qp) -> None:
    other = ready(Qp(user, send_cq=user.cq(4)))
    for round_ in range(10):
        for number in range(4):
            other.send(wr_id=4 * round_ + number)
        assert len(other.send_cq.poll()) == 4
    assert bed.driver.take_events() == []


def test_overflow_spreads_to_cqs_that_the_flush_fills(bed: Bed, user: UserProcess, qp: Qp) -> None:
    """A stopped queue pair flushes into its other CQ, which may overflow too, and so on."""
    small, tiny = user.cq(2), user.cq(1)
    first = ready(Qp(user, send_cq=small, recv_cq=tiny))
    second = ready(Qp(user, send_cq=tiny))
    for number in range(3):
        first.post_recv(wr_id=number)
    for _ in range(3):
        first.send()
    events = bed.driver.take_events()
    assert events == [api.Eqe(EqeType.CQ_ERR, cq.handle) for cq in (small, tiny)]
    assert second.query().qp_state == QpState.ERR


# --- event ring ----------------------------------------------------------------------------------------------------


def test_an_event_ring_that_nobody_drains(bed: Bed) -> None:
    device = bed.machine.device
    for number in range(EVENT_CAPACITY + MAX_WAITING + 100):
        device.async_event(EqeType.GID_CHANGE, number)
        device.progress(1)
    assert device.counters.events_dropped == 100
    seen: list[int] = []
    while events := bed.driver.drain_events():
        seen += [event.info for event in events]
        device.progress(1)
    assert seen == list(range(EVENT_CAPACITY + MAX_WAITING))
    assert not device.waits_for_guest


@pytest.mark.parametrize("ring", ["async_ring", "cqn_ring"])
@pytest.mark.parametrize("index", [0x800, 0x1000, 0xFFFF_FFFF])
def test_device_rings_whose_indices_lie(bed: Bed, qp: Qp, ring: str, index: int) -> None:
    words: RingWords = getattr(bed.driver, ring)
    words.cons_head = index
    before = bed.machine.errors()
    qp.send_cq.arm()
    qp.send()
    bed.machine.device.async_event(EqeType.GID_CHANGE, 1)
    bed.machine.device.progress(1)
    assert bed.machine.errors() == before + 1
    assert words.prod_tail == 0
    assert not bed.machine.device.waits_for_guest


def test_srq_limit_fires_once(bed: Bed, user: UserProcess, qp: Qp) -> None:
    srq = Srq(user)
    member = ready(Qp(user, srq=srq))
    for _ in range(4):
        srq.post_recv()
    srq.arm_limit(3)
    limit = api.Eqe(EqeType.SRQ_LIMIT_REACHED, srq.handle)
    assert bed.driver.take_events() == []
    backend_of(bed, member).arrive()
    assert bed.driver.take_events() == []
    backend_of(bed, member).arrive()
    bed.machine.device.progress(1)
    assert bed.driver.take_events() == [limit]
    assert srq.query().srq_limit == 0
    backend_of(bed, member).arrive()
    bed.machine.device.progress(1)
    assert bed.driver.take_events() == []
    srq.arm_limit(2)  # fewer are left already
    assert bed.driver.take_events() == [limit]


def test_receives_of_an_srq_complete_into_the_members_cq(
    bed: Bed, user: UserProcess, qp: Qp
) -> None:
    srq = Srq(user)
    members = [ready(Qp(user, srq=srq)) for _ in range(2)]
    for number in range(2):
        srq.post_recv(wr_id=number)
    for number, member in enumerate(members):
        backend_of(bed, member).arrive(flags=WcFlags.WITH_IMM)
        wc = member.recv_cq.wait_one()
        assert (wc.wr_id, wc.qp, wc.wc_flags) == (number, member.handle, WcFlags.WITH_IMM)

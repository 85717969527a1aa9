"""Rings that are watched: processes ring nothing, no work is lost, and completions are announced by moderation."""

from itertools import pairwise

import pytest
from guest import Kernel, Machine, Qp, Srq, UserProcess
from unit.bed import GID, ready
from unit.fake_backend import FakeBackend
from unit.fake_watch import FakeWatch

from pvrdma_server.abi.pvrdma_dev_api import DeviceCtl, Reg
from pvrdma_server.abi.pvrdma_verbs import QpState
from pvrdma_server.abi.vmw_pvrdma_abi import UAR_CQ_ARM, UAR_CQ_ARM_SOL, WcStatus
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.device import INLINE_BUDGET
from pvrdma_server.watches import REPEAT_NS


class Watched:
    """A machine whose processes' doorbell pages are memory: what they ring reaches nobody."""

    def __init__(self, *, mapped: bool = True) -> None:
        self.backend = FakeBackend()
        self.watch = FakeWatch()
        config = DeviceConfig(max_uar=8, mapped_doorbells=mapped)
        self.machine = Machine(self.backend, config=config, watch=self.watch if mapped else None)
        self.device = self.machine.device
        self.driver = self.machine.boot()
        self.kernel = Kernel(self.driver)
        self.kernel.add_gid(GID)
        self.user = UserProcess(self.driver)

    def look(self) -> int:
        """As the server does when the watcher's descriptor is readable; how many rings had fired."""
        fired = self.watch.fired()
        self.device.rings_fired(fired)
        self.device.progress(INLINE_BUDGET)
        return len(fired)


@pytest.fixture
def bed() -> Watched:
    return Watched()


@pytest.fixture
def qp(bed: Watched) -> Qp:
    return ready(Qp(bed.user))


def sent(bed: Watched, qp: Qp) -> list[int]:
    return [wr.wr_id for wr in bed.backend.qps[qp.qpn].sent]


# --- work ----------------------------------------------------------------------------------------------------------


def test_work_is_found_without_a_doorbell(bed: Watched, qp: Qp) -> None:
    for number in range(5):
        qp.send(wr_id=number, doorbell=False)
        bed.look()
        assert sent(bed, qp) == list(range(number + 1))
    assert bed.look() == 0


def test_a_ring_fires_once_until_it_was_found_empty(bed: Watched, user_rq: Qp) -> None:
    """Receives lie there for long: a watcher that fired for them all the time would spin."""
    user_rq.post_recv(wr_id=1, doorbell=False)
    assert bed.look() == 1
    user_rq.post_recv(wr_id=2, doorbell=False)
    assert bed.look() == 0
    fake = bed.backend.qps[user_rq.qpn]
    assert [wr.wr_id for _ in range(2) if (wr := fake.arrive())] == [1, 2]
    assert fake.arrive() is None  # empty: armed again
    user_rq.post_recv(wr_id=3, doorbell=False)
    assert bed.look() == 1


@pytest.fixture
def user_rq(qp: Qp) -> Qp:
    return qp


def test_kernel_rings_are_not_watched(bed: Watched) -> None:
    before = len(bed.watch.words)
    kernel_qp = ready(Qp(bed.kernel))
    assert len(bed.watch.words) == before
    kernel_qp.send(wr_id=1)
    assert kernel_qp.send_cq.wait_one().wr_id == 1


def test_work_posted_before_rts_is_found_after(bed: Watched) -> None:
    early = Qp(bed.user)
    early.send(wr_id=1, doorbell=False)
    assert bed.look() == 1
    assert sent(bed, early) == []
    ready(early)
    bed.look()
    assert sent(bed, early) == [1]


def test_work_posted_in_error_is_flushed(bed: Watched, qp: Qp) -> None:
    qp.to_error()
    qp.send(wr_id=1, doorbell=False)
    qp.post_recv(wr_id=2, doorbell=False)
    bed.look()
    assert [(wc.wr_id, wc.status) for wc in qp.send_cq.poll()] == [
        (1, WcStatus.WR_FLUSH_ERR),
        (2, WcStatus.WR_FLUSH_ERR),
    ]


def test_after_reset_the_rings_work_again(bed: Watched, qp: Qp) -> None:
    qp.send(wr_id=1, doorbell=False)
    bed.look()
    qp.to_reset()
    ready(qp)
    qp.send(wr_id=2, doorbell=False)
    bed.look()
    assert sent(bed, qp)[-1] == 2


def test_indices_that_lie_do_not_spin(bed: Watched, qp: Qp) -> None:
    qp.sq.prod_tail = 0xFFFF_FFFF
    # Once for its entry, once more after the queue pair went to ERR, whose queues are to be flushed.
    assert [bed.look() for _ in range(3)] == [1, 1, 0]
    assert sent(bed, qp) == []


def test_an_srq_is_watched(bed: Watched) -> None:
    srq = Srq(bed.user)
    srq.queue.put([], 1, None)
    bed.look()
    assert bed.backend.srqs[-1].doorbells == 1
    srq.destroy()
    assert not bed.watch.words


def test_tokens_of_rings_that_are_gone_mean_nothing(bed: Watched, qp: Qp) -> None:
    qp.send(doorbell=False)
    fired = bed.watch.fired()
    qp.destroy()
    bed.device.rings_fired([*fired, 999])
    bed.device.progress(INLINE_BUDGET)
    assert not bed.watch.words


@pytest.mark.parametrize("how", ["destroy", "exit", "reset"])
def test_nothing_is_watched_that_is_gone(bed: Watched, qp: Qp, how: str) -> None:
    Srq(bed.user)
    assert len(bed.watch.words) == 3
    if how == "destroy":
        bed.user.pd.destroy()
    elif how == "exit":
        bed.user.exit()
    else:
        bed.driver.remove()
    assert not bed.watch.words


def test_a_create_that_fails_is_not_watched(bed: Watched, qp: Qp) -> None:
    before = len(bed.watch.words)
    bed.backend.fail_next["create_qp"] = 12
    with pytest.raises(Exception, match="ERR 12"):
        Qp(bed.user)
    assert len(bed.watch.words) == before


def test_watching_follows_memory(bed: Watched, qp: Qp) -> None:
    """No word of unmapped memory is read, and none is forgotten when it returns."""
    qp.send(wr_id=1, doorbell=False)
    bed.machine.unmap_ram()
    assert not bed.watch.words
    qp.send(wr_id=2, doorbell=False)
    assert bed.look() == 0
    bed.machine.map_ram()
    bed.look()
    assert sent(bed, qp) == [1, 2]
    bed.machine.unmap_ram()
    bed.driver.write_reg(Reg.CTL, DeviceCtl.RESET)
    bed.machine.map_ram()
    assert not bed.watch.words


# --- moderation ----------------------------------------------------------------------------------------------------


def complete(bed: Watched, qp: Qp, times: int = 1) -> None:
    for _ in range(times):
        qp.send(doorbell=False)
        bed.look()


def test_a_completion_that_lies_there_is_announced_once(bed: Watched, qp: Qp) -> None:
    complete(bed, qp)
    assert bed.device.wants_moderation
    assert qp.send_cq.notified() == 0
    bed.device.moderate()
    assert qp.send_cq.notified() == 1
    assert not bed.device.wants_moderation
    complete(bed, qp, 3)
    bed.device.moderate()
    assert qp.send_cq.notified() == 0  # the first notification is outstanding


def test_a_program_that_leaves_all_is_told_again_later_and_later(bed: Watched, qp: Qp) -> None:
    """It may have armed and gone to sleep without a poll, as UCX does; an HCA would notify at the arm."""
    complete(bed, qp)
    bed.device.moderate()
    assert qp.send_cq.notified() == 1
    assert bed.device.wants_repeat
    now_ns = 0
    waits: list[int] = []
    for _ in range(5):
        due_ns = bed.device.repeat(now_ns)
        assert due_ns is not None
        assert not bed.device.wants_repeat
        assert bed.device.repeat(due_ns - 1) == due_ns
        assert qp.send_cq.notified() == 0
        waits.append(due_ns - now_ns)
        now_ns = due_ns
        bed.device.repeat(now_ns)
        assert qp.send_cq.notified() == 1
    assert waits[0] >= REPEAT_NS
    assert all(later >= 2 * sooner - REPEAT_NS for sooner, later in pairwise(waits))
    assert len(qp.send_cq.poll()) == 1
    while (due_ns := bed.device.repeat(now_ns)) is not None:
        now_ns = due_ns
    assert qp.send_cq.notified() == 0


def test_a_program_that_takes_one_with_each_event_is_told_of_the_next(bed: Watched, qp: Qp) -> None:
    """As perftest does; two came before it took its first event."""
    complete(bed, qp)
    bed.device.moderate()
    complete(bed, qp)
    bed.device.moderate()
    now_ns = 0
    for left in (1, 0):
        assert qp.send_cq.notified() == 1
        assert len(qp.send_cq.poll(1)) == 1
        start_ns = now_ns
        for _ in range(2 * left):
            due_ns = bed.device.repeat(now_ns)
            assert due_ns is not None
            assert due_ns - now_ns >= REPEAT_NS
            assert qp.send_cq.notified() == 0
            now_ns = due_ns
            bed.device.repeat(now_ns)
        assert now_ns - start_ns <= 4 * REPEAT_NS
    while (due_ns := bed.device.repeat(now_ns)) is not None:
        now_ns = due_ns
    assert qp.send_cq.notified() == 0


def test_told_again_and_something_new_is_one_notification(bed: Watched, qp: Qp) -> None:
    for _ in range(2):
        complete(bed, qp)
        bed.device.moderate()
    assert qp.send_cq.notified() == 1
    assert len(qp.send_cq.poll(1)) == 1
    now_ns: int | None = 0
    while not (told := qp.send_cq.notified()):
        assert now_ns is not None
        now_ns = bed.device.repeat(now_ns)
    assert told == 1
    complete(bed, qp)
    bed.device.moderate()
    assert qp.send_cq.notified() == 0


@pytest.mark.parametrize("arm", [UAR_CQ_ARM, UAR_CQ_ARM_SOL])
def test_a_process_that_arms_what_is_not_empty_is_told_later(arm: int) -> None:
    """With trapped doorbells. A kernel looks again after it has armed, and is not."""
    bed = Watched(mapped=False)
    for ctx, times in ((bed.user, 1), (bed.kernel, 0)):
        qp = ready(Qp(ctx))
        qp.send()
        qp.send_cq.ring_doorbell(arm)
        now_ns: int | None = 0
        while now_ns is not None:
            now_ns = bed.device.repeat(now_ns)
        assert qp.send_cq.notified() == times


def test_a_process_that_consumes_after_its_arm_is_not_told() -> None:
    bed = Watched(mapped=False)
    qp = ready(Qp(bed.user))
    qp.send()
    qp.send_cq.arm()
    assert len(qp.send_cq.poll()) == 1
    now_ns: int | None = 0
    while now_ns is not None:
        now_ns = bed.device.repeat(now_ns)
    assert qp.send_cq.notified() == 0


def test_telling_again_waits_for_memory(bed: Watched, qp: Qp) -> None:
    complete(bed, qp)
    bed.device.moderate()
    assert qp.send_cq.notified() == 1
    due_ns = bed.device.repeat(0)
    assert due_ns is not None
    bed.machine.unmap_ram()
    due_ns = bed.device.repeat(due_ns)
    bed.machine.map_ram()
    assert due_ns is not None
    bed.device.repeat(due_ns)
    assert qp.send_cq.notified() == 1


@pytest.mark.parametrize("how", ["destroy", "reset"])
def test_nobody_is_told_again_of_what_is_gone(bed: Watched, qp: Qp, how: str) -> None:
    complete(bed, qp)
    bed.device.moderate()
    due_ns = bed.device.repeat(0)
    assert due_ns is not None
    if how == "destroy":
        qp.destroy()
        qp.send_cq.destroy()
        bed.driver.take_notifications()
    else:
        bed.driver.remove()
        bed.machine.take_interrupts()
    bed.device.repeat(due_ns)
    assert bed.machine.take_interrupts() == set()


def test_after_consuming_the_next_one_is_announced(bed: Watched, qp: Qp) -> None:
    for _ in range(5):
        complete(bed, qp)
        bed.device.moderate()
        assert qp.send_cq.notified() == 1
        assert len(qp.send_cq.poll()) == 1


def test_a_polling_program_is_left_alone(bed: Watched, qp: Qp) -> None:
    for _ in range(50):
        complete(bed, qp)
        assert len(qp.send_cq.poll()) == 1
        bed.device.moderate()
    assert qp.send_cq.notified() == 0


def test_a_program_that_stops_polling_is_told(bed: Watched, qp: Qp) -> None:
    complete(bed, qp, 3)
    qp.send_cq.poll(1)
    bed.device.moderate()
    assert qp.send_cq.notified() == 0  # it consumes: look again later
    assert bed.device.wants_moderation
    bed.device.moderate()
    assert qp.send_cq.notified() == 1


@pytest.mark.parametrize("cqe", [1, 2, 4])
def test_indices_that_come_round_do_not_hide_progress(bed: Watched, cqe: int) -> None:
    qp = ready(Qp(bed.user, send_cq=bed.user.cq(cqe)))
    complete(bed, qp)
    bed.device.moderate()
    assert qp.send_cq.notified() == 1
    for _ in range(2 * cqe - 1):
        assert len(qp.send_cq.poll()) == 1
        complete(bed, qp)
    assert len(qp.send_cq.poll()) == 1
    complete(bed, qp)
    bed.device.moderate()
    bed.device.moderate()
    assert qp.send_cq.notified() == 1


def test_moderation_waits_for_memory(bed: Watched, qp: Qp) -> None:
    """A look at memory that is away must not lose the notification."""
    complete(bed, qp)
    bed.machine.unmap_ram()
    bed.device.moderate()
    bed.machine.map_ram()
    bed.device.moderate()
    assert qp.send_cq.notified() == 1


def test_a_cq_that_is_gone_is_not_announced(bed: Watched, qp: Qp) -> None:
    complete(bed, qp)
    pages = [bed.machine.ram.read(page, 4096) for page in qp.send_cq.pages.pages]
    qp.destroy()
    qp.send_cq.destroy()
    for page, old in zip(qp.send_cq.pages.pages, pages, strict=True):
        bed.machine.ram.write(page, old)  # what was freed may look like a CQ for long
    bed.device.moderate()
    assert bed.driver.take_notifications() == []
    assert not bed.device.wants_moderation


def test_the_kernels_cqs_are_armed_as_ever(bed: Watched) -> None:
    kernel_qp = ready(Qp(bed.kernel))
    kernel_qp.send_cq.arm()
    kernel_qp.send()
    assert kernel_qp.send_cq.notified() == 1
    assert not bed.device.wants_moderation


def test_reset_forgets_moderation(bed: Watched, qp: Qp) -> None:
    complete(bed, qp)
    bed.driver.remove()
    assert not bed.device.wants_moderation
    bed.device.moderate()
    assert bed.machine.take_interrupts() == set()


def test_memory_of_a_cq_whose_indices_lie(bed: Watched, qp: Qp) -> None:
    complete(bed, qp)
    qp.send_cq.ring.cons_head = 0xFFFF_FFFF
    bed.device.moderate()
    bed.device.moderate()
    assert not bed.device.wants_moderation
    assert qp.query().qp_state == QpState.RTS

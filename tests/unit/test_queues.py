"""Doorbells, who may ring them, and memory that moves, with a backend that does what the test says."""

import gc
from collections.abc import Callable

import pytest
from guest import (
    PAGE,
    Cq,
    Driver,
    Kernel,
    Machine,
    Nothing,
    Qp,
    QueueFull,
    Srq,
    UserProcess,
)
from unit.bed import GID, Bed, backend_of, ready, shared_cq
from unit.fake_backend import FakeBackend

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import QpState, SendFlags
from pvrdma_server.abi.vmw_pvrdma_abi import WcOpcode, WcStatus, WrOpcode
from pvrdma_server.backend import Completion
from pvrdma_server.errors import BadWqe

# --- sending -------------------------------------------------------------------------------------------------------


def test_a_doorbell_drains_the_whole_ring(bed: Bed, qp: Qp) -> None:
    for number in range(16):
        qp.send(wr_id=number, doorbell=False)
    with pytest.raises(QueueFull):
        qp.send()
    assert backend_of(bed, qp).sent == []
    qp.ring_send()
    assert [wr.wr_id for wr in backend_of(bed, qp).sent] == list(range(16))
    assert [wc.wr_id for wc in qp.send_cq.wait(16)] == list(range(16))


def test_work_without_a_doorbell_is_picked_up_with_the_next(bed: Bed, qp: Qp) -> None:
    """A batch that fails half-way in the kernel driver leaves earlier entries without one."""
    qp.send(wr_id=1, doorbell=False)
    qp.send(wr_id=2)
    assert [wc.wr_id for wc in qp.send_cq.wait(2)] == [1, 2]


def test_looking_at_rings_finds_work_without_a_doorbell(bed: Bed, qp: Qp) -> None:
    qp.send(wr_id=1, doorbell=False)
    bed.machine.device.look_at_rings()
    assert qp.send_cq.wait_one().wr_id == 1


def test_only_signalled_requests_complete(bed: Bed, qp: Qp) -> None:
    for number in range(8):
        qp.send(wr_id=number, flags=SendFlags.SIGNALED if number % 4 == 3 else 0)
    assert [wc.wr_id for wc in qp.send_cq.poll()] == [3, 7]


def test_sig_all_completes_everything(bed: Bed, user: UserProcess, qp: Qp) -> None:
    other = ready(Qp(user, sq_sig_all=True))
    other.send(wr_id=1, flags=0)
    assert other.send_cq.wait_one().wr_id == 1


def test_nothing_is_sent_before_rts(bed: Bed, user: UserProcess) -> None:
    early = Qp(user)
    early.send(wr_id=1)
    early.to_init()
    early.ring_send()
    assert backend_of(bed, early).sent == []
    assert early.send_cq.poll() == []


@pytest.mark.parametrize("num_sge", [5, 0xFFFF_FFFF])
@pytest.mark.parametrize("opcode", [WrOpcode.SEND, WrOpcode.FAST_REG_MR, WrOpcode.LOCAL_INV])
def test_a_bad_entry_completes_with_its_status_and_flushes_the_rest(
    bed: Bed, qp: Qp, num_sge: int, opcode: int
) -> None:
    """CVE-2018-20124 through the ring; a user's FAST_REG_MR too."""
    qp.post_recv(wr_id=90)
    qp.send(wr_id=1, doorbell=False)
    header = abi.SQ_WQE_HDR.pack(abi.SqWqeHdr(2, num_sge, 0, opcode, 0, bytes(4)))
    qp.post_raw(header, doorbell=False)
    qp.send(wr_id=3)
    got = [(wc.wr_id, wc.status) for wc in qp.send_cq.wait(4)]
    flushed = WcStatus.WR_FLUSH_ERR
    assert got[:2] == [(1, WcStatus.SUCCESS), (2, WcStatus.LOC_QP_OP_ERR)]
    assert sorted(got[2:]) == [(3, flushed), (90, flushed)]
    assert qp.query().qp_state == QpState.ERR
    assert bed.machine.device.counters.guest_errors[BadWqe.kind] == 1


@pytest.mark.parametrize("num_sge", [5, 0xFFFF_FFFF])
def test_cve_2018_20124_a_bad_receive_comes_with_its_status(
    bed: Bed, qp: Qp, user: UserProcess, num_sge: int
) -> None:
    srq = Srq(user)
    other = ready(Qp(user, srq=srq))
    qp.post_recv(wr_id=1, num_sge=num_sge)
    srq.post_recv(wr_id=2, num_sge=num_sge)
    for wr_id, owner in ((1, qp), (2, other)):
        wr = backend_of(bed, owner).arrive()
        assert wr is not None
        assert (wr.wr_id, wr.refused, wr.sges) == (wr_id, WcStatus.LOC_QP_OP_ERR, ())


@pytest.mark.parametrize("max_sge", [1, 2, 4])
def test_receives_taken_at_once_are_those_taken_one_by_one(
    bed: Bed, user: UserProcess, max_sge: int
) -> None:
    """Twice round the ring, of every number of elements, one too many included."""
    one, other = (Qp(user, max_wr=8, max_sge=max_sge) for _ in range(2))
    by_one, at_once = (
        bed.machine.device.resources.qps.get_untrusted(qp.handle) for qp in (one, other)
    )
    wr_id = 0
    for count in (5, 8, 3, 1, 7):
        for _ in range(count):
            num_sge = wr_id % (max_sge + 2)
            sges = [abi.Sge(wr_id << 12 | n, wr_id, n) for n in range(min(num_sge, max_sge))]
            for qp in (one, other):
                qp.post_recv(*sges, wr_id=wr_id, num_sge=num_sge, doorbell=False)
            wr_id += 1
        expected = [by_one.pop_recv() for _ in range(count)]
        found = at_once.pop_recvs(2)
        assert len(found) <= 2
        while wrs := at_once.pop_recvs(8):
            found += wrs
        assert found == expected
        assert by_one.pop_recv() is None


@pytest.mark.parametrize("indices", [(0xFFFF_FFFF, 0), (0, 0xFFFF_FFFF), (32, 0), (17, 0), (5, 6)])
def test_indices_that_lie_stop_their_queue_pair_only(
    bed: Bed, qp: Qp, user: UserProcess, indices: tuple[int, int]
) -> None:
    """CVE-2018-20216 through a queue pair."""
    other = ready(Qp(user))
    qp.sq.prod_tail, qp.sq.cons_head = indices
    before = bed.machine.errors()
    qp.ring_send()
    assert bed.machine.errors() > before
    assert (qp.sq.prod_tail, qp.sq.cons_head) == indices
    assert qp.query().qp_state == QpState.ERR
    assert bed.driver.take_events() == [api.Eqe(EqeType.QP_FATAL, qp.handle)]
    qp.ring_send()
    assert bed.driver.take_events() == []
    other.send(wr_id=1)
    assert other.send_cq.wait_one().wr_id == 1
    qp.to_reset()
    ready(qp)
    qp.send(wr_id=2)
    assert qp.send_cq.wait_one().wr_id == 2


def test_a_receive_queue_whose_indices_lie_stops_its_queue_pair(bed: Bed, qp: Qp) -> None:
    qp.rq.ring.prod_tail = 0xFFFF_FFFF
    assert backend_of(bed, qp).arrive() is None
    bed.machine.device.progress(1)
    assert qp.query().qp_state == QpState.ERR
    assert bed.driver.take_events() == [api.Eqe(EqeType.QP_FATAL, qp.handle)]


def test_a_shared_receive_queue_whose_indices_lie_says_so_once(bed: Bed, user: UserProcess) -> None:
    bed.kernel.add_gid(GID)
    srq = Srq(user)
    qp = ready(Qp(user, srq=srq))
    srq.queue.ring.prod_tail = 0xFFFF_FFFF
    for _ in range(2):
        assert backend_of(bed, qp).arrive() is None
        bed.machine.device.progress(1)
    assert bed.driver.take_events() == [api.Eqe(EqeType.SRQ_ERR, srq.handle)]


# --- destroyed and reset -------------------------------------------------------------------------------------------


def test_no_completion_for_a_queue_pair_that_is_gone(bed: Bed, user: UserProcess, qp: Qp) -> None:
    cq = shared_cq(user)
    doomed, other = ready(Qp(user, send_cq=cq)), ready(Qp(user, send_cq=cq))
    fake = backend_of(bed, doomed)
    fake.answer = False
    doomed.send(wr_id=1)
    doomed.destroy()
    fake.complete(fake.sent[0], WcStatus.SUCCESS)  # a backend that breaks its word
    other.send(wr_id=2)
    assert [wc.wr_id for wc in cq.wait(1)] == [2]
    assert cq.poll() == []


def test_reset_forgets_the_rings(bed: Bed, qp: Qp) -> None:
    qp.send(wr_id=1)
    qp.post_recv(wr_id=2)
    qp.to_reset()
    assert qp.send_cq.poll() == []
    ready(qp)
    qp.send(wr_id=3)
    assert qp.send_cq.wait_one().wr_id == 3


def test_error_flushes_both_queues(bed: Bed, qp: Qp) -> None:
    qp.post_recv(wr_id=1)
    qp.to_error()
    qp.send(wr_id=2)
    qp.post_recv(wr_id=3)
    got = [(wc.wr_id, wc.status) for wc in qp.send_cq.wait(3)]
    assert got == [(n, WcStatus.WR_FLUSH_ERR) for n in (1, 2, 3)]


# --- doorbell ownership --------------------------------------------------------------------------------------------


def test_a_process_rings_its_own_objects_only(bed: Bed, user: UserProcess, qp: Qp) -> None:
    thief, kernel_qp, srq = UserProcess(bed.driver), Qp(bed.kernel), Srq(user)
    ready(kernel_qp)
    qp.send(wr_id=1, doorbell=False)
    kernel_qp.send(wr_id=2, doorbell=False)
    attempts: list[tuple[int, int, int]] = [
        (page, offset, handle)
        for page, victims in ((thief.uar_page, (qp, kernel_qp)), (0, (qp,)), (7, (qp, kernel_qp)))
        for victim in victims
        for offset, handle in (
            (abi.UAR_QP_OFFSET, victim.handle | abi.UAR_QP_SEND | abi.UAR_QP_RECV),
            (abi.UAR_CQ_OFFSET, victim.send_cq.handle | abi.UAR_CQ_ARM),
            (abi.UAR_CQ_OFFSET, victim.send_cq.handle | abi.UAR_CQ_POLL),
        )
    ]
    attempts.append((thief.uar_page, abi.UAR_SRQ_OFFSET, srq.handle | abi.UAR_SRQ_RECV))
    rung = [fake.recv_doorbells for fake in bed.backend.qps.values()]
    for page, offset, value in attempts:
        before, progressed = bed.machine.errors(), bed.backend.progress_calls
        bed.driver.ring_uar(page, offset, value)
        assert bed.machine.errors() == before + 1
        assert bed.backend.progress_calls == progressed
    assert [fake.recv_doorbells for fake in bed.backend.qps.values()] == rung
    assert bed.backend.srqs[-1].doorbells == 0
    assert backend_of(bed, qp).sent == []
    qp.ring_send()
    assert qp.send_cq.notified() == 0  # the thief armed nothing
    assert len(backend_of(bed, qp).sent) == 1


@pytest.mark.parametrize("offset", [0, 4, 8, 12, 16, PAGE - 4])
def test_handles_nobody_has(bed: Bed, user: UserProcess, offset: int) -> None:
    for value in (0xFFFF_FFFF, 0x00FF_FFFF, 0x4000_3333):
        before = bed.machine.errors()
        user.ring_uar(offset, value)
        assert bed.machine.errors() == before + 1


def test_a_poll_doorbell_lets_the_backend_work(bed: Bed, user: UserProcess) -> None:
    cq = user.cq()
    before = bed.backend.progress_calls
    assert cq.poll() == []
    assert bed.backend.progress_calls == before + 1
    assert bed.machine.device.counters.polls == 1


# --- memory that moves ---------------------------------------------------------------------------------------------


def test_work_waits_for_memory_and_goes_on(bed: Bed, qp: Qp) -> None:
    qp.send(wr_id=1, doorbell=False)
    bed.machine.unmap_ram()
    qp.ring_send()
    assert backend_of(bed, qp).sent == []
    bed.machine.map_ram()
    assert qp.send_cq.wait_one().wr_id == 1


def test_completions_wait_for_memory_and_notify_then(bed: Bed, qp: Qp) -> None:
    fake = backend_of(bed, qp)
    fake.answer = False
    for number in range(3):
        qp.send(wr_id=number)
    qp.send_cq.arm()
    bed.machine.unmap_ram()
    for wr in fake.sent:
        fake.complete(wr, WcStatus.SUCCESS)
    bed.machine.device.async_event(EqeType.GID_CHANGE, 1)
    bed.machine.device.progress(1)
    assert bed.machine.take_interrupts() == set()
    bed.machine.map_ram()
    assert qp.send_cq.notified() == 1
    assert [wc.wr_id for wc in qp.send_cq.wait(3)] == [0, 1, 2]
    assert bed.driver.take_events() == [api.Eqe(EqeType.GID_CHANGE, 1)]


def test_a_backlog_is_no_larger_than_its_cq(bed: Bed, user: UserProcess, qp: Qp) -> None:
    other = ready(Qp(user, send_cq=user.cq(2)))
    fake = backend_of(bed, other)
    fake.answer = False
    other.send()
    cq = bed.machine.device.resources.cqs.get_untrusted(other.send_cq.handle)
    bed.machine.unmap_ram()
    for number in range(100):
        fake.complete(fake.sent[0], WcStatus.SUCCESS)
        assert len(cq.backlog) <= 2
        assert cq.failed == (number >= 2)
    bed.machine.map_ram()
    assert bed.driver.take_events() == [api.Eqe(EqeType.CQ_ERR, other.send_cq.handle)]


def test_many_completions_at_once_notify_once(bed: Bed, qp: Qp) -> None:
    owner = bed.machine.device.resources.qps.get_untrusted(qp.handle)
    qp.send_cq.arm()
    owner.complete_sends([(number, WcOpcode.SEND, 5) for number in range(3)])
    bed.machine.device.progress(1)
    assert qp.send_cq.notified() == 1
    assert [(wc.wr_id, wc.byte_len) for wc in qp.send_cq.wait(3)] == [(0, 5), (1, 5), (2, 5)]
    owner.complete_sends([(3, WcOpcode.SEND, 5)])
    bed.machine.device.progress(1)
    assert qp.send_cq.notified() == 0


def test_many_receives_complete_at_once(bed: Bed, qp: Qp) -> None:
    owner = bed.machine.device.resources.qps.get_untrusted(qp.handle)
    wcs = [
        Completion(number, WcStatus.SUCCESS, WcOpcode.RECV, 7, b"abcd", 3, wc_flags=2)
        for number in range(3)
    ]
    qp.recv_cq.arm(solicited=True)
    owner.complete_recvs(wcs)
    bed.machine.device.progress(1)
    assert qp.recv_cq.notified() == 1
    assert owner.receives == 3
    found = qp.recv_cq.wait(3)
    owner.complete_recv(wcs[0], solicited=True)
    assert found[0] == qp.recv_cq.wait_one()
    assert [wc.wr_id for wc in found] == [0, 1, 2]


def test_many_completions_at_once_wait_for_memory(bed: Bed, qp: Qp) -> None:
    owner = bed.machine.device.resources.qps.get_untrusted(qp.handle)
    qp.send_cq.arm()
    bed.machine.unmap_ram()
    owner.complete_sends([(number, WcOpcode.SEND, 0) for number in range(3)])
    owner.complete_sends([(3, WcOpcode.SEND, 0)])
    bed.machine.map_ram()
    assert qp.send_cq.notified() == 1
    assert [wc.wr_id for wc in qp.send_cq.wait(4)] == [0, 1, 2, 3]


def test_more_completions_at_once_than_there_is_room(bed: Bed, user: UserProcess, qp: Qp) -> None:
    other = ready(Qp(user, send_cq=user.cq(2)))
    owner = bed.machine.device.resources.qps.get_untrusted(other.handle)
    owner.complete_sends([(number, WcOpcode.SEND, 0) for number in range(5)])
    bed.machine.device.progress(1)
    assert [wc.wr_id for wc in other.send_cq.wait(2)] == [0, 1]
    assert bed.driver.take_events()[0] == api.Eqe(EqeType.CQ_ERR, other.send_cq.handle)
    owner.complete_sends([(9, WcOpcode.SEND, 0)])
    assert other.send_cq.poll() == []


def test_no_completions_at_once_for_a_queue_pair_that_is_gone(
    bed: Bed, user: UserProcess, qp: Qp
) -> None:
    owner = bed.machine.device.resources.qps.get_untrusted(qp.handle)
    cq = qp.send_cq
    qp.destroy()
    owner.complete_sends([(1, WcOpcode.SEND, 0)])
    assert cq.poll() == []


def test_forty_moves_of_memory(bed: Bed, qp: Qp) -> None:
    """As during a boot."""
    for number in range(40):
        bed.machine.unmap_ram()
        qp.sq.produce()
        qp.ring_send()
        bed.machine.map_ram()
        assert len(backend_of(bed, qp).sent) == number + 1
        assert qp.query().qp_state == QpState.RTS


def test_work_in_memory_that_never_returns(bed: Bed, qp: Qp) -> None:
    bed.machine.unmap_ram()
    for act in (qp.ring_send, qp.ring_recv, lambda: qp.send_cq.ring_doorbell(abi.UAR_CQ_ARM)):
        act()
    bed.machine.device.look_at_rings()
    bed.driver.write_reg(api.Reg.CTL, api.DeviceCtl.RESET)
    assert not any(bed.machine.counts().values())
    gc.collect()
    bed.machine.map_ram()


@pytest.mark.parametrize("driver_side", [Kernel, UserProcess])
def test_a_cq_is_stuck_on_a_handle_it_does_not_know(
    driver_side: Callable[[Driver], Kernel | UserProcess],
) -> None:
    """What the rule about destroyed queue pairs protects: the fake drivers are as unforgiving as the real ones."""
    machine = Machine(FakeBackend())
    cq: Cq = driver_side(machine.boot()).cq()
    stray = abi.CQE.pack(abi.CQE.unpack_from(bytes(64))._replace(qp=7))
    cq.pages.write(PAGE, stray)
    cq.ring.produce()
    assert cq.poll() == []
    with pytest.raises(Nothing):
        cq.wait_one()

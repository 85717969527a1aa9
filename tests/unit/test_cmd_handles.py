"""Handles, what a destroy takes with it, and that failing commands keep nothing."""

import errno
import gc
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from guest import (
    PAGE,
    CommandFailed,
    Cq,
    Pd,
    Qp,
    Srq,
    UserProcess,
    create_qp,
    nothing_left,
)
from unit.bed import GID, NOBODY, Bed, cq_request, mr_request, shared_cq, srq_request
from unit.fake_backend import LIMITS

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import Cmd
from pvrdma_server.abi.pvrdma_verbs import QpState, QpType

# --- handles (1.11) ------------------------------------------------------------------------------------------------

MAKERS: dict[str, tuple[Callable[[UserProcess], Any], int]] = {
    "pds": (Pd, LIMITS.max_pd),
    "cqs": (lambda user: Cq(user, 1), LIMITS.max_cq),
    "srqs": (lambda user: Srq(user, max_wr=1), LIMITS.max_srq),
    "qps": (lambda user: Qp(user, send_cq=shared_cq(user), max_wr=1), LIMITS.max_qp),
}


def fill(make: Callable[[UserProcess], Any], user: UserProcess) -> Iterator[Any]:
    """Objects until the device has no more."""
    while True:
        try:
            yield make(user)
        except CommandFailed as e:
            if e.err != errno.ENOMEM:
                raise
            return


@pytest.mark.parametrize("kind", MAKERS)
def test_handles_are_dense_bounded_and_reused_late(bed: Bed, user: UserProcess, kind: str) -> None:
    make, limit = MAKERS[kind]
    shared_cq(user)
    bed.backend.add_qpns(100)
    made = list(fill(make, user))
    handles = [thing.handle for thing in made]
    assert handles == list(range(handles[0], handles[0] + len(handles)))
    assert handles[-1] == limit - 1 + (kind == "pds")
    assert max(handles) <= 0xFFFF
    if kind == "qps":
        assert 0 not in handles
    # Free two: they come back in the order in which they were freed.
    for thing in (made[5], made[2]):
        thing.destroy()
    assert [make(user).handle for _ in range(2)] == [made[5].handle, made[2].handle]


def test_as_many_as_advertised(bed: Bed) -> None:
    """Queue pairs with the kernel's QP1 among them; protection domains with the kernel's own."""
    Qp(bed.kernel, QpType.GSI)
    user = UserProcess(bed.driver)
    shared_cq(user)
    for make, _ in MAKERS.values():
        list(fill(make, user))
    counts, caps = bed.machine.counts(), bed.driver.caps
    assert (counts["qps"], counts["pds"]) == (caps.max_qp, caps.max_pd)
    assert (counts["cqs"], counts["srqs"]) == (caps.max_cq, caps.max_srq)


def test_a_freed_handle_rests_while_there_are_others(user: UserProcess) -> None:
    cq = user.cq()
    cq.destroy()
    assert user.cq().handle != cq.handle


@pytest.mark.parametrize("version", [17, 18, 19])
def test_handles_before_version_20_are_qpns(version: int) -> None:
    bed = Bed(version)
    user = UserProcess(bed.driver)
    gsi = Qp(bed.kernel, QpType.GSI)
    assert gsi.handle == gsi.qpn == 1
    for _ in range(3 * LIMITS.max_qp):
        qp = Qp(user, send_cq=shared_cq(user), max_wr=1)
        assert 1 < qp.handle == qp.qpn < bed.driver.caps.max_qp
        qp.destroy()


def test_a_qpn_that_is_no_handle_before_version_20() -> None:
    bed = Bed(19)
    bed.backend.add_qpns(1)
    user = UserProcess(bed.driver)
    made = list(fill(lambda u: Qp(u, send_cq=shared_cq(u), max_wr=1), user))
    assert max(qp.handle for qp in made) < bed.driver.caps.max_qp
    assert bed.backend.alive["qp"] == len(made) == bed.machine.counts()["qps"]


def test_create_and_destroy_before_version_20_keeps_nothing() -> None:
    bed = Bed(19)
    user = UserProcess(bed.driver)
    for _ in range(200):
        Qp(user, send_cq=shared_cq(user), max_wr=1).destroy()
    assert len(bed.machine.device.resources.qps._free) <= LIMITS.max_qp


def test_regions_until_the_device_is_full(bed: Bed, user: UserProcess) -> None:
    """The kernel does not count regions against max_mr: the device must fail cleanly."""
    made = list(fill(lambda u: u.mr(PAGE), user))
    assert len(made) == LIMITS.max_mr - 1  # one is the kernel's DMA region
    user.pd.dereg(made[0].handle)
    assert user.mr(PAGE).handle == made[0].handle


# --- destroy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cmd", "handle"),
    [
        (Cmd.DESTROY_PD, 0),
        (Cmd.DESTROY_PD, NOBODY),
        (Cmd.DESTROY_MR, 0),
        (Cmd.DESTROY_MR, NOBODY),
        (Cmd.DESTROY_CQ, 0),
        (Cmd.DESTROY_CQ, 0xFFFF_FFFF),
        (Cmd.DESTROY_UC, 0),
        (Cmd.DESTROY_UC, NOBODY),
        (Cmd.DESTROY_SRQ, 0),
    ],
)
def test_destroying_what_is_not_there(bed: Bed, cmd: int, handle: int) -> None:
    bed.refuse_bytes(errno.ENOENT, cmd, struct.pack("<I", handle))


def test_destroying_twice(bed: Bed, user: UserProcess) -> None:
    cq = user.cq()
    cq.destroy()
    bed.refused(errno.ENOENT, cq.destroy)


def populate(user: UserProcess) -> tuple[Qp, Srq]:
    user.mr(PAGE)
    srq = Srq(user)
    Qp(user, send_cq=shared_cq(user), srq=srq)
    return Qp(user), srq


def test_a_cq_takes_its_qps_with_it(bed: Bed, user: UserProcess) -> None:
    """The driver ignores the answer and frees the pages: what stays would write into somebody else's."""
    populate(user)
    shared_cq(user).destroy()
    assert bed.machine.counts()["qps"] == 1
    assert bed.backend.alive["qp"] == 1


def test_an_srq_takes_its_qps_with_it(bed: Bed, user: UserProcess) -> None:
    _, srq = populate(user)
    srq.destroy()
    assert bed.machine.counts()["qps"] == 1
    assert bed.backend.alive["srq"] == 0


def test_a_pd_takes_all_that_is_in_it(bed: Bed, user: UserProcess) -> None:
    populate(user)
    other = Pd(user)
    other.reg_mr(PAGE)
    user.pd.destroy()
    counts = bed.machine.counts()
    assert (counts["qps"], counts["srqs"]) == (0, 0)
    assert counts["mrs"] == 2  # the other PD's and the kernel's


def test_a_process_leaves_nothing(bed: Bed, user: UserProcess) -> None:
    before = bed.machine.counts()
    survivor = Qp(bed.kernel)
    other = UserProcess(bed.driver)
    populate(other)
    other.exit()
    after = bed.machine.counts()
    assert after == {**before, "qps": before["qps"] + 1, "cqs": before["cqs"] + 1}
    assert survivor.query().qp_state == QpState.RESET


def test_reset_leaves_nothing(bed: Bed, user: UserProcess) -> None:
    populate(user)
    Qp(bed.kernel, QpType.GSI)
    bed.kernel.add_gid(GID)
    bed.driver.remove()
    assert nothing_left(bed.machine.counts())
    assert not +bed.backend.alive
    assert not bed.backend.gids


# --- CVE-2018-20126: nothing leaks on error paths ------------------------------------------------------------------

FAILURES = 12_500  # of each of the eight: 100 000


def test_cve_2018_20126_failed_creates_keep_memory_flat(bed: Bed, user: UserProcess) -> None:
    base = Qp(user)
    requests = [
        (Cmd.CREATE_CQ, api.CMD_CREATE_CQ.pack(cq_request(bed, nchunks=2))),
        (Cmd.CREATE_CQ, api.CMD_CREATE_CQ.pack(cq_request(bed, cqe=256, nchunks=5))),
        (Cmd.CREATE_QP, api.CMD_CREATE_QP.pack(base.request._replace(max_send_sge=9))),
        (Cmd.CREATE_QP, api.CMD_CREATE_QP.pack(base.request._replace(pdir_dma=1 << 50))),
        (Cmd.CREATE_MR, api.CMD_CREATE_MR.pack(mr_request(user, nchunks=2))),
        (Cmd.CREATE_MR, api.CMD_CREATE_MR.pack(mr_request(user, pdir_dma=1 << 50))),
        (Cmd.CREATE_PD, struct.pack("<16xI", NOBODY)),
        (Cmd.CREATE_UC, struct.pack("<16xQ", 5)),
    ]
    slots = [api.CMD_HDR.pack(api.CmdHdr(0, cmd)) + body[16:] for cmd, body in requests]

    def fail(times: int) -> None:
        for slot in slots:
            bed.ram.write(bed.driver.cmd_slot, slot)
            for _ in range(times):
                bed.machine.device.write_register(api.Reg.REQUEST, 0)
                assert bed.machine.device.read_register(api.Reg.ERR)

    fail(100)
    before = bed.machine.counts()
    gc.collect()
    tracemalloc.start()
    fail(20)
    gc.collect()
    first = tracemalloc.get_traced_memory()[0]
    fail(100)
    gc.collect()
    second = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert second - first < 16 * 1024
    fail(FAILURES - 220)
    assert bed.machine.counts() == before


def test_failures_late_in_a_create_keep_nothing(bed: Bed, user: UserProcess) -> None:
    """The backend fails after the rings have been mapped."""
    base = Qp(user)
    memory = bed.machine.device.memory
    for verb, act in (
        ("create_qp", lambda: create_qp(user, base.request)),
        ("create_srq", lambda: bed.driver.post(
            Cmd.CREATE_SRQ, api.CMD_CREATE_SRQ, srq_request(user), wait=True)),
        ("reg_mr", lambda: user.pd.create_mr(mr_request(user))),
        ("create_pd", lambda: Pd(user)),
    ):  # fmt: skip
        users = len(memory._users)
        for _ in range(50):
            bed.backend.fail_next[verb] = errno.ENOMEM
            bed.refused(errno.ENOMEM, act)
        gc.collect()
        assert len(memory._users) == users, verb


@pytest.mark.parametrize("kind", MAKERS)
def test_failures_give_their_handles_back(bed: Bed, user: UserProcess, kind: str) -> None:
    make, limit = MAKERS[kind]
    shared_cq(user)
    for _ in range(2 * limit):
        request = {
            "pds": (Cmd.CREATE_PD, struct.pack("<I", user.handle)),
            "cqs": (Cmd.CREATE_CQ, api.CMD_CREATE_CQ.pack(cq_request(bed, pdir_dma=0))[16:]),
            "srqs": (
                Cmd.CREATE_SRQ,
                api.CMD_CREATE_SRQ.pack(srq_request(user)._replace(pdir_dma=0))[16:],
            ),
            "qps": (Cmd.CREATE_QP, bytes(64)),
        }[kind]
        bed.backend.fail_next["create_pd"] = errno.ENOMEM
        with pytest.raises(CommandFailed):
            bed.driver.post_bytes(
                api.CMD_HDR.pack(api.CmdHdr(0, request[0])) + request[1], ack=None
            )
    bed.backend.fail_next.clear()
    assert make(user).handle is not None

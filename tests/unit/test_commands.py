"""The command slot; ports, GIDs, contexts, PDs and regions: success, every refusal's errno, nothing leaked."""

import errno
import struct
from collections.abc import Callable

import pytest
from guest import (
    PAGE,
    PageDir,
    Pd,
    Qp,
    Srq,
    UserProcess,
)
from unit.bed import GID, NOBODY, OTHER_GID, Bed, mr_request
from unit.fake_backend import PORT

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import Cmd, MrFlags
from pvrdma_server.abi.pvrdma_verbs import AccessFlags, PortCapFlags

# --- protocol ------------------------------------------------------------------------------------------------------

WAITED_FOR = {0, 1, 2, 4, 6, 9, 10, 11, 13, 17, 19}


def test_vector_0_for_commands_that_wait_and_for_no_other(bed: Bed) -> None:
    user = UserProcess(bed.driver)
    qp, srq, mr = Qp(user), Srq(user), user.mr(PAGE)
    bed.kernel.add_gid(GID)
    steps: list[tuple[int, Callable[[], object]]] = [
        (Cmd.QUERY_QP, qp.query),
        (Cmd.MODIFY_QP, qp.to_init),
        (Cmd.MODIFY_SRQ, lambda: srq.arm_limit(1)),
        (Cmd.QUERY_SRQ, srq.query),
        (Cmd.DESTROY_QP, qp.destroy),
        (Cmd.DESTROY_SRQ, srq.destroy),
        (Cmd.DESTROY_MR, lambda: user.pd.dereg(mr.handle)),
        (Cmd.DESTROY_CQ, qp.send_cq.destroy),
        (Cmd.DESTROY_PD, user.pd.destroy),
        (Cmd.DESTROY_UC, user.exit),
        (Cmd.DESTROY_BIND, lambda: bed.kernel.del_gid(0)),
    ]
    for number, act in steps:
        bed.driver.interrupt()
        bed.driver.interrupts.clear()
        act()
        bed.driver.interrupt()
        assert (0 in bed.driver.interrupts) == (number in WAITED_FOR), Cmd(number).name


def test_the_response_echoes_the_key_and_acknowledges(bed: Bed) -> None:
    request = api.CMD_HDR.pack(api.CmdHdr(0x1122_3344_5566_7788, Cmd.QUERY_PKEY)) + b"\1\0"
    raw = bed.driver.post_bytes(request, ack=0x8000_0001)
    assert raw[:24].hex(" ", 4) == "88776655 44332211 01000080 00000000 ffff0000 00000000"


def test_a_refusal_leaves_the_old_response_alone(bed: Bed) -> None:
    bed.ram.write(bed.driver.resp_slot, b"\x5a" * PAGE)
    bed.refuse_bytes(errno.EINVAL, Cmd.QUERY_PORT, b"\2")
    assert bed.ram.read(bed.driver.resp_slot, PAGE) == b"\x5a" * PAGE


def test_success_after_a_refusal_clears_err(bed: Bed) -> None:
    bed.refuse_bytes(errno.EINVAL, Cmd.QUERY_PORT, b"\2")
    Pd(bed.kernel).destroy()
    assert bed.driver.read_reg(api.Reg.ERR) == 0


@pytest.mark.parametrize("cmd", [Cmd.RESIZE_CQ, 21, 255, 0x8000_0000, 0xFFFF_FFFF])
def test_unknown_commands(bed: Bed, cmd: int) -> None:
    bed.refuse_bytes(errno.EOPNOTSUPP, cmd)


def test_a_nonzero_request_executes_nothing(bed: Bed) -> None:
    bed.driver.write_reg(api.Reg.REQUEST, 1)
    assert bed.driver.read_reg(api.Reg.ERR) == errno.EINVAL


# --- ports, keys, GIDs ---------------------------------------------------------------------------------------------


def test_query_port(bed: Bed) -> None:
    request = api.CmdQueryPort(1)
    answer = bed.driver.call(
        Cmd.QUERY_PORT, api.CMD_QUERY_PORT, request, api.CMD_QUERY_PORT_RESP
    ).attrs
    assert answer.gid_tbl_len == bed.driver.caps.gid_tbl_len <= 256
    assert answer.pkey_tbl_len == 1
    assert answer.port_cap_flags & PortCapFlags.IP_BASED_GIDS
    assert answer == PORT._replace(
        gid_tbl_len=answer.gid_tbl_len, pkey_tbl_len=1, port_cap_flags=answer.port_cap_flags
    )


@pytest.mark.parametrize("port", [0, 2, 255])
def test_there_is_one_port(bed: Bed, port: int) -> None:
    bed.refuse_bytes(errno.EINVAL, Cmd.QUERY_PORT, bytes([port]))
    bed.refuse_bytes(errno.EINVAL, Cmd.QUERY_PKEY, bytes([port, 0]))


@pytest.mark.parametrize("index", [1, 255])
def test_there_is_one_pkey(bed: Bed, index: int) -> None:
    bed.refuse_bytes(errno.EINVAL, Cmd.QUERY_PKEY, bytes([1, index]))


def test_a_backend_that_fails_is_heard_in_err(bed: Bed) -> None:
    bed.backend.fail_next["query_port"] = errno.ENODEV
    bed.refuse_bytes(errno.ENODEV, Cmd.QUERY_PORT, b"\1")


@pytest.mark.parametrize(("version", "kind"), [(17, 1), (18, 2), (19, 2), (20, 2)])
def test_bind_and_unbind(version: int, kind: int) -> None:
    bed = Bed(version)
    bed.kernel.add_gid(GID, 3, gid_type=0 if version == 17 else kind)
    assert bed.backend.gids == {3: (GID, kind)}
    bed.kernel.add_gid(OTHER_GID, 3, gid_type=kind)
    assert bed.backend.gids == {3: (OTHER_GID, kind)}
    bed.kernel.del_gid(3)
    assert bed.backend.gids == {}
    assert bed.machine.counts()["gids"] == 0


@pytest.mark.parametrize("index", [16, 17, 255, 256, 0xFFFF_FFFF])
def test_gid_indices_are_bounded(bed: Bed, index: int) -> None:
    bed.refused(errno.EINVAL, lambda: bed.kernel.add_gid(GID, index))


@pytest.mark.parametrize("kind", [0, 1, 3, 4, 255])
def test_gids_of_another_type(bed: Bed, kind: int) -> None:
    bed.refused(errno.EINVAL, lambda: bed.kernel.add_gid(GID, 0, kind))


def test_a_gid_that_somebody_else_has(bed: Bed) -> None:
    bed.backend.fail_next["add_gid"] = errno.EADDRINUSE
    bed.refused(errno.EADDRINUSE, lambda: bed.kernel.add_gid(GID))


def test_unbinding_what_is_not_bound(bed: Bed) -> None:
    bed.kernel.add_gid(GID, 1)
    for index, gid in ((0, GID), (1, OTHER_GID), (0xFFFF_FFFF, GID)):
        bed.kernel.gids[index] = gid
        bed.refused(errno.ENOENT, lambda at=index: bed.kernel.del_gid(at))  # type: ignore[misc]
    assert bed.backend.gids == {1: (GID, 2)}


# --- contexts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [17, 18, 19, 20])
def test_contexts_are_never_the_kernel(version: int) -> None:
    bed = Bed(version)
    users = [UserProcess(bed.driver) for _ in range(7)]
    assert [u.handle for u in users] == list(range(1, 8))
    assert bed.machine.counts()["contexts"] == 7


@pytest.mark.parametrize("page", [0, -1, 8, 9, 1 << 20, 1 << 40])
def test_pages_that_are_no_process_page(bed: Bed, page: int) -> None:
    body = struct.pack("<Q", (bed.driver.uar_pfn + page) & 0xFFFF_FFFF_FFFF_FFFF)
    bed.refuse_bytes(errno.EINVAL, Cmd.CREATE_UC, body)


def test_a_doorbell_page_has_one_owner(bed: Bed, user: UserProcess) -> None:
    body = struct.pack("<Q", bed.driver.uar_pfn + user.uar_page)
    bed.refuse_bytes(errno.EBUSY, Cmd.CREATE_UC, body)
    user.exit()
    assert UserProcess(bed.driver).uar_page == user.uar_page


def test_an_old_driver_sends_32_bits_of_page_frame() -> None:
    """What follows them in the slot is padding; whatever is in it must not count."""
    bed = Bed(18)
    body = struct.pack("<II", (bed.driver.uar_pfn + 1) & 0xFFFF_FFFF, 0xDEAD_BEEF)
    head = api.CMD_HDR.pack(api.CmdHdr(0, Cmd.CREATE_UC))
    assert bed.driver.post_bytes(head + body, ack=0x8000_000D)[16:20] == b"\1\0\0\0"


# --- PDs and regions -----------------------------------------------------------------------------------------------


def test_pds_know_who_is_privileged(bed: Bed, user: UserProcess) -> None:
    Pd(bed.kernel)
    assert bed.backend.pds[-1].privileged
    Pd(user)
    assert not bed.backend.pds[-1].privileged


def test_a_pd_for_nobody(bed: Bed) -> None:
    bed.refuse_bytes(errno.ENOENT, Cmd.CREATE_PD, struct.pack("<I", NOBODY))


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (0, PAGE), (1, PAGE), (PAGE - 1, 2), (100, 3 * PAGE + 7), (5, 1)]
)
def test_a_region_at_any_alignment(user: UserProcess, offset: int, length: int) -> None:
    mr = user.mr(length, offset=offset)
    backend = user.driver.bus.device.backend  # type: ignore[attr-defined]
    made = backend.mrs[-1]
    assert (made.kind, made.start, made.length) == ("user", mr.addr, length)
    assert made.pages.page_addresses == mr.pages.pages
    assert (mr.lkey, mr.rkey) == (made.lkey, made.rkey)


def test_the_request_that_the_refusals_change_is_good(user: UserProcess) -> None:
    assert user.pd.create_mr(mr_request(user)).mr_handle


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # CVE-2021-3582: the length and the number of pages disagree, both ways.
        ({"nchunks": 2}, errno.EINVAL),
        ({"nchunks": 4}, errno.EINVAL),
        ({"nchunks": 0}, errno.EINVAL),
        ({"nchunks": 0xFFFF_FFFF}, errno.EINVAL),
        ({"length": 2 * PAGE + 0x801}, errno.EINVAL),
        ({"length": PAGE}, errno.EINVAL),
        ({"length": 0}, errno.EINVAL),
        ({"length": 0, "nchunks": 0}, errno.EINVAL),
        ({"length": (1 << 30) + 1, "nchunks": 262145}, errno.EINVAL),
        ({"length": 0xFFFF_FFFF_FFFF_FFFF}, errno.EINVAL),
        ({"length": 0xFFFF_FFFF_FFFF_F000, "nchunks": 0xFFFF_FFFF}, errno.EINVAL),
        ({"start": 0xFFFF_FFFF_FFFF_F000}, errno.EINVAL),
        ({"start": 0xFFFF_FFFF_FFFF_F800, "length": 0x1801, "nchunks": 2}, errno.EINVAL),
        ({"pdir_dma": 0}, errno.EFAULT),
        ({"pdir_dma": 0x123}, errno.EFAULT),
        ({"pdir_dma": 1 << 50}, errno.EFAULT),
        ({"pd_handle": 0}, errno.ENOENT),
        ({"pd_handle": NOBODY}, errno.ENOENT),
        ({"access_flags": AccessFlags.ZERO_BASED | 1}, errno.EINVAL),  # not at a page
        ({"access_flags": AccessFlags.ON_DEMAND | 1}, errno.EOPNOTSUPP),
        ({"access_flags": 0x8000_0001}, errno.EOPNOTSUPP),
        ({"access_flags": AccessFlags.REMOTE_WRITE}, errno.EINVAL),
        ({"access_flags": AccessFlags.REMOTE_ATOMIC}, errno.EINVAL),
        ({"flags": 3}, errno.EINVAL),
        ({"flags": 4}, errno.EINVAL),
        ({"flags": 0xFFFF_FFFF}, errno.EINVAL),
        ({"flags": MrFlags.DMA}, errno.EPERM),
        ({"flags": MrFlags.DMA, "access_flags": 1}, errno.EPERM),
        ({"flags": MrFlags.FRMR, "nchunks": 1}, errno.EPERM),
    ],
    ids=str,
)
def test_cve_2021_3582_regions_that_lie(
    bed: Bed, user: UserProcess, change: dict[str, int], expected: int
) -> None:
    request = mr_request(user, **change)
    bed.refused(expected, lambda: user.pd.create_mr(request))


@pytest.mark.parametrize("flags", [0x3FF0_0000, 0x80, AccessFlags.MW_BIND])
def test_access_bits_that_are_no_rights(bed: Bed, user: UserProcess, flags: int) -> None:
    assert user.pd.create_mr(mr_request(user, access_flags=flags | 1)).mr_handle
    assert bed.backend.mrs[-1].access == 1


def test_a_zero_based_region_starts_at_zero(bed: Bed, user: UserProcess) -> None:
    start = 0x7F00_0000_0000
    flags = AccessFlags.ZERO_BASED | AccessFlags.LOCAL_WRITE
    user.pd.create_mr(mr_request(user, start=start, length=3 * PAGE, access_flags=flags))
    assert (bed.backend.mrs[-1].start, bed.backend.mrs[-1].access) == (0, 1)


def test_a_region_with_a_page_that_is_nowhere(bed: Bed, user: UserProcess) -> None:
    pages = PageDir.alloc(bed.ram, 3)
    pages.set_entry(1, 1 << 45)
    request = mr_request(user, pdir_dma=pages.dir_dma)
    bed.refused(errno.EFAULT, lambda: user.pd.create_mr(request))


def test_kernel_regions(bed: Bed) -> None:
    assert bed.backend.mrs[-1].kind == "dma"
    frmr = bed.kernel.pd.alloc_frmr(16)
    made = bed.backend.mrs[-1]
    assert (made.kind, made.max_pages, made.rkey) == ("frmr", 16, frmr.rkey)


@pytest.mark.parametrize("npages", [0, 65, 0xFFFF_FFFF])
def test_fast_registration_lengths(bed: Bed, npages: int) -> None:
    request = api.CmdCreateMr(0, 0, 0, bed.kernel.pd.handle, 0, MrFlags.FRMR, npages)
    bed.refused(errno.EINVAL, lambda: bed.kernel.pd.create_mr(request))


@pytest.mark.parametrize("access", [2 | 1, 4, 8 | 1])
def test_no_remote_access_through_a_dma_region(bed: Bed, access: int) -> None:
    request = api.CmdCreateMr(0, 0, 0, bed.kernel.pd.handle, access, MrFlags.DMA, 0)
    bed.refused(errno.EPERM, lambda: bed.kernel.pd.create_mr(request))

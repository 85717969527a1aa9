"""Two machines again: the kernel's fast registration, whose keys open what, and trouble on the way."""

import pytest
from guest import (
    PAGE,
    Frmr,
    Pd,
    Qp,
    Remote,
    UserProcess,
    connect,
)
from unit.vms import Ends, Pair, pattern, rc

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import EqeType
from pvrdma_server.abi.pvrdma_verbs import AccessFlags, QpState
from pvrdma_server.abi.pvrdma_verbs import QpAttrMask as M
from pvrdma_server.abi.vmw_pvrdma_abi import WcFlags, WcOpcode, WcStatus, WrOpcode

# --- the kernel's own ----------------------------------------------------------------------------------------------


def registered(qp: Qp, frmr: Frmr, *, access: int) -> None:
    qp.reg_mr(frmr, access, wr_id=100)
    wc = qp.send_cq.wait_one()
    assert (wc.wr_id, wc.status, wc.opcode) == (100, 0, WcOpcode.FAST_REG_MR)


def test_fast_registration_and_invalidation(pair: Pair) -> None:
    """As NVMe-oF and NFS do: register, let the peer in, invalidate, register anew under another key."""
    ends = rc(pair, in_kernel=True)
    frmr = pair.b.kernel.pd.alloc_frmr(16)
    pages = pair.b.driver.ram.alloc(3)
    frmr.map_pages(pages, offset=100)
    access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
    for round_ in range(3):
        frmr.update_key()
        registered(ends.b, frmr, access=access)
        out = pair.a.kernel.buffer(3 * PAGE)
        out.write(pattern(2 * PAGE, round_))
        ends.a.write(out.sge(0, 2 * PAGE), to=frmr.remote(50))
        assert ends.a.send_cq.wait_one().status == 0
        data = b"".join(pair.b.driver.ram.read(page, PAGE) for page in pages)
        assert data[150 : 150 + 2 * PAGE] == pattern(2 * PAGE, round_)
        ends.b.invalidate(WrOpcode.LOCAL_INV, frmr.rkey, wr_id=101)
        wc = ends.b.send_cq.wait_one()
        assert (wc.status, wc.opcode) == (0, WcOpcode.LOCAL_INV)
    ends.a.write(out.sge(0, 8), to=frmr.remote())
    assert ends.a.send_cq.wait_one().status == WcStatus.REM_ACCESS_ERR


def test_send_with_invalidate(pair: Pair) -> None:
    ends = rc(pair, in_kernel=True)
    frmr = pair.a.kernel.pd.alloc_frmr(4)
    frmr.map_pages(pair.a.driver.ram.alloc(1))
    registered(ends.a, frmr, access=AccessFlags.REMOTE_READ)
    into = pair.a.kernel.buffer(PAGE)
    ends.a.post_recv(into.sge())
    ends.b.invalidate(WrOpcode.SEND_WITH_INV, frmr.rkey, pair.b.kernel.buffer(8).sge())
    got = ends.a.recv_cq.wait_one()
    assert (got.status, got.byte_len) == (0, 8)
    assert got.wc_flags == WcFlags.WITH_INVALIDATE
    assert int.from_bytes(got.imm_data, "little") == frmr.rkey
    ends.b.read(pair.b.kernel.buffer(8).sge(), frm=frmr.remote())
    assert ends.b.send_cq.wait(2)[-1].status == WcStatus.REM_ACCESS_ERR


def test_a_page_list_with_a_page_that_is_nowhere(pair: Pair) -> None:
    ends = rc(pair, in_kernel=True)
    frmr = pair.a.kernel.pd.alloc_frmr(4)
    frmr.map_pages([*pair.a.driver.ram.alloc(1), 1 << 45])
    ends.a.reg_mr(frmr, AccessFlags.LOCAL_WRITE)
    assert ends.a.send_cq.wait_one().status != WcStatus.SUCCESS


# --- isolation -----------------------------------------------------------------------------------------------------


def test_keys_of_another_pd_are_no_keys(pair: Pair) -> None:
    """Local ones of the same process, remote ones of another process of the same machine, and the kernel's."""
    ends = rc(pair)
    foreign = Pd(ends.a.ctx).reg_mr(PAGE)
    ends.a.send(foreign.sge(0, 8), wr_id=1)
    assert ends.a.send_cq.wait_one().status == WcStatus.LOC_PROT_ERR
    for remote in (
        pair.b.process().mr(PAGE).remote(),
        Remote(pair.b.kernel.buffer(PAGE).addr, pair.b.kernel.dma.rkey),
        Remote(0x1000, 0xFFFF_FFFF),
    ):
        fresh = rc(pair)
        source = fresh.a.pd.reg_mr(PAGE)
        fresh.a.write(source.sge(0, 8), to=remote)
        assert fresh.a.send_cq.wait_one().status == WcStatus.REM_ACCESS_ERR


def test_the_dma_key_is_the_kernels(pair: Pair) -> None:
    """A process that guesses it gets nowhere: not as a local key, not as a remote one."""
    ends = rc(pair)
    secret = pair.a.kernel.buffer(PAGE)
    secret.write(b"secret")
    ends.a.send(secret.sge(0, 6))
    assert ends.a.send_cq.wait_one().status == WcStatus.LOC_PROT_ERR


@pytest.mark.parametrize(
    ("access", "opcode"),
    [
        (AccessFlags.LOCAL_WRITE, "write"),
        (AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ, "write"),
        (AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE, "read"),
        (AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ, "atomic"),
    ],
)
def test_access_rights(pair: Pair, access: int, opcode: str) -> None:
    ends = rc(pair)
    local, remote = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE, access)
    if opcode == "write":
        ends.a.write(local.sge(0, 8), to=remote.remote())
    elif opcode == "read":
        ends.a.read(local.sge(0, 8), frm=remote.remote())
    else:
        ends.a.fetch_add(local.sge(0, 8), remote.remote(), 1)
    assert ends.a.send_cq.wait_one().status == WcStatus.REM_ACCESS_ERR
    assert ends.a.query().qp_state == QpState.ERR
    assert remote.read(0, 8) == bytes(8)


@pytest.mark.parametrize(("at", "length"), [(PAGE, 1), (PAGE - 1, 2), (-1, 1), (0, PAGE + 1)])
def test_bounds_of_a_region(pair: Pair, at: int, length: int) -> None:
    ends = rc(pair)
    local, remote = ends.a.pd.reg_mr(2 * PAGE), ends.b.pd.reg_mr(PAGE)
    ends.a.write(local.sge(0, length), to=remote.remote(at))
    assert ends.a.send_cq.wait_one().status == WcStatus.REM_ACCESS_ERR


def test_a_region_that_is_gone(pair: Pair) -> None:
    ends = rc(pair)
    local, remote = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    ends.b.pd.dereg(remote.handle)
    ends.a.write(local.sge(0, 8), to=remote.remote())
    assert ends.a.send_cq.wait_one().status == WcStatus.REM_ACCESS_ERR


@pytest.mark.parametrize("opcode", [WrOpcode.LOCAL_INV, WrOpcode.SEND_WITH_INV])
def test_a_process_invalidates_nothing(pair: Pair, opcode: int) -> None:
    ends = rc(pair)
    mr = ends.a.pd.reg_mr(PAGE)
    ends.a.invalidate(opcode, mr.rkey)
    assert ends.a.send_cq.wait_one().status == WcStatus.LOC_QP_OP_ERR


# --- trouble -------------------------------------------------------------------------------------------------------


def test_flush(pair: Pair) -> None:
    ends = rc(pair)
    target = ends.b.pd.reg_mr(PAGE)
    for number in range(3):
        ends.b.post_recv(target.sge(), wr_id=number)
    ends.b.to_error()
    ends.b.send(target.sge(0, 1), wr_id=10)
    ends.b.post_recv(target.sge(), wr_id=3)
    got = ends.b.send_cq.wait(5)
    assert sorted(wc.wr_id for wc in got) == [0, 1, 2, 3, 10]
    assert {wc.status for wc in got} == {WcStatus.WR_FLUSH_ERR}


def test_a_message_that_is_too_long(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    ends.b.post_recv(target.sge(0, 8))
    ends.a.send(source.sge(0, 9))
    assert ends.b.recv_cq.wait_one().status == WcStatus.LOC_LEN_ERR
    assert ends.a.send_cq.wait_one().status == WcStatus.REM_INV_REQ_ERR


def test_no_receive_posted_ends_after_the_retries(pair: Pair) -> None:
    ends = Ends(*(Qp(vm.process()) for vm in pair))
    connect(ends.a, ends.b, pair.a.gid, pair.b.gid, rnr_retry=2)
    source = ends.a.pd.reg_mr(PAGE)
    ends.a.send(source.sge(0, 8))
    assert ends.a.send_cq.wait_one().status == WcStatus.RNR_RETRY_EXC_ERR


def test_a_late_receive_is_in_time(pair: Pair) -> None:
    """rnr_retry 7 is for ever."""
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    ends.a.send(source.sge(0, 8))
    for _ in range(20):
        pair.a.machine.wait()
    assert ends.a.send_cq.poll() == []
    ends.b.post_recv(target.sge())
    assert ends.b.recv_cq.wait_one().status == 0
    assert ends.a.send_cq.wait_one().status == 0


def test_a_peer_that_reset_is_missed(pair: Pair) -> None:
    ends = rc(pair)
    source = ends.a.pd.reg_mr(PAGE)
    pair.b.driver.write_reg(api.Reg.CTL, api.DeviceCtl.RESET)
    ends.a.send(source.sge(0, 8))
    assert ends.a.send_cq.wait_one().status == WcStatus.RETRY_EXC_ERR


def test_a_process_that_exits_in_the_middle(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(1 << 20), ends.b.pd.reg_mr(1 << 20)
    ends.a.write(source.sge(), to=target.remote())
    process = ends.b.ctx
    assert isinstance(process, UserProcess)
    process.exit()
    assert ends.a.send_cq.wait_one().status in (WcStatus.SUCCESS, WcStatus.RETRY_EXC_ERR)
    assert pair.b.machine.counts()["qps"] == 0


def test_memory_moves_under_a_transfer(pair: Pair) -> None:
    ends = rc(pair)
    source, target = ends.a.pd.reg_mr(1 << 20), ends.b.pd.reg_mr(1 << 20)
    source.write(pattern(1 << 20))
    for vm in pair:
        vm.machine.unmap_ram()
        vm.machine.map_ram()
    ends.a.write(source.sge(), to=target.remote())
    pair.b.machine.unmap_ram()
    pair.b.machine.map_ram()
    assert ends.a.send_cq.wait_one().status == 0
    assert target.read() == pattern(1 << 20)


def test_send_queue_drained(pair: Pair) -> None:
    ends = rc(pair)
    ends.a.modify(M.STATE | M.EN_SQD_ASYNC_NOTIFY, state=QpState.SQD, en_sqd_async_notify=1)
    pair.a.machine.wait()
    assert api.Eqe(EqeType.SQ_DRAINED, ends.a.handle) in pair.a.driver.take_events()
    ends.a.modify(M.STATE, state=QpState.RTS)
    source, target = ends.a.pd.reg_mr(PAGE), ends.b.pd.reg_mr(PAGE)
    ends.a.write(source.sge(0, 8), to=target.remote())
    assert ends.a.send_cq.wait_one().status == 0

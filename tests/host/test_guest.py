"""The real server on rxe, and a guest in Python over its real socket: every command, operation, event and error."""

import errno
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guest import RC_RTS, Ah, CommandFailed, Driver, Kernel, Qp, Srq, UserProcess, connect
from host_peer import v4_gid

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi.pvrdma_dev_api import Cmd, EqeType
from pvrdma_server.abi.pvrdma_verbs import AccessFlags, PortState, QpState, QpType
from pvrdma_server.abi.vmw_pvrdma_abi import WcOpcode, WcStatus

pytestmark = pytest.mark.host
OK = int(WcStatus.SUCCESS)
WAIT_S = 20.0


class Guest:
    """A guest with its driver loaded and one GID."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.bus = server.connect()
        self.driver: Driver = self.bus.boot()
        self.kernel = Kernel(self.driver)
        self.gid: bytes = server.gid
        self.kernel.add_gid(self.gid)

    def pair(self, process: UserProcess, **more: Any) -> tuple[Qp, Qp]:
        a, b = Qp(process, **more), Qp(process, **more)
        connect(a, b, self.gid, self.gid)
        return a, b

    def events(self, wanted: int) -> list[Any]:
        """Wait for an event of a kind; all that came."""
        seen: list[Any] = []
        deadline = time.monotonic() + WAIT_S
        while not any(event.type == wanted for event in seen):
            assert time.monotonic() < deadline, f"no event {wanted}: {seen}"
            self.bus.wait()
            seen += self.driver.take_events()
        return seen

    def close(self) -> None:
        self.bus.close()


@pytest.fixture
def guest(server: Any) -> Iterator[Guest]:
    made = Guest(server)
    yield made
    made.close()


def pattern(length: int, seed: int = 0) -> bytes:
    return bytes((index * 13 + seed) & 0xFF for index in range(length))


def test_port_and_pkey(guest: Guest) -> None:
    ask = api.CmdQueryPort(1)
    attrs = guest.driver.call(
        Cmd.QUERY_PORT, api.CMD_QUERY_PORT, ask, api.CMD_QUERY_PORT_RESP
    ).attrs
    assert attrs.state == PortState.ACTIVE
    assert attrs.active_mtu >= 3
    pkey = guest.driver.call(
        Cmd.QUERY_PKEY, api.CMD_QUERY_PKEY, api.CmdQueryPkey(1, 0), api.CMD_QUERY_PKEY_RESP
    )
    assert pkey.pkey == 0xFFFF
    assert guest.driver.caps.bmme_flags == 0
    assert guest.driver.caps.max_mr_size == 1 << 30


def test_gid_is_an_address_of_the_netdev_while_the_guest_has_it(guest: Guest) -> None:
    def addresses() -> str:
        return subprocess.run(
            ["ip", "address", "show", "d0"], capture_output=True, text=True, check=True
        ).stdout

    assert guest.server.address in addresses()
    guest.kernel.add_gid(v4_gid("10.9.0.140"), 1)
    guest.kernel.add_gid(bytes.fromhex("fe800000000000005254000000770001"), 2)
    assert "10.9.0.140" in addresses()
    assert "fe80::5254:0:77:1" in addresses()
    guest.kernel.del_gid(1)
    guest.kernel.del_gid(2)
    assert "10.9.0.140" not in addresses()
    assert "fe80::5254:0:77:1" not in addresses()


@pytest.mark.parametrize("length", [1, 4096, 70_001])
def test_rc_operations(guest: Guest, length: int) -> None:
    process = UserProcess(guest.driver)
    a, b = guest.pair(process)
    source, target = process.mr(length, offset=100), process.mr(length, offset=7)
    source.write(pattern(length))

    a.write(source.sge(), to=target.remote(), wr_id=1)
    assert (wc := a.send_cq.wait_one()).status == OK
    assert (wc.opcode, wc.wr_id) == (WcOpcode.RDMA_WRITE, 1)
    assert target.read() == pattern(length)

    source.write(bytes(length))
    a.read(source.sge(), frm=target.remote(), wr_id=2)
    assert (wc := a.send_cq.wait_one()).status == OK
    assert (wc.opcode, wc.wr_id) == (WcOpcode.RDMA_READ, 2)
    assert source.read() == pattern(length)

    target.write(bytes(length))
    b.post_recv(target.sge(), wr_id=3)
    a.send(source.sge(), wr_id=4, imm=b"\x01\x02\x03\x04")
    assert a.send_cq.wait_one().status == OK
    wc = b.recv_cq.wait_one()
    assert (wc.status, wc.wr_id, wc.byte_len) == (OK, 3, length)
    assert wc.imm_data == b"\x01\x02\x03\x04"
    assert target.read() == pattern(length)

    b.post_recv(wr_id=5)
    a.write(source.sge(), to=target.remote(), wr_id=6, imm=b"\x0a\x0b\x0c\x0d")
    assert a.send_cq.wait_one().status == OK
    wc = b.recv_cq.wait_one()
    assert (wc.opcode, wc.wr_id) == (WcOpcode.RECV_RDMA_WITH_IMM, 5)
    assert (wc.byte_len, wc.imm_data) == (length, b"\x0a\x0b\x0c\x0d")


def test_atomics(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, _ = guest.pair(process)
    local, remote = process.mr(64), process.mr(64)
    remote.write64(40)
    a.fetch_add(local.sge(0, 8), remote.remote(), 2, wr_id=1)
    assert a.send_cq.wait_one().status == OK
    assert (local.read64(), remote.read64()) == (40, 42)
    a.cmp_swp(local.sge(0, 8), remote.remote(), 42, 7, wr_id=2)
    assert a.send_cq.wait_one().status == OK
    assert (local.read64(), remote.read64()) == (42, 7)


def test_a_thousand_requests_through_a_small_queue(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, _ = guest.pair(process, max_wr=16)
    source, target = process.mr(4096), process.mr(4096)
    source.write(pattern(4096))
    done = posted = 0
    while done < 1000:
        while posted < 1000 and posted - done < 16:
            a.write(source.sge(), to=target.remote(), wr_id=posted)
            posted += 1
        for wc in a.send_cq.wait(1) + a.send_cq.poll():
            assert (wc.status, wc.wr_id) == (OK, done)
            done += 1
    assert target.read() == pattern(4096)


def test_kernel_memory_by_bus_address(guest: Guest) -> None:
    a, b = Qp(guest.kernel), Qp(guest.kernel)
    connect(a, b, guest.gid, guest.gid)
    source, target = guest.kernel.buffer(9000), guest.kernel.buffer(9000)
    source.write(pattern(9000))
    b.post_recv(target.sge(), wr_id=1)
    a.send(source.sge(), wr_id=2)
    assert a.send_cq.wait_one().status == OK
    assert b.recv_cq.wait_one().status == OK
    assert target.read() == pattern(9000)


def test_srq(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    srq = Srq(process)
    buffers = [process.mr(256) for _ in range(6)]
    for number, buffer in enumerate(buffers):
        srq.post_recv(buffer.sge(), wr_id=number)
    senders = [Qp(process) for _ in range(2)]
    receivers = [Qp(process, srq=srq) for _ in range(2)]
    for sender, receiver in zip(senders, receivers, strict=True):
        connect(sender, receiver, guest.gid, guest.gid)
    source = process.mr(256)
    source.write(pattern(256))
    srq.arm_limit(4)
    taken = []
    for turn in range(4):
        senders[turn % 2].send(source.sge(), wr_id=turn)
        assert senders[turn % 2].send_cq.wait_one().status == OK
        wc = receivers[turn % 2].recv_cq.wait_one()
        assert wc.status == OK
        taken.append(wc.wr_id)
    assert sorted(taken) == [0, 1, 2, 3]
    assert buffers[taken[0]].read() == pattern(256)
    limit = [
        e for e in guest.events(EqeType.SRQ_LIMIT_REACHED) if e.type == EqeType.SRQ_LIMIT_REACHED
    ]
    assert [e.info for e in limit] == [srq.handle]


def test_datagrams(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, b = (Qp(process, QpType.UD).ready() for _ in range(2))
    source, target = process.mr(512), process.mr(40 + 512)
    source.write(pattern(512))
    b.post_recv(target.sge(), wr_id=1)
    a.send_to(Ah(guest.gid), b.qpn, source.sge(), wr_id=2)
    assert a.send_cq.wait_one().status == OK
    wc = b.recv_cq.wait_one()
    assert (wc.status, wc.byte_len, wc.src_qp) == (OK, 552, a.qpn)
    assert wc.wc_flags & 1, "GRH"
    assert target.read(40) == pattern(512)


def test_notification(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, b = guest.pair(process)
    mr = process.mr(64)
    b.post_recv(mr.sge(), wr_id=1)
    b.recv_cq.arm()
    a.send(mr.sge(), wr_id=2)
    b.recv_cq.wait_notified()
    assert b.recv_cq.wait_one().wr_id == 1


def test_wrong_remote_key(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, b = guest.pair(process)
    source, target = process.mr(64), process.mr(64)
    a.write(source.sge(), to=target.remote()._replace(rkey=target.rkey ^ 0x5500), wr_id=1, flags=0)
    wc = a.send_cq.wait_one()
    assert (wc.status, wc.wr_id) == (WcStatus.REM_ACCESS_ERR, 1)
    assert a.query().qp_state == QpState.ERR
    a.send(source.sge(), wr_id=2)
    assert a.send_cq.wait_one().status == WcStatus.WR_FLUSH_ERR
    b.to_error()


def test_region_without_remote_write(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, _ = guest.pair(process)
    source = process.mr(64)
    target = process.mr(64, AccessFlags.LOCAL_WRITE)
    a.write(source.sge(), to=target.remote(), wr_id=1)
    assert a.send_cq.wait_one().status == WcStatus.REM_ACCESS_ERR


def test_wrong_local_key(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, _ = guest.pair(process)
    source, target = process.mr(64), process.mr(64)
    a.write(source.sge()._replace(lkey=source.lkey ^ 0x5500), to=target.remote(), wr_id=1)
    assert a.send_cq.wait_one().status in (WcStatus.LOC_PROT_ERR, WcStatus.LOC_QP_OP_ERR)


def test_message_longer_than_the_receive(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, b = guest.pair(process)
    source, target = process.mr(4096), process.mr(64)
    b.post_recv(target.sge(), wr_id=1)
    a.send(source.sge(), wr_id=2)
    # rxe says "operational" on both sides, other devices "invalid request" and "length".
    assert a.send_cq.wait_one().status in (WcStatus.REM_INV_REQ_ERR, WcStatus.REM_OP_ERR)
    assert b.recv_cq.wait_one().status in (WcStatus.LOC_LEN_ERR, WcStatus.LOC_QP_OP_ERR)


def test_no_receive_posted(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, b = Qp(process), Qp(process)
    connect(a, b, guest.gid, guest.gid, rnr_retry=1)
    a.send(process.mr(64).sge(), wr_id=1)
    assert a.send_cq.wait_one().status == WcStatus.RNR_RETRY_EXC_ERR


def test_peer_that_is_gone(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, b = Qp(process), Qp(process)
    connect(a, b, guest.gid, guest.gid, retry_cnt=1, timeout=10)
    b.destroy()
    a.send(process.mr(64).sge(), wr_id=1)
    assert a.send_cq.wait_one().status == WcStatus.RETRY_EXC_ERR


def test_flush_of_both_queues(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    _, b = guest.pair(process)
    mr = process.mr(64)
    for number in range(16):
        b.post_recv(mr.sge(), wr_id=number)
    b.to_error()
    found = b.recv_cq.wait(16)
    assert [wc.wr_id for wc in found] == list(range(16))
    assert {wc.status for wc in found} == {int(WcStatus.WR_FLUSH_ERR)}


def test_reset_and_use_again(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, b = guest.pair(process)
    mr = process.mr(64)
    b.post_recv(mr.sge(), wr_id=1)
    for qp in (a, b):
        qp.to_reset()
    connect(a, b, guest.gid, guest.gid)
    b.post_recv(mr.sge(), wr_id=2)
    a.send(mr.sge(), wr_id=3)
    assert a.send_cq.wait_one().status == OK
    assert b.recv_cq.wait_one().wr_id == 2


def test_unknown_gid_is_refused(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    qp = Qp(process)
    qp.to_init()
    grh = {"sgid_index": 9}
    with pytest.raises(CommandFailed):
        _to_rtr_from(qp, guest.gid, grh)


def _to_rtr_from(qp: Qp, dgid: bytes, grh: dict[str, int]) -> None:
    from guest import NO_ATTR, RC_RTR

    route = NO_ATTR.ah_attr.grh._replace(dgid=dgid, hop_limit=64, **grh)
    ah = NO_ATTR.ah_attr._replace(grh=route, ah_flags=1, port_num=1)
    qp.modify(
        RC_RTR, state=QpState.RTR, path_mtu=3, dest_qp_num=1, rq_psn=0,
        max_dest_rd_atomic=4, min_rnr_timer=12, ah_attr=ah,
    )  # fmt: skip


def test_query_after_modify(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, b = guest.pair(process)
    attr = a.query()
    assert (attr.qp_state, attr.dest_qp_num, attr.sq_psn) == (QpState.RTS, b.qpn, 0x1234)
    with pytest.raises(CommandFailed):
        a.modify(RC_RTS, state=QpState.RTS, timeout=99)


def test_port_down_and_up(guest: Guest) -> None:
    def link(state: str) -> None:
        subprocess.run(["ip", "-n", "peer", "link", "set", "d1", state], check=True)

    guest.driver.take_events()
    try:
        link("down")
        assert guest.events(EqeType.PORT_ERR)[-1].info == 1
    finally:
        link("up")
    guest.events(EqeType.PORT_ACTIVE)


def test_memory_that_goes_and_comes_back(guest: Guest) -> None:
    process = UserProcess(guest.driver)
    a, _ = guest.pair(process)
    source, target = process.mr(8192), process.mr(8192)
    source.write(pattern(8192))
    guest.bus.unmap_ram()
    guest.bus.map_ram()
    a.write(source.sge(), to=target.remote(), wr_id=1)
    assert a.send_cq.wait_one().status == OK
    assert target.read() == pattern(8192)


def test_too_many_mappings_names_the_sysctl(guest: Guest) -> None:
    limit = Path("/proc/sys/vm/max_map_count")
    before = limit.read_text()
    maps = len(Path(f"/proc/{guest.server.pid}/maps").read_text().splitlines())
    process = UserProcess(guest.driver)
    try:
        limit.write_text(str(maps + 300))
        with pytest.raises(CommandFailed) as caught:
            process.mr(2000 * 4096)
    finally:
        limit.write_text(before)
    assert caught.value.err == errno.ENOMEM
    told = [record["error"] for record in guest.server.events("host_verb_failed")]
    assert any("vm.max_map_count" in error for error in told), told
    assert process.mr(2000 * 4096).length == 2000 * 4096


def test_guest_that_vanishes_leaves_nothing(server: Any) -> None:
    guest = Guest(server)
    process = UserProcess(guest.driver)
    guest.pair(process)
    process.mr(4096)
    guest.close()
    deadline = time.monotonic() + WAIT_S
    while any(server.status()["objects"].values()):
        assert time.monotonic() < deadline, server.status()
        time.sleep(0.05)
    left = subprocess.run(
        ["rdma", "resource", "show"], capture_output=True, text=True, check=True
    ).stdout
    rxe0 = next(line for line in left.splitlines() if "rxe0" in line)
    assert " qp 1 " in f"{rxe0} ", rxe0
    assert " mr 0 " in f"{rxe0} ", rxe0

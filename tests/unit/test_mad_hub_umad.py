"""umad: finding the port, registering, headers both ways, errors; over fake system calls and a fake /sys."""

import errno
import select
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.fake_mad_hub import Clock
from unit.fake_umad import FakeKernel, set_gid, sysfs
from unit.mads import GID_A, GID_B, GID_C, req

from pvrdma_server.abi.ib_user_mad import UserMadHdr
from pvrdma_server.host_gids import SCAN_INTERVAL_S, GidTable
from pvrdma_server.mad_frames import Datagram
from pvrdma_server.mad_hub.umad import SendBusy, Umad, UmadError


def text(gid: bytes) -> str:
    return gid.hex(":", 2)


GIDS = {
    0: ("fe80:0000:0000:0000:0202:03ff:fe04:0506", "IB/RoCE v1"),
    1: (text(GID_A), "IB/RoCE v1"),
    2: (text(GID_A), "RoCE v2"),
    5: (text(GID_C), "RoCE v2"),
}


@pytest.fixture
def kernel() -> Iterator[FakeKernel]:
    kernel = FakeKernel()
    yield kernel
    for fd in list(kernel.others):
        kernel.close(fd)


def umad(root: Path, kernel: FakeKernel, *, ibdev: str = "rxe0", ib_cm: bool = False) -> Umad:
    sysfs(root, GIDS, ib_cm=ib_cm)
    return Umad(ibdev, 1, kernel=kernel, sys_path=root)


def header(**changes: object) -> UserMadHdr:
    base = UserMadHdr(
        id=0,
        status=0,
        timeout_ms=0,
        retries=0,
        length=320,
        qpn=b"\0\0\0\1",
        qkey=bytes(4),
        lid=bytes(2),
        sl=1,
        path_bits=0,
        grh_present=1,
        gid_index=2,
        hop_limit=63,
        traffic_class=4,
        gid=GID_B,
        flow_label=b"\0\1\2\3",
        pkey_index=7,
    )
    return base._replace(**changes)  # type: ignore[arg-type]


def test_the_port_is_found_by_its_name(tmp_path: Path, kernel: FakeKernel) -> None:
    umad(tmp_path, kernel, ibdev="rxe1").open_receiver()
    assert kernel.opened == ["/dev/infiniband/umad4"]


def test_the_receiver_takes_the_cm_class_and_a_sender_takes_none(
    tmp_path: Path, kernel: FakeKernel
) -> None:
    port = umad(tmp_path, kernel)
    receiver, sender = port.open_receiver(), port.open_sender()
    assert kernel.with_pkey == {receiver.fd, sender.fd}
    assert receiver.fd != sender.fd
    taken = kernel.agents[receiver.fd, 0]
    assert (taken.mgmt_class, taken.mgmt_class_version, taken.qpn) == (7, 2, 1)
    assert taken.method_mask == (1 << 3).to_bytes(16, "little")
    assert kernel.agents[sender.fd, 0].mgmt_class == 0
    assert kernel.agents[sender.fd, 0].qpn == 1


def test_9_agent_id_0_is_unregistered(tmp_path: Path, kernel: FakeKernel) -> None:
    port = umad(tmp_path, kernel)
    agents = [port.open_receiver(), port.open_sender()]
    assert list(kernel.agents) == [(agent.fd, 0) for agent in agents]
    for agent in agents:
        agent.close()
    assert kernel.agents == {}
    assert kernel.others == {}


def test_a_datagram_going_out(tmp_path: Path, kernel: FakeKernel) -> None:
    sender = umad(tmp_path, kernel).open_sender()
    datagram = Datagram(
        GID_A,
        GID_B,
        req(1, GID_A, GID_B),
        flow_label=0x123,
        pkey_index=7,
        sl=2,
        traffic_class=3,
        hop_limit=4,
    )
    sender.send(2, datagram)
    sender.send(1, datagram)
    sender.send(2, datagram._replace(sgid=GID_C, payload=b"short"))
    (first, mad), (second, _), (third, short) = kernel.written
    assert (first.qpn, first.qkey) == (b"\0\0\0\1", bytes.fromhex("80010000"))
    assert (first.gid, first.gid_index, first.grh_present) == (GID_B, 2, 1)
    assert (first.flow_label, first.pkey_index) == (b"\0\0\1\x23", 7)
    assert (first.sl, first.traffic_class, first.hop_limit) == (2, 3, 4)
    assert (first.timeout_ms, first.retries) == (0, 0)
    assert mad == datagram.payload
    assert (second.gid_index, third.gid_index) == (1, 5)
    assert short == b"short" + bytes(251)


def test_a_gid_that_the_host_has_not_is_named(tmp_path: Path, kernel: FakeKernel) -> None:
    sender = umad(tmp_path, kernel).open_sender()
    with pytest.raises(UmadError, match=r"0a09:0002 \(RoCE v2\) is not in the host's table"):
        sender.send(2, Datagram(GID_B, GID_A, b""))
    assert kernel.written == []


def test_gids_move_and_come_and_go(tmp_path: Path) -> None:
    clock = Clock()
    sysfs(tmp_path, GIDS)
    table = GidTable(tmp_path / "class/infiniband/rxe0/ports/1", clock)
    assert table.index_of(GID_A, 2) == 2
    set_gid(tmp_path, 2, "")
    set_gid(tmp_path, 7, text(GID_A))
    assert table.index_of(GID_A, 2) is None  # too soon for another look at the whole table
    clock.now_s += SCAN_INTERVAL_S
    assert table.index_of(GID_A, 2) == 7
    assert table.index_of(GID_A, 1) == 1
    set_gid(tmp_path, 7, "")
    clock.now_s += SCAN_INTERVAL_S
    assert table.index_of(GID_A, 2) is None
    assert table.entry(7) is None
    assert table.entry(200) is None


def test_a_port_that_is_gone_has_no_gids(tmp_path: Path) -> None:
    table = GidTable(tmp_path / "nowhere", Clock())
    assert table.index_of(GID_A, 2) is None
    assert table.entry(0) is None


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EAGAIN])
def test_a_send_that_is_refused_for_now(tmp_path: Path, kernel: FakeKernel, error: int) -> None:
    sender = umad(tmp_path, kernel).open_sender()
    kernel.write_errors = [error]
    with pytest.raises(SendBusy):
        sender.send(2, Datagram(GID_A, GID_B, b""))
    sender.send(2, Datagram(GID_A, GID_B, b""))
    assert len(kernel.written) == 1


@pytest.mark.parametrize("error", [errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EIO, errno.ENOMEM])
def test_a_send_that_fails(tmp_path: Path, kernel: FakeKernel, error: int) -> None:
    sender = umad(tmp_path, kernel).open_sender()
    kernel.write_errors = [error]
    with pytest.raises(UmadError, match=r"umad to 0000:.*0a09:0002"):
        sender.send(2, Datagram(GID_A, GID_B, b""))


def test_a_datagram_coming_in(tmp_path: Path, kernel: FakeKernel) -> None:
    receiver = umad(tmp_path, kernel).open_receiver()
    assert receiver.receive() == []
    mad = req(1, GID_B, GID_A)
    kernel.inject(receiver.fd, header(), mad)
    kernel.inject(receiver.fd, header(gid_index=1), mad)
    kernel.inject(receiver.fd, header(gid_index=5, gid=GID_C), mad)
    first, second, third = receiver.receive()
    assert first == Datagram(
        GID_B,
        GID_A,
        mad,
        flow_label=0x10203,
        pkey_index=7,
        sl=1,
        traffic_class=4,
        hop_limit=63,
        network_type=1,
    )
    assert (second.dgid, second.network_type) == (GID_A, 0)
    assert (third.sgid, third.dgid, third.network_type) == (GID_C, GID_C, 2)


@pytest.mark.parametrize("changes", [{"gid_index": 6}, {"grh_present": 0}])
def test_where_the_kernel_does_not_tell_our_gid(
    tmp_path: Path, kernel: FakeKernel, changes: dict[str, int]
) -> None:
    receiver = umad(tmp_path, kernel).open_receiver()
    kernel.inject(receiver.fd, header(**changes), bytes(256))
    (datagram,) = receiver.receive()
    assert datagram.dgid == bytes(16)


def test_sends_reported_back_are_counted_and_no_datagrams(
    tmp_path: Path, kernel: FakeKernel
) -> None:
    receiver = umad(tmp_path, kernel).open_receiver()
    kernel.inject(receiver.fd, header(status=errno.ETIMEDOUT), bytes(24))
    assert receiver.receive() == []
    assert receiver.reports == 1
    assert select.select([receiver.fd], [], [], 0)[0] == []


@pytest.mark.parametrize("error", [errno.EIO, errno.ENODEV, errno.ENOSPC, errno.EINVAL])
def test_8_a_read_error_is_said_and_not_repeated(
    tmp_path: Path, kernel: FakeKernel, error: int
) -> None:
    receiver = umad(tmp_path, kernel).open_receiver()
    kernel.read_error = error
    with pytest.raises(UmadError, match="reading from umad failed"):
        receiver.receive()
    receiver.close()  # although the agent is gone with the device
    assert kernel.others == {}


def test_half_a_header_is_an_error(tmp_path: Path, kernel: FakeKernel) -> None:
    receiver = umad(tmp_path, kernel).open_receiver()
    kernel.others[receiver.fd].send(bytes(63))
    with pytest.raises(UmadError, match="63 bytes"):
        receiver.receive()


def test_ib_cm_is_named_with_its_users_and_the_choices(tmp_path: Path, kernel: FakeKernel) -> None:
    port = umad(tmp_path, kernel, ib_cm=True)
    with pytest.raises(UmadError) as raised:
        port.open_receiver()
    message = str(raised.value)
    for part in (
        "CM class of rxe0 port 1 is taken",
        "ib_cm has it (in use by ib_srpt, rdma_cm)",
        "modprobe -r",
        "load it again once the hub runs",
        "RDMA device of their own",
        "docs/mad-relay.md",
    ):
        assert part in message
    assert "\n" not in message
    # Not even asked for: the kernel would write a line to its log each time.
    assert kernel.opened == []
    assert port.open_sender()  # needs no class


def test_ib_cm_without_holders_is_named_all_the_same(tmp_path: Path, kernel: FakeKernel) -> None:
    port = umad(tmp_path, kernel, ib_cm=True)
    shutil.rmtree(tmp_path / "module")
    with pytest.raises(UmadError, match="in use by unknown modules"):
        port.open_receiver()


def test_ib_cm_on_other_devices_is_no_hindrance(tmp_path: Path, kernel: FakeKernel) -> None:
    port = umad(tmp_path, kernel)
    (tmp_path / "module/ib_cm/holders").mkdir(parents=True)
    assert port.open_receiver()


def test_another_hub_is_named(tmp_path: Path, kernel: FakeKernel) -> None:
    port = umad(tmp_path, kernel)
    kernel.class_taken = True
    with pytest.raises(UmadError, match="another hub, or rdmacm-mux"):
        port.open_receiver()
    assert kernel.others == {}


def test_what_is_missing_is_named(tmp_path: Path, kernel: FakeKernel) -> None:
    with pytest.raises(UmadError, match="load the module ib_umad"):
        Umad("rxe0", 1, kernel=kernel, sys_path=tmp_path / "empty").open_receiver()
    with pytest.raises(UmadError, match="no such RDMA device or port"):
        umad(tmp_path, kernel, ibdev="mlx5_0").open_receiver()
    kernel.open_error = errno.EACCES
    with pytest.raises(UmadError, match="Permission denied; the hub needs root"):
        Umad("rxe0", 1, kernel=kernel, sys_path=tmp_path).open_sender()

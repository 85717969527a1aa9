"""The device as PCI and the guest's kernel know it: removed, unbound, panicked, by kexec, with INTx, a second one."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pvrdma_lab import Guest, Lab, paths
from pvrdma_lab.guest import server_python
from pvrdma_lab.guest_image import find_guest
from pvrdma_lab.programs import pingpong, rping
from vm.server_state import assert_same, complaints, held, status, wait_until

from pvrdma_server.status import read_status

PROGRAMS = Path(__file__).parent / "programs"
DEVICE = "/sys/bus/pci/devices/0000:00:05.1"


def works(guest: Guest, options: str = "") -> None:
    pingpong(guest, guest, 4097, 20, options)


# --- one guest -----------------------------------------------------------------------------------------------------


def gids(guest: Guest) -> dict[int, str]:
    return {int(index): gid["gid"] for index, gid in status(guest)["gids"].items()}


def v4(last: int) -> str:
    return f"00000000000000000000ffff0a6300{last:02x}"


@pytest.mark.usefixtures("settled")
def test_gids_come_and_go_by_index(guest: Guest) -> None:
    before = gids(guest)
    guest.check("for i in 1 2 3; do ip address add 10.99.0.$i/32 dev eth0; done")
    added = gids(guest)
    new = [index for index in added if index not in before]
    assert [added[index] for index in new] == [v4(1), v4(2), v4(3)]
    guest.check("ip address del 10.99.0.2/32 dev eth0")
    assert gids(guest) == {index: gid for index, gid in added.items() if gid != v4(2)}
    guest.check("ip address add 10.99.0.4/32 dev eth0")
    assert gids(guest) == {**added, new[1]: v4(4)}
    assert {gid["type"] for gid in status(guest)["gids"].values()} == {2}
    guest.check("for i in 1 3 4; do ip address del 10.99.0.$i/32 dev eth0; done")
    assert gids(guest) == before


@pytest.mark.usefixtures("settled")
def test_removed_and_found_again(guest: Guest) -> None:
    before = held(guest)
    for _ in range(3):
        guest.check(f"echo 1 >{DEVICE}/remove")
        now = status(guest)
        assert not any(now["objects"].values())
        assert now["state"] == "reset"
        guest.check("echo 1 >/sys/bus/pci/rescan")
        wait_until(guest, "GIDs", lambda now: now["objects"] == before.objects)
    works(guest)
    rping(guest, guest, 100, 3)


@pytest.mark.usefixtures("settled")
def test_unbound_and_bound(guest: Guest) -> None:
    before = held(guest)
    guest.check("echo 0000:00:05.1 >/sys/bus/pci/drivers/vmw_pvrdma/unbind")
    assert not any(status(guest)["objects"].values())
    guest.check("echo 0000:00:05.1 >/sys/bus/pci/drivers/vmw_pvrdma/bind")
    wait_until(guest, "GIDs", lambda now: now["objects"] == before.objects)
    works(guest)


def test_kexec(guest: Guest) -> None:
    """The next kernel finds the device as the last one left it: live, with bus mastering off."""
    before = held(guest)
    files = find_guest()
    assert files is not None
    guest.write_file("/tmp/vmlinuz", files.kernel.read_bytes())
    guest.write_file("/tmp/initrd", files.initrd.read_bytes())
    guest.write_file("/tmp/kexec.py", (PROGRAMS / "kexec.py").read_bytes())
    resets = status(guest)["device"]["resets"]
    with guest.popen("ibv_rc_pingpong -g 1"):
        wait_until(guest, "a process", lambda now: now["objects"]["contexts"] == 1)
        guest.reboot(command="python3 /tmp/kexec.py /tmp/vmlinuz /tmp/initrd")
    assert status(guest)["device"]["resets"] > resets
    assert_same(guest, before)
    works(guest)
    assert complaints(guest) == []


def test_panic(guest: Guest) -> None:
    """The guest's kernel dies in mid-traffic, and with it nothing else; the reset button brings it back."""
    before = held(guest)
    words = "ibv_rc_pingpong -g 1 -n 100000000 -s 16384"
    with guest.popen(f"{words} & sleep 2; {words} {guest.ip}"):
        wait_until(guest, "two processes", lambda now: now["objects"]["contexts"] == 2)
        with guest.popen("echo c >/proc/sysrq-trigger"):
            deadline = time.monotonic() + 60
            # To its last word: what comes after the reset would look like another one.
            while "end Kernel panic" not in guest.console():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert status(guest)["connected"]
            guest.reset()
    assert_same(guest, before)
    works(guest)
    assert complaints(guest) == []


# --- other machines ------------------------------------------------------------------------------------------------


def test_commands_by_intx() -> None:
    """Without MSI and MSI-X the driver has one interrupt, shared, for commands; it asks ICR whose it is."""
    with Lab(f"intx-{os.getpid()}", guests=1, kernel_args=("pci=nomsi",)) as lab:
        guest = lab["a"]
        before = held(guest)
        assert "IO-APIC" in guest.check("grep vmw_pvrdma /proc/interrupts")
        works(guest)
        guest.check("rmmod vmw_pvrdma; modprobe vmw_pvrdma")
        works(guest)
        assert_same(guest, before)
        assert complaints(guest) == []
    shutil.rmtree(lab.folder)


class Second:
    """Another server, for another pair of functions in the same machine."""

    def __init__(self, folder: Path) -> None:
        self.socket, self.status_socket = folder / "vfio.sock", folder / "status.sock"
        words = ["--socket-path", str(self.socket), "--status-socket", str(self.status_socket)]
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [server_python(), "-m", "pvrdma_server", *words], cwd=paths.REPOSITORY, stderr=log
            )
        deadline = time.monotonic() + 30
        while not self.socket.exists():
            assert time.monotonic() < deadline
            assert self._process.poll() is None
            time.sleep(0.05)

    def qemu_args(self) -> list[str]:
        socket = {"type": "unix", "path": str(self.socket)}
        device = {"driver": "vfio-user-pci", "bus": "pcie.0", "addr": "6.1", "socket": socket}
        vmxnet3 = "vmxnet3,netdev=second,bus=pcie.0,addr=6.0,multifunction=on,romfile="
        vmxnet3 += ",mac=52:54:00:78:00:01"
        return [
            "-netdev",
            "hubport,id=second,hubid=7",
            "-device",
            vmxnet3,
            "-device",
            json.dumps(device),
        ]

    def create_qps(self) -> int:
        count: int = read_status(str(self.status_socket))["device"]["commands"].get("create_qp", 0)
        return count

    def objects(self) -> dict[str, int]:
        counts: dict[str, int] = read_status(str(self.status_socket))["objects"]
        return counts

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(20)


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Second]:
    server = Second(tmp_path)
    yield server
    assert server.stop() == 0


def bind_one_after_the_other(guest: Guest) -> None:
    """Linux 6.12's driver cannot probe two devices at once.

    It gives the network events of the first one's probe to the second one, which is in its list before its registers
    are mapped, and writes through a null pointer (pvrdma_pci_probe, pvrdma_netdevice_event_work).
    """
    guest.check("modprobe -a ib_uverbs rdma_cm rdma_ucm; echo 0 >/sys/bus/pci/drivers_autoprobe")
    guest.check("modprobe vmw_pvrdma")
    guest.check("echo 0000:00:05.1 >/sys/bus/pci/drivers/vmw_pvrdma/bind")
    wait_until(guest, "GIDs", lambda now: now["objects"]["gids"] == 2)
    guest.check("echo 0000:00:06.1 >/sys/bus/pci/drivers/vmw_pvrdma/bind")


def test_two_devices_in_one_machine(second: Second) -> None:
    args = second.qemu_args()
    with Lab(
        f"two-{os.getpid()}", guests=1, qemu_args=args, kernel_args=("lab.modules=none",)
    ) as lab:
        guest = lab["a"]
        bind_one_after_the_other(guest)
        netdev = guest.check("ls /sys/bus/pci/devices/0000:00:06.0/net").strip()
        # The lab's init gives every vmxnet3 the guest's one address.
        guest.check(f"ip address flush dev {netdev}; ip address add 10.78.0.1/24 dev {netdev}; "
                    f"ip link set {netdev} down; ip link set {netdev} up")  # fmt: skip
        before, first = held(guest), status(guest)["device"]["commands"]["create_qp"]
        mine = second.create_qps()
        works(guest, "-d vmw_pvrdma1")
        assert status(guest)["device"]["commands"]["create_qp"] == first
        assert second.create_qps() == mine + 2
        works(guest, "-d vmw_pvrdma0")
        assert second.create_qps() == mine + 2
        guest.check("echo 1 >/sys/bus/pci/devices/0000:00:06.1/remove")
        assert not any(second.objects().values())
        works(guest, "-d vmw_pvrdma0")
        assert_same(guest, before)
        assert complaints(guest) == []
    shutil.rmtree(lab.folder)

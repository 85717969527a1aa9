"""QEMU's command line for a lab guest, and the choice of the accelerator."""

import json
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.guest_image import GuestFiles
from pvrdma_lab.qemu_tree import Qemu

_PROBE_S = 10.0  # a stock kernel under KVM needs one or two


@dataclass(frozen=True, slots=True)
class Machine:
    """What one guest's QEMU gets.

    Attributes:
        name: the guest's name, also its host name.
        index: 0 for the first guest; makes the MAC address.
        address: the vmxnet3's IPv4 address with prefix length.
        hosts: name and address of every guest, for /etc/hosts.
        memory_mib: RAM in MiB.
        smp: vCPUs.
        agent_port: port on 127.0.0.1 forwarded to the guest's agent.
        network: words of the vmxnet3's -netdev, after its id.
        vfio_socket: the server's socket, or None for a guest without the device.
        folder: the guest's run folder.
        accel: value of -accel.
        extra: more words for QEMU.
        kernel_args: more words for the guest's kernel.
    """

    name: str
    index: int
    address: str
    hosts: dict[str, str]
    memory_mib: int
    smp: int
    agent_port: int
    network: str
    vfio_socket: Path | None
    folder: Path
    accel: str
    extra: tuple[str, ...] = ()
    kernel_args: tuple[str, ...] = ()


def mac_address(index: int) -> str:
    return f"52:54:00:77:00:{index + 1:02x}"


def _append(machine: Machine) -> str:
    hosts = ",".join(f"{name}:{address}" for name, address in machine.hosts.items())
    # Quiet until our init turns kernel messages on: a serial console is slow under TCG.
    words = ["console=ttyS0", "quiet", "panic=0", "mitigations=off", "random.trust_cpu=on"]
    words += [f"lab.name={machine.name}", f"lab.ip={machine.address}", f"lab.hosts={hosts}"]
    return " ".join([*words, *machine.kernel_args])


def _base(qemu: Qemu, files: GuestFiles, accel: str, memory_mib: int) -> list[str]:
    return [
        *qemu.argv, "-nodefaults", "-no-user-config", "-display", "none", "-accel", accel, "-cpu", "max",
        "-m", str(memory_mib), "-kernel", str(files.kernel), "-initrd", str(files.initrd),
    ]  # fmt: skip


def command(qemu: Qemu, files: GuestFiles, machine: Machine) -> list[str]:
    """Returns the words that start a guest."""
    argv = _base(qemu, files, machine.accel, machine.memory_mib)
    argv += [
        "-name",
        f"{machine.name},debug-threads=on",
        "-smp",
        str(machine.smp),
        "-append",
        _append(machine),
    ]
    # The server maps the guest's RAM: it must be a shared memfd.
    argv += ["-object", f"memory-backend-memfd,id=ram,size={machine.memory_mib}M,share=on"]
    argv += ["-machine", "q35,memory-backend=ram"]
    argv += ["-chardev", f"file,id=console,path={machine.folder / 'console.log'},append=on"]
    argv += ["-serial", "chardev:console"]
    argv += ["-qmp", f"unix:{machine.folder / 'qmp.sock'},server=on,wait=off"]
    argv += [
        "-drive",
        f"if=none,id=root,file={files.image},format=raw,snapshot=on,file.locking=off",
    ]
    argv += ["-device", "virtio-blk-pci,drive=root"]
    argv += [
        "-netdev",
        f"user,id=manage,restrict=on,hostfwd=tcp:127.0.0.1:{machine.agent_port}-10.0.2.15:7077",
    ]
    argv += ["-device", "virtio-net-pci,netdev=manage,romfile="]
    argv += ["-netdev", f"{machine.network},id=data"]
    # The pair the driver wants: vmxnet3 as function 0, our device as function 1 of the same slot.
    mac = mac_address(machine.index)
    argv += [
        "-device",
        f"vmxnet3,netdev=data,mac={mac},bus=pcie.0,addr=5.0,multifunction=on,romfile=",
    ]
    if machine.vfio_socket is not None:
        socket = {"type": "unix", "path": str(machine.vfio_socket)}
        device = {"driver": "vfio-user-pci", "bus": "pcie.0", "addr": "5.1", "socket": socket}
        argv += ["-device", json.dumps(device)]
    return [*argv, *machine.extra]


def network(folder: Path, names: list[str], name: str, group_port: int) -> str:
    """Returns -netdev's words for one guest of the lab's data network.

    One guest or two: datagrams between two UNIX sockets (no loss, nothing on any interface). More: a multicast
    group on the loopback interface.
    """
    if len(names) > 2:
        return f"socket,mcast=239.77.0.1:{group_port},localaddr=127.0.0.1"
    peer = next((other for other in names if other != name), "none")
    local = f"local.type=unix,local.path={folder / name / 'net.sock'}"
    return f"dgram,{local},remote.type=unix,remote.path={folder / peer / 'net.sock'}"


def _kvm_boots(qemu: Qemu, files: GuestFiles) -> bool:
    argv = _base(qemu, files, "kvm", 256)
    argv += [
        "-no-reboot",
        "-serial",
        "stdio",
        "-append",
        "console=ttyS0 quiet panic=-1 lab.probe=1",
    ]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=qemu.environment or None,
        )
        try:
            child.wait(_PROBE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        output.seek(0)
        return b"lab: probe ok" in output.read()


def accelerator(qemu: Qemu, files: GuestFiles) -> str:
    """Returns -accel's value: kvm if a guest boots under it here (tried once, remembered), else TCG."""
    tcg = "tcg,thread=multi"
    device = Path("/dev/kvm")
    if not device.exists():
        return tcg
    program = qemu.program.stat()
    seen = paths.key(
        str(qemu.program), str(program.st_mtime_ns), str(files.kernel), platform.release()
    )
    verdict = paths.cache_folder() / "verdicts" / f"kvm-{seen}"
    if not verdict.exists():
        verdict.parent.mkdir(parents=True, exist_ok=True)
        verdict.write_text("kvm" if _kvm_boots(qemu, files) else tcg)
    return verdict.read_text()

"""The arguments that attach a device to QEMU, and what QEMU there is.

What QEMU needs: guest RAM as a memfd that is shared (the server maps it), a vmxnet3 as function 0 of a slot, and the
device as function 1 of the same slot, where the guest's driver looks for it.

Source: QEMU docs/system/devices/vfio-user.rst; drivers/infiniband/hw/vmw_pvrdma/pvrdma_main.c (pvrdma_pci_probe pairs
the device with function 0 of its slot).
"""

import html
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from typing import Final, NamedTuple

from pvrdma_server.errors import ConfigError

# The first with a vfio-user client.
MIN_QEMU: Final = (10, 1)
# Where distributions put it.
PROGRAMS: Final = ("qemu-system-x86_64", "/usr/libexec/qemu-kvm", "qemu-kvm")
_QUERY_TIMEOUT_S: Final = 60.0
_VERSION: Final = re.compile(r"QEMU emulator version (\d+)\.(\d+)\.(\d+)")
_MEMORY: Final = re.compile(r"([1-9]\d*)([MG])")
_NETDEV: Final = "pvrdma-net"
_MEMORY_ID: Final = "pvrdma-ram"

Version = tuple[int, int, int]
Run = Callable[[list[str]], str]


class Machine(NamedTuple):
    """What the arguments depend on.

    Attributes:
        socket_path: the server's socket.
        memory: guest RAM, as QEMU writes it: 4G, 512M.
        slot: slot on pcie.0 for the vmxnet3 and the device.
    """

    socket_path: str
    memory: str = "4G"
    slot: int = 5


def run(argv: list[str]) -> str:
    """What a program prints.

    Raises:
        OSError: it cannot be started, fails, or does not end.
    """
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=_QUERY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise OSError(None, f"it does not end within {_QUERY_TIMEOUT_S:.0f} s") from e
    if done.returncode:
        raise OSError(None, done.stderr.strip() or f"it ends with status {done.returncode}")
    return done.stdout


def find_qemu(program: str | None = None) -> str:
    """The path of QEMU, of `program` if that is given.

    Raises:
        ConfigError: there is none.
    """
    for name in (program,) if program else PROGRAMS:
        found = shutil.which(name)
        if found:
            return found
    raise ConfigError(
        f"no QEMU: {program or ', '.join(PROGRAMS)} not found; install QEMU 10.1 or newer, "
        "or say where it is with --qemu"
    )


def qemu_version(program: str, ask: Run = run) -> Version:
    """The version of the QEMU at `program`.

    Raises:
        ConfigError: it does not say, or is too old for a vfio-user device.
    """
    try:
        text = ask([program, "--version"])
    except OSError as e:
        raise ConfigError(f"{program} --version fails: {e.strerror or e}") from e
    found = _VERSION.search(text)
    if found is None:
        raise ConfigError(f"{program} is no QEMU: --version prints {text.strip()[:80]!r}")
    version = (int(found[1]), int(found[2]), int(found[3]))
    if version < MIN_QEMU:
        raise ConfigError(
            f"{program} is QEMU {version_text(version)}, which cannot attach a vfio-user device: "
            "QEMU 10.1 or newer is needed; install it, or say where it is with --qemu"
        )
    return version


def check_client(program: str, ask: Run = run) -> None:
    """Check that the QEMU at `program` has the vfio-user client, which can be left out when QEMU is built.

    Raises:
        ConfigError: it has not.
    """
    try:
        devices = ask([program, "-device", "help"])
    except OSError as e:
        raise ConfigError(f"{program} -device help fails: {e.strerror or e}") from e
    for device in ("vfio-user-pci", "vmxnet3"):
        if f'name "{device}"' not in devices:
            raise ConfigError(
                f"{program} has no {device}: it was left out of this build; install another QEMU"
            )


def version_text(version: Version) -> str:
    """As people write it."""
    return ".".join(map(str, version))


def check_machine(machine: Machine) -> Machine:
    """`machine`, if QEMU can have such a one.

    Raises:
        ConfigError: what is wrong with it.
    """
    if not _MEMORY.fullmatch(machine.memory):
        raise ConfigError(f"--memory {machine.memory}: a number and M or G is wanted, such as 4G")
    if not 1 <= machine.slot <= 30:
        raise ConfigError(f"--slot {machine.slot}: 1 to 30 is wanted; q35 uses 0 and 31 itself")
    return machine


def device_argument(machine: Machine) -> str:
    """The value of QEMU's -device for the device itself, as JSON, for `socket` is an object."""
    return json.dumps(
        {
            "driver": "vfio-user-pci",
            "bus": "pcie.0",
            "addr": f"{machine.slot:x}.1",
            "socket": {"type": "unix", "path": os.path.abspath(machine.socket_path)},
        },
        separators=(",", ":"),
    )


def arguments(machine: Machine) -> list[str]:
    """QEMU's arguments for the device and what it needs. No -accel, -cpu, disks: those are the VM's own."""
    slot = f"{machine.slot:x}"
    return [
        "-m", machine.memory,
        "-object", f"memory-backend-memfd,id={_MEMORY_ID},size={machine.memory},share=on",
        "-machine", f"q35,memory-backend={_MEMORY_ID}",
        "-netdev", f"user,id={_NETDEV}",
        "-device", f"vmxnet3,netdev={_NETDEV},bus=pcie.0,addr={slot}.0,multifunction=on",
        "-device", device_argument(machine),
    ]  # fmt: skip


def shell_lines(words: list[str]) -> str:
    """The arguments for a shell, an option and its value per line."""
    pairs = [f"{words[i]} {shlex.quote(words[i + 1])}" for i in range(0, len(words), 2)]
    return " \\\n".join(pairs)


def libvirt_snippet(machine: Machine) -> str:
    """What goes into a libvirt domain. The namespace of its first line belongs into <domain>'s own tag."""
    unit = {"M": "MiB", "G": "GiB"}[machine.memory[-1]]
    return f"""\
<!-- 1. In the domain's own tag: <domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'> -->

<!-- 2. Beside <os>: the guest's memory is a memfd that the server maps. -->
<memory unit='{unit}'>{machine.memory[:-1]}</memory>
<memoryBacking>
  <source type='memfd'/>
  <access mode='shared'/>
</memoryBacking>

<!-- 3. In <devices>: function 0 of the slot. <source> is the VM's own; the machine type is q35. -->
<interface type='network'>
  <source network='default'/>
  <model type='vmxnet3'/>
  <address type='pci' domain='0x0000' bus='0x00' slot='{machine.slot:#04x}' function='0x0' multifunction='on'/>
</interface>

<!-- 4. Last in the domain: function 1 of the slot, the device. -->
<qemu:commandline>
  <qemu:arg value='-device'/>
  <qemu:arg value='{_attribute(device_argument(machine))}'/>
</qemu:commandline>
"""


def _attribute(text: str) -> str:
    """For between single quotes; double ones stay, for JSON to be read."""
    return html.escape(text, quote=False).replace("'", "&apos;")

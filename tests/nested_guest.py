"""A Linux guest inside the rxe host: QEMU on a real server, a trimmed kernel, commands over a virtio console."""

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple, Self

FILES = Path("/nested")
RDMA_ADDRESS = "10.9.0.111"
# The programs' TCP: out of the guest to the peer, and into the guest through a forwarded port.
PEER_TCP, GUEST_TCP = "10.9.1.2", "10.9.1.1"
FORWARDED_PORT = 18600
BOOT_S = 500.0


class Done(NamedTuple):
    """A finished command of the guest."""

    status: int
    output: str


class NestedGuest:
    """One guest, which is to be `booted` before its first command; `device_socket` is its server's."""

    address, mac, port = RDMA_ADDRESS, "52:54:00:77:01:01", FORWARDED_PORT

    def __init__(self, folder: Path, device_socket: str) -> None:
        self.folder = folder
        self._agent = folder / "agent.sock"
        with (folder / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(device_socket), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._socket = self._connect()
        except BaseException:
            self._end()
            raise

    def booted(self) -> Self:
        """This guest, once it takes commands."""
        self._wait_for("@@ready", BOOT_S)
        return self

    def _program(self) -> list[str]:
        """QEMU and the backend of the guest's memory, which is named ram."""
        return ["qemu-system-x86_64", "-object", "memory-backend-memfd,id=ram,size=128M,share=on"]

    def _device(self, socket_path: str) -> list[str]:
        """The device beside the network card at 5.0."""
        device = {
            "driver": "vfio-user-pci", "bus": "pcie.0", "addr": "5.1",
            "socket": {"type": "unix", "path": socket_path},
        }  # fmt: skip
        return ["-device", json.dumps(device)]

    def _command(self, device_socket: str) -> list[str]:
        words = f"console=ttyS0 quiet panic=-1 lab.ip={self.address}/24 lab.peer=10.9.0.2"
        forward = f"hostfwd=tcp:{GUEST_TCP}:{self.port}-10.0.2.15:{self.port}"
        return [
            *self._program(), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-accel", "tcg", "-cpu", "qemu64", "-smp", "1", "-m", "128", "-machine", "q35,memory-backend=ram",
            "-kernel", str(FILES / "bzImage"), "-initrd", str(FILES / "initrd.gz"), "-append", words,
            "-chardev", f"file,id=console,path={self.folder / 'console.log'}", "-serial", "chardev:console",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=agent,path={self._agent},server=on,wait=off",
            "-device", "virtconsole,chardev=agent",
            "-netdev", "hubport,id=data,hubid=0",
            "-device", f"vmxnet3,netdev=data,mac={self.mac},bus=pcie.0,addr=5.0,multifunction=on,romfile=",
            *self._device(device_socket),
            "-netdev", f"user,id=tcp,{forward}", "-device", "vmxnet3,netdev=tcp,bus=pcie.0,addr=6.0,romfile=",
        ]  # fmt: skip

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + BOOT_S
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(str(self._agent))
                return sock
            except OSError:
                sock.close()
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise self.error("QEMU does not come up") from None
                time.sleep(0.1)

    def _wait_for(self, mark: str, timeout_s: float) -> str:
        data = b""
        deadline = time.monotonic() + timeout_s
        while mark.encode() not in data or not data.endswith(b"\n"):
            self._socket.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                chunk = self._socket.recv(65536)
            except TimeoutError:
                chunk = b""
            if not chunk:
                raise self.error(f"no {mark} in {timeout_s:.0f} s, but {data[-500:]!r}")
            data += chunk
        return data.decode(errors="replace").replace("\r", "")

    def run(self, command: str, timeout_s: float = 60.0) -> Done:
        """Run a command to its end."""
        self._socket.sendall(f"timeout -s KILL {timeout_s:.0f} {command}\n".encode())
        text = self._wait_for("@@end ", timeout_s + 30)
        output, _, status = text.rpartition("@@end ")
        return Done(int(status), output)

    def wait_until(self, command: str, timeout_s: float) -> None:
        """Until a command succeeds in the guest."""
        deadline = time.monotonic() + timeout_s
        while self.run(f"sh -c '{command}'").status:
            if time.monotonic() > deadline:
                raise self.error(f"not in {timeout_s:.0f} s: {command}")

    def error(self, what: str) -> AssertionError:
        """An error with the ends of the logs."""
        logs = "".join(
            f"\n--- {name}\n{(self.folder / name).read_text(errors='replace')[-3000:]}"
            for name in ("console.log", "qemu.log")
            if (self.folder / name).exists()
        )
        return AssertionError(f"nested guest: {what}{logs}")

    def close(self) -> None:
        """End QEMU."""
        self._socket.close()
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(30)

"""A Linux guest inside the rxe host with the old pvrdma device of QEMU 7.2 (scripts/pvrdma_lab/old_qemu.py)."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hub_process import HubProcess
from nested_guest import NestedGuest

OLD_QEMU = "/old-qemu/run"
_NETDEV = "d0"


class OldGuest(NestedGuest):
    """As `NestedGuest`, beside which it can run; the socket is the hub's for old devices."""

    address, mac, port = "10.9.0.112", "52:54:00:77:02:01", 18601
    link_local = "fe80::5054:ff:fe77:201"

    def _program(self) -> list[str]:
        # The device takes no other backend than this one.
        return [OLD_QEMU, "-object", "memory-backend-ram,id=ram,size=128M,share=on"]

    def _device(self, socket_path: str) -> list[str]:
        return [
            "-chardev", f"socket,id=mads,path={socket_path}",
            "-device", f"pvrdma,bus=pcie.0,addr=5.1,ibdev=rxe0,netdev={_NETDEV},mad-chardev=mads",
        ]  # fmt: skip


@contextmanager
def old_guest(folder: Path, hub: HubProcess) -> Iterator[OldGuest]:
    """A guest, `booted` or not, whose addresses the host's port has, as the old device leaves them to others to add."""
    addresses = f"{OldGuest.address}/24", f"{OldGuest.link_local}/64"
    for address in addresses:
        subprocess.run(["ip", "address", "replace", address, "dev", _NETDEV], check=True)
    try:
        guest = OldGuest(folder, hub.old_mux)
        try:
            yield guest
        finally:
            guest.close()
    finally:
        for address in addresses:
            subprocess.run(["ip", "address", "delete", address, "dev", _NETDEV], check=True)

"""Storage between guests: a disk of one guest, used by another over RDMA. For scripts/demo and the guest tests."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pvrdma_lab.guest import Guest
from pvrdma_lab.programs import Measured

_MIB = 1 << 20
_IMAGE = "/var/tmp/lab-disk.img"
_COPY = "/var/tmp/lab-copy.img"
_PORT = 4420
_NAME = "lab"
_NVMET = "/sys/kernel/config/nvmet"
_TARGET = """
set -e
modprobe nvmet-rdma
head -c {bytes} /dev/urandom >{image}
mkdir -p {nvmet}/subsystems/{name}/namespaces/1 {nvmet}/ports/1
echo 1 >{nvmet}/subsystems/{name}/attr_allow_any_host
echo -n {image} >{nvmet}/subsystems/{name}/namespaces/1/device_path
echo 1 >{nvmet}/subsystems/{name}/namespaces/1/enable
cd {nvmet}/ports/1
echo rdma >addr_trtype; echo ipv4 >addr_adrfam; echo {ip} >addr_traddr; echo {port} >addr_trsvcid
ln -s {nvmet}/subsystems/{name} subsystems/{name}
"""
_NO_TARGET = """
rm -f {nvmet}/ports/1/subsystems/{name}
rmdir {nvmet}/ports/1 {nvmet}/subsystems/{name}/namespaces/1 {nvmet}/subsystems/{name}
rm -f {image}
"""


@contextmanager
def nvme_target(guest: Guest, size_bytes: int) -> Iterator[None]:
    """A file on the guest's disk, with random bytes, offered over NVMe-oF within the block."""
    words = {
        "bytes": size_bytes, "image": _IMAGE, "nvmet": _NVMET, "name": _NAME, "ip": guest.ip,
        "port": _PORT,
    }  # fmt: skip
    guest.check(_TARGET.format(**words))
    try:
        yield
    finally:
        guest.run(_NO_TARGET.format(**words))


@contextmanager
def nvme_disk(host: Guest, target: Guest) -> Iterator[str]:
    """The target's file as a block device of another guest within the block: its path."""
    host.check(
        f"modprobe nvme-rdma; nvme connect -t rdma -n {_NAME} -a {target.ip} -s {_PORT} -i 1"
    )
    try:
        host.check("for i in $(seq 100); do ls /dev/nvme0n1 && exit; sleep 0.1; done; exit 1")
        yield "/dev/nvme0n1"
    finally:
        host.run(f"nvme disconnect -n {_NAME}")


def nvme_copy(target: Guest, host: Guest, size_mib: int = 16) -> Measured:
    """Copies a disk of `target` to one of `host` and a piece back, comparing every byte.

    Raises:
        LabError: something failed, or bytes differ.
    """
    size_bytes = size_mib * _MIB
    with nvme_target(target, size_bytes), nvme_disk(host, target) as disk:
        started = time.monotonic()
        host.check(f"dd if={disk} of={_COPY} bs=1M iflag=direct")
        seconds = time.monotonic() - started
        _same(target, _IMAGE, host, _COPY)
        host.check(f"head -c {size_bytes} /dev/urandom >{_COPY}")
        host.check(f"dd if={_COPY} of={disk} bs=1M oflag=direct")
        _same(target, _IMAGE, host, _COPY)
        host.check(f"rm {_COPY}")
    return Measured(size_bytes, 2, size_mib / seconds, None, "")


def _same(guest: Guest, path: str, other: Guest, other_path: str) -> None:
    sums = [
        re.split(r"\s", where.check(f"sha256sum {name}"))[0]
        for where, name in ((guest, path), (other, other_path))
    ]
    if sums[0] != sums[1]:
        raise other.error("nvme", f"{other_path} is not what {guest.name} has in {path}")

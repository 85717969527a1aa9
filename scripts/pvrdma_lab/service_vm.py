"""The service machine: the quick start's installation in a copy of the tree, a disk made of it, and a VM on that.

The installation runs natively in a chroot, with the network that apt and pip need. What takes a running system
(systemd, the servers, a guest) then happens in a virtual machine without a network.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from pvrdma_lab import paths, quick_start
from pvrdma_lab.agent_vm import AgentVm, BootFiles
from pvrdma_lab.nested_image import find_nested
from pvrdma_lab.service_image import find_service
from pvrdma_lab.state import LabError
from pvrdma_lab.steps import remove_tree

MEMORY_MIB = 1024
INSTALL_TIMEOUT_S = 400.0
IMAGE_SIZE = "6G"  # sparse
# Where the clone, the nested guest and the tests' own files lie in the machine.
CLONE = "root/pvrdma-server"
NESTED = "nested"
TESTS = "srv/tests"
_TEST_FILES = ("vfu_client.py",)
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"

# However we end, the whole installation ends: with its first process goes a process namespace. So do the mounts.
_ENDS_WITH_US = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
)
_INSTALL = r"""
set -eu
tree=$1 work=$2 size=$3
mkdir -p "$work/upper" "$work/overlay" "$work/root"
mount -t overlay overlay -o "lowerdir=$tree,upperdir=$work/upper,workdir=$work/overlay" "$work/root"
cp -a "$work/files/." "$work/root/"
cp /etc/resolv.conf "$work/root/etc/resolv.conf"
mount -t proc proc "$work/root/proc"
mount --rbind /dev "$work/root/dev"
env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root DEBIAN_FRONTEND=noninteractive \
    chroot "$work/root" /bin/bash -eux /install.sh
umount -l "$work/root/dev" "$work/root/proc"
rm "$work/root/etc/resolv.conf" "$work/root/install.sh"
mke2fs -q -t ext4 -O ^has_journal -E root_owner=0:0 -L service -d "$work/root" "$work/root.img" "$size"
"""


class ServiceVm(AgentVm):
    """The machine with systemd; there is at most one."""

    def __init__(self) -> None:
        super().__init__("service", MEMORY_MIB, ("lab.init=/usr/lib/systemd/systemd",))

    @property
    def image(self) -> Path:
        return self.folder / "work" / "root.img"

    def install(self, source_archive: Path) -> str:
        """Follows the quick start's section "Install" with the source archive in place of a clone.

        Returns:
            What the commands printed.

        Raises:
            LabError: a command failed; with its output.
        """
        files = find_service()
        if files is None:
            raise LabError("the service machine's tree is not built: run scripts/bootstrap")
        work = self.folder / "work"
        if work.exists():
            remove_tree(work)
        self._add_files(work / "files", source_archive)
        argv = [
            *_ENDS_WITH_US,
            "sh",
            "-c",
            _INSTALL,
            "sh",
            str(files.tree),
            str(work),
            IMAGE_SIZE,
        ]
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise LabError(f"the quick start's installation failed:\n{done.stdout[-6000:]}")
        return done.stdout

    def up(self) -> float:
        """Boots what `install` made. Returns the seconds that took."""
        files = find_service()
        if files is None:
            raise LabError("the service machine's files are not built: run scripts/bootstrap")
        return self.boot(BootFiles(files.kernel, files.initrd, self.image))

    def remove(self) -> None:
        """Ends it and gives its disk's room back."""
        self.down()
        if (self.folder / "work").exists():
            remove_tree(self.folder / "work")

    def _add_files(self, root: Path, source_archive: Path) -> None:
        packages, clone, install = quick_start.blocks("Install")
        if not clone.startswith("git clone "):
            raise LabError("the second block of the quick start's section Install is no git clone")
        (root / CLONE).mkdir(parents=True)
        shutil.unpack_archive(source_archive, root / "root", filter="data")
        (unpacked,) = (root / "root").glob("pvrdma_server-*")
        unpacked.rename(root / CLONE)
        (root / TESTS).mkdir(parents=True)
        for name in _TEST_FILES:
            shutil.copy(paths.REPOSITORY / "tests" / name, root / TESTS)
        nested = find_nested()
        if nested is None:
            raise LabError("the nested guest is not built: run scripts/bootstrap")
        (root / NESTED).mkdir()
        for path in (nested.kernel, nested.initrd):
            shutil.copy(path, root / NESTED)
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n"
            for name, value in _network_settings(root).items()
        )
        (root / "install.sh").write_text(f"{exports}cd /root\n{packages}{install}")


def _network_settings(root: Path) -> dict[str, str]:
    """Returns this machine's own settings of pip that are about the network; its certificates go into the tree."""
    names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT")
    settings = {name: os.environ[name] for name in names if name in os.environ}
    certificates = os.environ.get("PIP_CERT")
    if certificates:
        target = root / _CERTIFICATES
        target.parent.mkdir(parents=True)
        shutil.copy(certificates, target)
        # The pips that pip starts do not all look at PIP_CERT.
        settings |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), f"/{_CERTIFICATES}")
    return settings

"""Steps: a machine with systemd, as a user has one, for the tests of installation and service.

It is Debian's stable release with the packages that docs/quick-start.md names, and QEMU from its backports. The project
is not in it: the tests install that, in a copy of the tree, by the page's own commands.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pvrdma_lab import paths, quick_start
from pvrdma_lab.debian import TREE_RELEASE, make_tree
from pvrdma_lab.guest_image import find_guest
from pvrdma_lab.qemu_tree import INSTALL_QEMU
from pvrdma_lab.steps import StepError, StepLog, built_beside

_RECIPE = "1"
_PACKAGES = ["iproute2", "kmod", "procps", "python3", "systemd", "systemd-sysv"]
# Nothing on the machine is waited for; what systemd starts besides takes seconds each when emulated.
_MASKED = (
    "apt-daily-upgrade.timer", "apt-daily.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "getty.target", "kmod-static-nodes.service", "ldconfig.service", "modprobe@configfs.service",
    "modprobe@drm.service", "modprobe@efi_pstore.service", "modprobe@fuse.service", "serial-getty@ttyS0.service",
    "systemd-binfmt.service", "systemd-hwdb-update.service", "systemd-journal-catalog-update.service",
    "systemd-pcrphase.service", "systemd-random-seed.service", "systemd-tpm2-setup.service",
    "systemd-update-utmp.service",
)  # fmt: skip
_AGENT = """\
[Unit]
Description=The lab's agent
After=basic.target

[Service]
Environment=HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin
ExecStartPre=modprobe virtio_net
ExecStartPre=sh -c 'cd /sys/class/net && for n in e*; do ip address add 10.0.2.15/24 dev $n; ip link set $n up; done'
ExecStart=python3 -I -S /run/lab/agent.py --address 10.0.2.15 --port 7077
StandardOutput=journal+console
KillMode=process

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, slots=True)
class ServiceFiles:
    """What it takes to boot the machine; `tree` is copied, installed into and made a disk of."""

    kernel: Path
    initrd: Path
    tree: Path


def _tree() -> Path:
    parts = (_RECIPE, TREE_RELEASE, INSTALL_QEMU, _AGENT, *_MASKED, *_PACKAGES)
    key = paths.key(*parts, *quick_start.packages())
    return paths.cache_folder() / "service-tree" / key


def find_service() -> ServiceFiles | None:
    """Returns the machine's files, or None if one of them is not built yet."""
    guest = find_guest()
    if guest is None or not _tree().exists():
        return None
    return ServiceFiles(guest.kernel, guest.initrd, _tree() / "tree")


class ServiceTree:
    """Step: the tree of a machine with systemd."""

    name = "service-tree"
    title = f"{TREE_RELEASE} with systemd and QEMU, to install the project into (about two minutes)"

    def find(self) -> Path | None:
        return _tree() if _tree().exists() else None

    def build(self, log: StepLog) -> None:
        guest = find_guest()
        if guest is None:
            raise StepError(
                "the guests' kernel is not built", "run scripts/bootstrap --only initrd"
            )
        with built_beside(_tree()) as beside:
            tree = beside / "tree"
            make_tree(
                log,
                tree,
                packages=[*_PACKAGES, *quick_start.packages()],
                variant="minbase",
                suites=(TREE_RELEASE, f"{TREE_RELEASE}-backports"),
                options=(INSTALL_QEMU,),
            )
            modules = guest.kernel.parent / "tree/usr/lib/modules"
            shutil.copytree(modules, tree / "usr/lib/modules", symlinks=True)
            self._prepare(log, tree)

    def _prepare(self, log: StepLog, tree: Path) -> None:
        (tree / "etc/fstab").write_text("")
        (tree / "etc/hostname").write_text("service\n")
        (tree / "etc/systemd/system/lab-agent.service").write_text(_AGENT)
        log.run(["chroot", tree, "systemctl", "enable", "lab-agent.service"])
        log.run(["chroot", tree, "systemctl", "mask", *_MASKED])
        log.run(["chroot", tree, "systemctl", "set-default", "multi-user.target"])
        log.run(["chroot", tree, "systemd-machine-id-setup"])
        for unused in (tree / "var/cache/apt/archives").glob("*.deb"):
            unused.unlink()

"""Steps: the guest's kernel with vmw_pvrdma, its root disk, and the small initrd with our init and agent.

The three are keyed apart: a change of the agent makes a new initrd (a second), not a new root disk (two minutes).
"""

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.debian import TREE_RELEASE, make_tree
from pvrdma_lab.steps import StepError, StepLog, built_beside, remove_tree

KERNEL_SERIES = "6.12"
IMAGE_SIZE = "6G"  # sparse: what is not written takes no room

_KERNEL_RECIPE = "1"
_KERNEL_PACKAGES = [
    "busybox-static", "gcc", "kmod", "libc6-dev", "linux-headers-amd64", f"linux-source-{KERNEL_SERIES}", "make",
    "xz-utils",
]  # fmt: skip

_ROOT_RECIPE = "2"
_ROOT_PACKAGES = [
    "busybox-static", "e2fsprogs", "ethtool", "fio", "ibverbs-providers", "ibverbs-utils", "infiniband-diags",
    "iperf3", "iproute2", "iputils-ping", "kmod", "libfabric-bin", "nfs-common", "nfs-kernel-server", "nvme-cli",
    "pciutils", "perftest", "procps", "psmisc", "python3", "python3-pyverbs", "rdma-core", "rdmacm-utils", "strace",
    "ucx-utils",
]  # fmt: skip

_INITRD_RECIPE = "1"
# What the initrd loads to see its root disk; dependencies come from modules.dep.
_INITRD_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
_INITRD_APPLETS = [
    "sh",
    "cat",
    "cp",
    "echo",
    "insmod",
    "mkdir",
    "mount",
    "umount",
    "poweroff",
    "sleep",
    "switch_root",
]
_GUEST_FILES = ("initrd-init", "init", "agent.py")


@dataclass(frozen=True, slots=True)
class GuestFiles:
    """What QEMU needs to boot a guest."""

    kernel: Path
    initrd: Path
    image: Path


def _kernel() -> Path:
    script = (paths.GUEST_FILES / "build-driver").read_bytes()
    parts = (_KERNEL_RECIPE, TREE_RELEASE, *_KERNEL_PACKAGES)
    return paths.cache_folder() / "kernel" / paths.key(*parts, script)


def _root() -> Path:
    parts = (_ROOT_RECIPE, TREE_RELEASE, IMAGE_SIZE, *_ROOT_PACKAGES, _kernel().name)
    return paths.cache_folder() / "rootfs" / paths.key(*parts)


def _initrd() -> Path:
    files = [(paths.GUEST_FILES / name).read_bytes() for name in _GUEST_FILES]
    return (
        paths.cache_folder()
        / "initrd"
        / paths.key(_INITRD_RECIPE, _kernel().name, *_INITRD_MODULES, *_INITRD_APPLETS, *files)
    )


def find_guest() -> GuestFiles | None:
    """Returns the guest's files, or None if one of them is not built yet."""
    files = GuestFiles(_kernel() / "vmlinuz", _initrd() / "initrd", _root() / "root.img")
    return (
        files if all(path.exists() for path in (files.kernel, files.initrd, files.image)) else None
    )


class GuestKernel:
    """Step: Debian's stock kernel and vmw_pvrdma built unmodified for it."""

    name = "kernel"
    title = f"{TREE_RELEASE}'s kernel {KERNEL_SERIES} and its vmw_pvrdma (about two minutes)"

    def find(self) -> Path | None:
        return _kernel() if _kernel().exists() else None

    def build(self, log: StepLog) -> None:
        with built_beside(_kernel()) as beside:
            tree = beside / "build-tree"
            script = paths.GUEST_FILES / "build-driver"
            hooks = (
                f"--customize-hook=upload {script} /build-driver",
                f'--customize-hook=chroot "$1" sh /build-driver {KERNEL_SERIES}',
            )
            make_tree(log, tree, packages=_KERNEL_PACKAGES, options=hooks)
            for made in (tree / "out").iterdir():
                made.rename(beside / made.name)
            remove_tree(tree)


class GuestRoot:
    """Step: the guests' common root disk."""

    name = "rootfs"
    title = f"{TREE_RELEASE} root disk with RDMA programs (about two minutes)"

    def find(self) -> Path | None:
        return _root() if _root().exists() else None

    def build(self, log: StepLog) -> None:
        with built_beside(_root()) as beside:
            tree = beside / "tree"
            make_tree(log, tree, packages=_ROOT_PACKAGES, variant="minbase")
            self._prepare(tree)
            shutil.copytree(
                _kernel() / "tree/usr/lib/modules", tree / "usr/lib/modules", symlinks=True
            )
            log.run(
                ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-E", "root_owner=0:0", "-L", "lab",
                 "-d", tree, beside / "root.img", IMAGE_SIZE],
            )  # fmt: skip
            remove_tree(tree)

    def _prepare(self, tree: Path) -> None:
        for name in ("reboot", "poweroff", "halt"):
            program = tree / "usr/sbin" / name
            program.unlink(missing_ok=True)
            program.symlink_to("../bin/busybox")
        # mmdebstrap copied the machine's: guests have no name server and get their names from init.
        (tree / "etc/resolv.conf").unlink(missing_ok=True)
        (tree / "etc/fstab").write_text("")
        # rdma-core's own tests: packed as documentation, needed as programs.
        for packed in (tree / "usr/share/doc").glob("*/tests/*.py.gz"):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            packed.unlink()


class GuestInitrd:
    """Step: the initrd, which also carries the guest's init and agent."""

    name = "initrd"
    title = "initrd with init and agent"

    def find(self) -> Path | None:
        return _initrd() if _initrd().exists() else None

    def build(self, log: StepLog) -> None:
        with built_beside(_initrd()) as beside:
            tree = beside / "tree"
            for folder in ("bin", "dev", "proc", "modules", "newroot", "lab"):
                (tree / folder).mkdir(parents=True)
            shutil.copy(_kernel() / "busybox", tree / "bin/busybox")
            for applet in _INITRD_APPLETS:
                (tree / "bin" / applet).symlink_to("busybox")
            self._add_modules(tree / "modules")
            shutil.copy(paths.GUEST_FILES / "initrd-init", tree / "init")
            for name in ("init", "agent.py"):
                shutil.copy(paths.GUEST_FILES / name, tree / "lab" / name)
            log.run(
                ["sh", "-c", f"cd {tree} && find . | cpio --quiet -o -H newc -R 0:0 >../initrd"]
            )
            remove_tree(tree)

    def _add_modules(self, target: Path) -> None:
        (base,) = (_kernel() / "tree/usr/lib/modules").iterdir()
        order = module_order((base / "modules.dep").read_text(), _INITRD_MODULES)
        for name in order:
            shutil.copy(base / name, target)
        (target / "order").write_text("".join(f"{Path(name).name}\n" for name in order))


def module_name(path: str) -> str:
    """Returns a module's name: virtio_blk for kernel/drivers/block/virtio_blk.ko.xz."""
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def module_order(modules_dep: str, wanted: tuple[str, ...]) -> list[str]:
    """Returns the files of the wanted modules and all they need, each after what it needs.

    Args:
        modules_dep: the text of a modules.dep.
        wanted: module names; one that is built into the kernel is not in modules.dep and is left out.
    """
    needs: dict[str, list[str]] = {}
    files: dict[str, str] = {}
    for line in modules_dep.splitlines():
        path, _, rest = line.partition(":")
        files[module_name(path)] = path
        needs[path] = rest.split()
    order: list[str] = []

    def visit(path: str) -> None:
        for needed in needs[path]:
            visit(needed)
        if path not in order:
            order.append(path)

    for name in wanted:
        if name in files:
            visit(files[name])
    if not order:
        raise StepError("the kernel has none of the initrd's modules")
    return order

"""Steps: the rxe host, a virtual machine that has what this machine lacks (a kernel with rdma_rxe, a recent pyverbs).

Its tree is Debian's testing release, for that has kernel, pyverbs and QEMU of one age. The tree stays beside its disk
image: the C extension for the VM's Python is compiled in it, and the nested guest's programs are copied out of it.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.debian import TREE_RELEASE, make_tree
from pvrdma_lab.guest_image import KERNEL_SERIES, module_order
from pvrdma_lab.python_env import find_library
from pvrdma_lab.steps import StepError, StepLog, built_beside, remove_tree

HOST_RELEASE = "forky"
_RECIPE = "1"
_IMAGE_SIZE = "8G"  # sparse
_PACKAGES = [
    "busybox-static", "e2fsprogs", "gcc", "ibverbs-providers", "ibverbs-utils", "infiniband-diags", "iproute2",
    "iputils-ping", "kmod", "libc6-dev", "linux-image-amd64", "perftest", "procps", "psmisc", "python3",
    "python3-cffi", "python3-click", "python3-dev", "python3-hypothesis", "python3-pyroute2", "python3-pytest",
    "python3-pytest-timeout", "python3-pyverbs", "python3-rich", "python3-setuptools", "python3-structlog",
    "python3-trio", "qemu-system-x86", "rdma-core", "rdmacm-utils", "strace", "tcpdump",
]  # fmt: skip
# The archive of a testing release that nobody refreshes any more has an expiry date in the past.
_OPTIONS = ('--aptopt=Acquire::Check-Valid-Until "false"',)

_TINY_RECIPE = "1"
_TINY_PACKAGES = [
    "bc", "bison", "flex", "gcc", "libc6-dev", "libelf-dev", f"linux-source-{KERNEL_SERIES}", "make", "perl",
    "python3-minimal", "xz-utils",
]  # fmt: skip

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
_INITRD_FILES = ("initrd-init", "init", "agent.py")


@dataclass(frozen=True, slots=True)
class HostFiles:
    """What it takes to boot the rxe host."""

    kernel: Path
    initrd: Path
    image: Path
    tree: Path


def _host() -> Path:
    return paths.cache_folder() / "host" / paths.key(_RECIPE, HOST_RELEASE, _IMAGE_SIZE, *_PACKAGES)


def _initrd() -> Path:
    files = [(paths.GUEST_FILES / name).read_bytes() for name in _INITRD_FILES]
    recipe = Path(__file__).read_bytes()
    return paths.cache_folder() / "host-initrd" / paths.key(_host().name, recipe, *files)


def _tiny() -> Path:
    parts = [
        (paths.GUEST_FILES / name).read_bytes() for name in ("tiny.config", "build-tiny-kernel")
    ]
    return (
        paths.cache_folder()
        / "tiny-kernel"
        / paths.key(_TINY_RECIPE, TREE_RELEASE, KERNEL_SERIES, *parts)
    )


def find_host() -> HostFiles | None:
    """Returns the rxe host's files, or None if one of them is not built yet."""
    files = HostFiles(
        _host() / "vmlinuz", _initrd() / "initrd", _host() / "root.img", _host() / "tree"
    )
    return (
        files if all(path.exists() for path in (files.kernel, files.initrd, files.image)) else None
    )


def find_tiny_kernel() -> Path | None:
    """Returns the nested guest's kernel, or None if it is not built yet."""
    kernel = _tiny() / "bzImage"
    return kernel if kernel.exists() else None


class HostTree:
    """Step: the rxe host's tree, kernel and disk image."""

    name = "rxe-host"
    title = f"{HOST_RELEASE} disk image with rxe, pyverbs and QEMU (about three minutes)"

    def find(self) -> Path | None:
        return _host() if _host().exists() else None

    def build(self, log: StepLog) -> None:
        with built_beside(_host()) as beside:
            tree = beside / "tree"
            make_tree(
                log,
                tree,
                packages=_PACKAGES,
                variant="minbase",
                suites=(HOST_RELEASE,),
                options=_OPTIONS,
            )
            (tree / "etc/resolv.conf").unlink(missing_ok=True)
            (tree / "etc/fstab").write_text("")
            for name in ("reboot", "poweroff", "halt"):
                program = tree / "usr/sbin" / name
                program.unlink(missing_ok=True)
                program.symlink_to("../bin/busybox")
            (kernel,) = (tree / "boot").glob("vmlinuz-*")
            shutil.copy(kernel, beside / "vmlinuz")
            for unused in (
                *(tree / "boot").glob("initrd*"),
                tree / "var/cache/apt",
                tree / "var/lib/apt/lists",
            ):
                shutil.rmtree(unused) if unused.is_dir() else unused.unlink()
            log.run(
                ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-E", "root_owner=0:0", "-L", "host",
                 "-d", tree, beside / "root.img", _IMAGE_SIZE],
            )  # fmt: skip


class HostInitrd:
    """Step: the rxe host's initrd, with the init and agent that the guests have."""

    name = "rxe-initrd"
    title = "the rxe host's initrd"

    def find(self) -> Path | None:
        return _initrd() if _initrd().exists() else None

    def build(self, log: StepLog) -> None:
        root = _host() / "tree"
        with built_beside(_initrd()) as beside:
            tree = beside / "tree"
            for folder in ("bin", "dev", "proc", "modules", "newroot", "lab"):
                (tree / folder).mkdir(parents=True)
            shutil.copy(root / "usr/bin/busybox", tree / "bin/busybox")
            for applet in _INITRD_APPLETS:
                (tree / "bin" / applet).symlink_to("busybox")
            self._add_modules(log, root, tree / "modules")
            shutil.copy(paths.GUEST_FILES / "initrd-init", tree / "init")
            for name in ("init", "agent.py"):
                shutil.copy(paths.GUEST_FILES / name, tree / "lab" / name)
            log.run(
                ["sh", "-c", f"cd {tree} && find . | cpio --quiet -o -H newc -R 0:0 >../initrd"]
            )
            remove_tree(tree)

    def _add_modules(self, log: StepLog, root: Path, target: Path) -> None:
        (base,) = (root / "usr/lib/modules").iterdir()
        order = module_order((base / "modules.dep").read_text(), _INITRD_MODULES)
        for name in order:
            shutil.copy(base / name, target)
        packed = [str(path) for path in target.glob("*.xz")]
        if packed:
            log.run(["unxz", *packed])
        names = [Path(name).name.removesuffix(".xz") for name in order]
        (target / "order").write_text("".join(f"{name}\n" for name in names))


class TinyKernel:
    """Step: the nested guest's kernel, trimmed so that it boots when emulated twice."""

    name = "tiny-kernel"
    title = f"trimmed kernel {KERNEL_SERIES} for the nested guest (about six minutes)"

    def find(self) -> Path | None:
        return _tiny() if _tiny().exists() else None

    def build(self, log: StepLog) -> None:
        with built_beside(_tiny()) as beside:
            tree = beside / "build-tree"
            script, config = (
                paths.GUEST_FILES / "build-tiny-kernel",
                paths.GUEST_FILES / "tiny.config",
            )
            hooks = (
                f"--customize-hook=upload {script} /build-tiny-kernel",
                f"--customize-hook=upload {config} /tiny.config",
                f'--customize-hook=chroot "$1" sh /build-tiny-kernel {KERNEL_SERIES}',
            )
            make_tree(log, tree, packages=_TINY_PACKAGES, variant="minbase", options=hooks)
            for made in (tree / "out").iterdir():
                made.rename(beside / made.name)
            remove_tree(tree)


def _extension_sources() -> list[Path]:
    package = paths.REPOSITORY / "pvrdma_server"
    return sorted([*package.glob("_*_build.py"), *package.glob("_*.h")])


def _extension() -> Path:
    parts = [path.read_bytes() for path in _extension_sources()]
    return (
        paths.cache_folder()
        / "host-extension"
        / paths.key(_host().name, str(find_library()), *parts)
    )


def find_extension() -> Path | None:
    """Returns the folder with the C extensions compiled for the rxe host's Python, or None."""
    return _extension() if _extension().exists() else None


class HostExtension:
    """Step: the C extensions for the rxe host's Python, compiled in its tree."""

    name = "rxe-extension"
    title = "the C extensions for the rxe host's Python"

    def find(self) -> Path | None:
        return find_extension()

    def build(self, log: StepLog) -> None:
        library = find_library()
        if library is None:
            raise StepError(
                "libvfio-user is not built", "run scripts/bootstrap --only libvfio-user"
            )
        work = _host() / "tree" / "build-extension"
        if work.exists():
            remove_tree(work)
        (work / "pvrdma_server").mkdir(parents=True)
        try:
            shutil.copytree(library, work / "library")
            for source in _extension_sources():
                shutil.copy(source, work / "pvrdma_server")
            for script in (work / "pvrdma_server").glob("_*_build.py"):
                log.run(
                    ["chroot", _host() / "tree", "env", "LIBVFIO_USER_PREFIX=/build-extension/library",
                     "HOME=/root", "python3", f"/build-extension/pvrdma_server/{script.name}"],
                )  # fmt: skip
            with built_beside(_extension()) as beside:
                for made in (work / "pvrdma_server").glob("_*.so"):
                    shutil.copy(made, beside)
        finally:
            remove_tree(work)

"""Step: the nested guest's initramfs: RDMA programs out of the rxe host's tree, busybox, and a shell for an agent."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.host_image import find_host, find_tiny_kernel
from pvrdma_lab.steps import StepError, StepLog, built_beside, remove_tree

_PROGRAMS = (
    "ibv_devinfo", "ibv_rc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong", "ib_write_bw",
    "ib_write_lat", "ib_read_bw", "ib_send_bw", "ib_send_lat", "ib_atomic_lat", "ib_atomic_bw",
    "rdma", "rping", "ucmatose", "udaddy",
)  # fmt: skip
_APPLETS = (
    "arp", "awk", "cat", "cut", "dmesg", "echo", "grep", "head", "ifconfig", "ip", "kill",
    "killall", "ls", "mkdir", "mount", "nc", "netstat", "ping", "poweroff", "printf", "ps", "rm",
    "sed", "seq", "sh", "sleep", "sort", "stty", "tail", "test", "timeout", "tr", "uname", "wc",
)  # fmt: skip
_LIBRARIES = Path("usr/lib/x86_64-linux-gnu")


@dataclass(frozen=True, slots=True)
class NestedFiles:
    """What it takes to boot the nested guest; `key` names just these."""

    kernel: Path
    initrd: Path
    key: str


def _initrd(tree: Path, kernel: Path) -> Path:
    init = (paths.GUEST_FILES / "nested-init").read_bytes()
    recipe = Path(__file__).read_bytes()
    key = paths.key(tree.parent.name, kernel.parent.name, recipe, init)
    return paths.cache_folder() / "nested-initrd" / key / "initrd.gz"


def find_nested() -> NestedFiles | None:
    """Returns the nested guest's files, or None if one of them is not built yet."""
    host, kernel = find_host(), find_tiny_kernel()
    if host is None or kernel is None:
        return None
    initrd = _initrd(host.tree, kernel)
    return NestedFiles(kernel, initrd, initrd.parent.name) if initrd.exists() else None


class NestedInitrd:
    """Step: the nested guest's initramfs."""

    name = "nested-initrd"
    title = "the nested guest's initramfs"

    def find(self) -> Path | None:
        nested = find_nested()
        return nested.initrd if nested else None

    def build(self, log: StepLog) -> None:
        host, kernel = find_host(), find_tiny_kernel()
        if host is None or kernel is None:
            raise StepError(
                "its parts are missing", "run scripts/bootstrap --only rxe-host --only tiny-kernel"
            )
        with built_beside(_initrd(host.tree, kernel).parent) as beside:
            tree = beside / "tree"
            for folder in (
                "bin",
                "dev",
                "proc",
                "sys",
                "tmp",
                "etc/libibverbs.d",
                "usr/bin",
                "usr/lib",
                "lib64",
            ):
                (tree / folder).mkdir(parents=True)
            shutil.copy(host.tree / "usr/bin/busybox", tree / "bin/busybox")
            for applet in _APPLETS:
                (tree / "bin" / applet).symlink_to("busybox")
            self._add_programs(host.tree, tree)
            shutil.copy(paths.GUEST_FILES / "nested-init", tree / "init")
            (tree / "init").chmod(0o755)
            pack = f"cd {tree} && find . | cpio --quiet -o -H newc -R 0:0 | gzip -1 >../initrd.gz"
            log.run(["sh", "-c", pack])
            remove_tree(tree)

    def _add_programs(self, source: Path, target: Path) -> None:
        providers = list((source / _LIBRARIES / "libibverbs").glob("libvmw_pvrdma-*.so"))
        if not providers:
            raise StepError("the rxe host's tree has no user-space library for vmw_pvrdma")
        programs = [source / "usr/bin" / name for name in _PROGRAMS]
        files = {*programs, *providers}
        for path in (*programs, *providers):
            files.update(_needed(source, path))
        (target / "usr/lib64").symlink_to("../lib64")
        for path in files:
            into = target / path.relative_to(source)
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into)
        shutil.copy(source / "etc/libibverbs.d/vmw_pvrdma.driver", target / "etc/libibverbs.d")
        # glibc opens it by name when a thread is cancelled or ends itself, as rping's do: ldd does not tell.
        unwinder = _LIBRARIES / "libgcc_s.so.1"
        (target / unwinder).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / unwinder, target / unwinder)
        loader = "ld-linux-x86-64.so.2"
        shutil.copy((source / "usr/lib64" / loader).resolve(), target / "lib64" / loader)
        (target / "lib").symlink_to("usr/lib")


def _needed(tree: Path, program: Path) -> list[Path]:
    inside = f"/{program.relative_to(tree)}"
    listing = subprocess.run(
        ["chroot", tree, "ldd", inside], capture_output=True, text=True, check=False
    ).stdout
    names = re.findall(r"=> (/\S+)", listing)
    return [tree / _LIBRARIES / Path(name).name for name in names]

"""Step: a QEMU that has vfio-user-pci (>= 10.1): the machine's own, else trixie-backports' in a tree.

The tree's QEMU runs through the tree's dynamic loader, not through chroot: host paths (sockets, images) work as they
are.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.debian import TREE_RELEASE, make_tree
from pvrdma_lab.steps import StepLog, built_beside

_PROGRAM = "qemu-system-x86_64"
_RECIPE = "1"  # change it to build the tree anew
INSTALL_QEMU = (
    '--customize-hook=chroot "$1" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends'
    f" -t {TREE_RELEASE}-backports qemu-system-x86"
)


@dataclass(frozen=True, slots=True)
class Qemu:
    """How to run QEMU.

    Attributes:
        argv: the words that start it, firmware folders included.
        program: the binary, to key what is learnt about it.
        modules: folder of its loadable modules, or None for its built-in default.
    """

    argv: tuple[str, ...]
    program: Path
    modules: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {"QEMU_MODULE_DIR": str(self.modules)} if self.modules else {}


def _stamp(program: Path) -> str:
    state = program.stat()
    return paths.key(str(program), str(state.st_mtime_ns), str(state.st_size))


def _host_has_vfio_user(program: Path) -> bool:
    verdict = paths.cache_folder() / "verdicts" / f"vfio-user-{_stamp(program)}"
    if not verdict.exists():
        listing = subprocess.run(
            [program, "-device", "help"], capture_output=True, text=True, check=False
        )
        verdict.parent.mkdir(parents=True, exist_ok=True)
        verdict.write_text("yes" if "vfio-user-pci" in listing.stdout else "no")
    return verdict.read_text() == "yes"


def _tree() -> Path:
    return paths.cache_folder() / "qemu" / paths.key(_RECIPE, INSTALL_QEMU)


def find_qemu() -> Qemu | None:
    """Returns the QEMU to use, or None if the tree is not built yet."""
    host = shutil.which(_PROGRAM)
    if host and _host_has_vfio_user(Path(host)):
        return Qemu((host,), Path(host))
    tree = _tree()
    if not tree.exists():
        return None
    libraries = tree / "usr/lib/x86_64-linux-gnu"
    program = tree / "usr/bin" / _PROGRAM
    argv = (
        str(tree / "usr/lib64/ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(program),
        "-L", str(tree / "usr/share/seabios"), "-L", str(tree / "usr/share/qemu"),
    )  # fmt: skip
    return Qemu(argv, program, libraries / "qemu")


class QemuTree:
    """Step: QEMU with vfio-user-pci."""

    name = "qemu"
    title = f"QEMU with vfio-user-pci from {TREE_RELEASE}-backports (about a minute)"

    def find(self) -> Path | None:
        qemu = find_qemu()
        return qemu.program if qemu else None

    def build(self, log: StepLog) -> None:
        with built_beside(_tree()) as beside:
            beside.rmdir()
            suites = (TREE_RELEASE, f"{TREE_RELEASE}-backports")
            make_tree(log, beside, packages=[], suites=suites, options=(INSTALL_QEMU,))

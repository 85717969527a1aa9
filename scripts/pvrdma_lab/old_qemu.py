"""Step: Debian 12's QEMU 7.2, the last of a Debian release that has the old pvrdma device, for the rxe host to run.

What its libraries want besides, the rxe host has: the libraries below are those of which Debian's testing has another.
"""

import shutil
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.debian import make_tree
from pvrdma_lab.steps import StepLog, built_beside, remove_tree

# Where the files lie in the rxe host, and what runs QEMU there.
INSIDE = "/old-qemu"
RUN = f"{INSIDE}/run"
_SCRIPT = f"""\
#!/bin/sh
export LD_LIBRARY_PATH={INSIDE}/lib QEMU_MODULE_DIR={INSIDE}/lib
exec {INSIDE}/bin/qemu-system-x86_64 -L {INSIDE}/share "$@"
"""
_RELEASE = "bookworm"
_PACKAGE = "qemu-system-x86"
_LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
# Debian's emulating accelerator is a module.
_FILES = {
    "bin": ("usr/bin/qemu-system-x86_64",),
    "lib": (
        _LIBRARIES / "qemu/accel-tcg-x86_64.so", _LIBRARIES / "libcapstone.so.4", _LIBRARIES / "libaio.so.1",
        "lib/x86_64-linux-gnu/libfuse3.so.3",
    ),
    "share": ("usr/share/seabios/bios-256k.bin", "usr/share/qemu/kvmvapic.bin", "usr/share/qemu/linuxboot_dma.bin"),
}  # fmt: skip


def _folder() -> Path:
    recipe = Path(__file__).read_bytes()
    return paths.cache_folder() / "old-qemu" / paths.key(recipe)


def find_old_qemu() -> Path | None:
    """Returns the folder with `run` and what that needs, or None if it is not built yet."""
    return _folder() if _folder().exists() else None


class OldQemu:
    """Step: QEMU 7.2's program, the libraries that the rxe host lacks, and its firmware."""

    name = "old-qemu"
    title = f"QEMU 7.2 from {_RELEASE}, for its old pvrdma device (seconds; only when asked for)"

    def find(self) -> Path | None:
        return find_old_qemu()

    def build(self, log: StepLog) -> None:
        with built_beside(_folder()) as beside:
            tree = beside / "tree"
            make_tree(log, tree, packages=[_PACKAGE], variant="extract", suites=(_RELEASE,))
            for folder, names in _FILES.items():
                (beside / folder).mkdir()
                for name in names:
                    shutil.copy(tree / name, beside / folder)
            (beside / "run").write_text(_SCRIPT)
            (beside / "run").chmod(0o755)
            remove_tree(tree)

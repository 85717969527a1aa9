"""Step: Debian 12's QEMU 7.2, the last of a Debian release that has the old pvrdma device, for the rxe host to run.

It is taken out of its packages and never installed. What its libraries want besides, the rxe host has: the packages
below are those that Debian's testing release has under another name.
"""

import shutil
from pathlib import Path

from pvrdma_lab import paths
from pvrdma_lab.steps import StepError, StepLog, built_beside, remove_tree

VERSION = "7.2"
# Where the files lie in the rxe host.
INSIDE = "/old-qemu"
_RECIPE = "1"
_QEMU = "qemu-system-x86"
_PACKAGES = (_QEMU, "qemu-system-data", "seabios", "libaio1", "libcapstone4", "libfuse3-3")
_PROGRAM = "qemu-system-x86_64"
_FIRMWARE = ("bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin")
_ADVICE = f"the old device is in Debian 12's QEMU {VERSION}: this takes a Debian 12 with its own apt sources"


def _folder() -> Path:
    return paths.cache_folder() / "old-qemu" / paths.key(_RECIPE, VERSION, *_PACKAGES, *_FIRMWARE)


def find_old_qemu() -> Path | None:
    """Returns the folder with bin, lib, share and the file version, or None if it is not built yet."""
    return _folder() if _folder().exists() else None


class OldQemu:
    """Step: QEMU 7.2's program, the libraries that the rxe host lacks, and its firmware."""

    name = "old-qemu"
    title = f"QEMU {VERSION}, for its old pvrdma device (seconds; only when asked for)"

    def find(self) -> Path | None:
        return find_old_qemu()

    def build(self, log: StepLog) -> None:
        with built_beside(_folder()) as beside:
            packages, tree = beside / "packages", beside / "tree"
            packages.mkdir()
            try:
                self._download(log, packages)
            except StepError:
                # Lists are missing or old: fetch them once.
                log.run(["sh", "-c", "apt-get -q update || true"])
                self._download(log, packages)
            # qemu-system-x86_1%3a7.2+dfsg-7+deb12u18_amd64.deb
            (package,) = packages.glob(f"{_QEMU}_*.deb")
            version = package.name.split("_")[1].replace("%3a", ":")
            if not version.partition(":")[2].startswith(VERSION):
                raise StepError(f"apt offers {_QEMU} {version}", _ADVICE)
            for package in packages.iterdir():
                log.run(["dpkg-deb", "-x", package, tree])
            self._pick(tree, beside)
            (beside / "version").write_text(f"{version}\n")
            remove_tree(tree)
            remove_tree(packages)

    def _download(self, log: StepLog, into: Path) -> None:
        log.run(["apt-get", "-q", "download", *_PACKAGES], cwd=into, advice=_ADVICE)

    def _pick(self, tree: Path, target: Path) -> None:
        for folder in ("bin", "lib", "share"):
            (target / folder).mkdir()
        shutil.copy(tree / "usr/bin" / _PROGRAM, target / "bin")
        for library in tree.glob("**/x86_64-linux-gnu/lib*.so.?"):
            shutil.copy(library, target / "lib")
        for name in _FIRMWARE:
            (found,) = (path for path in tree.glob(f"usr/share/*/{name}") if path.is_file())
            shutil.copy(found, target / "share")

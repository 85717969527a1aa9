"""The rxe host: one virtual machine that plays an RDMA host, with this clone's files copied in.

Commands go through the same agent that lab guests have. `sync` copies the clone; `scripts/host/setup` in it makes the
rxe devices.
"""

import io
import tarfile
import time

from pvrdma_lab import paths
from pvrdma_lab.agent_vm import AgentVm, BootFiles
from pvrdma_lab.host_image import find_extension, find_host
from pvrdma_lab.nested_image import find_nested
from pvrdma_lab.old_qemu import INSIDE, find_old_qemu
from pvrdma_lab.state import LabError

MEMORY_MIB = 2048
# Where the clone lies in the virtual machine.
PROJECT = "/pvrdma"
_SHARED = ("pvrdma_server", "tests", "scripts", "pyproject.toml")
_UNSHARED_SUFFIXES = (".so", ".pyc")


class HostVm(AgentVm):
    """The rxe host of this cache; there is at most one."""

    def __init__(self) -> None:
        super().__init__("rxe-host", MEMORY_MIB, ("lab.modules=none",))

    def up(self) -> float:
        """Boots it, unless it runs, and copies the clone in. Returns the seconds that took.

        Raises:
            LabError: it did not come up; with the end of its console.
        """
        started = time.monotonic()
        if not self.alive:
            files = find_host()
            if files is None:
                raise LabError("the rxe host's files are not built: run scripts/bootstrap")
            self.boot(BootFiles(files.kernel, files.initrd, files.image))
        self.sync()
        self.check(f"{PROJECT}/scripts/host/setup", timeout_s=120)
        return time.monotonic() - started

    def sync(self) -> None:
        """Copies the clone, the compiled extension and the nested guest's files in, over what is there."""
        extension = find_extension()
        if extension is None:
            raise LabError(
                "the C extension for the rxe host is out of date: run scripts/bootstrap --only rxe-extension"
            )
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name in _SHARED:
                tar.add(paths.REPOSITORY / name, name, filter=_shareable)
            for library in extension.iterdir():
                tar.add(library, f"pvrdma_server/{library.name}")
        self.check(
            # What Python has compiled stays, for as long as its source is the same.
            f"mkdir -p {PROJECT} && find {PROJECT} -type f ! -name '*.pyc' -delete && tar xf - -C {PROJECT}",
            stdin=archive.getvalue(),
        )
        nested = find_nested()
        if nested is not None and not self.run(f"test -e /nested/{nested.key}").ok:
            for path in (nested.kernel, nested.initrd):
                self.check(
                    f"mkdir -p /nested; cat >/nested/{path.name}",
                    stdin=path.read_bytes(),
                    timeout_s=120,
                )
            self.check(f"touch /nested/{nested.key}")

    def add_old_qemu(self) -> None:
        """Copies QEMU 7.2 in, unless it is there.

        Raises:
            LabError: it is not built.
        """
        folder = find_old_qemu()
        if folder is None:
            raise LabError("QEMU 7.2 is not built: run scripts/bootstrap --only old-qemu")
        if self.run(f"test -e {INSIDE}/{folder.name}").ok:
            return
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(folder, ".")
        self.check(
            f"mkdir -p {INSIDE} && tar xf - -C {INSIDE} && touch {INSIDE}/{folder.name}",
            stdin=archive.getvalue(),
            timeout_s=120,
        )

    def project(self, command: str) -> str:
        """Returns the words that run a command in the clone's folder."""
        return f"cd {PROJECT} && PYTHONPATH={PROJECT} {command}"


def _shareable(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if info.name.endswith(_UNSHARED_SUFFIXES) or "__pycache__" in info.name:
        return None
    info.uid = info.gid = 0
    return info

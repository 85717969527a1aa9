"""A lab: guests that share a network, each with its pvrdma-server. The Python face of scripts/lab.

with Lab("demo", guests=2) as lab:          # up() and, at the end, down()
    lab["a"].check("ibv_devinfo")
    with lab["a"].popen("ibv_rc_pingpong -g 1") as server:
        server.wait_for("local address")
        lab["b"].check("ibv_rc_pingpong -g 1 a")
"""

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from pvrdma_lab import state
from pvrdma_lab.guest import BOOT_TIMEOUT_S, Guest, clear, free_port
from pvrdma_lab.guest_image import find_guest
from pvrdma_lab.qemu_command import accelerator
from pvrdma_lab.qemu_tree import find_qemu
from pvrdma_lab.state import LabError, LabState, Options


class Lab:
    """A named lab; its state is on disk, so a later process finds it again with load()."""

    def __init__(
        self,
        name: str = "lab",
        *,
        guests: int = 2,
        memory_mib: int = 512,
        smp: int = 1,
        server: bool = True,
        server_args: Sequence[str] = (),
        qemu_args: Sequence[str] = (),
        server_command: Sequence[str] = (),
        kernel_args: Sequence[str] = (),
    ) -> None:
        """Describes a lab; up() makes it. The arguments are state.Options' attributes."""
        options = Options(
            guests,
            memory_mib,
            smp,
            server,
            tuple(server_args),
            tuple(qemu_args),
            tuple(server_command),
            tuple(kernel_args),
        )
        self._adopt(LabState.fresh(name, options))

    def _adopt(self, lab_state: LabState) -> None:
        self.state = lab_state
        self.name = lab_state.name
        self.folder = lab_state.folder
        self._guests = {guest.name: Guest(lab_state, guest) for guest in lab_state.guests}

    @classmethod
    def load(cls, name: str = "lab") -> Self:
        """Finds a lab that another process made.

        Raises:
            LabError: there is none of that name.
        """
        found = state.load(name)
        if found is None:
            others = " ".join(state.names()) or "none"
            raise LabError(
                f"there is no lab {name!r} (labs: {others}); make it: scripts/lab up --name {name}"
            )
        lab = cls.__new__(cls)
        lab._adopt(found)
        return lab

    def __getitem__(self, name: str) -> Guest:
        try:
            return self._guests[name]
        except KeyError:
            raise LabError(
                f"lab {self.name} has no guest {name!r}; it has {' '.join(self._guests)}"
            ) from None

    def __iter__(self) -> Iterator[Guest]:
        return iter(self._guests.values())

    def __enter__(self) -> Self:
        try:
            self.up(replace=True)
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def up(self, *, replace: bool = False, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Starts servers and guests, and waits until every agent answers. Clears what a crash left.

        Args:
            replace: end a lab of this name that is up.
            timeout_s: for the boot of all guests together.

        Raises:
            LabError: a lab of this name is up, or a step failed; what was started stays, for a look at it.
        """
        qemu, files = find_qemu(), find_guest()
        if qemu is None or files is None:
            raise LabError("QEMU or the guest's files are not built: run scripts/bootstrap")
        with state.locked(self.name):
            self._clear_old(replace)
            self.folder.mkdir(parents=True)
            self.state.accel = accelerator(qemu, files)
            self.state.group_port = free_port(socket.SOCK_DGRAM)
            self.state.save()
            if self.state.options.server:
                for guest in self:
                    guest.start_server()
            for guest in self:
                guest.start_qemu()
        with ThreadPoolExecutor(len(self._guests)) as pool:
            list(pool.map(lambda guest: guest.wait_ready(timeout_s), self))

    def _clear_old(self, replace: bool) -> None:
        old = state.load(self.name)
        if old is not None:
            processes = old.processes()
            if processes and all(process.alive for process in processes) and not replace:
                raise LabError(
                    f"lab {self.name} is up; use it, or first: scripts/lab down --name {self.name}"
                )
            for process in processes:
                process.kill()
        clear(self.folder)

    def down(self) -> None:
        """Ends all processes; the logs stay until the next up()."""
        with state.locked(self.name):
            for guest in self:
                guest.stop_qemu()
            for guest in self:
                guest.stop_server()
            self.state.forget()

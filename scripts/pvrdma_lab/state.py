"""A lab's state on disk: what was asked for, and which processes stand for it. One JSON file per lab."""

import dataclasses
import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pvrdma_lab import paths
from pvrdma_lab.process import Process

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,23}")
FILE_NAME = "lab.json"


class LabError(Exception):
    """A lab that does not do what it should; the message carries the step and the ends of the logs."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a lab is made of.

    Attributes:
        guests: how many, named a, b, c and so on.
        memory_mib: RAM of each in MiB.
        smp: vCPUs of each.
        server: whether each guest has a pvrdma-server and its device.
        server_args: more words for the server; {name}, {index}, {ip}, {mac}, {folder} and {lab} are filled in.
        qemu_args: more words for QEMU; the same are filled in.
        kernel_args: more words for the guests' kernels.
        server_command: the words that start a server, before --socket-path; empty for this clone's own.
    """

    guests: int = 2
    memory_mib: int = 512
    smp: int = 1
    server: bool = True
    server_args: tuple[str, ...] = ()
    qemu_args: tuple[str, ...] = ()
    server_command: tuple[str, ...] = ()
    kernel_args: tuple[str, ...] = ()


@dataclass(slots=True)
class GuestState:
    """One guest's processes.

    Attributes:
        name: a, b, c and so on.
        index: 0, 1, 2 and so on.
        agent_port: port on 127.0.0.1 that leads to its agent; 0 before its first start.
        console_mark: size of the console log in bytes when the guest last began to boot.
        server: its pvrdma-server.
        qemu: its QEMU.
    """

    name: str
    index: int
    agent_port: int = 0
    console_mark: int = 0
    server: Process | None = None
    qemu: Process | None = None

    @property
    def ip(self) -> str:
        return f"10.77.0.{self.index + 1}"


@dataclass(slots=True)
class LabState:
    """All of a lab that must survive the command that made it."""

    name: str
    options: Options
    accel: str = ""
    group_port: int = 0
    guests: list[GuestState] = field(default_factory=list)

    @classmethod
    def fresh(cls, name: str, options: Options) -> Self:
        if not _NAME.fullmatch(name):
            raise LabError(f"not a lab's name: {name!r} (letters, digits, - and _, at most 24)")
        if not 1 <= options.guests <= 26:
            raise LabError(f"a lab has 1 to 26 guests, not {options.guests}")
        guests = [GuestState(chr(ord("a") + index), index) for index in range(options.guests)]
        return cls(name, options, guests=guests)

    @property
    def folder(self) -> Path:
        return paths.run_folder() / self.name

    def processes(self) -> list[Process]:
        """Returns what was started, QEMUs first: that is the order to end them in."""
        every = [guest.qemu for guest in self.guests] + [guest.server for guest in self.guests]
        return [process for process in every if process is not None]

    def save(self) -> None:
        """Writes the state beside the old one and renames it: a reader sees one or the other."""
        beside = self.folder / f".{FILE_NAME}.tmp"
        beside.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        beside.rename(self.folder / FILE_NAME)

    def forget(self) -> None:
        (self.folder / FILE_NAME).unlink(missing_ok=True)


def _process(data: dict[str, Any] | None) -> Process | None:
    return data and Process(**data)  # type: ignore[return-value]


def load(name: str) -> LabState | None:
    """Returns a lab's state, or None if there is no lab of that name (or its file is not ours to read)."""
    path = paths.run_folder() / name / FILE_NAME
    try:
        data = json.loads(path.read_text())
        options: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in data["options"].items()
        }
        guests = [
            GuestState(
                **{**guest, "server": _process(guest["server"]), "qemu": _process(guest["qemu"])}
            )
            for guest in data["guests"]
        ]
        return LabState(data["name"], Options(**options), data["accel"], data["group_port"], guests)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(
            f"{path} is not a lab's state ({error}); end its processes and remove it"
        ) from error


def names() -> list[str]:
    """Returns the names of the labs that have a state."""
    return sorted(path.parent.name for path in paths.run_folder().glob(f"*/{FILE_NAME}"))


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Lets one command at a time start and end processes of a lab."""
    path = paths.run_folder() / f".{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""A host's umad without a host: at the level of ports and datagrams, and at the level of system calls."""

import errno
import os
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import trio

from pvrdma_server.abi.ib_user_mad import (
    ENABLE_PKEY,
    REGISTER_AGENT,
    UNREGISTER_AGENT,
    USER_MAD_HDR,
    USER_MAD_REG_REQ,
    UserMadHdr,
    UserMadRegReq,
)
from pvrdma_server.mad_frames import Datagram
from pvrdma_server.mad_hub.umad import SendBusy, UmadError


class FakeReceiver:
    """Implements `daemon.Receiver`."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ours.setblocking(False)
        self.fd = self._ours.fileno()
        self.reports = 0
        self.closed = False
        self.looks = 0
        self._datagrams: deque[Datagram] = deque()
        self._error: UmadError | None = None

    def inject(self, datagram: Datagram) -> None:
        """A datagram has come from the network."""
        self._datagrams.append(datagram)
        self._theirs.send(b"x")

    def unplug(self) -> None:
        """The device is gone."""
        self._error = UmadError("reading from umad failed: Input/output error")
        self._theirs.send(b"x")

    def receive(self) -> list[Datagram]:
        self.looks += 1
        self._ours.recv(4096)
        if self._error is not None:
            raise self._error
        taken = list(self._datagrams)
        self._datagrams.clear()
        return taken

    def close(self) -> None:
        self.closed = True
        self._ours.close()
        self._theirs.close()


class FakeSender:
    """Implements `lanes.Sender`; called in threads."""

    def __init__(self, port: "FakePort") -> None:
        self._port = port

    def send(self, gid_type: int, datagram: Datagram) -> None:
        port = self._port
        if datagram.dgid in port.unresolved:
            trio.from_thread.run_sync(port.waiting.set)
            port.resolved.wait(60)
        if port.busy > 0:
            port.busy -= 1
            raise SendBusy("umad: Invalid argument")
        if datagram.dgid in port.unreachable:
            raise UmadError("umad: No route to host")
        trio.from_thread.run_sync(port.sent.send_nowait, datagram)

    def close(self) -> None:
        self._port.senders_open -= 1


class FakePort:
    """Implements `daemon.NetworkPort`.

    Attributes:
        taken: why the CM class cannot be had, or None.
        no_sender: why no way out can be had, or None.
        busy: how many sends are refused as busy.
        unreachable: GIDs to which sends fail.
        unresolved: GIDs to which sends wait, for the `resolved` event.
        waiting: set when one waits.
        outgoing: what was sent.
    """

    name = "fake0 port 1"

    def __init__(self) -> None:
        self.taken: str | None = None
        self.no_sender: str | None = None
        self.busy = 0
        self.unreachable: set[bytes] = set()
        self.unresolved: set[bytes] = set()
        self.resolved = threading.Event()
        self.waiting = trio.Event()
        self.sent, self.outgoing = trio.open_memory_channel[Datagram](100_000)
        self.tries = 0
        self.receiver: FakeReceiver | None = None
        self.opened = trio.Event()
        self.senders_open = 0

    def open_receiver(self) -> FakeReceiver:
        self.tries += 1
        if self.taken is not None:
            raise UmadError(self.taken)
        self.receiver = FakeReceiver()
        self.opened.set()
        return self.receiver

    def open_sender(self) -> FakeSender:
        if self.no_sender is not None:
            raise UmadError(self.no_sender)
        self.senders_open += 1
        return FakeSender(self)


def sysfs(root: Path, gids: dict[int, tuple[str, str]], *, ib_cm: bool = False) -> None:
    """A /sys with the port 1 of rxe0 as umad3 and of rxe1 as umad4; `gids` are rxe0's, index to GID and type."""
    for number, ibdev in ((3, "rxe0"), (4, "rxe1")):
        folder = root / f"class/infiniband_mad/umad{number}"
        folder.mkdir(parents=True)
        (folder / "ibdev").write_text(f"{ibdev}\n")
        (folder / "port").write_text("1\n")
    (root / "class/infiniband_mad/abi_version").write_text("5\n")
    port = root / "class/infiniband/rxe0/ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    for index in range(8):
        gid, kind = gids.get(index, ("", ""))
        set_gid(root, index, gid, kind)
    if ib_cm:
        (port / "cm_rx_msgs").mkdir()
        for holder in ("rdma_cm", "ib_srpt"):
            (root / f"module/ib_cm/holders/{holder}").mkdir(parents=True)


def set_gid(root: Path, index: int, gid: str, kind: str = "RoCE v2") -> None:
    """Put `gid` (8 groups of hex, or nothing) at `index`; an entry without GID has no type, as in the kernel."""
    port = root / "class/infiniband/rxe0/ports/1"
    (port / f"gids/{index}").write_text((gid or ":".join(["0000"] * 8)) + "\n")
    types = port / f"gid_attrs/types/{index}"
    types.unlink(missing_ok=True)
    if gid:
        types.write_text(kind + "\n")


@dataclass
class FakeKernel:
    """Implements `umad.Kernel`: files are sockets, whose other ends are the network.

    Attributes:
        class_taken: another agent has the CM class.
        open_error: errno of open, 0 for none.
        write_errors: errno of the next writes.
        written: (header, MAD) that were sent.
        agents: (fd, id) to registration.
    """

    class_taken: bool = False
    open_error: int = 0
    write_errors: list[int] = field(default_factory=list)
    read_error: int = 0
    opened: list[str] = field(default_factory=list)
    written: list[tuple[UserMadHdr, bytes]] = field(default_factory=list)
    agents: dict[tuple[int, int], UserMadRegReq] = field(default_factory=dict)
    with_pkey: set[int] = field(default_factory=set)
    others: dict[int, socket.socket] = field(default_factory=dict)

    def open(self, path: str) -> int:
        if self.open_error:
            raise OSError(self.open_error, os.strerror(self.open_error))
        self.opened.append(path)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fd = ours.detach()
        self.others[fd] = theirs
        return fd

    def ioctl(self, fd: int, request: int, argument: bytes) -> bytes:
        match request:
            case _ if request == ENABLE_PKEY:
                assert not any(owner == fd for owner, _ in self.agents)
                self.with_pkey.add(fd)
                return b""
            case _ if request == REGISTER_AGENT:
                asked = USER_MAD_REG_REQ.unpack(argument)
                if asked.mgmt_class and self.class_taken:
                    raise OSError(errno.EINVAL, "Invalid argument")
                number = len([1 for owner, _ in self.agents if owner == fd])
                self.agents[fd, number] = asked
                return USER_MAD_REG_REQ.pack(asked._replace(id=number))
            case _ if request == UNREGISTER_AGENT:
                if self.read_error:
                    raise OSError(errno.EINVAL, "Invalid argument")
                del self.agents[fd, int.from_bytes(argument, "little")]
                return argument
        raise AssertionError(hex(request))

    def read(self, fd: int, length: int) -> bytes:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return os.read(fd, length)

    def write(self, fd: int, data: bytes) -> int:
        if self.write_errors:
            number = self.write_errors.pop(0)
            raise OSError(number, os.strerror(number))
        self.written.append((USER_MAD_HDR.unpack_from(data), data[USER_MAD_HDR.size :]))
        return len(data)

    def close(self, fd: int) -> None:
        self.others.pop(fd).close()
        os.close(fd)

    def inject(self, fd: int, header: UserMadHdr, mad: bytes) -> None:
        """A MAD has come for `fd`."""
        self.others[fd].send(USER_MAD_HDR.pack(header) + mad)

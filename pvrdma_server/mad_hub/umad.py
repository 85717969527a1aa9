"""The host's QP1 by /dev/infiniband/umadN: the CM class of one port of an RDMA device.

Contract: `Umad` opens one *receiver*, which owns the class, and any number of *senders*. They are separate files
because the kernel resolves a destination's link address inside write(), up to a second with the file's lock held: a
sender is for a thread that may wait, and the receiver never does. Errors are `UmadError`, whose text is for an
operator.

A sender's MADs go out under transaction ids whose upper half the kernel replaces by its own; the connection manager
does not mind. Of two MADs with the same id, the second is refused (EINVAL) until the first is out: `SendBusy`, try
again.

Source: drivers/infiniband/core/user_mad.c, mad.c.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final, Protocol

from pvrdma_server.abi.ib_user_mad import (
    ENABLE_PKEY,
    REGISTER_AGENT,
    UNREGISTER_AGENT,
    USER_MAD_HDR,
    USER_MAD_REG_REQ,
    UserMadHdr,
    UserMadRegReq,
)
from pvrdma_server.abi.mad import (
    CM_CLASS_VERSION,
    MAD_SIZE,
    MgmtClass,
    MgmtMethod,
    network_hdr_type,
)
from pvrdma_server.errors import PvrdmaError
from pvrdma_server.host_gids import ROCE_V2, GidTable
from pvrdma_server.mad_frames import Datagram
from pvrdma_server.mad_hub.cm import NO_GID

QP1: Final = 1
QP1_QKEY: Final = 0x80010000
# Larger than any MAD: what does not fit stays first in the kernel's queue for ever.
READ_BYTES: Final = 65536
# MADs taken at one look; others want their turn.
READ_BATCH: Final = 64


class UmadError(PvrdmaError):
    """The host's umad cannot be used (now); the message says what to do."""


class SendBusy(PvrdmaError):
    """The MAD was not taken, probably because another with its transaction id is on its way."""


class Kernel(Protocol):
    """The system calls in use."""

    def open(self, path: str) -> int:
        """Open for reading and writing, non-blocking."""

    def ioctl(self, fd: int, request: int, argument: bytes) -> bytes:
        """Returns what the kernel has made of `argument`."""

    def read(self, fd: int, length: int) -> bytes:
        """As os.read."""

    def write(self, fd: int, data: bytes) -> int:
        """As os.write."""

    def close(self, fd: int) -> None:
        """As os.close."""


class LinuxKernel:
    """The real one. Implements `Kernel`."""

    def open(self, path: str) -> int:
        """See `Kernel`."""
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def ioctl(self, fd: int, request: int, argument: bytes) -> bytes:
        """See `Kernel`."""
        if not argument:
            fcntl.ioctl(fd, request)
            return b""
        answer: bytes = fcntl.ioctl(fd, request, argument)
        return answer

    def read(self, fd: int, length: int) -> bytes:
        """See `Kernel`."""
        return os.read(fd, length)

    def write(self, fd: int, data: bytes) -> int:
        """See `Kernel`."""
        return os.write(fd, data)

    def close(self, fd: int) -> None:
        """See `Kernel`."""
        os.close(fd)


class Umad:
    """One port of an RDMA device.

    Args:
        ibdev: its name, as `ibv_devices` lists it.
        port: from 1.
        kernel: system calls.
        sys_path: where sysfs is.
        dev_path: where the umad devices are.
    """

    def __init__(
        self,
        ibdev: str,
        port: int,
        *,
        kernel: Kernel | None = None,
        sys_path: Path = Path("/sys"),
        dev_path: Path = Path("/dev/infiniband"),
    ) -> None:
        self.name = f"{ibdev} port {port}"
        self._ibdev, self._port = ibdev, port
        self._kernel = kernel or LinuxKernel()
        self._sys, self._dev = sys_path, dev_path
        self._folder = sys_path / "class/infiniband" / ibdev / "ports" / str(port)
        self._gids = GidTable(self._folder)

    def open_receiver(self) -> "UmadReceiver":
        """Take the CM class.

        Raises:
            UmadError: the device is missing, or the class is somebody else's.
        """
        # Known beforehand, it is not asked for: the kernel writes a line to its log at each try.
        if (taken := self._ib_cm()) is not None:
            raise UmadError(taken)
        fd = self._open()
        try:
            agent = self._register(fd, MgmtClass.CM)
        except OSError as e:
            self._kernel.close(fd)
            raise UmadError(
                f"umad of {self.name} does not give us the CM class: {e.strerror};"
                " is another hub, or rdmacm-mux, at work on this port?"
            ) from e
        return UmadReceiver(self._kernel, fd, agent, self._gids)

    def open_sender(self) -> "UmadSender":
        """A way out.

        Raises:
            UmadError: the device is missing.
        """
        fd = self._open()
        try:
            agent = self._register(fd, 0)
        except OSError as e:
            self._kernel.close(fd)
            raise UmadError(f"umad of {self.name} takes no agent: {e.strerror}") from e
        return UmadSender(self._kernel, fd, agent, self._gids)

    def _open(self) -> int:
        path = str(self._dev / self._find())
        try:
            fd = self._kernel.open(path)
        except OSError as e:
            raise UmadError(
                f"{path} of {self.name}: {e.strerror}; the hub needs root, or a group that may open it"
            ) from e
        try:
            self._kernel.ioctl(fd, ENABLE_PKEY, b"")
        except OSError as e:
            self._kernel.close(fd)
            raise UmadError(f"{path} of {self.name}: {e.strerror}") from e
        return fd

    def _find(self) -> str:
        """Name of the port's umad device.

        Raises:
            UmadError: there is none.
        """
        for folder in sorted((self._sys / "class/infiniband_mad").glob("umad*")):
            try:
                ibdev = (folder / "ibdev").read_text().strip()
                port = (folder / "port").read_text().strip()
            except OSError:
                continue  # it has just gone
            if (ibdev, port) == (self._ibdev, str(self._port)):
                return folder.name
        if not (self._sys / "class/infiniband_mad").is_dir():
            raise UmadError(f"no umad for {self.name}: load the module ib_umad")
        raise UmadError(f"no umad for {self.name}: no such RDMA device or port here (rdma link)")

    def _register(self, fd: int, mgmt_class: int) -> int:
        """Register an agent of QP1; of no class, it only sends. Returns its id, which may be 0."""
        methods = (1 << MgmtMethod.SEND if mgmt_class else 0).to_bytes(16, "little")
        version = CM_CLASS_VERSION if mgmt_class else 0
        request = UserMadRegReq(0, methods, QP1, mgmt_class, version, bytes(3), 0)
        answer = self._kernel.ioctl(fd, REGISTER_AGENT, USER_MAD_REG_REQ.pack(request))
        return USER_MAD_REG_REQ.unpack(answer).id

    def _ib_cm(self) -> str | None:
        """What there is to say if the kernel's own connection manager has the port: it has its counters there then."""
        if not (self._folder / "cm_rx_msgs").exists():
            return None
        try:
            users = ", ".join(sorted(os.listdir(self._sys / "module/ib_cm/holders"))) or "nothing"
        except OSError:
            users = "unknown modules"
        return (
            f"the CM class of {self.name} is taken: the host's module ib_cm has it (in use by {users})."
            " VMs of this hub reach each other, and not the network. Choose: unload ib_cm and what uses it"
            " (modprobe -r rdma_ucm rdma_cm ib_cm) and, if the host needs it, load it again once the hub runs: it then"
            " leaves this device to the hub and serves the others; or give the VMs an RDMA device of their own, with"
            " its hub started before ib_cm is loaded; see docs/mad-relay.md"
        )


class _Agent:
    """An open umad file with its one agent."""

    def __init__(self, kernel: Kernel, fd: int, agent: int, gids: GidTable) -> None:
        self.fd = fd
        self._kernel, self._agent, self._gids = kernel, agent, gids

    def close(self) -> None:
        """Give the agent back; may wait for what it is sending."""
        try:
            self._kernel.ioctl(self.fd, UNREGISTER_AGENT, self._agent.to_bytes(4, "little"))
        except OSError:
            pass  # the device is gone, and the agent with it
        finally:
            self._kernel.close(self.fd)


class UmadReceiver(_Agent):
    """Owner of the CM class.

    Attributes:
        fd: readable when there is something to receive.
        reports: sends that the kernel reported back, without an answer.
    """

    reports = 0

    def receive(self) -> list[Datagram]:
        """What has come, READ_BATCH at most; `dgid` is zeros where the kernel does not tell.

        Raises:
            UmadError: the device is gone, or does not let us read: close this and open another.
        """
        datagrams = []
        for _ in range(READ_BATCH):
            try:
                data = self._kernel.read(self.fd, READ_BYTES)
            except BlockingIOError:
                break
            except OSError as e:
                raise UmadError(f"reading from umad failed: {e.strerror}") from e
            if len(data) < USER_MAD_HDR.size:
                raise UmadError(f"umad gave {len(data)} bytes")
            header = USER_MAD_HDR.unpack_from(data)
            if header.status:
                self.reports += 1
            else:
                datagrams.append(self._datagram(header, data[USER_MAD_HDR.size :]))
        return datagrams

    def _datagram(self, header: UserMadHdr, mad: bytes) -> Datagram:
        ours = self._gids.entry(header.gid_index) if header.grh_present else None
        dgid, gid_type = ours or (NO_GID, ROCE_V2)
        network_type = network_hdr_type(header.gid, dgid, roce_v2=gid_type == ROCE_V2)
        return Datagram(
            sgid=header.gid if header.grh_present else NO_GID,
            dgid=dgid,
            payload=mad[:MAD_SIZE],
            src_qp=int.from_bytes(header.qpn, "big"),
            flow_label=int.from_bytes(header.flow_label, "big") & 0xFFFFF,
            pkey_index=header.pkey_index,
            sl=header.sl,
            traffic_class=header.traffic_class,
            hop_limit=header.hop_limit,
            network_type=int(network_type),
        )


class UmadSender(_Agent):
    """Sends from any GID of the port."""

    def send(self, gid_type: int, datagram: Datagram) -> None:
        """Send `datagram`; may wait a second for the destination's link address.

        Raises:
            UmadError: it cannot be sent.
            SendBusy: it cannot be sent just now.
        """
        index = self._gids.index_of(datagram.sgid, gid_type)
        if index is None:
            raise UmadError(
                f"GID {datagram.sgid.hex(':', 2)} (RoCE v{gid_type}) is not in the host's table:"
                " give its address to the device's netdev (--gid-policy add does)"
            )
        header = UserMadHdr(
            id=self._agent,
            status=0,
            timeout_ms=0,
            retries=0,
            length=USER_MAD_HDR.size + MAD_SIZE,
            qpn=datagram.dst_qp.to_bytes(4, "big"),
            qkey=QP1_QKEY.to_bytes(4, "big"),
            lid=bytes(2),
            sl=datagram.sl,
            path_bits=0,
            grh_present=1,
            gid_index=index,
            hop_limit=datagram.hop_limit,
            traffic_class=datagram.traffic_class,
            gid=datagram.dgid,
            flow_label=(datagram.flow_label & 0xFFFFF).to_bytes(4, "big"),
            pkey_index=datagram.pkey_index,
        )
        try:
            self._kernel.write(
                self.fd, USER_MAD_HDR.pack(header) + datagram.payload.ljust(MAD_SIZE, b"\0")
            )
        except OSError as e:
            if e.errno in (errno.EINVAL, errno.EAGAIN):
                raise SendBusy(f"umad: {e.strerror}") from e
            raise UmadError(f"umad to {datagram.dgid.hex(':', 2)}: {e.strerror}") from e

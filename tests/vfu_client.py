"""A vfio-user client: our fake QEMU. Sends what QEMU's client sends, and lets tests send what it never would.

Contract: blocking, with a timeout on every receive; one request at a time unless `send` is used alone. All values are
in the protocol's own terms (little-endian integers, errno numbers). Independent of the server's code on purpose.

Source: the vfio-user specification (QEMU docs/interop/vfio-user.rst) and linux/vfio.h.
"""

import array
import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

VERSION = 1
DMA_MAP = 2
DMA_UNMAP = 3
DEVICE_GET_INFO = 4
DEVICE_GET_REGION_INFO = 5
DEVICE_GET_IRQ_INFO = 7
DEVICE_SET_IRQS = 8
REGION_READ = 9
REGION_WRITE = 10
DEVICE_RESET = 13

HEADER = struct.Struct("<HHIII")
FLAG_REPLY = 0x1
FLAG_NO_REPLY = 0x10
FLAG_ERROR = 0x20

DMA_READ = 0x1
DMA_WRITE = 0x2
UNMAP_ALL = 0x2

CONFIG_REGION = 7
IRQ_INTX = 0
IRQ_MSIX = 2
IRQ_DATA_NONE = 0x1
IRQ_DATA_BOOL = 0x2
IRQ_DATA_EVENTFD = 0x4
IRQ_MASK = 0x8
IRQ_UNMASK = 0x10
IRQ_TRIGGER = 0x20

REGION_FLAG_READ = 0x1
REGION_FLAG_WRITE = 0x2
REGION_FLAG_MMAP = 0x4
REGION_FLAG_CAPS = 0x8
_CAP_SPARSE_MMAP = 1


class VfioError(OSError):
    """The server's error reply; `errno` is what it carried."""


class Reply(NamedTuple):
    """A reply's header fields, body and file descriptors."""

    msg_id: int
    command: int
    flags: int
    error: int
    body: bytes
    fds: tuple[int, ...]


class RegionInfo(NamedTuple):
    """GET_REGION_INFO's answer, sparse areas as (offset, size), and the descriptors that came with it."""

    flags: int
    size: int
    offset: int
    areas: tuple[tuple[int, int], ...]
    fds: tuple[int, ...]


def pack(
    command: int, body: bytes = b"", *, msg_id: int = 0, flags: int = 0, size: int | None = None
) -> bytes:
    """A message; `size` replaces the true one in the header."""
    length = HEADER.size + len(body) if size is None else size
    return HEADER.pack(msg_id, command, length, flags, 0) + body


def version_body(
    capabilities: dict[str, object] | None = None, *, major: int = 0, minor: int = 0
) -> bytes:
    """What QEMU sends first."""
    if capabilities is None:
        capabilities = {
            "max_msg_fds": 8,
            "max_data_xfer_size": 1 << 20,
            "pgsizes": 4096,
            "max_dma_maps": 65535,
            "migration": {"pgsize": 4096},
        }
    text = json.dumps({"capabilities": capabilities}).encode()
    return struct.pack("<HH", major, minor) + text + b"\0"


class VfuClient:
    """A connection to a vfio-user server.

    Args:
        path: the server's socket.
        timeout_s: how long any reply may take.
        negotiate: exchange versions at once.
    """

    def __init__(self, path: str, *, timeout_s: float = 10.0, negotiate: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout_s)
        self._next_id = 1
        try:
            self.sock.connect(path)
            self.server_capabilities: dict[str, object] = self.negotiate() if negotiate else {}
        except BaseException:
            self.sock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    # -- messages ----------------------------------------------------------------------------------------------

    def send(
        self,
        command: int,
        body: bytes = b"",
        *,
        fds: Sequence[int] = (),
        flags: int = 0,
        size: int | None = None,
    ) -> int:
        """Send a message and do not wait; returns its id."""
        msg_id = self._next_id
        self._next_id = (msg_id + 1) & 0xFFFF
        message = pack(command, body, msg_id=msg_id, flags=flags, size=size)
        if fds:
            socket.send_fds(self.sock, [message], fds)
        else:
            self.sock.sendall(message)
        return msg_id

    def receive(self) -> Reply:
        """The next reply.

        Raises:
            ConnectionError: the server hung up.
        """
        head, fds = self._receive_exactly(HEADER.size)
        msg_id, command, size, flags, error = HEADER.unpack(head)
        body, more = self._receive_exactly(size - HEADER.size)
        return Reply(msg_id, command, flags, error, body, fds + more)

    def _receive_exactly(self, length: int) -> tuple[bytes, tuple[int, ...]]:
        data = b""
        fds: array.array[int] = array.array("i")
        while len(data) < length:
            space = socket.CMSG_SPACE(16 * fds.itemsize)
            chunk, ancillary, _, _ = self.sock.recvmsg(
                length - len(data), space, socket.MSG_CMSG_CLOEXEC
            )
            if not chunk:
                raise ConnectionResetError("the server hung up")
            data += chunk
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
        return data, tuple(fds)

    def request(self, command: int, body: bytes = b"", *, fds: Sequence[int] = ()) -> Reply:
        """Send a message and wait for its reply.

        Raises:
            VfioError: the reply is an error.
            ConnectionError: the server hung up.
        """
        msg_id = self.send(command, body, fds=fds)
        reply = self.receive()
        assert reply.msg_id == msg_id
        assert reply.command == command
        assert reply.flags & FLAG_REPLY
        if reply.flags & FLAG_ERROR:
            raise VfioError(reply.error, os.strerror(reply.error))
        return reply

    def hung_up(self) -> bool:
        """Wait for the end of the connection; False when something else arrives."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def negotiate(self, body: bytes | None = None) -> dict[str, object]:
        """Exchange versions; returns the server's capabilities."""
        reply = self.request(VERSION, version_body() if body is None else body).body
        major, _ = struct.unpack_from("<HH", reply)
        assert major == 0
        capabilities: dict[str, object] = json.loads(reply[4:].rstrip(b"\0"))["capabilities"]
        return capabilities

    # -- device ------------------------------------------------------------------------------------------------

    def device_info(self) -> tuple[int, int, int]:
        """Flags, number of regions, number of interrupt kinds."""
        _, flags, regions, irqs = struct.unpack(
            "<IIII", self.request(DEVICE_GET_INFO, _zeros(16)).body
        )
        return flags, regions, irqs

    def region_info(self, index: int) -> RegionInfo:
        """As QEMU asks: first for the fixed part, then for all of it."""
        argsz = 32
        while True:
            body = struct.pack("<IIIIQQ", argsz, 0, index, 0, 0, 0)
            reply = self.request(DEVICE_GET_REGION_INFO, body)
            needed, flags, _, cap, size, offset = struct.unpack_from("<IIIIQQ", reply.body)
            if needed <= argsz:
                areas = _sparse_areas(reply.body, cap) if flags & REGION_FLAG_CAPS else ()
                return RegionInfo(flags, size, offset, areas, reply.fds)
            argsz = needed

    def irq_count(self, index: int) -> int:
        """Number of vectors of an interrupt kind."""
        body = struct.pack("<IIII", 16, 0, index, 0)
        count: int = struct.unpack("<IIII", self.request(DEVICE_GET_IRQ_INFO, body).body)[3]
        return count

    def set_irqs(
        self,
        index: int,
        flags: int,
        start: int,
        count: int,
        *,
        fds: Sequence[int] = (),
        data: bytes = b"",
    ) -> None:
        """SET_IRQS."""
        body = struct.pack("<IIIII", 20 + len(data), flags, index, start, count) + data
        self.request(DEVICE_SET_IRQS, body, fds=fds)

    def arm(self, index: int, start: int, eventfds: Sequence[int]) -> None:
        """Give vectors their eventfds."""
        flags = IRQ_DATA_EVENTFD | IRQ_TRIGGER
        self.set_irqs(index, flags, start, len(eventfds), fds=eventfds)

    def disarm(self, index: int) -> None:
        """Take all eventfds of a kind away."""
        self.set_irqs(index, IRQ_DATA_NONE | IRQ_TRIGGER, 0, 0)

    def reset(self) -> None:
        """DEVICE_RESET."""
        self.request(DEVICE_RESET)

    # -- regions -----------------------------------------------------------------------------------------------

    def read(self, region: int, offset: int, length: int) -> bytes:
        """REGION_READ."""
        body = self.request(REGION_READ, struct.pack("<QII", offset, region, length)).body
        assert struct.unpack_from("<QII", body) == (offset, region, length)
        return body[16:]

    def write(self, region: int, offset: int, data: bytes) -> None:
        """REGION_WRITE, and wait until it is done."""
        self.request(REGION_WRITE, struct.pack("<QII", offset, region, len(data)) + data)

    def post_write(self, region: int, offset: int, data: bytes) -> None:
        """REGION_WRITE without a reply, as QEMU writes when nothing of the device is mappable."""
        body = struct.pack("<QII", offset, region, len(data)) + data
        self.send(REGION_WRITE, body, flags=FLAG_NO_REPLY)

    def read_u32(self, region: int, offset: int) -> int:
        """A 32-bit register."""
        return int.from_bytes(self.read(region, offset, 4), "little")

    def write_u32(self, region: int, offset: int, value: int) -> None:
        """A 32-bit register, synchronously."""
        self.write(region, offset, value.to_bytes(4, "little"))

    def set_command(self, value: int) -> None:
        """The PCI command register."""
        self.write(CONFIG_REGION, 4, value.to_bytes(2, "little"))

    def capability(self, wanted: int) -> int:
        """The offset of a PCI capability; 0 when there is none."""
        config = self.read(CONFIG_REGION, 0, 256)
        offset = config[0x34]
        while offset and config[offset] != wanted:
            offset = config[offset + 1]
        return offset

    def enable_msix(self, *, enabled: bool = True) -> None:
        """The enable bit of the MSI-X capability."""
        flags = self.capability(0x11) + 2
        value = int.from_bytes(self.read(CONFIG_REGION, flags, 2), "little") & 0x7FFF
        self.write(CONFIG_REGION, flags, (value | enabled << 15).to_bytes(2, "little"))

    # -- memory ------------------------------------------------------------------------------------------------

    def dma_map(
        self,
        iova: int,
        length: int,
        *,
        fd: int | None = None,
        offset: int = 0,
        flags: int = DMA_READ | DMA_WRITE,
    ) -> None:
        """DMA_MAP, with a descriptor when there is memory behind it."""
        body = struct.pack("<IIQQQ", 32, flags, offset, iova, length)
        self.request(DMA_MAP, body, fds=() if fd is None else (fd,))

    def dma_unmap(self, iova: int, length: int, *, flags: int = 0) -> None:
        """DMA_UNMAP."""
        self.request(DMA_UNMAP, struct.pack("<IIQQ", 24, flags, iova, length))


def _zeros(argsz: int) -> bytes:
    return argsz.to_bytes(4, "little") + bytes(argsz - 4)


def _sparse_areas(body: bytes, cap: int) -> tuple[tuple[int, int], ...]:
    while cap:
        kind, _, following, count, _ = struct.unpack_from("<HHIII", body, cap)
        if kind == _CAP_SPARSE_MMAP:
            pairs = struct.iter_unpack("<QQ", body[cap + 16 : cap + 16 + 16 * count])
            return tuple((offset, size) for offset, size in pairs)
        cap = following
    return ()


def wait_event(eventfd: int, timeout_s: float = 5.0) -> int:
    """Take an eventfd's count; 0 when nothing comes within the time."""
    # Not select(): it ends at descriptor 1024.
    poll = select.poll()
    poll.register(eventfd, select.POLLIN)
    return os.eventfd_read(eventfd) if poll.poll(timeout_s * 1000) else 0

"""The UNIX socket below libvfio-user: a listening socket of our own, and messages looked at before the library reads.

Contract: nothing here blocks, whatever the client does. libvfio-user reads a message's body with a blocking recv, loses
step with the stream after a short read, and trusts some lengths; so a message is handed to it only when it has arrived
whole and its frame is sound. A client that breaks the framing raises `TransportError` and loses its connection.

Source: include/vfio-user.h (struct vfio_user_header, vfio_user_dma_map, vfio_user_dma_unmap) and linux/vfio.h
(struct vfio_irq_set).
"""

import array
import contextlib
import fcntl
import os
import select
import socket
import struct
import tempfile
import termios
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Final

from pvrdma_server.errors import ConfigError, TransportError

VERSION: Final = 1
DMA_MAP: Final = 2
DMA_UNMAP: Final = 3
DEVICE_SET_IRQS: Final = 8
REGION_WRITE_MULTI: Final = 15

HEADER_SIZE: Final = 16
# A guest's access is 8 bytes, QEMU's largest message a few hundred. Stops a client that never completes a message
# larger than the socket's buffer.
MAX_MESSAGE: Final = 128 * 1024
# Stops a client from making us keep its greeting.
MAX_VERSION_MESSAGE: Final = 4096
# libvfio-user takes at most this many descriptors per message.
_MAX_FDS: Final = 16
_PEEK_SIZE: Final = 4096
_PEEK: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT
_TYPE_MASK: Final = 0xF
_GONE: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_HEADER = struct.Struct("<HHII")
_DMA_MAP = struct.Struct("<IIQQQ")
_DMA_UNMAP = struct.Struct("<IIQQ")
_IRQ_SET = struct.Struct("<IIIII")


class Arrival(Enum):
    """What is waiting in a connection."""

    NOTHING = 0
    PART = 1
    WHOLE = 2
    CLOSED = 3


# Fixed parts that must be there and visible: libvfio-user reads some before it compares the length.
_FIXED_BODY: dict[int, int] = {
    DMA_MAP: _DMA_MAP.size,
    DMA_UNMAP: _DMA_UNMAP.size,
    DEVICE_SET_IRQS: _IRQ_SET.size,
}


def _check_body(command: int, body: memoryview) -> None:
    if len(body) < _FIXED_BODY[command]:
        raise TransportError(f"command {command} with a body of {len(body)} bytes")
    if command == DEVICE_SET_IRQS:
        _, _, _, start, count = _IRQ_SET.unpack_from(body)
        if start + count >= 1 << 32:  # wraps in libvfio-user, which then indexes past its table
            raise TransportError("SET_IRQS with a range that wraps")


class MessagePeeker:
    """Looks at the next message of a connection without taking it.

    Attributes:
        command: the command of the message that `look` found.
        size: its length in bytes, header included.
    """

    __slots__ = ("_bytes", "_limit", "_sock", "_view", "command", "size")

    def __init__(self, sock: socket.socket, limit: int = MAX_MESSAGE) -> None:
        self._sock = sock
        self._limit = limit
        self._bytes = bytearray(_PEEK_SIZE)
        self._view = memoryview(self._bytes)
        self.command = self.size = 0

    def look(self) -> Arrival:
        """What is waiting.

        Raises:
            TransportError: the client does not speak vfio-user.
        """
        try:
            seen = self._sock.recv_into(self._bytes, _PEEK_SIZE, _PEEK)
        except BlockingIOError:
            return Arrival.NOTHING
        except OSError:
            return Arrival.CLOSED
        if seen < HEADER_SIZE:
            return self._part() if seen else Arrival.CLOSED
        _, self.command, self.size, flags = _HEADER.unpack_from(self._bytes)
        if flags & _TYPE_MASK or not HEADER_SIZE <= self.size <= self._limit:
            raise TransportError(f"not a request: flags {flags:#x}, size {self.size}")
        if self.size > seen and self._queued() < self.size:
            return self._part()
        if self.command in _FIXED_BODY:
            _check_body(self.command, self._view[HEADER_SIZE : min(seen, self.size)])
        return Arrival.WHOLE

    def _part(self) -> Arrival:
        if is_gone(self._sock):
            raise TransportError("the client went away within a message")
        return Arrival.PART

    def _queued(self) -> int:
        count = array.array("i", [0])
        fcntl.ioctl(self._sock, termios.FIONREAD, count)
        return count[0]

    def dma_offset(self) -> int:
        """The file offset (bytes) of the DMA_MAP that `look` found."""
        offset: int = _DMA_MAP.unpack_from(self._bytes, HEADER_SIZE)[2]
        return offset

    @contextlib.contextmanager
    def borrowed_fd(self) -> Iterator[int | None]:
        """A duplicate of the first descriptor that travels with the message, closed at the end of the block."""
        fds = array.array("i")
        space = socket.CMSG_SPACE(_MAX_FDS * fds.itemsize)
        with contextlib.ExitStack() as stack:
            flags = _PEEK | socket.MSG_CMSG_CLOEXEC
            _, ancillary, _, _ = self._sock.recvmsg(HEADER_SIZE, space, flags)
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            for fd in fds:
                stack.callback(os.close, fd)
            yield fds[0] if fds else None


def is_gone(sock: socket.socket) -> bool:
    """Whether the other end has hung up; what it sent before may still wait here."""
    poller = select.poll()
    poller.register(sock, _GONE)
    return bool(poller.poll(0))


def hang_up(sock: socket.socket) -> None:
    """End a connection so that its next read is the end: what the client already sent is thrown away."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
        while sock.recv(MAX_MESSAGE, socket.MSG_DONTWAIT):
            pass


def peer_pid(sock: socket.socket) -> int:
    """The process at the other end; 0 when it is outside of our PID namespace."""
    pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


@contextlib.contextmanager
def private_path() -> Iterator[str]:
    """A socket path that only we can reach and that is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="pvrdma-") as folder:
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{fd}/s"  # short, wherever TMPDIR is
        finally:
            os.close(fd)


def plant_connection(listen_fd: int) -> socket.socket:
    """Have the next accept on descriptor number `listen_fd` return the other end of the socket returned here.

    `listen_fd` is libvfio-user's; its listening socket is replaced by a private one that nobody else can reach.
    """
    with (
        private_path() as path,
        socket.socket(socket.AF_UNIX) as listener,
        contextlib.ExitStack() as stack,
    ):
        listener.setblocking(False)
        listener.bind(path)
        listener.listen(1)
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(path)
        os.dup2(listener.fileno(), listen_fd, inheritable=False)
        client.setblocking(False)
        stack.pop_all()
        return client


class Listener:
    """The socket clients connect to: bound to a path here, or inherited (systemd) as a descriptor.

    Args:
        path: where to listen; None with `fd`.
        fd: a listening socket, taken over; its path is not ours to remove.

    Raises:
        ConfigError: the path is too long, or cannot be bound.
        TransportError: it is in use by a live server.
    """

    def __init__(self, path: str | None, fd: int | None = None) -> None:
        if (path is None) == (fd is None):
            raise TransportError(
                "exactly one of a socket path and a listening descriptor is needed"
            )
        self._path: Path | None = None
        self.socket = _bind(path) if path is not None else socket.socket(fileno=fd)
        if path is not None:
            self._path, self._inode = Path(path), os.stat(path).st_ino
        self.socket.setblocking(False)

    def close(self) -> None:
        """Stop listening, and remove the path unless another server has taken it."""
        self.socket.close()
        path, self._path = self._path, None
        with contextlib.suppress(OSError):
            if path is not None and path.stat().st_ino == self._inode:
                path.unlink()


def _bind(path: str) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        sock.listen(16)
    except OSError as error:
        sock.close()
        raise _refusal(path, error) from error
    return sock


def _remove_stale(path: str) -> None:
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # alive, its backlog is full
        except OSError as error:
            raise _refusal(path, error) from error
    raise TransportError(
        f"cannot listen on {path}: another server listens there; stop it, or choose another path"
    )


def _refusal(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {path}: {error.strerror or error}; its folder must exist and be writable, and the path "
        "must be free and not longer than 107 bytes"
    )

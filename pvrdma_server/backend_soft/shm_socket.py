"""Sockets between servers: who is at the other end, and the greeting that comes out of one with its ring.

Contract: nothing blocks; `receive_hello_untrusted` closes every descriptor that came.
"""

import mmap
import os
import select
import socket
import struct

from pvrdma_server.backend_soft.shm_hello import (
    HELLO_BYTES,
    BadHello,
    Hello,
    parse_hello_untrusted,
)
from pvrdma_server.backend_soft.shm_memory import map_ring_untrusted


class HungUp(BadHello):
    """It left without a word."""


def receive_hello_untrusted(sock: socket.socket) -> tuple[Hello, mmap.mmap]:
    """A peer's greeting and its ring, mapped.

    Raises:
        GuestError: anything is wrong with them.
        BlockingIOError: nothing has come.
    """
    try:
        data, fds, _, _ = socket.recv_fds(
            sock, HELLO_BYTES + 1, 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        raise
    except OSError as e:
        raise BadHello(e.strerror or str(e)) from None
    try:
        if not data:
            raise HungUp("hung up")
        hello = parse_hello_untrusted(data)
        if len(fds) != 1:
            raise BadHello(f"{len(fds)} descriptors")
        return hello, map_ring_untrusted(fds[0], hello.ring_bytes)
    finally:
        for fd in fds:
            os.close(fd)


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end, by the kernel's word."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def is_gone(sock: socket.socket) -> bool:
    """Whether the other end has hung up."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(poller.poll(0))

"""The status socket: whoever connects gets one JSON document about the running server, and the connection is closed.

Contract: read-only. A reader that does not read is dropped after a moment; it holds up nobody.
"""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from pvrdma_server.errors import ConfigError

# A reader that does not take the document for so long is dropped.
WRITE_TIMEOUT_S: Final = 5.0
# Readers that wait to be served; stops somebody from exhausting our descriptors.
BACKLOG: Final = 16


def process_facts() -> dict[str, int]:
    """What this process holds: for leak checks from outside."""
    return {
        "pid": os.getpid(),
        "fds": len(os.listdir("/proc/self/fd")) - 1,
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
    }


async def serve_status(path: str, snapshot: Callable[[], dict[str, Any]]) -> None:
    """Serve `snapshot` on a UNIX socket at `path`, one reader after the other, until cancelled.

    Raises:
        ConfigError: the path cannot be had.
    """
    with _listen(path) as listener:
        try:
            while True:
                stream, _ = await listener.accept()
                await _answer(trio.SocketStream(stream), snapshot())
        finally:
            Path(path).unlink(missing_ok=True)


async def _answer(stream: trio.SocketStream, document: dict[str, Any]) -> None:
    try:
        async with stream:
            with trio.move_on_after(WRITE_TIMEOUT_S):
                await stream.send_all(json.dumps(document).encode() + b"\n")
    except trio.BrokenResourceError:
        structlog.get_logger(component="status").debug("status_reader_gone")


def _listen(path: str) -> trio.socket.SocketType:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # One server of a VM runs at a time (the vfio-user socket sees to it), so what stands here is stale.
        Path(path).unlink(missing_ok=True)
        listener.bind(path)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"status socket {path}: {e.strerror}; choose another --status-socket"
        ) from e
    return trio.socket.from_stdlib_socket(listener)


def read_status(path: str) -> dict[str, Any]:
    """The document of the server whose status socket is `path`, for command-line tools.

    Raises:
        ConfigError: nobody serves there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(WRITE_TIMEOUT_S)
        try:
            client.connect(path)
            document = b"".join(iter(lambda: client.recv(65536), b""))
        except OSError as e:
            raise ConfigError(f"no server answers at {path}: {e.strerror or e}") from e
    status: dict[str, Any] = json.loads(document)
    return status

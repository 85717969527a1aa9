"""The control socket (--status-socket): one request, one reply, both a line of JSON; then the connection is closed.

A request is an object with the name of a command: {"command": "status"}. Whoever connects and says nothing gets the
status after a moment, at once if it ends its sending half: `socat - UNIX:PATH </dev/null`. A reply is an object; where
the request made no sense, or could not be done, it has one key, "error".

Contract: only our user and root can connect. Who is slow, in asking or in reading, is dropped after a while, and holds
up nobody; a request that is too long is refused. Nothing that is sent here ends the server.
"""

import errno
import json
import os
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import trio

from pvrdma_server.errors import ConfigError

# How long a whole exchange may take.
EXCHANGE_TIMEOUT_S: Final = 5.0
# A client that has said nothing for so long wants the status.
SILENCE_S: Final = 0.2
# Stops a client from making us keep its request.
MAX_REQUEST_BYTES: Final = 4096
# Clients that are served at the same time and that wait to be; stop somebody from exhausting our descriptors.
MAX_CLIENTS: Final = 8
BACKLOG: Final = 16
# A reply of a server that has gone mad; the largest real ones have some MiB.
_MAX_REPLY_BYTES: Final = 64 << 20
# struct timeval: longer than an exchange and those before it may take.
_ASK_TIMEOUT: Final = struct.pack("ll", int(4 * EXCHANGE_TIMEOUT_S), 0)

Command = Callable[[dict[str, Any]], dict[str, Any]]
Commands = Mapping[str, Command]


class RefusedRequest(Exception):
    """A command cannot do what its request asks; the text goes to the client."""


def process_facts() -> dict[str, int | float]:
    """What this process holds and has used: for leak checks from outside, and for rates."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "pid": os.getpid(),
        "fds": len(os.listdir("/proc/self/fd")) - 1,
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
    }


async def serve_control(
    path: str,
    commands: Commands,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `commands` on a UNIX socket at `path` until cancelled; they run in between of everything else.

    Raises:
        ConfigError: the path cannot be had.
    """

    async def client(stream: trio.SocketStream) -> None:
        await _serve_client(stream, commands)

    await serve_clients(listen_unix(path, 0o600, "--status-socket"), client, task_status)


async def serve_clients(
    listener: trio.socket.SocketType,
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    task_status: trio.TaskStatus[None],
) -> None:
    """Have `serve` serve some clients at a time; others wait in the backlog. Removes the socket's path at the end."""
    room = trio.Semaphore(MAX_CLIENTS)

    async def client(stream: trio.SocketStream) -> None:
        try:
            async with stream:
                with trio.move_on_after(EXCHANGE_TIMEOUT_S), suppress(trio.BrokenResourceError):
                    await serve(stream)
        finally:
            room.release()

    with listener:
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    await room.acquire()
                    stream, _ = await listener.accept()
                    nursery.start_soon(client, trio.SocketStream(stream))
        finally:
            if listener.family == socket.AF_UNIX:
                Path(listener.getsockname()).unlink(missing_ok=True)


async def _serve_client(stream: trio.SocketStream, commands: Commands) -> None:
    reply = answer(await _receive_line(stream), commands)
    await stream.send_all(json.dumps(reply).encode() + b"\n")


async def _receive_line(stream: trio.SocketStream) -> bytes:
    """The request; empty for a client that says nothing, too long for one that says too much."""
    line = b""
    with trio.move_on_after(SILENCE_S) as silence:
        line = await stream.receive_some(MAX_REQUEST_BYTES + 1)
    if silence.cancelled_caught or not line:
        return b""
    while b"\n" not in line and len(line) <= MAX_REQUEST_BYTES:
        more = await stream.receive_some(MAX_REQUEST_BYTES + 1 - len(line))
        if not more:
            break
        line += more
    return line.partition(b"\n")[0] if len(line) <= MAX_REQUEST_BYTES else line


def answer(line: bytes, commands: Commands) -> dict[str, Any]:
    """The reply to a request line (without its end); an empty one asks for the status."""
    if len(line) > MAX_REQUEST_BYTES:
        return {"error": f"the request is longer than {MAX_REQUEST_BYTES} bytes"}
    if not line.strip():
        return commands["status"]({})
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as e:
        return {"error": f"the request is not JSON: {e}"}
    name = request.get("command") if isinstance(request, dict) else None
    command = commands.get(name) if isinstance(name, str) else None
    if command is None:
        return {"error": f'"command" must be one of: {", ".join(sorted(commands))}'}
    try:
        return command(request)
    except RefusedRequest as e:
        return {"error": str(e)}


def answers(path: str) -> bool:
    """Whether a server listens there; found out without a connection, which would take up a client's place."""
    return _look(path) == errno.EPROTOTYPE


def _look(path: str) -> int:
    """The errno of a connect of the wrong type: the kernel looks whether somebody is there before it refuses that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            return probe.connect_ex(path)
        except OSError:
            return errno.ENAMETOOLONG  # Python itself looks at the length


def listen_unix(path: str, mode: int, option: str) -> trio.socket.SocketType:
    """A listening UNIX socket at `path`, with the file mode `mode`. `option` is what errors tell to change.

    Raises:
        ConfigError: the path cannot be had.
    """
    if answers(path):
        raise ConfigError(
            f"cannot listen on {path}: a server listens there; stop it, or choose another {option}"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Before bind, the descriptor's mode is what the file will be made with: there is no moment of another.
        os.fchmod(listener.fileno(), mode)
        if _look(path) == errno.ECONNREFUSED and Path(path).is_socket():
            Path(path).unlink(missing_ok=True)  # left over
        listener.bind(path)
        # What the umask took away, is given back.
        os.chmod(path, mode)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"cannot listen on {path}: {e.strerror or e}; its folder must exist and be writable, "
            f"and the path must be free and not longer than 107 bytes, or choose another {option}"
        ) from e
    return trio.socket.from_stdlib_socket(listener)


# --- the other side --------------------------------------------------------------------------------------------------


def ask(path: str, command: str, **arguments: Any) -> dict[str, Any]:
    """The reply of the server whose control socket is `path`, for command-line tools.

    Raises:
        ConfigError: nobody serves there, or the server refuses.
    """
    request = json.dumps({"command": command, **arguments}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        # Not settimeout: with it a connect fails at once where others wait to be served.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            client.setsockopt(socket.SOL_SOCKET, option, _ASK_TIMEOUT)
        try:
            client.connect(path)
            client.sendall(request)
            document = _read_all(client)
        except OSError as e:
            raise ConfigError(f"no server answers at {path}: {e.strerror or e}; {_why(e)}") from e
    try:
        reply = json.loads(document)
    except ValueError as e:
        raise ConfigError(f"what answers at {path} is no pvrdma-server: {e}") from e
    if not isinstance(reply, dict):
        raise ConfigError(f"what answers at {path} is no pvrdma-server: it sent no object")
    if "error" in reply:
        raise ConfigError(f"the server at {path} refuses {command}: {reply['error']}")
    return reply


def _read_all(client: socket.socket) -> bytes:
    parts = []
    size = 0
    while part := client.recv(1 << 20):
        parts.append(part)
        size += len(part)
        if size > _MAX_REPLY_BYTES:
            raise OSError(None, f"its reply does not end after {size} bytes")
    return b"".join(parts)


def _why(error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return "is the server running, with this --status-socket?"
        case ConnectionResetError() | BrokenPipeError():
            return "it is no --status-socket, or its server ends"
        case ConnectionRefusedError():
            return "the socket is left over from a server that ended"
        case BlockingIOError():
            return "it does not answer in time: others ask it, or it hangs"
        case PermissionError():
            return "become the server's user, or root"
    return "look at the server's log"


def read_status(path: str) -> dict[str, Any]:
    """The status of the server whose control socket is `path`.

    Raises:
        ConfigError: nobody serves there.
    """
    return ask(path, "status")

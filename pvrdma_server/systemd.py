"""What systemd passes to a service and wants to hear from it: sockets, notifications, the watchdog, the journal.

Contract: everything is read from the environment that is given; a service that systemd did not start sees nothing.
Notifications are datagrams that are sent at once or dropped: a manager that does not listen holds up nobody.

Source: sd_listen_fds(3), sd_notify(3), sd_watchdog_enabled(3), sd-daemon(3), systemd.exec(5) $JOURNAL_STREAM.
"""

import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Final

from pvrdma_server.errors import ConfigError

# Source: SD_LISTEN_FDS_START.
FIRST_FD: Final = 3
_MICROSECOND: Final = 1e-6


def take_listening_fd(environment: MutableMapping[str, str]) -> int | None:
    """The listening socket that a socket unit passes to us, if there is one; the variables are removed.

    Raises:
        ConfigError: there are several, or it is no listening UNIX stream socket.
    """
    meant_for_us = environment.get("LISTEN_PID") == str(os.getpid())
    count = environment.get("LISTEN_FDS", "0")
    names = environment.get("LISTEN_FDNAMES", "")
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"):
        environment.pop(name, None)
    if not meant_for_us or count == "0":
        return None
    if count != "1":
        raise ConfigError(
            f"the socket unit passes {count} sockets ({names}); one is needed, with one ListenStream="
        )
    check_listening(FIRST_FD, "the socket unit")
    return FIRST_FD


def check_listening(fd: int, origin: str) -> str:
    """The path on which descriptor `fd` listens; empty for a socket without one.

    Raises:
        ConfigError: it is no listening UNIX stream socket.
    """
    try:
        with socket.socket(fileno=os.dup(fd)) as probe:
            listens = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if probe.family == socket.AF_UNIX and probe.type == socket.SOCK_STREAM and listens:
                return str(probe.getsockname())
    except OSError as e:
        raise ConfigError(f"descriptor {fd} of {origin} is no socket: {e.strerror}") from e
    raise ConfigError(
        f"descriptor {fd} of {origin} is no listening UNIX stream socket "
        "(in a socket unit: ListenStream=/a/path and Accept=no)"
    )


class Notifier:
    """Tells the service manager how we are.

    Args:
        environment: has NOTIFY_SOCKET, if there is a manager that wants to know.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # An address in the abstract namespace is written with @ for its first, zero, byte.
        self._address = "\0" + path[1:] if path.startswith("@") else path

    def ready(self) -> None:
        """We serve."""
        self._send("READY=1")

    def reloading(self) -> None:
        """We read the configuration again; `ready` says when that is done."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={now_us}")

    def stopping(self) -> None:
        """We end."""
        self._send("STOPPING=1")

    def alive(self, status: str) -> None:
        """We do our work; `status` is a line for `systemctl status`."""
        self._send(f"WATCHDOG=1\nSTATUS={status}")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out, suppress(OSError):
            out.setblocking(False)
            out.sendto(message.encode(), self._address)


def watchdog_s(environment: Mapping[str, str]) -> float | None:
    """The time in seconds within which the manager wants to hear from us, or None."""
    usec = environment.get("WATCHDOG_USEC", "")
    pid = environment.get("WATCHDOG_PID", str(os.getpid()))
    if not usec.isdecimal() or int(usec) == 0 or pid != str(os.getpid()):
        return None
    return int(usec) * _MICROSECOND


def is_journal(fd: int, environment: Mapping[str, str]) -> bool:
    """Whether what is written to `fd` goes straight to the journal."""
    try:
        seen = os.fstat(fd)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{seen.st_dev}:{seen.st_ino}"

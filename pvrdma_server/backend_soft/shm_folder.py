"""The folder where the servers of a fabric find one another: who is there, and who owns which GID.

Contract: every call is short and never waits. A server is `ID.sock`, a listening socket; a GID is
`GID.gid`, whose owner holds its lock (so a crash gives it up) and wrote its id and name into it. The
folder's permissions decide who may take part; a file's owner (its uid) is checked against the uid
that the kernel reports for the peer.
"""

import contextlib
import fcntl
import os
import socket
import stat
from errno import EADDRINUSE, EIO
from typing import Final, NamedTuple

from pvrdma_server.backend_soft.shm_hello import is_server_id
from pvrdma_server.errors import BackendError, ConfigError

# Pending connections; more wait at the sender, whose transport repeats.
BACKLOG: Final = 64
# A socket path that always fits, however long the folder's is.
_PATH = "/proc/self/fd/{}/{}"
_MAX_FILE: Final = 256
_CLAIM_TRIES: Final = 8


class Owner(NamedTuple):
    """Who claims a GID: the server's id, its name for people, the uid its file belongs to."""

    server_id: str
    name: str
    uid: int


class FabricFolder:
    """One server's view of the folder.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, path: str, server_id: str, name: str, *, shared: bool) -> None:
        self.path, self.server_id, self.name = path, server_id, name
        self._claims: dict[bytes, int] = {}
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise ConfigError(f"fabric folder {path}: {e.strerror}") from e
        try:
            self._check_mode()
            self._sweep()
            self.listener = self._listen(shared=shared)
        except OSError as e:
            os.close(self._fd)
            raise ConfigError(f"fabric folder {path}: {e.strerror}") from e
        except BaseException:
            os.close(self._fd)
            raise

    def _check_mode(self) -> None:
        mode = os.fstat(self._fd).st_mode
        if mode & stat.S_IWOTH:
            raise ConfigError(
                f"fabric folder {self.path} is writable for everybody; chmod o-w it, or name another"
            )

    def _sweep(self) -> None:
        # Sockets that servers left behind when they were killed.
        for entry in os.listdir(self._fd):
            if entry.endswith(".sock") and self._is_dead(entry):
                with contextlib.suppress(OSError):
                    os.unlink(entry, dir_fd=self._fd)

    def _is_dead(self, entry: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(_PATH.format(self._fd, entry))
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
            return False

    def _listen(self, *, shared: bool) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            # Named only when it listens: a socket that refuses is taken for a dead server's.
            fresh = f".{self.server_id}"
            listener.bind(_PATH.format(self._fd, fresh))
            listener.listen(BACKLOG)
            if shared:
                os.chmod(fresh, 0o666, dir_fd=self._fd)
            os.rename(fresh, f"{self.server_id}.sock", src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            listener.close()
            raise
        return listener

    def connect(self, server_id: str) -> socket.socket | None:
        """A connection to another server, or None when it is not there (or is overrun)."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.connect(_PATH.format(self._fd, f"{server_id}.sock"))
        except OSError:
            sock.close()
            return None
        return sock

    def server_uid(self, server_id: str) -> int | None:
        """The uid a server's socket belongs to; None when there is none."""
        try:
            return os.stat(f"{server_id}.sock", dir_fd=self._fd).st_uid
        except OSError:
            return None

    def owner(self, gid: bytes) -> Owner | None:
        """Who claims `gid`, dead or alive; None when nobody does."""
        try:
            fd = os.open(f"{gid.hex()}.gid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        try:
            return _read_owner(fd)
        finally:
            os.close(fd)

    def claim(self, gid: bytes) -> None:
        """Own `gid`; nothing when we do already.

        Raises:
            BackendError: EADDRINUSE, another server holds it; or the folder cannot be written.
        """
        if gid in self._claims:
            return
        try:
            fd = self._lock(gid)
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{self.server_id}\n{self.name[-64:]}\n".encode(), 0)
            except BaseException:
                os.close(fd)
                raise
        except OSError as e:
            raise BackendError(e.errno or EIO, "add_gid", f"{self.path}: {e.strerror}") from e
        self._claims[gid] = fd

    def _lock(self, gid: bytes) -> int:
        name = f"{gid.hex()}.gid"
        for _ in range(_CLAIM_TRIES):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=self._fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _read_owner(fd)
                os.close(fd)
                raise BackendError(EADDRINUSE, "add_gid", _held(gid, owner, self.path)) from None
            if self._is_current(fd, name):
                return fd
            os.close(fd)  # its owner gave it up, and the name, before we had the lock
        raise BackendError(EADDRINUSE, "add_gid", _held(gid, None, self.path))

    def _is_current(self, fd: int, name: str) -> bool:
        try:
            return os.stat(name, dir_fd=self._fd).st_ino == os.fstat(fd).st_ino
        except FileNotFoundError:
            return False

    def release(self, gid: bytes) -> None:
        """Give `gid` up; nothing when it is not ours."""
        fd = self._claims.pop(gid, None)
        if fd is not None:
            with contextlib.suppress(OSError):
                os.unlink(f"{gid.hex()}.gid", dir_fd=self._fd)
            os.close(fd)

    def leave(self) -> None:
        """Give everything up; does nothing the second time."""
        if self._fd < 0:
            return
        for gid in list(self._claims):
            self.release(gid)
        with contextlib.suppress(OSError):
            os.unlink(f"{self.server_id}.sock", dir_fd=self._fd)
        self.listener.close()
        os.close(self._fd)
        self._fd = -1


def _held(gid: bytes, owner: Owner | None, path: str) -> str:
    return f"{gid.hex(':', 2)} is held by {owner.name if owner else 'another server'} in {path}"


def _read_owner(fd: int) -> Owner | None:
    lines = os.pread(fd, _MAX_FILE, 0).decode("utf-8", "replace").split("\n")
    if len(lines) < 2 or not is_server_id(lines[0]):
        return None
    return Owner(lines[0], lines[1], os.fstat(fd).st_uid)

"""The fabric between the servers of one host: who connects to whom, greetings, and peers that go.

Contract: one thread, nothing blocks. `fd` is readable when `ready` has something to do; it must also be
called after `timeout_s`. Everything that comes over a socket is untrusted; a peer that breaks a rule
loses its link, and nobody else notices.

Of two servers that connect to each other at once, the connection of the one with the lower id stays.
"""

import contextlib
import mmap
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import structlog

from pvrdma_server.backend_soft.carrier import Endpoint
from pvrdma_server.backend_soft.native import Looker
from pvrdma_server.backend_soft.shm_folder import FabricFolder
from pvrdma_server.backend_soft.shm_hello import BadHello, Hello, pack_hello
from pvrdma_server.backend_soft.shm_link import Rings, ShmLink
from pvrdma_server.backend_soft.shm_memory import make_ring_memory
from pvrdma_server.backend_soft.shm_port import ShmPort
from pvrdma_server.backend_soft.shm_ring import CONTROL_BYTES, RING_BYTES
from pvrdma_server.backend_soft.shm_socket import HungUp, is_gone, peer_uid, receive_hello_untrusted
from pvrdma_server.errors import GuestError

# A peer costs three descriptors and two rings: stops a crowd from exhausting them.
MAX_PEERS: Final = 64
# Connections that have not greeted yet: stops somebody from opening them without end.
MAX_GREETINGS: Final = 16
# Stops silent connections from holding those places.
GREETING_NS: Final = 2_000_000_000
# A server that could not be reached is not tried again for so long: stops a guest's retries from
# becoming as many connections.
RETRY_NS: Final = 20_000_000
# While somebody waits for something that may not come.
_TICK_S: Final = 0.02
# Stops a hostile peer from filling the log.
_MAX_WARNINGS: Final = 256
_MAX_EVENTS: Final = 64


@dataclass(slots=True, eq=False)
class _Greeting:
    """A connection without a link that is up. `link`: whom we called; `out`: our ring, already sent."""

    sock: socket.socket
    uid: int
    deadline_ns: int
    link: ShmLink | None = None
    out: mmap.mmap | None = None

    def close(self) -> None:
        self.sock.close()
        if self.out is not None:
            self.out.close()


class _Crossing(BadHello):
    """Two servers called each other, and the other call stays."""


class ShmFabric:
    """A `Fabric` for one endpoint.

    Args:
        path: the folder; made if need be.
        name: of this server, for people.
        uids: users besides ours (and root) whose servers may take part.
        clock_ns: monotonic time.
        ring_bytes: of the rings we send on.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self,
        path: str,
        name: str,
        *,
        uids: Collection[int] = (),
        clock_ns: Callable[[], int] = time.monotonic_ns,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self._id = secrets.token_hex(16)
        self._uids = frozenset((0, os.geteuid(), *uids))
        self._clock_ns, self._ring_bytes = clock_ns, ring_bytes
        self._hello = pack_hello(Hello(self._id, name, ring_bytes))
        self._log: Any = structlog.get_logger(component="fabric")
        self._warnings = 0
        self._port: ShmPort | None = None
        self._folder = FabricFolder(path, self._id, name, shared=bool(uids))
        self._epoll = select.epoll()
        self._kick = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handlers: dict[int, Callable[[], None]] = {}
        self._greetings: dict[int, _Greeting] = {}
        self._sockets: dict[ShmLink, socket.socket] = {}
        self._retry_ns: dict[str, int] = {}
        self._watch(self._kick, self._kicked)
        self._watch(self._folder.listener.fileno(), self._accept)

    @property
    def fd(self) -> int:
        """Readable when `ready` has something to do."""
        return self._epoll.fileno()

    @property
    def timeout_s(self) -> float | None:
        """When to call `ready` even so; None: not until then."""
        return _TICK_S if self._greetings or (self._port and self._port.waits) else None

    def join(self, endpoint: Endpoint) -> ShmPort:
        """Our endpoint; there is one."""
        if self._port is not None:
            raise ValueError("somebody has joined this fabric from here")
        self._port = ShmPort(endpoint, self._folder, self, self._clock_ns)
        return self._port

    def yield_to(self, looker: Looker) -> None:
        """Never wait for a peer while this one has seen that there is something else to do. Close it after us."""
        if self._port is not None:
            self._port.looker = looker

    def ready(self) -> None:
        """Do what there is to do."""
        for fd, _ in self._epoll.poll(0, _MAX_EVENTS):
            # An earlier one may have closed it.
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        now_ns = self._clock_ns()
        for greeting in list(self._greetings.values()):
            if now_ns >= greeting.deadline_ns:
                self._give_up(greeting, "silent")
        if self._port is not None:
            self._port.end_broken()
            self._port.check_stalled(now_ns)

    def close(self) -> None:
        """End everything; does nothing the second time."""
        if self._epoll.closed:
            return
        if self._port is not None:
            self._port.leave()
        for greeting in list(self._greetings.values()):
            self._give_up(greeting, "we leave", quiet=True)
        self._folder.leave()
        self._epoll.close()
        os.close(self._kick)

    def facts(self) -> dict[str, Any]:
        """For status."""
        links = self._port.links.values() if self._port else ()
        return {
            "folder": self._folder.path,
            "id": self._id,
            "greetings": len(self._greetings),
            "peers": [_link_facts(link) for link in links],
        }

    # -- links ------------------------------------------------------------------------------

    def connect(self, server_id: str) -> ShmLink | None:
        """See `Connector`."""
        now_ns, port = self._clock_ns(), self._port
        assert port is not None
        if now_ns < self._retry_ns.get(server_id, 0) or len(port.links) >= MAX_PEERS:
            return None
        if len(self._retry_ns) > MAX_PEERS:
            self._retry_ns.clear()
        self._retry_ns[server_id] = now_ns + RETRY_NS
        sock = self._folder.connect(server_id)
        if sock is None:
            return None
        greeting = _Greeting(sock, peer_uid(sock), now_ns + GREETING_NS)
        if greeting.uid not in self._uids:
            self._refuse(greeting, f"uid {greeting.uid}")
            return None
        greeting.link = link = ShmLink(port, server_id, greeting.uid)
        try:
            greeting.out = self._send_hello(sock)
        except OSError as e:
            self._refuse(greeting, e.strerror or str(e))
            return None
        port.links[server_id] = link
        self._greet(greeting)
        self.kick()
        return link

    def end(self, link: ShmLink, why: str) -> None:
        """See `Connector`."""
        assert self._port is not None
        for greeting in [g for g in self._greetings.values() if g.link is link]:
            greeting.link = None
            self._give_up(greeting, why, quiet=True)
        sock = self._sockets.pop(link, None)
        if sock is not None:
            self._unwatch(sock.fileno())
            log = self._warn if link.broken else self._log.info
            log("peer_gone", peer=link.name, why=why)
        link.close()
        self._port.forget(link)

    def _up(self, link: ShmLink, greeting: _Greeting, into: mmap.mmap, hello: Hello) -> None:
        assert self._port is not None
        assert greeting.out is not None
        sock = greeting.sock
        del self._greetings[sock.fileno()]
        self._unwatch(sock.fileno())
        link.come_up(sock, Rings(greeting.out, into), hello.name)
        self._sockets[link] = sock
        self._watch(sock.fileno(), lambda: self._hear(link))
        self._log.info("peer", peer=hello.name, uid=link.uid)
        link.dropping = False
        self._port.look_at(link)
        self._port.has_room(link)

    def _hear(self, link: ShmLink) -> None:
        port = self._port
        assert port is not None
        if not link.hear_bells():
            self._unwatch(self._sockets[link].fileno())
            link.ending = True
        if link.reader is not None and link.reader.gids_changed():
            port.forget_routes(link)
        link.dropping = False
        port.look_at(link)
        port.has_room(link)

    # -- greetings --------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(MAX_GREETINGS):
            try:
                sock, _ = self._folder.listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            greeting = _Greeting(sock, peer_uid(sock), self._clock_ns() + GREETING_NS)
            if greeting.uid not in self._uids:
                self._refuse(greeting, f"uid {greeting.uid}")
            elif len(self._greetings) >= MAX_GREETINGS:
                self._refuse(greeting, "too many at once")
            else:
                self._greet(greeting)

    def _greet(self, greeting: _Greeting) -> None:
        fd = greeting.sock.fileno()
        self._greetings[fd] = greeting
        self._watch(fd, lambda: self._greeted(greeting))

    def _greeted(self, greeting: _Greeting) -> None:
        try:
            hello, into = receive_hello_untrusted(greeting.sock)
        except HungUp as e:
            # It looked whether we are alive, changed its mind, or crossed our own call.
            self._give_up(greeting, str(e), quiet=True)
            return
        except GuestError as e:
            self._give_up(greeting, str(e))
            return
        except BlockingIOError:
            return
        try:
            greeting.link = link = self._settle_untrusted(greeting, hello)
            if greeting.out is None:
                greeting.out = self._send_hello(greeting.sock)
        except (GuestError, OSError) as e:
            into.close()
            self._give_up(greeting, str(e), quiet=isinstance(e, _Crossing))
            return
        self._up(link, greeting, into, hello)

    def _settle_untrusted(self, greeting: _Greeting, hello: Hello) -> ShmLink:
        """The link that this connection is for."""
        port, link, peer_id = self._port, greeting.link, hello.server_id
        if port is None:
            raise BadHello("nobody is here")
        if link is not None:
            if link.peer_id != peer_id:
                raise BadHello("another server than the one that was called")
            return link
        if peer_id == self._id or self._folder.server_uid(peer_id) != greeting.uid:
            raise BadHello("not the server that it says")
        existing = port.links.get(peer_id)
        if existing is not None and existing.writer is None:
            return self._settle_crossing(existing)
        if existing is not None:
            if not is_gone(self._sockets[existing]):
                raise BadHello("there is a link already")
            self.end(existing, "called again")
        if len(port.links) >= MAX_PEERS:
            raise BadHello("too many peers")
        link = port.links[peer_id] = ShmLink(port, peer_id, greeting.uid)
        return link

    def _settle_crossing(self, link: ShmLink) -> ShmLink:
        if self._id < link.peer_id:
            raise _Crossing("we called each other, and our call stays")
        for ours in [g for g in self._greetings.values() if g.link is link]:
            ours.link = None
            self._give_up(ours, "we called each other", quiet=True)
        return link

    def _send_hello(self, sock: socket.socket) -> mmap.mmap:
        fd = make_ring_memory(self._ring_bytes)
        try:
            ring = mmap.mmap(fd, CONTROL_BYTES + self._ring_bytes)
            try:
                socket.send_fds(sock, [self._hello], [fd], socket.MSG_DONTWAIT)
            except BaseException:
                ring.close()
                raise
        finally:
            os.close(fd)
        return ring

    def _give_up(self, greeting: _Greeting, why: str, *, quiet: bool = False) -> None:
        fd = greeting.sock.fileno()
        if self._greetings.pop(fd, None) is not None:
            self._unwatch(fd)
        link, greeting.link = greeting.link, None
        if quiet:
            greeting.close()
        else:
            self._refuse(greeting, why)
        if link is not None:
            self.end(link, why)

    def _refuse(self, greeting: _Greeting, why: str) -> None:
        greeting.close()
        self._warn("not_a_peer", uid=greeting.uid, why=why)

    def _warn(self, event: str, **values: object) -> None:
        self._warnings += 1
        if self._warnings <= _MAX_WARNINGS:
            self._log.warning(event, **values)

    # -- descriptors ------------------------------------------------------------------------

    def kick(self) -> None:
        """See `Connector`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._kick, 1)

    def _kicked(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._kick)

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)


def _link_facts(link: ShmLink) -> dict[str, Any]:
    writer, reader = link.writer, link.reader
    return {
        "name": link.name,
        "id": link.peer_id,
        "state": link.state,
        "sent_messages": writer.messages if writer else 0,
        "sent_bytes": writer.head if writer else 0,
        "received_messages": reader.messages if reader else 0,
        "received_bytes": reader.tail if reader else 0,
        "bells": link.rung,
        "lost_messages": link.lost,
        "looked_s": link.looked_ns / 1e9,
    }

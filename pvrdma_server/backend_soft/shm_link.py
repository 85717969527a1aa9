"""The carrier to another server: a ring each way, and a socket that is bell and sign of life.

Contract: as `Carrier`. A link outlives nothing: it is made connecting, comes up once, and ends; a peer
that comes back gets another. Before it is up, or while the ring is full, `send` says no; once
`dropping` is set (its port does, when nothing has moved for a while) it takes and loses what does not
fit, as a cable that was pulled, so that queue pairs run into their own timeouts.
"""

import contextlib
import mmap
import socket
from time import thread_time_ns
from typing import TYPE_CHECKING, Final, NamedTuple

from pvrdma_server.backend_soft.fast_path import Many, Posted
from pvrdma_server.backend_soft.lane import Bell, Driver, Lane
from pvrdma_server.backend_soft.native import (
    LINGER_PAYS,
    Linger,
    Lingered,
    extension,
    make_linger,
)
from pvrdma_server.backend_soft.shm_ring import RESERVE_BYTES, RingFault, RingReader, RingWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pvrdma_server.backend_soft.shm_port import ShmPort

# Bells heard per look: stops a peer that rings without end from keeping us at its socket.
_MAX_BELLS: Final = 64
_BELL: Final = b"\x01"
# How long to look at a ring that is empty before its peer must ring the bell: a wake-up costs both sides about as
# much. A link that was looked at in vain so many times in a row is looked at no more, but for one sleep in so many.
LINGER_NS: Final = 150_000
_LINGER_CREDIT: Final = 4
_LINGER_PROBE: Final = 16


class Rings(NamedTuple):
    """Both mappings of a link."""

    out: mmap.mmap
    into: mmap.mmap


class ShmLink:
    """One peer.

    Attributes:
        peer_id, name, uid: who it is; the uid is the kernel's word.
        refused: somebody waits for room.
        dropping: what has no room is lost.
        broken: why the peer must go; nothing of it is looked at any more.
        ending: the peer has hung up; what it sent before is still delivered.
        busy: in the port's list of links to look at; otherwise the peer rings.
        lost: messages taken and lost.
        looked_ns: how long we looked at it before going to sleep: CPU time without work.
        seen_tail, since_ns: how far it was, and when that was looked at, while refusing.
    """

    __slots__ = (
        "_credit", "_driver", "_linger", "_port", "_rings", "_sleeps", "_sock", "broken", "busy", "dropping",
        "ending", "looked_ns", "lost", "name", "peer_id", "reader", "refused", "rung", "seen_tail", "since_ns", "uid",
        "writer",
    )  # fmt: skip

    def __init__(self, port: "ShmPort", peer_id: str, uid: int) -> None:
        self._port = port
        self._sock: socket.socket | None = None
        self._rings: Rings | None = None
        self.peer_id, self.uid, self.name = peer_id, uid, ""
        self.writer: RingWriter | None = None
        self.reader: RingReader | None = None
        self.broken: str | None = None
        self.refused = self.dropping = self.busy = self.ending = False
        self._credit, self._sleeps = 1, 0
        self._linger: Linger | None = None
        self._driver: Driver | None = None
        self.looked_ns = self.lost = self.rung = self.seen_tail = self.since_ns = 0

    def come_up(self, sock: socket.socket, rings: Rings, name: str) -> None:
        """Greetings were exchanged; the link takes the socket and the mappings over."""
        self._sock, self._rings, self.name = sock, rings, name
        with memoryview(rings.out) as view:
            self.writer = RingWriter(view)
        with memoryview(rings.into) as view:
            self.reader = RingReader(view)
        looker = self._port.looker
        self._linger = make_linger(self.reader.head_word, self.writer.room_word, looker)
        if extension is not None and looker is not None:
            bell = Bell(sock.fileno(), looker)
            self._driver = Driver(self.writer.memory, self.reader.memory, RESERVE_BYTES, bell)

    def close(self) -> None:
        """Let everything go; from now on `send` takes and loses. The port forgets us elsewhere."""
        self.dropping = True
        writer, reader = self.writer, self.reader
        self.writer = self.reader = None
        for user in (self._linger, self._driver):
            if user is not None:
                user.release()
        self._linger = self._driver = None
        if writer is not None and reader is not None:
            writer.release()
            reader.release()
        for mapping in self._rings or ():
            # A view that somebody still looks at keeps it alive until it goes.
            with contextlib.suppress(BufferError):
                mapping.close()
        self._rings = None
        if self._sock is not None:
            self._sock.close()

    @property
    def state(self) -> str:
        """For status."""
        if self.writer is None:
            return "connecting"
        return "stalled" if self.dropping else "up"

    # -- out --------------------------------------------------------------------------------

    def send(self, header: bytes, payload: "Sequence[memoryview]") -> bool:
        """Copy a message into the ring; False when there is no room now."""
        writer = self.writer
        if writer is None or self.broken is not None:
            return self._no_room()
        try:
            if not writer.put(header, payload):
                return self._no_room()
        except RingFault as fault:
            self._port.fault(self, str(fault))
            return True
        self._sent()
        return True

    def send_many(self, what: Many) -> Posted | None:
        """See `Carrier`."""
        writer = self.writer
        if writer is None or self.broken is not None:
            return None
        # What is copied meanwhile is there when the peer has woken up.
        self._wake_reader()
        try:
            posted = writer.put_many_untrusted(what)
        except RingFault as fault:
            self._port.fault(self, str(fault))
            return None
        if posted is not None:
            self._sent()
        return posted

    def _wake_reader(self) -> None:
        assert self.writer is not None
        if self.writer.reader_sleeps():
            self.ring_bell()

    def _sent(self) -> None:
        self._wake_reader()
        if not self.busy:
            # An answer will come soon.
            self._port.look_at(self)

    def _no_room(self) -> bool:
        if self.dropping and self.moved():
            self.dropping = False
        if self.dropping or self.broken is not None:
            self.lost += 1
            return True
        if not self.refused:
            self._port.refuses(self)
        return False

    def ring_bell(self) -> None:
        """Have the peer look at both rings. Never waits: a full socket holds a bell already.

        A socket and not an eventfd: whoever shares an eventfd can make it blocking, and full, for all.
        """
        self.rung += 1
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.send(_BELL, socket.MSG_DONTWAIT)

    def tell_gids_changed(self) -> None:
        """We own other GIDs than before."""
        if self.writer is not None:
            self.writer.gids_changed()
            self.ring_bell()

    # -- in ---------------------------------------------------------------------------------

    def hear_bells(self) -> bool:
        """Take the bells that rang; False when the peer has hung up."""
        sock = self._sock
        assert sock is not None
        try:
            for _ in range(_MAX_BELLS):
                if not sock.recv(16, socket.MSG_DONTWAIT):
                    return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def deliver(self, messages: int) -> int:
        """Hand up to `messages` to the endpoint; how many it were."""
        reader, endpoint = self.reader, self._port.endpoint
        if reader is None or self.broken is not None:
            return 0
        try:
            return reader.take_untrusted(
                messages,
                lambda header, payload: endpoint.receive(self, header, payload),
                self.ring_bell,
                lambda qpn, kind: endpoint.offer(self, qpn, kind),
                endpoint.landed,
            )
        except RingFault as fault:
            self._port.fault(self, str(fault))
            return 0

    def lingers(self) -> Lingered:
        """Look at an empty ring, and one that had no room, for a moment before going to sleep."""
        reader, writer, linger = self.reader, self.writer, self._linger
        if reader is None or writer is None or linger is None or self.ending or self.broken:
            return Lingered.NOTHING
        if self._credit <= 0:
            self._sleeps += 1
            if not LINGER_PAYS or self._sleeps % _LINGER_PROBE:
                return Lingered.NOTHING
        lane = None if self.refused or self._driver is None else self._port.endpoint.lane(self)
        if lane is not None:
            seen, worked = self._drive(lane, reader, writer)
        else:
            started_ns = thread_time_ns()
            seen = linger.wait(reader.seen, writer.tail if self.refused else None, LINGER_NS)
            self.looked_ns += thread_time_ns() - started_ns
            worked = False
        if worked or seen == Lingered.CHANGED:
            self._credit = _LINGER_CREDIT
            if self.refused and self.moved():
                self._port.has_room(self)
        elif seen == Lingered.NOTHING:
            self._credit -= self._credit > 0
        return Lingered(seen)

    def _drive(self, lane: Lane, reader: RingReader, writer: RingWriter) -> tuple[int, bool]:
        # What it saw last, and whether it did anything.
        assert self._driver is not None
        try:
            out = writer.head, writer.look_untrusted()
        except RingFault as fault:
            self._port.fault(self, str(fault))
            return Lingered.CHANGED, False
        drove = self._driver.drive_untrusted(lane, out, (reader.seen, reader.tail), LINGER_NS)
        writer.moved(drove.out_head, drove.out_tail, drove.posted + drove.answered)
        reader.moved(drove.in_head, drove.in_tail, drove.landed + drove.acks)
        self.rung += drove.rung
        self.looked_ns += drove.looked_ns
        self._port.endpoint.drove(lane, drove)
        return drove.seen, drove.worked > 0

    def awake(self) -> None:
        """We look by ourselves from now on: the peer need not ring for messages."""
        if self.reader is not None:
            self.reader.awake()

    def sleeps(self) -> bool:
        """Have the peer ring when something comes, or makes room for who waits; False when it has already."""
        reader, writer = self.reader, self.writer
        if reader is None or writer is None or self.broken is not None:
            return True
        try:
            if self.refused and not writer.sleep_untrusted():
                self._port.has_room(self)
                return False
            return reader.sleep_untrusted()
        except RingFault as fault:
            self._port.fault(self, str(fault))
            return True

    def moved(self) -> bool:
        """Whether the peer has consumed anything since this was asked last."""
        if self.writer is None:
            return False
        try:
            tail = self.writer.look_untrusted()
        except RingFault as fault:
            self._port.fault(self, str(fault))
            return False
        moved, self.seen_tail = tail != self.seen_tail, tail
        return moved

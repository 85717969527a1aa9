"""The server's end of the MAD relay: one VM's QP1 datagrams to the host's `pvrdma-mad-hub` and back.

Contract: implements `gsi.MadCarrier`. `run` is the task that keeps the link: it connects, registers the guest's GIDs,
again after every loss, and hands what arrives to `on_datagram`. Everything else is synchronous and returns at once, but
for `claim` and `release`: while the link is up they wait a moment for the hub's answer, so that the guest's CREATE_BIND
can fail, and a GID is still on the host's port when the hub ends its connections. A refusal that comes later is logged,
shown in the status, and asked again from time to time. What the hub sends is
checked; what makes no sense ends the link, never the server. Without a link datagrams are lost, as in a network, and
the guest's connection manager repeats them.
"""

import errno
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import structlog
import trio

from pvrdma_server.errors import BackendError
from pvrdma_server.gsi import NoCarrier
from pvrdma_server.mad_dialect import MAX_SAID_BYTES, Dialect, HubDialect
from pvrdma_server.mad_frames import (
    Datagram,
    Dropped,
    DropReason,
    FrameError,
    Message,
    Ok,
    Receive,
    RefuseCode,
    Refused,
    Register,
    Send,
    Unregister,
)

# How long CREATE_BIND, and with it a vCPU, waits for the hub's answer. A hub that is alive needs some hundred us.
ANSWER_WAIT_S: Final = 0.1
# The same for DESTROY_BIND and reset. The hub answers when the GID's connections are ended, for which the kernel may
# have to find link addresses.
RELEASE_WAIT_S: Final = 2.0
# What such waits may take together: so long at once, and this share of the time from then on. A guest with many GIDs,
# each with connections to nobody, cannot have its server stand still.
PATIENCE_S: Final = 2.0
PATIENCE_SHARE: Final = 0.1
# Between attempts to connect; CM repeats its messages every few seconds, so a hub that restarts is found in time.
FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 1.0
# How often GIDs that were refused after CREATE_BIND are asked for again: their holder may be a server that is ending.
ASK_AGAIN_S: Final = 5.0
# What may wait for a hub that does not read. Stops a guest from filling our memory while the hub stands still.
MAX_OUTGOING_BYTES: Final = 128 << 10
_READ_BYTES: Final = 64 << 10
# Lines about refused GIDs in one server's life: a guest can ask for any number of them.
_MAX_TOLD: Final = 256
_ERRNO: Final = {
    int(RefuseCode.HELD_BY_ANOTHER): errno.EADDRINUSE,
    int(RefuseCode.BAD_GID): errno.EINVAL,
    int(RefuseCode.TOO_MANY): errno.ENOSPC,
}


class Claim(Enum):
    """What has become of a GID of the guest's."""

    ASKED = "asked"
    OWNED = "owned"
    REFUSED = "refused"


@dataclass(slots=True)
class _Claimed:
    gid_type: int
    state: Claim = Claim.ASKED
    why: str = ""
    code: int = 0


@dataclass(slots=True)
class RelayCounters:
    """Since the server started. `hub_dropped` is by the hub's reason."""

    links: int = 0
    sent: int = 0
    received: int = 0
    send_failed: int = 0
    protocol_errors: int = 0
    hub_dropped: Counter[str] = field(default_factory=Counter)


class MadRelay:
    """The link of one VM's server to the host's side.

    Args:
        path: the host side's UNIX socket.
        name: the VM's, for the host side's log.
        dialect: makes the dialect of one connection.

    Attributes:
        on_datagram: takes what arrives for the guest.
    """

    def __init__(self, path: str, name: str, dialect: Callable[[], Dialect] = HubDialect) -> None:
        self.on_datagram: Callable[[Datagram], None] = _ignore
        self.counters = RelayCounters()
        self._path = path
        self._name = name
        self._make_dialect = dialect
        self._dialect: Dialect = dialect()
        self._socket: socket.socket | None = None
        self._claims: dict[bytes, _Claimed] = {}
        # Registrations and their ends whose answers are still to come, in order.
        self._asked: deque[Register | Unregister] = deque()
        self._outgoing = bytearray()
        self._output = trio.Event()
        self._patience_s = PATIENCE_S
        self._waited_at_s = time.monotonic()
        self._told: set[str] = set()
        self._told_gids: set[bytes] = set()
        self._log: Any = structlog.get_logger(component="mad_relay", hub=path)

    @property
    def connected(self) -> bool:
        """Whether there is a link and the other end has said who it is."""
        return self._socket is not None and self._dialect.peer_name is not None

    def facts(self) -> dict[str, object]:
        """For the status document."""
        counters = self.counters
        state = "connected" if self.connected else "greeting" if self._socket else "disconnected"
        return {
            "socket": self._path,
            "state": state,
            "hub": self._dialect.peer_name if self._socket else None,
            "links": counters.links,
            "sent": counters.sent,
            "received": counters.received,
            "send_failed": counters.send_failed,
            "protocol_errors": counters.protocol_errors,
            "hub_dropped": dict(counters.hub_dropped),
            "gids": {
                gid.hex(): {"state": claimed.state.value, "why": claimed.why}
                for gid, claimed in self._claims.items()
            },
        }

    # --- gsi.MadCarrier --------------------------------------------------------------------------------------------

    def claim(self, gid: bytes, gid_type: int) -> None:
        """See `gsi.MadCarrier`."""
        claimed = self._claims[gid] = _Claimed(gid_type)
        if self._socket is None:
            return
        self._ask_and_wait(Register(gid, gid_type), ANSWER_WAIT_S)
        if claimed.state is Claim.REFUSED:
            del self._claims[gid]
            code = _ERRNO.get(claimed.code, errno.EADDRINUSE)
            raise BackendError(code, "registration with the MAD hub", claimed.why)

    def release(self, gid: bytes) -> None:
        """See `gsi.MadCarrier`."""
        if self._claims.pop(gid, None) is not None and self._socket is not None:
            self._ask_and_wait(Unregister(gid), RELEASE_WAIT_S)

    def send(self, datagram: Datagram) -> bool:
        """See `gsi.MadCarrier`."""
        why = self._try_to_send(datagram)
        if not why:
            self.counters.sent += 1
            return True
        self.counters.send_failed += 1
        self._tell("send", "mad_not_sent", sgid=datagram.sgid.hex(), why=why)
        return False

    def _try_to_send(self, datagram: Datagram) -> str:
        """Why it is not sent; nothing if it is."""
        if not self.connected or not self._has_room():
            return "no link, or it does not read"
        data = self._dialect.encode(Send(datagram))
        if not data:
            return "the host's port lacks the GID"
        self._put(data)
        return ""

    # --- the task --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the link until cancelled."""
        delay_s = FIRST_RETRY_S
        while True:
            started_s = trio.current_time()
            link = self._connect()
            if link is not None:
                # Cancelled, the link stays until `close`: GIDs are given up over it.
                await self._serve(link)
                trio.lowlevel.notify_closing(link)
                self._forget(link)
                if trio.current_time() - started_s > LAST_RETRY_S:
                    delay_s = FIRST_RETRY_S  # else it may be one that hangs up on everybody
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    def _connect(self) -> socket.socket | None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.setblocking(False)
        try:
            link.connect(self._path)
        except OSError as e:
            link.close()
            self._tell("link", "mad_hub_unreachable", why=e.strerror, advice="is it running?")
            return None
        self.counters.links += 1
        self._dialect = self._make_dialect()
        self._socket = link
        self._put(self._dialect.hello(self._name))
        for gid, claimed in self._claims.items():
            claimed.state = Claim.ASKED
            self._ask(Register(gid, claimed.gid_type))
        return link

    async def _serve(self, link: socket.socket) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_task, link)
            nursery.start_soon(self._ask_again_task)
            greeted = False
            while self._read(link):
                if self.connected and not greeted:
                    greeted = True
                    self._told.discard("link")
                    self._told.discard("send")
                    self._log.info("mad_hub_connected", name=self._dialect.peer_name)
                await trio.lowlevel.wait_readable(link)
            nursery.cancel_scope.cancel()

    async def _write_task(self, link: socket.socket) -> None:
        while True:
            await self._output.wait()
            await trio.lowlevel.wait_writable(link)
            self._flush()

    async def _ask_again_task(self) -> None:
        while True:
            await trio.sleep(ASK_AGAIN_S)
            for gid, claimed in self._claims.items():
                if claimed.state is Claim.REFUSED:
                    self._ask(Register(gid, claimed.gid_type))

    def close(self) -> None:
        """End the link, after `run`."""
        if self._socket is not None:
            self._forget(self._socket)

    def _forget(self, link: socket.socket) -> None:
        link.close()
        self._socket = None
        self._asked.clear()
        self._outgoing.clear()
        self._output = trio.Event()
        for claimed in self._claims.values():
            claimed.state = Claim.ASKED

    # --- bytes -----------------------------------------------------------------------------------------------------

    def _ask_and_wait(self, question: Register | Unregister, wait_s: float) -> None:
        # A hub that owes answers already is slow; a guest must not make us wait for it again and again.
        prompt = not self._asked
        self._ask(question)
        if not prompt:
            return
        began_s = time.monotonic()
        grown_s = PATIENCE_SHARE * (began_s - self._waited_at_s)
        patience_s = min(PATIENCE_S, self._patience_s + grown_s)
        self._wait_for_answers(min(wait_s, patience_s))
        self._waited_at_s = time.monotonic()
        self._patience_s = patience_s - (self._waited_at_s - began_s)

    def _wait_for_answers(self, wait_s: float) -> None:
        """Take what the hub sends until it owes no answer, or time is up."""
        link, deadline_s = self._socket, time.monotonic() + wait_s
        assert link is not None
        poll = select.poll()
        poll.register(link, select.POLLIN)
        while self._asked:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poll.poll(1000 * left_s) or not self._read(link):
                return

    def _read(self, link: socket.socket) -> bool:
        """Take what is there; false at the end of the link."""
        try:
            data = link.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError as e:
            return self._end(e.strerror or str(e))
        try:
            for message in self._dialect.receive_data(data):
                self._take(message)
            if self._dialect.failed is not None:
                raise self._dialect.failed
        except FrameError as e:
            self.counters.protocol_errors += 1
            return self._end(str(e))
        return bool(data) or self._end("it has closed the connection")

    def _end(self, why: str) -> bool:
        """Have the link's task see its end, whoever has found out; false."""
        self._tell("link", "mad_hub_lost", why=why)
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return False

    def _has_room(self) -> bool:
        """Whether what is encoded next can be put: the dialect takes it for sent."""
        return len(self._outgoing) + MAX_SAID_BYTES <= MAX_OUTGOING_BYTES

    def _put(self, data: bytes) -> None:
        """Send now or later."""
        self._outgoing += data
        self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        try:
            sent = self._socket.send(self._outgoing, socket.MSG_NOSIGNAL)
            del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # the reader sees the same and says so
        if self._outgoing:
            self._output.set()
        elif self._output.is_set():
            self._output = trio.Event()

    # --- messages --------------------------------------------------------------------------------------------------

    def _ask(self, question: Register | Unregister) -> None:
        if self._has_room():
            self._put(self._dialect.encode(question))
            self._asked.append(question)
        else:
            # Its answer would be missing for good; the next link begins with every GID.
            self._end("it does not read")

    def _take(self, message: Message) -> None:
        match message:
            case Receive(datagram):
                self.counters.received += 1
                self.on_datagram(datagram)
            case Ok(gid):
                self._answered(gid, None)
            case Refused(gid):
                self._answered(gid, message)
            case Dropped(reason, dgid):
                name = _reason(reason)
                self.counters.hub_dropped[name] += 1
                self._tell(f"drop {name}", "mad_dropped", reason=name, dgid=dgid.hex())

    def _answered(self, gid: bytes, refusal: Refused | None) -> None:
        if not self._asked or self._asked[0].gid != gid:
            raise FrameError("unexpected", f"an answer for {gid.hex()}, which was not asked for")
        question = self._asked.popleft()
        claimed = self._claims.get(gid)
        if claimed is None or isinstance(question, Unregister):
            return
        if refusal is None:
            claimed.state, claimed.why = Claim.OWNED, ""
            return
        claimed.state, claimed.why, claimed.code = Claim.REFUSED, refusal.text, refusal.code
        if gid not in self._told_gids and len(self._told_gids) < _MAX_TOLD:
            self._told_gids.add(gid)
            self._log.error("gid_refused", gid=gid.hex(), why=refusal.text, once=True)

    def _tell(self, key: str, event: str, **values: object) -> None:
        """Say something once, or once per outage."""
        if key not in self._told:
            self._told.add(key)
            self._log.warning(event, once=True, **values)


class NoRelay(NoCarrier):
    """No hub is configured; the first datagram that goes nowhere says so. Implements `gsi.MadCarrier`."""

    def __init__(self) -> None:
        self._told = False

    def send(self, datagram: Datagram) -> bool:
        """See `gsi.MadCarrier`."""
        if not self._told:
            self._told = True
            structlog.get_logger(component="mad_relay").warning(
                "gsi_send_dropped",
                why="no MAD hub is configured (--mad-hub): rdma_cm connects inside this VM only",
                once=True,
            )
        return False


def _ignore(_datagram: Datagram) -> None:
    return None


def _reason(number: int) -> str:
    try:
        return DropReason(number).name.lower()
    except ValueError:
        return "unknown"

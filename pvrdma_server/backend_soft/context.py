"""What the parts of one queue pair share, and what all queue pairs of a backend share.

Contract: plain state. `Environment` is the backend's, `QpContext` one QP's; requester, responder
and datagram queue read and write them and reach everything else through the few calls here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pvrdma_server.backend import QpInit, QpOwner, RecvWr
from pvrdma_server.backend_soft.carrier import Carrier, Port
from pvrdma_server.backend_soft.codes import RESET
from pvrdma_server.backend_soft.config import SoftConfig
from pvrdma_server.backend_soft.counters import Counters
from pvrdma_server.backend_soft.memory import KeyTable, SoftPd
from pvrdma_server.backend_soft.timers import Timers
from pvrdma_server.guest_memory import GuestMemory


class Schedulable(Protocol):
    """A queue pair that can be given a turn."""

    scheduled: bool

    def run(self) -> int:
        """Take a turn; the bytes moved."""


class RecvSource(Protocol):
    """Where receive requests come from: the QP's owner, or its SRQ's."""

    def pop_recv(self) -> RecvWr | None:
        """The next posted receive."""


@dataclass(slots=True)
class Gid:
    """One entry of the GID table."""

    gid: bytes
    gid_type: int


@dataclass(slots=True)
class Environment:
    """The backend, as its queue pairs see it. `now_ns` is the time of the current `progress`.

    `hot`: the queue pair that used a short cut last.
    """

    config: SoftConfig
    port: Port
    on_work: Callable[[], None]
    keys: KeyTable
    memory: GuestMemory | None = None
    counters: Counters = field(default_factory=Counters)
    timers: Timers = field(default_factory=Timers)
    gids: dict[int, Gid] = field(default_factory=dict)
    ready: deque[Schedulable] = field(default_factory=deque)
    own_gids: set[bytes] = field(default_factory=set)
    blocked: dict[Carrier, dict[Schedulable, None]] = field(default_factory=dict)
    now_ns: int = 0
    hot: int = 0
    running: bool = False
    woken: bool = False

    def schedule(self, qp: Schedulable) -> None:
        """Have `qp` run in one of the next turns."""
        if not qp.scheduled:
            qp.scheduled = True
            self.ready.append(qp)
            if not self.running:
                self.wake()

    def wake(self) -> None:
        """Tell the server that `progress` has something to do, once until it does."""
        if not self.running and not self.woken:
            self.woken = True
            self.on_work()

    def block(self, qp: Schedulable, carrier: Carrier) -> None:
        """Have `qp` run when `carrier` has room."""
        self.counters.blocked += 1
        self.blocked.setdefault(carrier, {})[qp] = None


@dataclass(slots=True, eq=False)
class RecvQueue:
    """Receives of a QP or an SRQ: what its owner posts, and one that was taken in vain."""

    source: RecvSource
    pd: SoftPd
    spare: RecvWr | None = None

    def take(self) -> RecvWr | None:
        """The next receive, or None."""
        if self.spare is None:
            return self.source.pop_recv()
        wr, self.spare = self.spare, None
        return wr

    def give_back(self, wr: RecvWr) -> None:
        """Have the next `take` return `wr`, which was the last one taken."""
        self.spare = wr


@dataclass(slots=True, eq=False)
class QpContext:
    """One queue pair's identity, state and attributes. PSNs inside the QP are unbounded ints.

    `fail(state, event)` moves the QP to ERR or SQE by itself and tells its owner (event or None);
    `schedule` asks for a turn.
    """

    env: Environment
    owner: QpOwner
    pd: SoftPd
    qpn: int
    init: QpInit
    rq: RecvQueue
    fail: Callable[[int, int | None], None]
    schedule: Callable[[], None]
    state: int = RESET
    dest_qpn: int = 0
    dgid: bytes = bytes(16)
    qkey: int = 0
    access: int = 0
    timeout_ns: int = 0
    retry_cnt: int = 0
    rnr_retry: int = 0
    min_rnr_timer: int = 0
    max_rd_atomic: int = 0
    max_dest_rd_atomic: int = 0
    blocked_on: Carrier | None = None

"""The connection manager of a guest in Python: its QP1, posted as ib_mad does, and the two ends of a handshake.

Contract: one thread; a message that nobody waits for stays in the inbox. What is not answered is sent again with its
transaction id, as ib_cm does.
"""

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import cm
from cm import A, Cm
from guest_qp import Qp
from guest_srq import Ah
from guest_verbs import Buffer, Cq, Kernel

from pvrdma_server.abi.mad import (
    GRH_SIZE,
    GSI_QKEY,
    MAD_HDR_SIZE,
    MAD_SIZE,
    CmAttrId,
    parse_grh_area,
)
from pvrdma_server.abi.pvrdma_verbs import QpState, QpType
from pvrdma_server.abi.vmw_pvrdma_abi import Cqe, WcFlags, WcStatus

RECEIVES = 64
SENDS = 16
WAIT_S = 60.0
RESEND_S = 2.0
# Where the other end is to begin: in REQ and REP each says what it expects to receive.
PSN = 0x5A5A5A
_MAD_BUFFER = 512


class NoAnswer(AssertionError):
    """The other end does not say what it should."""


class Rejected(Exception):
    """The other end said REJ.

    Attributes:
        reason: its reason.
    """

    def __init__(self, message: Cm) -> None:
        super().__init__(f"rejected, reason {message.reason}")
        self.reason = message.reason


class Arrived(NamedTuple):
    """A message and who sent it."""

    message: Cm
    sgid: bytes


class CmAgent:
    """QP1 of one guest, and the ids of its connections, from `first_id` on."""

    def __init__(self, kernel: Kernel, gid: bytes, *, first_id: int = 1) -> None:
        self.gid = gid
        self.inbox: list[Arrived] = []
        self._ids = itertools.count(first_id)
        self._tids = itertools.count(first_id << 32 | 1)
        self.qp = Qp(
            kernel, QpType.GSI, Cq(kernel, 2 * SENDS), Cq(kernel, 2 * RECEIVES), max_wr=RECEIVES
        )
        self.qp.ready(qkey=GSI_QKEY)
        self._kernel = kernel
        self._receives: list[Buffer] = [kernel.buffer(_MAD_BUFFER) for _ in range(RECEIVES)]
        for number in range(RECEIVES):
            self._post(number)
        self._sends: list[Buffer] = [kernel.buffer(_MAD_BUFFER) for _ in range(SENDS)]
        self._free = list(range(SENDS))

    def new_id(self) -> int:
        return next(self._ids)

    def new_tid(self) -> int:
        return next(self._tids)

    # --- QP1 -------------------------------------------------------------------------------------------------------

    def _post(self, number: int) -> None:
        self.qp.post_recv(self._receives[number].sge(0, GRH_SIZE + MAD_SIZE), wr_id=number)

    def send(self, message: Cm, dgid: bytes) -> None:
        """Two elements, as ib_mad: the header, and what follows."""
        while not self._free:
            self._finish(self.qp.send_cq.wait(1))
        number = self._free.pop()
        buffer = self._sends[number]
        buffer.write(message.pack())
        parts = buffer.sge(0, MAD_HDR_SIZE), buffer.sge(MAD_HDR_SIZE, MAD_SIZE - MAD_HDR_SIZE)
        self.qp.send_to(Ah(dgid), 1, *parts, wr_id=number, qkey=GSI_QKEY)
        self._finish(self.qp.send_cq.poll())

    def _finish(self, completions: list[Cqe]) -> None:
        for wc in completions:
            assert wc.status == WcStatus.SUCCESS, wc
            self._free.append(wc.wr_id)

    def receive(self) -> None:
        """Take what has come."""
        for wc in self.qp.recv_cq.poll():
            assert wc.status == WcStatus.SUCCESS, wc
            assert (wc.byte_len, wc.src_qp) == (GRH_SIZE + MAD_SIZE, 1)
            assert wc.wc_flags & WcFlags.GRH
            data = self._receives[wc.wr_id].read(0, GRH_SIZE + MAD_SIZE)
            self._post(wc.wr_id)
            sgid, dgid = parse_grh_area(data[:GRH_SIZE])
            assert dgid == self.gid
            self.inbox.append(Arrived(Cm.parse(data[GRH_SIZE:]), sgid))

    # --- conversations ---------------------------------------------------------------------------------------------

    def take(self, match: Callable[[Cm], bool]) -> Arrived | None:
        """The first message in the inbox that matches."""
        for arrived in self.inbox:
            if match(arrived.message):
                self.inbox.remove(arrived)
                return arrived
        return None

    def wait(self, match: Callable[[Cm], bool], timeout_s: float = WAIT_S) -> Arrived:
        """Wait for a message that matches. Raises NoAnswer."""
        deadline = time.monotonic() + timeout_s
        while (found := self.take(match)) is None:
            if time.monotonic() > deadline:
                raise NoAnswer(f"inbox: {[CM_NAMES.get(m.attr_id) for m, _ in self.inbox]}")
            if not self.qp.recv_cq.ring.has_data()[0]:
                self._kernel.driver.bus.wait()
            self.receive()
        return found

    def converse(self, message: Cm, dgid: bytes, match: Callable[[Cm], bool]) -> Arrived:
        """Send, and again, until an answer that matches comes. Raises NoAnswer."""
        deadline = time.monotonic() + WAIT_S
        while True:
            self.send(message, dgid)
            try:
                return self.wait(match, RESEND_S)
            except NoAnswer:
                if time.monotonic() > deadline:
                    raise

    def wait_kind(self, *kinds: int, to: int | None = None) -> Arrived:
        """Wait for a message of these kinds, to a connection of ours if `to` says so."""
        return self.wait(lambda m: m.attr_id in kinds and (to is None or m.remote_id == to))


CM_NAMES = {int(kind): kind.name for kind in CmAttrId}


class Connection(NamedTuple):
    """One end of a connection."""

    agent: CmAgent
    qp: Qp
    local_id: int
    remote_id: int
    remote_qpn: int
    dgid: bytes

    def disconnect(self) -> None:
        """DREQ, until a DREP comes."""
        message = cm.dreq(self.agent.new_tid(), self.local_id, self.remote_id, self.remote_qpn)
        self.agent.converse(message, self.dgid, self.is_mine(A.DREP, A.DREQ))

    def await_disconnect(self) -> None:
        """Until the other end's DREQ comes, and answer it."""
        arrived = self.agent.wait(self.is_mine(A.DREQ))
        self.agent.send(
            cm.pair(A.DREP, arrived.message.tid, self.local_id, self.remote_id), self.dgid
        )

    def is_mine(self, *kinds: int) -> Callable[[Cm], bool]:
        return lambda m: m.attr_id in kinds and m.remote_id == self.local_id


class Request(NamedTuple):
    """A connection asked for and not answered yet."""

    agent: CmAgent
    qp: Qp
    message: Cm
    dgid: bytes

    def send(self) -> None:
        self.agent.send(self.message, self.dgid)

    def finish(self) -> Connection:
        """Until a REP comes; the connection is established then. Raises Rejected."""
        me = self.message.local_id
        arrived = self.agent.converse(
            self.message, self.dgid, lambda m: m.attr_id in (A.REP, A.REJ) and m.remote_id == me
        )
        return self.establish(arrived)

    def establish(self, arrived: Arrived) -> Connection:
        answer = arrived.message
        if answer.attr_id == A.REJ:
            raise Rejected(answer)
        assert arrived.sgid == self.dgid
        self.qp.to_rtr(dest_qpn=answer.qpn, dgid=self.dgid, rq_psn=PSN)
        self.qp.to_rts(sq_psn=answer.psn)
        me = self.message.local_id
        self.agent.send(cm.pair(A.RTU, answer.tid, me, answer.local_id), self.dgid)
        return Connection(self.agent, self.qp, me, answer.local_id, answer.qpn, self.dgid)


def request(agent: CmAgent, qp: Qp, dgid: bytes, port: int) -> Request:
    """A REQ for `port` of rdma_cm's TCP port space at an IPv4-mapped GID, not sent yet; the QP is in INIT then."""
    if qp.query().qp_state == QpState.RESET:
        qp.to_init()
    service = cm.service_id(cm.PS_TCP, port)
    private = cm.cma_header(agent.gid, dgid, 1024 + agent.new_id() % 60000)
    # A connection is known by comm id and CA GUID: two guests with the same numbers are told apart by the latter.
    message = cm.req(
        agent.new_tid(), agent.new_id(), service, qp.qpn, PSN, agent.gid, dgid,
        private=private, guid=agent.gid[8:],
    )  # fmt: skip
    return Request(agent, qp, message, dgid)


def connect(agent: CmAgent, qp: Qp, dgid: bytes, port: int) -> Connection:
    """The active side, from RESET to RTS."""
    return request(agent, qp, dgid, port).finish()


class Accepted(NamedTuple):
    """A connection answered and not established yet; `reply` is what the other end was sent."""

    connection: Connection
    reply: Cm
    sq_psn: int

    def finish(self) -> Connection:
        """Until the other end says RTU."""
        connection = self.connection
        connection.agent.converse(self.reply, connection.dgid, connection.is_mine(A.RTU))
        connection.qp.to_rts(sq_psn=self.sq_psn)
        return connection


def accept(agent: CmAgent, qp: Qp, port: int, arrived: Arrived | None = None) -> Accepted:
    """The passive side: wait for a REQ to `port`, unless one is given, and get ready to answer it."""
    service = cm.service_id(cm.PS_TCP, port)
    asked, sgid = arrived or agent.wait(lambda m: m.attr_id == A.REQ and m.service_id == service)
    if qp.query().qp_state == QpState.RESET:
        qp.to_init()
    qp.to_rtr(dest_qpn=asked.qpn, dgid=sgid, rq_psn=PSN)
    me = agent.new_id()
    reply = cm.rep(asked.tid, me, asked.local_id, qp.qpn, PSN)
    return Accepted(Connection(agent, qp, me, asked.local_id, asked.qpn, sgid), reply, asked.psn)

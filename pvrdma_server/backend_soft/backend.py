"""The embedded RDMA backend: everything a host RDMA device would do, in this process.

Contract: implements `RdmaBackend`. No I/O, no clock of its own, no thread: the server gives it a
clock, calls `progress` when `on_work` was called or `next_deadline_ns` has come, and a fabric
carries messages to other backends. Own GIDs are reached through the same code, by loopback.
"""

from collections import deque
from collections.abc import Callable, Sequence
from errno import EBUSY, EINVAL, ENOMEM, EOPNOTSUPP

from pvrdma_server.abi.mad import GSI_QPN
from pvrdma_server.abi.pvrdma_verbs import (
    PortAttr,
    PortCapFlags,
    PortPhysState,
    PortSpeed,
    PortState,
    PortWidth,
)
from pvrdma_server.backend import (
    BackendPd,
    BackendSrq,
    QpInit,
    QpOwner,
    SrqOwner,
)
from pvrdma_server.backend_soft.carrier import Carrier, Fabric
from pvrdma_server.backend_soft.codes import GSI, RC, UD
from pvrdma_server.backend_soft.config import SoftConfig
from pvrdma_server.backend_soft.context import Environment, Gid
from pvrdma_server.backend_soft.counters import Counters
from pvrdma_server.backend_soft.fast_path import Landed, Run
from pvrdma_server.backend_soft.lane import Drove, Lane
from pvrdma_server.backend_soft.local_fabric import LocalFabric
from pvrdma_server.backend_soft.memory import KeyTable, SoftMr, SoftPd
from pvrdma_server.backend_soft.qp import SoftQp
from pvrdma_server.backend_soft.scatter import total_bytes
from pvrdma_server.backend_soft.srq import SoftSrq
from pvrdma_server.backend_soft.wire import (
    BadMessage,
    RcMessage,
    parse_header_untrusted,
)
from pvrdma_server.errors import BackendError
from pvrdma_server.guest_memory import GuestMemory, GuestPages

FIRST_QPN = 2
# Arrived messages handed over before queue pairs have their turns.
POLL_MESSAGES = 32
# What one message costs beside its copy, in bytes that could have been copied meanwhile: stops a
# flood of small messages from making one `progress` endless.
MESSAGE_COST_BYTES = 4096
# What waiting a moment for a peer costs, likewise.
LINGER_COST_BYTES = 256 << 10
_TYPES = (RC, UD, GSI)


def _nothing() -> None:
    """Nobody wants to know."""


class SoftBackend:
    """The embedded backend of one device.

    Args:
        clock_ns: monotonic time in nanoseconds.
        fabric: where other backends are met; None: only ourselves.
        on_work: called when `progress` has something to do, outside of `progress`.
        config: limits and sizes.
    """

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int],
        fabric: Fabric | None = None,
        on_work: Callable[[], None] = _nothing,
        config: SoftConfig | None = None,
    ) -> None:
        config = config or SoftConfig()
        self.name = config.name
        self.limits = config.limits()
        self._clock_ns = clock_ns
        port = (fabric or LocalFabric()).join(self)
        self._env = Environment(config, port, on_work, KeyTable(config.max_mr))
        self._config = config
        self._qps: dict[int, SoftQp] = {}
        self._pds: set[SoftPd] = set()
        self._srqs: set[SoftSrq] = set()
        # First in, first out: a QPN is used again as late as possible, so that what is still
        # under way for a QP that is gone does not meet another.
        # QP1 is one of the max_qp.
        self._free_qpns = deque(range(FIRST_QPN, config.max_qp + 1))

    @property
    def counters(self) -> Counters:
        """What happened so far."""
        return self._env.counters

    # -- the device's objects ---------------------------------------------------------------

    def attach(self, memory: GuestMemory) -> None:
        """Bind to one guest's memory."""
        self._env.memory = memory

    def query_port(self) -> PortAttr:
        """The port: always up, 100 Gb/s on paper."""
        return PortAttr(
            state=PortState.ACTIVE,
            max_mtu=self._config.mtu,
            active_mtu=self._config.mtu,
            gid_tbl_len=self._config.gid_table_len,
            port_cap_flags=PortCapFlags.CM_SUP | PortCapFlags.IP_BASED_GIDS,
            max_msg_sz=self._config.max_msg_size,
            bad_pkey_cntr=0,
            qkey_viol_cntr=min(self._env.counters.datagram_qkey, 0xFFFF),
            pkey_tbl_len=1,
            lid=0,
            sm_lid=0,
            lmc=0,
            max_vl_num=1,
            sm_sl=0,
            subnet_timeout=0,
            init_type_reply=0,
            active_width=PortWidth.WIDTH_4X,
            active_speed=PortSpeed.EDR,
            phys_state=PortPhysState.LINK_UP,
        )

    def add_gid(self, index: int, gid: bytes, gid_type: int) -> None:
        """Own `gid` at `index`, in place of what was there."""
        if not 0 <= index < self._config.gid_table_len:
            raise BackendError(EINVAL, "add_gid", f"index {index}")
        gid = bytes(gid)
        if len(gid) != 16 or not any(gid):
            raise BackendError(EINVAL, "add_gid", f"not a GID: {gid.hex()}")
        self._env.port.claim(gid)
        if index in self._env.gids and self._env.gids[index].gid != gid:
            self.remove_gid(index)
        self._env.gids[index] = Gid(gid, gid_type)
        self._env.own_gids.add(gid)

    def remove_gid(self, index: int) -> None:
        """Give the GID at `index` up; nothing when there is none."""
        env = self._env
        entry = env.gids.pop(index, None)
        if entry is not None and all(other.gid != entry.gid for other in env.gids.values()):
            env.own_gids.discard(entry.gid)
            env.port.release(entry.gid)

    def create_pd(self, *, privileged: bool) -> SoftPd:
        """A protection domain."""
        if len(self._pds) >= self._config.max_pd:
            raise BackendError(ENOMEM, "create_pd", f"more than {self._config.max_pd}")
        pd = SoftPd(privileged, self._pds)
        self._pds.add(pd)
        return pd

    def reg_mr(
        self, pd: BackendPd, *, start: int, length: int, access: int, pages: GuestPages
    ) -> SoftMr:
        """Register guest pages by guest virtual address."""
        if length > self._config.max_mr_size:
            raise BackendError(EINVAL, "reg_mr", f"{length} bytes")
        return self._env.keys.add_user(
            _own_pd(pd), start=start, length=length, access=access, pages=pages
        )

    def reg_dma_mr(self, pd: BackendPd, *, access: int) -> SoftMr:
        """Register all guest memory by bus address."""
        if self._env.memory is None:
            raise BackendError(EINVAL, "reg_dma_mr", "no guest memory is attached")
        return self._env.keys.add_dma(_own_pd(pd), self._env.memory, access=access)

    def alloc_fast_reg_mr(self, pd: BackendPd, *, max_pages: int) -> SoftMr:
        """Keys without memory."""
        if max_pages > self._config.max_fast_reg_pages:
            raise BackendError(EINVAL, "alloc_fast_reg_mr", f"{max_pages} pages")
        return self._env.keys.add_fast_reg(_own_pd(pd), max_pages=max_pages)

    def create_srq(self, pd: BackendPd, owner: SrqOwner, *, max_wr: int, max_sge: int) -> SoftSrq:
        """A shared receive queue."""
        if max_wr > self._config.max_srq_wr or max_sge > self._config.max_sge:
            raise BackendError(EINVAL, "create_srq", f"{max_wr} requests of {max_sge}")
        if len(self._srqs) >= self._config.max_srq:
            raise BackendError(ENOMEM, "create_srq", f"more than {self._config.max_srq}")
        srq = SoftSrq(_own_pd(pd), owner, self._srqs.discard)
        self._srqs.add(srq)
        return srq

    def create_qp(
        self, pd: BackendPd, owner: QpOwner, init: QpInit, srq: BackendSrq | None
    ) -> SoftQp:
        """A queue pair in state RESET."""
        if init.qp_type not in _TYPES:
            raise BackendError(EOPNOTSUPP, "create_qp", f"type {init.qp_type}")
        if max(init.max_send_wr, init.max_recv_wr) > self._config.max_qp_wr:
            raise BackendError(EINVAL, "create_qp", "too many work requests")
        if srq is not None and not isinstance(srq, SoftSrq):
            raise BackendError(EINVAL, "create_qp", "another backend's SRQ")
        own_pd = _own_pd(pd)
        qpn = self._take_qpn(init.qp_type)
        qp = SoftQp(self._env, own_pd, owner, init, srq, qpn, self._forget_qp)
        self._qps[qpn] = qp
        return qp

    def _take_qpn(self, qp_type: int) -> int:
        if qp_type == GSI:
            if GSI_QPN in self._qps:
                raise BackendError(EBUSY, "create_qp", "QP1 exists")
            return GSI_QPN
        if not self._free_qpns:
            raise BackendError(ENOMEM, "create_qp", f"more than {self._config.max_qp}")
        return self._free_qpns.popleft()

    def _forget_qp(self, qp: SoftQp) -> None:
        if self._qps.pop(qp.qpn, None) is not None and qp.qpn != GSI_QPN:
            self._free_qpns.append(qp.qpn)
        for waiting in self._env.blocked.values():
            waiting.pop(qp, None)

    # -- work -------------------------------------------------------------------------------

    def progress(self, budget_bytes: int) -> bool:
        """Deliver and give turns until idle or the budget is used up, then fire timers.

        Order: timers come last, for what they wait for may have arrived while we did not run.
        """
        env = self._env
        env.now_ns = self._clock_ns()
        env.running, env.woken = True, False
        try:
            while budget_bytes > 0:
                received = env.counters.rx_bytes
                messages = env.port.poll(POLL_MESSAGES)
                if messages:
                    received = env.counters.rx_bytes - received
                    budget_bytes -= received + messages * MESSAGE_COST_BYTES
                elif not env.ready:
                    # Who has little time does not wait: somebody with more will.
                    if budget_bytes < LINGER_COST_BYTES or not env.port.linger():
                        break
                    budget_bytes -= LINGER_COST_BYTES
                budget_bytes -= self._turns(budget_bytes)
            env.timers.fire(env.now_ns)
        finally:
            env.running = False
        more = bool(env.ready) or env.port.pending
        env.woken = more
        return more

    def _turns(self, budget_bytes: int) -> int:
        # One turn for everyone who was ready, as far as the budget goes: round robin.
        ready = self._env.ready
        cost = 0
        for _ in range(len(ready)):
            qp = ready.popleft()
            qp.scheduled = False
            cost += MESSAGE_COST_BYTES + qp.run()
            if cost >= budget_bytes:
                break
        return cost

    def next_deadline_ns(self) -> int | None:
        """When `progress` must run even if nothing happens."""
        return self._env.timers.next_ns()

    # -- what the fabric calls --------------------------------------------------------------

    def receive(self, peer: Carrier, header: bytes, payload: Sequence[memoryview]) -> None:
        """A message from a peer, untrusted."""
        counters = self._env.counters
        counters.rx_messages += 1
        length = 0
        if payload:
            length = len(payload[0]) if len(payload) == 1 else total_bytes(payload)
            counters.rx_bytes += length
        try:
            message = parse_header_untrusted(header, length)
        except BadMessage:
            counters.bad_message += 1
            return
        qp = self._qps.get(message.dst_qpn)
        if qp is None:
            counters.unknown_qp += 1
        elif isinstance(message, RcMessage):
            qp.receive_rc(peer, message, payload)
        elif self._env.port.route(message.sgid) is peer and message.dgid in self._env.own_gids:
            qp.receive_datagram(message, payload)
        else:
            counters.wrong_peer += 1

    def offer(self, peer: Carrier, qpn: int, kind: int) -> Run | None:
        """See `Endpoint`."""
        qp = self._qps.get(qpn)
        return qp.offer(peer, kind) if qp is not None else None

    def landed(self, run: Run, landed: Landed) -> None:
        """See `Endpoint`."""
        counters = self._env.counters
        counters.rx_messages += landed.messages
        counters.rx_bytes += landed.length_bytes
        self._qps[run.dst_qpn].landed(run.kind, landed)

    def lane(self, peer: Carrier) -> Lane | None:
        """See `Endpoint`. Of the queue pair that used a short cut last."""
        qp = self._qps.get(self._env.hot)
        return qp.lane(peer) if qp is not None else None

    def drove(self, lane: Lane, drove: Drove) -> None:
        """See `Endpoint`."""
        counters = self._env.counters
        counters.rx_messages += drove.landed + drove.acks
        counters.rx_bytes += drove.landed_bytes
        counters.tx_messages += drove.posted + drove.answered
        counters.tx_bytes += drove.posted_bytes
        self._qps[lane.qpn].drove(lane, drove)

    def room(self, carrier: Carrier) -> None:
        """A carrier has room again: who waited for it has a turn."""
        for qp in self._env.blocked.pop(carrier, ()):
            self._env.schedule(qp)

    def wake(self) -> None:
        """Messages wait in the port."""
        env = self._env
        if not env.running and not env.woken:
            env.wake()

    # -- the end ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget GIDs and peers, and whatever object is left."""
        for qp in list(self._qps.values()):
            qp.destroy()
        for index in list(self._env.gids):
            self.remove_gid(index)
        self._env.keys.clear()
        self._env.ready.clear()
        self._env.blocked.clear()
        self._srqs.clear()
        self._pds.clear()

    def close(self) -> None:
        """Give everything back."""
        self.reset()
        self._env.port.leave()


def _own_pd(pd: BackendPd) -> SoftPd:
    if not isinstance(pd, SoftPd):
        raise BackendError(EINVAL, "pd", "another backend's protection domain")
    return pd

"""The connections of one client, by comm id: whose answer is whose, and whom to tell when the client is gone.

Contract: pure, without a clock: an entry lives from its REQ to its DREP or REJ, however long that is. Their number is
bounded; the oldest whose handshake is under way goes first, so that a peer that only ever sends REQs costs no
connection that both ends wanted. Datagrams are routed by GID, so a connection without an entry works on, only nobody
tells its peer should the client die. No message costs more with many entries than with few, but for old clients, whose
tables are short (`peer_of`).

Two clients may use the same comm ids, and one client and its peers may: an entry is found by the peer's GID and
either id.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from pvrdma_server.abi.ibta_vol1_c12 import CmRejected, CmRejReason
from pvrdma_server.abi.mad import CmAttrId
from pvrdma_server.mad_frames import Datagram
from pvrdma_server.mad_hub.cm import CmMad, build_dreq, build_rej

# More than any guest has queue pairs; stops a guest that only ever sends REQs.
MAX_CONNECTIONS: Final = 16384
# Of an old client: as many as QEMU's device has queue pairs.
MAX_OLD_CONNECTIONS: Final = 1024
# SIDR requests that wait for their answer, which nobody has to send.
MAX_SIDR: Final = 1024

_LAST: Final = frozenset({CmAttrId.REJ, CmAttrId.DREP})


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of a client, as the messages that passed tell it.

    Attributes:
        path: a datagram from the client to its peer, without payload.
        tid: transaction id of the REQ.
        local_id: the client's comm id, 0 while unknown.
        peer_id: the peer's, likewise.
        peer_qpn: the peer's queue pair, 0 while unknown.
        ca_guid: the client's CA GUID if it sent the REQ, else nothing.
        replied: the REP of whoever was asked has passed.
        established: an RTU has passed since.
    """

    path: Datagram
    tid: int
    local_id: int
    peer_id: int
    peer_qpn: int = 0
    ca_guid: bytes = b""
    replied: bool = False
    established: bool = False

    def farewell(self) -> Datagram:
        """What the client would send now to end this connection, so that its peer need not wait for a timeout."""
        return self.path._replace(payload=self._farewell_mad())

    def _farewell_mad(self) -> bytes:
        if self.established:
            return build_dreq(self.local_id, self.peer_id, self.peer_qpn)
        reason = CmRejReason.CONSUMER_DEFINED
        if self.replied:
            rejected = CmRejected.REP if self.ca_guid else CmRejected.OTHER
            return build_rej(self.local_id, self.peer_id, rejected, reason)
        if self.ca_guid:
            # The peer has not said its id: it finds our REQ by our GUID and id.
            timeout = CmRejReason.TIMEOUT
            return build_rej(self.local_id, 0, CmRejected.OTHER, timeout, self.ca_guid)
        return build_rej(self.local_id, self.peer_id, CmRejected.REQ, reason)


# Keys of SIDR requests. The transaction id of one that the client sent is changed by the host's umad on its way out.
def _asked(rep: CmMad) -> tuple[bool, int, int]:
    """Key of the client's own request that `rep` answers."""
    return False, rep.receiver_id, 0


def _was_asked(rep: CmMad) -> tuple[bool, int, int]:
    """Key of the peer's request that the client answers by `rep`."""
    return True, rep.receiver_id, rep.tid


class ConnectionTable:
    """The connections of one client; see the module's contract.

    Attributes:
        evicted: entries that went because there were too many.
    """

    def __init__(self, max_connections: int = MAX_CONNECTIONS, max_sidr: int = MAX_SIDR) -> None:
        self.evicted = 0
        self._max = max_connections
        self._max_sidr = max_sidr
        self._half_open: OrderedDict[Connection, None] = OrderedDict()
        self._established: OrderedDict[Connection, None] = OrderedDict()
        self._of_gid: dict[bytes, dict[Connection, None]] = {}
        # Both by the peer's GID and a comm id, ours or the peer's.
        self._by_local: dict[tuple[bytes, int], Connection] = {}
        self._by_peer: dict[tuple[bytes, int], Connection] = {}
        self._sidr: OrderedDict[tuple[bool, int, int], Datagram] = OrderedDict()

    def __len__(self) -> int:
        return len(self._half_open) + len(self._established)

    def __iter__(self) -> Iterator[Connection]:
        return chain(self._half_open, self._established)

    @property
    def established(self) -> int:
        """How many have their RTU."""
        return len(self._established)

    def sent(self, path: Datagram, cm: CmMad) -> None:
        """The client sent `cm` along `path`."""
        self._passed(path._replace(payload=b""), cm, cm.sender_id, cm.receiver_id, from_peer=False)

    def received(self, datagram: Datagram, cm: CmMad) -> None:
        """The client was given `cm`."""
        back = datagram._replace(
            sgid=datagram.dgid,
            dgid=datagram.sgid,
            src_qp=datagram.dst_qp,
            dst_qp=datagram.src_qp,
            payload=b"",
        )
        self._passed(back, cm, cm.receiver_id, cm.sender_id, from_peer=True)

    def waits_for(self, peer: bytes, cm: CmMad) -> Datagram | None:
        """The way back to `peer` (a GID) if `cm`, which came from there, is about something of this client."""
        if cm.attr_id == CmAttrId.SIDR_REP:
            path = self._sidr.get(_asked(cm))
            return path if path is not None and path.dgid == peer else None
        entry = self._find(peer, cm.receiver_id, cm.sender_id)
        return entry.path if entry is not None else None

    def peer_of(self, cm: CmMad) -> bytes | None:
        """The GID at the other end of what `cm`, which the client is about to send, is about."""
        if cm.attr_id == CmAttrId.SIDR_REP:
            path = self._sidr.get(_was_asked(cm))
            return path.dgid if path is not None else None
        found = [e for e in self if cm.sender_id and e.local_id == cm.sender_id]
        if not found:
            # Its first answer, which has the request's transaction id; more than one peer may use this comm id.
            found = [e for e in self if e.peer_id == cm.receiver_id]
            found = [e for e in found if e.tid == cm.tid] or found
        return found[0].path.dgid if len(found) == 1 else None

    def end(self, gid: bytes | None = None) -> list[Datagram]:
        """Forget all connections (of `gid`, if given), and return the farewells to their peers."""
        ending = list(self if gid is None else self._of_gid.get(gid, ()))
        for entry in ending:
            self._remove(entry)
        for key in [k for k, path in self._sidr.items() if gid is None or path.sgid == gid]:
            del self._sidr[key]
        return [entry.farewell() for entry in ending]

    def _passed(
        self, path: Datagram, cm: CmMad, local_id: int, peer_id: int, *, from_peer: bool
    ) -> None:
        if cm.attr_id in (CmAttrId.SIDR_REQ, CmAttrId.SIDR_REP):
            self._sidr_passed(path, cm, from_peer=from_peer)
            return
        entry = self._find(path.dgid, local_id, peer_id)
        if cm.attr_id == CmAttrId.REQ:
            if entry is not None and entry.tid == cm.tid:
                return  # a retry
            if entry is not None:
                self._remove(entry)
            ca_guid = b"" if from_peer else cm.ca_guid
            entry = Connection(path, cm.tid, local_id, peer_id, ca_guid=ca_guid)
            self._add(entry)
        if entry is None:
            return
        if cm.attr_id in _LAST:
            self._remove(entry)
            return
        self._learn(entry, cm, local_id, peer_id, from_peer=from_peer)

    def _learn(
        self, entry: Connection, cm: CmMad, local_id: int, peer_id: int, *, from_peer: bool
    ) -> None:
        if not entry.local_id and local_id:
            entry.local_id = local_id
            self._by_local[entry.path.dgid, local_id] = entry
        if not entry.peer_id and peer_id:
            entry.peer_id = peer_id
            self._by_peer[entry.path.dgid, peer_id] = entry
        if from_peer:
            entry.peer_qpn = cm.sender_qpn or entry.peer_qpn
        we_asked = bool(entry.ca_guid)
        entry.replied |= cm.attr_id == CmAttrId.REP and from_peer == we_asked
        if cm.attr_id == CmAttrId.RTU and entry.replied and not entry.established:
            entry.established = True
            del self._half_open[entry]
            self._established[entry] = None

    def _sidr_passed(self, path: Datagram, cm: CmMad, *, from_peer: bool) -> None:
        if cm.attr_id == CmAttrId.SIDR_REP:
            self._sidr.pop(_asked(cm) if from_peer else _was_asked(cm), None)
            return
        key = (True, cm.sender_id, cm.tid) if from_peer else (False, cm.sender_id, 0)
        self._sidr[key] = path
        self._sidr.move_to_end(key)
        if len(self._sidr) > self._max_sidr:
            self._sidr.popitem(last=False)

    def _find(self, peer: bytes, local_id: int, peer_id: int) -> Connection | None:
        entry = self._by_local.get((peer, local_id)) if local_id else None
        if entry is not None:
            return entry
        return self._by_peer.get((peer, peer_id)) if peer_id else None

    def _add(self, entry: Connection) -> None:
        if len(self) >= self._max:
            self._remove(next(iter(self)))
            self.evicted += 1
        self._half_open[entry] = None
        self._of_gid.setdefault(entry.path.sgid, {})[entry] = None
        if entry.local_id:
            self._by_local[entry.path.dgid, entry.local_id] = entry
        if entry.peer_id:
            self._by_peer[entry.path.dgid, entry.peer_id] = entry

    def _remove(self, entry: Connection) -> None:
        del (self._established if entry.established else self._half_open)[entry]
        of_gid = self._of_gid[entry.path.sgid]
        del of_gid[entry]
        if not of_gid:
            del self._of_gid[entry.path.sgid]
        tables = ((self._by_local, entry.local_id), (self._by_peer, entry.peer_id))
        for table, number in tables:
            key = (entry.path.dgid, number)
            if table.get(key) is entry:
                del table[key]

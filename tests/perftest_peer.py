"""The guest's half of what perftest's bandwidth programs say to each other over TCP, for one RC queue pair.

Every exchange is one message each way, of equal length; the client's goes first. As version 6.24 does it, a run is:
version, buffer size, cache line, MTU; keys; keys once the queue pair is connected; (SEND: keys once more); keys when
receives are posted; the traffic; keys at its end; what was measured (not SEND); keys to part.

Source: perftest's perftest_communication.c, ethernet_write_keys, ctx_xchg_data and xchg_bw_reports.
"""

import socket
import struct
from typing import NamedTuple

from host_peer import receive_exactly

VERSION = b"6.24".ljust(16, b"\0")
BUFFER_BYTES = 4096
_CACHE_LINE = 64
_MTU_4096 = b"5\0"
_KEYS_BYTES = 108


class Keys(NamedTuple):
    """Where one end can be reached, and its memory."""

    out_reads: int
    qpn: int
    psn: int
    rkey: int
    addr: int
    gid: bytes

    def pack(self) -> bytes:
        gid = ":".join(f"{byte:02x}" for byte in self.gid)
        text = (
            f"0000:{self.out_reads:04x}:{self.qpn:06x}:{self.psn:06x}:{self.rkey:08x}:"
            f"{self.addr:016x}:{gid}:00000000:"
        )
        return text.encode().ljust(_KEYS_BYTES, b"\0")

    @classmethod
    def unpack(cls, text: bytes) -> "Keys":
        _, reads, qpn, psn, rkey, addr, *gid = text.rstrip(b"\0").decode().split(":")[:22]
        return cls(
            int(reads, 16), int(qpn, 16), int(psn, 16), int(rkey, 16), int(addr, 16),
            bytes(int(byte, 16) for byte in gid),
        )  # fmt: skip


class Conversation:
    """One end of the TCP connection. `first` for the client, which speaks first."""

    def __init__(self, sock: socket.socket, *, first: bool) -> None:
        self._sock = sock
        self._first = first

    def exchange(self, mine: bytes) -> bytes:
        """Say `mine`; what the other end says, which is as long."""
        if self._first:
            self._sock.sendall(mine)
            return receive_exactly(self._sock, len(mine))
        theirs = receive_exactly(self._sock, len(mine))
        self._sock.sendall(mine)
        return theirs

    def greet(self) -> None:
        """Version and sizes; the other end must be of a version that speaks as we do."""
        theirs = self.exchange(VERSION).rstrip(b"\0").decode()
        assert float(theirs) >= 5.7, f"perftest {theirs} says other things"
        self.exchange(struct.pack(">I", BUFFER_BYTES))
        self.exchange(struct.pack(">I", _CACHE_LINE))
        self.exchange(_MTU_4096)

    def keys(self, mine: Keys) -> Keys:
        """Tell where we are, or that we have come as far as this."""
        return Keys.unpack(self.exchange(mine.pack()))

    def report(self, size: int, count: int) -> None:
        """What was measured, of which we only know the amount: bandwidths and rates are 0."""
        for value in (struct.pack(">Q", size), struct.pack(">Q", count), *[bytes(8)] * 3):
            self.exchange(value)

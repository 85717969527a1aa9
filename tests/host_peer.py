"""A bare-metal peer: verbs programs of the rxe host itself, in the namespace of its other device.

`PingPong` is the guest's half of the conversation that ibv_rc_pingpong has over TCP. `run_peer` starts this very module
as a program over pyverbs, which opens its memory to the guest and works on the guest's.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

PEER_DEVICE = "rxe1"
PEER_ADDRESS = "10.9.0.2"
PEER_GID_INDEX = "1"
_CONNECT_S = 30.0
# The greeting and its terminating zero.
DESTINATION_BYTES = 52


def v4_gid(address: str) -> bytes:
    return bytes(10) + b"\xff\xff" + socket.inet_aton(address)


def in_peer(argv: list[str], **more: Any) -> subprocess.Popen[str]:
    """Start a program in the other host's namespace."""
    return subprocess.Popen(
        ["ip", "netns", "exec", "peer", *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A program that does not outlive the block."""
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


class Destination(NamedTuple):
    """What the two ends of ibv_rc_pingpong tell each other."""

    qpn: int
    psn: int
    gid: bytes

    def pack(self) -> bytes:
        return f"0000:{self.qpn:06x}:{self.psn:06x}:{self.gid.hex()}".encode().ljust(
            DESTINATION_BYTES, b"\0"
        )

    @classmethod
    def unpack(cls, text: bytes) -> "Destination":
        _, qpn, psn, gid = text.rstrip(b"\0").decode().split(":")
        return cls(int(qpn, 16), int(psn, 16), bytes.fromhex(gid))


def connect_tcp(port: int) -> socket.socket:
    """Connect to a program of the peer that is about to listen."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((PEER_ADDRESS, port), timeout=_CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def receive_exactly(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = sock.recv(length - len(data))
        if not chunk:
            raise ConnectionResetError("the peer hung up")
        data += chunk
    return data


class Peer:
    """A running `peer_program`; one line of JSON in, one out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.hello: dict[str, Any] = self._receive()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            raise AssertionError(f"the peer says: {line}{self._process.stdout.read()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def run_peer() -> Iterator[Peer]:
    """A peer with 64 KiB of memory and one RC queue pair."""
    with ended(in_peer([sys.executable, os.path.abspath(__file__)])) as process:
        yield Peer(process)


def peer_program() -> None:
    """The program itself: answers requests until its input ends."""
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, SendWR

    size, port = 65536, 1
    context = Context(name=PEER_DEVICE)
    pd, cq = PD(context), CQ(context, 64)
    mr = MR(pd, size, 15)
    qp = QP(pd, QPInitAttr(qp_type=2, scq=cq, rcq=cq, cap=QPCap(16, 16, 4, 4, 0), sq_sig_all=1))

    def rise(request: dict[str, Any]) -> dict[str, Any]:
        attr = QPAttr(port_num=port)
        attr.qp_access_flags = 15
        qp.to_init(attr)
        raw = bytes.fromhex(request["gid"])
        text = ":".join(raw[i : i + 2].hex() for i in range(0, 16, 2))
        route = GlobalRoute(dgid=GID(text), sgid_index=int(PEER_GID_INDEX), hop_limit=64)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=port)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn, attr.path_mtu = (
            request["qpn"],
            0x1234,
            0x1234,
            3,
        )
        attr.max_dest_rd_atomic = attr.max_rd_atomic = 4
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        qp.to_rts(attr)
        return {}

    def work(request: dict[str, Any]) -> dict[str, Any]:
        wr = SendWR(
            wr_id=1, opcode=request["opcode"], num_sge=1,
            sg=[SGE(mr.buf + request.get("at", 0), request["length"], mr.lkey)], send_flags=2,
        )  # fmt: skip
        if request["opcode"] in (0, 4):
            wr.set_wr_rdma(request["rkey"], request["addr"])
        elif request["opcode"] in (5, 6):
            wr.set_wr_atomic(
                request["rkey"], request["addr"], request["add"], request.get("swap", 0)
            )
        qp.post_send(wr)
        deadline = time.monotonic() + _CONNECT_S
        while time.monotonic() < deadline:
            count, found = cq.poll(1)
            if count:
                return {"status": int(found[0].status)}
        return {"status": -1}

    print(
        json.dumps({"qpn": qp.qp_num, "addr": mr.buf, "rkey": mr.rkey, "lkey": mr.lkey}), flush=True
    )
    for line in sys.stdin:
        request = json.loads(line)
        match request["do"]:
            case "connect":
                answer = rise(request)
            case "write":
                data = bytes.fromhex(request["data"])
                mr.write(data, len(data), request.get("at", 0))
                answer = {}
            case "read":
                answer = {"data": mr.read(request["length"], request.get("at", 0)).hex()}
            case _:
                answer = work(request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    peer_program()

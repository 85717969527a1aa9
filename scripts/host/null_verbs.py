"""pyverbs with a device that does nothing: for measuring what our own code and pyverbs' objects cost, anywhere.

`install` replaces the classes of pyverbs that need a device. Work requests and completions stay pyverbs' own, so their
cost is real; what the verbs library, the kernel and the device would do for a request is not there. Everything posted
is completed by the next poll.
"""

import itertools
import os
import types
from collections import deque
from typing import Any

from pyverbs import cq, device, mr, pd, qp

BATCH_POSTED = 1
_RECV = 128  # IBV_WC_RECV
_keys = itertools.count(0x100)
_numbers = itertools.count(17)


class NullDevice:
    """Stands for pyverbs.device.Context."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.cmd_fd = -1

    def query_device(self) -> Any:
        return types.SimpleNamespace(
            max_qp=1 << 16, max_qp_wr=1 << 14, max_cqe=1 << 16, max_sge=32, max_cq=1 << 16,
            max_mr=1 << 20, max_mr_size=1 << 40, max_pd=1 << 15, max_ah=1 << 15, max_srq=1 << 15,
            max_srq_wr=1 << 14, max_srq_sge=27, max_qp_rd_atom=128, max_qp_init_rd_atom=128,
            local_ca_ack_delay=15, atomic_caps=1,
        )  # fmt: skip

    def query_port(self, _port: int) -> Any:
        return types.SimpleNamespace(
            state=4, max_mtu=5, active_mtu=5, max_msg_sz=1 << 30, max_vl_num=1, active_width=2,
            active_speed=32, phys_state=5, gid_tbl_len=16,
        )  # fmt: skip

    def query_gid_table(self, _length: int) -> list[Any]:
        gid = bytes(10) + b"\xff\xff\x0a\x00\x00\x01"
        halves = [int.from_bytes(gid[i : i + 8], "little") for i in (0, 8)]
        return [
            types.SimpleNamespace(
                gid_index=0, gid_type=2, ndev_ifindex=1, port_num=1,
                gid_subnet_prefix=halves[0], gid_interface_id=halves[1],
            )
        ]  # fmt: skip

    def close(self) -> None:
        pass


class NullObject:
    """A protection domain or region."""

    def __init__(self, *_args: Any, **_more: Any) -> None:
        self.lkey = self.rkey = self.handle = next(_keys)

    def rereg(self, _flags: int, **_more: Any) -> None:
        pass

    def close(self) -> None:
        pass


class NullChannel:
    """A completion channel that never has an event."""

    def __init__(self, _context: Any) -> None:
        self.fd = os.eventfd(0)

    def close(self) -> None:
        os.close(self.fd)


class NullCq:
    """Completes at once what is posted."""

    def __init__(self, *_args: Any) -> None:
        self.done: deque[tuple[int, int, int]] = deque()

    def poll(self, most: int) -> tuple[int, list[Any]]:
        count = min(most, len(self.done))
        taken = [self.done.popleft() for _ in range(count)]
        return count, [
            cq.WC(wr_id=number, status=0, qp_num=qpn, opcode=opcode)
            for number, qpn, opcode in taken
        ]

    def req_notify(self) -> None:
        pass

    def close(self) -> None:
        pass


class NullQp:
    """Takes everything.

    Only the first request of a posting is shown to us, so the bench says how many it has, and how many of them, the
    last ones, ask for a completion. Likewise how many receives get a message as soon as they are posted.
    """

    posted = signalled = BATCH_POSTED
    received = 0

    def __init__(self, _pd: Any, attr: Any) -> None:
        self.qp_num = next(_numbers)
        self._scq, self._rcq = attr

    def modify(self, *_args: Any) -> None:
        pass

    def post_send(self, first: Any, _failed: Any) -> None:
        number = first.wr_id
        silent = NullQp.posted - NullQp.signalled
        self._scq.done.extend((number + i, self.qp_num, 0) for i in range(silent, NullQp.posted))

    def post_recv(self, first: Any, _failed: Any) -> None:
        number = first.wr_id
        self._rcq.done.extend((number + i, self.qp_num, _RECV) for i in range(NullQp.received))

    def close(self) -> None:
        pass


def _init_attr(scq: Any = None, rcq: Any = None, **_more: Any) -> Any:
    return scq, rcq


def install() -> None:
    """Put the null device in pyverbs' place; before anything of ours imports it."""
    device.Context = NullDevice
    device.get_device_list = list
    pd.PD = mr.MREx = NullObject
    cq.CQ, cq.CompChannel = NullCq, NullChannel
    qp.QP, qp.QPInitAttr = NullQp, _init_attr

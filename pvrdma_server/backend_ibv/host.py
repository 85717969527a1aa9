"""The host device through pyverbs: open it, ask it, and turn pyverbs' exceptions into ours.

Contract: `verb` is the one place where a pyverbs exception becomes a `BackendError` that names what to change. Values
that leave this module are plain integers, bytes and our own records.
"""

import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import structlog
from pyverbs import libibverbs_enums as enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.device import Context, get_device_list
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError

from pvrdma_server.abi.pvrdma_verbs import PORT_ATTR, PortAttr, PortSpeed, QpAttr
from pvrdma_server.backend import AddressVector, BackendLimits
from pvrdma_server.errors import BackendError, ConfigError

EVENT: Final = enums.ibv_event_type
_ACCESS: Final = enums.ibv_access_flags
ON_DEMAND: Final = int(_ACCESS.IBV_ACCESS_ON_DEMAND)
GID_TYPE_ROCE_V1: Final = 1
GID_TYPE_ROCE_V2: Final = 2
# The guest's wire fields have 32 bits, and its driver allocates tables by some of them.
_MAX_COUNT: Final = 1 << 20
_DEFAULT_HOP_LIMIT: Final = 64
# The kernel asks for the peer's hardware address, a second at most, and has these when there is no answer or no way.
_UNREACHABLE: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_told: Final[set[str]] = set()
# pyverbs has loaded it already.
_verbs_library: Final = ctypes.CDLL("libibverbs.so.1")


class HostGid(NamedTuple):
    """One entry of the host port's GID table. `gid` is 16 bytes in wire order, `ifindex` its netdev's."""

    number: int
    gid: bytes
    gid_type: int
    ifindex: int


class HostEvent(NamedTuple):
    """An asynchronous event. `element` is the address of the host's object or the number of the port; 0: unknown."""

    kind: int
    element: int


class _AsyncEvent(ctypes.Structure):
    """Source: verbs.h struct ibv_async_event."""

    _fields_ = (("element", ctypes.c_uint64), ("event_type", ctypes.c_int))


@contextmanager
def verb(name: str, advice: str = "") -> Iterator[None]:
    """Run a pyverbs call; its exception becomes a BackendError with errno and advice."""
    try:
        yield
    except PyverbsRDMAError as e:
        code = abs(e.error_code) if e.error_code not in (-1, 0) else errno.EIO
        raise BackendError(code, name, f"{e}{_advice(code, advice)}") from e
    except PyverbsError as e:
        raise BackendError(errno.EINVAL, name, str(e)) from e
    except OSError as e:
        raise BackendError(e.errno or errno.EIO, name, f"{e}{_advice(e.errno or 0, advice)}") from e


@contextmanager
def giving_back(name: str) -> Iterator[None]:
    """Run a pyverbs call that destroys something. What fails is logged, once a verb: there is nothing to be done.

    A device that is gone fails every one of them.
    """
    try:
        with verb(name):
            yield
    except BackendError as e:
        if name not in _told:
            _told.add(name)
            structlog.get_logger(component="backend_ibv").warning(
                "not_given_back", error=str(e), once=True
            )


def _advice(code: int, advice: str) -> str:
    if code in (errno.EIO, errno.ENODEV):
        return "; the host device is gone or reset: bring it back, then restart this server and the VM's device"
    if code == errno.EPERM:
        return "; the server's user needs /dev/infiniband/uverbs* (group rdma)"
    if code in _UNREACHABLE:
        return f"; {advice}: nobody answers there; see its address, and the route to it over the port's netdev"
    return f"; {advice}" if advice and code in (errno.ENOMEM, errno.EAGAIN, errno.EINVAL) else ""


def memlock_advice(length_bytes: int) -> str:
    """What to change when memory cannot be pinned."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return (
        f"pinning {length_bytes} bytes with RLIMIT_MEMLOCK {limit}: "
        "raise it (systemd LimitMEMLOCK=infinity, or ulimit -l unlimited)"
    )


class HostDevice:
    """An open host device and one of its ports.

    Args:
        name: the device's name, as `ibv_devices` lists it.
        port: port number, from 1.

    Raises:
        ConfigError: there is no such device or port, or it may not be opened.
    """

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port
        before = _event_fds()
        try:
            self.context: Any = Context(name=name)
        except PyverbsError as e:
            known = (
                ", ".join(sorted(_names())) or "none: load a driver, or rdma_rxe and rdma link add"
            )
            raise ConfigError(f"cannot open RDMA device {name}: {e} (devices: {known})") from e
        # pyverbs does not tell the descriptor of asynchronous events; opening a device makes just one.
        self.async_fd = next(iter(_event_fds() - before), -1)
        if self.async_fd >= 0:
            os.set_blocking(self.async_fd, False)
        try:
            self.attr: Any = self.context.query_device()
            self.port_attr()
        except PyverbsError as e:
            raise ConfigError(f"RDMA device {name} port {port}: {e}") from e
        self.on_demand = self._has_on_demand_paging()
        self._context_address = ctypes.c_void_p(getattr(self.context, "context", None))

    def close(self) -> None:
        """Close the device and everything of it."""
        with giving_back("ibv_close_device"):
            self.context.close()

    def port_attr(self) -> Any:
        """The port's attributes, pyverbs' record."""
        return self.context.query_port(self.port)

    def next_event(self) -> HostEvent | None:
        """The next asynchronous event, or None when there is none.

        pyverbs' own call does not tell what the event is about; where it tells the address of its context, the
        library's is called with that.
        """
        if self._context_address:
            event = _AsyncEvent()
            if _verbs_library.ibv_get_async_event(self._context_address, ctypes.byref(event)):
                return None
            _verbs_library.ibv_ack_async_event(ctypes.byref(event))
            return HostEvent(int(event.event_type), int(event.element))
        try:
            known = self.context.get_async_event()
        except PyverbsRDMAError:
            return None
        known.ack()
        return HostEvent(int(known.event_type), 0)

    def gids(self) -> list[HostGid]:
        """The port's GID table."""
        with verb("ibv_query_gid_table"):
            table = self.context.query_gid_table(int(self.port_attr().gid_tbl_len))
        return [
            HostGid(
                int(entry.gid_index),
                _gid_bytes(entry),
                int(entry.gid_type),
                int(entry.ndev_ifindex),
            )
            for entry in table
            if entry.port_num == self.port
        ]

    def _has_on_demand_paging(self) -> bool:
        # rxe looks pages up by iova as if it were our address, and the host's kernel dies of it (Linux 7.2).
        if not os.path.exists(f"/sys/class/infiniband/{self.name}/device"):
            return False
        try:
            caps = self.context.query_device_ex().odp_caps
            return bool(int(caps.general_caps) & 1) and bool(int(caps.rc_odp_caps) & 0b11111)
        except (PyverbsError, AttributeError):
            return False


def _names() -> list[str]:
    try:
        return [device.name.decode() for device in get_device_list()]
    except PyverbsError:
        return []


def _event_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "[infinibandevent]" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:
            continue  # the descriptor of this very listing
    return found


def _gid_bytes(entry: Any) -> bytes:
    # Both halves are in wire order in memory, read as the machine's own integers.
    halves = (int(entry.gid_subnet_prefix), int(entry.gid_interface_id))
    return b"".join(half.to_bytes(8, "little") for half in halves)


def gid_text(gid: bytes) -> str:
    """A GID as pyverbs takes it: eight groups of four digits."""
    return ":".join(gid[i : i + 2].hex() for i in range(0, 16, 2))


def make_limits(device: HostDevice, node_guid: bytes) -> BackendLimits:
    """The host device's limits, clamped to what the guest's fields and our queues take."""
    attr = device.attr

    def count(value: int) -> int:
        return max(0, min(int(value), _MAX_COUNT))

    max_wr = count(min(attr.max_qp_wr, attr.max_cqe))
    return BackendLimits(
        max_qp=count(attr.max_qp), max_qp_wr=max_wr, max_sge=int(attr.max_sge),
        max_cq=count(attr.max_cq), max_cqe=_MAX_COUNT,
        max_mr=count(attr.max_mr), max_mr_size=min(int(attr.max_mr_size), 1 << 30),
        max_pd=count(attr.max_pd), max_ah=count(attr.max_ah) or _MAX_COUNT,
        max_srq=count(attr.max_srq), max_srq_wr=min(count(attr.max_srq_wr), max_wr),
        max_srq_sge=int(attr.max_srq_sge),
        max_qp_rd_atom=min(int(attr.max_qp_rd_atom), 128),
        max_qp_init_rd_atom=min(int(attr.max_qp_init_rd_atom), 128),
        max_fast_reg_pages=0, max_msg_size=int(device.port_attr().max_msg_sz),
        gid_table_len=min(int(device.port_attr().gid_tbl_len), 256),
        local_ca_ack_delay=int(attr.local_ca_ack_delay),
        atomics=int(attr.atomic_caps) != 0, memory_management=False, node_guid=node_guid,
    )  # fmt: skip


_NO_PORT: Final[PortAttr] = PORT_ATTR.unpack_from(bytes(PORT_ATTR.size))


def make_port_attr(attr: Any) -> PortAttr:
    """The host port's attributes as the guest's; speeds beyond what its field can say are clamped."""
    return _NO_PORT._replace(
        state=int(attr.state), max_mtu=int(attr.max_mtu), active_mtu=int(attr.active_mtu),
        max_msg_sz=min(int(attr.max_msg_sz), 1 << 31), max_vl_num=int(attr.max_vl_num),
        active_width=int(attr.active_width) or 1,
        active_speed=min(int(attr.active_speed) or 1, int(PortSpeed.EDR)),
        phys_state=int(attr.phys_state),
    )  # fmt: skip


def ah_attr_of_qp(attr: QpAttr, sgid_index: int, port: int) -> Any:
    """The address of a connected QP, with the host's index for its source GID."""
    grh = attr.ah_attr.grh
    return _ah_attr(
        grh.dgid,
        sgid_index,
        port,
        grh.hop_limit,
        grh.traffic_class,
        grh.flow_label,
        attr.ah_attr.sl,
    )


def ah_attr_of_av(av: AddressVector, sgid_index: int, port: int) -> Any:
    """The address of a datagram, with the host's index for its source GID."""
    return _ah_attr(av.dgid, sgid_index, port, av.hop_limit, av.traffic_class, av.flow_label, 0)


def _ah_attr(
    dgid: bytes,
    sgid_index: int,
    port: int,
    hop_limit: int,
    traffic_class: int,
    flow_label: int,
    sl: int,
) -> Any:
    route = GlobalRoute(
        dgid=GID(gid_text(dgid)), flow_label=flow_label, sgid_index=sgid_index,
        hop_limit=hop_limit or _DEFAULT_HOP_LIMIT, traffic_class=traffic_class,
    )  # fmt: skip
    return AHAttr(gr=route, is_global=1, port_num=port, sl=sl)

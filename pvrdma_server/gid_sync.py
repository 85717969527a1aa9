"""The addresses behind a guest's GIDs, on the netdev of the host's RDMA port.

A RoCE port has a GID for every address of its netdev and no other. With policy `add` a GID that the guest adds and the
port lacks becomes an address of the netdev, and goes again when the guest gives it up, is reset or disconnects. A
marker file names what was added and outlives a crash: the next start of the same VM's server takes it away first. With
policy `check` nothing is changed; one line of the log says which address is missing where.

Contract: implements `backend_ibv.AddressKeeper`. Never raises for an address that cannot be added: the guest's GID then
does not work, which is logged with what to do. Only addresses added here are ever removed.
"""

import errno
import importlib
import ipaddress
import json
import os
import socket
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import structlog

from pvrdma_server.errors import ConfigError

_V4_MAPPED: Final = bytes(10) + b"\xff\xff"
# No route comes with it (the guest's peers are reached by the host's own), and no duplicate-address detection: the
# guest that shows the address to the network is its rightful owner.
_IFA_F_NODAD: Final = 0x02
_IFA_F_NOPREFIXROUTE: Final = 0x200
_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")
_MAX_TOLD: Final = 256
# Not a reason: nothing is to be done.
_THERE: Final = "it is there"
_ADVICE: Final = {
    errno.EPERM: "; CAP_NET_ADMIN is needed",
    errno.EACCES: "; CAP_NET_ADMIN is needed, and IPv6 not disabled on the netdev",
    errno.ENODEV: "; the server must run in the network namespace of the port's netdev",
}


class Policy(Enum):
    """What to do about a GID that the host's port lacks."""

    CHECK = "check"
    ADD = "add"


class Address(NamedTuple):
    """An address of a netdev, as text."""

    netdev: str
    address: str
    prefix: int

    def __str__(self) -> str:
        return f"{self.address}/{self.prefix} on {self.netdev}"


def address_of_gid(netdev: str, gid: bytes) -> Address:
    """The address whose GID is `gid` (16 bytes, wire order)."""
    if gid[:12] == _V4_MAPPED:
        return Address(netdev, str(ipaddress.IPv4Address(gid[12:])), 32)
    address = ipaddress.IPv6Address(gid)
    return Address(netdev, str(address), 64 if address.is_link_local else 128)


class Netlink(Protocol):
    """What changes a netdev's addresses."""

    def add(self, address: Address) -> None:
        """Add it. Raises OSError: EEXIST when it is there, EPERM without CAP_NET_ADMIN."""

    def remove(self, address: Address) -> None:
        """Remove it. Raises OSError."""


class Pyroute2Netlink:
    """`Netlink` through pyroute2.

    Raises:
        ConfigError: pyroute2 is not installed.
    """

    def __init__(self) -> None:
        try:
            self._open: Callable[[], Any] = importlib.import_module("pyroute2").IPRoute
        except ImportError as e:
            raise ConfigError(
                "--gid-policy add needs pyroute2: install python3-pyroute2, or pvrdma-server[ibv]"
            ) from e

    def add(self, address: Address) -> None:
        """See `Netlink`."""
        flags = _IFA_F_NOPREFIXROUTE | (_IFA_F_NODAD if ":" in address.address else 0)
        self._change("add", address, IFA_FLAGS=flags)

    def remove(self, address: Address) -> None:
        """See `Netlink`."""
        self._change("delete", address)

    def _change(self, command: str, address: Address, **more: Any) -> None:
        try:
            with self._open() as netlink:
                netlink.addr(
                    command, index=socket.if_nametoindex(address.netdev), address=address.address,
                    prefixlen=address.prefix, **more,
                )  # fmt: skip
        except OSError:
            raise
        except Exception as e:
            # pyroute2's own error carries the kernel's errno, and is no OSError.
            code = getattr(e, "code", None)
            if not isinstance(code, int):
                raise
            raise OSError(abs(code), os.strerror(abs(code))) from e


class GidSync:
    """One server's addresses. Implements `backend_ibv.AddressKeeper`.

    Args:
        policy: whether the netdev may be changed.
        marker: file that names what was added; its folder must exist. None: nothing survives a crash.
        netlink: what changes the netdev; only used with policy `add`.
    """

    def __init__(self, policy: Policy, marker: Path | None, netlink: Netlink | None) -> None:
        self._policy = policy
        self._marker = marker
        self._netlink = netlink
        self._ours: dict[bytes, Address] = {}
        self._told: set[tuple[str, Address]] = set()
        self._marker_told: set[str] = set()
        self._log: Any = structlog.get_logger(component="gid_sync")
        if policy is Policy.ADD:
            self._clean_up()

    def add(self, netdev: str, gid: bytes) -> bool:
        """See `backend_ibv.AddressKeeper`."""
        address = address_of_gid(netdev, gid)
        if self._policy is Policy.CHECK or self._netlink is None:
            self._missing(
                address,
                "the guest's GID does not work until it is there; add it, or use --gid-policy add",
            )
            return False
        why = _not_for_guests(address)
        if not why:
            # Written first: a crash between the two leaves a name too many, not an address.
            self._ours[gid] = address
            why = self._write_marker() or self._add(address)
        if not why:
            self._note("gid_address_added", address)
            return True
        if self._ours.pop(gid, None) is not None:
            self._say_marker(self._write_marker())
        if why is not _THERE:
            self._missing(address, f"cannot be added: {why}")
        return why is _THERE

    def _add(self, address: Address) -> str:
        """Why it cannot be added, or nothing."""
        assert self._netlink is not None
        try:
            self._netlink.add(address)
        except OSError as e:
            if e.errno == errno.EEXIST:
                return _THERE
            return f"{e.strerror}{_ADVICE.get(e.errno or 0, '')}"
        return ""

    def remove(self, gid: bytes) -> bool:
        """See `backend_ibv.AddressKeeper`."""
        address = self._ours.pop(gid, None)
        if address is None:
            return False
        self._take_away(address)
        self._say_marker(self._write_marker())
        return True

    def clear(self) -> bool:
        """See `backend_ibv.AddressKeeper`."""
        ours = list(self._ours)
        for gid in ours:
            self.remove(gid)
        return bool(ours)

    def _take_away(self, address: Address) -> None:
        assert self._netlink is not None
        try:
            self._netlink.remove(address)
            self._note("gid_address_removed", address)
        except OSError as e:
            if e.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                self._log.error("gid_address_stays", address=str(address), why=e.strerror)

    def _note(self, event: str, address: Address) -> None:
        if self._news(event, address):
            self._log.info(event, address=str(address))

    def _missing(self, address: Address, why: str) -> None:
        if self._news("gid_address_missing", address):
            self._log.warning("gid_address_missing", address=str(address), why=why, once=True)

    def _news(self, event: str, address: Address) -> bool:
        """Whether to log it: each once, and not without end, for a guest can name 2^128 addresses."""
        said = (event, address)
        if said in self._told or len(self._told) >= _MAX_TOLD:
            return False
        self._told.add(said)
        return True

    # --- the marker --------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        if self._marker is None or not self._marker.exists():
            return
        try:
            left = [Address(*entry) for entry in json.loads(self._marker.read_text())]
        except (OSError, ValueError, TypeError) as e:
            self._log.error("gid_marker_unreadable", path=str(self._marker), why=str(e))
            left = []
        for address in left:
            self._take_away(address)
        self._say_marker(self._write_marker())

    def _write_marker(self) -> str:
        """Why it cannot be written, or nothing."""
        if self._marker is None:
            return ""
        try:
            if not self._ours:
                self._marker.unlink(missing_ok=True)
                return ""
            beside = self._marker.with_name(f".{self._marker.name}.tmp")
            beside.write_text(json.dumps([list(address) for address in self._ours.values()]))
            beside.rename(self._marker)
        except OSError as e:
            return f"{self._marker}: {e.strerror}; the folder of --state-dir must be writable and have room"
        return ""

    def _say_marker(self, why: str) -> None:
        if why and why not in self._marker_told:
            self._marker_told.add(why)
            self._log.error("gid_marker_not_written", why=why, once=True)


def _not_for_guests(address: Address) -> str:
    """Why no guest may have it on the host, or nothing."""
    ip = ipaddress.ip_address(address.address)
    if ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip == _BROADCAST:
        return "it is no address of one host on a network"
    return ""

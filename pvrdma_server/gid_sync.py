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
from contextlib import suppress
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
        self._told: set[Address] = set()
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
        # Written first: a crash between the two leaves a name too many, not an address.
        self._ours[gid] = address
        self._write_marker()
        try:
            self._netlink.add(address)
        except OSError as e:
            del self._ours[gid]
            self._write_marker()
            if e.errno == errno.EEXIST:
                return True
            self._missing(address, f"cannot be added: {e.strerror}; CAP_NET_ADMIN is needed")
            return False
        self._log.info("gid_address_added", address=str(address))
        return True

    def remove(self, gid: bytes) -> None:
        """See `backend_ibv.AddressKeeper`."""
        address = self._ours.pop(gid, None)
        if address is not None:
            self._take_away(address)
            self._write_marker()

    def clear(self) -> None:
        """See `backend_ibv.AddressKeeper`."""
        for gid in list(self._ours):
            self.remove(gid)

    def _take_away(self, address: Address) -> None:
        assert self._netlink is not None
        try:
            self._netlink.remove(address)
            self._log.info("gid_address_removed", address=str(address))
        except OSError as e:
            if e.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                self._log.error("gid_address_stays", address=str(address), why=e.strerror)

    def _missing(self, address: Address, why: str) -> None:
        if address not in self._told:
            self._told.add(address)
            self._log.warning("gid_address_missing", address=str(address), why=why, once=True)

    # --- the marker --------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        if self._marker is None or not self._marker.exists():
            return
        try:
            left = [Address(*entry) for entry in json.loads(self._marker.read_text())]
        except (ValueError, TypeError) as e:
            self._log.error("gid_marker_unreadable", path=str(self._marker), why=str(e))
            left = []
        for address in left:
            self._take_away(address)
        self._write_marker()

    def _write_marker(self) -> None:
        if self._marker is None:
            return
        if not self._ours:
            with suppress(FileNotFoundError):
                self._marker.unlink()
            return
        beside = self._marker.with_name(f".{self._marker.name}.tmp")
        beside.write_text(json.dumps([list(address) for address in self._ours.values()]))
        beside.rename(self._marker)

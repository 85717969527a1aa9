"""The guest's GIDs on the host's port, and address handles for datagrams.

A GID works only if the host's port has it, at an index of its own choosing; the kernel makes that entry from an address
of the port's netdev. Who may give the netdev an address is the `AddressKeeper`'s business (gid_sync.py).
"""

import errno
import socket
import time
from collections import OrderedDict
from typing import Any, Final, Protocol

import structlog
from pyverbs.addr import AH

from pvrdma_server.backend import HostGidFacts, Ud
from pvrdma_server.backend_ibv.host import (
    GID_TYPE_ROCE_V1,
    GID_TYPE_ROCE_V2,
    HostDevice,
    ah_attr_of_av,
    gid_text,
    giving_back,
    verb,
)
from pvrdma_server.backend_ibv.memory import IbvPd
from pvrdma_server.errors import BackendError

# The kernel makes a GID of a new address in a work item of its own: some milliseconds.
_APPEAR_S: Final = 0.5
_LOOK_AGAIN_S: Final = 0.002
# A guest can name 2^128 destinations; each handle costs the host an object.
_MAX_HANDLES: Final = 1024
# Source: enum pvrdma_gid_type: bits, not numbers.
_GUEST_ROCE_V1: Final = 1


class AddressKeeper(Protocol):
    """Gives the host's netdev the addresses behind the guest's GIDs, if it may."""

    def add(self, netdev: str, gid: bytes) -> bool:
        """See that `netdev` has the address of `gid`; false when it lacks it and must not be given it (logged)."""

    def remove(self, gid: bytes) -> bool:
        """Take the address away again, if it was ours; whether it was."""

    def clear(self) -> bool:
        """Take every address of ours away; whether there was one."""


class Addresses:
    """The guest's GID table as the host sees it."""

    def __init__(self, device: HostDevice, keeper: AddressKeeper) -> None:
        self._device = device
        self._keeper = keeper
        self._gids: dict[int, tuple[bytes, int]] = {}
        # Until when the kernel may take to make the host's entry of a new GID.
        self._due_s: dict[int, float] = {}
        # Until when it may show GIDs whose addresses are gone.
        self._stale_s = 0.0
        self._known: dict[int, int] = {}
        self._handles: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._log: Any = structlog.get_logger(component="backend_ibv")

    def add(self, index: int, gid: bytes, guest_type: int) -> None:
        """Own a GID; its address is added if need be and allowed."""
        host_type = GID_TYPE_ROCE_V1 if guest_type == _GUEST_ROCE_V1 else GID_TYPE_ROCE_V2
        self._gids[index] = (gid, host_type)
        self._known.pop(index, None)
        now_s = time.monotonic()
        missing = now_s < self._stale_s or self._find(gid, host_type) is None
        if missing and self._keeper.add(self.netdev(), gid):
            self._due_s[index] = now_s + _APPEAR_S

    def remove(self, index: int) -> None:
        """Give a GID up."""
        gid, _ = self._gids.pop(index, (b"", 0))
        self._due_s.pop(index, None)
        self.forget_indices()
        still_used = any(gid == other for other, _ in self._gids.values())
        if gid and not still_used and self._keeper.remove(gid):
            self._stale_s = time.monotonic() + _APPEAR_S

    def clear(self) -> None:
        """Give every GID up."""
        self._gids.clear()
        self._due_s.clear()
        self.forget_indices()
        if self._keeper.clear():
            self._stale_s = time.monotonic() + _APPEAR_S

    def forget_indices(self) -> None:
        """The host's table has changed: look GIDs up again, and make address handles again."""
        self._known.clear()
        self.close_handles()

    def host_index(self, index: int) -> int:
        """The host's index of the guest's GID.

        Raises:
            BackendError: the guest has no such GID, or the host's port has not.
        """
        known = self._known.get(index)
        if known is not None:
            return known
        if index not in self._gids:
            raise BackendError(errno.EINVAL, "ibv_modify_qp", f"the guest has no GID {index}")
        gid, host_type = self._gids[index]
        found = self._await(gid, host_type, self._due_s.pop(index, 0.0))
        if found is None:
            raise BackendError(
                errno.EADDRNOTAVAIL, "ibv_modify_qp",
                f"GID {gid_text(gid)} is not in the table of {self._device.name} port {self._device.port}: "
                f"add its address to {self.netdev()}, or run with --gid-policy add",
            )  # fmt: skip
        self._known[index] = found
        return found

    def _await(self, gid: bytes, host_type: int, due_s: float) -> int | None:
        # Only a GID whose address is new, and that once: the guest's vCPU waits meanwhile.
        while (found := self._find(gid, host_type)) is None and time.monotonic() < due_s:
            time.sleep(_LOOK_AGAIN_S)
        return found

    def _find(self, gid: bytes, host_type: int) -> int | None:
        for entry in self._device.gids():
            if entry.gid == gid and entry.gid_type == host_type:
                return entry.number
        return None

    def netdev(self) -> str:
        """The netdev of the host's port."""
        for entry in self._device.gids():
            if entry.ifindex:
                try:
                    return socket.if_indextoname(entry.ifindex)
                except OSError:
                    continue
        return "its netdev"

    def facts(self) -> dict[int, HostGidFacts]:
        """The guest's GIDs on the host, by the guest's index. Looks once, and waits for nothing."""
        table = {(entry.gid, entry.gid_type): entry.number for entry in self._device.gids()}
        netdev = self.netdev()
        return {
            index: HostGidFacts(self._device.name, self._device.port, table.get(entry), netdev)
            for index, entry in self._gids.items()
        }

    # --- address handles ---------------------------------------------------------------------------------------------

    def handle(self, pd: IbvPd, ud: Ud) -> Any:
        """An address handle for a datagram, made or found. Raises BackendError."""
        key = (id(pd), ud.av)
        found = self._handles.get(key)
        if found is not None:
            self._handles.move_to_end(key)
            return found
        if len(self._handles) >= _MAX_HANDLES:
            _, oldest = self._handles.popitem(last=False)
            with giving_back("ibv_destroy_ah"):
                oldest.close()
        attr = ah_attr_of_av(ud.av, self.host_index(ud.av.sgid_index), self._device.port)
        with verb("ibv_create_ah", f"a datagram to {gid_text(ud.av.dgid)}"):
            made = AH(pd.pd, attr=attr)
        self._handles[key] = made
        return made

    def close_handles(self, pd: IbvPd | None = None) -> None:
        """Destroy the address handles of one protection domain, or all."""
        for key in [k for k in self._handles if pd is None or k[0] == id(pd)]:
            with giving_back("ibv_destroy_ah"):
                self._handles.pop(key).close()

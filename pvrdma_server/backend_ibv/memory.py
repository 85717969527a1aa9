"""Protection domains and memory regions on the host device.

A user's region is registered at once, with the guest's address as iova; its keys are the host's. A kernel's DMA region
stands for all of guest memory by bus address: its key is ours (no host key covers memory that comes and goes), and the
first work request that uses it in a DMA region of the client registers just that one, on demand where the device can.

Contract: `SgeTranslator.translate` raises only BackendError and BadGuestAddress. A region stays registered while the
client unmaps and maps the same memory again; memory that comes back as another file's is registered anew.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pyverbs.mr import MREx
from pyverbs.pd import PD

from pvrdma_server.abi.vmw_pvrdma_abi import Sge
from pvrdma_server.backend_ibv.host import ON_DEMAND, HostDevice, memlock_advice, verb
from pvrdma_server.backend_ibv.mapping import Mapping, address_of
from pvrdma_server.errors import BackendError, BadGuestAddress
from pvrdma_server.guest_memory import PAGE_SIZE, DmaRegion, GuestMemory, GuestPages

# Keys of DMA regions. Host devices number theirs from below, or at random among 2^24 indices; a clash would need
# a host key with these 20 bits, and is looked for at registration.
_DMA_KEY_BASE: Final = 0xFFFFF000
_LOCAL_WRITE: Final = 1


@dataclass(slots=True)
class _HostRegion:
    """One DMA region of the client, registered with the host."""

    length: int
    identity: str
    mr: Any
    view: memoryview  # keeps the mapping that the host's pages are found through


@dataclass(slots=True, eq=False)
class IbvPd:
    """A protection domain. Implements `backend.BackendPd`."""

    pd: Any
    device: HostDevice
    privileged: bool
    dma_keys: set[int] = field(default_factory=set)
    mrs: "dict[int, IbvMr]" = field(default_factory=dict)
    regions: dict[int, _HostRegion] = field(default_factory=dict)
    on_destroy: "Callable[[IbvPd], None] | None" = None

    def destroy(self) -> None:
        """See `backend.BackendPd`."""
        if self.on_destroy is not None:
            self.on_destroy(self)
        for region in self.regions.values():
            region.mr.close()
        self.regions.clear()
        with verb("ibv_dealloc_pd"):
            self.pd.close()


@dataclass(slots=True, eq=False)
class IbvMr:
    """A user's region. Implements `backend.BackendMr`."""

    lkey: int
    rkey: int
    pd: IbvPd
    start: int
    length: int
    access: int
    mr: Any
    mapping: Mapping

    def destroy(self) -> None:
        """See `backend.BackendMr`."""
        self.pd.mrs.pop(self.lkey, None)
        with verb("ibv_dereg_mr"):
            self.mr.close()
        self.mapping.close()


@dataclass(slots=True, eq=False)
class IbvDmaMr:
    """A kernel's region over all memory. Implements `backend.BackendMr`."""

    lkey: int
    rkey: int
    pd: IbvPd

    def destroy(self) -> None:
        """See `backend.BackendMr`."""
        self.pd.dma_keys.discard(self.lkey)


class Registrar:
    """Makes protection domains and regions."""

    def __init__(self, device: HostDevice, memory: GuestMemory) -> None:
        self._device = device
        self._memory = memory
        self._next_dma_key = _DMA_KEY_BASE

    def create_pd(self, *, privileged: bool) -> IbvPd:
        """A protection domain."""
        with verb("ibv_alloc_pd"):
            return IbvPd(PD(self._device.context), self._device, privileged)

    def reg_mr(
        self, pd: IbvPd, *, start: int, length: int, access: int, pages: GuestPages
    ) -> IbvMr:
        """Register guest pages at the guest's virtual address."""
        mapping = Mapping(pages.views_untrusted(0, pages.length_bytes))
        try:
            with verb("ibv_reg_mr", memlock_advice(length)):
                mr = MREx(
                    pd.pd, length, access, address=mapping.address + start % PAGE_SIZE, iova=start
                )
        except BackendError:
            mapping.close()
            raise
        if int(mr.lkey) & _DMA_KEY_BASE == _DMA_KEY_BASE:
            mr.close()
            mapping.close()
            raise BackendError(
                errno.EAGAIN, "ibv_reg_mr", "the host's key is one of those kept for DMA regions"
            )
        made = IbvMr(int(mr.lkey), int(mr.rkey), pd, start, length, access, mr, mapping)
        pd.mrs[made.lkey] = made
        return made

    def covers(self, pd: IbvPd, sges: tuple[Sge, ...], *, writes: bool) -> bool:
        """Whether every element lies in a region of its key that allows the access. For post-mortems only."""
        own = {int(region.mr.lkey) for region in pd.regions.values()}
        for sge in sges:
            if sge.lkey in own or not sge.length:
                continue
            mr = pd.mrs.get(sge.lkey)
            if mr is None or (writes and not mr.access & _LOCAL_WRITE):
                return False
            if sge.addr < mr.start or sge.addr + sge.length > mr.start + mr.length:
                return False
        return True

    def reg_dma_mr(self, pd: IbvPd, _access: int) -> IbvDmaMr:
        """A key for all of guest memory by bus address; nothing is pinned until a work request uses it."""
        if not pd.privileged:
            raise BackendError(errno.EPERM, "ibv_reg_mr", "a DMA region is the guest kernel's")
        key = self._next_dma_key
        self._next_dma_key = _DMA_KEY_BASE | ((key + 1) & 0xFFF)
        pd.dma_keys.add(key)
        # Local access only, whatever is asked: nobody but this guest's own kernel has bus addresses.
        return IbvDmaMr(key, key, pd)

    def translate(self, pd: IbvPd, sges: tuple[Sge, ...]) -> tuple[Sge, ...]:
        """Elements under a DMA key as elements under host keys, split where regions meet; others as they are.

        Raises:
            BadGuestAddress: nothing is mapped there.
            BackendError: it cannot be registered.
        """
        keys = pd.dma_keys
        if not any(sge.lkey in keys for sge in sges):
            return sges
        found: list[Sge] = []
        for sge in sges:
            if sge.lkey in keys and sge.length:
                found += self._split(pd, sge)
            else:
                found.append(sge)
        return tuple(found)

    def _split(self, pd: IbvPd, sge: Sge) -> list[Sge]:
        parts = []
        position, end = sge.addr, sge.addr + sge.length
        while position < end:
            region = self._region_at(position)
            take = min(end, region.iova + region.length) - position
            parts.append(Sge(position, take, self._registered(pd, region)))
            position += take
        return parts

    def _region_at(self, position: int) -> DmaRegion:
        for region in self._memory.regions:
            if region.iova <= position < region.iova + region.length and region.view is not None:
                return region
        raise BadGuestAddress(position, 0, "a DMA address where no RAM is mapped")

    def _registered(self, pd: IbvPd, region: DmaRegion) -> int:
        assert region.view is not None
        known = pd.regions.get(region.iova)
        if known is not None and known.length == region.length:
            return int(known.mr.lkey)
        if known is not None:
            known.mr.close()
        address = address_of(region.view)
        access = _LOCAL_WRITE if region.writable else 0
        mr = self._reg_region(pd, region, address, access)
        pd.regions[region.iova] = _HostRegion(region.length, _identity(address), mr, region.view)
        return int(mr.lkey)

    def _reg_region(self, pd: IbvPd, region: DmaRegion, address: int, access: int) -> Any:
        if self._device.on_demand:
            try:
                with verb("ibv_reg_mr"):
                    return MREx(
                        pd.pd, region.length, access | ON_DEMAND, address=address, iova=region.iova
                    )
            except BackendError:
                pass  # a device may offer paging for other memory or transports only: pin
        with verb("ibv_reg_mr", memlock_advice(region.length)):
            return MREx(pd.pd, region.length, access, address=address, iova=region.iova)

    def memory_mapped(self, pds: list[IbvPd]) -> None:
        """Guest memory has changed: drop host regions whose memory came back as another file's."""
        for pd in pds:
            for iova, known in list(pd.regions.items()):
                now = next((r for r in self._memory.regions if r.iova == iova), None)
                if now is None or now.view is None:
                    continue  # it may come back
                if now.length != known.length or _identity(address_of(now.view)) != known.identity:
                    del pd.regions[iova]
                    known.mr.close()


def _identity(address: int) -> str:
    """The file and offset behind an address of ours; the same for two mappings of the same memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, inode, *_ = line.split()
        low, high = (int(word, 16) for word in span.split("-"))
        if low <= address < high:
            return f"{device} {inode} {int(offset, 16) + address - low:x}"
    return ""

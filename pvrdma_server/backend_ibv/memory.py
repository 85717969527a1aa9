"""Protection domains and memory regions on the host device.

A user's region is registered at once, with the guest's address as iova; its keys are the host's. A kernel's DMA region
stands for all of guest memory by bus address: its key is ours (no host key covers memory that comes and goes), and the
first work request that uses it in a DMA region of the client registers just that one, on demand where the device can.

Contract: `Registrar.translate` raises only BackendError and BadGuestAddress. When the client unmaps memory below a
region, its use has ended before the client is answered; when the same memory comes back, the region works again under
the same keys. Memory that comes back as another file's leaves a user's region dead until the guest registers anew.
"""

import ctypes
import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from pyverbs.mr import MREx
from pyverbs.pd import PD

from pvrdma_server.abi.vmw_pvrdma_abi import Sge
from pvrdma_server.backend_ibv.backing import Origins, Piece, still_there
from pvrdma_server.backend_ibv.host import ON_DEMAND, HostDevice, giving_back, memlock_advice, verb
from pvrdma_server.backend_ibv.mapping import Mapping, address_of
from pvrdma_server.backend_ibv.registration import HostRegion, make_limbo
from pvrdma_server.errors import BackendError, BadGuestAddress
from pvrdma_server.guest_memory import PAGE_SIZE, DmaRegion, GuestMemory, GuestPages

# Keys of DMA regions. Host devices number theirs from below, or at random among 2^24 indices; a clash would need
# a host key with these 20 bits, and is looked for at registration.
_DMA_KEY_BASE: Final = 0xFFFFF000
_LOCAL_WRITE: Final = 1


@dataclass(slots=True)
class _DmaRegion:
    """One DMA region of the client, registered with the host."""

    host: HostRegion
    pieces: list[Piece]
    length: int
    view: memoryview  # keeps the mapping that the host's pages are found through


@dataclass(slots=True, eq=False)
class IbvPd:
    """A protection domain. Implements `backend.BackendPd`."""

    pd: Any
    device: HostDevice
    privileged: bool
    dma_keys: set[int] = field(default_factory=set)
    mrs: "dict[int, IbvMr]" = field(default_factory=dict)
    regions: dict[int, _DmaRegion] = field(default_factory=dict)
    on_destroy: "Callable[[IbvPd], None] | None" = None

    def destroy(self) -> None:
        """See `backend.BackendPd`."""
        if self.on_destroy is not None:
            self.on_destroy(self)
        for region in self.regions.values():
            region.host.close()
        self.regions.clear()
        with giving_back("ibv_dealloc_pd"):
            self.pd.close()


@dataclass(slots=True, eq=False)
class IbvMr:
    """A user's region. Implements `backend.BackendMr`.

    `span` is the guest memory from the first to the last of its pages, `pieces` what it was made of.
    """

    lkey: int
    rkey: int
    pd: IbvPd
    start: int
    length: int
    access: int
    host: HostRegion
    mapping: Mapping
    runs: tuple[tuple[int, int], ...]
    span: tuple[int, int]
    pieces: list[Piece]

    def touches(self, iova: int, length: int) -> bool:
        """Whether a page of it lies in guest memory [iova, iova + length)."""
        low, high = self.span
        return (
            low < iova + length
            and iova < high
            and any(a < iova + length and iova < a + n for a, n in self.runs)
        )

    def destroy(self) -> None:
        """See `backend.BackendMr`."""
        self.pd.mrs.pop(self.lkey, None)
        self.host.close()
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
    """Makes protection domains and regions, and withdraws what the client unmaps.

    Implements `guest_memory.MemoryObserver`.
    """

    def __init__(self, device: HostDevice, memory: GuestMemory) -> None:
        self._device = device
        self._memory = memory
        self._origins = Origins(memory)
        self._limbo = make_limbo(device)
        self._pds: list[IbvPd] = []
        self._next_dma_key = _DMA_KEY_BASE
        self._told: set[str] = set()
        self._log: Any = structlog.get_logger(component="backend_ibv", device=device.name)
        memory.observe(self)

    def create_pd(self, *, privileged: bool, on_destroy: Callable[[IbvPd], None]) -> IbvPd:
        """A protection domain."""

        def gone(pd: IbvPd) -> None:
            self._pds.remove(pd)
            on_destroy(pd)

        with verb("ibv_alloc_pd"):
            pd = IbvPd(PD(self._device.context), self._device, privileged, on_destroy=gone)
        self._pds.append(pd)
        return pd

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
            host = HostRegion(self._device, pd.pd, mr)
        except BackendError:
            mapping.close()
            raise
        if host.lkey & _DMA_KEY_BASE == _DMA_KEY_BASE:
            host.close()
            mapping.close()
            raise BackendError(
                errno.EAGAIN, "ibv_reg_mr", "the host's key is one of those kept for DMA regions"
            )
        runs = pages.runs
        span = (min(a for a, _ in runs), max(a + n for a, n in runs))
        made = IbvMr(
            host.lkey, host.rkey, pd, start, length, access, host, mapping, runs, span,
            self._origins.pieces(*span),
        )  # fmt: skip
        pd.mrs[made.lkey] = made
        return made

    # --- memory that goes and comes back -----------------------------------------------------------------------------

    def memory_unmapped(self, iova: int, length: int) -> None:
        """See `guest_memory.MemoryObserver`."""
        self._origins.forget(iova)
        withdrawn = 0
        for pd in self._pds:
            hit = [mr.host for mr in pd.mrs.values() if mr.touches(iova, length)]
            dma = pd.regions.get(iova)
            for host in [*hit, *([dma.host] if dma is not None else [])]:
                self._withdraw(host)
            withdrawn += len(hit)
        if withdrawn:
            self._tell(
                "memory_unmapped_below_regions", regions=withdrawn, iova=hex(iova),
                why="the VM's memory layout changes; requests that use these regions fail until it is mapped again",
            )  # fmt: skip

    def _withdraw(self, host: HostRegion) -> None:
        try:
            host.withdraw(self._limbo)
        except BackendError as e:
            self._tell(
                "region_lost", lkey=hex(host.lkey), error=str(e),
                why="the host device cannot move a region between protection domains; the guest must register anew",
            )  # fmt: skip

    def memory_mapped(self, iova: int, length: int) -> None:
        """See `guest_memory.MemoryObserver`."""
        for pd in self._pds:
            for mr in pd.mrs.values():
                if mr.host.withdrawn and mr.touches(iova, length):
                    self._restore_user(mr)
            for region in [at for at in pd.regions if iova <= at < iova + length]:
                self._restore_dma(pd, region)

    def _restore_user(self, mr: IbvMr) -> None:
        now = self._origins.pieces(*mr.span)
        if still_there(mr.pieces, now, mr.runs):
            self._restore(mr.host)
        elif all(any(p.start <= a and a + n <= p.end for p in now) for a, n in mr.runs):
            self._tell(
                "region_lost", lkey=hex(mr.lkey),
                why="other memory was mapped at the region's guest addresses; the guest must register anew",
            )  # fmt: skip

    def _restore_dma(self, pd: IbvPd, iova: int) -> None:
        known = pd.regions[iova]
        if not known.host.withdrawn:
            return
        span = (iova, iova + known.length)
        now = self._origins.pieces(*span)
        if still_there(known.pieces, now, [(iova, known.length)]):
            self._restore(known.host)
        if known.host.withdrawn:
            del pd.regions[iova]  # the next work request that needs it registers it
            known.host.close()

    def _restore(self, host: HostRegion) -> None:
        try:
            host.restore()
        except BackendError as e:
            self._tell("region_lost", lkey=hex(host.lkey), error=str(e))

    def _tell(self, event: str, **facts: Any) -> None:
        if event not in self._told:
            self._told.add(event)
            self._log.warning(event, **facts, once=True)

    # --- keys --------------------------------------------------------------------------------------------------------

    def covers(self, pd: IbvPd, sges: tuple[Sge, ...], *, writes: bool) -> bool:
        """Whether every element lies in a region of its key that allows the access. For post-mortems only."""
        own = {region.host.lkey for region in pd.regions.values() if not region.host.withdrawn}
        for sge in sges:
            if sge.lkey in own or not sge.length:
                continue
            mr = pd.mrs.get(sge.lkey)
            if mr is None or mr.host.withdrawn or (writes and not mr.access & _LOCAL_WRITE):
                return False
            if sge.addr < mr.start or sge.addr + sge.length > mr.start + mr.length:
                return False
        return True

    def peek(self, pd: IbvPd, sges: tuple[Sge, ...], length: int) -> bytes:
        """The first bytes that lie in `sges`; fewer than `length` where an element is not to be had any more."""
        found = b""
        for sge in sges:
            take = min(sge.length, length - len(found))
            mr = pd.mrs.get(sge.lkey)
            if mr is not None and mr.start <= sge.addr <= mr.start + mr.length - take:
                first_page = mr.start - mr.start % PAGE_SIZE
                found += ctypes.string_at(mr.mapping.address + sge.addr - first_page, take)
            elif sge.lkey in pd.dma_keys:
                with suppress(BadGuestAddress):
                    found += b"".join(self._memory.views_untrusted(sge.addr, take))
        return found

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
        if not keys or not any(sge.lkey in keys for sge in sges):
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
            return known.host.lkey
        if known is not None:
            known.host.close()
        access = _LOCAL_WRITE if region.writable else 0
        mr = self._reg_region(pd, region, address_of(region.view), access)
        host = HostRegion(self._device, pd.pd, mr)
        pieces = self._origins.pieces(region.iova, region.iova + region.length)
        pd.regions[region.iova] = _DmaRegion(host, pieces, region.length, region.view)
        return host.lkey

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

"""Any sequence of anything: a driver now honest, now not. Nothing is raised, and a reset leaves nothing."""

import struct
from contextlib import suppress

from guest import (
    PAGE,
    SIGNALED,
    CommandFailed,
    CommandTimeout,
    Driver,
    GuestRam,
    Kernel,
    Machine,
    PageDir,
    Qp,
    UserProcess,
    World,
    nothing_left,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unit.bed import GID
from unit.fake_backend import FakeBackend
from unit.fake_watch import FakeWatch

from pvrdma_server.abi import pvrdma_dev_api as api
from pvrdma_server.abi import vmw_pvrdma_abi as abi
from pvrdma_server.abi.pvrdma_dev_api import Cmd, DeviceCtl, Reg
from pvrdma_server.abi.pvrdma_verbs import SrqAttr
from pvrdma_server.backend import RdmaBackend
from pvrdma_server.backend_soft import SoftBackend, SoftConfig
from pvrdma_server.caps import DeviceConfig
from pvrdma_server.device import INLINE_BUDGET, State
from pvrdma_server.journal import MAX_GUEST_WARNINGS

INTERESTING = [0, 1, 2, 3, 4, 7, 15, 16, 17, 64, 255, 256, PAGE, 0xFFFF, 0x8000_0000, 0xFFFF_FFFF]
words = st.sampled_from(INTERESTING) | st.integers(0, 0xFFFF_FFFF)
handles = st.integers(0, 6)
ON_ONE_HANDLE = [
    Cmd.DESTROY_PD,
    Cmd.DESTROY_MR,
    Cmd.DESTROY_CQ,
    Cmd.DESTROY_QP,
    Cmd.DESTROY_UC,
    Cmd.DESTROY_BIND,
    Cmd.DESTROY_SRQ,
    Cmd.QUERY_QP,
    Cmd.QUERY_SRQ,
    Cmd.MODIFY_SRQ,
]
# opcode, num_sge, and words for the union
entry = st.tuples(st.integers(0, 17), st.integers(0, 5), st.lists(words, min_size=1, max_size=4))
MAX_UAR = 4
IOVA = 1 << 20
SIZE = 4 << 20


class HostileGuest(RuleBasedStateMachine):
    """A driver, now honest, now not. Every rule leaves through `Regions` or `PvrdmaDevice` only."""

    def make_backend(self, world: World) -> RdmaBackend:
        return FakeBackend()

    def make_watch(self) -> FakeWatch | None:
        return None

    @initialize()
    def start(self) -> None:
        self.ram = GuestRam(SIZE, IOVA)
        world = World()
        self.machine = Machine(
            self.make_backend(world),
            world=world,
            ram=self.ram,
            config=DeviceConfig(max_uar=MAX_UAR),
            watch=self.make_watch(),
        )
        self.parts = [(IOVA, SIZE)]
        self.boot()

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        device = self.machine.device
        self.machine.write32(1, Reg.CTL, DeviceCtl.RESET)
        assert nothing_left(self.machine.counts())
        assert len(device.memory.regions) == len(self.parts)
        if isinstance(device.backend, FakeBackend):
            assert not +device.backend.alive
        self.ram.close()

    @property
    def is_mapped(self) -> bool:
        return sum(length for _, length in self.parts) == SIZE

    @precondition(
        lambda self: (
            self.is_mapped
            and self.ram.free_page_count > 300
            and self.machine.device.state is not State.ACTIVE
        )
    )
    @rule()
    def boot(self) -> None:
        """A proper driver with one of everything, whose requests the other rules spoil."""
        self.driver = Driver(self.machine, self.ram).probe()
        kernel, user = Kernel(self.driver), UserProcess(self.driver)
        kernel.add_gid(GID)
        pages = PageDir.alloc(self.ram, 8)
        self.qps = [Qp(user), Qp(kernel)]
        self.mr = user.mr(2 * PAGE)
        for qp in self.qps:
            qp.to_init()
            qp.to_rtr(dest_qpn=qp.qpn, dgid=GID)
            qp.to_rts()
        pd = user.pd.handle
        self.requests = {
            Cmd.QUERY_PORT: struct.pack("<I", 1),
            Cmd.CREATE_PD: struct.pack("<I", 1),
            Cmd.CREATE_MR: struct.pack("<QQQIIII", PAGE, PAGE, pages.dir_dma, pd, 7, 0, 1),
            Cmd.CREATE_CQ: struct.pack("<QIII", pages.dir_dma, 1, 64, 2),
            Cmd.CREATE_QP: api.CMD_CREATE_QP.pack(self.qps[0].request)[16:],
            Cmd.CREATE_SRQ: api.CMD_CREATE_SRQ.pack(
                api.CmdCreateSrq(pages.dir_dma, pd, 2, SrqAttr(16, 4, 0), 0)
            )[16:],
            Cmd.CREATE_UC: struct.pack("<Q", self.driver.uar_pfn + 2),
            Cmd.CREATE_BIND: api.CMD_CREATE_BIND.pack(api.CmdCreateBind(1024, 0xFFF, 1, GID, 2))[
                16:
            ],
        }

    def post(self, cmd: int, body: bytes) -> None:
        request = api.CMD_HDR.pack(api.CmdHdr(0, cmd)) + body
        self.ram.write(self.driver.cmd_slot, request.ljust(api.CMD_REQ_SIZE, b"\0"))
        self.machine.write32(1, Reg.REQUEST, 0)
        self.machine.read32(1, Reg.ERR)

    @rule(cmd=st.integers(0, 21), body=st.lists(words, max_size=42))
    def any_command(self, cmd: int, body: list[int]) -> None:
        self.post(cmd, struct.pack(f"<{len(body)}I", *body))

    @rule(raw=st.binary(min_size=184, max_size=184))
    def any_bytes(self, raw: bytes) -> None:
        self.ram.write(self.driver.cmd_slot, raw)
        self.machine.write32(1, Reg.REQUEST, 0)

    @rule(spoils=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 15), words), max_size=5))
    def spoilt_commands(self, spoils: list[tuple[int, int, int]]) -> None:
        """Good requests with one word changed; what is unchanged there makes a good object."""
        for which, index, value in spoils:
            cmd = sorted(self.requests)[which % len(self.requests)]
            body = bytearray(self.requests[Cmd(cmd)])
            if 4 * index < len(body):
                struct.pack_into("<I", body, 4 * index, value)
            self.post(cmd, bytes(body))

    @rule(acts=st.lists(st.tuples(st.sampled_from(ON_ONE_HANDLE), handles, handles), max_size=5))
    def destroy_or_query(self, acts: list[tuple[int, int, int]]) -> None:
        for cmd, handle, more in acts:
            self.post(cmd, struct.pack("<II", handle, more))

    @rule(which=st.integers(0, 1), state=st.integers(0, 7), mask=words)
    def any_state(self, which: int, state: int, mask: int) -> None:
        body = struct.pack("<III", self.qps[which].handle, mask | 1, state)
        self.post(Cmd.MODIFY_QP, body)

    @rule(
        which=st.integers(0, 1),
        state=st.sampled_from(["to_error", "to_reset", "to_init", "to_rtr", "to_rts"]),
    )
    def honest_state(self, which: int, state: str) -> None:
        with suppress(CommandFailed, CommandTimeout):
            getattr(self.qps[which], state)()

    @rule(
        bar=st.integers(0, 3),
        offset=st.sampled_from([*range(0, 0x30, 4), PAGE, PAGE + 4, 3 * PAGE + 8])
        | st.integers(0, 1 << 17),
        data=st.binary(max_size=9) | words.map(lambda w: w.to_bytes(4, "little")),
    )
    def any_access(self, bar: int, offset: int, data: bytes) -> None:
        self.machine.regions.bar_write(bar, offset, data)
        assert len(self.machine.regions.bar_read(bar, offset, len(data))) == len(data)

    @rule(
        page=st.integers(0, MAX_UAR),
        offset=st.sampled_from([0, 4, 8, 12]),
        handle=handles,
        bits=st.integers(0, 7),
    )
    def any_doorbell(self, page: int, offset: int, handle: int, bits: int) -> None:
        self.machine.write32(2, page * PAGE + offset, handle | bits << 29)

    @rule(which=st.integers(0, 1), entries=st.lists(entry, min_size=1, max_size=8))
    def any_wqes(self, which: int, entries: list[tuple[int, int, list[int]]]) -> None:
        """In the slots that are next, whatever the indices say; addresses and keys are often real ones."""
        qp = self.qps[which]
        real = [*struct.unpack("<II", self.mr.addr.to_bytes(8, "little")), self.mr.rkey, 8]
        for opcode, num_sge, union in entries:
            body = [*union, *real][: 56 // 4]
            raw = struct.pack("<QIIIII", 1, num_sge, 0, opcode, SIGNALED, union[0] & 0xFF)
            raw += bytes(4) + struct.pack("<IIIII", *real[:3], *body[:2])
            raw = raw.ljust(80, b"\0") + b"".join(
                abi.SGE.pack(self.mr.sge(at % 64, 8)) for at in union
            )
            slot = qp.sq.prod_tail % 16
            qp.pages.write(PAGE + slot * qp.entry_size, raw[: qp.entry_size])
            qp.sq.produce()
        qp.ring_send()

    @rule(which=st.integers(0, 1), at=st.integers(0, 2 * PAGE), length=st.integers(0, 2 * PAGE))
    def honest_work(self, which: int, at: int, length: int) -> None:
        qp = self.qps[which]
        if qp.sq.has_space()[0] > 0 and qp.rq.ring.has_space()[0] > 0:
            qp.post_recv(self.mr.sge(at, length))
            qp.send(self.mr.sge(at, length))
        if qp.sq.has_space()[0] > 0:
            qp.write(self.mr.sge(at, length), to=self.mr.remote(at))

    @rule(which=st.integers(0, 1), ring=st.integers(0, 3), value=words)
    def any_index(self, which: int, ring: int, value: int) -> None:
        self.ram.write32(self.qps[which].pages.pages[0] + 4 * ring, value)

    @rule(ring=st.integers(0, 1), value=words)
    def any_device_index(self, ring: int, value: int) -> None:
        words_of = (self.driver.async_ring, self.driver.cqn_ring)[ring]
        words_of.cons_head = value

    @rule(which=st.integers(0, 1))
    def poll(self, which: int) -> None:
        self.qps[which].send_cq.arm()
        self.qps[which].send_cq.poll(64)
        self.driver.interrupt()

    @rule(
        page=st.integers(0, SIZE // PAGE - 1),
        at=st.integers(0, PAGE // 8 - 1),
        value=st.integers(0, 1 << 64),
    )
    def any_store(self, page: int, at: int, value: int) -> None:
        raw = (value & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
        self.ram.write(IOVA + page * PAGE + 8 * at, raw)

    @rule(where=st.integers(0, 15))
    def unmap(self, where: int) -> None:
        """Rarely: what is unmapped makes all other rules dull."""
        if self.parts and where < 4:
            iova, length = self.parts.pop(where % len(self.parts))
            self.machine.device.dma_unmap(iova, length)

    @rule(pieces=st.integers(1, 4), which=st.integers(0, 1), cmd=st.sampled_from(ON_ONE_HANDLE))
    def move(self, pieces: int, which: int, cmd: int) -> None:
        """As during a boot: all of it away and back, with acts in between."""
        for iova, length in self.parts:
            self.machine.device.dma_unmap(iova, length)
        self.parts.clear()
        self.qps[which].sq.produce()
        self.qps[which].ring_send()
        self.post(cmd, struct.pack("<II", which, 0))
        self.map(pieces, False)

    @rule(pieces=st.integers(1, 4), wrong=st.booleans())
    def map(self, pieces: int, wrong: bool) -> None:
        """All of RAM again, in one piece or several; sometimes over what is there."""
        if wrong:
            self.machine.device.dma_map(IOVA - PAGE, SIZE, None, writable=True)
            self.machine.device.dma_unmap(IOVA - PAGE, SIZE)
        if self.parts:
            return
        length = SIZE // pieces // PAGE * PAGE
        for number in range(pieces):
            start = number * length
            size = SIZE - start if number == pieces - 1 else length
            view = self.ram.view[start : start + size]
            self.machine.device.dma_map(IOVA + start, size, view, writable=True)
            self.parts.append((IOVA + start, size))

    @rule(budget=st.sampled_from([0, 1, PAGE, 1 << 20]))
    def work(self, budget: int) -> None:
        self.machine.device.progress(budget)
        self.machine.device.look_at_rings()

    @rule()
    def time_passes(self) -> None:
        self.machine.wait()

    @rule(really=st.integers(0, 3))
    def reset(self, really: int) -> None:
        if really:
            return
        self.machine.write32(1, Reg.CTL, DeviceCtl.RESET)
        assert nothing_left(self.machine.counts())

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "machine"):
            return
        device, caps = self.machine.device, self.machine.device.caps
        counts = self.machine.counts()
        assert counts["qps"] <= caps.max_qp
        assert counts["cqs"] <= caps.max_cq
        assert counts["mrs"] <= caps.max_mr
        assert counts["contexts"] < MAX_UAR
        assert len(device._reports._cqs) <= caps.max_cq
        assert len(device._journal._warned) <= MAX_GUEST_WARNINGS
        for qp in device.resources.qps:
            assert 0 <= qp.handle < caps.max_qp


class HostileGuestOnSoft(HostileGuest):
    """The same over the embedded backend: entries it decodes are executed against real memory."""

    def make_backend(self, world: World) -> RdmaBackend:
        return SoftBackend(
            clock_ns=world.clock,
            on_work=world.wake,
            config=SoftConfig(max_qp=64, max_mr=64, max_srq=16, max_pd=32),
        )


class HostileGuestWatched(HostileGuestOnSoft):
    """And with processes whose doorbells nobody hears."""

    def make_watch(self) -> FakeWatch:
        self.watch = FakeWatch()
        return self.watch

    @rule()
    def look(self) -> None:
        self.machine.device.rings_fired(self.watch.fired())
        self.machine.device.progress(INLINE_BUDGET)
        self.machine.device.moderate()

    def teardown(self) -> None:
        super().teardown()
        assert not self.watch.words


quick = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
for kind in (HostileGuest, HostileGuestOnSoft, HostileGuestWatched):
    kind.TestCase.settings = quick
TestHostileGuest = HostileGuest.TestCase
TestHostileGuestOnSoft = HostileGuestOnSoft.TestCase
TestHostileGuestWatched = HostileGuestWatched.TestCase

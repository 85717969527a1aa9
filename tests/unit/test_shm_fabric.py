"""The fabric over real sockets, rings and files, step by step: who owns what, who comes and goes, who misbehaves."""

import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_owner import FakeClock, gid_v4
from shm_bench import is_ready, shm_bench

from pvrdma_server.backend_soft import shm_fabric
from pvrdma_server.backend_soft.carrier import Carrier
from pvrdma_server.backend_soft.fast_path import Landed, Run
from pvrdma_server.backend_soft.lane import Drove, Lane
from pvrdma_server.backend_soft.shm_fabric import MAX_GREETINGS, ShmFabric
from pvrdma_server.backend_soft.shm_hello import Hello, pack_hello
from pvrdma_server.backend_soft.shm_memory import make_ring_memory
from pvrdma_server.backend_soft.shm_port import STALL_NS
from pvrdma_server.backend_soft.shm_ring import CONTROL_BYTES, RING_BYTES
from pvrdma_server.backend_soft.wire import HEADER_BYTES
from pvrdma_server.errors import BackendError, ConfigError

A, B, C = gid_v4(1), gid_v4(2), gid_v4(3)
HEAD, TAIL = 0, 48


def header(length: int = 0, tag: int = 0) -> bytes:
    return bytes([tag]) + bytes(15) + length.to_bytes(4, "little") + bytes(HEADER_BYTES - 20)


@dataclass(eq=False)
class End:
    """An endpoint on a fabric that writes down what it hears."""

    folder: Path
    clock: FakeClock
    name: str
    uids: Collection[int] = ()
    got: list[tuple[Carrier, bytes, bytes]] = field(default_factory=list)
    rooms: list[Carrier] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fabric = ShmFabric(str(self.folder), self.name, uids=self.uids, clock_ns=self.clock)
        self.port = self.fabric.join(self)

    def receive(self, peer: Carrier, header: bytes, payload: Sequence[memoryview]) -> None:
        self.got.append((peer, header, b"".join(payload)))

    def offer(self, peer: Carrier, qpn: int, kind: int) -> Run | None:
        return None

    def landed(self, run: Run, landed: Landed) -> None:
        raise AssertionError("none were offered")

    def lane(self, peer: Carrier) -> Lane | None:
        return None

    def drove(self, lane: Lane, drove: Drove) -> None:
        raise AssertionError("none were offered")

    def room(self, carrier: Carrier) -> None:
        self.rooms.append(carrier)

    def wake(self) -> None:
        pass

    def step(self) -> None:
        self.fabric.ready()
        while self.port.poll(64) or self.port.linger():
            pass

    def send(self, gid: bytes, payload: bytes = b"", tag: int = 0) -> bool:
        carrier = self.port.route(gid)
        assert carrier is not None
        return carrier.send(header(len(payload), tag), [memoryview(payload)] if payload else ())

    @property
    def peers(self) -> list[dict[str, Any]]:
        peers: list[dict[str, Any]] = self.fabric.facts()["peers"]
        return peers

    def close(self) -> None:
        self.fabric.close()


class Yard:
    """A folder, a clock, and ends made in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, FakeClock()
        self.ends: list[End] = []

    def end(self, name: str, *gids: bytes, uids: Collection[int] = ()) -> End:
        made = End(self.folder, self.clock, name, uids)
        self.ends.append(made)
        for gid in gids:
            made.port.claim(gid)
        return made

    def settle(self, *ends: End) -> None:
        """Step until nobody has anything to do."""
        chosen = ends or tuple(self.ends)
        for _ in range(1000):
            for end in chosen:
                end.step()
            if not is_ready(*(end.fabric for end in chosen)):
                return
        raise AssertionError("the fabric never comes to rest")

    def pass_time(self, ns: int, *ends: End) -> None:
        self.clock.now_ns += ns
        self.settle(*ends)

    def linked(self, first: End, second: End, gid: bytes) -> Carrier:
        carrier = first.port.route(gid)
        assert carrier is not None
        self.settle(first, second)
        assert [peer["state"] for peer in first.peers] == ["up"]
        return carrier


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    before = open_fds()
    made = Yard(tmp_path / "fabric")
    yield made
    for end in made.ends:
        end.close()
        end.close()
    assert open_fds() == before
    assert os.listdir(made.folder) == []


# -- meeting ------------------------------------------------------------------------------------


def test_the_first_message_waits_for_the_greetings(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    assert not a.send(B, b"too early")
    yard.settle()
    assert a.rooms == [a.port.route(B)]
    assert a.send(B, b"hello", tag=7)
    yard.settle()
    assert b.got == [(b.port.route(A), header(5, 7), b"hello")]
    assert b.send(A, b"back")
    yard.settle()
    assert a.got[0][0] is a.port.route(B)
    assert [peer["name"] for peer in a.peers + b.peers] == ["b", "a"]


def test_own_gids_stay_in_the_process(yard: Yard) -> None:
    a = yard.end("a", A)
    assert a.send(A, b"me")
    a.step()
    assert a.got == [(a.port.route(A), header(2), b"me")]
    assert a.peers == []


def test_both_call_at_once_and_one_link_stays(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    assert not a.send(B)
    assert not b.send(A)
    yard.settle()
    assert [len(a.peers), len(b.peers)] == [1, 1]
    assert a.send(B, b"x")
    assert b.send(A, b"y")
    yard.settle()
    assert [a.got[0][2], b.got[0][2]] == [b"y", b"x"]
    assert a.fabric.facts()["greetings"] == b.fabric.facts()["greetings"] == 0


def test_two_folders_never_meet(yard: Yard, tmp_path: Path) -> None:
    yard.end("a", A)
    other = End(tmp_path / "other", yard.clock, "o")
    other.port.claim(A)
    assert other.port.route(B) is None
    assert other.port.route(A) is not None
    other.close()


def test_nobody_owns_a_gid(yard: Yard) -> None:
    a = yard.end("a", A)
    assert a.port.route(B) is None


def test_a_world_writable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    before = open_fds()
    with pytest.raises(ConfigError, match="writable for everybody"):
        ShmFabric(str(tmp_path / "open"), "x")
    assert open_fds() == before


# -- GIDs ---------------------------------------------------------------------------------------


def test_a_gid_has_one_owner(yard: Yard) -> None:
    a, b = yard.end("vm-a", A), yard.end("vm-b")
    with pytest.raises(BackendError, match="held by vm-a") as caught:
        b.port.claim(A)
    assert caught.value.errno == errno.EADDRINUSE
    a.port.claim(A)
    a.port.release(A)
    b.port.claim(A)
    with pytest.raises(BackendError, match="held by vm-b"):
        a.port.claim(A)
    b.port.release(B)


def test_a_gid_that_moves_takes_its_traffic_along(yard: Yard) -> None:
    a, b, c = yard.end("a", A), yard.end("b", B), yard.end("c", C)
    for gid in (B, C):
        a.port.route(gid)
    yard.settle()
    first = a.port.route(B)
    b.port.release(B)
    c.port.claim(B)
    yard.settle()
    assert a.port.route(B) is a.port.route(C) is not first
    assert a.send(B, b"moved")
    yard.settle()
    assert [got[2] for got in c.got] == [b"moved"]
    assert b.got == []


def test_what_a_killed_server_held_is_free(yard: Yard) -> None:
    a = yard.end("a")
    child = os.fork()
    if child == 0:  # dies without giving anything back
        End(yard.folder, yard.clock, "dead").port.claim(B)
        os._exit(0)
    os.waitpid(child, 0)
    names = set(os.listdir(yard.folder))
    assert f"{B.hex()}.gid" in names
    assert a.port.route(B) is None, "nobody is there"
    b = yard.end("b", B)
    assert sum(name.endswith(".sock") for name in os.listdir(yard.folder)) == 2
    yard.pass_time(shm_fabric.RETRY_NS)
    yard.linked(a, b, B)


# -- coming and going ---------------------------------------------------------------------------


def test_a_peer_that_goes_is_forgotten_and_may_come_back(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    old = yard.linked(a, b, B)
    b.close()
    yard.settle(a)
    assert a.peers == []
    assert old.send(header(), ()), "into the void"
    assert a.port.route(B) is None
    again = yard.end("b", B)
    yard.pass_time(shm_fabric.RETRY_NS, a, again)
    assert yard.linked(a, again, B) is not old
    assert a.send(B, b"welcome back")
    yard.settle(a, again)
    assert [got[2] for got in again.got] == [b"welcome back"]


def test_last_words_are_heard(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    yard.linked(a, b, B)
    yard.settle()
    for n in range(10):
        b.send(A, b"w", tag=n)
    b.close()
    yard.settle(a)
    assert [got[1][0] for got in a.got] == list(range(10))
    assert a.peers == []


def test_a_silent_peer_costs_messages_and_not_senders(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    yard.linked(a, b, B)
    yard.settle()
    while a.send(B, bytes(60_000)):
        pass
    a.rooms.clear()
    yard.pass_time(STALL_NS - 1, a)
    assert a.rooms == []
    assert not a.send(B, bytes(60_000))
    yard.pass_time(1, a)
    assert a.rooms == [a.port.route(B)]
    assert a.send(B, bytes(60_000)), "taken and lost"
    assert (a.peers[0]["state"], a.peers[0]["lost_messages"]) == ("stalled", 1)
    yard.settle()
    assert a.peers[0]["state"] == "up"
    b.got.clear()
    assert a.send(B, b"again")
    yard.settle()
    assert [got[2] for got in b.got] == [b"again"]


def test_a_peer_that_is_slow_loses_nothing(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    yard.linked(a, b, B)
    yard.settle()
    while a.send(B, bytes(60_000)):
        pass
    for _ in range(5):
        b.port.poll(1)
        yard.clock.now_ns += STALL_NS - 1
        a.fabric.ready()
    assert a.peers[0]["lost_messages"] == 0


def test_room_that_is_seen_by_the_clock_is_told(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    yard.linked(a, b, B)
    yard.settle()
    while a.send(B, bytes(60_000)):
        pass
    a.rooms.clear()
    b.fabric.ready()
    while b.port.poll(64):
        pass
    a.fabric.ready()
    assert a.rooms == [a.port.route(B)], "nobody will ring: the peer was not asked to"
    assert a.send(B, b"at once")
    assert a.peers[0]["lost_messages"] == 0


def test_a_peer_that_was_silent_and_goes_on_loses_no_more(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    yard.linked(a, b, B)
    yard.settle()
    while a.send(B, bytes(60_000)):
        pass
    yard.pass_time(STALL_NS, a)
    assert a.send(B, bytes(60_000)), "taken and lost"
    b.fabric.ready()
    b.port.poll(1)
    while a.send(B, bytes(60_000)):
        pass
    assert (a.peers[0]["state"], a.peers[0]["lost_messages"]) == ("up", 1)


def test_a_server_that_never_greets_is_given_up(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    carrier = a.port.route(B)
    assert carrier is not None
    assert not carrier.send(header(), ())
    yard.pass_time(shm_fabric.GREETING_NS, a)
    assert a.peers == []
    assert carrier.send(header(), ())
    assert carrier in a.rooms
    yard.settle()
    yard.linked(a, b, B)


# -- shares -------------------------------------------------------------------------------------


def test_a_flood_delays_no_other_peer(yard: Yard) -> None:
    a, b, c = yard.end("a", A), yard.end("b", B), yard.end("c", C)
    for end in (b, c):
        end.port.route(A)
    yard.settle()
    for _ in range(1000):
        b.send(A, bytes(64), tag=1)
    c.send(A, b"ping", tag=2)
    a.fabric.ready()
    a.port.poll(32)
    assert 2 in [got[1][0] for got in a.got]


def test_a_small_message_passes_a_full_ring_of_bulk(yard: Yard) -> None:
    a, b = yard.end("a", A), yard.end("b", B)
    yard.linked(a, b, B)
    while a.send(B, bytes(200_000)):
        pass
    assert a.send(B, b"ping", tag=9)
    yard.settle()
    assert b.got[-1][1][0] == 9


# -- hostile peers ------------------------------------------------------------------------------


def sealed(size: int = CONTROL_BYTES + RING_BYTES, seals: int = 7, flags: int = 0) -> int:
    fd = os.memfd_create("evil", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Stranger:
    """Speaks to a server by hand; it has its own socket in the folder, as a server has."""

    def __init__(self, yard: Yard, victim: End) -> None:
        self.id = "0" * 31 + "1"
        self.folder = yard.folder
        path = f"{yard.folder}/{self.id}.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(1)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(f"{yard.folder}/{victim.fabric.facts()['id']}.sock")
        self.sock.setblocking(False)

    def hello(self, **fields: Any) -> bytes:
        return pack_hello(Hello(self.id, "evil", RING_BYTES)._replace(**fields))

    def send(self, data: bytes, *fds: int) -> None:
        with suppress(BrokenPipeError):
            socket.send_fds(self.sock, [data], fds)
        for fd in fds:
            os.close(fd)

    def turned_away(self) -> bool:
        try:
            return self.sock.recv(4096) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def close(self) -> None:
        self.sock.close()
        self.listener.close()
        os.unlink(f"{self.folder}/{self.id}.sock")


@pytest.fixture
def victim(yard: Yard) -> End:
    return yard.end("victim", A)


@pytest.fixture
def evil(yard: Yard, victim: End) -> Iterator[Stranger]:
    made = Stranger(yard, victim)
    yield made
    made.close()


BAD_GREETINGS: dict[str, Callable[[Stranger], None]] = {
    "garbage": lambda e: e.send(b"garbage"),
    "too long": lambda e: e.send(e.hello() + b"x", sealed()),
    "no descriptor": lambda e: e.send(e.hello()),
    "another protocol": lambda e: e.send(b"pvrdmafb\x02" + e.hello()[9:], sealed()),
    "a tiny ring": lambda e: e.send(e.hello(ring_bytes=4096), sealed(CONTROL_BYTES + 4096)),
    "a huge ring": lambda e: e.send(e.hello(ring_bytes=1 << 30), sealed(CONTROL_BYTES + (1 << 30))),
    "an odd ring": lambda e: e.send(e.hello(ring_bytes=RING_BYTES + 64), sealed()),
    "an id that is a path": lambda e: e.send(e.hello(server_id="../../../etc/passwd"), sealed()),
    "somebody else's id": lambda e: e.send(e.hello(server_id="f" * 32), sealed()),
    "no seals": lambda e: e.send(e.hello(), sealed(seals=0)),
    "no shrink seal": lambda e: e.send(
        e.hello(), sealed(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    ),
    "no grow seal": lambda e: e.send(
        e.hello(), sealed(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    ),
    "may unseal": lambda e: e.send(
        e.hello(), sealed(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    ),
    "sealed against writing": lambda e: e.send(e.hello(), sealed(seals=15)),
    "too small": lambda e: e.send(e.hello(), sealed(CONTROL_BYTES)),
    "empty": lambda e: e.send(e.hello(), sealed(0)),
    "not memory": lambda e: e.send(e.hello(), os.open("/dev/null", os.O_RDWR)),
    "a file": lambda e: e.send(e.hello(), os.open(__file__, os.O_RDONLY)),
    "a socket": lambda e: e.send(e.hello(), os.dup(e.sock.fileno())),
}


@pytest.mark.parametrize("greet", BAD_GREETINGS.values(), ids=BAD_GREETINGS)
def test_a_bad_greeting_ends_the_connection(
    yard: Yard, victim: End, evil: Stranger, greet: Callable[[Stranger], None]
) -> None:
    before = open_fds()
    greet(evil)
    yard.settle()
    assert evil.turned_away()
    assert victim.peers == []
    assert open_fds() == before
    yard.linked(victim, yard.end("b", B), B)


SOMEBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def connected_by_somebody(path: str) -> socket.socket:
    """A connection whose other end, by the kernel's word, is the process of another user."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    os.chmod(os.path.dirname(path), 0o711)
    os.chmod(path, 0o777)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        try:
            os.setresuid(SOMEBODY, SOMEBODY, SOMEBODY)
            # What is above the folder is nobody's but ours.
            sock.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(folder)
    assert os.waitpid(child, 0)[1] == 0
    sock.setblocking(False)
    return sock


@as_root
@pytest.mark.parametrize("owner", [0, SOMEBODY])
@pytest.mark.parametrize("uids", [(), (SOMEBODY,)], ids=["unknown", "known"])
def test_another_user_must_be_let_in_and_is_nobody_else(
    yard: Yard, uids: tuple[int, ...], owner: int
) -> None:
    victim = yard.end("victim", A, uids=uids)
    evil = Stranger(yard, victim)
    evil.sock.close()
    evil.sock = connected_by_somebody(f"{yard.folder}/{victim.fabric.facts()['id']}.sock")
    # The name that it gives is that of a server of `owner`.
    os.chown(f"{yard.folder}/{evil.id}.sock", owner, owner)
    evil.send(evil.hello(), sealed())
    yard.settle()
    let_in = bool(uids) and owner == SOMEBODY
    assert evil.turned_away() != let_in
    assert [peer["name"] for peer in victim.peers] == ["evil"] * let_in
    if let_in:
        # A claim in its name that belongs to root is not its own.
        claim = yard.folder / f"{B.hex()}.gid"
        for claimant in (0, SOMEBODY):
            claim.write_text(f"{evil.id}\nevil\n")
            os.chown(claim, claimant, claimant)
            assert (victim.port.route(B) is not None) == (claimant == SOMEBODY)
        claim.unlink()
    evil.close()


def test_descriptors_beyond_the_first_are_dropped(yard: Yard, victim: End, evil: Stranger) -> None:
    before = open_fds()
    evil.send(evil.hello(), sealed(), sealed(), sealed())
    yard.settle()
    assert [peer["name"] for peer in victim.peers] == ["evil"]
    # The socket, and a descriptor for each mapping.
    assert open_fds() <= before + 3


def test_the_same_server_cannot_have_two_links(yard: Yard, victim: End, evil: Stranger) -> None:
    evil.send(evil.hello(), sealed())
    yard.settle()
    first, evil.sock = evil.sock, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    evil.sock.connect(f"{yard.folder}/{victim.fabric.facts()['id']}.sock")
    evil.sock.setblocking(False)
    evil.send(evil.hello(), sealed())
    yard.settle()
    assert evil.turned_away()
    assert len(victim.peers) == 1
    first.close()


def test_silent_connections_hold_places_for_a_while_only(yard: Yard, victim: End) -> None:
    path = f"{yard.folder}/{victim.fabric.facts()['id']}.sock"
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(40)]
    for sock in crowd:
        sock.connect(path)
    yard.settle()
    assert victim.fabric.facts()["greetings"] == MAX_GREETINGS
    yard.pass_time(shm_fabric.GREETING_NS)
    assert victim.fabric.facts()["greetings"] == 0
    for sock in crowd:
        sock.close()
    yard.linked(victim, yard.end("b", B), B)


@dataclass(eq=False)
class Intruder:
    """An accepted peer that writes what it likes into its ring."""

    stranger: Stranger
    out: mmap.mmap

    @classmethod
    def enter(cls, yard: Yard, evil: Stranger) -> "Intruder":
        fd = make_ring_memory(RING_BYTES)
        memory = mmap.mmap(fd, CONTROL_BYTES + RING_BYTES)
        evil.send(evil.hello(), fd)
        yard.settle()
        return cls(evil, memory)

    def word(self, index: int, value: int) -> None:
        with memoryview(self.out) as view, view.cast("Q") as words:
            words[index] = value

    def ring(self) -> None:
        self.stranger.sock.send(b"!")


def length_beyond(intruder: Intruder) -> None:
    intruder.out[CONTROL_BYTES : CONTROL_BYTES + 64] = b"\xff" * 64
    intruder.word(HEAD, 64)


SPOILED: dict[str, Callable[[Intruder], None]] = {
    "head beyond the ring": lambda i: i.word(HEAD, 1 << 40),
    "head not aligned": lambda i: i.word(HEAD, 63),
    "head at the end of numbers": lambda i: i.word(HEAD, (1 << 64) - 64),
    "a length beyond": length_beyond,
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_ring_ends_the_link(
    yard: Yard, victim: End, evil: Stranger, spoil: Callable[[Intruder], None]
) -> None:
    intruder = Intruder.enter(yard, evil)
    spoil(intruder)
    intruder.ring()
    yard.settle()
    assert victim.peers == []
    assert victim.got == []
    intruder.out.close()
    yard.linked(victim, yard.end("b", B), B)


def test_a_spoiled_tail_ends_the_link(yard: Yard, victim: End, evil: Stranger) -> None:
    intruder = Intruder.enter(yard, evil)
    _, fds, _, _ = socket.recv_fds(evil.sock, 4096, 4)
    theirs = mmap.mmap(fds[0], CONTROL_BYTES + RING_BYTES)
    os.close(fds[0])
    link = next(iter(victim.port.links.values()))
    with memoryview(theirs) as view, view.cast("Q") as words:
        words[TAIL] = 1 << 30
    while link.writer is not None and link.send(header(200_000), [memoryview(bytes(200_000))]):
        if link.broken:
            break
    victim.step()
    assert victim.peers == []
    theirs.close()
    intruder.out.close()


def test_bells_without_end_are_no_trouble(yard: Yard, victim: End, evil: Stranger) -> None:
    intruder = Intruder.enter(yard, evil)
    with suppress(BlockingIOError):
        while True:
            intruder.ring()
    b = yard.end("b", B)
    yard.linked(b, victim, A)
    b.send(A, b"through")
    yard.settle()
    assert [got[2] for got in victim.got] == [b"through"]
    intruder.out.close()


def test_a_forged_claim_leads_nowhere(yard: Yard, victim: End, evil: Stranger) -> None:
    """A GID file that names a server that is not there, or is no file of a server at all."""
    (yard.folder / f"{B.hex()}.gid").write_bytes(b"\xff\xfe")
    assert victim.port.route(B) is None
    (yard.folder / f"{B.hex()}.gid").write_text("../../../run/other\nx\n")
    assert victim.port.route(B) is None
    (yard.folder / f"{B.hex()}.gid").unlink()


# -- the transport over it ------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1 << 20, 64 << 20])
@pytest.mark.parametrize("size", [4 << 20, 16 << 20])
def test_messages_longer_than_window_and_ring_need_no_timer(budget: int, size: int) -> None:
    """Whatever is sent may be acknowledged at once, and all of it, in the middle of a message."""
    bench = shm_bench(size=40 << 20)
    bench.step_budget = budget
    left, _ = bench.pair()
    source, target = bench.a.buffer(size), bench.b.buffer(size)
    source.fill(bytes(range(1, 256)) * (size // 255))
    wrs = [left.write(source.sge(0, 1), target.at(), target.rkey)]
    wrs += [left.write(source.sge(), target.at(), target.rkey) for _ in range(2)]
    bench.settle()
    assert left.qp._sender.queue.flying == 0  # type: ignore[attr-defined]
    assert left.statuses == [(wr, 0) for wr in wrs]
    assert target.data() == source.data()
    assert bench.a.backend.counters.retries == 0  # type: ignore[attr-defined]
    bench.close()


def test_a_long_write_does_not_starve_a_ping() -> None:
    """A ping posted amid 64 MiB of another queue pair's is answered before a few of those MiB have gone."""
    bench = shm_bench(size=80 << 20)
    bulk, _ = bench.pair()
    ping, pong = bench.pair()
    source, target = bench.a.buffer(32 << 20), bench.b.buffer(32 << 20)
    small, into = bench.a.buffer(64), bench.b.buffer(64)
    for _ in range(2):
        bulk.write(source.sge(), target.at(), target.rkey)
    backends = bench.backends
    for backend in backends * 4:
        backend.progress(1 << 20)
    counters = bench.a.backend.counters  # type: ignore[attr-defined]
    before = counters.tx_bytes
    pong.recv(into.sge())
    ping.send(small.sge())
    while not ping.statuses:
        for backend in backends:
            backend.progress(1 << 20)
    assert counters.tx_bytes - before <= 12 << 20
    assert not bulk.statuses
    bench.settle()
    assert len(bulk.statuses) == 2
    bench.close()

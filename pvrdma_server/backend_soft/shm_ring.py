"""One direction between two servers: a ring of messages in memory that both may write.

Contract: pure bookkeeping over a view; no I/O. What the other side wrote is hostile: its indices are
read once, checked as ints, and only then used; our own indices are never read back. A message's
header is snapshotted before it is looked at; a payload stays in the ring while it is received and
may change meanwhile, which spoils the data of that message and nothing else.

Memory: a page of control words, then `capacity` bytes of records, each a 64-byte header (see `wire`)
and its payload, rounded up to 64 bytes. So a header never wraps, a payload is at most two views, and
a small message costs two cache lines. Indices count bytes, for ever. Words, each alone in its lines:

    head     producer: end of what is published      asleep   consumer: ring the bell for me
    tail     consumer: end of what is consumed       wants    producer: ring the bell when there is room
    gids     producer: grows when it owns other GIDs

Order: payload, header, then `head`; `tail` after the last look at a record. Whoever goes to sleep sets
its flag, then looks once more; whoever moves an index does so before it looks at the other's flag. A
fence stands between the two, on both sides, so no wake-up is lost.
"""

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from pvrdma_server.backend_soft.fast_path import (
    Landed,
    Landing,
    Many,
    Posted,
    Posting,
    Run,
)
from pvrdma_server.backend_soft.native import extension, full_fence, order_fence
from pvrdma_server.backend_soft.wire import (
    ACK,
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    READ_REQUEST,
    READ_RESPONSE,
    WRITE,
)
from pvrdma_server.errors import GuestError

CONTROL_BYTES: Final = 4096
RING_BYTES: Final = 4 << 20
# A ring must hold the largest message twice, or sender and receiver take turns. The upper bound stops
# a peer from having us map, and fill, memory without end.
MIN_RING_BYTES: Final = 1 << 20
MAX_RING_BYTES: Final = 4 << 20
# Messages up to this size may use the reserve: stops bulk data from keeping out ACKs and pings.
SMALL_BYTES: Final = 4096
RESERVE_BYTES: Final = 64 << 10
# How much is consumed before the producer is told, within one batch.
_TELL_BYTES: Final = 64 << 10
_ALIGN: Final = 63
_HEAD, _WANTS, _GIDS, _TAIL, _ASLEEP = 0, 16, 32, 48, 64
_length_in = Struct("<I").unpack_from
_LENGTH_AT: Final = 16
_qpn_in = _length_in
_QPN_AT: Final = 4
_PSN_AT: Final = 12


Receive = Callable[[bytes, Sequence[memoryview]], None]
Offer = Callable[[int, int], Run | None]
TellLanded = Callable[[Run, Landed], None]
_LANDS: Final = (WRITE, READ_REQUEST, READ_RESPONSE)


def _no_offer(_qpn: int, _kind: int) -> None:
    """There is no short cut."""


def _none_landed(_run: Run, _landed: Landed) -> None:
    """None went that way."""


class RingFault(GuestError):
    """The other side wrote an index or a length that no server of ours writes."""

    kind = "ring_fault"


def ring_size_ok(capacity: int) -> bool:
    """Whether rings of this many bytes are spoken here."""
    return MIN_RING_BYTES <= capacity <= MAX_RING_BYTES and not capacity & (capacity - 1)


class RingWriter:
    """The producer's end.

    Attributes:
        head: bytes written, for ever.
        tail: bytes consumed, as far as we know.
    """

    __slots__ = (
        "_capacity",
        "_data",
        "_limit",
        "_mask",
        "_posting",
        "_words",
        "head",
        "messages",
        "tail",
    )

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:CONTROL_BYTES].cast("Q")
        self._data = memory[CONTROL_BYTES:]
        self._capacity = len(self._data)
        self._mask = self._capacity - 1
        self._limit = self._capacity - RESERVE_BYTES
        self.head = self.tail = self.messages = 0
        self._posting = Posting(self._data, self._words, RESERVE_BYTES) if extension else None

    def put(self, header: bytes, payload: Sequence[memoryview]) -> bool:
        """Write a message, whole; False when there is no room.

        Raises:
            RingFault: the consumer's index is impossible.
        """
        length = 0
        for view in payload:
            length += len(view)
        end = self.head + HEADER_BYTES + (length + _ALIGN & ~_ALIGN)
        limit = self._limit if length > SMALL_BYTES else self._capacity
        if end - self.tail > limit and self.look_untrusted() < end - limit:
            return False
        data = self._data
        at = self.head & self._mask
        body = at + HEADER_BYTES
        if body + length <= self._capacity:
            for view in payload:
                next_body = body + len(view)
                data[body:next_body] = view
                body = next_body
        else:
            self._put_around(body, payload)
        data[at : at + HEADER_BYTES] = header
        order_fence()
        self._words[_HEAD] = self.head = end
        self.messages += 1
        return True

    def put_many_untrusted(self, what: Many) -> Posted | None:
        """The short cut of `fast_path`; None where there is none, or nothing was put.

        Raises:
            RingFault: the consumer's index is impossible.
        """
        if self._posting is None:
            return None
        posted = self._posting.put_untrusted(what, self.head, self.look_untrusted())
        self.head = posted.head
        self.messages += posted.messages
        return posted if posted.messages else None

    def _put_around(self, body: int, payload: Sequence[memoryview]) -> None:
        data, capacity = self._data, self._capacity
        for whole in payload:
            view = whole
            while view:
                body &= self._mask
                part = view[: capacity - body]
                data[body : body + len(part)] = part
                body += len(part)
                view = view[len(part) :]

    def sleep_untrusted(self) -> bool:
        """Ask for the bell once there is room. False when some was made since the last look: nothing is asked for.

        Raises:
            RingFault: the consumer's index is impossible.
        """
        seen = self.tail
        self._words[_WANTS] = 1
        full_fence()
        if self.look_untrusted() == seen:
            return True
        self._words[_WANTS] = 0
        return False

    def look_untrusted(self) -> int:
        """The consumer's index as it is now.

        Raises:
            RingFault: it went back, or beyond what we wrote.
        """
        tail = self._words[_TAIL]
        if not self.tail <= tail <= self.head or tail & _ALIGN:
            raise RingFault(f"tail {tail:#x}, was {self.tail:#x}, head {self.head:#x}")
        self.tail = tail
        return tail

    def reader_sleeps(self) -> bool:
        """Whether to ring the consumer's bell now, after `put`; asks once per sleep."""
        full_fence()
        if not self._words[_ASLEEP]:
            return False
        # Before the bell, not after it: a consumer that is awake may be asleep again by then.
        self._words[_ASLEEP] = 0
        return True

    @property
    def room_word(self) -> memoryview:
        """The consumer's index, as memory."""
        return self._words[_TAIL : _TAIL + 1]

    @property
    def memory(self) -> tuple[memoryview, memoryview]:
        """The records and the words, for a `lane`."""
        return self._data, self._words

    def moved(self, head: int, tail: int, messages: int) -> None:
        """So many messages were put up to `head` by a lane, which saw the consumer's index at `tail`."""
        self.head, self.tail = head, tail
        self.messages += messages

    def gids_changed(self) -> None:
        """Tell the consumer, when it looks next, that we own other GIDs than before."""
        self._words[_GIDS] = (self._words[_GIDS] + 1) & 0xFFFF_FFFF

    def release(self) -> None:
        """Let the memory go."""
        if self._posting is not None:
            self._posting.release()
        self._words.release()
        self._data.release()


class RingReader:
    """The consumer's end. `tail`: bytes consumed, for ever; `messages`: how many that were."""

    __slots__ = (
        "_capacity", "_data", "_gids", "_head", "_landing", "_mask", "_told", "_words", "messages", "tail",
    )  # fmt: skip

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:CONTROL_BYTES].cast("Q")
        self._data = memory[CONTROL_BYTES:]
        self._capacity = len(self._data)
        self._mask = self._capacity - 1
        self._head = self._told = self._gids = 0
        self.tail = self.messages = 0
        self._landing = Landing(self._data, self._words) if extension else None

    def take_untrusted(
        self,
        limit: int,
        receive: Receive,
        producer_waits: Callable[[], None],
        offer: Offer = _no_offer,
        landed: TellLanded = _none_landed,
    ) -> int:
        """Hand up to `limit` messages to `receive`; how many it were. What is landed in one go counts as one.

        Data of several READs that is landed in one go ends the call: it counts as the rest. Who asked for it asks for
        more before the next of it lands, so that its peer has something to do meanwhile.

        `offer` and `landed` are the endpoint's (see `carrier`).

        `producer_waits` is called when the producer wants to know that there is room.

        Raises:
            RingFault: an index or a length is impossible.
        """
        count = 0
        mask, data, landing = self._mask, self._data, self._landing
        while count < limit and (self.tail != self._head or self._look_untrusted()):
            at = self.tail & mask
            kind, messages = data[at], 0
            if landing is not None and kind in _LANDS:
                messages = self._land(landing, kind, at, offer, landed)
            if not messages:
                self._take_one_untrusted(at, receive)
            count = limit if kind == READ_RESPONSE and messages > 1 else count + 1
            self.messages += messages or 1
            if self.tail - self._told >= _TELL_BYTES and self._tell():
                producer_waits()
        if self.tail != self._told and self._tell():
            producer_waits()
        return count

    def _take_one_untrusted(self, at: int, receive: Receive) -> None:
        data = self._data
        header = bytes(data[at : at + HEADER_BYTES])
        length: int = _length_in(header, _LENGTH_AT)[0]
        size = HEADER_BYTES + (length + _ALIGN & ~_ALIGN)
        if length > MAX_CHUNK_BYTES or size > self._head - self.tail:
            raise RingFault(f"a message of {length} bytes, {self._head - self.tail} are there")
        if header[0] != ACK or not self._superseded(header, self.tail + size):
            body = at + HEADER_BYTES
            payload: Sequence[memoryview]
            if body + length <= self._capacity:
                payload = (data[body : body + length],) if length else ()
            else:
                payload = self._around(body, length)
            receive(header, payload)
        self.tail += size

    def _superseded(self, header: bytes, next_tail: int) -> bool:
        # Whether an ACK is followed by another for the same queue pair, which says all that it says.
        at = next_tail & self._mask
        return next_tail != self._head and self._data[at : at + _PSN_AT] == header[:_PSN_AT]

    def _land(self, landing: Landing, kind: int, at: int, offer: Offer, tell: TellLanded) -> int:
        # How many messages landed in one go.
        run = offer(_qpn_in(self._data, at + _QPN_AT)[0], kind)
        if run is None:
            return 0
        landed = landing.take_untrusted(run, self.tail, self._head)
        self.tail, self._head = landed.tail, landed.head
        tell(run, landed)
        return landed.messages

    def _around(self, body: int, length: int) -> Sequence[memoryview]:
        if body == self._capacity:
            return (self._data[:length],)
        return (self._data[body:], self._data[: length - (self._capacity - body)])

    def _look_untrusted(self) -> bool:
        head = self._words[_HEAD]
        if not 0 <= head - self.tail <= self._capacity or head < self._head or head & _ALIGN:
            raise RingFault(f"head {head:#x}, was {self._head:#x}, tail {self.tail:#x}")
        order_fence()
        self._head = head
        return head != self.tail

    def _tell(self) -> bool:
        # Publish the tail. True when the producer waits and should wake up: there is work left while it does.
        order_fence()
        self._words[_TAIL] = self._told = self.tail
        full_fence()
        if not self._words[_WANTS] or self._words[_HEAD] - self.tail > self._capacity // 4 * 3:
            return False
        self._words[_WANTS] = 0
        return True

    @property
    def memory(self) -> tuple[memoryview, memoryview]:
        """The records and the words, for a `lane`."""
        return self._data, self._words

    def moved(self, head: int, tail: int, messages: int) -> None:
        """So many messages were taken up to `tail` by a lane, which told the producer, and saw its index at `head`."""
        self._head, self.tail, self._told = head, tail, tail
        self.messages += messages

    def sleep_untrusted(self) -> bool:
        """Ask for the bell. False when there is something after all: then nothing is asked for.

        Raises:
            RingFault: the producer's index is impossible.
        """
        self._words[_ASLEEP] = 1
        full_fence()
        if not self._look_untrusted():
            return True
        self._words[_ASLEEP] = 0
        return False

    @property
    def seen(self) -> int:
        """The producer's index as it was when it was looked at last."""
        return self._head

    @property
    def head_word(self) -> memoryview:
        """The producer's index, as memory."""
        return self._words[_HEAD : _HEAD + 1]

    def awake(self) -> None:
        """No bell is needed from now on."""
        self._words[_ASLEEP] = 0

    def gids_changed(self) -> bool:
        """Whether the producer owns other GIDs than when this was asked last."""
        gids = self._words[_GIDS]
        changed, self._gids = gids != self._gids, gids
        return changed

    def release(self) -> None:
        """Let the memory go."""
        if self._landing is not None:
            self._landing.release()
        self._words.release()
        self._data.release()

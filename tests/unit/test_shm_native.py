"""What rings need beside Python: both forms do the same."""

import pytest

from pvrdma_server.backend_soft import native
from pvrdma_server.backend_soft.native import CLinger, Linger, Lingered, PythonLinger

SHORT_NS, LONG_NS = 1000, 20_000_000_000


class Words:
    """Two indices and the byte, and who looks at them."""

    def __init__(self, make: type[PythonLinger | CLinger]) -> None:
        self.head, self.room = (memoryview(bytearray(64)).cast("Q") for _ in range(2))
        self.stop = bytearray(1)
        self.signalled = memoryview(self.stop).toreadonly()
        self.look_in_c: tuple[int, int] | None = None
        self.linger: Linger = make(self.head, self.room, self)


@pytest.fixture(params=[PythonLinger, CLinger])
def words(request: pytest.FixtureRequest) -> Words:
    if request.param is CLinger and native.extension is None:
        pytest.skip("the extension is not built")
    return Words(request.param)


def test_nothing_happens_and_time_is_up(words: Words) -> None:
    assert words.linger.wait(0, 0, SHORT_NS) == Lingered.NOTHING


def test_a_message_or_room_ends_it(words: Words) -> None:
    words.head[0] = 64
    assert words.linger.wait(0, 0, LONG_NS) == Lingered.CHANGED
    assert words.linger.wait(64, 0, SHORT_NS) == Lingered.NOTHING
    words.room[0] = 128
    assert words.linger.wait(64, 0, LONG_NS) == Lingered.CHANGED
    # Nobody waits for room: it may change as it likes.
    assert words.linger.wait(64, None, SHORT_NS) == Lingered.NOTHING


def test_something_to_do_elsewhere_ends_it(words: Words) -> None:
    words.stop[0] = 1
    assert words.linger.wait(0, 0, LONG_NS) == Lingered.STOPPED
    words.stop[0] = 0
    assert words.linger.wait(0, 0, SHORT_NS) == Lingered.NOTHING


def test_indices_are_64_bits(words: Words) -> None:
    words.head[0] = (1 << 64) - 64
    assert words.linger.wait((1 << 64) - 64, None, SHORT_NS) == Lingered.NOTHING


def test_views_are_let_go(words: Words) -> None:
    words.linger.release()
    words.head.release()
    words.room.release()


def test_without_the_byte() -> None:
    head, room = (memoryview(bytearray(8)).cast("Q") for _ in range(2))
    linger = native.make_linger(head, room, None)
    assert linger.wait(0, None, SHORT_NS) == Lingered.NOTHING

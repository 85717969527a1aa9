"""A ring watch that looks when a test asks. Implements `watches.RingWatch`."""

import struct
from itertools import count


class FakeWatch:
    """Looks when asked: fires each armed token whose words differ, once."""

    def __init__(self) -> None:
        self.words: dict[int, memoryview] = {}
        self.armed: set[int] = set()
        self._tokens = count(1)

    def add(self, state: memoryview) -> int:
        token = next(self._tokens)
        assert len(state) == 8
        self.words[token] = state
        self.armed.add(token)
        return token

    def rearm(self, token: int) -> None:
        assert token in self.words
        self.armed.add(token)

    def remove(self, token: int) -> None:
        del self.words[token]
        self.armed.discard(token)

    def fired(self) -> list[int]:
        hits = [t for t in sorted(self.armed) if len(set(struct.unpack("<II", self.words[t]))) > 1]
        self.armed.difference_update(hits)
        return hits

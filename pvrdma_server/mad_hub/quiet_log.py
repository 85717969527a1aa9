"""A log that no client can flood.

Contract: of each client and key some lines an interval are written; the next one that is says how many were left out.
The clock is asked when a line comes, there is no timer.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

import structlog

LOG_INTERVAL_S: Final = 30.0
# Lines of one client and key in an interval: of what it may do, and of what it may not.
INFO_LINES: Final = 16
WARNING_LINES: Final = 1
# Keys to remember, in all; names are the clients' own words, and of more than fit in an interval nothing is written.
MAX_KEYS: Final = 4096


class QuietLog:
    """See the module's contract.

    Args:
        clock_s: seconds that only grow.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._log: Any = structlog.get_logger(component="mad_hub")
        # (end, lines), the first to end in front.
        self._interval: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._left_out: Counter[tuple[str, str]] = Counter()

    def info(self, event: str, *, client: str, **values: Any) -> None:
        """Log an event of `client`."""
        if self._may(client, event, INFO_LINES):
            self._log.info(event, client=client, **values, **self._missing(client, event))

    def warning(self, event: str, *, client: str, key: str, **values: Any) -> None:
        """Log that `client` did something wrong; `key` tells the sorts apart."""
        if self._may(client, key, WARNING_LINES):
            self._log.warning(event, client=client, **values, **self._missing(client, key))

    def _may(self, client: str, key: str, lines: int) -> bool:
        now_s = self._clock_s()
        end_s, written = self._interval.get((client, key), (now_s, 0))
        if now_s >= end_s:
            end_s, written = now_s + LOG_INTERVAL_S, 0
            self._interval.pop((client, key), None)
        if written >= lines:
            self._left_out[client, key] += 1
            return False
        if (client, key) not in self._interval and not self._room(now_s):
            return False
        self._interval[client, key] = (end_s, written + 1)
        return True

    def _room(self, now_s: float) -> bool:
        """Whether one more key can be remembered."""
        while len(self._interval) >= MAX_KEYS:
            key, (end_s, _) = next(iter(self._interval.items()))
            if now_s < end_s:
                return False
            del self._interval[key]
            self._left_out.pop(key, None)
        return True

    def _missing(self, client: str, key: str) -> dict[str, int]:
        left_out = self._left_out.pop((client, key), 0)
        return {"left_out": left_out} if left_out else {}

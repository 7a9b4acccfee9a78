"""How often a process may be started anew before the run ends with the cause. Pure."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable


class Restarts:
    """Counts the failures of each GPU slot within a window of time."""

    def __init__(
        self, most: int, window_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """most: failures of one slot in `window_s` seconds that are recovered from."""
        self.most = most
        self._window_s = window_s
        self._now_s = now_s
        self._failures_s: defaultdict[int, deque[float]] = defaultdict(deque)

    def admit(self, slot: int) -> bool:
        """Count a failure of the slot; whether it is still recovered from."""
        failures_s = self._failures_s[slot]
        now_s = self._now_s()
        failures_s.append(now_s)
        while now_s - failures_s[0] > self._window_s:
            failures_s.popleft()
        return len(failures_s) <= self.most

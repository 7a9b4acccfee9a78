"""A circuit breaker: when calls of a service go to it, wait for it, or are given up. Pure: the caller gives the time.

No library has what a phase of sampling needs. Thousands of samples ask at once and have nothing better to do than to
wait for a short outage; libraries let calls fail as soon as the breaker is open, and let all of them through as soon as
it is half open. Besides, pybreaker knows no asyncio, and holds a lock during a call; circuitbreaker tells nobody when
it opens; pybreaker and purgatory read the wall clock. Repeating a try is tenacity's part (`service.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_OPENS_AFTER = 3  # tries that failed in succession
_OPENS_AFTER_S = 1.0  # in which no try had an answer
_FIRST_OPEN_S = 1.0  # until the first probe; twice as long after each that failed
_LONGEST_OPEN_S = 10.0
_LONGEST_WISH_S = 30.0  # of a service that asks to be left alone
_LOOK_S = 0.2  # how often a call looks whether the probe of another has an answer
_LEAST_SHARE = 0.5  # of the seconds between two probes, which are random, so that workers do not probe together


class BreakerOpen(Exception):
    """The service has been down for as long as a call waits. silent_s: since the first try that failed.

    The text is the sentence about it, without its subject.
    """

    def __init__(self, silent_s: float, reason: str) -> None:
        super().__init__(f"has not answered for {silent_s:.0f} s ({reason})")


@dataclass(frozen=True, eq=False)
class Admission:
    """Whether a try may go now; wait_s: it may not, and is to ask again after so many seconds."""

    wait_s: float = 0.0
    is_probe: bool = False


class Breaker:
    """Closed, tries go. Open, they wait; one at a time goes as a probe, and an answer to it closes the breaker.

    It opens when several tries in succession have failed and none has had an answer for a second, so that a busy
    service, which refuses some, does not open it. Each admitted try is followed by one of `answered`, `failed` and
    `dropped`. Times are seconds of a clock that does not jump.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        """draw: random numbers from 0 to 1."""
        self._draw = draw
        self._failures = 0
        self._failing_since = 0.0
        self._open_s = _FIRST_OPEN_S
        self._probe_at: float | None = None  # None: closed
        self._probe: Admission | None = None  # the one in flight
        self.reason = ""  # why the last try failed

    @property
    def is_open(self) -> bool:
        return self._probe_at is not None

    def admit(self, now: float, patience_s: float) -> Admission:
        """Ask for a try. Raises BreakerOpen where the service has been down for patience_s and no probe is due."""
        if self._probe_at is None:
            return Admission()
        if self._probe is not None:
            return Admission(wait_s=_LOOK_S)
        if now >= self._probe_at:
            self._probe = Admission(is_probe=True)
            return self._probe
        silent_s = now - self._failing_since
        if silent_s >= patience_s:
            raise BreakerOpen(silent_s, self.reason)
        return Admission(wait_s=min(self._probe_at - now, patience_s - silent_s))

    def answered(self) -> None:
        """The service has answered a try, whatever it said."""
        self._failures = 0
        self._probe_at = None
        self._probe = None
        self._open_s = _FIRST_OPEN_S

    def failed(self, admission: Admission, now: float, reason: str, after_s: float = 0.0) -> None:
        """A try had no answer. after_s: for so long the service wants to be left alone."""
        self.reason = reason
        if self._failures == 0:
            self._failing_since = now
        self._failures += 1
        if admission is self._probe:
            self._probe = None
            self._open_s = min(2 * self._open_s, _LONGEST_OPEN_S)
        elif self.is_open or not self._is_outage(now):
            return
        share = _LEAST_SHARE + (1 - _LEAST_SHARE) * self._draw()
        self._probe_at = now + max(share * self._open_s, min(after_s, _LONGEST_WISH_S))

    def dropped(self, admission: Admission) -> None:
        """A try was given up by its caller: nobody knows whether it would have had an answer."""
        if admission is self._probe:
            self._probe = None

    def _is_outage(self, now: float) -> bool:
        return self._failures >= _OPENS_AFTER and now - self._failing_since >= _OPENS_AFTER_S

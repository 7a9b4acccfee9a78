"""What a run has lost: which process, when, why, and for how long its work was not done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(eq=False)
class Loss:
    """what: a worker's name, "a step" whose result was wrong, or "the run". at: in UTC, to the second.

    back_after_s: None: it is not back yet.
    """

    what: str
    cause: str
    at: str
    began_s: float
    back_after_s: float | None = None


class Losses:
    """The losses of one run, in the order in which they were noticed. Pure but for the clock."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """now: seconds since 1970."""
        self._now = now
        self._open: list[Loss] = []
        self._over: list[Loss] = []

    def add(self, what: str, cause: object) -> None:
        """Something is lost; the last line of `cause` says why."""
        began_s = self._now()
        at = datetime.fromtimestamp(began_s, UTC).isoformat(timespec="seconds")
        lines = str(cause).strip().splitlines() or [""]
        self._open.append(Loss(what, lines[-1], at, began_s))

    def is_back(self, what: str) -> None:
        """What was lost, perhaps more than once, does its work again."""
        back = [loss for loss in self._open if loss.what == what]
        for loss in back:
            loss.back_after_s = self._now() - loss.began_s
        self._over += back
        self._open = [loss for loss in self._open if loss.what != what]

    def reopen(self, loss: Loss) -> None:
        """Go on with a loss of the run's command before this one."""
        self._open.append(loss)

    def take(self, *, also_open: bool = False) -> list[Loss]:
        """Those that are over and were not taken yet; also_open: and all that are not, because the run ends."""
        taken = self._over
        self._over = []
        if also_open:
            taken += self._open
            self._open = []
        return sorted(taken, key=lambda loss: loss.began_s)

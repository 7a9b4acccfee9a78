"""What a run has lost: which process, when, why, and for how long its work was not done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megarl.printable import json_line

THE_RUN = "the run"  # what is lost where its command ends before its time


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

    @staticmethod
    def of(what: str, cause: object, began_s: float) -> Loss:
        """The last line of `cause` says why. began_s: seconds since 1970."""
        at = datetime.fromtimestamp(began_s, UTC).isoformat(timespec="seconds")
        lines = str(cause).strip().splitlines() or [""]
        return Loss(what, lines[-1], at, began_s)

    def line(self) -> str:
        """A line of losses.jsonl, in which a later line of the same loss takes the place of an earlier one."""
        return json_line(asdict(self)) + "\n"


class Losses:
    """The losses of one run, in the order in which they were noticed. Pure but for the clock."""

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        note: Callable[[Loss], None] = lambda _: None,
        file: Path | None = None,
    ) -> None:
        """now: seconds since 1970. note: is given each loss at once. file: where they are written, if anywhere."""
        self._now = now
        self._note = note
        self.file = file
        self._open: list[Loss] = []
        self._over: list[Loss] = []

    def add(self, what: str, cause: object) -> None:
        """Something is lost; the last line of `cause` says why."""
        loss = Loss.of(what, cause, self._now())
        self._open.append(loss)
        self._note(loss)

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

    def take(self) -> list[Loss]:
        """Those that are over and were not taken yet."""
        taken = self._over
        self._over = []
        return sorted(taken, key=lambda loss: loss.began_s)

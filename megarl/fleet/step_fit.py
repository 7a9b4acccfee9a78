"""The seconds of an engine's decoding steps, fitted to what the rounds of this run took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megarl.types import StepSeconds

_LEAST = 4
_MOST = 64  # rounds of an engine that are fitted: the latest


@dataclass(frozen=True)
class EngineWork:
    """What an engine did in a round. steps: of its longest sample; read_tokens: those that samples begin with.

    Where not all samples run at once there are more steps, in proportion to new_tokens, which then stand for them.
    """

    steps: int = 0
    new_tokens: int = 0
    read_tokens: int = 0

    def with_sample(self, read_tokens: int, new_tokens: int) -> EngineWork:
        """With a sample more."""
        steps = max(self.steps, new_tokens)
        return EngineWork(steps, self.new_tokens + new_tokens, self.read_tokens + read_tokens)


class EngineHistory:
    """The latest rounds of a run's engines, all of which take the same time for the same work."""

    def __init__(self) -> None:
        self._seen: deque[tuple[EngineWork, float]] = deque(maxlen=_MOST)

    def add(self, work: EngineWork, seconds: float) -> None:
        if work.new_tokens and seconds > 0:
            self._seen.append((work, seconds))

    def fitted(self) -> StepSeconds | None:
        """None while too few rounds were seen."""
        if len(self._seen) >= _LEAST:
            return fitted(self._seen)
        return None


def seconds_of(fit: StepSeconds, work: EngineWork) -> float:
    return (
        fit.step_s * work.steps + fit.sequence_s * work.new_tokens + fit.read_s * work.read_tokens
    )


def fitted(seen: Sequence[tuple[EngineWork, float]]) -> StepSeconds:
    """The figures, none of them negative, with the least sum of squared relative errors.

    With three figures every choice of those that are not 0 is solved, so that the least of all is found.
    """
    relative = np.array(
        [
            [work.steps / seconds, work.new_tokens / seconds, work.read_tokens / seconds]
            for work, seconds in seen
        ]
    )
    best = np.zeros(3)
    least = float(len(seen))
    for count in (1, 2, 3):
        for chosen in map(list, combinations(range(3), count)):
            part = np.linalg.lstsq(relative[:, chosen], np.ones(len(seen)), rcond=None)[0]
            error = float(((relative[:, chosen] @ part - 1) ** 2).sum())
            if (part >= 0).all() and error < least:
                best = np.zeros(3)
                least = error
                best[chosen] = part
    return StepSeconds(*best.tolist())

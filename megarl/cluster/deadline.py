"""How long a silence may last before a process counts as hanging, learnt from the silences that have ended. Pure."""

from __future__ import annotations

_FACTOR = 5.0  # of the longest silence that has ended
_ENOUGH = 20  # silences that have ended: with fewer nothing is known
ENOUGH_ALIKE = 3  # the same where each is that of the same work, which every step does once


class Deadline:
    """A limit between a floor and a ceiling: five times the longest silence that has ended in this run.

    ceiling_s: the limit while little is known (run.timeout_s). floor_s: however short all silences were. enough: so
    many have to have ended before the limit is less than the ceiling.
    """

    def __init__(self, ceiling_s: float, floor_s: float = 8.0, enough: int = _ENOUGH) -> None:
        self.ceiling_s = ceiling_s
        self._floor_s = floor_s
        self._enough = enough
        self._longest_s = 0.0
        self._count = 0

    def observe(self, silence_s: float) -> None:
        """A silence has ended after so many seconds."""
        self._count += 1
        self._longest_s = max(self._longest_s, silence_s)

    @property
    def limit_s(self) -> float:
        if self._count < self._enough:
            return self.ceiling_s
        return min(self.ceiling_s, max(self._floor_s, _FACTOR * self._longest_s))

"""A number-guessing game: an environment that answers responses, without tools."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from megarl.environments import Environment, Observation, RewardResult

_NUMBER = re.compile(r"-?\d{1,18}")


class Guess(Environment):
    """The model guesses a whole number and is told whether the number is larger or smaller."""

    def __init__(self, low: int = 1, high: int = 100, most_guesses: int = 8) -> None:
        self._low = low
        self._high = high
        self._left = most_guesses
        self._number = random.Random(self.seed).randint(low, high)
        self._is_found = False

    def reset(self, row: Mapping[str, Any]) -> str:
        return (
            f"Guess my number, a whole number from {self._low} to {self._high}. You have {self._left} guesses. "
            "Answer each time with one number."
        )

    def reply(self, text: str) -> str | Observation | None:
        """The last number of the response is the guess; the game ends after the last guess."""
        self._left -= 1
        numbers = _NUMBER.findall(text)
        guess = int(numbers[-1]) if numbers else None
        self._is_found = guess == self._number
        if self._is_found:
            return Observation(f"Yes, it is {self._number}.", done=True)
        if self._left == 0:
            return None
        if guess is None:
            return f"That is not a number. Guesses left: {self._left}."
        word = "larger" if self._number > guess else "smaller"
        return f"My number is {word}. Guesses left: {self._left}."

    def reward(self) -> RewardResult:
        """1 for the number, else 0."""
        return RewardResult(float(self._is_found), self._is_found)

"""The guessing game tells the truth, ends, and is the same for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.environments import Observation, RewardResult
from megarl.environments.runtime.tool_loading import load_environment

GUESS = "megarl.environments.guess:Guess"


def game(seed: int, **arguments: Any) -> Any:
    return load_environment(GUESS, arguments).make(seed)


@given(seed=st.integers(min_value=0), size=st.integers(min_value=1, max_value=1000))
def test_halving_finds_every_number(seed: int, size: int) -> None:
    played = game(seed, low=-size, high=size, most_guesses=12)
    assert f"from {-size} to {size}. You have 12 guesses." in played.reset({})
    low, high = -size, size
    for _ in range(12):
        middle = (low + high) // 2
        answer = played.reply(f"I say {middle}")
        if isinstance(answer, Observation):
            assert answer == Observation(f"Yes, it is {middle}.", done=True)
            break
        low, high = (middle + 1, high) if "larger" in answer else (low, middle - 1)
    assert played.reward() == RewardResult(1.0, True)


def test_it_ends_after_the_last_guess() -> None:
    played = game(0, most_guesses=3)
    assert played.reply("no idea") == "That is not a number. Guesses left: 2."
    assert played.reply("between 1 and 1000") == "My number is smaller. Guesses left: 1."
    assert played.reply("-1") is None
    assert played.reward() == RewardResult(0.0, False)


def test_the_seed_decides_the_number() -> None:
    def told(seed: int) -> list[str]:
        return [str(game(seed).reply(str(guess))) for guess in range(1, 101)]

    assert told(3) == told(3) and len({tuple(told(seed)) for seed in range(20)}) > 10


@pytest.mark.parametrize("text", ["9" * 5000, "٣", "1e9", "--5", ""])
def test_odd_responses_are_answered(text: str) -> None:
    assert isinstance(game(0).reply(text), str | Observation)

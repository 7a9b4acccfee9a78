"""What a plan says of phases: which sizes it tries, which it names, and when it is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.plan.phase_advice import phase_advice
from megarl.plan.phased_rollout import PhasedRollout
from megarl.plan.rollout_time import RolloutTime
from tests.plan.test_phased_rollout import recipe_of

Tried = list[tuple[int | None, int]]


def found(recipe: Recipe, seconds: float, bound: int = 3, running: int = 100) -> PhasedRollout:
    time = RolloutTime(0.0, seconds, 0.0, running, 0.0, 0, 0.0, 1, 0.0)
    rollout = recipe.rollout
    phase = rollout.phase_tokens or rollout.max_response_tokens
    return PhasedRollout(phase, rollout.in_flight, 1.0, 0.0, 0.0, 0.62, 2, bound, 100, 1000, time)


def advise(recipe: Recipe, outcome: Callable[[int | None, int], Any]) -> tuple[list[str], Tried]:
    """outcome: (phase_tokens, prompts_in_flight) -> seconds, or keywords of `found`, or None."""
    tried: Tried = []

    def try_phases(changed: Recipe) -> PhasedRollout | None:
        tried.append((changed.rollout.phase_tokens, changed.rollout.in_flight))
        one = outcome(*tried[-1])
        return None if one is None else found(changed, **one if isinstance(one, dict) else {"seconds": one})

    return phase_advice(recipe, try_phases), tried


def test_the_fastest_is_named_with_how_old_its_tokens_are() -> None:
    seconds = {150: 310, 200: 200, 400: 250}
    advice, tried = advise(recipe_of(100, 4), lambda phase, count: seconds[count] if phase else 300)
    assert tried == [(None, 100), (100, 150), (100, 200), (100, 400), (200, 200), (50, 200)]
    told = "tokens are at most 3 versions old (0.6 in the mean)"
    keys = "rollout.phase_tokens 100 with prompts_in_flight 200"
    assert advice == [f"{keys} would take 1.5x fewer rollout seconds; {told}"]


def test_the_trainers_probabilities_need_a_correction() -> None:
    recipe = recipe_of(100, 4)
    off = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"mismatch": "off"})})
    (advice,), _ = advise(off, lambda phase, count: {"seconds": 100 if phase else 300, "bound": 1})
    assert " and algorithm.mismatch tis would take 3.0x fewer" in advice and "at most 1 version old" in advice


def test_of_sizes_that_are_about_as_fast_the_lowest_bound_is_named() -> None:
    def outcome(phase: int | None, count: int) -> dict[str, float]:
        return {"seconds": 300 if phase is None else 100 + 0.01 * count, "bound": count // 100}

    (advice,), _ = advise(recipe_of(100, 4), outcome)
    assert "prompts_in_flight 150 " in advice and "at most 1 version old" in advice


@pytest.mark.parametrize(
    ("outcome", "tried"),
    [
        (lambda phase, count: 300, [(None, 100), (100, 150), (100, 200), (100, 400), (200, 150), (50, 150)]),
        (lambda phase, count: 400 if phase else 300, [(None, 100), (100, 150), (100, 200), (100, 400)]),
        (lambda phase, count: None, [(None, 100)]),
        (lambda phase, count: None if phase else 300, [(None, 100), (100, 150)]),
        (lambda phase, count: {"seconds": 400 if phase else 300, "running": 99}, [(None, 100), (100, 150)]),
    ],
    ids=["no gain", "slower", "does not fit", "phases do not fit", "the cache is full"],
)
def test_nothing_is_said_without_a_gain(outcome: Any, tried: Tried) -> None:
    assert advise(recipe_of(100, 4), outcome) == ([], tried)


def test_shorter_phases_are_not_tried_where_longer_ones_are_faster() -> None:
    _, tried = advise(recipe_of(100, 4), lambda phase, count: 300 if phase is None else 200 - phase / 10)
    assert tried[-1] == (200, 150)


def test_a_recipe_whose_phases_take_longer_than_whole_responses_is_told() -> None:
    recipe = recipe_of(100, 4, phase_tokens=50, prompts_in_flight=200)
    advice, tried = advise(recipe, lambda phase, count: 300 if phase else 200)
    assert tried[0] == (50, 200) and (None, 100) in tried
    assert advice == ["rollout.phase_tokens null with prompts_in_flight null would take 1.5x fewer rollout seconds"]


@pytest.mark.parametrize("name", ["remax", "sft"])
def test_algorithms_that_refuse_phases_are_not_tried(name: str) -> None:
    recipe = recipe_of(100, 4)
    other = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"name": name})})
    assert advise(other, lambda phase, count: 1 if phase else 300) == ([], [])

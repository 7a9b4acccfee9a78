"""What a plan says of phases and of sampling ahead: what it tries, what it names, and when it is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.plan.phase_advice import TriedPhases, phase_advice
from megarl.plan.phased_rollout import PhasedRollout
from megarl.plan.rollout_time import RolloutTime
from tests.plan.test_phased_rollout import recipe_of

Tried = list[tuple[Any, ...]]  # phase_tokens, prompts_in_flight, and "ahead" where it is on


def found(
    recipe: Recipe, seconds: float, bound: int | None = None, running: int = 100
) -> TriedPhases:
    """bound: 3 with phases, and a version more ahead, unless it is given."""
    time, rollout = RolloutTime(0.0, 0.0, 0.0, running, 0.0, 0, 0.0, 1, 0.0), recipe.rollout
    phase = rollout.phase_tokens or rollout.max_response_tokens
    bound = 3 * bool(rollout.phase_tokens) + rollout.ahead if bound is None else bound
    phases = PhasedRollout(phase, rollout.in_flight, 1.0, 0.0, 0.0, 0.62, 2, bound, 100, 1000, time)
    return TriedPhases(recipe, phases, seconds)


def advise(
    recipe: Recipe, outcome: Callable[[int | None, int], Any], *, ahead_factor: float | None = None
) -> tuple[list[str], Tried]:
    """outcome: (phase_tokens, prompts_in_flight) -> seconds of a step, or keywords of `found`, or None.

    ahead_factor: of the seconds where a phase is sampled ahead; None: no engine has GPUs of its own.
    """
    tried: Tried = []

    def try_phases(changed: Recipe) -> TriedPhases | None:
        rollout = changed.rollout
        tried.append(
            (rollout.phase_tokens, rollout.in_flight, *(["ahead"] if rollout.ahead else []))
        )
        result = outcome(rollout.phase_tokens, rollout.in_flight)
        if result is None:
            return None
        values = result if isinstance(result, dict) else {"seconds": result}
        factor = ahead_factor if rollout.ahead and ahead_factor else 1
        return found(changed, **values | {"seconds": factor * values["seconds"]})

    return phase_advice(recipe, try_phases, may_be_ahead=ahead_factor is not None), tried


def test_the_fastest_is_named_with_how_old_its_tokens_are() -> None:
    seconds = {150: 310, 200: 200, 400: 250}
    advice, tried = advise(recipe_of(100, 4), lambda phase, count: seconds[count] if phase else 300)
    assert tried == [(None, 100), (100, 150), (100, 200), (100, 400), (200, 200), (50, 200)]
    age = "tokens are at most 3 versions old (0.6 in the mean)"
    keys = "rollout.phase_tokens 100 with prompts_in_flight 200"
    assert advice == [f"{keys} would take 1.5x fewer seconds a step; {age}"]


def test_the_trainers_probabilities_need_a_correction() -> None:
    recipe = recipe_of(100, 4)
    off = overlaid(recipe, {"algorithm": {"rollout_correction": "off"}})
    (advice,), _ = advise(off, lambda phase, count: {"seconds": 100 if phase else 300, "bound": 1})
    assert (
        " and algorithm.rollout_correction tis would take 3.0x fewer seconds" in advice
        and "at most 1 version old" in advice
    )


def test_the_engines_probabilities_correct_for_phases_but_not_in_a_ratio_of_whole_samples() -> None:
    by_engine = {"old_logprobs": "engine", "rollout_correction": "off"}
    recipe = overlaid(recipe_of(100, 4), {"algorithm": by_engine})
    (advice,), _ = advise(recipe, lambda phase, count: 100 if phase else 300)
    assert "rollout_correction" not in advice
    of_samples = overlaid(recipe, {"algorithm": {"name": "gspo"}})
    assert advise(of_samples, lambda phase, count: 100 if phase else 300) == ([], [])


def test_of_sizes_that_are_about_as_fast_the_lowest_bound_is_named() -> None:
    def outcome(phase: int | None, count: int) -> dict[str, float]:
        return {"seconds": 300 if phase is None else 100 + 0.01 * count, "bound": count // 100}

    (advice,), _ = advise(recipe_of(100, 4), outcome)
    assert "prompts_in_flight 150 " in advice and "at most 1 version old" in advice


@pytest.mark.parametrize(
    ("outcome", "tried"),
    [
        (
            lambda phase, count: 300,
            [(None, 100), (100, 150), (100, 200), (100, 400), (200, 150), (50, 150)],
        ),
        (
            lambda phase, count: 400 if phase else 300,
            [(None, 100), (100, 150), (100, 200), (100, 400)],
        ),
        (lambda phase, count: None, [(None, 100)]),
        (lambda phase, count: None if phase else 300, [(None, 100), (100, 150)]),
        (
            lambda phase, count: {"seconds": 400 if phase else 300, "running": 99},
            [(None, 100), (100, 150)],
        ),
    ],
    ids=["no gain", "slower", "does not fit", "phases do not fit", "the cache is full"],
)
def test_nothing_is_said_without_a_gain(outcome: Any, tried: Tried) -> None:
    assert advise(recipe_of(100, 4), outcome) == ([], tried)


def test_shorter_phases_are_not_tried_where_longer_ones_are_faster() -> None:
    _, tried = advise(
        recipe_of(100, 4), lambda phase, count: 300 if phase is None else 200 - phase / 10
    )
    assert tried[-1] == (200, 150)


def test_a_recipe_whose_phases_take_longer_than_whole_responses_is_told() -> None:
    recipe = recipe_of(100, 4, phase_tokens=50, prompts_in_flight=200)
    advice, tried = advise(recipe, lambda phase, count: 300 if phase else 200)
    assert tried[0] == (50, 200) and (None, 100) in tried
    assert advice == [
        "rollout.phase_tokens null with prompts_in_flight null would take 1.5x fewer seconds a step"
    ]


def test_where_engines_have_gpus_of_their_own_the_fastest_and_whole_responses_are_tried_ahead() -> (
    None
):
    seconds = {None: 300, 100: 200, 200: 250, 50: 220}
    advice, tried = advise(
        recipe_of(100, 4), lambda phase, count: seconds[phase], ahead_factor=0.75
    )
    assert tried[-2:] == [(100, 150, "ahead"), (None, 100, "ahead")]
    age = "tokens are at most 4 versions old (0.6 in the mean)"
    keys = "rollout.phase_tokens 100 with prompts_in_flight 150 and ahead 1"
    assert advice == [f"{keys} would take 2.0x fewer seconds a step; {age}"]


def test_whole_responses_ahead_are_named_where_training_hides_them() -> None:
    recipe = recipe_of(100, 4)
    off = overlaid(recipe, {"algorithm": {"rollout_correction": "off"}})
    (advice,), tried = advise(off, lambda phase, count: 400 if phase else 300, ahead_factor=0.5)
    assert tried[-1:] == [(None, 100, "ahead")] and len(tried) == 5
    age = "tokens are at most 1 version old (0.6 in the mean)"
    assert (
        advice
        == f"rollout.ahead 1 with algorithm.rollout_correction tis would take 2.0x fewer seconds a step; {age}"
    )


def test_a_recipe_that_samples_ahead_in_vain_is_told() -> None:
    """Few engines have GPUs of their own, and sample alone what all would."""
    advice, tried = advise(recipe_of(100, 4, ahead=1), lambda phase, count: 300, ahead_factor=2)
    assert tried[-1] == (None, 100) and tried[0] == (None, 100, "ahead")
    assert advice == ["rollout.ahead 0 would take 2.0x fewer seconds a step"]


@pytest.mark.parametrize("name", ["remax", "sft"])
def test_algorithms_that_refuse_phases_are_not_tried(name: str) -> None:
    recipe = recipe_of(100, 4)
    other = overlaid(recipe, {"algorithm": {"name": name}})
    assert advise(other, lambda phase, count: 1 if phase else 300) == ([], [])

"""Seconds of a rollout in phases: by hand, against the plan of whole responses, and what holds of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.placement.engine_layout import EngineLayout
from megarl.plan import phased_rollout as plan_phased_rollout
from megarl.plan.batch import Samples, response_lengths
from megarl.plan.engine_simulation import GroupLimits
from megarl.plan.phased_rollout import _lengths_of, _part, phased_rollout
from megarl.plan.rollout_time import rollout_time
from tests.controller.test_loop import QUICKSTART
from tests.plan.plans import speed_of
from tests.plan.test_rollout_time import limits

LONGEST, PROMPT = 400, 50


def recipe_of(prompts: int, samples: int, **rollout: Any) -> Recipe:
    keys = {
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "max_response_tokens": LONGEST,
        **rollout,
    }
    overrides = [f"rollout.{key}={value}" for key, value in keys.items()]
    return load_recipe(
        QUICKSTART, [*overrides, "algorithm.name=grpo", "algorithm.rollout_correction=tis"]
    )


def samples_of(prompts: int, samples: int, lengths: Any = None) -> Samples:
    drawn = prompts * samples
    responses = (
        response_lengths(drawn, LONGEST, 0.3) if lengths is None else np.full(drawn, lengths)
    )
    return Samples(prompts, prompts, drawn, drawn, PROMPT, PROMPT + LONGEST, responses)


def test_two_phases_of_equal_responses_by_hand() -> None:
    """12 responses of 200 tokens on one engine: two phases of 100 steps of 12 sequences, which are read with 100."""
    speed = speed_of(EngineLayout(1, 1, 1), kv_bytes=1e5)
    recipe = recipe_of(3, 4, phase_tokens=100)
    phased = phased_rollout(recipe, speed, samples_of(3, 4, 200), limits(1, 100))
    assert (phased.phases, phased.token_mean, phased.token_max, phased.bound) == (2, 0, 0, 0)
    assert phased.time.decode_s == pytest.approx(
        100 * (speed.step_s(12, 50 + 50) + speed.step_s(12, 150 + 50))
    )
    again = 12 * sum(speed.prefill_s(PROMPT + 100))
    assert phased.again_s == pytest.approx(again)
    assert phased.time.prefill_s == pytest.approx(again + 3 * sum(speed.prefill_s(PROMPT)))
    assert phased.again_share == 0.5
    assert (phased.open_sequences, phased.open_tokens) == (12, 12 * (PROMPT + 200))
    assert (
        phased.time.alone_s == pytest.approx(100 * speed.step_s(1, PROMPT + 150))
        and phased.time.longest == 100
    )


@settings(max_examples=12, deadline=None)
@given(
    prompts=st.integers(1, 9), per_prompt=st.integers(1, 5), engines=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2, 4]), slots=st.integers(1, 40), cache=st.sampled_from([800, 3000, 10**9]),
    share=st.floats(0.1, 0.8),
)  # fmt: skip
def test_whole_responses_take_exactly_the_seconds_of_the_plan_without_phases(
    prompts: int, per_prompt: int, engines: int, groups: int, slots: int, cache: int, share: float
) -> None:
    speed = speed_of(EngineLayout(engines, 4, 4, dp=groups), kv_bytes=1e4)
    drawn = prompts * per_prompt
    samples = replace(
        samples_of(prompts, per_prompt), responses=response_lengths(drawn, LONGEST, share)
    )
    room = limits(groups, slots, cache)
    phased = phased_rollout(recipe_of(prompts, per_prompt), speed, samples, room)
    assert phased.time == rollout_time(speed, samples, room)
    assert (phased.phases, phased.again_s, phased.again_share, phased.token_mean) == (1, 0, 0, 0)


def test_whole_responses_beside_training_take_the_seconds_of_whole_responses() -> None:
    """All of the rollout is beside training, and all tokens are a version old."""
    speed, samples, room = speed_of(EngineLayout(2, 4, 4)), samples_of(6, 4), limits(1, 30)
    phased = phased_rollout(recipe_of(6, 4, ahead=1), speed, samples, room)
    assert phased.time.mean_beside_s == pytest.approx(phased.time.total_s)
    # in other orders
    assert phased.time.total_s == pytest.approx(rollout_time(speed, samples, room).total_s, rel=0.1)
    assert (phased.phases, phased.token_mean, phased.token_max, phased.bound) == (1, 1, 1, 1)


def test_fewer_engines_beside_training_have_more_each() -> None:
    """Of 3 engines with a group of 4 responses each, 2 sample the three groups beside training, or 1."""
    speed, recipe = speed_of(EngineLayout(3, 1, 1), kv_bytes=1e5), recipe_of(3, 4, ahead=1)
    for beside, running in ((3, 4), (2, 8), (1, 12)):
        phased = phased_rollout(recipe, speed, samples_of(3, 4, 100), limits(1, 100), beside=beside)
        assert phased.time.running == phased.open_sequences == running
        assert phased.time.decode_s == pytest.approx(100 * speed.step_s(running, 50 + 50))
        assert (phased.again_share, phased.token_mean) == (0, 1)


@pytest.mark.slow
def test_a_part_of_an_engine_takes_about_as_long_as_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 4 groups with 2,048 sequences an eighth: half of one group, with all lengths."""
    recipe = recipe_of(128, 16, phase_tokens=100, prompts_in_flight=256)
    speed, samples, room = (
        speed_of(EngineLayout(1, 4, 4, dp=4), 1e3),
        samples_of(128, 16),
        limits(4, 2000),
    )
    assert (_part(128, 16, room).groups, _part(128, 16, room).of_group) == (4, 2)
    part = phased_rollout(recipe, speed, samples, room)
    monkeypatch.setattr(plan_phased_rollout, "_SEQUENCES", 10**9)
    whole = phased_rollout(recipe, speed, samples, room)
    assert part.time.total_s == pytest.approx(whole.time.total_s, rel=0.1)
    # All steps of the whole take two phases. In the half of a group some take one and some three: older tokens.
    assert part.token_mean == pytest.approx(whole.token_mean, abs=0.25)
    assert part.open_sequences == pytest.approx(whole.open_sequences, rel=0.15)


def test_a_part_has_room_for_the_longest_responses() -> None:
    small = GroupLimits(groups=1, slots=9999, cache=20 * LONGEST, longest=LONGEST)
    assert _part(1000, 16, small).divisor == 2
    assert _part(20, 1, small).divisor == 1


def test_drawn_prompts_have_the_lengths_of_a_step_again_and_again() -> None:
    lengths = np.arange(1, 13)
    of_drawn = _lengths_of(lengths, _part(3, 4, limits(1, 10)), 4)
    assert (
        np.concatenate([of_drawn(prompt_index) for prompt_index in range(3)]).tolist()
        == lengths.tolist()
    )
    later = np.concatenate([of_drawn(prompt_index) for prompt_index in range(3, 6)])
    assert sorted(later) == lengths.tolist() != later.tolist()

"""What a run in phases learns from: responses of all lengths alike, from its first step to its last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.controller.run import Step
from megarl.controller.stages import advantages
from megarl.fleet.rank_groups import RolloutBatch
from megarl.samples.buffer import BufferSizes, RolloutBuffer
from megarl.tracking.run_log import Record
from megarl.training.batching import SampleRef, plan_updates
from megarl.types import GroupSummary
from tests.samples.responses import response_rows
from tests.samples.test_buffer import PROMPT_TOKENS, Run, recipe_of

LONGEST, WANTED, UPDATES = 96, 64, 8
FEW, STEPS = 5, 40


@cache
def lengths(seed: int) -> np.ndarray:
    """[tickets, 2]: log-normal, the longest cut; samples of a prompt are alike, so that some groups are long."""
    draws = np.random.default_rng(seed)
    of_prompt = np.exp(draws.normal(2.6, 0.9, (WANTED * (STEPS + 4), 1)))
    return np.clip(
        of_prompt * np.exp(draws.normal(0, 0.3, (len(of_prompt), 2))), 1, LONGEST
    ).astype(int)


def run_of(seed: int, steps: int | None) -> Run:
    recipe = recipe_of(LONGEST, LONGEST // 4, WANTED, 2 * WANTED)
    return Run(lambda drawn: lengths(seed)[drawn].tolist(), recipe, steps=steps)


def trained_samples(run: Run, number: int, drawn_prompts: list[int]) -> Sequence[SampleRef]:
    """A step's samples in the order in which the controller gives them to the ranks."""
    facts = np.ones(2, np.bool_), np.array([1, 0], np.float32), np.array([True, False])
    summaries = [
        GroupSummary("", "", ("", ""), response_rows(PROMPT_TOKENS, run.parts[drawn]), *facts)
        for drawn in drawn_prompts
    ]
    hyperparameters, fleet = (
        SimpleNamespace(overlong_filter=False),
        SimpleNamespace(version=number - 1),
    )
    training: Any = SimpleNamespace(
        hyperparameters=hyperparameters, algorithm="grpo", recipe=run.recipe, fleet=fleet
    )
    return advantages(
        training, Step(number, Record(number), groups=RolloutBatch(summaries, []))
    ).samples


def test_tokens_of_every_length_weigh_the_same_in_the_updates_of_steps_in_phases() -> None:
    """The mean weight of a token, 1 / its update's tokens, over 20 steps: in every tenth of the samples by length."""
    run = run_of(0, steps=None)
    length_weights: list[tuple[int, float]] = []
    for number in range(1, 21):
        samples = trained_samples(run, number, run.step()[0])
        plans = plan_updates(
            samples, updates=UPDATES, dp=1, token_budget=10**4, aggregation="token_mean", work=float
        )
        of_step = sum(plan.loss_tokens for plan in plans) / UPDATES
        for plan in plans:
            refs = [ref for batch in plan.micro_batches[0] for ref in batch]
            length_weights += [(ref.response_length, of_step / plan.denominator) for ref in refs]
    tenths = np.array_split(np.array(sorted(length_weights)), 10)
    weights = np.array([tenth[:, 1].mean() for tenth in tenths])
    assert weights.max() < 1.05 and weights.min() > 0.95, weights


def relative_lengths(steps: int | None, count: int) -> np.ndarray:
    """[count] the mean length that each step trains on over that of all prompts, of two runs."""
    ratios = []
    for seed in range(2):
        run = run_of(seed, steps)
        means = [lengths(seed)[run.step()[0]].mean() for _ in range(count)]
        ratios.append(np.array(means) / lengths(seed)[: WANTED * STEPS].mean())
    return np.mean(ratios, 0)


def so_far(means: np.ndarray) -> np.ndarray:
    return np.cumsum(means) / np.arange(1, len(means) + 1)


def test_the_first_and_the_last_steps_train_on_all_lengths() -> None:
    """As a run begins with few prompts in flight, and ends with none that wait."""
    at_once, of_run = so_far(relative_lengths(None, FEW)), relative_lengths(STEPS, STEPS)
    assert at_once[0] < 0.65 and at_once[1] < 0.8 and at_once[-1] < 0.9, (
        "were all prompts begun at once"
    )
    first, last = so_far(of_run), so_far(of_run[::-1])
    assert first[:2].min() > 0.94 and first.min() > 0.9
    assert last[FEW - 1 :].max() < 1.1
    assert of_run.mean() == pytest.approx(1.0, abs=1e-9), "as often as they are drawn"


def test_a_run_that_goes_on_after_its_end_begins_again_with_few_in_flight() -> None:
    run = run_of(0, 6)
    for _ in range(6):
        run.step()
    assert not run.buffer.entries and run.buffer.surplus == 1
    run.steps = 30
    in_flight = []
    for _ in range(8):
        numbers, _ = run.step()
        in_flight.append(len(numbers) + len(run.buffer.entries) - WANTED)
    assert in_flight == [1, 2, 3, 4, 6, 8, 11, 14]


def test_what_waits_is_logged() -> None:
    run = run_of(0, STEPS)
    for _ in range(12):
        numbers, _ = run.step()
    waiting = [entry.number for entry in run.buffer.entries]
    sampled = [
        max(sum(part.num_tokens for part in parts) for parts in run.parts[number])
        for number in waiting
    ]
    metrics = {name: value for name, value in run.metrics.items() if name.startswith("buffer/")}
    assert metrics == {
        "buffer/groups": len(waiting),
        "buffer/open": len(run.buffer.open),
        "buffer/longest_mean": pytest.approx(np.mean(sampled)),
        "buffer/longest_trained_mean": pytest.approx(lengths(0)[numbers].max(1).mean()),
    }
    assert metrics["buffer/groups"] > metrics["buffer/open"] > 0
    last = run_of(0, 1)
    last.step()
    assert last.metrics["buffer/groups"] == 0 and "buffer/longest_mean" not in last.metrics


@given(wanted=st.integers(1, 600), more=st.integers(0, 1800), steps=st.integers(1, 60))
def test_the_surplus_grows_and_shrinks_by_a_quarter_a_step(
    wanted: int, more: int, steps: int
) -> None:
    sizes, buffer, surpluses = (
        BufferSizes(wanted, wanted + more),
        RolloutBuffer[None](),
        list[int](),
    )
    for left in reversed(range(steps)):
        surpluses.append(sizes.surplus(buffer.surplus, left))
        buffer = buffer.after_step(sizes, left)
    assert surpluses == surpluses[::-1] and surpluses[0] == 0 and max(surpluses) <= more
    rises = np.diff(surpluses[: (steps + 1) // 2])
    assert (rises >= 0).all() and (
        rises <= np.maximum(1, np.array(surpluses[: len(rises)]) / 4 + wanted / 64)
    ).all()

"""Smaller states of the optimizer: advised where a recipe does not fit, and where its optimizer is on the host."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.plan.fit import lacking
from megarl.plan.optimizer_advice import optimizer_advice
from megarl.plan.optimizer_memory import smaller_states
from megarl.plan.rollout_time import NO_ROLLOUT
from tests.plan import plans
from tests.plan.test_fit import FULL, sizes_of


def tight_recipe(folder: Path) -> Recipe:
    """Of ranks beside engines on slots of their own, whose room no state of the optimizer changes."""
    return plans.recipe(
        folder, "qwen3-30b", 12, ep=8, engine={"count": 1, "tp": 4, "ep": 4},
        placement={"train_gpus": 8, "first_engine_gpu": 8}, megatron=FULL,
        tokens_per_micro_batch=2048 + 8192,
    )  # fmt: skip


REMAINDERS = "train.optimizer to {use_precision_aware_optimizer: true"
MOMENTS = "exp_avg_dtype: bfloat16, exp_avg_sq_dtype: bfloat16, adam_beta2: 0.95}"


@pytest.mark.parametrize(
    ("too_much", "advice"),
    [
        # of a weight's 12 bytes 2 are less with remainders, and 6 with moments in bfloat16 too
        (1e9, f"{REMAINDERS}}}"),
        (10e9, f"{REMAINDERS}, {MOMENTS}"),
        (30e9, "train.optimizer_offload to true"),
    ],
)
def test_a_smaller_state_is_advised_before_one_on_the_host(
    tmp_path: Path, too_much: float, advice: str
) -> None:
    tight = tight_recipe(tmp_path)
    sizes = sizes_of(tight)
    needed = plans.count(tight, plans.H800, sizes).device["train"].total_bytes
    card = plans.H800.model_copy(update={"memory_bytes": int(needed - too_much)})
    plan = plans.memory(tight, card, sizes)
    (error,) = (error for error in plan.errors if "the train phase" in error.problem)
    assert error.hint.startswith(f"set {advice}: then it is")
    seconds = [float(number) for number in re.findall(r" ([\d.e+]+) s\b", error.hint)]
    if "offload" in advice:
        assert len(seconds) == 1
    else:
        on_gpu, on_host = seconds
        assert 0 < 10 * on_gpu < on_host


@pytest.mark.parametrize(
    ("memory_bytes", "fits", "state"),
    [
        (71e9, 0, "{use_precision_aware_optimizer: true} (masters as remainders)"),
        (66e9, 1, "adam_beta2: 0.95} (moments in bfloat16)"),
        (41e9, 2, None),
    ],
)
def test_a_state_on_the_gpu_is_advised_with_the_seconds_that_it_saves(
    tmp_path: Path, memory_bytes: float, fits: int, state: str | None
) -> None:
    """fits: the number of the first state that has room on a card of such memory; with 2 there is none."""
    tight = tight_recipe(tmp_path)
    on_host = overlaid(tight, {"train": {"optimizer_offload": True}})
    smaller = [overlaid(tight, {"train": {"optimizer": item}}) for item in smaller_states(tight)]
    card = plans.H800.model_copy(update={"memory_bytes": int(memory_bytes)})
    tries = plans.tries(on_host, card, sizes_of(tight))
    work = replace(tries.shares["policy"], micro_batches=8, updates=8)
    tries = replace(tries, shares={"policy": work})
    too_large = ["train" in lacking(recipe, tries.states(recipe)[0]) for recipe in smaller]
    assert too_large == [True] * fits + [False] * (len(smaller) - fits)
    memory, step = tries.states(on_host)
    lines = optimizer_advice(on_host, memory, NO_ROLLOUT, tries.states)
    assert optimizer_advice(smaller[0], memory, NO_ROLLOUT, tries.states) == []
    if state is None:
        assert lines == []
        return
    (line,) = lines
    assert f"{state} would fit" in line
    saved = [float(number) for number in re.findall(r"save ([\d.e+]+) of", line)]
    saved_s = step.total_s - tries.states(smaller[fits])[1].total_s
    assert saved == [pytest.approx(saved_s, rel=0.05)]


def test_smaller_states_are_those_that_types_and_betas_allow(tmp_path: Path) -> None:
    made = tight_recipe(tmp_path)

    def names(overlay: dict[str, Any]) -> list[list[str]]:
        return [[*options] for options in smaller_states(overlaid(made, overlay))]

    key = "use_precision_aware_optimizer"
    moments = ["exp_avg_dtype", "exp_avg_sq_dtype"]
    assert names({}) == [[key], [key, *moments, "adam_beta2"]]
    assert names({"model": {"dtype": "float32"}}) == []
    slow = {"adam_beta1": 0.98}
    assert names({"train": {"optimizer": slow}}) == [["adam_beta1", key]]
    fast = {"adam_beta2": 0.95}
    assert names({"train": {"optimizer": fast}}) == [
        ["adam_beta2", key], ["adam_beta2", key, *moments],
    ]  # fmt: skip

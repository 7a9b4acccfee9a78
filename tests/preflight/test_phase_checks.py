"""What contradicts a rollout in phases is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.loading import load_recipe
from megarl.placement.roles import resolve
from megarl.preflight.phase_checks import phase_errors

# 128 prompts a step, 5 tokens a response
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
IN_PHASES = "rollout.phase_tokens=2 rollout.prompts_in_flight=256 algorithm.rollout_correction=tis"
AHEAD = "rollout.ahead=1 algorithm.rollout_correction=tis"
SPLIT = "placement.gpus=6 placement.train_gpus=4 placement.first_engine_gpu=4"
MIXED = (
    "placement.gpus=6 placement.train_gpus=4 placement.first_engine_gpu=2 rollout.engine.count=2"
)
CORRECTION = "algorithm.rollout_correction"
BY_ENGINE = f"algorithm.old_logprobs=engine {CORRECTION}=off"
WIDE = f"{CORRECTION}_low=0.5 {CORRECTION}_high=2.0"


def told(overrides: str, recipe: str = "quickstart") -> list[str]:
    path = QUICKSTART.with_name(f"{recipe}.yaml")
    errors = phase_errors(resolve(load_recipe(path, overrides.split())))
    return [str(error) for error in errors]


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        IN_PHASES,
        f"{IN_PHASES} {CORRECTION}=icepop",
        f"{IN_PHASES} {CORRECTION}=mis_geometric {WIDE}",
        f"{IN_PHASES} {CORRECTION}=mis_sequence {CORRECTION}_high=2.0",
        f"{IN_PHASES} {BY_ENGINE}",
        f"{AHEAD} {SPLIT} {BY_ENGINE}",
        f"algorithm.name=gspo {BY_ENGINE}",
        f"{CORRECTION}=mis_geometric",
        "algorithm.name=rloo",
        f"algorithm.name=rloo algorithm.dynamic_sampling=true {CORRECTION}=tis",
        "algorithm.name=grpo algorithm.dynamic_sampling=true",
        f"{AHEAD} {SPLIT}",
        f"{AHEAD} {MIXED}",
        "algorithm.name=sft rollout.phase_tokens=2",  # without samples there are no phases
    ],
)
def test_what_is_corrected_has_no_error(overrides: str) -> None:
    """Ahead needs an engine with GPUs of its own."""
    assert told(overrides) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            f"{IN_PHASES} {CORRECTION}=off",
            "algorithm.rollout_correction: off, and with rollout.phase_tokens earlier ",
        ),
        (
            f"{IN_PHASES} {BY_ENGINE} algorithm.name=gspo",
            "algorithm.old_logprobs: engine, and with rollout.phase_tokens the ratio of a whole sample, which gspo "
            "clips, is to several policies; set it to train, or leave rollout.phase_tokens out",
        ),
        (
            f"{IN_PHASES} {CORRECTION}=mis_geometric",
            "algorithm.rollout_correction: mis_geometric, and with rollout.phase_tokens earlier policies have sampled "
            "a part of the tokens: the bounds 0.99 and 1.01 of whole samples drop about 97 % of the samples with such "
            "tokens; set it to tis or icepop, or set algorithm.rollout_correction_low and "
            "algorithm.rollout_correction_high to wider bounds",
        ),
        (
            f"{IN_PHASES} {CORRECTION}=mis_geometric {CORRECTION}_high=2.0",
            "algorithm.rollout_correction: mis_geometric, and with rollout.phase_tokens",
        ),
        (
            f"{IN_PHASES} {CORRECTION}=mis_sequence",
            "algorithm.rollout_correction: mis_sequence, and with rollout.phase_tokens earlier policies have sampled "
            "a part of the tokens: the bounds 0 and 2 of whole samples leave an effective 8 % of samples with 1,000 "
            "such tokens",
        ),
        (
            f"{IN_PHASES} algorithm.name=remax",
            "rollout.phase_tokens: is set, and remax compares the samples of a",
        ),
        (
            f"{IN_PHASES} rollout.phase_tokens=5",
            "rollout.phase_tokens: 5, and no response has more than 5 tokens",
        ),
        (
            f"{IN_PHASES} rollout.prompts_in_flight=100",
            "rollout.prompts_in_flight: 100, and a step trains on 128",
        ),
        (
            "rollout.prompts_in_flight=256",
            "rollout.prompts_in_flight: 256, and without rollout.phase_tokens a step",
        ),
        (
            "algorithm.name=rloo algorithm.dynamic_sampling=true",
            "algorithm.rollout_correction: off, and rloo has no ratio: nothing corrects the older groups that dynamic "
            "sampling keeps; set it to tis or icepop, or algorithm.dynamic_sampling to false",
        ),
        (
            AHEAD,
            "rollout.ahead: 1, and every engine shares GPUs with other models, to which it gives the memory",
        ),
        (
            f"{AHEAD} {SPLIT} {CORRECTION}=off",
            "algorithm.rollout_correction: off, and with rollout.ahead earlier ",
        ),
        (
            f"{AHEAD} {SPLIT} {CORRECTION}=mis_sequence",
            "algorithm.rollout_correction: mis_sequence, and with rollout.ahead ",
        ),
        (
            f"{AHEAD} {SPLIT} algorithm.name=remax",
            "rollout.ahead: is set, and remax compares the samples of a prompt",
        ),
        (
            f"{AHEAD} {SPLIT} reward_model.path=MODEL reward_model.ranks.first_gpu=3 reward_model.ranks.gpus=3",
            "rollout.ahead: 1, and every engine shares GPUs with other models, to which it gives the memory",
        ),
    ],
)
def test_each_contradiction_is_told_once(overrides: str, says: str) -> None:
    (line,) = told(overrides)
    assert line.startswith(says)


def test_phases_of_episodes_are_shorter_than_these() -> None:
    """Not than a turn of them."""
    assert told(f"{IN_PHASES} rollout.phase_tokens=16", "quickstart_tools") == []
    (line,) = told(f"{IN_PHASES} rollout.phase_tokens=96", "quickstart_tools")
    assert line.startswith(
        "rollout.phase_tokens: 96, and no episode has more than 96 tokens (episode.max_"
    )

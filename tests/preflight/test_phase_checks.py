"""What contradicts a rollout in phases is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.loading import load_recipe
from megarl.placement.roles import resolve
from megarl.preflight.phase_checks import phase_errors

# 128 prompts a step, 5 tokens a response
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
IN_PHASES = [
    "rollout.phase_tokens=2",
    "rollout.prompts_in_flight=256",
    "algorithm.rollout_correction=tis",
]


WIDE = ["algorithm.rollout_correction_low=0.5", "algorithm.rollout_correction_high=2.0"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        IN_PHASES,
        [*IN_PHASES, "algorithm.rollout_correction=icepop"],
        [*IN_PHASES, "algorithm.rollout_correction=mis_geometric", *WIDE],
        [*IN_PHASES, "algorithm.rollout_correction=mis_sequence", WIDE[1]],
        ["algorithm.rollout_correction=mis_geometric"],
        ["algorithm.name=rloo"],
        [
            "algorithm.name=rloo",
            "algorithm.dynamic_sampling=true",
            "algorithm.rollout_correction=tis",
        ],
        ["algorithm.name=grpo", "algorithm.dynamic_sampling=true"],
    ],
)
def test_whole_responses_and_corrected_phases_have_no_error(overrides: list[str]) -> None:
    assert phase_errors(resolve(load_recipe(QUICKSTART, overrides))) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [*IN_PHASES, "algorithm.rollout_correction=off"],
            "algorithm.rollout_correction: off, and with rollout.phase_tokens earlier ",
        ),
        (
            [*IN_PHASES, "algorithm.rollout_correction=mis_geometric"],
            "algorithm.rollout_correction: mis_geometric, and with rollout.phase_tokens earlier policies have sampled "
            "a part of the tokens: the bounds 0.99 and 1.01 of whole samples drop about 97 % of the samples with such "
            "tokens; set it to tis or icepop, or set algorithm.rollout_correction_low and "
            "algorithm.rollout_correction_high to wider bounds",
        ),
        (
            [
                *IN_PHASES,
                "algorithm.rollout_correction=mis_geometric",
                "algorithm.rollout_correction_high=2.0",
            ],
            "algorithm.rollout_correction: mis_geometric, and with rollout.phase_tokens",
        ),
        (
            [*IN_PHASES, "algorithm.rollout_correction=mis_sequence"],
            "algorithm.rollout_correction: mis_sequence, and with rollout.phase_tokens earlier policies have sampled "
            "a part of the tokens: the bounds 0 and 2 of whole samples leave an effective 8 % of samples with 1,000 "
            "such tokens",
        ),
        (
            [*IN_PHASES, "algorithm.name=remax"],
            "rollout.phase_tokens: is set, and remax compares the samples of a",
        ),
        (
            [*IN_PHASES, "rollout.phase_tokens=5"],
            "rollout.phase_tokens: 5, and no response has more than 5 tokens",
        ),
        (
            [*IN_PHASES, "rollout.prompts_in_flight=100"],
            "rollout.prompts_in_flight: 100, and a step trains on 128",
        ),
        (
            ["rollout.prompts_in_flight=256"],
            "rollout.prompts_in_flight: 256, and without rollout.phase_tokens a step",
        ),
    ],
)
def test_each_contradiction_is_told_once(overrides: list[str], says: str) -> None:
    (error,) = phase_errors(resolve(load_recipe(QUICKSTART, overrides)))
    assert str(error).startswith(says)


@pytest.mark.parametrize("name", ["rloo", "remax"])
def test_leftover_groups_need_a_correction_where_there_is_no_ratio(name: str) -> None:
    """Of the other algorithms the ratio to the engine's own probabilities corrects them."""
    overrides = [f"algorithm.name={name}", "algorithm.dynamic_sampling=true"]
    (error,) = phase_errors(resolve(load_recipe(QUICKSTART, overrides)))
    assert str(error) == (
        f"algorithm.rollout_correction: off, and {name} has no ratio: nothing corrects the older groups that dynamic "
        "sampling keeps; set it to tis or icepop, or algorithm.dynamic_sampling to false"
    )


SPLIT = ["placement.gpus=6", "placement.train_gpus=4", "placement.first_engine_gpu=4"]
MIXED = [
    "placement.gpus=6",
    "placement.train_gpus=4",
    "placement.first_engine_gpu=2",
    "rollout.engine.count=2",
]
AHEAD = ["rollout.ahead=1", "algorithm.rollout_correction=tis"]


@pytest.mark.parametrize("placed", [SPLIT, MIXED])
def test_ahead_needs_an_engine_with_gpus_of_its_own(placed: list[str]) -> None:
    assert phase_errors(resolve(load_recipe(QUICKSTART, [*AHEAD, *placed]))) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            AHEAD,
            "rollout.ahead: 1, and every engine shares GPUs with other models, to which it gives the memory",
        ),
        (
            [*AHEAD, *SPLIT, "algorithm.rollout_correction=off"],
            "algorithm.rollout_correction: off, and with rollout.ahead earlier ",
        ),
        (
            [*AHEAD, *SPLIT, "algorithm.rollout_correction=mis_sequence"],
            "algorithm.rollout_correction: mis_sequence, and with rollout.ahead ",
        ),
        (
            [*AHEAD, *SPLIT, "algorithm.name=remax"],
            "rollout.ahead: is set, and remax compares the samples of a prompt",
        ),
        (
            [
                *AHEAD,
                *SPLIT,
                "reward_model.path=MODEL",
                "reward_model.ranks.first_gpu=3",
                "reward_model.ranks.gpus=3",
            ],
            "rollout.ahead: 1, and every engine shares GPUs with other models, to which it gives the memory",
        ),
    ],
)
def test_what_contradicts_ahead_is_told_once(overrides: list[str], says: str) -> None:
    (error,) = phase_errors(resolve(load_recipe(QUICKSTART, overrides)))
    assert str(error).startswith(says)


def test_phases_of_episodes_are_shorter_than_these() -> None:
    """Not than a turn of them."""
    tools = load_recipe(
        QUICKSTART.with_name("quickstart_tools.yaml"), [*IN_PHASES, "rollout.phase_tokens=16"]
    )
    assert phase_errors(resolve(tools)) == []
    tools = load_recipe(
        QUICKSTART.with_name("quickstart_tools.yaml"), [*IN_PHASES, "rollout.phase_tokens=96"]
    )
    (error,) = phase_errors(resolve(tools))
    assert str(error).startswith(
        "rollout.phase_tokens: 96, and no episode has more than 96 tokens (episode.max_"
    )


def test_an_algorithm_without_samples_has_no_phases() -> None:
    assert (
        phase_errors(
            resolve(load_recipe(QUICKSTART, ["algorithm.name=sft", "rollout.phase_tokens=2"]))
        )
        == []
    )

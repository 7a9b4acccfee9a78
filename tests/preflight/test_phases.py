"""What contradicts a rollout in phases is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.loading import load_recipe
from megarl.parallel.roles import resolve
from megarl.preflight.phases import phase_faults

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"  # 128 prompts a step, 5 tokens a response
IN_PHASES = ["rollout.phase_tokens=2", "rollout.prompts_in_flight=256", "algorithm.mismatch=tis"]


@pytest.mark.parametrize("overrides", [[], IN_PHASES, [*IN_PHASES, "algorithm.mismatch=icepop"]])
def test_whole_responses_and_corrected_phases_have_no_fault(overrides: list[str]) -> None:
    assert phase_faults(resolve(load_recipe(QUICKSTART, overrides))) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([*IN_PHASES, "algorithm.mismatch=off"], "algorithm.mismatch: off, and with rollout.phase_tokens earlier "),
        ([*IN_PHASES, "algorithm.name=remax"], "rollout.phase_tokens: is set, and remax compares the samples of a"),
        ([*IN_PHASES, "rollout.phase_tokens=5"], "rollout.phase_tokens: 5, and no response has more than 5 tokens"),
        ([*IN_PHASES, "rollout.prompts_in_flight=100"], "rollout.prompts_in_flight: 100, and a step trains on 128"),
        (["rollout.prompts_in_flight=256"], "rollout.prompts_in_flight: 256, and without rollout.phase_tokens a step"),
    ],
)
def test_each_contradiction_is_told_once(overrides: list[str], says: str) -> None:
    (fault,) = phase_faults(resolve(load_recipe(QUICKSTART, overrides)))
    assert str(fault).startswith(says)


SPLIT = ["placement.gpus=6", "placement.train_gpus=4", "placement.first_engine_gpu=4"]
MIXED = ["placement.gpus=6", "placement.train_gpus=4", "placement.first_engine_gpu=2", "rollout.engine.count=2"]
AHEAD = ["rollout.ahead=1", "algorithm.mismatch=tis"]


@pytest.mark.parametrize("placed", [SPLIT, MIXED])
def test_ahead_needs_an_engine_with_gpus_of_its_own(placed: list[str]) -> None:
    assert phase_faults(resolve(load_recipe(QUICKSTART, [*AHEAD, *placed]))) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (AHEAD, "rollout.ahead: 1, and every engine shares GPUs with other models, to which it gives the memory"),
        ([*AHEAD, *SPLIT, "algorithm.mismatch=off"], "algorithm.mismatch: off, and with rollout.ahead earlier "),
        ([*AHEAD, *SPLIT, "algorithm.name=remax"], "rollout.ahead: is set, and remax compares the samples of a prompt"),
        (
            [*AHEAD, *SPLIT, "reward_model.path=MODEL", "reward_model.ranks.first_gpu=3", "reward_model.ranks.gpus=3"],
            "rollout.ahead: 1, and every engine shares GPUs with other models, to which it gives the memory",
        ),
    ],
)
def test_what_contradicts_ahead_is_told_once(overrides: list[str], says: str) -> None:
    (fault,) = phase_faults(resolve(load_recipe(QUICKSTART, overrides)))
    assert str(fault).startswith(says)


def test_phases_of_episodes_are_shorter_than_these() -> None:
    """Not than a turn of them."""
    tools = load_recipe(QUICKSTART.with_name("quickstart_tools.yaml"), [*IN_PHASES, "rollout.phase_tokens=16"])
    assert phase_faults(resolve(tools)) == []
    tools = load_recipe(QUICKSTART.with_name("quickstart_tools.yaml"), [*IN_PHASES, "rollout.phase_tokens=96"])
    (fault,) = phase_faults(resolve(tools))
    assert str(fault).startswith("rollout.phase_tokens: 96, and no episode has more than 96 tokens (episode.max_")


def test_an_algorithm_without_samples_has_no_phases() -> None:
    assert phase_faults(resolve(load_recipe(QUICKSTART, ["algorithm.name=sft", "rollout.phase_tokens=2"]))) == []

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.algos import ALGORITHMS
from megarl.algos.statistics import CLIPPED
from megarl.algos.targets import Targets

STAGES = {
    "sft": ("demonstrate", "update"),
    "prime": ("sample", "values", "update"),
    "ppo": ("sample", "logprobs", "values", "update"),
    "vapo": ("sample", "values", "update"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_stages_of_a_training_step(name: str) -> None:
    row = ALGORITHMS[name]
    assert row.stages(row.hyperparameters) == STAGES.get(name, ("sample", "update"))


def test_neither_demonstrations_nor_a_teacher_alone_are_rewards() -> None:
    without = {name for name, row in ALGORITHMS.items() if not row.learns_from_rewards}
    assert without == {"on_policy_distillation", "sft"}


def test_a_critic_needs_no_look_at_the_policy_without_a_kl_reward() -> None:
    row = ALGORITHMS["ppo"]
    assert row.stages(replace(row.hyperparameters, kl_coefficient=0.0)) == (
        "sample",
        "values",
        "update",
    )


@pytest.mark.parametrize(
    ("name", "changes", "several", "single"),
    [
        ("grpo", {}, range(1, 4), []),
        ("rloo", {}, range(1, 4), []),
        ("grpo", {"rollout_correction": "tis"}, range(1, 4), []),
        ("grpo", {"rollout_correction": "mis_sequence"}, range(4), [0]),
        ("ppo", {}, range(4), [0]),
        ("vapo", {}, range(1, 4), []),
        ("grpo", {"old_logprobs": "engine"}, [], []),
        ("sft", {}, [], []),
    ],
)
def test_updates_whose_old_logprobs_take_a_pass(
    name: str, changes: dict[str, Any], several: Sequence[int], single: Sequence[int]
) -> None:
    row = ALGORITHMS[name]
    hyperparameters = replace(row.hyperparameters, **changes)
    for num_updates, expected in ((4, several), (1, single)):
        assert list(row.updates_with_pass(hyperparameters, num_updates)) == list(expected)


def test_cispo_cuts_off_ratios_above_five_alone() -> None:
    """The epsilon_max of ScaleRL (arXiv 2510.13786) bounds the ratio itself; there is no lower bound."""
    row, nothing_T = ALGORITHMS["cispo"], torch.zeros(3)
    targets = Targets(
        loss_mask_T=nothing_T == 0, loss_weight_T=nothing_T + 1, advantage_T=nothing_T + 1, outcome_T=nothing_T,
        engine_logp_T=nothing_T, nll_weight_T=nothing_T, is_stale_T=nothing_T > 0, sequence_T=nothing_T.long(),
    )  # fmt: skip
    assert row.surrogate is not None
    logp_T = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    loss_T, statistics = row.surrogate(
        logp_T, torch.tensor([0.01, 4.9, 5.5]).log(), targets, row.hyperparameters
    )
    loss_T.sum().backward()
    assert logp_T.grad is not None and logp_T.grad.tolist() == pytest.approx([-0.01, -4.9, -5.0])
    assert statistics[CLIPPED].tolist() == [False, False, True]

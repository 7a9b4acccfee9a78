"""The table of algorithms. A row says what a sample's advantage is, what a token's loss is, and what is averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from megarl.algos.advantages import centred, group_normalised, leave_one_out, outcome
from megarl.algos.losses import LossResult, nll_loss, policy_loss
from megarl.algos.surrogates import Surrogate, cispo, clipped, reinforce, sequence_clipped
from megarl.algos.targets import Targets
from megarl.types import Aggregation, Hyperparameters

# What the loss of the model beside the policy is the mean of, by what it says of tokens.
AUXILIARY_AGGREGATION: dict[str, Aggregation] = {"values": "token_mean", "process_rewards": "sequence_mean"}

# What a training step does, in order: sample from the policy or take the data's demonstrations; observe the samples'
# KL penalties for the auxiliary model; have the auxiliary model value them and learn from them; update the policy.
Stage = Literal["sample", "demonstrate", "observe", "value", "update"]

# (logp_T, entropy_T, old_logp_T, targets) -> (loss sum, statistics: sums, or maxima where the name ends in _max)
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Targets], LossResult]


class AlgorithmOptions(Protocol):
    """The recipe's branch: the name of a row, and the rules that it sets."""

    @property
    def name(self) -> str: ...
    @property
    def given(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Algorithm:
    """One row: rewards_G -> advantage_G; the objective of a token; the rules, which a recipe may set otherwise.

    critic: what the model that learns beside the policy says of each token. GAE makes advantages of its values, which
    are sums of process rewards otherwise. greedy_baseline: each group has a greedy sample too, whose reward is taken
    from the others' before they become advantages. needs_group: an advantage compares the samples of a prompt, so that
    one sample alone teaches nothing. A row without an objective learns from demonstrations.
    """

    advantage: Callable[[torch.Tensor], torch.Tensor]
    surrogate: Surrogate | None
    rules: Hyperparameters
    critic: Literal["", "values", "process_rewards"] = ""
    greedy_baseline: bool = False
    needs_group: bool = True

    @property
    def learns_from(self) -> Literal["rewards", "demonstrations"]:
        return "rewards" if self.surrogate else "demonstrations"

    def stages(self, hyperparameters: Hyperparameters) -> tuple[Stage, ...]:
        """What a training step does with these hyperparameters, in order."""
        wanted: dict[Stage, bool] = {
            "sample": self.learns_from == "rewards",
            "demonstrate": self.learns_from == "demonstrations",
            "observe": bool(self.critic) and hyperparameters.pays_kl,
            "value": bool(self.critic),
            "update": True,
        }
        return tuple(stage for stage, is_wanted in wanted.items() if is_wanted)

    def loss(self, rules: Hyperparameters) -> Loss:
        """The loss of a packed row under these rules."""
        if self.surrogate is None:
            return lambda logp_T, entropy_T, old_logp_T, targets: nll_loss(logp_T, targets)
        return partial(policy_loss, self.surrogate, rules=rules)


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        group_normalised, clipped, Hyperparameters(aggregation="sequence_mean", kl_coefficient=0.001)
    ),  # arXiv 2402.03300
    "dapo": Algorithm(
        group_normalised, clipped, Hyperparameters(clip_high=0.28, dynamic_sampling=True, overlong_share=0.2)
    ),  # arXiv 2503.14476
    "dr_grpo": Algorithm(centred, clipped, Hyperparameters(aggregation="constant")),  # arXiv 2503.20783
    "rloo": Algorithm(leave_one_out, reinforce, Hyperparameters(aggregation="sequence_sum")),  # arXiv 2402.14740
    "gspo": Algorithm(
        group_normalised, sequence_clipped, Hyperparameters(aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4)
    ),  # arXiv 2507.18071
    "cispo": Algorithm(group_normalised, cispo, Hyperparameters(clip_low=1.0)),  # arXiv 2506.13585: no lower bound
    "remax": Algorithm(
        outcome, reinforce, Hyperparameters(aggregation="sequence_sum"), greedy_baseline=True, needs_group=False
    ),  # arXiv 2310.10505
    "reinforce_pp": Algorithm(
        outcome,
        clipped,
        Hyperparameters(whiten=True, kl_coefficient=0.001, kl_estimator="k1", kl_place="reward"),
        needs_group=False,
    ),  # arXiv 2501.03262
    "reinforce_pp_baseline": Algorithm(
        centred, clipped, Hyperparameters(whiten=True, kl_coefficient=0.001, kl_estimator="k2")
    ),  # the same, for several samples of a prompt
    "on_policy_distillation": Algorithm(
        torch.zeros_like,
        clipped,
        Hyperparameters(gamma=0.0, kl_coefficient=1.0, kl_estimator="k1", kl_place="reward"),
        needs_group=False,
    ),  # reverse KL to the reference of each token by itself: arXiv 2306.13649, section 3
    "prime": Algorithm(leave_one_out, clipped, Hyperparameters(), critic="process_rewards"),  # arXiv 2502.01456
    "ppo": Algorithm(
        outcome,
        clipped,
        Hyperparameters(whiten=True, value_clip=0.2, kl_coefficient=0.001, kl_estimator="k1", kl_place="reward"),
        critic="values",
        needs_group=False,
    ),  # arXiv 1707.06347, 2203.02155
    "vapo": Algorithm(
        outcome,
        clipped,
        Hyperparameters(clip_high=0.28, critic_lambda=1.0, lambda_alpha=0.05, positive_nll=0.1, critic_warmup_steps=50),
        critic="values",
        needs_group=False,
    ),  # arXiv 2504.05118
    "sft": Algorithm(torch.zeros_like, None, Hyperparameters(), needs_group=False),
}


def has_critic(name: str) -> bool:
    """Whether there is such an algorithm, and a model learns beside its policy."""
    return name in ALGORITHMS and bool(ALGORITHMS[name].critic)


def learns_from_answers(name: str) -> bool:
    """Whether there is such an algorithm, and it learns from the data's own answers."""
    return name in ALGORITHMS and ALGORITHMS[name].learns_from == "demonstrations"


def hyperparameters_of(name: str, recipe: AlgorithmOptions) -> Hyperparameters:
    """The rules of a row; where it is the recipe's own, but for what the recipe sets."""
    row = ALGORITHMS[name]
    return replace(row.rules, **recipe.given) if name == recipe.name else row.rules


def has_reference(recipe: AlgorithmOptions, is_wanted: bool) -> bool:
    """Whether the policy's distance from a reference is measured: for its loss, or because it is wanted."""
    return is_wanted or (recipe.name in ALGORITHMS and hyperparameters_of(recipe.name, recipe).kl_coefficient > 0)

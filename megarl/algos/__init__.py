"""The table of algorithms: how rewards become advantages, what a token adds to the loss, and the hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megarl.algos.advantages import centred, group_normalised, leave_one_out, no_baseline
from megarl.algos.losses import LossResult, nll_loss, policy_loss
from megarl.algos.rollout_correction import drops
from megarl.algos.surrogates import Surrogate, cispo, clipped, reinforce, sequence_clipped
from megarl.algos.targets import Targets
from megarl.types import Aggregation, Hyperparameters

# What a training step does, in order: sample from the policy or take the data's demonstrations; compute old and
# reference logprobs, where the auxiliary model learns from KL penalties; have the auxiliary model compute values and
# learn from them; update the policy.
Stage = Literal["sample", "demonstrate", "logprobs", "values", "update"]

# (logp_T, entropy_T, old_logp_T, targets) -> (loss sum, statistics)
Loss = Callable[[Tensor, Tensor, Tensor, Targets], LossResult]


class AlgorithmOptions(Protocol):
    """The recipe's branch `algorithm`: the name of a row, and the hyperparameters that the recipe sets."""

    @property
    def name(self) -> str: ...
    @property
    def given(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class AuxiliaryModel:
    """A model that learns together with the policy; name: for people; aggregation: of its loss.

    has_scores: it scores every token; else it is a language model, and compared with its initial weights.
    """

    name: str
    aggregation: Aggregation
    has_scores: bool


AUXILIARY_MODELS = {  # by `Algorithm.critic`
    "values": AuxiliaryModel("critic", "token_mean", has_scores=True),
    "process_rewards": AuxiliaryModel("implicit reward model", "sequence_mean", has_scores=False),
}


@dataclass(frozen=True)
class Algorithm:
    """One row: how rewards become advantages, what a token adds to the loss, and the default hyperparameters.

    A row without a surrogate learns from demonstrations.
    """

    # rewards_G -> advantage_G of one prompt's samples; None: GAE makes the tokens' advantages, or there are none.
    advantage: Callable[[Tensor], Tensor] | None
    surrogate: Surrogate | None
    hyperparameters: Hyperparameters
    # What an auxiliary model predicts for each token: values, from which GAE makes advantages, or process rewards.
    critic: Literal["", "values", "process_rewards"] = ""
    # Each prompt has a greedy sample too, whose reward is subtracted from the others' before they become advantages.
    greedy_baseline: bool = False
    # The advantage compares the samples of a prompt, so that a single sample teaches nothing.
    needs_group: bool = True
    # The KL to the reference is all that the algorithm learns from: the reference is a teacher.
    has_teacher: bool = False
    # Hyperparameters that the surrogate does not read, and why: "<algorithm> <why>".
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def credits_turns(self) -> bool:
        """Whether the reward of an episode's turn is that of the turn's last token, earned by the tokens before it.

        Else it is a part of the episode's reward: where whole episodes are compared, and where a teacher rewards.
        """
        return not (self.needs_group or self.greedy_baseline or self.has_teacher)

    @property
    def has_ratio(self) -> bool:
        """Whether the objective has the ratio to the policy that sampled a token, which corrects for an earlier one."""
        return self.surrogate is not None and self.surrogate is not reinforce

    @property
    def has_sequence_ratio(self) -> bool:
        """Whether that ratio is of a whole sequence and not of a token."""
        return self.surrogate is sequence_clipped

    @property
    def learns_from(self) -> Literal["rewards", "demonstrations"]:
        if self.surrogate:
            return "rewards"
        return "demonstrations"

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards teach the policy: not demonstrations, and not a teacher alone."""
        return self.learns_from == "rewards" and not self.has_teacher

    def sample_advantages(self, rewards_G: Tensor) -> list[float] | list[None]:
        """The advantage of each of one prompt's samples; None where the row has none."""
        if self.advantage is None:
            return [None] * len(rewards_G)
        return self.advantage(rewards_G).tolist()

    def stages(self, hyperparameters: Hyperparameters) -> tuple[Stage, ...]:
        """What a training step does with these hyperparameters, in order."""
        wanted: dict[Stage, bool] = {
            "sample": self.learns_from == "rewards",
            "demonstrate": self.learns_from == "demonstrations",
            "logprobs": bool(self.critic) and hyperparameters.pays_kl,
            "values": bool(self.critic),
            "update": True,
        }
        return tuple(stage for stage, is_wanted in wanted.items() if is_wanted)

    def updates_with_pass(self, hyperparameters: Hyperparameters, num_updates: int) -> range:
        """The updates of a step whose old log-probabilities take a forward pass of their own, before all updates.

        None of demonstrations, nor where the engine's are the old ones. The first update's own pass is one of the old
        policy; but all are needed before it where rewards have a KL penalty, or where the rollout correction drops
        tokens: these decide advantages and denominators.
        """
        if self.surrogate is None or hyperparameters.old_logprobs == "engine":
            return range(0)
        if hyperparameters.pays_kl or drops(hyperparameters):
            return range(num_updates)
        return range(1, num_updates)

    def loss(self, hyperparameters: Hyperparameters) -> Loss:
        """The loss of a packed row with these hyperparameters."""
        if self.surrogate is None:
            return lambda logp_T, entropy_T, old_logp_T, targets: nll_loss(logp_T, targets)
        return partial(policy_loss, self.surrogate, hyperparameters=hyperparameters)


_NO_RATIO: dict[str, str] = dict.fromkeys(
    ("clip_low", "clip_high", "dual_clip", "old_logprobs"), "has no ratio"
)

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        group_normalised,
        clipped,
        Hyperparameters(aggregation="sequence_mean", kl_coefficient=0.001),
    ),  # arXiv 2402.03300
    "dapo": Algorithm(
        group_normalised,
        clipped,
        Hyperparameters(clip_high=0.28, dynamic_sampling=True, overlong_share=0.2),
    ),  # arXiv 2503.14476
    # arXiv 2503.20783
    "dr_grpo": Algorithm(centred, clipped, Hyperparameters(aggregation="constant")),
    "rloo": Algorithm(
        leave_one_out, reinforce, Hyperparameters(aggregation="sequence_sum"), unread=_NO_RATIO
    ),  # arXiv 2402.14740
    "gspo": Algorithm(
        group_normalised,
        sequence_clipped,
        Hyperparameters(aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    ),  # arXiv 2507.18071
    "cispo": Algorithm(
        group_normalised,
        cispo,
        Hyperparameters(clip_low=1.0, clip_high=4.0),
        unread={"dual_clip": "has no minimum of two objectives"},
    ),  # arXiv 2506.13585: no lower bound; ratios up to 5, as TRL recommends after ScaleRL (arXiv 2510.13786)
    "remax": Algorithm(
        no_baseline,
        reinforce,
        Hyperparameters(aggregation="sequence_sum"),
        greedy_baseline=True,
        needs_group=False,
        unread=_NO_RATIO,
    ),  # arXiv 2310.10505
    "reinforce_pp": Algorithm(
        no_baseline,
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
        has_teacher=True,
    ),  # reverse KL to the reference of each token by itself: arXiv 2306.13649, section 3
    # arXiv 2502.01456
    "prime": Algorithm(leave_one_out, clipped, Hyperparameters(), critic="process_rewards"),
    "ppo": Algorithm(
        None,
        clipped,
        Hyperparameters(
            whiten=True, value_clip=0.2, kl_coefficient=0.001, kl_estimator="k1", kl_place="reward"
        ),
        critic="values",
        needs_group=False,
    ),  # arXiv 1707.06347, 2203.02155
    "vapo": Algorithm(
        None,
        clipped,
        Hyperparameters(
            clip_high=0.28,
            critic_lambda=1.0,
            lambda_alpha=0.05,
            positive_nll=0.1,
            critic_warmup_steps=50,
        ),
        critic="values",
        needs_group=False,
    ),  # arXiv 2504.05118
    "sft": Algorithm(None, None, Hyperparameters(), needs_group=False),
}


def has_critic(name: str) -> bool:
    """Whether this is an algorithm that trains an auxiliary model beside the policy."""
    return name in ALGORITHMS and bool(ALGORITHMS[name].critic)


def learns_from_answers(name: str) -> bool:
    """Whether this is an algorithm that learns from the data's own answers."""
    return name in ALGORITHMS and ALGORITHMS[name].learns_from == "demonstrations"


def hyperparameters_of(name: str, recipe: AlgorithmOptions) -> Hyperparameters:
    """The hyperparameters of a row, with the recipe's overrides where it is the recipe's own algorithm."""
    row = ALGORITHMS[name]
    if name == recipe.name:
        return replace(row.hyperparameters, **recipe.given)
    return row.hyperparameters


def has_reference(recipe: AlgorithmOptions, is_wanted: bool) -> bool:
    """Whether the KL to a reference is computed: for the loss or the rewards, or because the recipe wants it."""
    return is_wanted or (
        recipe.name in ALGORITHMS and hyperparameters_of(recipe.name, recipe).kl_coefficient > 0
    )

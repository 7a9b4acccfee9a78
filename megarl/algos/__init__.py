"""The table of algorithms. A row says what a sample's advantage is, what a token's loss is, and what is averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.algos.advantages import group_normalised, outcome
from megarl.algos.losses import LossResult, clipped_policy_loss, nll_loss


@dataclass(frozen=True)
class Algorithm:
    """One row: rewards_G -> advantage_G; the loss of a packed row; whether tokens or sequences weigh the same.

    With a critic, GAE makes advantages of tokens out of those of samples, and they are whitened over the batch.
    A row that learns from demonstrations is for the warm start, the others are for `algorithm.name`.
    """

    advantage: Callable[[torch.Tensor], torch.Tensor]
    loss: Callable[..., LossResult]
    mean_over: Literal["tokens", "sequences"]
    learns_from: Literal["rewards", "demonstrations"] = "rewards"
    has_critic: bool = False


def has_critic(name: str) -> bool:
    """Whether there is such an algorithm, and it has a critic."""
    return name in ALGORITHMS and ALGORITHMS[name].has_critic


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(advantage=group_normalised, loss=clipped_policy_loss, mean_over="sequences"),
    "ppo": Algorithm(advantage=outcome, loss=clipped_policy_loss, mean_over="tokens", has_critic=True),
    "sft": Algorithm(advantage=torch.zeros_like, loss=nll_loss, mean_over="tokens", learns_from="demonstrations"),
}

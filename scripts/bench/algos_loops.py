"""Advantages and losses as trainers usually write them: what scripts/bench/algos.py compares megarl's with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.types import Hyperparameters

GAMMA, LAMBDA = 1.0, 0.95
Pieces = list[torch.Tensor]  # one of each sample


@dataclass(frozen=True)
class Tokens:
    """What trainers know of response tokens: [T] of packed samples or of one, or [B, T] of a padded batch."""

    logp: torch.Tensor
    old_logp: torch.Tensor
    reference_logp: torch.Tensor
    advantage: torch.Tensor
    value: torch.Tensor
    reward: torch.Tensor  # 0 but for a response's last token
    mask: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
        return {name: change(values) for name, values in vars(self).items()}


def plain_gae(sample: Tokens) -> torch.Tensor:
    """One sample, as trainers write it."""
    last, following, advantages = torch.tensor(0.0), torch.tensor(0.0), []
    for t in reversed(range(len(sample.reward))):
        delta = sample.reward[t] + GAMMA * following - sample.value[t]
        last = delta + GAMMA * LAMBDA * last
        following = sample.value[t]
        advantages.append(last)
    return torch.stack(advantages[::-1])


def floats_gae(sample: Tokens) -> torch.Tensor:
    """The same in Python's own numbers."""
    last, following, advantages = 0.0, 0.0, []
    for reward, value in zip(
        reversed(sample.reward.tolist()), reversed(sample.value.tolist()), strict=True
    ):
        last = reward + GAMMA * following - value + GAMMA * LAMBDA * last
        following = value
        advantages.append(last)
    return torch.tensor(advantages[::-1])


def padded_gae(many: Tokens) -> torch.Tensor:
    """All samples at once, token by token of the longest (as verl's); padding hands on what is behind it."""
    last = following = torch.zeros(len(many.reward))
    advantages = []
    for t in reversed(range(many.reward.shape[1])):
        delta = many.reward[:, t] + GAMMA * following - many.value[:, t]
        advantage, mask = delta + GAMMA * LAMBDA * last, many.mask[:, t].float()
        following = many.value[:, t] * mask + (1 - mask) * following
        last = advantage * mask + (1 - mask) * last
        advantages.append(last)
    return torch.stack(advantages[::-1], dim=1)


def plain_loss(name: str, tokens: Tokens, rules: Hyperparameters) -> torch.Tensor:
    """Gradient by the logprobs of one sample's or a padded batch's loss sum, with the usual statistics."""
    logp = tokens.logp.detach().requires_grad_()
    if name == "kl":
        difference = tokens.reference_logp - logp
        (tokens.mask * (difference.exp() - 1 - difference)).sum().backward()
        assert logp.grad is not None
        return logp.grad
    log_ratio = logp - tokens.old_logp
    if name == "gspo":
        mean = (log_ratio * tokens.mask).sum(-1, keepdim=True) / tokens.mask.sum(-1, keepdim=True)
        log_ratio = mean.expand_as(logp)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    if name == "cispo":
        loss = -clipped.detach() * tokens.advantage * logp
    else:
        loss = torch.maximum(-ratio * tokens.advantage, -clipped * tokens.advantage)
    (loss * tokens.mask).sum().backward()
    with torch.no_grad():
        _ = ((ratio != clipped) * tokens.mask).sum(), ((tokens.old_logp - logp) * tokens.mask).sum()
    assert logp.grad is not None
    return logp.grad


def plain_group(name: str, rewards: Sequence[torch.Tensor], groups: Sequence[int]) -> Pieces:
    """Scores gathered by prompt, then sample by sample (as verl's)."""
    by_group: dict[int, list[torch.Tensor]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        by_group.setdefault(group, []).append(reward)
    means = {group: torch.mean(torch.stack(scores)) for group, scores in by_group.items()}
    spreads = {group: torch.std(torch.stack(scores)) for group, scores in by_group.items()}
    advantages = []
    for group, reward in zip(groups, rewards, strict=True):
        count = len(by_group[group])
        if name == "grpo":
            advantages.append((reward - means[group]) / (spreads[group] + 1e-6))
        elif name == "dr_grpo":
            advantages.append(reward - means[group])
        else:
            advantages.append(reward * count / (count - 1) - means[group] * count / (count - 1))
    return advantages


def plain_whitened(samples: Sequence[Tokens]) -> Pieces:
    count = sum(sample.mask.sum() for sample in samples)
    mean = sum(sample.advantage.sum() for sample in samples) / count
    variance = (
        torch.stack([((sample.advantage - mean) ** 2).sum() for sample in samples]).sum() / count
    )
    return [(sample.advantage - mean) * torch.rsqrt(variance + 1e-8) for sample in samples]


def padded_whitened(many: Tokens) -> torch.Tensor:
    count = many.mask.sum()
    mean = (many.advantage * many.mask).sum() / count
    variance = (((many.advantage - mean) ** 2) * many.mask).sum() / count
    return (many.advantage - mean) * torch.rsqrt(variance + 1e-8)

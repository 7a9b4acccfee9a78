"""Advantages: of one group's samples, and of single tokens from a critic's values."""

from __future__ import annotations

import torch


def group_normalised(rewards_G: torch.Tensor) -> torch.Tensor:
    """(R - mean) / (std + 1e-6) over one group, std unbiased; 0 for a group of one (GRPO, arXiv 2402.03300, 4.1.2)."""
    rewards_G = rewards_G.double()  # in float32, equal rewards of 0.7 leave a spread that 1e-6 does not drown
    centred_G = rewards_G - rewards_G.mean()
    if rewards_G.numel() < 2:
        return centred_G
    return centred_G / (rewards_G.std(unbiased=True) + 1e-6)


def centred(rewards_G: torch.Tensor) -> torch.Tensor:
    """R - mean over one group (Dr. GRPO, arXiv 2503.20783)."""
    rewards_G = rewards_G.double()
    return rewards_G - rewards_G.mean()


def leave_one_out(rewards_G: torch.Tensor) -> torch.Tensor:
    """R - mean of the group's others; the reward itself where there are none (RLOO, arXiv 2402.14740)."""
    rewards_G, others = rewards_G.double(), rewards_G.numel() - 1
    return rewards_G - (rewards_G.sum() - rewards_G) / others if others else rewards_G


def outcome(rewards_G: torch.Tensor) -> torch.Tensor:
    """The rewards as they are, for algorithms whose critic makes advantages of them."""
    return rewards_G.double()


def gae(
    reward_T: torch.Tensor,
    value_T: torch.Tensor,
    is_last_T: torch.Tensor,
    *,
    gamma: float,
    lam: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantage_T, return_T), float64, of responses laid end to end (GAE, arXiv 1506.02438, eq. 16).

    value_T: of the state before each token; is_last_T: where a response ends, after which everything is worth 0; lam:
    for all tokens or of each [T]. With
    d_t = r_t + gamma V_t+1 - V_t the advantage is d_t + gamma lam A_t+1, and the return is A_t + V_t. In each of
    log2(longest) passes every token takes in as many tokens behind it as it has already, not beyond its response.
    """
    value_T = value_T.double()
    following_T = torch.where(is_last_T, 0.0, value_T.roll(-1))
    sum_T = reward_T.double() + gamma * following_T - value_T
    decay_T = torch.where(is_last_T, 0.0, gamma * lam * torch.ones_like(value_T))
    reach = 1
    while reach < len(sum_T) and decay_T.any():
        sum_T[:-reach] += decay_T[:-reach] * sum_T[reach:].clone()
        decay_T = torch.cat([decay_T[:-reach] * decay_T[reach:], torch.zeros_like(decay_T[-reach:])])
        reach *= 2
    return sum_T, sum_T + value_T


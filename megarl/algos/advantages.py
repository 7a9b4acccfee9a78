"""Advantages of one group's samples."""

from __future__ import annotations

import torch


def group_normalised(rewards_G: torch.Tensor) -> torch.Tensor:
    """(R - mean) / (std + 1e-6) over one group, std unbiased; 0 for a group of one (GRPO, arXiv 2402.03300, 4.1.2)."""
    rewards_G = rewards_G.double()  # in float32, equal rewards of 0.7 leave a spread that 1e-6 does not drown
    centred_G = rewards_G - rewards_G.mean()
    if rewards_G.numel() < 2:
        return centred_G
    return centred_G / (rewards_G.std(unbiased=True) + 1e-6)

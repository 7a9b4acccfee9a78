"""Advantages: of the samples of one group from their rewards, and of tokens from a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 18  # tokens that `gae` works on at once
_WIDTH = 32  # elements of a chunk of `reverse_scan`: its number of sequential steps


def group_normalised(rewards_G: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6) over one group, std unbiased; 0 for a group of one (GRPO, arXiv 2402.03300, 4.1.2)."""
    # in float32, equal rewards of 0.7 leave a spread that 1e-6 does not drown
    rewards_G = rewards_G.double()
    centred_G = rewards_G - rewards_G.mean()
    if rewards_G.numel() < 2:
        return centred_G
    return centred_G / (rewards_G.std(unbiased=True) + 1e-6)


def centred(rewards_G: Tensor) -> Tensor:
    """R - mean over one group (Dr. GRPO, arXiv 2503.20783)."""
    rewards_G = rewards_G.double()
    return rewards_G - rewards_G.mean()


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """R - mean of the group's others; 0 where there are none, as without a baseline (RLOO, arXiv 2402.14740)."""
    rewards_G = rewards_G.double()
    others = rewards_G.numel() - 1
    if not others:
        return torch.zeros_like(rewards_G)
    return rewards_G - (rewards_G.sum() - rewards_G) / others


def no_baseline(rewards_G: Tensor) -> Tensor:
    """R itself (REINFORCE, Williams, 1992)."""
    return rewards_G.double()


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    is_last_T: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """(advantage_T, return_T), float64, of responses laid end to end (GAE, arXiv 1506.02438, eq. 16).

    value_T: of the state before each token; is_last_T: where a response ends, after which everything is worth 0; lam:
    for all tokens or of each [T]. With
    d_t = r_t + gamma V_t+1 - V_t the advantage is d_t + gamma lam A_t+1, and the return is A_t + V_t. Blocks of tokens
    that stay in a processor's cache are done one after the other, from the last; each hands its first advantage on.
    """
    advantage_T, return_T = (torch.empty_like(value_T, dtype=torch.float64) for _ in range(2))
    decay_T = gamma * torch.as_tensor(lam, dtype=torch.float64, device=value_T.device).expand(
        len(value_T)
    )
    # the next token's value and advantage
    behind = torch.zeros(2, dtype=torch.float64, device=value_T.device)
    for start in reversed(range(0, len(value_T), _BLOCK)):
        block = slice(start, start + _BLOCK)
        own_B = value_T[block].double()
        is_last_B = is_last_T[block]
        following_B = torch.cat([own_B[1:], behind[:1]])
        delta_B = reward_T[block] + torch.where(is_last_B, 0.0, gamma * following_B) - own_B
        decay_B = torch.where(is_last_B, 0.0, decay_T[block])
        delta_B[-1] += decay_B[-1] * behind[1]
        advantage_T[block] = advantage_B = reverse_scan(delta_B, decay_B)
        torch.add(advantage_B, own_B, out=return_T[block])
        behind = torch.stack([own_B[0], advantage_B[0]])
    return advantage_T, return_T


def reverse_scan(own_T: Tensor, decay_T: Tensor) -> Tensor:
    """Linear recurrence from the last element: x_t = own_t + decay_t x_t+1, with x = 0 after the last.

    O(T): within chunks of a few places step by step, all chunks together, noting the product of the decays to the
    chunk's end; then the same of the chunks' first places, which brings to each chunk what is behind it (Blelloch,
    "Prefix sums and their applications", 1990, section 1.4).
    """
    own_WN = _chunks(own_T)
    decay_WN = _chunks(decay_T)
    for place in range(_WIDTH - 2, -1, -1):
        own_WN[place].addcmul_(decay_WN[place], own_WN[place + 1])
        decay_WN[place].mul_(decay_WN[place + 1])
    if own_WN.shape[1] > 1:
        first_N = reverse_scan(own_WN[0], decay_WN[0])
        own_WN[:, :-1].addcmul_(decay_WN[:, :-1], first_N[1:])
    return own_WN.t().reshape(-1)[: len(own_T)]


def _chunks(values_T: Tensor) -> Tensor:
    """A copy [places of a chunk, chunks], the last chunk filled with 0: neighbours in memory are done in one step."""
    whole_T = torch.nn.functional.pad(values_T, (0, -len(values_T) % _WIDTH))
    return whole_T.view(-1, _WIDTH).t().clone(memory_format=torch.contiguous_format)

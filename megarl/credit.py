"""From rewards of responses to advantages and returns of their tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.algos.advantages import gae
from megarl.types import FloatArray, TrainSequence

PerToken = list[FloatArray]  # one array per sequence, aligned like the sequence's own


def by_values(
    sequences: Sequence[TrainSequence],
    values: Sequence[FloatArray],
    *,
    gamma: float,
    lam: float,
    alpha: float | None = None,
) -> tuple[PerToken, PerToken]:
    """(advantages, returns) by GAE; the reward of a sequence, its advantage_T, comes with its last token.

    values: of the state before each token; what they say of a prompt is not read. alpha: lambda is
    1 - 1 / (alpha x length of the response) in the place of lam, but not below 0 (VAPO, arXiv 2504.05118, eq. 8).
    """
    if not sequences:
        return [], []
    masks = [one.loss_mask_T for one in sequences]
    lengths = np.array([int(mask_T.sum()) for mask_T in masks])
    ends = np.cumsum(lengths) - 1
    is_last_T, reward_T = np.zeros(lengths.sum(), np.bool_), np.zeros(lengths.sum())
    is_last_T[ends] = True
    reward_T[ends] = [one.advantage_T[-1] for one in sequences]
    value_T = np.concatenate([one_T[mask_T] for one_T, mask_T in zip(values, masks, strict=True)])
    of_sequences = np.full(len(lengths), lam) if alpha is None else np.maximum(0.0, 1 - 1 / (alpha * lengths))
    lam_T = torch.from_numpy(np.repeat(of_sequences, lengths))
    found = gae(*map(torch.from_numpy, (reward_T, value_T, is_last_T)), gamma=gamma, lam=lam_T)
    advantages, returns = (np.split(one.numpy().astype(np.float32), ends[:-1] + 1) for one in found)
    return _on_masks(masks, advantages), _on_masks(masks, returns)


def whitened(
    sequences: Sequence[TrainSequence], sum_over_all: Callable[[torch.Tensor], torch.Tensor]
) -> list[TrainSequence]:
    """The sequences with their advantages as (A - mean) / (std + 1e-8) over all tokens that are learnt from.

    sum_over_all: adds up values of these sequences with those of the batch's others, which are elsewhere.
    (The usual way with PPO, e.g. arXiv 2006.05990, section 3.5.)
    """
    parts = [one.advantage_T[one.loss_mask_T].astype(np.float64) for one in sequences]
    flat_T = torch.from_numpy(np.concatenate([np.zeros(0), *parts]))
    count, total = sum_over_all(torch.stack([torch.tensor(float(len(flat_T)), dtype=torch.float64), flat_T.sum()]))
    mean = float(total / count)
    variance = float(sum_over_all(((flat_T - mean) ** 2).sum()[None])[0] / count)
    scale = variance**0.5 + 1e-8
    found = []
    for one in sequences:
        of_mask_T = np.where(one.loss_mask_T, (one.advantage_T - mean) / scale, 0.0)
        found.append(replace(one, advantage_T=of_mask_T.astype(np.float32)))
    return found


def _on_masks(masks: Sequence[np.ndarray], parts: Sequence[FloatArray]) -> PerToken:
    spread = []
    for mask_T, part in zip(masks, parts, strict=True):
        row_T = np.zeros(len(mask_T), np.float32)
        row_T[mask_T] = part
        spread.append(row_T)
    return spread

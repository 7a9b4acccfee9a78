"""What a mismatch correction keeps of an update, and by what its loss sums are divided then. Pure.

A plan divides by the tokens and samples that it deals out. Which of them a correction keeps is known once the old
policy's log-probabilities are: the ranks then take the dropped tokens out of their masks, count what is left, add the
counts up, and weight and divide by them as the plan would have if it had known. So every term of the loss is a sum over
kept tokens, and one place still divides it, by a number that no layout changes (as verl, whose response mask loses what
it rejects).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.algos import mismatch
from megarl.training.batching import Update, denominator_of
from megarl.types import BoolArray, FloatArray, Hyperparameters, IntArray, TrainSequence

MicroBatch = Sequence[TrainSequence]


def without_dropped(
    micro_batches: Sequence[MicroBatch], old_logp: Sequence[FloatArray], hyperparameters: Hyperparameters
) -> list[list[TrainSequence]]:
    """The sequences with the dropped tokens out of their masks; old_logp: of each sequence, in order.

    What decides for a whole sample is decided over its rows in one micro-batch, over which the loss weights it, too.
    """
    left = iter(old_logp)
    return [_kept(batch, [next(left) for _ in batch], hyperparameters) for batch in micro_batches]


def _kept(batch: MicroBatch, old_logp: Sequence[FloatArray], hyperparameters: Hyperparameters) -> list[TrainSequence]:
    if not batch:
        return []
    lengths = [len(one.loss_mask_T) for one in batch]
    old_T, engine_T, mask_T = (
        torch.from_numpy(np.concatenate(arrays))
        for arrays in (old_logp, [one.engine_logp_T for one in batch], [one.loss_mask_T for one in batch])
    )
    sequence_T = torch.from_numpy(np.repeat(_samples(batch), lengths))
    dropped_T = mismatch.dropped(old_T, engine_T, mask_T, sequence_T, hyperparameters).numpy()
    parts: list[BoolArray] = np.split(dropped_T, np.cumsum(lengths)[:-1])
    return [
        replace(one, loss_mask_T=one.loss_mask_T & ~part_T, dropped_T=part_T)
        for one, part_T in zip(batch, parts, strict=True)
    ]


def counts_of(micro_batches: Sequence[MicroBatch]) -> IntArray:
    """[3]: kept tokens, samples with a kept token, and kept tokens of correct samples, of this rank's share."""
    sequences = [one for batch in micro_batches for one in batch]
    kept = np.array([one.loss_mask_T.sum() for one in sequences], np.int64)
    correct = np.array([one.outcome > 0.5 for one in sequences], np.bool_)
    of_samples = np.bincount(_samples(sequences), weights=kept)
    return np.array([kept.sum(), (of_samples > 0).sum(), kept[correct].sum()], np.int64)


def divided_by_kept(
    update: Update, counts: Sequence[int], hyperparameters: Hyperparameters, longest_response: int
) -> Update:
    """The update as it would be planned of the kept tokens alone; counts: as of `counts_of`, of all ranks.

    Where nothing is kept, loss sums of 0 are divided by 1.
    """
    tokens, samples, correct_tokens = counts
    denominator = denominator_of(hyperparameters.aggregation, tokens, samples, longest_response)
    return replace(
        update, denominator=denominator or 1.0, loss_tokens=max(1, tokens), correct_tokens=correct_tokens
    )  # fmt: skip


def reweighted(
    micro_batches: Sequence[MicroBatch], update: Update, hyperparameters: Hyperparameters
) -> list[list[TrainSequence]]:
    """The sequences with the weights of their kept tokens in the loss sums of the update, as of `divided_by_kept`."""
    sequences = [one for batch in micro_batches for one in batch]
    samples, nll_weight = _samples(sequences), update.nll_weight(hyperparameters.positive_nll)
    of_samples = np.bincount(samples, weights=[one.loss_mask_T.sum() for one in sequences])
    weights = 1.0 / np.maximum(1.0, of_samples[samples])
    if hyperparameters.aggregation != "sequence_mean":
        weights = np.ones(len(sequences))
    made = iter([
        replace(
            one,
            loss_weight_T=(one.loss_mask_T * weight).astype(np.float32),
            nll_weight_T=None if one.nll_weight_T is None else (one.loss_mask_T * nll_weight).astype(np.float32),
        )
        for one, weight in zip(sequences, weights.tolist(), strict=True)
    ])  # fmt: skip
    return [[next(made) for _ in batch] for batch in micro_batches]


def _samples(sequences: Sequence[TrainSequence]) -> IntArray:
    """The number of each sequence's sample, from 0: the rows of an episode have one sample together."""
    numbers: dict[object, int] = {}
    keys = [place if one.key is None else one.key[:2] for place, one in enumerate(sequences)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)

"""What a rollout correction keeps of an update, and by what its loss sums are divided then. Pure.

A plan divides by the tokens and samples that it assigns out. Which of them a correction keeps is known once the old
policy's log-probabilities are: the ranks then take the dropped tokens out of their masks, count what is left, add the
counts up, and weight and divide by them as the plan would have if it had known. So every term of the loss is a sum over
kept tokens, and one place still divides it, by a number that no layout changes (as verl, whose response mask loses what
it rejects).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from megarl.algos import rollout_correction
from megarl.training.batching import Update, denominator_of
from megarl.types import (
    BoolArray,
    Hyperparameters,
    TrainSequence,
    regrouped,
    sample_numbers,
)
from megarl.types.arrays import TokenArrays

MicroBatch = Sequence[TrainSequence]


def without_dropped(
    micro_batches: Sequence[MicroBatch],
    old_logp: TokenArrays,
    hyperparameters: Hyperparameters,
) -> list[list[TrainSequence]]:
    """The sequences with the dropped tokens out of their masks; old_logp: of each sequence, in order.

    What decides for a whole sample is decided over its rows in one micro-batch, over which the loss weights it, too.
    """
    pairs = zip(micro_batches, regrouped(old_logp, micro_batches), strict=True)
    return [_kept(batch, own_logp, hyperparameters) for batch, own_logp in pairs]


def _kept(
    batch: MicroBatch, old_logp: TokenArrays, hyperparameters: Hyperparameters
) -> list[TrainSequence]:
    if not batch:
        return []
    lengths = [len(sequence.loss_mask_T) for sequence in batch]
    old_T = torch.from_numpy(np.concatenate(old_logp))
    engine_T = torch.from_numpy(np.concatenate([sequence.engine_logp_T for sequence in batch]))
    mask_T = torch.from_numpy(np.concatenate([sequence.loss_mask_T for sequence in batch]))
    sequence_T = torch.from_numpy(np.repeat(sample_numbers(batch), lengths))
    dropped_T = rollout_correction.dropped(
        old_T, engine_T, mask_T, sequence_T, hyperparameters
    ).numpy()
    parts: list[BoolArray] = np.split(dropped_T, np.cumsum(lengths)[:-1])
    return [
        replace(sequence, loss_mask_T=sequence.loss_mask_T & ~part_T, dropped_T=part_T)
        for sequence, part_T in zip(batch, parts, strict=True)
    ]


def counts_of(micro_batches: Sequence[MicroBatch]) -> npt.NDArray[np.float64]:
    """[3]: kept tokens, samples with a kept token, and kept tokens of correct samples, of this rank's share.

    Ranks that have the same sequence count it together as one.
    """
    sequences = [sequence for batch in micro_batches for sequence in batch]
    kept = np.array(
        [sequence.loss_mask_T.sum() / sequence.cp for sequence in sequences], np.float64
    )
    correct = np.array([sequence.outcome > 0.5 for sequence in sequences], np.bool_)
    numbers = sample_numbers(sequences)
    _, first = np.unique(numbers, return_index=True)
    shares = np.array([1 / sequences[place].cp for place in first], np.float64)
    of_samples = np.bincount(numbers, weights=kept)
    return np.array([kept.sum(), shares[of_samples > 0].sum(), kept[correct].sum()])


def divided_by_kept(
    update: Update, counts: Sequence[int], hyperparameters: Hyperparameters, longest_response: int
) -> Update:
    """The update as it would be planned of the kept tokens alone; counts: as of `counts_of`, of all ranks.

    Where nothing is kept, loss sums of 0 are divided by 1.
    """
    tokens, samples, correct_tokens = counts
    denominator = denominator_of(hyperparameters.aggregation, tokens, samples, longest_response)
    return replace(
        update,
        denominator=denominator or 1.0,
        loss_tokens=max(1, tokens),
        correct_tokens=correct_tokens,
    )


def reweighted(
    micro_batches: Sequence[MicroBatch], update: Update, hyperparameters: Hyperparameters
) -> list[list[TrainSequence]]:
    """The sequences with the weights of their kept tokens in the loss sums of the update, as of `divided_by_kept`."""
    sequences = [sequence for batch in micro_batches for sequence in batch]
    samples = sample_numbers(sequences)
    nll_weight = update.nll_weight(hyperparameters.positive_nll)
    of_samples = np.bincount(
        samples, weights=[sequence.loss_mask_T.sum() for sequence in sequences]
    )
    weights = 1.0 / np.maximum(1.0, of_samples[samples])
    if hyperparameters.aggregation != "sequence_mean":
        weights = np.ones(len(sequences))
    weighted = [
        _weighted(sequence, weight, nll_weight)
        for sequence, weight in zip(sequences, weights.tolist(), strict=True)
    ]
    return regrouped(weighted, micro_batches)


def _weighted(sequence: TrainSequence, weight: float, nll_weight: float) -> TrainSequence:
    """The sequence with these weights of its kept tokens; a sequence without nll weights gets none."""
    nll_weight_T = None
    if sequence.nll_weight_T is not None:
        nll_weight_T = (sequence.loss_mask_T * nll_weight).astype(np.float32)
    loss_weight_T = (sequence.loss_mask_T * weight).astype(np.float32)
    return replace(sequence, loss_weight_T=loss_weight_T, nll_weight_T=nll_weight_T)

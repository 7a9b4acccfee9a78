"""From samples to the arrays that a rank trains on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.training.batching import MicroBatch, SampleRef, key_of
from megarl.types import Aggregation, IntArray, Row, SampleGroup, TrainSequence


def train_sequence(
    group: SampleGroup, ref: SampleRef, aggregation: Aggregation, nll_weight: float = 0.0
) -> TrainSequence:
    """Prompt and response of one row of a sample as a training sequence; only tokens that were sampled are trained on.

    nll_weight: of the tokens' -log p in the loss sum, where the sample is correct. The reward is the ref's: the group's
    own is from before the reward model and the overlong penalty.
    """
    sample = group.samples[ref.sample]
    row = sample.rows[ref.row]

    def on_response(value: np.ndarray | float, dtype: type = np.float32) -> np.ndarray:
        """[T]: the value on the trained tokens, and 0 elsewhere."""
        row_T = np.zeros(row.num_tokens, dtype=dtype)
        row_T[len(row.prompt_ids) :] = np.where(row.trained_T, value, 0)
        return row_T

    loss_weight = 1.0
    if aggregation == "sequence_mean":
        loss_weight = 1.0 / sample.num_trained
    number_T = np.cumsum(row.trained_T) - 1  # among the trained tokens
    rewards_T = row.token_rewards_T
    has_turns = len(sample.rows) > 1 or not row.trained_T.all()
    return TrainSequence(
        token_ids_T=np.concatenate([np.asarray(row.prompt_ids, np.int64), row.response_ids_T]),
        loss_mask_T=on_response(1.0, np.bool_),
        loss_weight_T=on_response(loss_weight),
        engine_logp_T=on_response(row.engine_logp_T),
        reward=ref.reward,
        outcome=float(ref.is_correct),
        cp=ref.cp,
        nll_weight_T=on_response(nll_weight) if nll_weight and ref.is_correct else None,
        is_stale_T=on_response(number_T < ref.num_stale, np.bool_) if ref.num_stale else None,
        experts_TMK=row.routed_experts,
        key=key_of(ref),
        token_rewards_T=None if rewards_T is None else on_response(rewards_T),
        turn_T=on_response(turns_of(sample.rows, ref.row), np.int64) if has_turns else None,
    )


def train_sequences(
    micro_batches: Sequence[MicroBatch],
    groups: Mapping[int, SampleGroup],
    aggregation: Aggregation,
    nll_weight: float = 0.0,
) -> list[list[TrainSequence]]:
    """The arrays that a rank's share of an update names."""
    return [
        [train_sequence(groups[ref.group], ref, aggregation, nll_weight) for ref in batch]
        for batch in micro_batches
    ]


def turns_of(rows: Sequence[Row], row: int) -> IntArray:
    """The turn of each sampled token of a row's response, from 1 on in its sample; of others, that of the turn before.

    A turn is sampled tokens one after another: between two turns there is at least a token of the chat template.
    """
    before = sum(int(_starts_T(earlier).sum()) for earlier in rows[:row])
    return before + np.cumsum(_starts_T(rows[row]))


def _starts_T(row: Row) -> IntArray:
    """1 where a turn begins, else 0."""
    return np.diff(row.trained_T.astype(np.int64), prepend=0).clip(0)

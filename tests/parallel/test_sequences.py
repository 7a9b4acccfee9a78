"""Packing: what a position of the row predicts, and the way back."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.parallel.sequences import pack, unpack
from megarl.types import TrainSequence


def sequence(tokens: list[int]) -> TrainSequence:
    """Targets that encode the token they belong to; the first half of the sequence is prompt."""
    tokens_T = np.array(tokens, np.int64)
    mask_T = np.arange(len(tokens)) >= max(1, len(tokens) // 2)
    return TrainSequence(
        token_ids_T=tokens_T,
        loss_mask_T=mask_T,
        loss_weight_T=(tokens_T * mask_T / 2).astype(np.float32),
        advantage_T=(tokens_T * mask_T + 1000).astype(np.float32),
        engine_logp_T=(-tokens_T * mask_T).astype(np.float32),
    )


def test_by_hand() -> None:
    row = pack([sequence([5, 6, 7]), sequence([8, 9])], multiple=4, device="cpu")
    assert row.token_ids_T.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert row.labels_T.tolist() == [6, 7, 0, 9, 0, 0, 0, 0]
    assert row.bounds.tolist() == [0, 3, 5, 8]  # the padding is a segment of its own
    assert row.bounds.dtype == torch.int32
    assert row.max_length == 3
    assert row.targets.loss_mask_T.tolist() == [True, True, False, True, False, False, False, False]
    assert row.targets.loss_weight_T.tolist() == [3.0, 3.5, 0.0, 4.5, 0.0, 0.0, 0.0, 0.0]
    assert row.targets.engine_logp_T.tolist() == [-6.0, -7.0, 0.0, -9.0, 0.0, 0.0, 0.0, 0.0]


def test_no_padding_segment_where_none_is_needed() -> None:
    row = pack([sequence([1, 2]), sequence([3, 4])], multiple=2, device="cpu")
    assert row.bounds.tolist() == [0, 2, 4]
    assert row.old_logp_T is None


def test_old_logprobs_are_shifted_like_the_targets() -> None:
    sequences = [sequence([5, 6, 7]), sequence([8, 9])]
    old = [np.array([0.0, -1.0, -2.0], np.float32), np.array([0.0, -3.0], np.float32)]
    row = pack(sequences, multiple=1, device="cpu", old_logp=old)
    assert row.old_logp_T is not None
    assert row.old_logp_T.tolist() == [-1.0, -2.0, 0.0, -3.0, 0.0]


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 8))
def test_every_sequence_comes_back(tokens: list[list[int]], multiple: int) -> None:
    row = pack([sequence(one) for one in tokens], multiple=multiple, device="cpu")
    total = sum(map(len, tokens))
    assert len(row.token_ids_T) % multiple == 0
    assert total <= len(row.token_ids_T) < total + multiple
    assert row.bounds[-1] == len(row.token_ids_T)
    labels = unpack(row, row.labels_T)
    assert [one.tolist() for one in labels] == [[0.0, *one[1:]] for one in tokens]
    masked = row.targets.loss_mask_T
    assert torch.equal(row.targets.engine_logp_T[masked], -row.labels_T[masked].float())
    assert int(masked.sum()) == sum(int(sequence(one).loss_mask_T[1:].sum()) for one in tokens)

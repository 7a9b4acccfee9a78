"""Packing: what a position of the row predicts, and the way back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.parallel.packing import LENGTH_STEP, Split, pack, unpack, zigzag
from megarl.parallel.routing import Router, Routing
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
    row = pack([sequence([5, 6, 7]), sequence([8, 9])], split=Split(tp=4), device="cpu")
    assert row.token_ids_L.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert row.labels_L.tolist() == [6, 7, 0, 9, 0, 0, 0, 0]
    assert row.bounds.tolist() == [0, 3, 5, 8]  # the padding is a segment of its own
    assert row.bounds.dtype == torch.int32
    assert row.max_length == LENGTH_STEP
    assert row.lengths_S.tolist() == [3.0, 2.0, 1.0]
    assert row.targets.loss_mask_T.tolist() == [True, True, False, True, False, False, False, False]
    assert row.targets.loss_weight_T.tolist() == [3.0, 3.5, 0.0, 4.5, 0.0, 0.0, 0.0, 0.0]
    assert row.targets.engine_logp_T.tolist() == [-6.0, -7.0, 0.0, -9.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("longest", "bound"), [(1, 1024), (1024, 1024), (1025, 2048), (20_480, 20_480)]
)
def test_attention_is_told_few_different_lengths(longest: int, bound: int) -> None:
    assert (
        pack([sequence([1] * longest), sequence([2])], split=Split(), device="cpu").max_length
        == bound
    )


def test_what_a_step_asks_of_a_row_needs_no_look_at_the_device() -> None:
    """On the meta device every value that is read back raises, as every read of a GPU's value would wait for it."""
    row = pack([sequence([5, 6, 7]), sequence([8, 9])], split=Split(tp=4), device="meta")
    assert row.max_length == LENGTH_STEP
    router = SimpleNamespace(
        _shared=Routing(is_training=True, row=row),
        _layer=0,
        tp_group=SimpleNamespace(rank=lambda: 1),
        enable_expert_bias=True,
        local_tokens_per_expert=torch.zeros(4, device="meta"),
    )
    router._tokens = Router._see(router, 4)  # type: ignore[arg-type]
    assert router._tokens.sequence_N.shape == (4,)
    Router._apply_expert_bias(router, torch.ones(4, 4, dtype=torch.bool, device="meta"))  # type: ignore[arg-type]
    assert router.local_tokens_per_expert.shape == (4,)


def test_no_padding_segment_where_none_is_needed() -> None:
    row = pack([sequence([1, 2]), sequence([3, 4])], split=Split(tp=2), device="cpu")
    assert row.bounds.tolist() == [0, 2, 4]
    assert row.old_logp_T is None


@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), max_size=6),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_every_sequence_comes_back_from_all_ranks(
    tokens: list[list[int]], tp: int, cp: int
) -> None:
    """The shares of the context-parallel ranks, put in order, are the row; what a position predicts comes with it."""
    sequences = [sequence(ids) for ids in tokens]
    shares = [
        pack(sequences, split=Split(tp, cp, rank, 2 * cp if cp > 1 else 1), device="cpu")
        for rank in range(cp)
    ]
    row, total = shares[0], sum(map(len, tokens))
    assert {len(share.token_ids_L) for share in shares} == {len(row.order_T) // cp}
    assert len(row.token_ids_L) % tp == 0
    assert len(row.order_T) < total + len(tokens) * (2 * cp - 1) * (cp > 1) + 2 * cp * tp + 1
    assert row.bounds[-1] == len(row.order_T) > 0
    labels_T = torch.cat([share.labels_L for share in shares])[row.order_T]
    sequence_T = torch.cat([share.sequence_L for share in shares])[row.order_T]
    assert [ids.tolist() for ids in unpack(row, labels_T)] == [[0.0, *ids[1:]] for ids in tokens]
    counts = torch.bincount(sequence_T, minlength=len(tokens) + 1)[: len(tokens)]
    assert counts.tolist() == [len(ids) for ids in tokens]
    masked = row.targets.loss_mask_T
    assert torch.equal(row.targets.engine_logp_T[masked], -labels_T[masked].float())
    assert int(masked.sum()) == sum(
        int(train_sequence.loss_mask_T[1:].sum()) for train_sequence in sequences
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(2, 4))
def test_context_parallel_ranks_attend_to_equally_many_tokens(chunks: list[int], cp: int) -> None:
    bounds = np.concatenate([[0], np.cumsum([2 * cp * chunk for chunk in chunks])])
    starts = np.repeat(bounds[:-1], np.diff(bounds))
    seen = [
        int((places - starts[places] + 1).sum())
        for places in (zigzag(bounds, cp, rank) for rank in range(cp))
    ]
    assert len(set(seen)) == 1


def test_the_engines_experts_are_packed_with_the_tokens_they_are_of() -> None:
    """Its last token was never an input of the engine's: nothing is known of it, nor of padding."""
    sequences = [
        replace(sequence([5, 6, 7]), experts_TMK=np.arange(4).reshape(2, 1, 2)),
        sequence([8, 9]),
    ]
    assert pack(sequences, split=Split(), device="cpu").experts_LMK is None  # one sequence has none
    sequences[1] = replace(sequences[1], experts_TMK=np.full((1, 1, 2), 7))
    row = pack(sequences, split=Split(tp=4), device="cpu")
    assert row.experts_LMK is not None
    assert row.experts_LMK[:, 0].tolist() == [
        [0, 1],
        [2, 3],
        [-1, -1],
        [7, 7],
        [-1, -1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
    ]

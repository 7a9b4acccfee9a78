"""Rows with shared prefixes: what losses read is that of plain rows, and attention follows each sequence."""

from __future__ import annotations

from dataclasses import fields, replace
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel import prefix_attention
from megarl.parallel.packing import PackedRow, Split, pack, unpack
from megarl.parallel.shared_rows import RowParams, pack_shared
from tests.parallel.test_local_spec import attend_row, slow_attention
from tests.parallel.test_packing import sequence

ROWS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=7)


def shared_row(tokens: list[list[int]], tp: int = 1) -> PackedRow:
    return pack_shared([sequence(ids) for ids in tokens], split=Split(tp=tp), device="cpu")


def test_by_hand() -> None:
    """Two answers to the prompt 5 6: the first tokens of both are predicted at its last one."""
    row = shared_row([[5, 6, 7], [5, 6, 8, 9]], tp=4)
    assert row.shared is not None
    assert row.token_ids_L.tolist() == row.labels_L.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert row.shared.position_L.tolist() == [0, 1, 2, 2, 3, 0, 0, 0]
    assert row.shared.parent_L[:5].tolist() == [0, 0, 1, 1, 3]
    assert row.shared.next_T.tolist() == [1, 2, 2, 1, 3, 4, 4]
    assert row.sequence_L.tolist() == [0, 0, 1, 2, 2, 3, 3, 3]
    assert row.shared.has_branch_SB.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert (row.starts, row.lengths) == ((0, 3), (3, 4))
    assert row.bounds.tolist() == [0, 8]


@given(ROWS, st.integers(1, 4))
def test_losses_read_what_they_read_of_plain_rows(tokens: list[list[int]], tp: int) -> None:
    sequences = [sequence(ids) for ids in tokens]
    # old logprobs, the reference's, returns and old values, each of its own
    rng = np.random.default_rng(tp)
    arrays = [[rng.random(len(ids), np.float32) for ids in tokens] for _ in range(4)]
    row = pack_shared(sequences, *arrays, split=Split(tp=tp), device="cpu")
    plain = pack(sequences, *arrays, split=Split(), device="cpu")
    assert len(row.token_ids_L) % tp == 0
    if row.shared is None:
        assert len({ids[0] for ids in tokens}) == len(tokens)
        return
    assert row.old_logp_T is not None and plain.old_logp_T is not None
    assert torch.equal(row.old_logp_T, plain.old_logp_T)
    for field in fields(plain.targets):
        mine, other = (getattr(either.targets, field.name) for either in (row, plain))
        assert (mine is None) == (other is None), field.name
        assert mine is None or other is None or torch.equal(mine, other), field.name
    ids_T = row.token_ids_L[row.shared.place_T]
    assert torch.equal(ids_T, plain.token_ids_L)
    labels_T = row.labels_L[row.shared.next_T]
    assert [ids.tolist() for ids in unpack(row, labels_T)] == [[0.0, *ids[1:]] for ids in tokens]
    has_next_T = torch.cat([torch.arange(len(ids)) < len(ids) - 1 for ids in tokens])
    before_T = row.shared.parent_L[row.shared.next_T]
    assert torch.equal(before_T[has_next_T], row.shared.place_T[has_next_T])


def inputs_of(row: PackedRow, heads: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values, of which the latter are narrower."""
    torch.manual_seed(len(row.token_ids_L))
    return [
        torch.randn(len(row.token_ids_L), count, width, dtype=dtype, requires_grad=True)
        for count, width in ((heads[0], 8), (heads[1], 8), (heads[1], 6))
    ]


@settings(max_examples=30)
@given(ROWS, st.sampled_from([(4, 4), (4, 2)]), st.integers(1, 3), st.sampled_from([1, 2, 4096]))
def test_attention_is_that_of_each_sequence(
    tokens: list[list[int]], heads: tuple[int, int], tp: int, few: int
) -> None:
    """Values and gradients, with those of a token that several sequences have added up.

    few: queries at a time, and keys of blocks.
    """
    row = shared_row(tokens, tp)
    if row.shared is None:
        return
    inputs = inputs_of(row, heads, torch.float64)
    place_T = row.shared.place_T
    expected = slow_attention([tensor[place_T] for tensor in inputs], list(row.lengths))
    weights = torch.randn_like(expected)
    with patch.multiple(prefix_attention, _SCORES=1, _LEAST_QUERIES=few, _KEYS=few):
        output = attend_row(inputs, RowParams.of(row))[place_T]
        torch.testing.assert_close(output, expected)
        gradients = [
            torch.autograd.grad((out * weights).sum(), inputs) for out in (output, expected)
        ]
    torch.testing.assert_close(*gradients)


def test_attention_keeps_a_prompt_once() -> None:
    """Twenty answers to a prompt of 50: queries, keys, values, results and log-sum-exps of the row's tokens."""
    row = shared_row([[*range(50), 100 + answer] for answer in range(20)])
    inputs = inputs_of(row, (4, 2), torch.bfloat16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: inputs[0]):
        attend_row(inputs, RowParams.of(row))
    numbers = sum(tensor.numel() for tensor in kept)
    assert numbers == 70 * (4 * 8 + 2 * 8 + 2 * 6 + 4 * 6 + 4)


def test_attention_in_a_narrow_type_is_that_of_a_wide_one() -> None:
    """Rounded once: all in between is wider."""
    row = shared_row([[1, 2, 3, answer] for answer in range(5)])
    inputs = inputs_of(row, (4, 2), torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    outputs = [attend_row(each, RowParams.of(row)) for each in (inputs, wide)]
    gradients = [
        torch.autograd.grad(out.sum(), each)
        for out, each in zip(outputs, (inputs, wide), strict=True)
    ]
    assert outputs[0].dtype == gradients[0][0].dtype == torch.bfloat16
    for mine, other in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0.05, atol=0.05)


def test_rows_without_a_common_prefix_are_plain() -> None:
    for tokens in ([], [[1, 2], [2, 2]]):
        sequences = [sequence(ids) for ids in tokens]
        row, plain = (
            function(sequences, split=Split(tp=2), device="cpu") for function in (pack_shared, pack)
        )
        assert row.shared is None and torch.equal(row.token_ids_L, plain.token_ids_L)


def test_experts_that_are_not_replayed_are_left_out() -> None:
    experts_TMK = np.zeros((1, 1, 1), np.int64)
    sequences = [replace(sequence([5, last]), experts_TMK=experts_TMK) for last in (6, 7)]
    row = pack_shared(sequences, split=Split(), device="cpu")
    assert row.shared is not None and row.experts_LMK is None

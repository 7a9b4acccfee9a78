"""Our attention and norm against the plain formula, one sequence and one head at a time, in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel.local_spec import PackedAttention, RMSNorm
from megarl.parallel.shared_rows import RowParams

ALONE: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
CONFIG: Any = SimpleNamespace(
    params_dtype=torch.float64, sequence_parallel=True, layernorm_zero_centered_gamma=False
)


def attend(inputs: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return attend_row(
        inputs, RowParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    )


def attend_row(inputs: list[torch.Tensor], row: RowParams) -> torch.Tensor:
    return PackedAttention(CONFIG, pg_collection=ALONE)(*inputs, None, packed_seq_params=row)


def slow_attention(inputs: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Loops over sequences, heads and positions."""
    q, k, v = inputs
    rows, heads_per_kv, start = [], q.shape[1] // k.shape[1], 0
    for length in lengths:
        for position in range(start, start + length):
            heads = []
            for head in range(q.shape[1]):
                seen = slice(start, position + 1)
                scores = k[seen, head // heads_per_kv] @ q[position, head] / math.sqrt(q.shape[2])
                heads.append(scores.softmax(0) @ v[seen, head // heads_per_kv])
            rows.append(torch.cat(heads))
        start += length
    return torch.stack(rows)


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4), st.sampled_from([(4, 4), (4, 2), (4, 1)])
)
def test_packed_attention(lengths: list[int], heads: tuple[int, int]) -> None:
    torch.manual_seed(sum(lengths))
    inputs = [
        torch.randn(sum(lengths), count, 8, dtype=torch.float64, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]
    output, expected = attend(inputs, lengths), slow_attention(inputs, lengths)
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (output, expected)]
    torch.testing.assert_close(*gradients)


def test_norm() -> None:
    norm = RMSNorm(CONFIG, 8, eps=0.5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    hidden = torch.randn(3, 1, 8, dtype=torch.float64)
    expected = hidden / (hidden.square().mean(-1, keepdim=True) + 0.5).sqrt() * norm.weight
    torch.testing.assert_close(norm(hidden), expected)


def test_norm_has_the_models_dtype() -> None:
    for adds_one in (False, True):
        config: Any = SimpleNamespace(
            params_dtype=torch.bfloat16, layernorm_zero_centered_gamma=adds_one
        )
        norm = RMSNorm(config, 4, eps=1e-6)
        ones = torch.ones(2, 4, dtype=torch.bfloat16)
        assert norm.weight.dtype == norm(ones).dtype == torch.bfloat16
        assert torch.equal(norm(ones), ones), "a new norm changes no size"

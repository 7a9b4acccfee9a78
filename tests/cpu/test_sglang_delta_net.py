"""The engine's Gated DeltaNet in torch: a prompt, then tokens one by one, give what the training ranks' rule gives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megarl.cpu.sglang_delta_net import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
)
from megarl.parallel.delta_net import causal_conv, torch_rule

LENGTHS, PROMPTS = (
    [9, 2, 12],
    [5, 1, 12],
)  # the last is not decoded, the second is shorter than the convolution
SLOTS = torch.tensor([2, 0, 3])
HEADS, VALUES, KEY, VALUE, WIDTH = 2, 4, 3, 5, 4


def split(tensor: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    return tensor.split(lengths)


def prompts(tensor: Tensor) -> Tensor:
    return torch.cat(
        [each[:size] for each, size in zip(split(tensor, LENGTHS), PROMPTS, strict=True)]
    )


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def decoded(step: int) -> list[int]:
    """The requests that have a token so many tokens behind the prompt."""
    return [number for number in range(3) if PROMPTS[number] + step < LENGTHS[number]]


def tokens(tensor: Tensor, step: int) -> Tensor:
    parts = split(tensor, LENGTHS)
    return torch.stack([parts[number][PROMPTS[number] + step] for number in decoded(step)])


def close(pieces: list[list[Tensor]], expected: Tensor) -> None:
    """pieces: of each request, its outputs in order."""
    torch.testing.assert_close(torch.cat([torch.cat(of_one) for of_one in pieces]), expected)


def test_the_convolution_goes_on_from_its_state() -> None:
    torch.manual_seed(0)
    values, weight = torch.randn(sum(LENGTHS), 6), torch.randn(6, WIDTH)
    pool = torch.full((4, 6, WIDTH - 1), 7.0)  # of requests before
    first = causal_conv1d_fn_cpu(
        prompts(values).T, weight, None, activation="silu", conv_states=pool,
        has_initial_state=torch.zeros(3, dtype=torch.bool), cache_indices=SLOTS, query_start_loc=bounds(PROMPTS),
    ).T  # fmt: skip
    pieces = [[each] for each in split(first, PROMPTS)]
    for step in range(4):
        slots = SLOTS[decoded(step)]
        out = causal_conv1d_update_cpu(
            tokens(values, step), pool, weight, None, "silu", conv_state_indices=slots
        )
        for number, row in zip(decoded(step), out, strict=True):
            pieces[number].append(row[None])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    close(pieces, causal_conv(values, weight, positions))


def test_the_rule_goes_on_from_its_state() -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q, k = (torch.randn(total, HEADS, KEY) for _ in range(2))
    v = torch.randn(total, VALUES, VALUE)
    a, b = (torch.randn(total, VALUES) for _ in range(2))
    decay, step_bias = torch.randn(VALUES), torch.randn(VALUES)
    pool = torch.zeros(4, VALUES, VALUE, KEY)
    g, beta = fused_gdn_gating_cpu(decay, a, b, step_bias)
    first, *_ = chunk_gated_delta_rule_cpu(
        q=prompts(q)[None], k=prompts(k)[None], v=prompts(v)[None], g=prompts(g[0])[None], beta=prompts(beta[0])[None],
        initial_state=pool, initial_state_indices=SLOTS, cu_seqlens=bounds(PROMPTS),
    )  # fmt: skip
    pieces = [[each] for each in split(first[0], PROMPTS)]
    for step in range(4):
        now = decoded(step)
        out = fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=decay, dt_bias=step_bias, q=tokens(q, step)[None], k=tokens(k, step)[None],
            v=tokens(v, step)[None], a=tokens(a, step), b=tokens(b, step), initial_state_source=pool,
            initial_state_indices=SLOTS[now], cu_seqlens=torch.arange(len(now) + 1),
        )  # fmt: skip
        for number, row in zip(now, out[0], strict=True):
            pieces[number].append(row[None])
    q, k = (F.normalize(each, dim=-1).repeat_interleave(2, dim=1) for each in (q, k))
    expected = torch_rule(q, k, v, g[0], beta[0], bounds(LENGTHS))
    torch.testing.assert_close(
        torch.cat([torch.cat(of_one) for of_one in pieces]), expected, atol=1e-5, rtol=1e-4
    )


def test_projections_of_qwen3_5_are_split_as_transformers_splits_them() -> None:
    torch.manual_seed(2)
    sizes = [HEADS * KEY, HEADS * KEY, VALUES * VALUE, VALUES * VALUE]
    q, k, v, z = (torch.randn(6, size) for size in sizes)
    b, a = (torch.randn(6, VALUES) for _ in range(2))
    parts = fused_qkvzba_split_reshape_cat_contiguous_cpu(
        torch.cat([q, k, v, z], dim=1), torch.cat([b, a], dim=1), HEADS, VALUES, KEY, VALUE
    )
    expected = torch.cat([q, k, v], dim=1), z.view(6, VALUES, VALUE), b, a
    assert all(map(torch.equal, parts, expected))


def test_gated_attention_of_qwen3_5() -> None:
    """[query; gate] of each head; norms multiply by 1 + their weight; the gate's sigmoid multiplies in place."""
    torch.manual_seed(3)
    tokens, heads, width = 5, 3, 4
    q, gate = torch.randn(2, tokens, heads, width)
    k, q_weight, k_weight = torch.randn(tokens, width), torch.randn(width), torch.randn(width)
    both = torch.cat([q, gate], dim=-1).flatten(1)
    q_out, k_out, gate_out = fused_qk_gemma_rmsnorm_with_gate_cpu(
        both, k, q_weight, k_weight, 1e-6, width, heads
    )

    def norm(values: Tensor, weight: Tensor) -> Tensor:
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)

    torch.testing.assert_close(q_out, norm(q, q_weight).flatten(0, 1))
    torch.testing.assert_close(k_out, norm(k, k_weight))
    assert gate_out.equal(gate.flatten(0, 1)) and gate_out.is_contiguous()
    output = q.clone().flatten(1)
    fused_sigmoid_mul_cpu(output, gate_out.view(tokens, -1))
    torch.testing.assert_close(output, (q * gate.sigmoid()).flatten(1))

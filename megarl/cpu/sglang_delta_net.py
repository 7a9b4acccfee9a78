"""Gated DeltaNet in an engine without a GPU: torch in place of kernels of `sgl_kernel`, which no wheel has for CPUs.

The functions have the names and arguments with which SGLang calls them (layers/attention/linear/gdn_backend.py,
kernels/gdn_triton.py, models/qwen3_5.py). Pools have one slot for each request: convolutions [slots, channels,
width - 1], states [slots, heads, value width, key width]. A slot below 0 is padding.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_EPS = 1e-6  # of the unit length of queries and keys


def install() -> None:
    """Put the functions where SGLang looks for them; call it before SGLang is imported."""
    mamba = importlib.import_module("sgl_kernel.mamba")
    for function in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
        setattr(mamba, function.__name__, function)
    for function in (
        fused_gdn_gating_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_sigmoid_mul_cpu,
    ):
        setattr(torch.ops.sgl_kernel, function.__name__, function)


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """[channels, T] of all requests, each convolved after what its slot has of the tokens before."""
    out = torch.zeros_like(x)
    width = weight.shape[1]
    for number, slot, tokens in _requests(cache_indices, query_start_loc):
        before = conv_states[slot].to(x.dtype) * bool(has_initial_state[number])
        seen = torch.cat([before, x[:, tokens]], dim=1)
        mixed = F.conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, tokens] = _activated(mixed, activation)
        conv_states[slot] = seen[:, 1 - width :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """[B, channels]: one token of each request."""
    slots = conv_state_indices.clamp_min(0)
    seen = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], dim=-1)
    is_real = conv_state_indices >= 0
    conv_states[slots[is_real]] = seen[is_real, :, 1:].to(conv_states.dtype)
    mixed = (seen * weight).sum(-1)
    return _activated(mixed if bias is None else mixed + bias, activation)


def _activated(mixed: Tensor, activation: str) -> Tensor:
    assert activation in ("silu", "swish"), activation
    return F.silu(mixed)


def fused_gdn_gating_cpu(
    A_log: Tensor,  # noqa: N803
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logarithms of the decay, and beta: [1, T, heads] each."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """The rule for all tokens of all requests [1, T, heads, width], from the states in their slots on."""
    out = torch.zeros_like(v)
    repeats = v.shape[2] // k.shape[2]
    q, k = (_unit(each[0].float()).repeat_interleave(repeats, dim=1) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    for _number, slot, tokens in _requests(initial_state_indices, cu_seqlens):
        state = initial_state[slot].float()
        for token in range(tokens.start, tokens.stop):
            state = state * g[0, token].float().exp()[:, None, None]
            known = torch.einsum("hvk,hk->hv", state, k[token])
            correction = (v[0, token].float() - known) * beta[0, token].float()[:, None]
            state = state + correction[:, :, None] * k[token][:, None]
            out[0, token] = torch.einsum("hvk,hk->hv", state, q[token]).to(out.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    """The rule for one token of each request."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, _state, _history = chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
    )
    return out


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[q; k; v], z by head, b and a of [q; k; v; z] and [b; a], which a token has for all heads of the rank."""
    values = value_heads * value_dim
    qkv, z = qkvz.split([2 * key_heads * key_dim + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return (
        qkv.contiguous(),
        z.unflatten(-1, (value_heads, value_dim)),
        b.contiguous(),
        a.contiguous(),
    )


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """The norms of each head's queries and keys, which multiply by 1 + their weight: [heads of all tokens, width]."""
    q_normed, k_normed = (
        F.rms_norm(heads.reshape(-1, head_dim).float(), (head_dim,), 1 + weight.float(), eps)
        for heads, weight in ((q, q_weight), (k, k_weight))
    )
    return q_normed.to(q.dtype), k_normed.to(k.dtype)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused_qk_gemma_rmsnorm_cpu`, and the gates, of [query; gate] of each head."""
    q, gate = q_gate.unflatten(-1, (num_heads, 2 * head_dim)).chunk(2, dim=-1)
    normed = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return *normed, gate.contiguous().view(-1, head_dim)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply x by the sigmoid of its gate, in place."""
    x.mul_(gate.sigmoid().view_as(x))


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """The norm of each head, times silu of its gate."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * F.silu(gate.float())).to(x.dtype)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _EPS)


def _requests(slots: Tensor, bounds: Tensor) -> Iterator[tuple[int, int, slice]]:
    """(number, slot, tokens) of each request that is no padding."""
    ends = bounds.tolist()
    for number, slot in enumerate(slots.tolist()[: len(ends) - 1]):
        if slot >= 0 and ends[number] < ends[number + 1]:
            yield number, slot, slice(ends[number], ends[number + 1])

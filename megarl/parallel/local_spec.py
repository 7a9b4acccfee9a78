"""Megatron's layer spec from its own torch modules, for machines without TransformerEngine.

Its norm refuses sequence parallelism, its attention refuses packed sequences, and its latent attention is wrong under
tensor parallelism, so all three are replaced here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules, get_mtp_layer_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight says that each tensor-parallel rank sees only its part of the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # finalize_model_grads sums the gradients of weights marked so over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


@functools.lru_cache(maxsize=64)
def _buckets(bounds: tuple[int, ...]) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Segments of like length together: (positions [segments, longest], is_real) per bucket, and the way back.

    A bucket holds lengths of one power of two, so padding at most doubles it. The last tensor gives, for every
    position of the row, its place among the buckets' real positions. Cached: every layer of a micro-batch asks.
    """
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        by_size.setdefault((end - start - 1).bit_length(), []).append((start, end - start))
    buckets, order = [], []
    for segments in by_size.values():
        starts, lengths = torch.tensor(segments).T
        column = torch.arange(int(lengths.max()))
        is_real = column < lengths[:, None]
        positions = torch.where(is_real, starts[:, None] + column, starts[:, None])
        buckets.append((positions, is_real))
        order.append(positions[is_real])
    return buckets, torch.argsort(torch.cat(order))


class PackedAttention(torch.nn.Module):
    """Causal attention inside each segment of a packed row.

    query [T, heads, d], key [T, kv heads, d], value [T, kv heads, v] -> [T, heads * v]. Padding to the right of a
    segment needs no mask: causal attention never looks there.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> torch.Tensor:
        buckets, order = _buckets(tuple(packed_seq_params.cu_seqlens_q.tolist()))
        outputs = []
        for positions, is_real in buckets:
            q, k, v = (_rows(one, positions) for one in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
            outputs.append(out.transpose(1, 2)[is_real.to(out.device)])
        return torch.cat(outputs).index_select(0, order.to(query.device)).flatten(1)


def _rows(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, heads, d] -> [segments, heads, longest, d]."""
    rows = tensor.index_select(0, positions.flatten().to(tensor.device))
    return rows.unflatten(0, positions.shape).transpose(1, 2)


class DuplicatedLinear(torch.nn.Module):
    """MLA's down projection: whole on every tensor-parallel rank, each seeing its part of the tokens.

    Megatron's own choice without TransformerEngine, cut by columns, leaves a part of its gradients unsummed. Takes what
    TransformerEngine's linear layer takes; returns (output, no bias).
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        assert config.init_method is not None
        config.init_method(self.weight)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(hidden, self.weight), None


def layer_spec(config: TransformerConfig, dense: bool) -> ModuleSpec:
    """One decoder layer, with an MLP or with experts."""
    latent = getattr(config, "multi_latent_attention", False)
    spec = get_gpt_layer_local_spec(
        num_experts=None if dense else config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    attention: Any = layer.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    if latent:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(config: TransformerConfig, is_dense: Sequence[bool]) -> TransformerBlockSubmodules:
    """The layers of one model chunk: is_dense says of each whether it has an MLP instead of experts."""
    kinds = {dense: layer_spec(config, dense) for dense in set(is_dense)}
    layers = [kinds[dense] for dense in is_dense]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)  # type: ignore[arg-type]


def mtp_spec(config: TransformerConfig) -> MultiTokenPredictionBlockSubmodules:
    """All multi-token prediction layers, each around a layer with experts."""
    spec = get_mtp_layer_spec(layer_spec(config, dense=False), use_transformer_engine=False)
    parts: Any = spec.submodules
    parts.enorm = parts.hnorm = parts.layer_norm = RMSNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * (config.mtp_num_layers or 0))

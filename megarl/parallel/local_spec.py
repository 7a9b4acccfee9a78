"""Megatron's layer specs without TransformerEngine, for GPUs and CPUs.

Megatron's own torch modules do not suffice: its norm refuses sequence parallelism, its attention refuses packed
sequences, and its latent attention is wrong under tensor parallelism. All three are replaced here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.parallel.cp_gather import gather_keys
from megarl.parallel.delta_net import DeltaNet, DeltaNetSubmodules
from megarl.parallel.layer_kinds import GatedSelfAttention, LayerKind
from megarl.parallel.packing import zigzag
from megarl.parallel.prefix_attention import prefix_attention
from megarl.parallel.routing import Router, Routing
from megarl.parallel.shared_rows import RowParams


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm for sequence parallelism: tp_attributes.py marks its weight for the sum over TP.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in float32: in 16 bits the sum would be rounded.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.adds_one = config.layernorm_zero_centered_gamma
        weight = torch.ones(hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight * (not self.adds_one))

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.adds_one:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        factor = 1 + self.weight.float()
        return F.rms_norm(hidden.float(), factor.shape, factor, self.eps).to(hidden.dtype)


@dataclass(frozen=True)
class KeyBucket:
    """Blocks of queries of similar size, padded to the longest.

    queries: positions in this rank's share of the row; keys: positions in the whole row.
    """

    queries: Tensor  # [blocks, longest]
    is_real: Tensor  # [blocks, longest]
    keys: Tensor  # [blocks, longest of the keys]
    is_seen: Tensor | None  # the mask [blocks, 1, longest, longest of the keys]; None: causal

    def causal_mask(self, first: int, end: int) -> Tensor:
        """The rows of the mask for the queries from `first` to `end`, also where it is a triangle."""
        if self.is_seen is not None:
            return self.is_seen[:, :, first:end]
        return (torch.arange(self.keys.shape[1]) <= torch.arange(first, end)[:, None])[None, None]


@functools.lru_cache(maxsize=8)
def _buckets(bounds: tuple[int, ...], cp: int, rank: int) -> tuple[list[KeyBucket], Tensor, Tensor]:
    """(buckets of a rank, order that restores its queries, order of the gathered keys in the row).

    Without context parallelism a block is a segment; otherwise it is one of the rank's two chunks of a segment, which
    attends to the segment up to its own end. A bucket has lengths of one power of two, so that padding at most doubles
    it. Cached, because every layer of a micro-batch asks for it.
    """
    by_size: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    done = 0
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        if cp > 1:
            chunk = (end - start) // (2 * cp)
            lasts = [start + (rank + 1) * chunk, start + (2 * cp - rank) * chunk]
        else:
            chunk = end - start
            lasts = [end]
        for last in lasts:
            size = (chunk - 1).bit_length(), (last - start - 1).bit_length()
            by_size.setdefault(size, []).append((done, chunk, start, last - start))
            done += chunk
    buckets = [_bucket(blocks) for blocks in by_size.values()]
    queries = torch.cat([bucket.queries[bucket.is_real] for bucket in buckets])
    shares = [zigzag(np.array(bounds), cp, cp_rank) for cp_rank in range(cp)]
    return buckets, torch.argsort(queries), torch.from_numpy(np.argsort(np.concatenate(shares)))


def _bucket(blocks: Sequence[tuple[int, int, int, int]]) -> KeyBucket:
    """blocks: (first query, number of queries, first key, number of keys); the last query is the last key."""
    first, queries, first_key, keys = (column[:, None] for column in torch.tensor(blocks).T)
    column = torch.arange(int(queries.max()))
    key = torch.arange(int(keys.max()))
    is_real = column < queries
    is_seen = None
    if not torch.equal(queries, keys):
        is_seen = (key <= (column + keys - queries)[..., None])[:, None]
    from_keys = torch.where(key < keys, first_key + key, first_key)
    return KeyBucket(torch.where(is_real, first + column, first), is_real, from_keys, is_seen)


class PackedAttention(torch.nn.Module):
    """Causal attention inside each segment of a packed row, or along each sequence of one with shared prefixes.

    query [L, heads, d], key [L, kv heads, d], value [L, kv heads, v] -> [L, heads * v], for the L tokens of this
    context-parallel rank; keys and values are gathered from all. Padding on the right of a segment needs no mask,
    because causal attention does not reach it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowParams,
        **_: Any,
    ) -> Tensor:
        if shared := packed_seq_params.shared:
            scale = self.softmax_scale or 1 / math.sqrt(query.shape[2])
            return prefix_attention(query, key, value, shared, scale).flatten(1)
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        group = packed_seq_params.cp_group or self.group
        buckets, back, order_T = _buckets(bounds, group.size(), group.rank())
        key, value = (
            gather_keys(tensor, order_T.to(query.device), group) for tensor in (key, value)
        )
        outputs = []
        for bucket in buckets:
            q = _rows(query, bucket.queries)
            k = _rows(key, bucket.keys)
            v = _rows(value, bucket.keys)
            out = self._attend(q, k, v, bucket, attention_mask)
            outputs.append(out.transpose(1, 2)[bucket.is_real.to(out.device)])
        return torch.cat(outputs).index_select(0, back.to(query.device)).flatten(1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bucket: KeyBucket, attention_mask: Tensor | None
    ) -> Tensor:
        """Attention of a bucket, [blocks, heads, longest, v]. attention_mask: as Megatron passes it; not read here."""
        mask = None if bucket.is_seen is None else bucket.is_seen.to(q.device)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )


def _rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """[T, heads, d] -> [blocks, heads, longest, d]."""
    rows = tensor.index_select(0, positions.flatten().to(tensor.device))
    return rows.unflatten(0, positions.shape).transpose(1, 2)


class DuplicatedLinear(torch.nn.Module):
    """MLA's down projection, replicated on every tensor-parallel rank, each of which has a part of the tokens.

    Without TransformerEngine Megatron splits it by columns and leaves a part of the gradients unsummed. Has the
    interface of TransformerEngine's linear layer; returns (output, no bias). multiply: [.., k], [n, k] -> [.., n].
    """

    multiply: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.linear)

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )
        assert config.init_method is not None
        config.init_method(self.weight)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self.multiply(hidden, self.weight), None


@contextmanager
def _nothing(**_: object) -> Iterator[None]:
    yield


def use_local_layers() -> None:
    """Patch three places where Megatron's own modules need TransformerEngine.

    The router uses `te_general_gemm`, which moe_utils does not define without TransformerEngine, and which needs a GPU.
    Latent attention passes the arguments of a duplicated layer only to a class named TELinear. What computes a part of
    a layer again asks TransformerEngine for fp8, because `CheckpointWithoutOutput` takes `fp8=False` for a type.
    """
    moe_utils.te_general_gemm = None  # type: ignore[assignment]
    multi_latent_attention.TELinear = DuplicatedLinear  # type: ignore[misc]
    without_fp8 = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.FP8GlobalStateManager = without_fp8  # type: ignore[attr-defined]
    random.activation_recompute_forward = _nothing  # type: ignore[attr-defined]
    random.fp8_autocast = _nothing  # type: ignore[attr-defined]


def layer_spec(config: TransformerConfig, kind: LayerKind, routing: Routing) -> ModuleSpec:
    """The spec of a decoder layer."""
    dense = kind.is_dense
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
    if kind.is_linear:
        linears = DeltaNetSubmodules(ColumnParallelLinear, RowParallelLinear)
        layer.self_attention = ModuleSpec(DeltaNet, submodules=linears)
    elif config.attention_output_gate:
        layer.self_attention.module = GatedSelfAttention
    attention.core_attention = PackedAttention
    if latent:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if not dense:
        layer.mlp.submodules.router = functools.partial(Router, routing=routing)
    return spec


def block_spec(
    config: TransformerConfig, kinds: Sequence[LayerKind], routing: Routing
) -> TransformerBlockSubmodules:
    """The specs of a model chunk's layers."""
    specs = {kind: layer_spec(config, kind, routing) for kind in set(kinds)}
    layers = [specs[kind] for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)  # type: ignore[arg-type]


def mtp_spec(config: TransformerConfig, routing: Routing) -> MultiTokenPredictionBlockSubmodules:
    """The specs of all multi-token prediction layers, each of which wraps a layer with experts."""
    spec = get_mtp_layer_spec(
        layer_spec(config, LayerKind(), routing), use_transformer_engine=False
    )
    parts: Any = spec.submodules
    parts.enorm = parts.hnorm = parts.layer_norm = RMSNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * (config.mtp_num_layers or 0))

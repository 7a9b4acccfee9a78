"""Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464): the linear attention of Qwen3-Next and 3.5 for packed rows.

A head has a state S [key width, value width], which begins at 0 with each segment of a row. A token lets it decay,
corrects what it answers to the token's key by beta, and reads it:

    S' = exp(g) S;  S = S' + k (beta (v - S'^T k))^T;  output = S^T q / sqrt(key width)

Megatron 0.16.1's own module (ssm/gated_delta_net.py) refuses packed rows and context parallelism.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megarl.device import DEVICE
from megarl.parallel.cp_gather import scatter_heads, scatter_tokens
from megarl.parallel.optional_imports import delta_rule_kernel
from megarl.parallel.packing import RankOrder, position_in_segment, rank_order
from megarl.parallel.shared_rows import RowParams
from megarl.parallel.split_params import split_params

CHUNK = 64  # tokens of which a chunk's products are one matrix
_EPS = 1e-6  # of the unit length of queries and keys, as in flash-linear-attention
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeltaNetSubmodules:
    """The classes of the two linear layers: split by columns, and by rows."""

    in_proj: Any
    out_proj: Any


class DeltaNet(MegatronModule):
    """A layer's Gated DeltaNet in place of its self attention: hidden [L / tp, 1, h] -> ([L / tp, 1, h], None).

    Every parameter but out_norm is woven by key head, so that a TP rank has whole key heads and any cut between two
    ranks is a cut of rows (of columns for out_proj). With K key heads of width k, r = V / K value heads of width v for
    each, and a convolution over c tokens, a key head's rows are:

    - in_proj.weight [K (2 k + 2 r v + 2 r), h]: q (k), k (k), v (r v), z (r v), b (r), a (r). So these are a key head's
      rows of the checkpoint's in_proj_qkvz, then its rows of in_proj_ba.
    - conv1d.weight [K (2 k + r v), 1, c]: q, k, v. The checkpoint has all q, then all k, then all v.
    - A_log [V], dt_bias [V]: r numbers.
    - out_proj.weight [h, V v]: r v columns.
    - out_norm.weight [v], whole on every rank; it is no 1 + w norm.

    Context-parallel ranks exchange tokens for heads: each computes the whole row for its part of the rank's key heads,
    whose number cp must divide. Convolution, decay and state are float32 whatever the type of the weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        assert config.linear_num_key_heads and config.linear_num_value_heads
        assert config.linear_key_head_dim and config.linear_value_head_dim
        self.layer_number = layer_number
        self.group = pg_collection.cp
        self.tp_group = pg_collection.tp
        tp = pg_collection.tp.size()
        self.heads = config.linear_num_key_heads // tp
        self.ratio = config.linear_num_value_heads // config.linear_num_key_heads
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        values = self.ratio * self.value_dim
        self.head_rows = [2 * self.key_dim + values, values, 2 * self.ratio]
        self.recomputes_rule = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or ()
        )
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            config.linear_num_key_heads * sum(self.head_rows),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        self.conv1d = Convolution(self.heads * self.head_rows[0], config)
        steps = torch.ones(self.heads * self.ratio, dtype=config.params_dtype)
        self.dt_bias = torch.nn.Parameter(steps)
        self.A_log = torch.nn.Parameter(torch.empty_like(steps).uniform_(1, 16).log())
        self.out_norm = GatedNorm(self.value_dim, config)
        self.out_proj = build_module(
            submodules.out_proj,
            config.linear_num_value_heads * self.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowParams,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert packed_seq_params.shared is None  # preflight refuses shared prefixes for this layer
        bounds = packed_seq_params.cu_seqlens_q
        group = packed_seq_params.cp_group or self.group
        rows, _ = self.in_proj(hidden_states)
        rows_LHX = rows[:, 0].unflatten(-1, (self.heads, sum(self.head_rows)))
        qkv_LHX, z_LHX, ba_LHX = rows_LHX.split(self.head_rows, dim=-1)
        length = len(rows_LHX) * group.size()
        order = rank_order(bounds, length, group.size()) if group.size() > 1 else None
        own_TGX = _all_tokens(torch.cat([qkv_LHX, ba_LHX], dim=-1), order, group)
        core = functools.partial(self._core, bounds=bounds, part=group.rank())
        if self.recomputes_rule and self.training:
            out_TGX = tensor_parallel.checkpoint(core, False, own_TGX)
        else:
            out_TGX = core(own_TGX)
        out_LHX = _own_tokens(out_TGX, order, group)
        heads = self.heads * self.ratio, self.value_dim
        normed = self.out_norm(out_LHX.reshape(-1, *heads), z_LHX.reshape(-1, *heads))
        output, _ = self.out_proj(normed.flatten(1)[:, None])
        return output, None

    def backward_dw(self) -> None:
        """Weight gradients that the backward pass has left out, which Megatron asks of each layer of paired passes."""
        self.in_proj.backward_dw()
        self.out_proj.backward_dw()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The parameters of a sharded checkpoint; Megatron knows the split of the two linear layers."""
        shards: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        split: dict[str, Tensor] = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "conv1d.weight": self.conv1d.weight,
        }
        return shards | split_params(split, prefix, sharded_offsets, metadata, self.tp_group)

    def _core(self, own_TGX: Tensor, *, bounds: Tensor, part: int) -> Tensor:
        """Convolution and rule of a whole row, [T, G, 2 k + r v + 2 r] -> [T, G, r v], of the G key heads of a part."""
        heads = own_TGX.shape[1]
        qkv_TGX, ba_TGX = own_TGX.split([self.head_rows[0], self.head_rows[2]], dim=-1)
        conv_CW = self.conv1d.weight[:, 0].chunk(self.heads // heads)[part]
        position_T = position_in_segment(bounds, len(qkv_TGX))
        # computed again in the backward pass: it would keep a float32 copy for each of its taps
        mixed_TC = checkpoint(
            causal_conv, qkv_TGX.flatten(1), conv_CW, position_T, use_reentrant=False
        )
        q_TGK, k_TGK, v_TGX = mixed_TC.unflatten(1, (heads, -1)).split(
            [self.key_dim, self.key_dim, self.ratio * self.value_dim], dim=-1
        )
        v_TVX = v_TGX.reshape(len(v_TGX), -1, self.value_dim)
        q_TVK, k_TVK = (
            _unit(each.float()).repeat_interleave(self.ratio, dim=1).to(v_TVX.dtype)
            for each in (q_TGK, k_TGK)
        )
        b_TV, a_TV = (each.flatten(1).float() for each in ba_TGX.chunk(2, dim=-1))
        own_values = slice(part * b_TV.shape[1], (part + 1) * b_TV.shape[1])
        rate_V = self.A_log[own_values].float().exp()
        g_TV = -rate_V * F.softplus(a_TV + self.dt_bias[own_values].float())
        out_TVX = delta_rule(q_TVK, k_TVK, v_TVX, g_TV, b_TV.sigmoid(), bounds)
        return out_TVX.reshape(len(out_TVX), heads, -1)


class Convolution(torch.nn.Module):
    """The weight [channels, 1, width] of a convolution over the tokens of each channel; `causal_conv` computes it."""

    def __init__(self, channels: int, config: TransformerConfig) -> None:
        super().__init__()
        assert config.linear_conv_kernel_dim
        weight = torch.empty(channels, 1, config.linear_conv_kernel_dim, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight.uniform_(-0.5, 0.5))


class GatedNorm(torch.nn.Module):
    """The root-mean-square norm of each value head, times silu of its gate: [.., v], [.., v] -> [.., v]."""

    def __init__(self, width: int, config: TransformerConfig) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))

    def forward(self, values: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(values.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(values.dtype)


def _all_tokens(share_LHX: Tensor, order: RankOrder | None, group: dist.ProcessGroup) -> Tensor:
    """[L, H, X] of each rank -> [T, H / cp, X]: the row's tokens, in its order, for this rank's part of the heads."""
    if order is None:
        return share_LHX
    return scatter_heads(share_LHX, group).index_select(0, order.order_T)


def _own_tokens(row_TGX: Tensor, order: RankOrder | None, group: dist.ProcessGroup) -> Tensor:
    """Undo `_all_tokens`."""
    if order is None:
        return row_TGX
    return scatter_tokens(row_TGX.index_select(0, order.places_T), group)


def causal_conv(values_TC: Tensor, weight_CW: Tensor, position_T: Tensor) -> Tensor:
    """silu of each channel's convolution over a token and the W - 1 before it in its segment; position_T: in it."""
    weight_CW = weight_CW.float()
    values = values_TC.float()
    width = weight_CW.shape[1]
    mixed = values * weight_CW[:, -1]
    for back in range(1, width):
        before = F.pad(values, (0, 0, back, 0))[: len(values)]
        is_inside = (position_T >= back)[:, None]
        mixed = mixed + torch.where(is_inside, before, 0.0) * weight_CW[:, width - 1 - back]
    return F.silu(mixed).to(values_TC.dtype)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _EPS)


def torch_rule(
    q_TVK: Tensor, k_TVK: Tensor, v_TVX: Tensor, g_TV: Tensor, beta_TV: Tensor, bounds: Tensor
) -> Tensor:
    """The rule of the module's docstring for every value head of a packed row, in torch: [T, V, v] in v's type.

    g_TV: logarithms of the decay. Segments whose lengths round up to the same power of two are computed side by side.
    """
    outputs = []
    batches, back_T = _batches(tuple(bounds.tolist()))
    for places_BN, is_real_BN in batches:
        places = places_BN.flatten().to(v_TVX.device)
        is_real = is_real_BN.to(v_TVX.device)
        q, k, v, g, beta = (
            each.index_select(0, places).unflatten(0, places_BN.shape).float().transpose(1, 2)
            for each in (q_TVK, k_TVK, v_TVX, g_TV, beta_TV)
        )
        # padding neither decays nor corrects a state
        real_B1N = is_real[:, None]
        out_BVNX = _segments(q, k, v, g * real_B1N, beta * real_B1N)
        outputs.append(out_BVNX.transpose(1, 2)[is_real])
    return torch.cat(outputs).index_select(0, back_T.to(v_TVX.device)).to(v_TVX.dtype)


@functools.lru_cache(maxsize=8)
def _batches(bounds: tuple[int, ...]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """(places in the row and whether they are real [segments, length], for each batch; what restores the row's order).

    Lengths are powers of two. Cached, because every layer of a micro-batch asks for it.
    """
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        by_length.setdefault(1 << (end - start - 1).bit_length(), []).append((start, end))
    batches = [_batch(segments, length) for length, segments in by_length.items()]
    real = torch.cat([places[is_real] for places, is_real in batches])
    return batches, torch.argsort(real)


def _batch(segments: Sequence[tuple[int, int]], length: int) -> tuple[Tensor, Tensor]:
    start, end = (column[:, None] for column in torch.tensor(segments).T)
    places = start + torch.arange(length)
    return places.minimum(end - 1), places < end


def _segments(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule for sequences [B, V, N, ..] of one length, chunk after chunk.

    Inside a chunk the corrections u = beta (v - S'^T k) of its tokens depend on those before them: they are the
    solution of a triangular system, whose right side is linear in the state before the chunk.
    """
    length = q.shape[2]
    chunk = min(CHUNK, length)
    q, k, v, g, beta = (each.unflatten(2, (length // chunk, chunk)) for each in (q, k, v, g, beta))
    q = q / math.sqrt(q.shape[-1])
    decay = g.cumsum(-1)  # since the chunk's begin
    ahead = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(ahead, -math.inf).exp()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.mT * between).tril(-1)
    right = torch.cat([v * beta[..., None], k_beta * decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    seen = q @ k.mT * between
    q_decayed = q * decay.exp()[..., None]
    k_until_end = k * (decay[..., -1:] - decay).exp()[..., None]
    last = decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for at in range(length // chunk):
        corrections = from_values[:, :, at] - from_state[:, :, at] @ state
        outputs.append(q_decayed[:, :, at] @ state + seen[:, :, at] @ corrections)
        state = last[:, :, at] * state + k_until_end[:, :, at].mT @ corrections
    return torch.cat(outputs, dim=2)


def _choose_rule() -> Rule:
    """flash-linear-attention's kernel on a GPU where it is installed, torch elsewhere."""
    kernel = delta_rule_kernel() if DEVICE == "cuda" else None
    if kernel is None:
        return torch_rule
    return functools.partial(kernel_rule, kernel)


def kernel_rule(
    kernel: Callable[..., tuple[Tensor, Any]],
    q_TVK: Tensor,
    k_TVK: Tensor,
    v_TVX: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    bounds: Tensor,
) -> Tensor:
    """As `torch_rule`, by the kernel. Unverified on GPUs: docs/gpu/UNVERIFIED.md."""
    inputs = (each.contiguous()[None] for each in (q_TVK, k_TVK, v_TVX, g_TV, beta_TV))
    out, _ = kernel(*inputs, cu_seqlens=bounds.long())
    return out[0]


delta_rule: Rule = _choose_rule()

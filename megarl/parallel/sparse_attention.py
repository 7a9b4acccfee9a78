"""Latent attention over the keys that an indexer chooses for each query (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

Megatron 0.16.1 has a module for it that refuses packed rows (experimental_attention_variant/dsa.py). The score of key s
for query t is sum_j w_tj relu(q_tj . k_s) over the indexer's heads j; the top_k keys of the largest scores are chosen
among those at or before the query in its segment. The indexer's weights are frozen: no gradient reaches them through
the choice, and the loss that trains them in pretraining, the divergence from the distribution of attention, is not one
of reinforcement learning. SGLang rotates queries and keys by a Hadamard matrix and rounds them to fp8; here they are
in the model's type, so that near the last chosen score engine and trainer may choose different keys.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megarl.model.shape import IndexerShape
from megarl.parallel.cp_gather import gather_keys, gather_shared
from megarl.parallel.local_spec import KeyBucket, PackedAttention
from megarl.parallel.packing import position_in_segment, rank_order, zigzag
from megarl.parallel.shared_rows import RowParams

# numbers in a block of scores, before the sum over the indexer's heads, and in a block of masks
_BLOCK_NUMBERS = 1 << 25
_NORM_EPS = 1e-6


class RotaryTurn(NamedTuple):
    """Cosines and sines of the rotary positions of L tokens, times YaRN's scale: float32 [L, 1, rotary width]."""

    cos_L1D: Tensor
    sin_L1D: Tensor


class Indexer(torch.nn.Module):
    """The frozen weights that choose keys, whole on every rank, with the checkpoint's names.

    They are in the model's type. wq_b [H d, rank of queries], wk [d, h], weights_proj [H, h], and k_norm, a layer norm
    with bias, of a key's d numbers, for H heads.
    """

    def __init__(self, sizes: IndexerShape, config: MLATransformerConfig) -> None:
        super().__init__()
        self.sizes = sizes
        assert config.q_lora_rank
        linear = functools.partial(torch.nn.Linear, bias=False, dtype=config.params_dtype)
        self.wq_b = linear(config.q_lora_rank, sizes.num_heads * sizes.head_dim)
        self.wk = linear(config.hidden_size, sizes.head_dim)
        self.weights_proj = linear(config.hidden_size, sizes.num_heads)
        self.k_norm = torch.nn.LayerNorm(sizes.head_dim, _NORM_EPS, dtype=config.params_dtype)
        self.requires_grad_(False)

    def queries(self, latent_LR: Tensor, turn: RotaryTurn) -> Tensor:
        """[L, H, d] of the normed latent queries of L tokens; turn: of their rotary positions."""
        heads = self.sizes.num_heads, self.sizes.head_dim
        return self._turned(self.wq_b(latent_LR).unflatten(-1, heads), turn)

    def keys(self, hidden_LH: Tensor, turn: RotaryTurn) -> Tensor:
        """[L, d] of the normed hidden states of L tokens."""
        return self._turned(self.k_norm(self.wk(hidden_LH))[:, None], turn)[:, 0]

    def head_weights(self, hidden_LH: Tensor) -> Tensor:
        """float32 [L, H]: what the heads' scores are multiplied by, but for a factor that all queries have."""
        return self.weights_proj(hidden_LH).float()

    def _turned(self, vectors_LHD: Tensor, turn: RotaryTurn) -> Tensor:
        """The first numbers of each vector turned by its position.

        Where neighbours are pairs, they come apart first: products of queries and keys do not depend on the order.
        """
        width = turn.cos_L1D.shape[-1]
        turned, rest = vectors_LHD.split([width, vectors_LHD.shape[-1] - width], dim=-1)
        if self.sizes.interleaved_rope:
            turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
        first, second = turned.float().chunk(2, dim=-1)
        across = torch.cat([-second, first], dim=-1)
        out = torch.cat([first, second], dim=-1) * turn.cos_L1D + across * turn.sin_L1D
        return torch.cat([out.to(rest.dtype), rest], dim=-1)


def chosen_keys(
    q_LHD: Tensor, w_LH: Tensor, k_TD: Tensor, place_L: Tensor, bounds: list[int], top_k: int
) -> Tensor:
    """int32 [L, top_k]: places in their segment of the keys that each query attends to.

    place_L: of the queries in the row of T tokens, whose segments begin at `bounds`. A query with fewer than top_k keys
    has all, and numbers of later ones, which causal attention leaves out.
    """
    chosen_LK = torch.arange(top_k, dtype=torch.int32, device=q_LHD.device).repeat(len(q_LHD), 1)
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        if end - start <= top_k:
            continue
        keys_ND = k_TD[start:end].float()
        number_N = torch.arange(end - start, device=k_TD.device)
        queries = ((place_L >= start + top_k) & (place_L < end)).nonzero()[:, 0]
        block = max(1, _BLOCK_NUMBERS // (q_LHD.shape[1] * (end - start)))
        for own in queries.split(block):
            scores_BHN = F.relu(q_LHD[own].float() @ keys_ND.T)
            scores_BN = torch.einsum("bh,bhn->bn", w_LH[own], scores_BHN)
            is_later = number_N > (place_L[own] - start)[:, None]
            best = scores_BN.masked_fill(is_later, float("-inf")).topk(top_k, dim=-1)
            chosen_LK[own] = best.indices.int()
    return chosen_LK


class SparseAttention(PackedAttention):
    """Attention of packed rows to the keys in `attention_mask`, as `chosen_keys` returns them; None: to all.

    All keys are multiplied and those that were not chosen are masked: heads of latent attention that is not absorbed
    have keys of their own, and to gather 2,048 of them for each query would move more memory than the products take.
    A mask is made for a block of queries, and again in the backward pass, which would keep a byte for each pair of
    tokens of a segment.
    """

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bucket: KeyBucket, attention_mask: Tensor | None
    ) -> Tensor:
        if attention_mask is None:
            return super()._attend(q, k, v, bucket, None)
        outputs = []
        block = max(1, _BLOCK_NUMBERS // (len(k) * k.shape[2]))
        for first in range(0, q.shape[2], block):
            own = q[:, :, first : first + block]
            attend = functools.partial(
                self._attend_chosen, bucket=bucket, first=first, chosen_LK=attention_mask
            )
            if torch.is_grad_enabled():
                outputs.append(checkpoint(attend, own, k, v, use_reentrant=False))
            else:
                outputs.append(attend(own, k, v))
        return torch.cat(outputs, dim=2)

    def _attend_chosen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bucket: KeyBucket,
        first: int,
        chosen_LK: Tensor,
    ) -> Tensor:
        """Of the bucket's queries from `first` on."""
        end = first + q.shape[2]
        queries_BN = bucket.queries[:, first:end].to(q.device)
        chosen_BNK = chosen_LK.index_select(0, queries_BN.flatten()).unflatten(0, queries_BN.shape)
        num_keys = k.shape[2]
        is_chosen = torch.zeros(*queries_BN.shape, num_keys, dtype=torch.bool, device=q.device)
        is_chosen.scatter_(-1, chosen_BNK.long().clamp_(max=num_keys - 1), True)
        mask = is_chosen[:, None] & bucket.causal_mask(first, end).to(q.device)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.softmax_scale)


class SparseLatentAttention(MLASelfAttention):
    """Megatron's latent attention, whose core gets the chosen keys in place of a mask.

    Each tensor-parallel rank chooses for its part of the tokens. The latent queries are computed once more for it,
    without gradients, so that whatever is computed again in the backward pass depends on the layer's input alone.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: Any,
        layer_number: int,
        *args: Any,
        sizes: IndexerShape,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            config, submodules, layer_number, *args, pg_collection=pg_collection, **kwargs
        )
        self.indexer = Indexer(sizes, config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: RowParams,
        **kwargs: Any,
    ) -> Any:
        assert packed_seq_params.shared is None  # preflight refuses shared prefixes for this layer
        chosen = self._chosen(hidden_states, packed_seq_params)
        return super().forward(
            hidden_states, chosen, *args, packed_seq_params=packed_seq_params, **kwargs
        )

    @torch.no_grad()
    def _chosen(self, hidden_L1H: Tensor, row: RowParams) -> Tensor | None:
        """int32 [tokens of this context-parallel rank, top_k]; None where no segment has more keys than that."""
        sizes = self.indexer.sizes
        bounds: list[int] = row.cu_seqlens_q.tolist()
        longest = int(np.diff(bounds).max())
        if longest <= sizes.top_k:
            return None
        cp_group: dist.ProcessGroup = row.cp_group or self.pg_collection.cp
        tp_group: dist.ProcessGroup = self.pg_collection.tp
        hidden_LH = hidden_L1H[:, 0]
        places = zigzag(np.array(bounds), cp_group.size(), cp_group.rank())
        place_L = torch.from_numpy(places).to(hidden_LH.device)
        if tp_group.size() > 1:
            place_L = place_L.chunk(tp_group.size())[tp_group.rank()]
        positions_T = position_in_segment(row.cu_seqlens_q, bounds[-1])
        turn = self._turn(longest, positions_T[place_L])
        queries = self.indexer.queries(self._latent_queries(hidden_L1H)[:, 0], turn)
        keys_LD = self.indexer.keys(hidden_LH, turn)
        if tp_group.size() > 1:
            keys_LD = gather_shared(keys_LD, tp_group)
        if cp_group.size() > 1:
            order = rank_order(row.cu_seqlens_q, bounds[-1], cp_group.size())
            keys_LD = gather_keys(keys_LD, order.order_T, cp_group)
        weights_LH = self.indexer.head_weights(hidden_LH)
        chosen = chosen_keys(queries, weights_LH, keys_LD, place_L, bounds, sizes.top_k)
        return gather_shared(chosen, tp_group) if tp_group.size() > 1 else chosen

    def _turn(self, length: int, position_L: Tensor) -> RotaryTurn:
        """Of tokens at these positions, all of which are below `length`."""
        angles: Any = self.rotary_pos_emb(length, packed_seq=True)
        scale = 1.0
        if isinstance(angles, tuple):  # with YaRN's scale
            angles, scale = angles
        own_L1D = angles[:, 0][position_L].float()
        return RotaryTurn(own_L1D.cos() * scale, own_L1D.sin() * scale)

    def _latent_queries(self, hidden_L1H: Tensor) -> Tensor:
        """Their norm is in TransformerEngine's next projection."""
        latent, _ = self.linear_q_down_proj(hidden_L1H)
        merged = getattr(self.linear_q_up_proj, "layer_norm_weight", None)
        if merged is None:
            return self.q_layernorm(latent)
        return F.rms_norm(latent, merged.shape, merged, self.config.layernorm_epsilon)


def use_sparse_attention(sizes: IndexerShape, layer_specs: list[ModuleSpec]) -> None:
    """Give the layers of these specs an indexer, and attention to what it chooses."""
    for spec in layer_specs:
        attention: Any = spec.submodules.self_attention  # type: ignore[union-attr]
        attention.module = SparseLatentAttention
        attention.params = {**attention.params, "sizes": sizes}
        attention.submodules.core_attention = SparseAttention

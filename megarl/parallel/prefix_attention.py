"""Attention along every sequence of a row that holds shared prefixes once (prefixes.py).

A token attends to all of the branches that lead to its own, and to its own branch up to itself. The keys of a branch
meet all queries behind it together, and what a query gets of several branches is joined by log-sum-exp (Hydragen, arXiv
2402.05099). So no key is there once for each sequence, and memory grows with the tokens of the row alone: the backward
pass computes probabilities again, as FlashAttention does (arXiv 2205.14135, algorithm 4).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.device import DEVICE
from megarl.parallel.packing import SharedPrefixes

# Of queries and keys, computed at a time: few enough for a CPU's cache, and enough to keep a GPU busy.
_SCORES = 1 << 25 if DEVICE == "cuda" else 1 << 20
_LEAST_QUERIES = 16  # of a block at a time, even so: products of fewer are slow
_KEYS = 4096  # of blocks at a time


@dataclass(frozen=True)
class _BlockBatch:
    """B blocks alike in size, each of Q queries that meet K keys, padded to the longest; no query is in two blocks.

    queries [B, Q] and keys [B, K]: places in the row. num_seen [B, Q]: a query attends to so many of the first keys of
    its block, and a padded one to none. real: the places in [B x Q] of those that are no padding. is_whole: all queries
    attend to all keys.
    """

    queries: Tensor
    keys: Tensor
    num_seen: Tensor
    real: Tensor
    is_whole: bool


class _Block(NamedTuple):
    """Neighbouring queries and neighbouring keys. is_causal: they are the same tokens."""

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    is_causal: bool


@functools.lru_cache(maxsize=8)
def _block_batches(
    shared: SharedPrefixes, num_heads: int, device: torch.device
) -> list[_BlockBatch]:
    """All that the queries of a row meet. Cached, because every layer of a micro-batch asks for it."""
    blocks_by_size: dict[tuple[int, int, int], list[_Block]] = {}

    def add(level: int, block: _Block) -> None:
        size = level, (block.num_queries - 1).bit_length(), (block.num_keys - 1).bit_length()
        blocks_by_size.setdefault(size, []).append(block)

    end = 0
    for branch in shared.branches:
        size = branch.end - branch.first
        add(-1, _Block(branch.first, size, branch.first, size, is_causal=True))
        # branches of one level lead to different tokens
        if num_behind := branch.reach - branch.end:
            behind = _Block(branch.end, num_behind, branch.first, size, is_causal=False)
            add(branch.level, behind)
        end = branch.end
    if padding := len(shared.position_L) - end:
        add(-1, _Block(end, padding, end, padding, is_causal=True))
    batches: list[_BlockBatch] = []
    for blocks in blocks_by_size.values():
        count = max(1, _KEYS // max(block.num_keys for block in blocks))
        for first in range(0, len(blocks), count):
            batches += _batches_of(blocks[first : first + count], num_heads, device)
    return batches


def _batches_of(
    blocks: Sequence[_Block], num_heads: int, device: torch.device
) -> Iterator[_BlockBatch]:
    """Blocks alike in size, with some of their queries at a time and the keys that any of these attends to."""
    columns = torch.tensor(blocks).T[..., None]
    first_query, num_queries, first_key, num_keys, is_causal = columns
    query = torch.arange(int(num_queries.max()))
    key = torch.arange(int(num_keys.max()))
    # padded with places that the block has
    queries = first_query + torch.minimum(query, num_queries - 1)
    keys = first_key + torch.minimum(key, num_keys - 1)
    num_seen = torch.where(is_causal == 1, query + 1, num_keys)
    num_seen = torch.where(query < num_queries, num_seen, 0)
    count = max(_LEAST_QUERIES, _SCORES // (keys.numel() * num_heads))
    for first in range(0, len(query), count):
        few_seen = num_seen[:, first : first + count]
        most_seen = int(few_seen.max())
        yield _BlockBatch(
            queries=queries[:, first : first + count].to(device),
            keys=keys[:, :most_seen].to(device),
            num_seen=few_seen.to(device),
            real=few_seen.flatten().nonzero()[:, 0].to(device),
            is_whole=bool((few_seen == most_seen).all()),
        )


def prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, shared: SharedPrefixes, scale: float
) -> Tensor:
    """query [L, heads, d], key [L, kv heads, d], value [L, kv heads, v] -> [L, heads, v]."""
    return _PrefixAttention.apply(query, key, value, shared, scale)


class _PrefixAttention(torch.autograd.Function):
    """Computes in float32, or in float64 where the queries are."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shared: SharedPrefixes, scale: float
    ) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        num_heads = query.shape[1]
        joined = value.new_zeros(len(query), num_heads, value.shape[2], dtype=dtype)
        lse = value.new_full((len(query), num_heads, 1), -torch.inf, dtype=dtype)
        for batch in _block_batches(shared, num_heads, query.device):
            scores = _scores(batch, query, key, scale)
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest).exp_()
            total = weights.sum(-1, keepdim=True)
            output = weights @ _grouped(value, batch.keys, key.shape[1]) / total
            _join(joined, lse, batch, output, largest + total.log())
        output = joined.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.shared = shared
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        groups = key.shape[1]
        grad = grad.to(lse.dtype)
        # of each query the product of its result and the gradient of this
        product = (grad * output).sum(-1, keepdim=True)
        grads = [tensor.new_zeros(tensor.shape, dtype=lse.dtype) for tensor in (query, key, value)]
        grad_query, grad_key, grad_value = grads
        for batch in _block_batches(ctx.shared, query.shape[1], query.device):
            of_queries = functools.partial(_grouped, places=batch.queries, groups=groups)
            of_keys = functools.partial(_grouped, places=batch.keys, groups=groups)
            probs = _scores(batch, query, key, ctx.scale).sub_(of_queries(lse)).exp_()
            few_grad = of_queries(grad)
            _add(grad_value, batch.keys, probs.transpose(2, 3) @ few_grad)
            grad_probs = few_grad @ of_keys(value).transpose(2, 3)
            grad_scores = grad_probs.sub_(of_queries(product)).mul_(probs)
            _add(grad_query, batch.queries, grad_scores @ (of_keys(key) * ctx.scale))
            by_key = grad_scores.transpose(2, 3) @ (of_queries(query) * ctx.scale)
            _add(grad_key, batch.keys, by_key)
        typed = [
            of_input.to(tensor.dtype)
            for of_input, tensor in zip(grads, (query, key, value), strict=True)
        ]
        return *typed, None, None


def _scores(batch: _BlockBatch, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[B, kv heads, heads of each x Q, K], -inf where a query does not attend to the key."""
    groups = key.shape[1]
    keys = _grouped(key, batch.keys, groups)
    scores = (_grouped(query, batch.queries, groups) * scale) @ keys.transpose(2, 3)
    if not batch.is_whole:
        column = torch.arange(batch.keys.shape[1], device=scores.device)
        is_hidden = column >= batch.num_seen[..., None]  # [B, Q, K]
        by_head = scores.unflatten(2, (-1, batch.queries.shape[1]))
        by_head.masked_fill_(is_hidden[:, None, None], -torch.inf)
    return scores


def _grouped(tensor: Tensor, places: Tensor, groups: int) -> Tensor:
    """[L, heads, d] -> [B, groups, heads of each x N, d] at the places [B, N], in the type of computation."""
    rows = tensor.index_select(0, places.flatten()).unflatten(0, places.shape)
    by_group = rows.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return by_group.to(torch.promote_types(tensor.dtype, torch.float32))


def _by_row(grouped: Tensor, num_places: int) -> Tensor:
    """The inverse of `_grouped`: [B, groups, heads of each x N, d] -> [B, N, heads, d]."""
    return grouped.unflatten(2, (-1, num_places)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _join(
    joined: Tensor, lse: Tensor, batch: _BlockBatch, grouped: Tensor, grouped_lse: Tensor
) -> None:
    """Add to the results of some queries what these get of more keys, both as of `_grouped`."""
    num_queries = batch.queries.shape[1]
    output, batch_lse = (
        _by_row(values, num_queries).flatten(0, 1).index_select(0, batch.real)
        for values in (grouped, grouped_lse)
    )
    places = batch.queries.flatten().index_select(0, batch.real)
    before = lse.index_select(0, places)
    after = torch.logaddexp(before, batch_lse)
    kept = joined.index_select(0, places) * (before - after).exp()
    joined.index_copy_(0, places, kept + output * (batch_lse - after).exp())
    lse.index_copy_(0, places, after)


def _add(total: Tensor, places: Tensor, grouped: Tensor) -> None:
    """Add gradients to those of the row; what is padded has none."""
    total.index_add_(0, places.flatten(), _by_row(grouped, places.shape[1]).flatten(0, 1))

"""Attention on CPU for many sequences in one call.

SGLang's `torch_native` attention calls torch once a sequence, which for a tiny model is half of a rollout's time. In a
shared call the last bits of a sequence depend on its company: engines whose samples must repeat keep SGLang's own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_CALL_NUMBERS = 2**18  # in the keys of one call: more of them, with their values, leave the processor's caches
_FREE_KEYS = 1024  # to read so many takes no longer than another call


def attend_together() -> None:
    """Decoding sequences share calls, and so do those whose last token alone is to be extended, the rest being cached.

    Longer extensions would gain nothing. Attention to an encoder or in both directions goes SGLang's own way.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend: Any = TorchNativeAttnBackend
    decode_each, extend_each = backend._run_sdpa_forward_decode, backend._run_sdpa_forward_extend

    def decode(self: Any, query: torch.Tensor, output: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
        k_cache, v_cache, slots, requests, num_keys, encoder_lens = where
        if encoder_lens is not None or len(num_keys) < 2:
            return decode_each(self, query, output, *where, **options)
        return _attend(_Batch(query, output, k_cache, v_cache, slots, requests, num_keys), options)

    def extend(self: Any, query: torch.Tensor, output: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
        k_cache, v_cache, slots, requests, num_keys, prefixes, num_queries, encoder_lens = where
        short = num_queries == 1
        if encoder_lens is not None or not options["causal"] or int(short.sum()) < 2:
            return extend_each(self, query, output, *where, **options)
        rows = _rows(short, num_queries)
        caches = (k_cache, v_cache, slots)
        output[rows] = _attend(_Batch(query[rows], output[rows], *caches, requests[short], num_keys[short]), options)
        long, rows = ~short, _rows(~short, num_queries)
        lengths = (requests[long], num_keys[long], prefixes[long], num_queries[long])
        output[rows] = extend_each(self, query[rows], output[rows], *caches, *lengths, None, **options)
        return output

    backend._run_sdpa_forward_decode, backend._run_sdpa_forward_extend = decode, extend


def _rows(chosen: torch.Tensor, num_queries: torch.Tensor) -> torch.Tensor:
    """Which rows are queries of the chosen sequences, where the queries of all lie one after the other."""
    return chosen.repeat_interleave(num_queries).nonzero().flatten()


@dataclass(frozen=True)
class _Batch:
    """Sequences, the query of the last token of each, and where their keys and values lie.

    query and output: [sequences, heads, head size], the output's head size being that of a value. k_cache and v_cache:
    [slots, KV heads, head size]. slots [requests, positions]: where a request's tokens lie in them. requests and
    num_keys (with the last token's own): [sequences].
    """

    query: torch.Tensor
    output: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    requests: torch.Tensor
    num_keys: torch.Tensor


def _attend(batch: _Batch, options: dict[str, Any]) -> torch.Tensor:
    """Fill the batch's output. options: of SGLang, `scaling` and `sliding_window_size`."""
    num_keys, order = batch.num_keys.sort()
    requests = batch.requests[order]
    ends = num_keys[:, None]
    for start, end in shared_calls(num_keys.tolist(), _CALL_NUMBERS // batch.k_cache[0].numel()):
        members = order[start:end]
        keys, values = _keys_and_values(batch, requests[start:end], ends[start:end])
        out = _attention(batch.query[members], keys, values, ends[start:end], options)
        batch.output[members] = out
    return batch.output


def shared_calls(num_keys: Sequence[int], most_keys: int) -> Iterator[tuple[int, int]]:
    """The sequences (start, end) of each call, of those that are sorted by length.

    A call is padded to its longest sequence. That doubles its work at most, unless there is little of it; and it has
    no more than most_keys unless one sequence has.
    """
    start = own_keys = 0
    for index, longest in enumerate(num_keys):
        padded = (index + 1 - start) * longest
        if index > start and padded > min(most_keys, 2 * (own_keys + longest) + _FREE_KEYS):
            yield start, index
            start, own_keys = index, 0
        own_keys += longest
    if num_keys:
        yield start, len(num_keys)


def _keys_and_values(batch: _Batch, requests: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [sequences, KV heads, keys, head size]; ends [sequences, 1] is the number of keys of each, in rising order.

    A sequence is filled up with its own last token: no value of another one reaches it, not even a NaN.
    """
    longest = int(ends[-1])
    table = batch.slots[:, :longest].index_select(0, requests)
    slots = table.gather(1, torch.minimum(torch.arange(longest), ends - 1)).flatten()
    keys, values = (
        cache.index_select(0, slots).unflatten(0, table.shape).transpose(1, 2).to(batch.query.dtype)
        for cache in (batch.k_cache, batch.v_cache)
    )
    return keys, values


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """query: [sequences, heads, head size]; the same of the result, with the values' head size.

    The heads that share a KV head are several queries to it: repeating the keys would cost more.
    """
    position = torch.arange(keys.shape[2])
    seen = position < ends
    window = options["sliding_window_size"]
    if window is not None and window > -1:
        seen &= position >= ends - 1 - window
    grouped = query.unflatten(1, (keys.shape[1], -1))
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[:, None, None], scale=options["scaling"])
    return out.flatten(1, 2)

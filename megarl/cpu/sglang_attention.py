"""Batched attention on CPU.

SGLang's `torch_native` attention calls torch once a sequence, which for a tiny model is half of a rollout's time. In a
batched call the last bits of a sequence depend on the rest of the batch, so seeded engines keep SGLang's own attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# numbers in the keys of one call: more do not fit the processor's caches with their values
_CALL_NUMBERS = 2**18
_FREE_KEYS = 1024  # padding of so many keys costs no more than another call


def batch_attention() -> None:
    """Batch the attention of decoding, and of prefills whose prompt is cached except for its last token.

    Longer prefills would gain nothing. Cross-attention and bidirectional attention use SGLang's own functions.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend: Any = TorchNativeAttnBackend
    decode_each = backend._run_sdpa_forward_decode
    extend_each = backend._run_sdpa_forward_extend

    def decode(self: Any, query: Tensor, output: Tensor, *where: Any, **options: Any) -> Tensor:
        k_cache, v_cache, slots, requests, num_keys, encoder_lens = where
        if encoder_lens is not None or len(num_keys) < 2:
            return decode_each(self, query, output, *where, **options)
        return _attend(_Batch(query, output, k_cache, v_cache, slots, requests, num_keys), options)

    def extend(self: Any, query: Tensor, output: Tensor, *where: Any, **options: Any) -> Tensor:
        k_cache, v_cache, slots, requests, num_keys, prefixes, num_queries, encoder_lens = where
        short = num_queries == 1
        if encoder_lens is not None or not options["causal"] or int(short.sum()) < 2:
            return extend_each(self, query, output, *where, **options)
        rows = _rows(short, num_queries)
        caches = (k_cache, v_cache, slots)
        output[rows] = _attend(
            _Batch(query[rows], output[rows], *caches, requests[short], num_keys[short]), options
        )
        long = ~short
        rows = _rows(~short, num_queries)
        lengths = (requests[long], num_keys[long], prefixes[long], num_queries[long])
        output[rows] = extend_each(
            self, query[rows], output[rows], *caches, *lengths, None, **options
        )
        return output

    backend._run_sdpa_forward_decode = decode
    backend._run_sdpa_forward_extend = extend


def _rows(chosen: Tensor, num_queries: Tensor) -> Tensor:
    """The rows of the chosen sequences in the concatenated queries of all sequences."""
    return chosen.repeat_interleave(num_queries).nonzero().flatten()


@dataclass(frozen=True)
class _Batch:
    """A batch of sequences with one query each, that of the last token.

    query and output: [sequences, heads, head size], where the output has the values' head size. k_cache and v_cache:
    [slots, KV heads, head size]. slots [requests, positions]: the cache slot of each token. requests: [sequences], rows
    of slots. num_keys: [sequences], including the last token's key.
    """

    query: Tensor
    output: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    requests: Tensor
    num_keys: Tensor


def _attend(batch: _Batch, options: dict[str, Any]) -> Tensor:
    """Fill the batch's output. options: SGLang's `scaling` and `sliding_window_size`."""
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
    """Split sequences, sorted by length, into calls; yields the (start, end) of each.

    A call is padded to its longest sequence. Padding at most doubles the keys, except for _FREE_KEYS, and a call has at
    most most_keys keys unless a single sequence has more.
    """
    start = own_keys = 0
    for index, longest in enumerate(num_keys):
        padded = (index + 1 - start) * longest
        if index > start and padded > min(most_keys, 2 * (own_keys + longest) + _FREE_KEYS):
            yield start, index
            start = index
            own_keys = 0
        own_keys += longest
    if num_keys:
        yield start, len(num_keys)


def _keys_and_values(batch: _Batch, requests: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [sequences, KV heads, keys, head size]; ends [sequences, 1]: numbers of keys, ascending.

    A sequence is padded with its own last token, so that no value of another sequence reaches it, not even a NaN.
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
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ends: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Attention of query [sequences, heads, head size]; the result has the values' head size.

    Heads that share a KV head (GQA) become several queries to it, because repeating the keys would cost more.
    """
    position = torch.arange(keys.shape[2])
    seen = position < ends
    window = options["sliding_window_size"]
    if window is not None and window > -1:
        seen &= position >= ends - 1 - window
    grouped = query.unflatten(1, (keys.shape[1], -1))
    out = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=seen[:, None, None], scale=options["scaling"]
    )
    return out.flatten(1, 2)

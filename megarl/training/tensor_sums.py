"""Checksums of whole tensors on their device, with the weights of a verified reshard (resharding/verify.py)."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from megarl.device import DEVICE
from megarl.resharding.verify import WORD_BYTES, word_weights

BLOCK_BYTES = 2048  # that have one weight


def tensor_sum(tensor: Tensor) -> Tensor:
    """A 64-bit sum of a tensor's bytes, int64 [] on its device, in one pass and without a copy.

    Each block has a weight by its position: another word, or blocks in another order, change the sum.
    """
    content = tensor.detach().reshape(-1).view(torch.uint8)
    if content.storage_offset() % WORD_BYTES:
        content = content.clone()
    whole = len(content) // BLOCK_BYTES * BLOCK_BYTES
    sums = content[:whole].view(torch.int64).view(-1, BLOCK_BYTES // WORD_BYTES).sum(1)
    rest = content[whole:]
    if len(rest):
        rest = torch.cat([rest, rest.new_zeros(BLOCK_BYTES - len(rest))])
        sums = torch.cat([sums, rest.view(torch.int64).sum(0, keepdim=True)])
    return _weighted(sums)


def sum_of_all(tensors: Iterable[Tensor]) -> Tensor:
    """The checksum of several tensors together, in their order."""
    sums = [tensor_sum(tensor) for tensor in tensors]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=DEVICE)
    return _weighted(torch.stack(sums))


def _weighted(words: Tensor) -> Tensor:
    return (words * _weights(len(words))).sum()


@functools.lru_cache(maxsize=64)
def _weights(number: int) -> Tensor:
    """Kept, because a model has many tensors of few sizes."""
    return word_weights(number)

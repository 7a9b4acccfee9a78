"""A rank's tensors with the names of the weight map, which number the model chunks where there are several."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.types.tensors import ModelChunks


def named_parameters(chunks: ModelChunks) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters of a rank: weights, and the factors of adapters."""
    for prefix, chunk in _prefixed(chunks):
        yield from chunk.named_parameters(prefix)


def named_buffers(chunks: ModelChunks) -> Iterator[tuple[str, torch.Tensor]]:
    """All buffers of a rank."""
    for prefix, chunk in _prefixed(chunks):
        yield from chunk.named_buffers(prefix)


def named_modules(chunks: ModelChunks) -> dict[str, torch.nn.Module]:
    """All modules of a rank by the paths of their weights."""
    return {
        path: module
        for prefix, chunk in _prefixed(chunks)
        for path, module in chunk.named_modules(prefix=prefix)
    }


def _prefixed(chunks: ModelChunks) -> Iterator[tuple[str, torch.nn.Module]]:
    if len(chunks) == 1:
        yield "", chunks[0]
        return
    for number, chunk in enumerate(chunks):
        yield f"vpp{number}", chunk

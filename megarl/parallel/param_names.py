"""A rank's tensors with the names of the weight map, which number the model chunks where there are several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def named_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters of a rank: weights, and the factors of adapters."""
    for number, chunk in enumerate(chunks):
        yield from (
            (_prefix(number, chunks) + name, param) for name, param in chunk.named_parameters()
        )


def named_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """All buffers of a rank."""
    for number, chunk in enumerate(chunks):
        yield from (
            (_prefix(number, chunks) + name, buffer) for name, buffer in chunk.named_buffers()
        )


def _prefix(number: int, chunks: Sequence[torch.nn.Module]) -> str:
    if len(chunks) > 1:
        return f"vpp{number}."
    return ""

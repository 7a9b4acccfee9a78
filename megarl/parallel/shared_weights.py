"""A model that computes with another's frozen weights: adapters and a score head of its own, all else in its memory.

The other model's process shares its parameters (resharding/memory_handles.py); both have the same layout and are on the
same GPU, so that every frozen weight of a rank is one of the other's rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.model.lora_pairs import is_factor
from megarl.parallel.model import ROUTER_BIAS, Score


def heads(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The weight of the score head, where this rank's chunks have one."""
    found: list[Any] = [getattr(chunk, "output_layer", None) for chunk in chunks]
    return [head.weight for head in found if isinstance(head, Score)]


def bind(chunks: Sequence[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Put `weights` (by the weight map's names) in the places of the chunks' frozen ones, whose memory is freed.

    Returns the names of those that were replaced. Raises ValueError for a weight that is missing or of another extent.
    """
    own = {id(head) for head in heads(chunks)}
    replaced = set[str]()
    for number, chunk in enumerate(chunks):
        prefix = f"vpp{number}." if len(chunks) > 1 else ""
        frozen = [(name, param) for name, param in chunk.named_parameters() if id(param) not in own]
        frozen += [
            (name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS)
        ]
        for name, weight in frozen:
            if is_factor(name):
                continue
            found = weights.get(prefix + name)
            if found is None or found.shape != weight.shape or found.dtype != weight.dtype:
                if found is None:
                    has = "no such weight"
                else:
                    has = f"{list(found.shape)} {found.dtype}"
                raise ValueError(
                    f"{prefix}{name} is {list(weight.shape)} {weight.dtype}, the other model has {has}"
                )
            weight.data = found
            replaced.add(prefix + name)
    return frozenset(replaced)

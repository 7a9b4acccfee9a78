"""A model that computes with another's frozen weights: adapters and a score head of its own, all else in its memory.

The other model's process shares its parameters (resharding/memory_handles.py); both have the same layout and are on the
same GPU, so that every frozen weight of a rank is one of the other's rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.model.lora_pairs import is_factor
from megarl.parallel.model import ROUTER_BIAS, Score
from megarl.parallel.param_names import named_buffers, named_parameters
from megarl.types.tensors import ModelChunks, NamedTensors


def heads(chunks: ModelChunks) -> list[torch.nn.Parameter]:
    """The weight of the score head, where this rank's chunks have one."""
    layers: list[Any] = [getattr(chunk, "output_layer", None) for chunk in chunks]
    return [head.weight for head in layers if isinstance(head, Score)]


def bind(chunks: ModelChunks, weights: NamedTensors) -> frozenset[str]:
    """Put `weights` (by the weight map's names) in the places of the chunks' frozen ones, whose memory is freed.

    Returns the names of those that were replaced. Raises ValueError for a weight that is missing or of another extent.
    """
    head_ids = {id(head) for head in heads(chunks)}
    frozen: dict[str, Tensor] = {
        name: param
        for name, param in named_parameters(chunks)
        if id(param) not in head_ids and not is_factor(name)
    }
    frozen |= {name: bias for name, bias in named_buffers(chunks) if name.endswith(ROUTER_BIAS)}
    for name, weight in frozen.items():
        shared = weights.get(name)
        if shared is None:
            raise ValueError(f"the other model has no weight {name}")
        if shared.shape != weight.shape or shared.dtype != weight.dtype:
            has = f"{list(shared.shape)} {shared.dtype}"
            extent = f"{list(weight.shape)} {weight.dtype}"
            raise ValueError(f"{name} is {extent}, and {has} in the other model")
        weight.data = shared
    return frozenset(frozen)

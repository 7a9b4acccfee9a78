"""All that the next updates of a rank depend on, as bytes: for a copy of it in the memory of another process.

A rank in the same place of the same layout takes the copy, and goes on to the last bit as the one that gave it. Nothing
here is collective.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megarl.parallel.dist_checkpoint import random_state, set_random_state, start_states
from megarl.parallel.optimizer import stepping
from megarl.types import ByteArray
from megarl.types.tensors import ModelChunks


class StateBytes:
    """Tensors of a rank as one sequence of bytes, which is read and written in parts.

    It is valid while the tensors stay where they are: until the rank computes, or its memory is handed over.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: contiguous, on any device."""
        self._parts = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        self._ends = [*accumulate(len(part) for part in self._parts)]

    @property
    def num_bytes(self) -> int:
        if not self._ends:
            return 0
        return self._ends[-1]

    def read(self, start: int, end: int) -> ByteArray:
        """A copy of the bytes from `start` to before `end`."""
        copied = np.empty(end - start, np.uint8)
        for part, target in self._cut(torch.from_numpy(copied), start):
            target.copy_(part)
        return copied

    def write(self, start: int, content: ByteArray) -> None:
        """Overwrite the bytes from `start` on."""
        # of an array that Ray has received nothing may be written
        given = torch.from_numpy(content.copy())
        for part, source in self._cut(given, start):
            part.copy_(source)

    def _cut(self, content: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """The tensors' bytes that lie where `content` does, each with its piece of that."""
        end = start + len(content)
        pairs = []
        for part, part_end in zip(self._parts, self._ends, strict=True):
            part_start = part_end - len(part)
            first = max(start, part_start)
            last = min(end, part_end)
            if first < last:
                own = part[first - part_start : last - part_start]
                pairs.append((own, content[first - start : last - start]))
        return pairs


def optimizer_tensors(optimizer: ChainedOptimizer, chunks: ModelChunks) -> list[Tensor]:
    """Master weights, moments, step counts and scales, in an order that the layout decides; not the model's weights."""
    start_states(optimizer)
    in_model = {param.untyped_storage()._cdata for chunk in chunks for param in chunk.parameters()}
    tensors = []
    for chained in stepping(optimizer):
        inner: Any = chained.optimizer
        scales = getattr(inner, "_scales", {})  # of TransformerEngine, for moments in 8 and 16 bits
        for group in inner.param_groups:
            for shard in group["params"]:
                # in float32 a shard is a view of the model's weights
                own = [] if shard.untyped_storage()._cdata in in_model else [shard]
                states = {**inner.state[shard]}
                kept = [states[key] for key in sorted(states) if torch.is_tensor(states[key])]
                kept += [value for _, value in sorted(scales.get(shard, {}).items())]
                tensors += own + kept
    return tensors


def small_state(optimizer: ChainedOptimizer) -> bytes:
    """The random generators, and the number of steps where the optimizer counts them by groups."""
    content = io.BytesIO()
    torch.save({"random": random_state(), "steps": _steps(optimizer)}, content)
    return content.getvalue()


def set_small_state(optimizer: ChainedOptimizer, content: bytes) -> None:
    """The opposite."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    set_random_state(state["random"])
    groups = [group for chained in stepping(optimizer) for group in chained.optimizer.param_groups]
    for group, step in zip(groups, state["steps"], strict=True):
        if step is None:  # before the first one
            group.pop("step", None)
        else:
            group["step"] = step


def _steps(optimizer: ChainedOptimizer) -> list[int | None]:
    return [
        group.get("step")
        for chained in stepping(optimizer)
        for group in chained.optimizer.param_groups
    ]

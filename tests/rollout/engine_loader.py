"""A weight loader for tests: scales every parameter in place, or fails on one rank. SGLang imports it by name."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    (name, content), *_ = named_tensors
    message = json.loads(bytes(content.tolist()))
    if message.get("fail_on") == dist.get_rank():
        raise ValueError(f"shard of {name} is wrong")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(message.get("scale", 1.0))

"""Tensors and modules as annotations name them; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

NamedTensors: TypeAlias = "Mapping[str, torch.Tensor]"
ModelChunks: TypeAlias = (
    "Sequence[torch.nn.Module]"  # of a rank, one for each of its pipeline stages
)

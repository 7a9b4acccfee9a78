"""How much a rank holds of a model, in numbers alone: without Megatron, which counts them (meta.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkSize:
    """Elements that one rank holds of one model chunk.

    dense: whose optimizer state is split over the ranks dp x cp; expert: over the expert-data-parallel ones; frozen:
    without gradient. buffer_bytes: of what is no parameter. padding: of the others, rows behind the vocabulary's end.
    """

    dense: int
    expert: int
    frozen: int
    buffer_bytes: int
    padding: int

    @property
    def trained(self) -> int:
        return self.dense + self.expert

    @property
    def elements(self) -> int:
        return self.dense + self.expert + self.frozen


@dataclass(frozen=True)
class Whole:
    """Elements of the whole model: without the multi-token prediction layers, of its routed experts, of those layers.

    The vocabulary's padding is not among them.
    """

    parameters: int
    routed: int
    mtp_parameters: int

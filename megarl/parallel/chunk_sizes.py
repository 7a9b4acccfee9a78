"""The sizes of models and their chunks. Megatron counts them (meta.py), and is not needed here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkSize:
    """Elements of the part of one model chunk that one rank holds.

    dense: parameters whose optimizer state is split over the ranks of dp x cp; expert: over the expert-data-parallel
    ranks; frozen: parameters without gradient. buffer_bytes: of buffers, which are no parameters. padding: elements
    of the above in rows beyond the vocabulary's end.
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
    """Elements of a whole model without its multi-token prediction layers, of its routed experts, of those layers.

    The vocabulary's padding is not counted.
    """

    parameters: int
    routed: int
    mtp_parameters: int

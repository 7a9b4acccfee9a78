"""Adapters (LoRA) merged into the weights as these are sent: W + (alpha / rank) B A, in float32 and rounded once.

The factors of a rank's part of a weight are on that rank (lora_map.py), so merging needs no message, and the weights
themselves stay as they are. The result of an element does not depend on the box that asks for it, because it is
computed in tiles that begin at fixed places of the rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.parallel.lora_pairs import LoraSize, factor_name, factor_param
from megarl.resharding.shards import STACK, Cell, Shard, Size, verify_params, views

TILE_ROWS, TILE_COLS = 128, 2048
SCRATCH_BYTES = 12  # for each element of a tile: of the delta, of the weight and of their sum, in float32

Params = Mapping[str, torch.Tensor]


class MergedBox(NamedTuple):
    """Rows and columns of a rank's part of a weight, whose elements are computed when they are read.

    weight: the whole part, [1, rows, cols]; a, b: its factors [rank, cols] and [rows, rank]. start: the box's first row
    and column there; shape: of the box.
    """

    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    start: tuple[int, int]
    shape: Size

    @property
    def scratch_bytes(self) -> int:
        """The temporary memory of `write`."""
        _, rows, cols = self.weight.shape
        return SCRATCH_BYTES * min(rows, TILE_ROWS) * min(cols, TILE_COLS)

    def write(self, target: torch.Tensor) -> None:
        """Write the merged elements to a tensor of the box's shape, rounded once, to the weight's type."""
        (row, col), (_, num_rows, num_cols) = self.start, self.shape
        for top, bottom in _grid(row, row + num_rows, TILE_ROWS, self.weight.shape[1]):
            for left, right in _grid(col, col + num_cols, TILE_COLS, self.weight.shape[2]):
                first, last = max(top, row), min(bottom, row + num_rows)
                begin, end = max(left, col), min(right, col + num_cols)
                merged = self._tile(top, bottom, left, right)[first - top : last - top, begin - left : end - left]
                target[0, first - row : last - row, begin - col : end - col].copy_(merged)

    def _tile(self, top: int, bottom: int, left: int, right: int) -> torch.Tensor:
        delta = self.b[top:bottom].float() @ self.a[:, left:right].float()
        weight = self.weight[0, top:bottom, left:right]
        return torch.add(weight.float(), delta, alpha=self.scale).to(weight.dtype)


def _grid(start: int, end: int, step: int, size: int) -> Iterator[tuple[int, int]]:
    """The tiles of [0, size) that a range touches."""
    for first in range(start // step * step, end, step):
        yield first, min(first + step, size)


@dataclass(frozen=True)
class Merge:
    """The adapters of one training rank, for reading its weights as engines and checkpoints get them.

    weights: the shards of the rank's weights by name; factors: of its adapters, by the names in the rank's model.
    """

    size: LoraSize
    weights: Mapping[str, Sequence[Shard]]
    factors: Params

    @staticmethod
    def of(size: LoraSize, weights: Sequence[Shard], shards: Sequence[Shard], factors: Params) -> Merge:
        """shards: those of the factors, which are verified. Raises LayoutError where they do not describe them."""
        verify_params(shards, factors)
        names = {shard.name for shard in shards}
        by_name: dict[str, list[Shard]] = {}
        for shard in weights:
            if factor_name(shard.name, "B") in names:
                by_name.setdefault(shard.name, []).append(shard)
        return Merge(size, by_name, factors)

    def boxes(self, name: str, params: Params, param: str, at: Cell, size: Size) -> list[MergedBox] | None:
        """As `shards.views`, for a box of the weight `name`; None where the weight has no adapter.

        A fused layer may have several shards of a weight, of which the box lies in one.
        """
        held = [one for one in self.weights.get(name, ()) if one.param == param and _contains(one, at)]
        if not held:
            return None
        (shard,), first_row = held, min(one.rows[0] for one in self.weights[name] if one.param == param)
        above = shard.rows[0] - first_row  # rows of B before the shard's
        is_expert = STACK in name
        found = []
        for number in range(at[0], at[0] + size[0]):
            own, scale = param.format(number) if STACK in param else param, self.size.scale_of(is_expert)
            (weight,) = views(params, own, (0, *shard.at[1:]), (1, *shard.size[1:]))
            a, b = (self.factors[factor_param(own, name, factor)] for factor in "AB")
            start = at[1] - shard.at[1], at[2] - shard.at[2]
            of_shard = b[above : above + shard.size[1]]
            found.append(MergedBox(weight, a, of_shard, scale, start, (1, *size[1:])))
        return found


def _contains(shard: Shard, at: Cell) -> bool:
    """Whether a cell of the parameter is one of the shard's."""
    ends = zip(shard.at[1:], shard.size[1:], at[1:], strict=True)
    return all(start <= cell < start + number for start, number, cell in ends)

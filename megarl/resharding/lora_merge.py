"""Adapters (LoRA) merged into weights: W + (alpha / rank) B A, in float32 and rounded once.

They are merged as weights are sent, which stay as they are (float32), or in the trainer's own parameters
(training/merged_weights.py). The factors of a rank's part of a weight are on that rank (lora_map.py), so merging needs
no message. The result of an element does not depend on the box that asks for it, because it is
computed in tiles that begin at fixed places of the rank's part.

In a 16-bit type rounding to the nearest number loses most of a delta that is small beside its weight. Stochastic
rounding keeps it in the mean: each element is rounded up with the probability that its distance says, by a hash of its
place in the whole tensor and of the version, so that boxes do not matter, nor layouts but for sums in float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.device import DEVICE
from megarl.model.lora_pairs import LoraSize, Rounding, factor_name, factor_param
from megarl.model.shape import ModelShape
from megarl.model.tensors import STACK, Size
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import lora_map, megatron_map
from megarl.resharding.shards import Cell, Shard, verify_params, views
from megarl.types.tensors import NamedTensors

TILE_ROWS = 128
TILE_COLS = 2048
# For each element of a tile: delta, sum, and rounded sum or change, in float32; a 64-bit hash, and its parts.
SCRATCH_BYTES: Mapping[Rounding, int] = {"nearest": 12, "stochastic": 12 + 24}
_LOW_BITS = {torch.bfloat16: 16}  # of a float32, which a type drops

# David Stafford's "Mix13" of a 64-bit number, as in splitmix64 (Steele et al. 2014), as signed numbers.
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
# that fit into a signed number beside rows, columns and a tensor's key; then they begin again
_VERSIONS = 1 << 15

Params = NamedTensors


@dataclass
class _RoundingState:
    """How all boxes round. kept: see `Merge.kept_share`.

    version: of the weights; None outside exchanges, where weights are rounded to nearest, also into exported files.
    """

    rounding: Rounding
    version: int | None = None
    kept: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64, device=DEVICE))


class MergedBox(NamedTuple):
    """Rows and columns of a rank's part of a weight, whose elements are computed when they are read.

    weight: the whole part, [1, rows, cols]; a, b: its factors [rank, cols] and [rows, rank]. start: the box's first row
    and column there; shape: of the box. place: the part's first row and column in the whole tensor, whose name gives
    the key of its random numbers. exchange: the current one, of the version that is read.
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float
    start: tuple[int, int]
    shape: Size
    place: tuple[int, int]
    key: int
    exchange: _RoundingState

    @property
    def scratch_bytes(self) -> int:
        """The temporary memory of `write`."""
        _, rows, cols = self.weight.shape
        return SCRATCH_BYTES[self.exchange.rounding] * min(rows, TILE_ROWS) * min(cols, TILE_COLS)

    def write(self, target: Tensor) -> None:
        """Write the merged elements to a tensor of the box's shape, rounded once, to the weight's type."""
        (row, col) = self.start
        (_, num_rows, num_cols) = self.shape
        rows = _grid(row, row + num_rows, TILE_ROWS, self.weight.shape[1])
        cols = _grid(col, col + num_cols, TILE_COLS, self.weight.shape[2])
        for number, ((top, bottom), (left, right)) in enumerate(product(rows, list(cols))):
            first = max(top, row)
            last = min(bottom, row + num_rows)
            begin = max(left, col)
            end = min(right, col + num_cols)
            tile = self._tile(top, bottom, left, right, is_counted=number == 0)
            merged = tile[first - top : last - top, begin - left : end - left]
            target[0, first - row : last - row, begin - col : end - col].copy_(merged)

    def _tile(self, top: int, bottom: int, left: int, right: int, is_counted: bool) -> Tensor:
        delta = (self.b[top:bottom].float() @ self.a[:, left:right].float()).mul_(self.scale)
        weight = self.weight[0, top:bottom, left:right]
        merged = self._rounded(weight + delta, weight.dtype, top, left)
        if is_counted:
            change = (merged - weight.float()).flatten()
            delta = delta.flatten()
            self.exchange.kept.add_(
                torch.stack([torch.dot(change, delta), torch.dot(delta, delta)])
            )
        return merged

    def _rounded(self, exact: Tensor, dtype: torch.dtype, top: int, left: int) -> Tensor:
        low = _LOW_BITS.get(dtype)
        version = self.exchange.version
        if self.exchange.rounding == "nearest" or version is None or low is None:
            return exact.to(dtype)
        first_row = self.place[0] + top
        first_col = self.place[1] + left
        rows, cols = (
            torch.arange(first, first + size, device=exact.device)
            for first, size in zip((first_row, first_col), exact.shape, strict=True)
        )
        key = self.key + (version % _VERSIONS << 48)
        random = mixed((rows[:, None] << 32) + cols + key).bitwise_and_((1 << low) - 1)
        # the sign apart, a float's bits are in its order
        bits = exact.view(torch.int32).add_(random)
        return bits.bitwise_and_(-(1 << low)).view(torch.float32).to(dtype)


def mixed(numbers: Tensor) -> Tensor:
    """Hashes of 64-bit numbers, in their place; products wrap."""
    numbers.mul_(_GOLDEN)
    for shift, factor in _MIX:
        numbers.bitwise_xor_(_shifted(numbers, shift)).mul_(factor)
    return numbers.bitwise_xor_(_shifted(numbers, 31))


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (numbers >> by).bitwise_and_((1 << (64 - by)) - 1)


def _grid(start: int, end: int, step: int, size: int) -> Iterator[tuple[int, int]]:
    """The tiles of [0, size) that a range touches."""
    for first in range(start // step * step, end, step):
        yield first, min(first + step, size)


@dataclass(frozen=True)
class Merge:
    """The adapters of one training rank, for reading its weights as engines and checkpoints get them.

    weights: the shards of the rank's weights by name; factors: of its adapters, by the names in the rank's model.
    exchange: the one for which its boxes are read.
    """

    size: LoraSize
    weights: Mapping[str, Sequence[Shard]]
    factors: Params
    exchange: _RoundingState

    @staticmethod
    def of(
        size: LoraSize, weights: Sequence[Shard], shards: Sequence[Shard], factors: Params
    ) -> Merge:
        """shards: those of the factors, which are verified. Raises LayoutError where they do not describe them."""
        verify_params(shards, factors)
        names = {shard.name for shard in shards}
        by_name: dict[str, list[Shard]] = {}
        for shard in weights:
            if factor_name(shard.name, "B") in names:
                by_name.setdefault(shard.name, []).append(shard)
        return Merge(size, by_name, factors, _RoundingState(size.rounding))

    @staticmethod
    def of_rank(
        size: LoraSize,
        shape: ModelShape,
        layout: TrainLayout,
        rank: int,
        transformer_engine: bool,
        factors: Params,
    ) -> Merge:
        """The adapters of a training rank, by the maps. Raises LayoutError as `of`."""
        weights = megatron_map.shards(shape, layout, rank, transformer_engine)
        return Merge.of(
            size, weights, lora_map.shards(shape, layout, rank, size, transformer_engine), factors
        )

    def all_boxes(self, params: Params) -> list[MergedBox]:
        """A box for each part of the rank's weights with adapters, whole."""
        shards = [shard for of_name in self.weights.values() for shard in of_name]
        box_lists = [
            self.boxes(shard.name, params, shard.param, shard.at, shard.size) for shard in shards
        ]
        return [box for boxes in box_lists for box in boxes or ()]

    def begin(self, version: int | None) -> None:
        """Read this version from now on, also by the boxes that there are, and count anew what its rounding keeps."""
        self.exchange.version = version
        self.exchange.kept.zero_()

    def kept_share(self) -> float | None:
        """The part of the deltas that the rounded weights have, by a tile of each box; None where all are 0.

        The projection of the changes of weights on the deltas D: <round(W + D) - W, D> / <D, D>.
        """
        change, whole = self.exchange.kept.tolist()
        return change / whole if whole else None

    def boxes(
        self, name: str, params: Params, param: str, at: Cell, size: Size
    ) -> list[MergedBox] | None:
        """As `shards.views`, for a box of the weight `name`; None where the weight has no adapter.

        A fused layer may have several shards of a weight, of which the box lies in one.
        """
        held = [
            part
            for part in self.weights.get(name, ())
            if part.param == param and _contains(part, at)
        ]
        if not held:
            return None
        (shard,) = held
        first_row = min(part.rows[0] for part in self.weights[name] if part.param == param)
        above = shard.rows[0] - first_row  # rows of B before the shard's
        is_expert = STACK in name
        merged_boxes = []
        for number in range(at[0], at[0] + size[0]):
            key = zlib.crc32(name.format(shard.items[0] + number - shard.at[0]).encode())
            if STACK in param:
                item_param = param.format(number)
            else:
                item_param = param
            scale = self.size.scale_of(is_expert)
            (weight,) = views(params, item_param, (0, *shard.at[1:]), (1, *shard.size[1:]))
            a, b = (self.factors[factor_param(item_param, name, factor)] for factor in "AB")
            start = at[1] - shard.at[1], at[2] - shard.at[2]
            of_shard = b[above : above + shard.size[1]]
            place = shard.rows[0], shard.cols[0]
            merged_boxes.append(
                MergedBox(
                    weight, a, of_shard, scale, start, (1, *size[1:]), place, key, self.exchange
                )
            )
        return merged_boxes


def _contains(shard: Shard, at: Cell) -> bool:
    """Whether a cell of the parameter is one of the shard's."""
    ends = zip(shard.at[1:], shard.size[1:], at[1:], strict=True)
    return all(start <= cell < start + number for start, number, cell in ends)

"""Weights for fp8 engines: 128 x 128 tiles of float8_e4m3fn, each with one float32 scale (DeepSeek-V3, section 3.3.2).

weight = quantised x scale. The sender quantises, which halves the bytes on the wire: a tile's result depends on that
tile alone, so a rectangle with tile boundaries gives the same bytes as the whole tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megarl.model.quantisation import FP8_TILE
from megarl.resharding.shards import LayoutError, Part, Shard, tiles

SCALE_SUFFIX = "_scale_inv"  # a weight's name with it is the name of its scales in the checkpoint
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448


def quantise(block: Tensor) -> Tensor:
    """Quantise a block [items, rows, cols] of any float type, which begins on a tile boundary, to float8_e4m3fn.

    Needs float32 memory for a strip of 128 rows. Last tiles may be smaller.
    """
    quantised = torch.empty(block.shape, dtype=FP8, device=block.device)
    for (item, strip), rows in _strips(block):
        scales = _scales(rows).repeat_interleave(FP8_TILE)[: rows.shape[1]]
        # a denormal scale may have been rounded down
        scaled = rows.div_(scales).clamp_(-LARGEST, LARGEST)
        quantised[item, strip * FP8_TILE : (strip + 1) * FP8_TILE].copy_(scaled)
    return quantised


def tile_scales(block: Tensor) -> Tensor:
    """The float32 scales [items, ceil(rows / 128), ceil(cols / 128)] of a block that begins on a tile boundary.

    A tile's largest magnitude / 448; 1 for a tile of zeros.
    """
    items, rows, cols = block.shape
    scales = torch.empty(
        items, -(-rows // FP8_TILE), -(-cols // FP8_TILE), dtype=torch.float32, device=block.device
    )
    for (item, strip), part in _strips(block):
        scales[item, strip] = _scales(part)
    return scales


def _strips(block: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """((item, number of the strip), a float32 copy of the strip's at most 128 rows)."""
    for item, matrix in enumerate(block):
        for strip, rows in enumerate(matrix.split(FP8_TILE)):
            yield (item, strip), rows.to(torch.float32, copy=True)


def _scales(rows: Tensor) -> Tensor:
    """One scale for each tile of a strip [up to 128, cols]."""
    largest = rows.abs().amax(0)
    ragged = -len(largest) % FP8_TILE
    largest = torch.nn.functional.pad(largest, (0, ragged)).view(-1, FP8_TILE).amax(1)
    # by a scalar, CUDA would multiply with its reciprocal
    scales = largest / torch.full_like(largest, LARGEST)
    return torch.where(scales == 0, 1.0, scales)


def with_scales(sources: Sequence[Part], targets: Sequence[Part]) -> list[Part]:
    """The source parts with the scales that the targets need, as shards after those of the weights.

    A shard of scales names the weight's parameter, but its ranges and its cell count tiles, from which the sender
    computes the scales. Raises LayoutError where a source cuts a tile, because then no rank can compute its scale.
    """
    asked = {
        shard.name for part in targets for shard in part.shards if shard.name.endswith(SCALE_SUFFIX)
    }
    if not asked:
        return list(sources)
    ends: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for part in sources:
        for shard in part.shards:
            if shard.name + SCALE_SUFFIX in asked:
                rows, cols = ends[shard.name]
                ends[shard.name] = max(rows, shard.rows[1]), max(cols, shard.cols[1])
    return [Part(tuple(_with_scales(part, ends)), part.members) for part in sources]


def _with_scales(part: Part, ends: dict[str, tuple[int, int]]) -> Iterator[Shard]:
    for shard in part.shards:
        yield shard
        if shard.name in ends and shard.area:
            yield _scale_shard(shard, ends[shard.name])


def _scale_shard(shard: Shard, ends: tuple[int, int]) -> Shard:
    item, *at = shard.at
    for (start, stop), end, cell in zip((shard.rows, shard.cols), ends, at, strict=True):
        if start % FP8_TILE or cell % FP8_TILE or (stop % FP8_TILE and stop != end):
            where = f"rows {shard.rows}, columns {shard.cols} at row {at[0]} of {shard.param}"
            problem = f"a training rank's {where} cut a tile of {FP8_TILE}, so no rank alone can compute its scale"
            raise LayoutError(f"{shard.name}: {problem}")
    cells = item, at[0] // FP8_TILE, at[1] // FP8_TILE
    name = shard.name + SCALE_SUFFIX
    rows = tiles(shard.rows)
    cols = tiles(shard.cols)
    return Shard(name, rows, cols, shard.param, cells, shard.items, "float32")

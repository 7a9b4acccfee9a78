"""Weights for fp8 engines: 128 x 128 tiles of float8_e4m3fn, each with one float32 scale (megarl/fp8/codes.py).

The sender quantises, which halves the bytes on the wire.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from megarl.fp8.codes import FP8 as FP8
from megarl.fp8.codes import quantise as quantise
from megarl.fp8.codes import tile_scales as tile_scales
from megarl.model.quantisation import FP8_TILE
from megarl.resharding.shards import LayoutError, Part, Shard, tiles

SCALE_SUFFIX = "_scale_inv"  # a weight's name with it is the name of its scales in the checkpoint


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

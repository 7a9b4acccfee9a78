"""What keeps the trained weights from being moved into the engines as a recipe says."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import Recipe
from megarl.parallel.layout import FP8_TILE, EngineLayout, TrainLayout
from megarl.resharding import fp8, megatron_map, sglang_map
from megarl.resharding.routes import item_bytes
from megarl.resharding.shards import LayoutError, Part
from megarl.resharding.traffic import least_round_bytes
from megarl.types import ModelShape, UserFault


def reshard_faults(
    recipe: Recipe, shape: ModelShape, layout: TrainLayout, engines: EngineLayout
) -> list[UserFault]:
    """fp8 tiles that the training ranks cut, and rounds too small for the smallest pieces that they carry."""
    targets = sglang_map.parts(shape, engines)
    try:
        sources = fp8.with_scales(megatron_map.parts(shape, layout), targets)
    except LayoutError as error:
        mend = "choose sizes of train that do not, or set rollout.engine.fp8 to false"
        return [UserFault("rollout.engine.fp8", str(error), mend)]
    members = max(layout.world_size, engines.end)
    round_bytes, dtype = recipe.reshard.round_bytes, recipe.model.dtype
    if 4 * (members - 1) * _largest_granule(targets, dtype) <= round_bytes:  # a stream each way with each peer, twice
        return []
    node = recipe.placement.gpus_per_node
    least = least_round_bytes(sources, targets, members, gpus_per_node=node, dtype=dtype)
    if least <= round_bytes:
        return []
    problem = f"{round_bytes} has no room for two of the smallest pieces to and from every peer ({least} bytes)"
    return [UserFault("reshard.round_bytes", problem, f"set it to at least {least}")]


def _largest_granule(targets: Sequence[Part], dtype: str) -> int:
    """Bytes of the longest row, or row of tiles, that a round cannot cut."""
    sizes = ((shard.dtype or dtype, shard.cols[1] - shard.cols[0]) for part in targets for shard in part.shards)
    return max((FP8_TILE if kind.startswith("float8") else 1) * cols * item_bytes(kind) for kind, cols in sizes)

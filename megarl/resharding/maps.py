"""What training ranks send and engines receive in a reshard: the maps of the weights, and those of adapters."""

from __future__ import annotations

from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import fp8, lora_slots, megatron_map, sglang_map
from megarl.resharding.shards import LayoutError, Part
from megarl.types import UserError


def weight_maps(
    shape: ModelShape, layout: TrainLayout, engines: EngineLayout, *, transformer_engine: bool
) -> tuple[list[Part], list[Part]]:
    """What the policy's ranks send and what the engines receive in a reshard.

    Raises UserError where training ranks cut the tiles of fp8 engines.
    """
    targets = sglang_map.parts(shape, engines)
    try:
        sources = megatron_map.parts(shape, layout, transformer_engine)
        return fp8.with_scales(sources, targets), targets
    except LayoutError as error:
        hint = "choose sizes of train that do not, or set rollout.engine.weights to plain"
        raise UserError("rollout.engine.weights", str(error), hint) from None


def factor_maps(
    shape: ModelShape,
    layout: TrainLayout,
    engines: EngineLayout,
    size: LoraSize | None,
    *,
    transformer_engine: bool,
) -> tuple[list[Part], list[Part]] | None:
    """The parts of the factors that each further reshard moves where engines get adapters on their own; else None."""
    if size is None or not size.in_slots:
        return None
    sources = lora_slots.source_parts(shape, layout, size, transformer_engine)
    return sources, lora_slots.target_parts(shape, engines, size)

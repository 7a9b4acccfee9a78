"""The size of a model of which adapters (LoRA) are trained, and of engines' adapter slots. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import starmap

from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.model.tensors import STACK
from megarl.parallel.chunk_sizes import ChunkSize
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import lora_map, lora_slots
from megarl.resharding.routes import item_bytes
from megarl.rollout.sglang.adapter_slot import ADAPTER_SLOTS

Stages = tuple[tuple[ChunkSize, ...], ...]


def with_adapters(stages: Stages, shape: ModelShape, layout: TrainLayout, lora: LoraSize) -> Stages:
    """The stages' sizes with trained factors and head, and all else frozen; each stage counts its first rank's."""
    width = layout.world_size // layout.pp
    *adapted, last = [
        [*starmap(_adapted, zip(chunks, _factors(shape, layout, stage * width, lora), strict=True))]
        for stage, chunks in enumerate(stages)
    ]
    head = shape.num_labels * shape.hidden_size
    last[-1] = replace(last[-1], dense=last[-1].dense + head, frozen=last[-1].frozen - head)
    return tuple(map(tuple, [*adapted, last]))


def adapter_parameters(shape: ModelShape, lora: LoraSize) -> int:
    """Elements of the adapters of a whole model."""
    sizes = lora_map.adapted_weights(shape, lora)
    return sum(
        items * lora.rank_of(STACK in name) * (rows + cols)
        for name, (items, rows, cols) in sizes.items()
    )


def adapters_in_words(shape: ModelShape, lora: LoraSize) -> str:
    """Ranks, what B A x is multiplied by, and the elements of the adapters of a whole model."""
    ranks = [f"{lora.rank}"]
    scales = [f"{lora.scale_of(False):g}"]
    if shape.num_experts and lora.expert_rank:
        ranks.append(f"{lora.expert_rank} in each routed expert")
        scales.append(f"{lora.scale_of(True):g}")
    elements = f"{adapter_parameters(shape, lora):,} parameters"
    return (
        f"adapters of rank {', '.join(ranks)}; alpha / rank is {' and '.join(scales)}; {elements}"
    )


def adapter_slot_bytes(
    shape: ModelShape, engine: EngineLayout, lora: LoraSize | None, dtype: str
) -> list[int]:
    """Bytes of SGLang's adapter slots on each rank of an engine; they stay while its weights are released.

    0 where engines have none.
    """
    if lora is None or not lora.in_slots:
        return [0] * engine.tp
    return list(_slot_bytes(shape, replace(engine, count=1, first=0), lora, dtype))


@cache
def _slot_bytes(
    shape: ModelShape, engine: EngineLayout, lora: LoraSize, dtype: str
) -> tuple[int, ...]:
    # SGLang makes those of all layers and experts
    if {*lora_slots.MLP} & {*lora_slots.modules(shape, lora)}:
        targets = lora.targets
        if targets:  # (): all layers
            targets = (*targets, "gate_proj", "up_proj", "down_proj")
        lora = replace(lora, expert_rank=lora.expert_rank or 1, targets=targets)
    sizes = lora_slots.slot_sizes_of_ranks(shape, engine, lora)
    return tuple(
        ADAPTER_SLOTS * item_bytes(dtype) * sum(map(math.prod, of_rank.values()))
        for of_rank in sizes
    )


def _adapted(chunk: ChunkSize, factors: tuple[int, int]) -> ChunkSize:
    dense, expert = factors
    return replace(chunk, dense=dense, expert=expert, frozen=chunk.elements)


@cache
def _factors(
    shape: ModelShape, layout: TrainLayout, rank: int, lora: LoraSize
) -> tuple[tuple[int, int], ...]:
    """(elements whose optimizer state is split as of dense weights, as of experts) of each chunk of a rank."""
    dense = Counter[int]()
    expert = Counter[int]()
    for shard in lora_map.shards(shape, layout, rank, lora):
        if layout.vpp > 1:
            chunk = int(shard.param.removeprefix("vpp").partition(".")[0])
        else:
            chunk = 0
        # Megatron counts experts of a single EP rank among the dense parameters.
        if STACK in shard.name and layout.ep > 1:
            counted = expert
        else:
            counted = dense
        counted[chunk] += shard.area
    return tuple((dense[chunk], expert[chunk]) for chunk in range(layout.vpp))

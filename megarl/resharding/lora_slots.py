"""The map of SGLang 0.5.21's adapter slots: where the factors of adapters (LoRA) lie in its LoRA memory pool. Pure.

Facts from sglang/srt/lora. mem_pool.py: of each layer and linear layer a slot has A [stacked x R, columns] and B
[rows, R], of experts [experts, ...], R being the pool's largest rank; layers.py: rows and columns are those of the
rank's own weight, and of a layer that is fused from several tensors the A are stacked, at multiples of the adapter's
rank. Experts' B is multiplied by alpha / rank as it is loaded, that of other layers in every forward pass.

So that both are alike, and the ranks of experts may differ from others', SGLang is told that the adapter has rank R and
alpha R: it multiplies with 1. Our B are multiplied by alpha / rank as they are sent; what a smaller rank leaves of a
slot stays 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megarl.model.lora_pairs import LoraSize, factor_name, leaf_of
from megarl.model.shape import ModelShape
from megarl.model.tensors import STACK, Size
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import lora_map, sglang_map
from megarl.resharding.shards import FP8, Part, Shard, param_table

# The tensors of fused layers by the last part of the parameter's name, in the order in which their A are stacked.
_FUSED = {
    "qkv_proj.weight": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj.weight": ("gate_proj", "up_proj"),
    "w13_weight": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa.weight": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# SGLang's names of what it fuses into one layer
_EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
MLP = ("gate_up_proj", "down_proj")
# SGLang's names of the layers whose slots exist. Latent attention without query compression has others.
_KNOWN = frozenset(
    {"qkv_proj", "o_proj", *MLP, "fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"}
)


def slot_rank(size: LoraSize) -> int:
    """R: the rank of SGLang's slots."""
    return max(size.rank, size.expert_rank)


def slot_param(param: str, factor: str) -> str:
    """Our name of a slot's tensor, given the parameter of the weight."""
    return f"{param.removesuffix('weight')}lora_{factor}"


def modules(shape: ModelShape, size: LoraSize) -> tuple[str, ...]:
    """SGLang's names of the layers that get slots, for its argument `lora_target_modules`.

    Of layers with experts it takes both names of an MLP, or makes no slots.
    """
    adapted = lora_map.adapted_weights(shape, size)
    engine = EngineLayout(count=1, tp=1, ep=1)
    module_names = {
        _module(shard.param)
        for shard in sglang_map.shards(shape, engine, 0)
        if shard.name in adapted
    }
    if shape.num_experts and module_names & {*MLP}:
        module_names |= {*MLP}
    return tuple(sorted(module_names))


def unknown_modules(shape: ModelShape, size: LoraSize) -> tuple[str, ...]:
    """The layers with adapters for which SGLang has no slots."""
    return tuple(name for name in modules(shape, size) if name not in _KNOWN)


def source_parts(
    shape: ModelShape, layout: TrainLayout, size: LoraSize, transformer_engine: bool = False
) -> list[Part]:
    """The factors of all training ranks, grouped by replicas."""
    holders: dict[Shard, list[int]] = {}
    for rank in range(layout.world_size):
        for shard in lora_map.shards(shape, layout, rank, size, transformer_engine):
            holders.setdefault(shard, []).append(rank)
    shards_by_members: dict[tuple[int, ...], list[Shard]] = {}
    for shard, members in holders.items():
        shards_by_members.setdefault(tuple(members), []).append(shard)
    return [Part(tuple(shards), members) for members, shards in shards_by_members.items()]


def target_parts(shape: ModelShape, engine: EngineLayout, size: LoraSize) -> list[Part]:
    """The slots of all engines as shards of the logical factors, A [rank, cols] and B [rows, rank]."""
    adapted = lora_map.adapted_weights(shape, size)
    slot_parts = []
    for part in sglang_map.parts(shape, engine):
        held = [
            slot
            for shard in part.shards
            if shard.name in adapted
            for slot in _of_weight(shard, size)
        ]
        slot_parts += [Part(tuple(held), part.members)] if held else []
    return slot_parts


def slot_sizes(
    shape: ModelShape, engine: EngineLayout, tp_rank: int, size: LoraSize
) -> dict[str, Size]:
    """The whole tensors of the slots that the map fills, as [items, rows, cols], padding included."""
    return _slot_sizes(sglang_map.shards(shape, engine, tp_rank), shape, size)


def slot_sizes_of_ranks(
    shape: ModelShape, engine: EngineLayout, size: LoraSize
) -> list[dict[str, Size]]:
    """`slot_sizes` of all ranks of an engine, for which its map is made once."""
    held: list[list[Shard]] = [[] for _rank in range(engine.tp)]
    for part in sglang_map.parts(shape, replace(engine, count=1, first=0)):
        for rank in part.members:
            held[rank] += part.shards
    return [_slot_sizes(weights, shape, size) for weights in held]


def _slot_sizes(weights: Sequence[Shard], shape: ModelShape, size: LoraSize) -> dict[str, Size]:
    """weights: the shards of a rank."""
    adapted = lora_map.adapted_weights(shape, size)
    adapted_params = {shard.param for shard in weights if shard.name in adapted}
    table = param_table([shard for shard in weights if shard.param in adapted_params])
    sizes_by_param: dict[str, Size] = {}
    for param, (items, rows, cols) in table.items():
        sizes_by_param[slot_param(param, "A")] = items, len(_tensors(param)) * slot_rank(size), cols
        sizes_by_param[slot_param(param, "B")] = items, rows, slot_rank(size)
    return sizes_by_param


def _of_weight(shard: Shard, size: LoraSize) -> Iterator[Shard]:
    """The shards of the factors of a weight's shard."""
    rank = size.rank_of(STACK in shard.name)
    fused = _tensors(shard.param)
    if len(fused) > 1:
        first = fused.index(leaf_of(shard.name)) * slot_rank(size)
    else:
        first = 0
    item, row, col = shard.at
    plain = shard._replace(dtype="" if shard.dtype == FP8 else shard.dtype)
    a, b = (factor_name(shard.name, factor) for factor in "AB")
    yield plain._replace(
        name=a, rows=(0, rank), param=slot_param(shard.param, "A"), at=(item, first, col)
    )
    yield plain._replace(
        name=b, cols=(0, rank), param=slot_param(shard.param, "B"), at=(item, row, 0)
    )


def _tensors(param: str) -> tuple[str, ...]:
    """The checkpoint's tensors of which the layer of a parameter is fused; one name where it is not fused."""
    return next((names for end, names in _FUSED.items() if param.endswith(end)), (param,))


def _module(param: str) -> str:
    """SGLang's name of the layer of a parameter."""
    last = param.rpartition(".")[2]
    return _EXPERTS.get(last) or leaf_of(param)

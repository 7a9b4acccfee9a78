"""The map of the adapters (LoRA): which factors each training rank holds, derived from the map of the weights.

The delta (alpha / rank) B A of a weight has the parallel state of the weight itself: a rank that holds rows x columns
of the weight holds these rows of B and these columns of A, and so can add the delta to its part without a message.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.model.lora_pairs import LoraPair, LoraSize, factor_name, factor_param, leaf_of
from megarl.model.shape import ModelShape
from megarl.model.tensors import STACK, tensors
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map
from megarl.resharding.shards import Shard

# The linear layers of a decoder layer by the last part of their names; fused layers have theirs in this order.
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
_QKV = ("q_proj", "k_proj", "v_proj")
# (parameter, name) -> the shards of the weight that are there
Held = dict[tuple[str, str], list[Shard]]


def targets_of(shape: ModelShape) -> tuple[str, ...]:
    """The linear layers that the model's decoder has, of TARGETS."""
    leaves = {leaf_of(name) for name in tensors(shape) if _is_decoder_linear(name, shape)}
    return tuple(target for target in TARGETS if target in leaves)


def adapted_weights(shape: ModelShape, size: LoraSize) -> dict[str, tuple[int, int, int]]:
    """The weights with adapters, as `tensors` has them: by name or stack of experts, (items, rows, columns)."""
    return {
        name: extent
        for name, extent in tensors(shape).items()
        if _is_decoder_linear(name, shape) and size.includes(name, STACK in name)
    }


def shards(
    shape: ModelShape,
    layout: TrainLayout,
    rank: int,
    size: LoraSize,
    transformer_engine: bool = False,
) -> list[Shard]:
    """The factors of training rank `rank` as shards of their logical tensors, A [rank, cols] and B [rows, rank]."""
    factor_shards = []
    for (param, name), held in _held(shape, layout, rank, size, transformer_engine).items():
        width = (0, size.rank_of(STACK in name))
        (rows, cols, items, at) = _extent(held)
        a, b = (factor_param(param, name, factor) for factor in "AB")
        factor_shards.append(Shard(factor_name(name, "A"), width, cols, a, at, items))
        factor_shards += (
            [Shard(factor_name(name, "B"), rows, width, b, at, items)] if rows[1] > rows[0] else []
        )
    return factor_shards


def pairs(
    shape: ModelShape,
    layout: TrainLayout,
    rank: int,
    size: LoraSize,
    transformer_engine: bool = False,
) -> list[LoraPair]:
    """The pairs of factors of training rank `rank`, one for each tensor of the checkpoint in each linear layer."""
    lora_pairs = []
    sizes = tensors(shape)
    for (param, name), held in _held(shape, layout, rank, size, transformer_engine).items():
        rows, cols, items, at = _extent(held)
        places = tuple(
            (shard.at[1], shard.rows[0] - rows[0], shard.rows[1] - shard.rows[0])
            for shard in held
            if shard.area
        )
        for number, item in enumerate(range(*items)):
            if STACK in param:
                item_param = param.format(at[0] + number)
            else:
                item_param = param
            if STACK in name:
                of_item = name.format(item)
            else:
                of_item = name
            lora_pairs.append(
                LoraPair(of_item, item_param, STACK in name, sizes[name][1:], rows, cols, places)
            )
    return lora_pairs


def _held(
    shape: ModelShape, layout: TrainLayout, rank: int, size: LoraSize, transformer_engine: bool
) -> Held:
    """The shards of weights with adapters, those of fused layers in the order of TARGETS on every rank."""
    shards_by_weight: Held = {}
    fused: dict[str, Shard] = {}
    for shard in megatron_map.shards(shape, layout, rank, transformer_engine):
        is_linear = _is_decoder_linear(shard.name, shape)
        if is_linear and shard.param.endswith("linear_qkv.weight"):
            fused.setdefault(shard.param, shard)
        if is_linear and size.includes(shard.name, STACK in shard.name):
            shards_by_weight.setdefault((shard.param, shard.name), []).append(shard)
    for shard in fused.values():
        shards_by_weight |= {
            (shard.param, empty.name): [empty] for empty in _absent(shard, size, shards_by_weight)
        }
    order = {param: index for index, (param, _) in reversed([*enumerate(shards_by_weight)])}
    in_order = sorted(
        shards_by_weight.items(),
        key=lambda held: (order[held[0][0]], TARGETS.index(leaf_of(held[0][1]))),
    )
    return dict(in_order)


def _absent(held: Shard, size: LoraSize, shards_by_weight: Held) -> Iterator[Shard]:
    """The queries, keys or values of which a fused layer holds no row, as where it is cut inside a group of heads.

    Their A is there all the same, because the tensor-parallel ranks gather what it makes of their tokens. held: any
    shard of the layer.
    """
    for leaf in _QKV:
        name = held.name.replace(f"{leaf_of(held.name)}.", f"{leaf}.")
        if size.includes(name, is_expert=False) and (held.param, name) not in shards_by_weight:
            yield held._replace(name=name, rows=(0, 0), at=(0, 0, 0))


def _extent(
    held: list[Shard],
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int, int]]:
    """(rows, columns, items, the first item's cell) of the shards of one tensor in one parameter.

    The rows are contiguous even where a fused layer interleaves them with others.
    """
    first = held[0]
    rows = min(shard.rows[0] for shard in held), max(shard.rows[1] for shard in held)
    return rows, first.cols, first.items, (first.at[0], 0, 0)


def _is_decoder_linear(name: str, shape: ModelShape) -> bool:
    return leaf_of(name) in TARGETS and _layer(name) < shape.num_layers


def _layer(name: str) -> float:
    """The number of a tensor's layer; infinite outside the layers."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return int(parts[2])
    return float("inf")

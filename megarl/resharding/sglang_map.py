"""The weight map of the engines' ranks: the parameters of SGLang 0.5.21's models.

The blocks of the layers are those of the model's family (megarl/model/families). Facts from sglang/srt:
- layers/linear.py: with fewer key/value heads than ranks, neighbours have the same head.
- layers/moe/fused_moe_triton/layer.py: `w13_weight` is [experts, gate; up, hidden], `w2_weight` [experts, hidden,
  width]; runtime_context.py: the TP rank is expert rank x (TP / EP) + rank inside the expert.
- models/deepseek_v2.py: the shared experts are an MLP of their own, because rollout/sglang/arguments.py switches their
  fusion with the routed experts off.
- layers/vocab_parallel_embedding.py: the vocabulary is padded to 64, on CPU to 64 x TP where TP does not divide that.
- DP attention: attention and embedding are split over the attention group of TP / DP ranks (TP rank % its size), so
  with `enable_dp_lm_head` is the output layer. All other weights are split over the whole TP group, but with
  `moe_dense_tp_size` 1 the dense layers are whole on each rank, and with DeepEP or SGLANG_SHARED_EXPERT_TP1 the shared
  experts are (models/deepseek_v2.py).
- layers/quantization/fp8.py: `<weight>_scale_inv` has one float32 for each 128 x 128 tile of a weight. (The scales
  of the KV cache are no weights: engine_model.py writes them.)
- models/deepseek_nextn.py and those of the other families: the draft model is one multi-token prediction layer,
  `model.decoder`, split as the decoder's layers with experts; eh_proj is whole, and never fp8. Its embedding and output
  layer are the target model's own parameters. A parameter of the draft model has the name that `engine_model.joined`
  gives it.
Without drafts the engine does not load the multi-token prediction layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from megarl.model.families import family_of, layer_of, layer_prefix, mtp_block, mtp_prefix
from megarl.model.families.blocks import Block
from megarl.model.families.layouts import ParamPart
from megarl.model.quantisation import FP8_TILE
from megarl.model.shape import ModelShape
from megarl.model.tensors import (
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    LM_HEAD,
    MLP_NORM,
    STACK,
)
from megarl.placement.engine_layout import VOCAB_MULTIPLE, EngineLayout
from megarl.placement.expert_places import Places
from megarl.resharding.block_shards import Grid, entry_shards, offsets
from megarl.resharding.shards import FP8, LayoutError, Part, Shard, intersect, tiles

DRAFT = "draft."  # begins the names of the draft model's parameters


class Holder(NamedTuple):
    """The TP ranks of an engine with rank // `each` % `groups` == `index`."""

    groups: int
    index: int
    each: int = 1


EVERYONE = Holder(1, 0)
Placed = Iterator[tuple[Holder, Shard]]


def parts(shape: ModelShape, engine: EngineLayout, places: Places | None = None) -> list[Part]:
    """The shards of all engines' slots, grouped by replicas; inside a part in the order of the layers.

    places: of the experts of the decoder's layers; None: as numbered. Those of a draft model always are.

    Raises LayoutError where an fp8 tile would be split.
    """
    shards_by_members: dict[tuple[int, ...], list[Shard]] = defaultdict(list)
    lists: dict[Holder, list[Shard]] = {}
    for holder, shard in _placed(shape, engine, places):
        if holder not in lists:
            lists[holder] = shards_by_members[_slots(engine, holder)]
        lists[holder].append(shard)
    return [Part(tuple(shards), members) for members, shards in shards_by_members.items()]


def shards(
    shape: ModelShape, engine: EngineLayout, tp_rank: int, places: Places | None = None
) -> list[Shard]:
    """All shards of rank `tp_rank` of an engine."""
    first_engine = replace(engine, count=1, first=0)
    return [
        shard
        for part in parts(shape, first_engine, places)
        if tp_rank in part.members
        for shard in part.shards
    ]


def padded_vocab(vocab_size: int, ranks: int) -> int:
    """Rows of the padded embedding, summed over its ranks."""
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % ranks:
        padded = -(-vocab_size // (VOCAB_MULTIPLE * ranks)) * VOCAB_MULTIPLE * ranks
    return padded


def _slots(engine: EngineLayout, holder: Holder) -> tuple[int, ...]:
    ranks = [
        rank for rank in range(engine.tp) if rank // holder.each % holder.groups == holder.index
    ]
    return tuple(engine.first + e * engine.tp + rank for e in range(engine.count) for rank in ranks)


def _placed(shape: ModelShape, engine: EngineLayout, places: Places | None) -> Placed:
    yield from _vocab_rows(shape, EMBEDDING, engine.attention_tp)
    for layer in range(shape.num_layers):
        prefix = layer_prefix(shape, layer)
        of_layer = _layer(shape, engine, layer, prefix, prefix)
        if places is None or layer < shape.num_dense_layers:
            yield from of_layer
        else:
            yield from _with_places(of_layer, places[layer - shape.num_dense_layers])
    yield from _norm(FINAL_NORM, shape.hidden_size)
    if not shape.tied:
        yield from _vocab_rows(shape, LM_HEAD, engine.head_ranks)
    if engine.draft:
        yield from _draft(shape, engine)


def _layer(shape: ModelShape, engine: EngineLayout, number: int, prefix: str, param: str) -> Placed:
    """A layer. prefix, param: begin its names in the checkpoint and in the engine."""
    split = _split(shape, engine)
    layer = layer_of(shape, number)
    for norm, block in ((INPUT_NORM, layer.mixer), (MLP_NORM, layer.mlp)):
        yield EVERYONE, Shard(prefix + norm, (0, shape.hidden_size), (0, 1), param + norm)
        for holder, shard in _block(block, split):
            placed = Shard(
                prefix + shard.name, shard.rows, shard.cols, param + shard.param, *shard[4:]
            )
            is_plain = engine.precision.is_plain(shape, placed.name)
            yield from _tiled(holder, placed, is_plain=is_plain)


def _with_places(of_layer: Placed, places: Sequence[int]) -> Placed:
    """A layer's shards, with those of experts cut so that each slot has the expert of its place.

    Slots that follow each other and have experts that do so stay one box.
    """
    for holder, shard in of_layer:
        if STACK not in shard.name:
            yield holder, shard
            continue
        (first, end) = shard.items
        (item, row, col) = shard.at
        start = first
        for slot in range(first + 1, end + 1):
            if slot < end and places[slot] == places[slot - 1] + 1:
                continue
            items = places[start], places[start] + slot - start
            yield holder, shard._replace(items=items, at=(item + start - first, row, col))
            start = slot


class AxisRanks(NamedTuple):
    """How many ranks of an engine split the parameters of each axis. moe: (EP, ranks inside an expert)."""

    attention: int
    dense: int
    shared: int
    moe: tuple[int, int]


def _split(shape: ModelShape, engine: EngineLayout) -> AxisRanks:
    shared = engine.shared_ranks(shape)
    moe = engine.ep, engine.moe_tp
    return AxisRanks(engine.attention_tp, engine.dense_ranks, shared, moe)


@lru_cache(maxsize=1 << 12)
def _block(block: Block, split: AxisRanks) -> tuple[tuple[Holder, Shard], ...]:
    """The shards of a block on all ranks, with the names inside a layer.

    Entries that follow each other and are split alike come rank by rank.
    """
    grids = [_grids(entry, split) for entry in block.sglang]
    starts = offsets(block.sglang, [held[0][1].ranks for held in grids])
    stretches = zip(block.sglang, starts, grids, strict=True)
    placed: list[tuple[Holder, Shard]] = []
    for (_, held), alike in groupby(stretches, key=lambda row: (row[0].layout.kind, row[2])):
        rows = list(alike)
        for holder, grid in held:
            for entry, start, _ in rows:
                shards = entry_shards(entry, entry.param, start, grid)
                placed += [(holder, shard) for shard in shards]
    return tuple(placed)


def _grids(entry: ParamPart, split: AxisRanks) -> list[tuple[Holder, Grid]]:
    """The ranks that hold the different parts of an entry."""
    if entry.layout.kind == "copy":
        return [(EVERYONE, Grid())]
    if entry.over == "experts":
        ep, inside = split.moe
        return [
            (Holder(ep * inside, rank), Grid(inside, rank % inside, ep, rank // inside))
            for rank in range(ep * inside)
        ]
    ranks = {"attention": split.attention, "dense": split.dense, "shared": split.shared}[entry.over]
    replicas = entry.layout.replicas(ranks)
    parts = ranks // replicas
    return [(Holder(parts, part, replicas), Grid(parts, part)) for part in range(parts)]


def _tiled(holder: Holder, shard: Shard, *, is_plain: bool) -> Placed:
    """A shard as it is trained, or its tiles and their scales."""
    if is_plain:
        yield holder, shard
        return
    (_, row, col) = shard.at
    (name, rows, cols, param) = shard[:4]
    if rows[0] % FP8_TILE or cols[0] % FP8_TILE or row % FP8_TILE or col % FP8_TILE:
        raise LayoutError(
            f"{name}: rows {rows}, columns {cols} at row {row} of {param} cut a tile of {FP8_TILE}"
        )
    yield holder, shard._replace(dtype=FP8)
    scales = Shard(
        f"{name}_scale_inv",
        tiles(rows),
        tiles(cols),
        f"{param}_scale_inv",
        (0, row // FP8_TILE, 0),
        shard.items,
        "float32",
    )
    yield holder, scales


def _draft(shape: ModelShape, engine: EngineLayout) -> Placed:
    """The draft model, without the embedding and the output layer that it shares with the target model."""
    frame = family_of(shape).mtp
    prefix = mtp_prefix(shape, 0)
    for holder, shard in _block(mtp_block(shape), _split(shape, engine)):
        param = DRAFT + frame.draft_frame + shard.param
        yield holder, shard._replace(name=prefix + shard.name, param=param)
    number = shape.num_layers
    yield from _layer(shape, engine, number, layer_prefix(shape, number), DRAFT + frame.draft_layer)


def _vocab_rows(shape: ModelShape, name: str, ranks: int) -> Placed:
    """The vocabulary rows of each rank; the shard is empty where all of them are padding."""
    per_rank = padded_vocab(shape.vocab_size, ranks) // ranks
    for rank in range(ranks):
        rows = intersect((rank * per_rank, (rank + 1) * per_rank), (0, shape.vocab_size))
        yield Holder(ranks, rank), Shard(name, rows, (0, shape.hidden_size), name)


def _norm(name: str, size: int) -> Placed:
    yield EVERYONE, Shard(name, (0, size), (0, 1), name)

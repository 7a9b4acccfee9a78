"""The weight map of the training ranks: the parameters of Megatron-Core 0.16.1's GPTModel.

The blocks of the layers are those of the model's family (megarl/model/families). Facts from megatron/core: `linear_qkv`
is split evenly over TP, inside a group where there are fewer key/value groups than ranks (transformer/attention.py);
embedding and output layer are split by vocabulary rows after padding; layers are numbered inside their model chunk; the
last stage has the final norm, the output layer (with tied embeddings a copy of the embedding)
and the multi-token prediction layers with another copy; no copies if it is the first stage too
(transformer/multi_token_prediction.py); with such layers the final norm follows the last decoder layer, in whichever
stage that is (transformer/transformer_block.py). A score head, in place of the output layer, is replicated.
TransformerEngine's modules fuse a norm into the next linear layer, and append the numbers of grouped experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megarl.model.families import layer_of, layer_prefix, mtp_block, mtp_prefix
from megarl.model.families.blocks import Block
from megarl.model.families.layouts import STACK, ParamPart
from megarl.model.precision import Precision
from megarl.model.shape import SCORE, ModelShape
from megarl.model.tensors import EMBEDDING, FINAL_NORM, INPUT_NORM, LM_HEAD, MLP_NORM
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.block_shards import Grid, entry_shards, offsets
from megarl.resharding.shards import Box, LayoutError, Part, Shard, cells, intersect, share

Shards = Iterator[Shard]


def parts(shape: ModelShape, layout: TrainLayout, transformer_engine: bool = False) -> list[Part]:
    """The shards of all ranks, grouped by replicas: dense weights by (stage, TP), experts by (stage, EP, ETP rank).

    transformer_engine: use TransformerEngine's parameter names in place of Megatron's own. Inside a part the shards are
    in the order of the layers.
    """
    names = Names(transformer_engine)
    dense: dict[tuple[int, int], list[int]] = {}
    expert: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        dense.setdefault((at.pp, at.tp), []).append(rank)
        expert.setdefault((at.pp, at.ep, at.etp), []).append(rank)
    all_parts = [
        Part(tuple(_dense(shape, layout, names, stage, tp_rank)), tuple(ranks))
        for (stage, tp_rank), ranks in dense.items()
    ]
    if shape.num_experts:
        all_parts += [
            Part(tuple(_experts(shape, layout, names, stage, ep_rank, etp_rank)), tuple(ranks))
            for (stage, ep_rank, etp_rank), ranks in expert.items()
        ]
    return all_parts


def shards(
    shape: ModelShape, layout: TrainLayout, rank: int, transformer_engine: bool = False
) -> list[Shard]:
    """All shards of training rank `rank`; the shard of vocabulary rows that are all padding is empty."""
    at = layout.coords(rank)
    names = Names(transformer_engine)
    rank_shards = list(_dense(shape, layout, names, at.pp, at.tp))
    if shape.num_experts:
        rank_shards += _experts(shape, layout, names, at.pp, at.ep, at.etp)
    return rank_shards


def split_params(
    shape: ModelShape, layout: TrainLayout, rank: int, transformer_engine: bool = False
) -> frozenset[str]:
    """The parameters of training rank `rank` that are split over its TP group: dense weights that TP cuts, and experts.

    A TP group may hold an expert twice, but as replicas of data parallelism, which share the optimizer's state.
    """
    at = layout.coords(rank)
    names = Names(transformer_engine)
    first, last = (
        _boxes(_dense(shape, layout, names, at.pp, tp_rank)) for tp_rank in (0, layout.tp - 1)
    )
    split = {param for param in first.keys() | last.keys() if first.get(param) != last.get(param)}
    if shape.num_experts:
        experts = _experts(shape, layout, names, at.pp, at.ep, at.etp)
    else:
        experts = ()
    return frozenset(split | _boxes(experts).keys())


def fp8_params(
    shape: ModelShape,
    layout: TrainLayout,
    rank: int,
    precision: Precision,
    transformer_engine: bool = False,
) -> frozenset[str]:
    """The parameters of training rank `rank` whose tensors engines have in fp8.

    Raises LayoutError where a parameter has tensors of both formats.
    """
    formats: dict[str, set[bool]] = {}
    for shard in shards(shape, layout, rank, transformer_engine):
        for param, _ in cells(shard):
            formats.setdefault(param, set()).add(precision.is_plain(shape, shard.name))
    for param, are_plain in formats.items():
        if len(are_plain) > 1:
            raise LayoutError(f"{param} has tensors in fp8 and plain ones")
    return frozenset(param for param, are_plain in formats.items() if are_plain == {False})


def _boxes(rank_shards: Iterable[Shard]) -> dict[str, list[tuple[str, Box]]]:
    """By parameter, the boxes of the logical tensors that it holds."""
    boxes: dict[str, list[tuple[str, Box]]] = {}
    for shard in rank_shards:
        for param, _ in cells(shard):
            boxes.setdefault(param, []).append((shard.name, shard.box))
    return boxes


@dataclass(frozen=True)
class Names:
    """Parameter names that depend on the layer spec."""

    transformer_engine: bool

    def norm(self, plain: str, linear: str) -> str:
        """A norm's own parameter, or, where there is one, that of the linear layer into which it is merged."""
        if self.transformer_engine and linear:
            return f"{linear}.layer_norm_weight"
        return plain

    def param(self, entry: ParamPart) -> str:
        """The parameter of an entry; experts have a stack of each linear layer."""
        if entry.over != "experts":
            return self.norm(entry.param, entry.merges_into)
        module, _, linear = entry.param.rpartition(".")
        if self.transformer_engine:
            return f"{module}.{linear}.weight{STACK}"
        return f"{module}.local_experts.{STACK}.{linear}.weight"


class Place(NamedTuple):
    """A module of a layer: the beginnings of its names in the checkpoint (`name`) and in the rank's model (`param`)."""

    layer: int
    name: str
    param: str

    def norm(self, name: str, size: int, param: str) -> Shard:
        return _vector(self.name + name, size, self.param + param)

    def filled(self, shards: Iterable[Shard]) -> Shards:
        """The shards of a block in this layer, given its names inside layers."""
        for shard in shards:
            yield Shard(
                self.name + shard.name, shard.rows, shard.cols, self.param + shard.param, *shard[4:]
            )


def _places(shape: ModelShape, layout: TrainLayout, stage: int) -> Iterator[Place]:
    """The layers of a stage in order; multi-token prediction layers follow the decoder's."""
    for chunk in range(layout.vpp):
        for local, layer in enumerate(layout.layers(stage, shape.num_layers, chunk)):
            param = f"{_chunk_prefix(layout, chunk)}decoder.layers.{local}."
            yield Place(layer, layer_prefix(shape, layer), param)
    if stage == layout.pp - 1:
        for index in range(shape.num_mtp_layers):
            number = shape.num_layers + index
            param = _mtp_param(layout, index) + "transformer_layer."
            yield Place(number, layer_prefix(shape, number), param)


def _chunk_prefix(layout: TrainLayout, chunk: int) -> str:
    return f"vpp{chunk}." if layout.vpp > 1 else ""


def _mtp_param(layout: TrainLayout, index: int) -> str:
    """Begins the names of a multi-token prediction layer's parameters."""
    return f"{_chunk_prefix(layout, layout.vpp - 1)}mtp.layers.{index}."


def _vector(name: str, size: int, param: str) -> Shard:
    return Shard(name, (0, size), (0, 1), param)


def _dense(
    shape: ModelShape, layout: TrainLayout, names: Names, stage: int, tp_rank: int
) -> Shards:
    """All weights of one stage and TP rank except routed experts."""
    first = stage == 0
    last = stage == layout.pp - 1
    if first:
        param = _chunk_prefix(layout, 0) + "embedding.word_embeddings.weight"
        yield _vocab_rows(shape, layout, tp_rank, EMBEDDING, param)
    for place in _places(shape, layout, stage):
        yield from _layer(shape, layout, names, place, tp_rank)
    norm_chunk, norm_stage = divmod(_final_norm_stage(shape, layout), layout.pp)
    if stage == norm_stage:
        param = _chunk_prefix(layout, norm_chunk) + "decoder.final_layernorm.weight"
        yield _vector(FINAL_NORM, shape.hidden_size, param)
    if not last:
        return
    prefix = _chunk_prefix(layout, layout.vpp - 1)
    if shape.num_mtp_layers and not (first and layout.vpp == 1):
        yield _vocab_rows(
            shape, layout, tp_rank, EMBEDDING, prefix + "embedding.word_embeddings.weight"
        )
    for index in range(shape.num_mtp_layers):
        number = shape.num_layers + index
        place = Place(number, mtp_prefix(shape, index), _mtp_param(layout, index))
        frame = _block(mtp_block(shape), names, False, Grid(layout.tp, tp_rank))
        yield from place.filled(frame)
    if shape.num_labels:
        yield Shard(
            SCORE, (0, shape.num_labels), (0, shape.hidden_size), prefix + "output_layer.weight"
        )
    elif not shape.tied:
        yield _vocab_rows(shape, layout, tp_rank, LM_HEAD, prefix + "output_layer.weight")
    elif not (first and layout.vpp == 1):
        yield _vocab_rows(shape, layout, tp_rank, EMBEDDING, prefix + "output_layer.weight")


def _final_norm_stage(shape: ModelShape, layout: TrainLayout) -> int:
    """The virtual stage with the decoder's final norm: the last stage, or with MTP that of the last decoder layer."""
    last = layout.pp * layout.vpp - 1
    if shape.num_mtp_layers:
        while last and layout.stage_layers and not layout.stage_layers[last]:
            last -= 1
    return last


def _vocab_rows(
    shape: ModelShape, layout: TrainLayout, tp_rank: int, name: str, param: str
) -> Shard:
    padded = share(layout.padded_vocab(shape.vocab_size), layout.tp, tp_rank)
    return Shard(name, intersect(padded, (0, shape.vocab_size)), (0, shape.hidden_size), param)


def _layer(
    shape: ModelShape, layout: TrainLayout, names: Names, place: Place, tp_rank: int
) -> Shards:
    """All weights of a layer except routed experts."""
    grid = Grid(layout.tp, tp_rank)
    layer = layer_of(shape, place.layer)
    blocks = (
        (layer.mixer, INPUT_NORM, "input_layernorm.weight"),
        (layer.mlp, MLP_NORM, "pre_mlp_layernorm.weight"),
    )
    for block, norm, param in blocks:
        yield place.norm(norm, shape.hidden_size, names.norm(param, block.takes_norm))
        yield from place.filled(_block(block, names, False, grid))


def _experts(
    shape: ModelShape, layout: TrainLayout, names: Names, stage: int, ep_rank: int, etp_rank: int
) -> Shards:
    grid = Grid(layout.etp, etp_rank, layout.ep, ep_rank)
    for place in _places(shape, layout, stage):
        yield from place.filled(_block(layer_of(shape, place.layer).mlp, names, True, grid))


@lru_cache(maxsize=1 << 14)
def _block(block: Block, names: Names, of_experts: bool, grid: Grid) -> tuple[Shard, ...]:
    """The shards of a block on one rank, those of routed experts or the others, with the names inside a layer."""
    entries = [entry for entry in block.megatron if (entry.over == "experts") == of_experts]
    parts = [_parts(entry, grid) for entry in entries]
    shards: list[Shard] = []
    for entry, count, start in zip(entries, parts, offsets(entries, parts), strict=True):
        own = grid._replace(ranks=count, rank=grid.rank * count // grid.ranks)
        shards += entry_shards(entry, names.param(entry), start, own)
    return tuple(shards)


def _parts(entry: ParamPart, grid: Grid) -> int:
    """Into how many different parts an entry is split."""
    return grid.ranks // entry.layout.replicas(grid.ranks)

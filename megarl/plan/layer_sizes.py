"""The sizes of a model's ranks in any training layout, added up from its parts without building the model again.

Megatron builds the embedding, one layer of each kind and the output layer once for each tensor-parallel size. What a
rank of another layout holds is a sum of these: dense parameters depend on TP alone, and experts are shared out evenly
over EP x ETP ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Literal

from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.model.shape import ModelShape
from megarl.parallel.chunk_sizes import ChunkSize
from megarl.placement.roles import Role, RoleName, train_layout
from megarl.placement.train_layout import TrainLayout
from megarl.plan.adapter_sizes import Stages
from megarl.plan.model_size import ModelSize, ModelSizes, sizes_of

_Kind = Literal["dense", "linear", "sparse"]
_NOTHING = ChunkSize(0, 0, 0, 0, 0)
_values = attrgetter(*(value.name for value in fields(ChunkSize)))


@dataclass(frozen=True)
class LayerSizes:
    """What one tensor-parallel rank holds of each part of a model, where each expert has a rank of its own.

    linear_layer: with linear attention, and with experts. last: the last norm, the output layer, and the layers of
    multi-token prediction with their embedding.
    """

    embedding: ChunkSize
    dense_layer: ChunkSize
    linear_layer: ChunkSize
    sparse_layer: ChunkSize
    last: ChunkSize

    def stages(self, shape: ModelShape, layout: TrainLayout) -> Stages:
        """The chunks of every pipeline rank, as `ModelSize.stages`; the layout must have no error."""
        return tuple(
            tuple(self._chunk(shape, layout, stage, chunk) for chunk in range(layout.vpp))
            for stage in range(layout.pp)
        )

    def _chunk(self, shape: ModelShape, layout: TrainLayout, stage: int, chunk: int) -> ChunkSize:
        layers = layout.layers(stage, shape.num_layers, chunk)
        num_dense = sum(map(shape.is_dense, layers))
        num_linear = sum(map(shape.is_linear, layers))
        num_full = len(layers) - num_dense - num_linear
        number = chunk * layout.pp + stage
        stages = layout.pp * layout.vpp
        # An output layer tied to it, and multi-token prediction, have an embedding of their own on another rank alone.
        is_in_last = stages == 1 and (shape.tied or shape.num_mtp_layers)
        chunk_size = _sum(
            [
                _times(self.embedding, number == 0 and not is_in_last),
                _times(self.dense_layer, num_dense),
                _times(self._sparse(self.linear_layer, 1, shape, layout), num_linear),
                _times(self._sparse(self.sparse_layer, 1, shape, layout), num_full),
            ]
        )
        if number < stages - 1:
            return chunk_size
        return _sum([chunk_size, self._sparse(self.last, shape.num_mtp_layers, shape, layout)])

    def _sparse(
        self, part: ChunkSize, layers: int, shape: ModelShape, layout: TrainLayout
    ) -> ChunkSize:
        """A part with so many layers of experts, with as many experts as a rank of the layout holds of each."""
        expert_size = self.sparse_layer.expert
        if not expert_size or not layers:
            return part
        experts = layers * (expert_size * shape.num_experts // (layout.ep * layout.etp))
        if not part.expert:  # frozen
            return replace(part, frozen=part.frozen - layers * expert_size + experts)
        if layout.ep == 1:  # Megatron counts experts of a single EP rank among the dense parameters
            return replace(part, dense=part.dense + experts, expert=0)
        return replace(part, expert=experts)


def layer_sizes(
    models: Mapping[RoleName, Role], tps: Iterable[int]
) -> dict[tuple[RoleName, int], LayerSizes]:
    """Of every role for every tensor-parallel size, all built in one subprocess."""
    keys: list[tuple[RoleName, int]] = [(name, tp) for tp in tps for name in models]
    in_parts: list[dict[RoleName, Role]] = [
        {name: _in_parts(models[name], tp)} for name, tp in keys
    ]
    built = sizes_of(in_parts, whole=False)
    return {key: _parts_of(sizes[key[0]]) for key, sizes in zip(keys, built, strict=True)}


def composed(
    known: ModelSizes,
    models: Mapping[RoleName, Role],
    parts: Mapping[tuple[RoleName, int], LayerSizes],
) -> dict[RoleName, ModelSize]:
    """The sizes of models in other layouts. known: the sizes in any layout, for the whole models' totals."""
    return {
        name: ModelSize.of(
            role,
            _stages(parts[name, role.layout.tp], role.shape, role.layout),
            **known[name].totals,
        )
        for name, role in models.items()
    }


@cache
def _stages(
    parts: LayerSizes, shape: ModelShape, layout: TrainLayout
) -> tuple[tuple[ChunkSize, ...], ...]:
    """As `LayerSizes.stages`: a search asks for a layout with dozens of other keys."""
    return parts.stages(shape, layout)


def _in_parts(role: Role, tp: int) -> Role:
    """The role in a layout whose stages are the parts: the embedding, one layer of each kind, and the output layer.

    Without adapters, which are counted for a whole layout.
    """
    ep = role.shape.num_experts or 1
    stages = _part_stages(role.shape)
    train = {
        "tp": tp,
        "pp": len(stages),
        "vpp": 1,
        "ep": ep,
        "etp": None,
        "cp": 1,
        "layers_per_stage": stages,
    }
    gpus = len(stages) * math.lcm(tp, ep)
    placement = {"gpus": gpus, "train_gpus": None}
    recipe: Recipe = overlaid(role.recipe, {"train": train, "placement": placement, "lora": None})
    return replace(role, recipe=recipe, layout=train_layout(recipe))


def _first_layers(shape: ModelShape) -> dict[_Kind, int]:
    """The first layer of each kind that the model has."""
    first: dict[_Kind, int] = {}
    for layer in range(shape.num_layers):
        first.setdefault(_kind(shape, layer), layer)
    return first


def _kind(shape: ModelShape, layer: int) -> _Kind:
    if shape.is_dense(layer):
        return "dense"
    return "linear" if shape.is_linear(layer) else "sparse"


def _cuts(shape: ModelShape) -> list[int]:
    """Where stages begin and end in which the first layer of each kind is alone."""
    first = _first_layers(shape).values()
    return sorted({0, shape.num_layers, *first, *(layer + 1 for layer in first)})


def _part_stages(shape: ModelShape) -> list[int]:
    """Layers of each stage: none beside the embedding, as `_cuts` says, none beside the output layer."""
    return [0, *(end - start for start, end in pairwise(_cuts(shape))), 0]


def _parts_of(size: ModelSize) -> LayerSizes:
    shape = size.shape
    stages = [chunks[0] for chunks in size.stages]
    # then the last norm is where the last layer is (transformer_block.py): move it behind
    if shape.num_mtp_layers:
        norm = ChunkSize(shape.hidden_size, 0, 0, 0, 0)
        stages[-2:] = [_sum([stages[-2], _times(norm, -1)]), _sum([stages[-1], norm])]
    cuts = _cuts(shape)
    by_kind = {kind: stages[1 + cuts.index(layer)] for kind, layer in _first_layers(shape).items()}
    return LayerSizes(
        embedding=stages[0],
        dense_layer=by_kind.get("dense", _NOTHING),
        linear_layer=by_kind.get("linear", _NOTHING),
        sparse_layer=by_kind.get("sparse", _NOTHING),
        last=stages[-1],
    )


def _times(part: ChunkSize, number: int) -> ChunkSize:
    return ChunkSize(*(number * value for value in _values(part)))


def _sum(parts: Sequence[ChunkSize]) -> ChunkSize:
    return ChunkSize(*map(sum, zip(*map(_values, parts), strict=True)))

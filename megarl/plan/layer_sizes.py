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
from operator import attrgetter

from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.model.shape import ModelShape
from megarl.parallel.chunk_sizes import ChunkSize
from megarl.placement.roles import Role, RoleName, train_layout
from megarl.placement.train_layout import TrainLayout
from megarl.plan.adapter_sizes import Stages
from megarl.plan.model_size import ModelSize, ModelSizes, sizes_of

_NOTHING = ChunkSize(0, 0, 0, 0, 0)
_values = attrgetter(*(value.name for value in fields(ChunkSize)))


@dataclass(frozen=True)
class LayerSizes:
    """What one tensor-parallel rank holds of each part of a model, where each expert has a rank of its own.

    last: the last norm, the output layer, and the layers of multi-token prediction with their embedding.
    """

    embedding: ChunkSize
    dense_layer: ChunkSize
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
        number = chunk * layout.pp + stage
        stages = layout.pp * layout.vpp
        # An output layer tied to it, and multi-token prediction, have an embedding of their own on another rank alone.
        is_in_last = stages == 1 and (shape.tied or shape.num_mtp_layers)
        chunk_size = _sum(
            [
                _times(self.embedding, number == 0 and not is_in_last),
                _times(self.dense_layer, num_dense),
                _times(self._sparse(self.sparse_layer, 1, shape, layout), len(layers) - num_dense),
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


def _part_stages(shape: ModelShape) -> list[int]:
    """Layers of each stage: none beside the embedding, one and the rest of each kind, none beside the output layer."""
    inside = [layers for kind in _kinds(shape) for layers in (1, kind - 1)]
    return [0, *filter(None, inside), 0]


def _kinds(shape: ModelShape) -> list[int]:
    """The numbers of dense layers and of layers with experts, without a kind that the model does not have."""
    return list(filter(None, (shape.num_dense_layers, shape.num_sparse_layers)))


def _parts_of(size: ModelSize) -> LayerSizes:
    shape = size.shape
    stages = [chunks[0] for chunks in size.stages]
    dense = shape.num_dense_layers
    # then the last norm is where the last layer is (transformer_block.py): move it behind
    if shape.num_mtp_layers:
        norm = ChunkSize(shape.hidden_size, 0, 0, 0, 0)
        stages[-2:] = [_sum([stages[-2], _times(norm, -1)]), _sum([stages[-1], norm])]
    first_sparse = 1 + min(dense, 2)  # behind the embedding, one dense layer, and the rest of them
    return LayerSizes(
        embedding=stages[0],
        dense_layer=stages[1] if dense else _NOTHING,
        sparse_layer=stages[first_sparse] if shape.num_sparse_layers else _NOTHING,
        last=stages[-1],
    )


def _times(part: ChunkSize, number: int) -> ChunkSize:
    return ChunkSize(*(number * value for value in _values(part)))


def _sum(parts: Sequence[ChunkSize]) -> ChunkSize:
    return ChunkSize(*map(sum, zip(*map(_values, parts), strict=True)))

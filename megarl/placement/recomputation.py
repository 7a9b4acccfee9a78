"""Which activations the ranks of a pipeline stage do not keep, and compute again in the backward pass. Pure.

`train.recompute` names parts of a layer, each with the number of pipeline ranks, from the first, whose layers compute
it again: the first ones keep the activations of the most micro-batches. Without the key `train.megatron` decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.model.shape import ModelShape
from megarl.types import RecomputedPart, UserError
from megarl.types.listed import ErrorIterator, listed

if TYPE_CHECKING:
    from megarl.config.models import TrainConfig

FIELDS = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
_FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "recompute_modules": None,
}
# what is computed again with the experts' layer
_IN_MOE = {"moe_act", "shared_experts"}


def recompute_fields(train: TrainConfig, stage: int) -> dict[str, Any]:
    """Megatron's fields for the ranks of a pipeline stage, counted from 0."""
    if not train.recompute:
        return {name: train.megatron[name] for name in FIELDS if name in train.megatron}
    parts = {part for part, num_stages in train.recompute.items() if stage < num_stages}
    if "layer" in parts:
        return _FULL
    if "moe" in parts:
        parts -= _IN_MOE
    fields: dict[str, Any] = dict.fromkeys(FIELDS)
    if parts:
        fields |= {"recompute_granularity": "selective", "recompute_modules": sorted(parts)}
    return fields


def recomputed_parts(train: TrainConfig, stage: int) -> frozenset[RecomputedPart]:
    """The same by part: "layer" alone where whole layers are computed again, by whichever method of Megatron's."""
    fields = recompute_fields(train, stage)
    if fields.get("recompute_granularity") == "full":
        return frozenset({"layer"})
    if fields.get("recompute_granularity") == "selective":
        return frozenset(fields.get("recompute_modules") or ["core_attn"])
    return frozenset()


# What is computed again for ever more memory: from the parts that take the fewest seconds for it to whole layers.
_LADDER: tuple[frozenset[RecomputedPart], ...] = (
    frozenset(),
    frozenset({"layernorm", "moe_act"}),
    frozenset({"layernorm", "moe_act", "mla_up_proj"}),
    frozenset({"layernorm", "moe_act", "mla_up_proj", "shared_experts", "mlp"}),
    frozenset({"layernorm", "mla_up_proj", "mlp", "moe"}),
    frozenset({"layer"}),
)


def ladder(shape: ModelShape) -> list[frozenset[RecomputedPart]]:
    """What a model's layers may compute again: each takes less memory and more seconds than the one before."""
    has = parts_of(shape)
    if not (shape.num_experts or shape.mla):
        # TransformerEngine fuses all norms with the products behind them
        has.discard("layernorm")
    steps: list[frozenset[RecomputedPart]] = []
    for parts in _LADDER:
        step = frozenset(parts & has)
        if step not in steps:
            steps.append(step)
    return steps


def recompute_keys(train: TrainConfig, parts: frozenset[RecomputedPart], pp: int) -> dict[str, Any]:
    """Keys of `train` by which all `pp` pipeline ranks compute these parts again, and no others."""
    keys: dict[str, Any] = {
        "recompute": dict.fromkeys(train.recompute, 0) | dict.fromkeys(parts, pp)
    }
    if cleared := cleared_fields(train):
        keys["megatron"] = cleared
    return keys


def cleared_fields(train: TrainConfig) -> dict[str, None]:
    """Megatron's fields that the recipe sets, without their values: `train.recompute` decides in their place."""
    return dict.fromkeys(name for name in FIELDS if name in train.megatron)


def parts_of(shape: ModelShape) -> set[RecomputedPart]:
    """The parts that a model's layers have."""
    parts: set[RecomputedPart] = {"layer", "core_attn", "layernorm"}
    if shape.mla:
        parts.add("mla_up_proj")
    if shape.num_dense_layers:
        parts.add("mlp")
    if shape.num_experts:
        parts |= {"moe", "moe_act"}
    if shape.num_shared_experts:
        parts.add("shared_experts")
    return parts


def without_lacking(train: TrainConfig, shape: ModelShape) -> TrainConfig:
    """The keys without parts that this model's layers do not have."""
    has = parts_of(shape)
    parts = {part: count if part in has else 0 for part, count in train.recompute.items()}
    return train.model_copy(update={"recompute": parts})


@listed
def recompute_errors(train: TrainConfig, shape: ModelShape | None) -> ErrorIterator:
    """Parts that the model lacks, and keys that say the same twice."""
    key = "train.recompute"
    twice = [
        name for name in (*FIELDS, "moe_layer_recompute") if train.megatron.get(name) is not None
    ]
    if train.recompute and twice:
        problem = f"{twice[0]} says the same as train.recompute"
        yield UserError(f"train.megatron.{twice[0]}", problem, "remove one of them")
    if shape is None:
        return
    has = parts_of(shape)
    for part, num_stages in train.recompute.items():
        if num_stages and part not in has:
            hint = f"remove it, or name one of {', '.join(sorted(has))}"
            yield UserError(f"{key}.{part}", "the model's layers have no such part", hint)

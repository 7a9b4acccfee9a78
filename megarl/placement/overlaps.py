"""Megatron's options that hide exchanges behind products, and the errors where they are not exact here. Pure.

A recipe sets them in `train.megatron`; what they gain is in plan/layer_time.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.model.shape import ModelShape
from megarl.placement.flex_dispatcher import DISPATCHER, is_flex
from megarl.placement.recomputation import recomputed_parts
from megarl.placement.train_layout import TrainLayout
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

if TYPE_CHECKING:
    from megarl.config.models import TrainConfig

# another micro-batch's products beside the exchange with experts: Megatron's combined 1F1B
PAIRED_PASSES = "overlap_moe_expert_parallel_comm"
SHARED_EXPERTS = "moe_shared_expert_overlap"
# what a search sets in `train.megatron`: an exchange of which nothing is hidden, and then others
PLAIN_EXCHANGE: dict[str, bool | str | None] = {
    PAIRED_PASSES: None,
    SHARED_EXPERTS: None,
    DISPATCHER: None,
}
OTHER_EXCHANGES = (
    {**PLAIN_EXCHANGE, PAIRED_PASSES: True},
    {**PLAIN_EXCHANGE, SHARED_EXPERTS: True},
    {**PLAIN_EXCHANGE, DISPATCHER: "flex"},
    {**PLAIN_EXCHANGE, DISPATCHER: "flex", PAIRED_PASSES: True},
)
# what no rank may do, however it is laid out
_REFUSED = {
    "tp_comm_overlap": "TransformerEngine's buffers for it have the length of one row, and packed rows differ",
    "delay_wgrad_compute": "only TransformerEngine's layers do it: it was never compared with a plain step",
    "ep_overlap_early_attn_memory_release": "it runs passes in another order, which was never compared with one rank",
}


@listed
def overlap_errors(
    train: TrainConfig, shape: ModelShape | None, layout: TrainLayout, dtype: str, branch: str
) -> ErrorIterator:
    """Of ranks with a model of this shape and type in this layout, whose sizes are in a branch of the recipe."""
    options = train.megatron
    for option, problem in _REFUSED.items():
        if options.get(option):
            yield UserError(f"train.megatron.{option}", problem, "remove it")
    if shape is None:
        return
    if options.get(PAIRED_PASSES):
        yield from _paired_errors(train, shape, layout, dtype, branch)
    if options.get(SHARED_EXPERTS):
        yield from _shared_errors(train, shape, layout)


def without_unused(
    train: TrainConfig, shape: ModelShape, layout: TrainLayout, *, trains: bool
) -> TrainConfig:
    """The keys without overlaps of exchanges that an auxiliary model does not have: they are set for the policy."""
    unused: set[str] = set()
    if not (trains and _exchanges(shape, layout)):
        unused.add(PAIRED_PASSES)
    if not shape.num_shared_experts:
        unused.add(SHARED_EXPERTS)
    if is_flex(train) and not (shape.num_experts and layout.ep * layout.etp > 1):
        unused.add(DISPATCHER)
    options = {key: value for key, value in train.megatron.items() if key not in unused}
    return train.model_copy(update={"megatron": options})


def _exchanges(shape: ModelShape, layout: TrainLayout) -> bool:
    """Whether tokens go to experts of other ranks."""
    return bool(shape.num_experts) and layout.ep > 1


def _again(train: TrainConfig, layout: TrainLayout) -> set[str]:
    """The parts that any pipeline rank computes again."""
    return {part for stage in range(layout.pp) for part in recomputed_parts(train, stage)}


def _paired_errors(
    train: TrainConfig, shape: ModelShape, layout: TrainLayout, dtype: str, branch: str
) -> ErrorIterator:
    where = f"train.megatron.{PAIRED_PASSES}"
    if not _exchanges(shape, layout):
        yield UserError(where, "no tokens go to experts of other ranks", "remove it")
        return
    if dtype != "bfloat16":
        yield UserError(where, f"set, but Megatron refuses it in {dtype}", "remove it")
    if layout.pp > 1 and layout.vpp == 1:
        problem = f"{branch}.pp is {layout.pp} without virtual stages, whose passes Megatron pairs"
        yield UserError(where, problem, f"set {branch}.vpp to 2 or more, or remove it")
    if layout.max_cp > 1:
        problem = "it was never compared with one rank where rows are split by their length"
        yield UserError(where, problem, f"set {branch}.cp to a number, or remove it")
    for part in sorted(_again(train, layout) & {"layer", "moe"}):
        problem = f"Megatron does not compute {part} again where it runs the parts of a layer"
        yield UserError(where, problem, "name other parts in train.recompute, or remove it")
    if train.megatron.get("moe_layer_recompute"):
        problem = "moe_layer_recompute is set too, and Megatron ignores it in the parts of a layer"
        yield UserError(where, problem, "remove one of them")
    # with ETP experts read what is gathered from several ranks, which is not freed
    if layout.ep == shape.num_experts and layout.etp == 1 and not is_flex(train):
        problem = "with one expert a rank Megatron frees its input, which the backward pass reads"
        dispatcher = "set train.megatron.moe_token_dispatcher_type to flex"
        hint = f"lower {branch}.ep below {layout.ep}, {dispatcher}, or remove it"
        yield UserError(where, problem, hint)
    if shape.num_mtp_layers and layout.pp == 1:
        problem = "Megatron refuses it where layers of multi-token prediction are in the only stage"
        hint = f"set {branch}.pp and {branch}.vpp to 2 or more, or remove it"
        yield UserError(where, problem, hint)
    if train.mtp_loss:
        problem = "Megatron does not run multi-token prediction in parts with packed rows"
        yield UserError(where, problem, "set train.mtp_loss to 0, or remove it")
    if train.megatron.get(SHARED_EXPERTS):
        problem = f"{SHARED_EXPERTS} is set too, and both want the same exchange"
        yield UserError(where, problem, "remove one of them")


def _shared_errors(train: TrainConfig, shape: ModelShape, layout: TrainLayout) -> ErrorIterator:
    where = f"train.megatron.{SHARED_EXPERTS}"
    if not shape.num_shared_experts:
        yield UserError(where, "the model has no shared experts", "remove it")
    if train.megatron.get(DISPATCHER) not in (None, "alltoall"):
        problem = "train.megatron.moe_token_dispatcher_type is not alltoall, which runs them"
        yield UserError(where, problem, "remove one of them")
    if "shared_experts" in _again(train, layout):
        problem = "the shared experts are computed again, and Megatron does not do both"
        yield UserError(where, problem, "leave shared_experts out of train.recompute, or remove it")

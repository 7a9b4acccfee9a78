"""Megatron's flex dispatcher, which sends tokens to experts by DeepEP, and the recipes that it cannot run. Pure.

Sizes of groups are those that github.com/deepseek-ai/DeepEP asserts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.model.shape import ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

if TYPE_CHECKING:
    from megarl.config.models import TrainConfig

DISPATCHER = "moe_token_dispatcher_type"
_NODE_RANKS = 8  # DeepEP's NUM_MAX_NVL_PEERS: so many neighbours of a group are a node to it
_DROPS = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")


def is_flex(train: TrainConfig) -> bool:
    """Whether the recipe asks for DeepEP in training."""
    return train.megatron.get(DISPATCHER) == "flex"


@listed
def flex_errors(
    train: TrainConfig,
    shape: ModelShape | None,
    layout: TrainLayout,
    gpus_per_node: int,
    branch: str,
) -> ErrorIterator:
    """Of ranks with a model of this shape in this layout, whose sizes are in a branch of the recipe."""
    if not is_flex(train):
        return
    where = f"train.megatron.{DISPATCHER}"
    ranks = layout.ep * layout.etp
    if shape is not None and (ranks == 1 or not shape.num_experts):
        yield UserError(where, "flex, but no tokens go to experts of other ranks", "remove it")
    if ranks > _NODE_RANKS and ranks % _NODE_RANKS:
        problem = (
            f"flex, but DeepEP takes up to {_NODE_RANKS} ranks or a multiple of it, not {ranks}"
        )
        yield UserError(where, problem, f"set {branch}.ep to another size, or remove it")
    elif min(ranks, _NODE_RANKS) > gpus_per_node:
        problem = f"flex, but DeepEP takes {min(ranks, _NODE_RANKS)} neighbours for one node, of {gpus_per_node} GPUs"
        yield UserError(where, problem, f"lower {branch}.ep, or remove it")
    router = train.megatron.get("moe_router_dtype", "fp32")
    if router != "fp32":
        problem = f"{router}, but DeepEP takes weights of experts in fp32"
        yield UserError("train.megatron.moe_router_dtype", problem, "set it to fp32")
    for option in _DROPS:
        if train.megatron.get(option):
            problem = (
                "set, but tokens that are dropped were never compared with one rank above flex"
            )
            yield UserError(f"train.megatron.{option}", problem, "remove it")


@listed
def flex_device_errors(
    train: TrainConfig, dtype: str, device: str, *, lacks_deepep: bool
) -> ErrorIterator:
    """Of a run on this device with weights of this type; lacks_deepep: this machine has GPUs and no `deep_ep`."""
    if not is_flex(train):
        return
    where = f"train.megatron.{DISPATCHER}"
    backend = train.megatron.get("moe_flex_dispatcher_backend", "deepep")
    if device == "cpu" and backend != "deepep":
        problem = f"{backend}, but only DeepEP has a stand-in on CPU"
        yield UserError("train.megatron.moe_flex_dispatcher_backend", problem, "set it to deepep")
    if device == "cuda" and dtype != "bfloat16":
        yield UserError(where, f"flex, but DeepEP sends bfloat16, not {dtype}", "remove it")
    if lacks_deepep and backend == "deepep":
        yield UserError(where, "flex, but deep_ep is not installed", "install DeepEP, or remove it")

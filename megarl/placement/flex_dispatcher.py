"""Megatron's flex dispatcher, which sends tokens to experts by DeepEP, and the recipes that it cannot run. Pure.

Sizes of groups are those that github.com/deepseek-ai/DeepEP asserts. Its other backend, HybridEP (the branch
hybrid-ep), gathers the routing of all ranks of a group as if each had as many tokens as this one: ranks with packed
rows of other lengths would wait for each other or get wrong tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.device import DEEPEP_NODE_RANKS
from megarl.model.shape import ModelShape
from megarl.placement.train_layout import TrainLayout, nearest
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

if TYPE_CHECKING:
    from megarl.config.models import TrainConfig

DISPATCHER = "moe_token_dispatcher_type"
_BACKEND = "moe_flex_dispatcher_backend"
# the sizes of groups in the tables of DeepEP's Buffer.get_dispatch_config and get_combine_config
GROUP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_DROPS = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")


def is_flex(train: TrainConfig) -> bool:
    """Whether the recipe asks for DeepEP in training."""
    return train.megatron.get(DISPATCHER) == "flex"


@listed
def flex_errors(
    train: TrainConfig,
    shape: ModelShape | None,
    layout: TrainLayout,
    slots: range,
    gpus_per_node: int,
    branch: str,
) -> ErrorIterator:
    """Of ranks on these slots with a model of this shape in this layout, whose sizes are in a branch of the recipe."""
    if not is_flex(train):
        return
    where = f"train.megatron.{DISPATCHER}"
    ranks = layout.ep * layout.etp
    if shape is not None and (ranks == 1 or not shape.num_experts):
        yield UserError(where, "flex, but no tokens go to experts of other ranks", "remove it")
    elif ranks not in (1, *GROUP_SIZES):
        product = f"{branch}.ep x {branch}.etp is {ranks}"
        problem = f"flex, but {product}, and DeepEP takes {', '.join(map(str, GROUP_SIZES))} ranks"
        hint = f"set {branch}.ep so that ep x etp is {nearest(ranks, [*GROUP_SIZES])}, or remove it"
        yield UserError(where, problem, hint)
    else:
        yield from _node_errors(min(ranks, DEEPEP_NODE_RANKS), slots, gpus_per_node, branch)
    if train.megatron.get(_BACKEND, "deepep") != "deepep":
        problem = (
            "hybridep, which needs as many tokens on every rank, but packed rows differ in length"
        )
        yield UserError(f"train.megatron.{_BACKEND}", problem, "set it to deepep")
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


def _node_errors(neighbours: int, slots: range, gpus_per_node: int, branch: str) -> ErrorIterator:
    """An error for the first ranks that DeepEP takes for one node and that are on two. neighbours: of such a node."""
    for first in slots[::neighbours]:
        last = first + neighbours - 1
        if first // gpus_per_node == last // gpus_per_node:
            continue
        taken = f"DeepEP takes the ranks on slots {first} to {last} for one node"
        problem = f"flex, but {taken}, and placement.gpus_per_node is {gpus_per_node}"
        if gpus_per_node % neighbours:
            hint = f"lower {branch}.ep until ep x etp divides {gpus_per_node}, or remove it"
        else:
            hint = f"set {branch}.first_gpu to a multiple of {neighbours}, or remove it"
        yield UserError(f"train.megatron.{DISPATCHER}", problem, hint)
        return


@listed
def flex_device_errors(
    train: TrainConfig, dtype: str, device: str, *, lacks_deepep: bool
) -> ErrorIterator:
    """Of a run on this device with weights of this type; lacks_deepep: this machine has GPUs and no `deep_ep`."""
    if not is_flex(train):
        return
    where = f"train.megatron.{DISPATCHER}"
    if device == "cuda" and dtype != "bfloat16":
        yield UserError(where, f"flex, but DeepEP sends bfloat16, not {dtype}", "remove it")
    if lacks_deepep:
        yield UserError(where, "flex, but deep_ep is not installed", "install DeepEP, or remove it")

"""Faults of `lora`: layers that the model does not have, and what was not shown to work together with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.checkpoints import peft
from megarl.config import Recipe
from megarl.parallel.roles import Roles, lora_size
from megarl.resharding.lora_map import TARGETS, targets_of
from megarl.types import ModelShape, UserFault

Faults = list[UserFault]
_LEAVE_OUT = "leave lora out"
# Of train.megatron: options under which a layer's input or output has another parallel state, or that were not tried.
_MEGATRON = (
    *("moe_shared_expert_overlap", "fp8", "fp4", "cpu_offloading", "delay_wgrad_compute", "tp_comm_overlap"),
    "fine_grained_activation_offloading",  # frees what the adapters of experts have saved
)


def lora_faults(roles: Roles) -> Faults:
    """Faults of the recipe's adapters."""
    recipe, shape = roles.recipe, roles.policy.model.known_shape
    if recipe.lora is None:
        return []
    return [*_target_faults(recipe, shape), *_combination_faults(recipe)]


def adapter_faults(roles: Roles) -> Faults:
    """Faults of the adapters that the policy's ranks begin with."""
    lora, size, shape = roles.policy.recipe.lora, roles.policy.lora, roles.policy.model.known_shape
    return peft.check(lora.path, shape, size) if lora and lora.path and size and shape else []


def _target_faults(recipe: Recipe, shape: ModelShape | None) -> Iterator[UserFault]:
    size = lora_size(recipe)
    assert size
    known = targets_of(shape) if shape else TARGETS
    for target in size.targets:
        if target not in known:
            yield UserFault("lora.targets", f"the model has no layer {target}", f"choose from {', '.join(known)}")
    if recipe.lora and recipe.lora.experts and shape and not shape.num_experts:
        yield UserFault("lora.experts", "the model has no experts", "leave lora.experts out")
    only_experts = {"gate_proj", "up_proj", "down_proj"}
    has_dense = shape is None or not shape.num_experts or shape.num_dense_layers or shape.num_shared_experts
    if size.targets and not size.expert_rank and not has_dense and set(size.targets) <= only_experts:
        yield UserFault("lora.experts", "0, and lora.targets has no other layers: nothing is trained", "set it to 1")


def _combination_faults(recipe: Recipe) -> Iterator[UserFault]:
    train, engine = recipe.train, recipe.rollout.engine
    refused: dict[str, tuple[Any, str, str]] = {
        "train.router_bias_rate": (train.router_bias_rate, "with lora the routers stay as they are", "set it to 0"),
        "train.mtp_loss": (train.mtp_loss, "with lora the MTP layers stay as they are", "set it to 0"),
        "train.optimizer_offload": (train.optimizer_offload, "not tried with lora", "set it to false"),
        "rollout.engine.fp8": (engine.fp8, "its tiles would round most of an adapter's update away", "set it to false"),
    }
    for key in _MEGATRON:
        refused[f"train.megatron.{key}"] = train.megatron.get(key), "not tried with lora", "remove it"
    for key, (value, why, mend) in refused.items():
        if value:
            yield UserFault(key, f"{value}, but {why}", f"{mend}, or {_LEAVE_OUT}")

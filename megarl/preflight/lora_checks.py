"""Errors of `lora`: layers that the model does not have, and what was not shown to work together with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.checkpoints import peft
from megarl.config import Recipe
from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.placement.roles import Role, Roles, trains_merged
from megarl.resharding.lora_map import TARGETS, targets_of
from megarl.resharding.lora_slots import MLP, modules, unknown_modules
from megarl.types import UserError

Errors = list[UserError]
_LEAVE_OUT = "leave lora out"
# Of train.megatron: options under which a layer's input or output has another parallel state, or that were not tried.
_MEGATRON = (
    *(
        "moe_shared_expert_overlap",
        "fp8",
        "fp4",
        "cpu_offloading",
        "delay_wgrad_compute",
        "tp_comm_overlap",
    ),
    "fine_grained_activation_offloading",  # frees what the adapters of experts have saved
)
# of batches that SGLang cuts in two
_OVERLAPS = ("enable_two_batch_overlap", "enable_single_batch_overlap")


def lora_errors(roles: Roles) -> Errors:
    """Errors of the recipe's adapters."""
    recipe = roles.recipe
    shape = roles.policy.model.known_shape
    if recipe.lora is None:
        return []
    size = roles.policy.lora
    assert size
    found = [*_target_errors(recipe, size, shape), *_combination_errors(recipe, size)]
    return found + ([*_slot_errors(recipe, size, shape)] if size.in_slots else [])


def adapter_errors(roles: Roles) -> Errors:
    """Errors of the adapters that the policy's ranks begin with."""
    lora = roles.policy.recipe.lora
    size = roles.policy.lora
    shape = roles.policy.model.known_shape
    if lora and lora.path and size and shape:
        return peft.check(lora.path, shape, size)
    return []


def sharing_errors(roles: Roles) -> Errors:
    """Errors of a critic and a reward model that compute with the policy's frozen weights."""
    recipe = roles.recipe
    errors = []
    if recipe.critic.shares_weights and roles.critic:
        errors += _sharing_errors("critic", "shares_weights", roles.critic, roles)
        if not roles.critic.has_scores:
            problem = "true, but an implicit reward model learns all of its weights"
            errors.append(UserError("critic.shares_weights", problem, "leave it out"))
    if recipe.reward_model.adapters and roles.reward_model:
        errors += _sharing_errors("reward_model", "adapters", roles.reward_model, roles)
    return errors


def _sharing_errors(branch: str, key: str, role: Role, roles: Roles) -> Iterator[UserError]:
    recipe = roles.recipe
    policy = roles.policy
    where = f"{branch}.{key}"
    if recipe.lora is None:
        yield UserError(
            where,
            "set, but without lora the policy's weights are not frozen",
            "set lora, or leave it out",
        )
        return
    if getattr(recipe, branch).path:
        yield UserError(
            f"{branch}.path",
            f"set, and {where} asks for the policy's weights",
            "leave one of them out",
        )
    if trains_merged(recipe):
        problem = f"merged, but then 16-bit weights of the policy change in each step, and {where} shares them"
        yield UserError("lora.sync", problem, f"set it to adapters, or leave {where} out")
    if role.slots != policy.slots or role.layout != policy.layout:
        problem = f"other slots or sizes than the policy's, whose weights {where} shares"
        yield UserError(f"{branch}.ranks", problem, f"leave {branch}.ranks out, or {where}")


def cpu_errors(roles: Roles) -> Errors:
    """Adapters that SGLang's engines have on GPUs alone."""
    size = roles.policy.lora
    shape = roles.policy.model.known_shape
    engine = roles.recipe.rollout.engine
    if size is None or not size.in_slots:
        return []
    found = []
    hint = "set it to merged, or lora.targets to layers of the attention"
    if _wraps_experts(size, shape):
        problem = "adapters, but SGLang on CPU has no adapters for layers with experts"
        found.append(UserError("lora.sync", problem, hint))
    if shape and "kv_b_proj" in modules(shape, size):
        problem = "adapters, but SGLang on CPU has no adapters for kv_b_proj"
        found.append(
            UserError(
                "lora.sync", problem, "set it to merged, or leave kv_b_proj out of lora.targets"
            )
        )
    if engine.dp > 1:
        problem = f"{engine.dp}, but SGLang on CPU has no adapters with DP attention"
        found.append(UserError("rollout.engine.dp", problem, "set it to 1, or lora.sync to merged"))
    return found


def _wraps_experts(size: LoraSize, shape: ModelShape | None) -> bool:
    """Whether SGLang wraps the experts: it does for any adapter of an MLP layer, with zeros where experts have none."""
    return bool(shape and shape.num_experts and {*MLP} & {*modules(shape, size)})


def _target_errors(recipe: Recipe, size: LoraSize, shape: ModelShape | None) -> Iterator[UserError]:
    known = targets_of(shape) if shape else TARGETS
    for target in size.targets:
        if target not in known:
            yield UserError(
                "lora.targets",
                f"the model has no layer {target}",
                f"choose from {', '.join(known)}",
            )
    if recipe.lora and recipe.lora.experts and shape and not shape.num_experts:
        yield UserError("lora.experts", "the model has no experts", "leave lora.experts out")
    only_experts = {"gate_proj", "up_proj", "down_proj"}
    has_dense = (
        shape is None or not shape.num_experts or shape.num_dense_layers or shape.num_shared_experts
    )
    if (
        size.targets
        and not size.expert_rank
        and not has_dense
        and set(size.targets) <= only_experts
    ):
        yield UserError(
            "lora.experts",
            "0, and lora.targets has no other layers: nothing is trained",
            "set it to 1",
        )


def _combination_errors(recipe: Recipe, size: LoraSize) -> Iterator[UserError]:
    train = recipe.train
    engine = recipe.rollout.engine
    refused: dict[str, tuple[Any, str, str]] = {
        "train.router_bias_rate": (
            train.router_bias_rate,
            "with lora the routers stay as they are",
            "set it to 0",
        ),
        "train.mtp_loss": (
            train.mtp_loss,
            "with lora the MTP layers stay as they are",
            "set it to 0",
        ),
        "train.optimizer_offload": (
            train.optimizer_offload,
            "not tried with lora",
            "set it to false",
        ),
    }
    if not size.in_slots:
        why = "its tiles would round most of an adapter's update away"
        hint = (
            "set it to false, or lora.sync to adapters and lora.targets to layers of the attention"
        )
        refused["rollout.engine.fp8"] = engine.fp8, why, hint
    for key in _MEGATRON:
        refused[f"train.megatron.{key}"] = (
            train.megatron.get(key),
            "not tried with lora",
            "remove it",
        )
    for key, (value, why, hint) in refused.items():
        if value:
            yield UserError(key, f"{value}, but {why}", f"{hint}, or {_LEAVE_OUT}")


def _slot_errors(recipe: Recipe, size: LoraSize, shape: ModelShape | None) -> Iterator[UserError]:
    """What SGLang 0.5.21 cannot compute with adapters of its own, or what was not shown to work."""
    engine = recipe.rollout.engine
    uneven = engine.dp not in (1, engine.tp)
    backend = engine.sglang.get("moe_runner_backend", "triton")
    whole = f"set it to 1 or {engine.tp}"
    refused: dict[str, tuple[Any, str, str]] = {
        "rollout.engine.draft": (
            engine.draft,
            "drafts were not tried with SGLang's adapters",
            "set it to 0",
        ),
        "rollout.engine.dp": (
            uneven and engine.dp,
            "SGLang's adapters need the attention whole on each GPU",
            whole,
        ),
        "rollout.seeded": (
            recipe.rollout.seeded,
            "SGLang's adapters depend on the batch",
            "set it to false",
        ),
        "lora.rounding": (
            size.rounding != "nearest" and size.rounding,
            "nothing is merged",
            "leave it out",
        ),
    }
    for key in _OVERLAPS:
        why = "SGLang prepares adapters for whole batches"
        refused[f"rollout.engine.sglang.{key}"] = engine.sglang.get(key), why, "remove it"
    if _wraps_experts(size, shape):
        remove = "remove it"
        refused |= {
            "rollout.engine.experts": (
                engine.experts == "deepep" and "deepep", "SGLang's adapters of experts do not work with it", remove
            ),
            "rollout.engine.fp8": (
                engine.fp8, "SGLang would compute experts with the fp8 weights of its start", "set it to false"
            ),
            "rollout.engine.sglang.moe_runner_backend": (
                backend != "triton" and backend, "of experts only Triton's layout of adapters is known", remove
            ),
        }  # fmt: skip
    for key, (value, why, hint) in refused.items():
        if value:
            yield UserError(key, f"{value}, but {why}", f"{hint}, or set lora.sync to merged")
    if shape:
        yield from _missing_slots(size, shape, fp8=engine.fp8)


def _missing_slots(size: LoraSize, shape: ModelShape, *, fp8: bool) -> Iterator[UserError]:
    """Layers of the model for which SGLang has no adapters."""
    hint = "out of lora.targets, or set lora.sync to merged"
    for name in unknown_modules(shape, size):
        yield UserError("lora.targets", f"SGLang has no adapters for {name}", f"leave it {hint}")
    if fp8 and "kv_b_proj" in modules(shape, size):
        yield UserError(
            "lora.targets",
            "SGLang's adapters hide the scales of kv_b_proj in fp8",
            f"leave it {hint}",
        )
    if _wraps_experts(size, shape) and shape.num_dense_layers and not shape.num_shared_experts:
        problem = "SGLang has no adapters for dense layers beside experts without shared ones"
        yield UserError("lora.targets", problem, f"leave the layers of the MLP {hint}")

"""Errors of `lora`: layers that the model does not have, and what was not shown to work together with adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.checkpoints import peft
from megarl.config import EngineConfig, Recipe
from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.model.tensors import STACK
from megarl.placement.roles import Role, Roles, engine_precision, trains_merged
from megarl.resharding.lora_map import TARGETS, adapted_weights, targets_of
from megarl.resharding.lora_slots import MLP, modules, unknown_modules
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, Errors, listed

_MERGED = "set lora.sync to merged"
_EVERYTHING = LoraSize(rank=1, expert_rank=1, alpha=1.0, targets=())
# Of train.megatron: options under which a layer's input or output has another parallel state, or that were not tried.
_MEGATRON = (
    "moe_shared_expert_overlap",
    "fp8",
    "fp4",
    "cpu_offloading",
    "fine_grained_activation_offloading",  # frees what the adapters of experts have saved
)
# of batches that SGLang cuts in two
_OVERLAPS = ("enable_two_batch_overlap", "enable_single_batch_overlap")


@listed
def lora_errors(roles: Roles) -> ErrorIterator:
    """Errors of the recipe's adapters."""
    recipe = roles.recipe
    shape = roles.policy.model.known_shape
    size = roles.policy.lora
    if size is None:
        return
    if shape and shape.delta:
        problem = "adapters of a model with linear attention are not supported"
        yield UserError("lora", problem, "remove it: all weights are trained then")
        return
    yield from _target_errors(recipe, size, shape)
    yield from _combination_errors(recipe, size)
    if size.in_slots:
        yield from _slot_errors(recipe, size, shape)


def adapter_errors(roles: Roles) -> Errors:
    """Errors of the adapters that the policy's ranks begin with."""
    lora = roles.policy.recipe.lora
    size = roles.policy.lora
    shape = roles.policy.model.known_shape
    if lora and lora.path and size and shape:
        return peft.check(lora.path, shape, size)
    return []


@listed
def sharing_errors(roles: Roles) -> ErrorIterator:
    """Errors of a critic and a reward model that compute with the policy's frozen weights."""
    recipe = roles.recipe
    if recipe.critic.shares_weights and roles.critic:
        yield from _sharing_errors("critic", "shares_weights", roles.critic, roles)
        if not roles.critic.has_scores:
            yield UserError(
                "critic.shares_weights",
                "true, but an implicit reward model learns all of its weights",
                "leave it out",
            )
    if recipe.reward_model.adapters and roles.reward_model:
        yield from _sharing_errors("reward_model", "adapters", roles.reward_model, roles)


def _sharing_errors(branch: str, key: str, role: Role, roles: Roles) -> ErrorIterator:
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
        yield UserError(
            "lora.sync",
            f"merged, but then 16-bit weights of the policy change in each step, and {where} shares them",
            f"set it to adapters, or leave {where} out",
        )
    # over how many ranks each splits a row does not move a weight
    layout, of_policy = (replace(each.layout, max_cp=1) for each in (role, policy))
    if role.slots != policy.slots or layout != of_policy:
        yield UserError(
            f"{branch}.ranks",
            f"other slots or sizes than the policy's, whose weights {where} shares",
            f"leave {branch}.ranks out, or {where}",
        )


@listed
def cpu_errors(roles: Roles) -> ErrorIterator:
    """Adapters that SGLang's engines have on GPUs alone."""
    size = roles.policy.lora
    shape = roles.policy.model.known_shape
    engine = roles.recipe.rollout.engine
    if size is None or not size.in_slots:
        return
    if _wraps_experts(size, shape):
        yield UserError(
            "lora.sync",
            "adapters, but SGLang on CPU has no adapters for layers with experts",
            "set it to merged, or lora.targets to layers of the attention",
        )
    if shape and "kv_b_proj" in modules(shape, size):
        yield UserError(
            "lora.sync",
            "adapters, but SGLang on CPU has no adapters for kv_b_proj",
            "set it to merged, or leave kv_b_proj out of lora.targets",
        )
    if engine.dp > 1:
        yield UserError(
            "rollout.engine.dp",
            f"{engine.dp}, but SGLang on CPU has no adapters with DP attention",
            "set it to 1, or lora.sync to merged",
        )


def _wraps_experts(size: LoraSize, shape: ModelShape | None) -> bool:
    """Whether SGLang wraps the experts: it does for any adapter of an MLP layer, with zeros where experts have none."""
    return bool(shape and shape.num_experts and {*MLP} & {*modules(shape, size)})


def _target_errors(recipe: Recipe, size: LoraSize, shape: ModelShape | None) -> ErrorIterator:
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
    has_own_names = shape and not any(STACK in name for name in adapted_weights(shape, _EVERYTHING))
    if shape and shape.num_experts and size.expert_rank and has_own_names:
        problem = f"the experts of {shape.family} have no adapters"
        yield UserError("lora.experts", problem, "set it to 0")
    only_experts = {"gate_proj", "up_proj", "down_proj"}
    has_dense = (
        shape is None or not shape.num_experts or shape.num_dense_layers or shape.num_shared_experts
    )
    trains_others = has_dense or not only_experts.issuperset(size.targets)
    if size.targets and not size.expert_rank and not trains_others:
        yield UserError(
            "lora.experts",
            "0, and lora.targets has no other layers: nothing is trained",
            "set it to 1",
        )


def _refused(otherwise: str, *options: tuple[str, Any, str, str]) -> ErrorIterator:
    """The errors of the options that are set: of each the key, the value, why it is refused and what to write."""
    for key, value, why, hint in options:
        if value:
            yield UserError(key, f"{value}, but {why}", f"{hint}, or {otherwise}")


def _combination_errors(recipe: Recipe, size: LoraSize) -> ErrorIterator:
    train = recipe.train
    is_fp8 = recipe.rollout.engine.weights == "fp8"
    yield from _refused(
        "leave lora out",
        (
            "train.router_bias_rate",
            train.router_bias_rate,
            "with lora the routers stay as they are",
            "set it to 0",
        ),
        (
            "train.mtp_loss",
            train.mtp_loss,
            "with lora the MTP layers stay as they are",
            "set it to 0",
        ),
        (
            "train.optimizer_name",
            train.optimizer_name == "muon" and "muon",
            "the factors of adapters are no matrices of the model",
            "set it to adamw",
        ),
        (
            "train.optimizer_offload",
            train.optimizer_offload,
            "not tried with lora",
            "set it to false",
        ),
        (
            "rollout.engine.weights",
            is_fp8 and not size.in_slots and "fp8",
            "its tiles would round most of an adapter's update away",
            "set it to plain, or lora.sync to adapters and lora.targets to layers of the attention",
        ),
        *(
            (f"train.megatron.{key}", train.megatron.get(key), "not tried with lora", "remove it")
            for key in _MEGATRON
        ),
    )


def _slot_errors(recipe: Recipe, size: LoraSize, shape: ModelShape | None) -> ErrorIterator:
    """What SGLang 0.5.21 cannot compute with adapters of its own, or what was not shown to work."""
    engine = recipe.rollout.engine
    yield from _refused(
        _MERGED,
        (
            "rollout.engine.draft",
            engine.draft,
            "drafts were not tried with SGLang's adapters",
            "set it to 0",
        ),
        (
            "rollout.engine.dp",
            engine.dp not in (1, engine.tp) and engine.dp,
            "SGLang's adapters need the attention whole on each GPU",
            f"set it to 1 or {engine.tp}",
        ),
        (
            "rollout.seeded",
            recipe.rollout.seeded,
            "SGLang's adapters depend on the batch",
            "set it to false",
        ),
        (
            "lora.rounding",
            size.rounding != "nearest" and size.rounding,
            "nothing is merged",
            "leave it out",
        ),
        *(
            (
                f"rollout.engine.sglang.{key}",
                engine.sglang.get(key),
                "SGLang prepares adapters for whole batches",
                "remove it",
            )
            for key in _OVERLAPS
        ),
    )
    if _wraps_experts(size, shape):
        yield from _expert_slot_errors(engine)
    if shape:
        has_scales = engine_precision(recipe).quantises("kv_b_proj")
        yield from _missing_slots(size, shape, has_scales=has_scales)


def _expert_slot_errors(engine: EngineConfig) -> ErrorIterator:
    """What SGLang cannot compute with adapters of experts."""
    backend = engine.sglang.get("moe_runner_backend", "triton")
    yield from _refused(
        _MERGED,
        (
            "rollout.engine.experts",
            engine.experts == "deepep" and "deepep",
            "SGLang's adapters of experts do not work with it",
            "remove it",
        ),
        (
            "rollout.engine.weights",
            engine.weights == "fp8" and "fp8",
            "SGLang would compute experts with the fp8 weights of its start",
            "set it to plain",
        ),
        (
            "rollout.engine.sglang.moe_runner_backend",
            backend != "triton" and backend,
            "of experts only Triton's layout of adapters is known",
            "remove it",
        ),
    )


def _missing_slots(size: LoraSize, shape: ModelShape, *, has_scales: bool) -> ErrorIterator:
    """Layers of the model for which SGLang has no adapters. has_scales: kv_b_proj is in fp8."""
    hint = "out of lora.targets, or set lora.sync to merged"
    for name in unknown_modules(shape, size):
        yield UserError("lora.targets", f"SGLang has no adapters for {name}", f"leave it {hint}")
    if has_scales and "kv_b_proj" in modules(shape, size):
        yield UserError(
            "lora.targets",
            "SGLang's adapters hide the scales of kv_b_proj in fp8",
            f"leave it {hint}",
        )
    if _wraps_experts(size, shape) and shape.num_dense_layers and not shape.num_shared_experts:
        yield UserError(
            "lora.targets",
            "SGLang has no adapters for dense layers beside experts without shared ones",
            f"leave the layers of the MLP {hint}",
        )

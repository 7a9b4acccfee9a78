"""Megatron's own options in a recipe, checked before anything is built: key by key, then by Megatron itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megarl.device import DEVICE
from megarl.parallel.fp8_layers import engine_errors
from megarl.parallel.model import (
    DTYPES,
    TRANSFORMER_ENGINE,
    buffers_config,
    fixed_field_names,
    transformer_config,
)
from megarl.parallel.optimizer import optimizer_config, transformer_engine_error
from megarl.parallel.options import option_errors
from megarl.placement.flex_dispatcher import flex_device_errors
from megarl.placement.recomputation import recompute_errors
from megarl.placement.roles import Role
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed


def megatron_errors(role: Role, device: str) -> list[UserError]:
    """All errors of train.megatron, train.ddp and train.optimizer for the ranks of a role; device: of the run.

    Megatron's configurations check themselves when they are made, with at most one error each. They are made where all
    keys are right and the layout fits the shape. On a machine without GPUs, TransformerEngine is assumed to be
    installed where the run will be.
    """
    train = role.recipe.train
    shape = role.model.known_shape
    layout = role.layout
    lacks_deepep = DEVICE == "cuda" and importlib.util.find_spec("deep_ep") is None
    errors = [
        *option_errors(train, partial(fixed_field_names, shape)),
        *recompute_errors(train, shape),
        *role.overlap_errors(),
        *flex_device_errors(train, role.recipe.model.dtype, device, lacks_deepep=lacks_deepep),
    ]
    if layout.max_cp > 1 and not errors:
        errors += _row_group_errors(train.megatron)
    if errors or shape is None or layout.errors(shape):
        return errors
    dtype = DTYPES[role.recipe.model.dtype]
    offloaded = train.optimizer_offload and device == "cuda"
    if device == "cuda" and DEVICE != "cuda":
        # of TransformerEngine's grouped experts, which the run's machines are assumed to have
        parts = {part: count for part, count in train.recompute.items() if part != "moe_act"}
        train = train.model_copy(update={"recompute": parts})
    elif train.recompute.get("moe_act") and not TRANSFORMER_ENGINE:
        problem = "is of grouped experts alone, which need TransformerEngine"
        return [UserError("train.recompute.moe_act", problem, "remove it, or name moe")]
    # of the stages that compute the same parts again, the first
    stages = {0, *(count for count in train.recompute.values() if count < layout.pp)}
    of_stage = partial(transformer_config, role.model.required_facts, shape, layout, dtype, train)
    factories: list[Callable[[], object]] = [
        *(partial(of_stage, stage) for stage in sorted(stages)),
        lambda: buffers_config(train),
        lambda: optimizer_config(train, dtype, offloaded),
    ]
    for make in factories:
        try:
            make()
        except UserError as error:
            # several stages may have the same
            if str(error) not in map(str, errors):
                errors.append(error)
    if DEVICE == "cuda":
        missing = transformer_engine_error(train, offloaded)
        if missing:
            errors.append(missing)
        if TRANSFORMER_ENGINE and train.numbers == "engine":
            errors += engine_errors(train.fp8_backward)
    return errors


@listed
def _row_group_errors(megatron: Mapping[str, Any]) -> ErrorIterator:
    """Options that need the same context-parallel ranks in every micro-batch, which `train.cp: auto` does not have."""
    problem = "with train.cp: auto each micro-batch has its own groups of ranks"
    if megatron.get("cp_comm_type") not in (None, "p2p"):
        yield UserError("train.megatron.cp_comm_type", problem, "remove it: p2p fits all")
    scope = megatron.get("cuda_graph_scope") or "full"
    scopes = scope.split(",") if isinstance(scope, str) else scope
    for option in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"):
        # neither attention nor a router, whose exchanges a graph would repeat in the group of the first row
        if megatron.get(option) not in (None, False, "none") and {*scopes} != {"mlp"}:
            has = f"{problem}, and a graph of attention or of a router keeps those of the first"
            hint = "remove it, or set train.megatron.cuda_graph_scope to mlp"
            yield UserError(f"train.megatron.{option}", has, hint)

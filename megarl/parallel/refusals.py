"""Megatron's own options in a recipe, checked before anything is built: key by key, then by Megatron itself."""

from __future__ import annotations

from collections.abc import Callable

from megarl.device import DEVICE
from megarl.parallel.model import (
    DTYPES,
    TRANSFORMER_ENGINE,
    buffers_config,
    fixed_field_names,
    transformer_config,
)
from megarl.parallel.optimizer import optimizer_config, transformer_engine_error
from megarl.parallel.options import option_errors
from megarl.placement.recomputation import recompute_errors
from megarl.placement.roles import Role
from megarl.types import UserError


def megatron_errors(role: Role, device: str) -> list[UserError]:
    """All errors of train.megatron, train.ddp and train.optimizer for the ranks of a role; device: of the run.

    Megatron's configurations check themselves when they are made, with at most one error each. They are made where all
    keys are right and the layout fits the shape. On a machine without GPUs, TransformerEngine is assumed to be
    installed where the run will be.
    """
    train = role.recipe.train
    shape = role.model.known_shape
    layout = role.layout
    errors = [*option_errors(train, fixed_field_names), *recompute_errors(train, shape)]
    if errors or shape is None or layout.errors(shape):
        return errors
    dtype = DTYPES[role.recipe.model.dtype]
    offloaded = train.optimizer_offload and device == "cuda"
    if device == "cuda" and not TRANSFORMER_ENGINE:
        # of grouped experts alone, which need TransformerEngine
        parts = {part: count for part, count in train.recompute.items() if part != "moe_act"}
        train = train.model_copy(update={"recompute": parts})
    factories: list[Callable[[], object]] = [
        lambda: transformer_config(role.model.required_facts, shape, layout, dtype, train),
        lambda: buffers_config(train),
        lambda: optimizer_config(train, dtype, offloaded),
    ]
    for make in factories:
        try:
            make()
        except UserError as error:
            errors.append(error)
    if DEVICE == "cuda":
        missing = transformer_engine_error(train, offloaded)
        if missing:
            errors.append(missing)
    return errors

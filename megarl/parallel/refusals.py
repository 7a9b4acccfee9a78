"""Megatron's own options in a recipe, checked before anything is built: key by key, then by Megatron itself."""

from __future__ import annotations

from collections.abc import Callable

from megarl.device import DEVICE
from megarl.parallel.model import DTYPES, buffers_config, fixed_field_names, transformer_config
from megarl.parallel.optimizer import optimizer_config, transformer_engine_fault
from megarl.parallel.options import option_faults
from megarl.placement.roles import Role
from megarl.types import UserFault


def megatron_faults(role: Role, device: str) -> list[UserFault]:
    """All faults of train.megatron, train.ddp and train.optimizer for the ranks of a role; device: of the run.

    Megatron's configurations check themselves when they are made, with at most one fault each. They are made where all
    keys are right and the layout fits the shape. On a machine without GPUs, TransformerEngine is assumed to be
    installed where the run will be.
    """
    train, shape, layout = role.recipe.train, role.model.known_shape, role.layout
    faults = option_faults(train, fixed_field_names)
    if faults or shape is None or layout.faults(shape):
        return faults
    dtype, offloaded = DTYPES[role.recipe.model.dtype], train.optimizer_offload and device == "cuda"
    made: list[Callable[[], object]] = [
        lambda: transformer_config(role.model.path, shape, layout, dtype, train),
        lambda: buffers_config(train),
        lambda: optimizer_config(train, dtype, offloaded),
    ]
    for make in made:
        try:
            make()
        except UserFault as fault:
            faults.append(fault)
    missing = transformer_engine_fault(train, offloaded) if DEVICE == "cuda" else None
    return faults + ([missing] if missing else [])

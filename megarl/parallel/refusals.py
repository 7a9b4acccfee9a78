"""What Megatron says of a recipe's options before anything is built: by key first, then in its own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.device import DEVICE
from megarl.parallel.layout import TrainLayout
from megarl.parallel.model import DTYPES, buffers_config, fixed_field_names, transformer_config
from megarl.parallel.optimizer import optimizer_config, transformer_engine_fault
from megarl.parallel.options import option_faults
from megarl.types import ModelShape, UserFault

if TYPE_CHECKING:
    from megarl.config import Recipe


def megatron_faults(recipe: Recipe, shape: ModelShape | None, layout: TrainLayout, device: str) -> list[UserFault]:
    """All faults of train.megatron, train.ddp and train.optimizer; device: what the run is meant for.

    Megatron's configurations check themselves when they are made, one fault each. They are made where every key is
    right and the layout fits the shape. Without a GPU here, TransformerEngine is taken to be where the run will be.
    """
    train = recipe.train
    faults = option_faults(train, fixed_field_names)
    if faults or shape is None or layout.faults(shape):
        return faults
    dtype, offloaded = DTYPES[recipe.model.dtype], train.optimizer_offload and device == "cuda"
    made: list[Callable[[], object]] = [
        lambda: transformer_config(recipe.model.path, shape, layout, dtype, train),
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

"""Errors of recipes that ask of Muon what it does not have."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

_OF_MUON = "with train.optimizer_name: muon"
_OR_ADAMW = "or set train.optimizer_name to adamw"


@listed
def muon_errors(recipe: Recipe) -> ErrorIterator:
    """What a recipe asks of the optimizer's state or step that AdamW has and Muon has not."""
    train = recipe.train
    if train.optimizer_name != "muon":
        return
    if train.optimizer_offload:
        problem = f"true, but {_OF_MUON} a step is computed on the GPUs"
        yield UserError("train.optimizer_offload", problem, f"set it to false, {_OR_ADAMW}")
    for key, is_set, problem in (
        (
            "use_precision_aware_optimizer",
            train.optimizer.get("use_precision_aware_optimizer"),
            "masters and momentum are float32",
        ),
        (
            "decoupled_weight_decay",
            train.optimizer.get("decoupled_weight_decay") is False,
            "a decay that is added to the gradient would be lost with the gradient's size",
        ),
    ):
        if is_set:
            where = f"train.optimizer.{key}"
            yield UserError(where, f"{_OF_MUON} {problem}", f"remove it, {_OR_ADAMW}")

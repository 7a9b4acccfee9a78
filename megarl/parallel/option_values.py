"""Checks the values of Megatron's own options against the types and ranges of the fields before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megarl.config.loading import hint_of
from megarl.types import UserError

STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}
_AS_WRITTEN = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
_SHARE = Annotated[float, Field(ge=0, lt=1)]
_RANGES: dict[str, Any] = {
    "train.optimizer.adam_beta1": _SHARE,
    "train.optimizer.adam_beta2": _SHARE,
    "train.optimizer.adam_eps": Annotated[float, Field(gt=0)],
    "train.ddp.bucket_size": Annotated[int | None, Field(ge=1)],
}


def field_errors(where: str, value: Any, kind: Any) -> Iterator[UserError]:
    """The error of a value that does not fit the field's type or range, if any."""
    if kind is torch.dtype:
        kind = Literal[tuple(STATE_DTYPES)]
    adapter: TypeAdapter[Any] = TypeAdapter(_RANGES.get(where, kind), config=_AS_WRITTEN)
    errors: list[Any] = []
    # YAML has lists where a field is a tuple
    for written in [value, tuple(value)] if isinstance(value, list) else [value]:
        try:
            adapter.validate_python(written)
            return
        except ValidationError as error:
            errors = errors or error.errors()
    hints = dict.fromkeys(map(hint_of, errors))
    problem = f"{value!r:.80} is no value that Megatron's field takes"
    yield UserError(where, problem, " or ".join(hints))


def state_dtype(key: str, name: str) -> torch.dtype:
    """The data type of the optimizer's state that a recipe names. Raises UserError for an unknown name."""
    if name not in STATE_DTYPES:
        problem = f"{name!r:.80} is no type of its state"
        raise UserError(f"train.optimizer.{key}", problem, f"use {' or '.join(STATE_DTYPES)}")
    return STATE_DTYPES[name]

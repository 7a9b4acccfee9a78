"""Checks the values of Megatron's own options against the types and ranges of the fields before anything is built."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import torch

from megarl.types import UserError

STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
PRECISION_AWARE = "use_precision_aware_optimizer"  # TransformerEngine's
BFLOAT16_MOMENTS = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), "bfloat16")
# A number in bfloat16 takes no change below 2^-8 of itself. A moment x follows y by (1 - beta)(y - x), so that it stops
# where y is within 2^-8 / (1 - beta) of it: an eighth, with this beta.
HALF_MOMENTS_BETA = 1 - 2**-5
_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}  # Megatron's defaults
_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


@dataclasses.dataclass(frozen=True)
class _Range:
    """Numbers x with least <= x < end; without `has_least`, least < x < end."""

    least: float
    end: float
    text: str
    has_least: bool = True

    def holds(self, value: float) -> bool:
        return (value >= self.least if self.has_least else value > self.least) and value < self.end


_SHARE = _Range(0, 1, "a number from 0 to below 1")
_RANGES = {
    "train.optimizer.adam_beta1": _SHARE,
    "train.optimizer.adam_beta2": _SHARE,
    "train.optimizer.adam_eps": _Range(0, math.inf, "a number above 0", has_least=False),
    "train.ddp.bucket_size": _Range(1, math.inf, "a whole number above 0, or null"),
}


def field_errors(where: str, value: Any, closest: Any) -> Iterator[UserError]:
    """The error of a value that does not fit the field's type or range, if any; hint: the field's type."""
    value_range = _RANGES.get(where)
    if not _fits(value, closest):
        if value_range:
            text = value_range.text
        else:
            text = " or ".join(_alternatives(closest))
        if text:
            hint = f"set it to {text}"
        else:
            hint = "remove it: no recipe can write such a value"
        yield UserError(where, f"{value!r:.80} is no value that Megatron's field takes", hint)
    elif value_range and value is not None and not value_range.holds(value):
        yield UserError(where, f"{value!r:.80} is out of range", f"set it to {value_range.text}")


def has_bfloat16_moments(options: Mapping[str, Any]) -> bool:
    """Whether `train.optimizer` asks for both moments in bfloat16."""
    return BFLOAT16_MOMENTS.items() <= options.items()


def precision_errors(options: Mapping[str, Any]) -> Iterator[UserError]:
    """Types of the optimizer's state, each valid alone, with which it would learn something else."""
    branch = "train.optimizer"
    if options.get("main_params_dtype") == "bfloat16":
        problem = "bfloat16 masters lose every update below 2^-8 of a weight"
        yield UserError(f"{branch}.main_params_dtype", problem, "remove it")
    mean, square = (str(options.get(key, "float32")) for key in BFLOAT16_MOMENTS)
    if not {mean, square} <= STATE_DTYPES.keys():
        return
    if mean != square:
        problem = "exp_avg_dtype and exp_avg_sq_dtype differ, so that each step would copy both to float32"
        yield UserError(branch, problem, "give both moments the same type")
    if "bfloat16" not in (mean, square):
        return
    for key, default in _BETAS.items():
        beta = options.get(key, default)
        if isinstance(beta, int | float) and beta > HALF_MOMENTS_BETA:
            problem = f"{beta:g} is too near 1 for moments in bfloat16, which round such small changes away"
            hint = f"set it to at most {HALF_MOMENTS_BETA:g} (DeepSeek-V3's beta2 was 0.95), or the moments to float32"
            yield UserError(f"{branch}.{key}", problem, hint)


def state_dtype(key: str, name: str) -> torch.dtype:
    """The data type of the optimizer's state that a recipe names. Raises UserError for an unknown name."""
    if name not in STATE_DTYPES:
        problem = f"{name!r:.80} is no type of its state"
        raise UserError(f"train.optimizer.{key}", problem, f"use {' or '.join(STATE_DTYPES)}")
    return STATE_DTYPES[name]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value fits a field of type `hint`; an integer fits a float, and a list fits a tuple."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in inner)
    if origin is list or hint is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value if inner)
    if origin is tuple:
        return (
            isinstance(value, list | tuple)
            and len(value) == len(inner)
            and all(map(_fits, value, inner))
        )
    if hint is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    if hint is torch.dtype:
        return isinstance(value, str) and value in STATE_DTYPES
    return hint in _TYPE_NAMES and type(value) is hint


def _alternatives(hint: Any) -> list[str]:
    """The alternatives that a recipe may write for a field, as text; [] where no YAML value fits."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(text for option in inner for text in _alternatives(option)))
    if origin is Literal:
        return [str(option) for option in inner]
    if origin is list or hint is list:
        if inner:
            items = _alternatives(inner[0])
        else:
            items = ["values"]
        if items:
            return [f"a list, each {' or '.join(items)}"]
        return []
    if origin is tuple:
        return [f"a list of {len(inner)} values"]
    if hint is torch.dtype:
        return list(STATE_DTYPES)
    if hint in _TYPE_NAMES:
        return [_TYPE_NAMES[hint]]
    return []

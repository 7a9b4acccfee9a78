"""Quantised checkpoints: the format that `quantization_config` of a HF `config.json` names.

Two formats are read: "fp8", as DeepSeek-V3, R1 and Kimi-K2 are published, and "int4", as the experts of
Kimi-K2-Thinking and K2.5 are (compressed-tensors, pack-quantized). megarl/checkpoints/quantised.py has their tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.fp8 import TILE as FP8_TILE
from megarl.model.hf_values import ConfigFile
from megarl.types import UserError

# of which config.json has at most one
QUANTISATION_KEYS = "quantization_config", "compression_config"
KEY = QUANTISATION_KEYS[0]
INT4_GROUP = 32  # columns of a row that share one scale
FP8_CONFIG: Mapping[str, Any] = {  # as DeepSeek publishes it
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [FP8_TILE, FP8_TILE],
}
HINT = (
    f"name a checkpoint in bfloat16, in fp8 tiles of {FP8_TILE} x {FP8_TILE} (as DeepSeek-V3), "
    f"or in int4 groups of {INT4_GROUP} (as Kimi-K2-Thinking)"
)
_REGEX = "re:"
# The values that megarl reads, by key; None: the key may be absent.
_FP8_VALUES: Mapping[str, tuple[Any, ...]] = {
    "weight_block_size": ([FP8_TILE, FP8_TILE],),
    "fmt": ("e4m3", None),
    "scale_fmt": (None, "float", "ue8m0"),
}
_INT4_VALUES: Mapping[str, tuple[Any, ...]] = {"format": ("pack-quantized",)}
_INT4_WEIGHTS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),
    "group_size": (INT4_GROUP,),
    "symmetric": (True,),
    "actorder": (None,),
}


@dataclass(frozen=True)
class Quantisation:
    """The format of a checkpoint's quantised weights.

    kind: "fp8": float8_e4m3fn with a scale for each tile of 128 x 128; "int4": integers from -8 to 7, eight in an
    int32, with a scale for each 32 columns of a row. has_power_of_two_scales: those of fp8 tiles (UE8M0). excluded:
    modules that are not quantised, by name, or by a regular expression after "re:".
    """

    kind: Literal["fp8", "int4"]
    has_power_of_two_scales: bool = False
    excluded: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "int4":
            return f"int4 groups of {INT4_GROUP}"
        if self.has_power_of_two_scales:
            scales = " with scales that are powers of two"
        else:
            scales = ""
        return f"fp8 tiles of {FP8_TILE} x {FP8_TILE}{scales}"

    def covers(self, weight: str) -> bool:
        """Whether the weight of a linear layer is quantised."""
        module = weight.removesuffix(".weight")
        return not any(_names(pattern, module) for pattern in self.excluded)


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), module) is not None
    return module == pattern or module.startswith(pattern + ".")


def quantisation(config: ConfigFile) -> Quantisation | None:
    """The format of a `config.json`; None: not quantised. Raises UserError for a format that megarl does not read."""
    section = config.part(*QUANTISATION_KEYS)
    if not section.content:
        return None
    method = section.content.get("quant_method")
    if method == "fp8":
        _check(KEY, section, _FP8_VALUES)
        excluded = _excluded(section, "modules_to_not_convert")
        return Quantisation("fp8", section.content.get("scale_fmt") == "ue8m0", excluded)
    if method == "compressed-tensors":
        _check(KEY, section, _INT4_VALUES)
        groups = section.part("config_groups")
        for name in groups.content:
            weights = groups.part(name).part("weights")
            _check(f"{KEY}.config_groups.{name}.weights", weights, _INT4_WEIGHTS)
        return Quantisation("int4", excluded=_excluded(section, "ignore"))
    raise _error(config, f"{KEY}.quant_method", method)


def _check(where: str, values: ConfigFile, known: Mapping[str, tuple[Any, ...]]) -> None:
    for key, allowed in known.items():
        value = values.content.get(key)
        if value not in allowed:
            raise _error(values, f"{where}.{key}", value)


def _error(config: ConfigFile, key: str, value: Any) -> UserError:
    return UserError("model.path", f"{key} of {config.file} is {json.dumps(value):.60}", HINT)


def _excluded(config: ConfigFile, key: str) -> tuple[str, ...]:
    names = config.texts(key)
    for name in names:
        try:
            re.compile(name.removeprefix(_REGEX) if name.startswith(_REGEX) else "")
        except re.error as error:
            problem = f"{KEY}.{key} has {name!r:.60} ({error})"
            raise config.error(problem, "download the checkpoint again") from None
    return tuple(names)

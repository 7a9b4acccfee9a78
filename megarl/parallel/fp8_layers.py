"""Linear layers of a rank that compute with the engines' codes and scales (`train.numbers: engine`).

Which they are follows from the precision contract, by the names of their weights. Megatron's own layers compute the
exact value (megarl/fp8/linear.py); TransformerEngine's compute in fp8 with its blockwise recipe, whose codes and scales
are the same, in the layers that are not kept plain here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_te_version, is_te_min_version
from torch import Tensor

from megarl.fp8 import TILE, Fp8Backward, ScaleRule
from megarl.fp8.linear import linear
from megarl.parallel.local_spec import DuplicatedLinear
from megarl.parallel.param_names import named_modules
from megarl.types import UserError
from megarl.types.tensors import ModelChunks

# of TransformerEngine: "1" asks its blockwise recipe for the exact scales
FLOAT_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
BACKWARD_SINCE = "2.15.0"  # TransformerEngine's choice of the backward pass
# `backward_override` of its recipes; fp8: None
_BACKWARDS = {"high_precision": "high_precision", "dequantised": "dequantized"}
_ENGINE_LAYERS = ("TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear")
# rows of an operand that TransformerEngine's products in fp8 ask for
_ENGINE_ROWS = 16


@dataclass(frozen=True)
class EngineNumbers:
    """What a rank computes with in fp8. params: these weights, by the names of the weight map."""

    params: frozenset[str]
    scales: ScaleRule
    backward: Fp8Backward


def row_multiple(tp: int) -> int:
    """Tokens of each tensor-parallel rank that TransformerEngine needs a multiple of.

    With sequence parallelism it gathers codes, in groups of 128 tokens for the weights' gradients; where they do not
    fit it gathers what they are made of (distributed.py).
    """
    return TILE if tp > 1 else _ENGINE_ROWS


def engine_fields() -> dict[str, Any]:
    """The fields of TransformerConfig with which TransformerEngine's layers compute with the engines' numbers.

    `fp8_param` would keep the weights as codes alone, from which no master could be made.
    """
    return {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}


def make_recipes(backward: Fp8Backward) -> None:
    """Let Megatron's recipes of TransformerEngine ask for this backward pass; call it before a layer is built.

    TransformerEngine reads the variable of the same meaning as it is imported, which is too early.
    """
    make = fp8_utils.get_fp8_recipe

    def recipe(config: TransformerConfig) -> Any:
        made: Any = make(config)
        made.backward_override = _BACKWARDS.get(backward)
        return made

    fp8_utils.get_fp8_recipe = recipe  # type: ignore[assignment]


def engine_errors(backward: Fp8Backward) -> list[UserError]:
    """What the installed TransformerEngine lacks, or its environment asks of it, where ranks use it in fp8."""
    errors = []
    if backward in _BACKWARDS and not is_te_min_version(BACKWARD_SINCE):
        problem = f"{backward} needs TransformerEngine {BACKWARD_SINCE}, and {get_te_version()} is installed"
        hint = "install a later version, or set it to fp8"
        errors.append(UserError("train.fp8_backward", problem, hint))
    if os.environ.get(FLOAT_SCALES) == "1":
        problem = "1 asks TransformerEngine for scales that are no powers of two"
        errors.append(UserError(FLOAT_SCALES, problem, "unset it on all nodes"))
    return errors


def use_engine_numbers(chunks: ModelChunks, numbers: EngineNumbers) -> None:
    """Let the layers with these weights compute in fp8, and all others as they did, before DDP wraps the chunks.

    Outputs of routed experts in fp8 are multiplied with their router's weights, as in SGLang; Megatron multiplies the
    inputs of the second product, whose codes would be others.
    """
    modules = named_modules(chunks)
    in_fp8 = {name.rpartition(".")[0] for name in numbers.params}
    for path, module in modules.items():
        if isinstance(module, (SequentialMLP, *_classes("TEGroupedMLP"))):
            if any(each.startswith(f"{path}.") for each in in_fp8):
                _weigh_outputs(module)
        elif isinstance(module, _classes(*_ENGINE_LAYERS)):
            if path not in in_fp8:
                _keep_plain(module)
        elif path in in_fp8:
            _use_codes(module, numbers)


def _classes(*names: str) -> tuple[type, ...]:
    """TransformerEngine's classes in Megatron that are there."""
    if not te.HAVE_TE:
        return ()
    grouped = {"TEGroupedMLP": TEGroupedMLP}
    return tuple(grouped[name] if name in grouped else getattr(te, name) for name in names)


def _use_codes(module: Any, numbers: EngineNumbers) -> None:
    multiply = partial(linear, rule=numbers.scales, backward=numbers.backward)
    if isinstance(module, ColumnParallelLinear):
        module._forward_impl = partial(_column_product, multiply)  # type: ignore[method-assign]
    elif isinstance(module, RowParallelLinear):
        module._forward_impl = partial(_row_product, multiply)  # type: ignore[method-assign]
    else:
        assert isinstance(module, DuplicatedLinear), type(module)
        module.multiply = multiply


def _column_product(
    multiply: Any,
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_: Any,
) -> Tensor:
    """In place of ColumnParallelLinear._forward_impl; the names of its arguments are Megatron's."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    out = multiply(input, weight)
    return out if bias is None else out + bias


def _row_product(multiply: Any, *, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
    """In place of RowParallelLinear._forward_impl: this rank's share, which Megatron sums over TP."""
    return multiply(input, weight)


def _weigh_outputs(experts: Any) -> None:
    compute = experts.forward

    def forward(hidden_TH: Tensor, tokens_per_expert: Tensor, weights_T: Tensor) -> Any:
        out_TH, bias = compute(hidden_TH, tokens_per_expert, torch.ones_like(weights_T))
        return (out_TH * weights_T[:, None]).to(out_TH.dtype), bias

    experts.forward = forward


def _keep_plain(module: Any) -> None:
    """Let a layer of TransformerEngine compute in `model.dtype` inside of a decoder layer that computes in fp8."""
    from transformer_engine.pytorch import fp8_autocast  # pyright: ignore[reportMissingImports]

    compute = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with fp8_autocast(enabled=False):
            return compute(*args, **kwargs)

    module.forward = forward

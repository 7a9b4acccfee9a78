"""Megatron's own options in a recipe: train.megatron (model), train.ddp (gradient buffers) and train.optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.parallel.option_values import PRECISION_AWARE, field_errors, precision_errors
from megarl.spelling import did_you_mean, near
from megarl.types import UserError

if TYPE_CHECKING:
    from megarl.config import TrainConfig

Made = TypeVar("Made")
# delayed, tensorwise and hybrid scaling, weights without masters: all have numbers that no engine has
LOW_PRECISION = (
    "fp8", "fp8_recipe", "fp8_param", "fp8_quantizer_factory", "fp8_margin", "fp8_interval", "fp8_amax_history_len",
    "fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention",
    "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp4", "fp4_recipe",
    "fp4_param", "fp4_quantizer_factory",
)  # fmt: skip
_OF_NUMBERS = "only fp8 with the engines' tiles and scales is taken, which train.numbers: engine and precision ask for"
_DECIDED = "other keys of the recipe decide it, or megarl relies on its value"
_NOT_GATHERED = "the reshard and the checks of replicas read the weights when a step ends, before they are all gathered"
# Not allowed: other ways to shard parameters and gradients, which the weight maps, the checkpoints and the plan do not
# know.
OF_BUFFERS = (
    "overlap_grad_reduce", "bucket_size", "pad_buckets_for_high_nccl_busbw", "check_for_nan_in_grad",
    "check_for_large_grads", "reduce_scatter_with_fp32_accumulation", "gradient_reduce_div_fusion",
)  # fmt: skip
OF_OPTIMIZER = (
    "adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay", "apply_wd_to_qk_layernorm",
    PRECISION_AWARE, "store_param_remainders", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "log_num_zeros_in_grad", "barrier_with_L1_time",
)  # fmt: skip


def option_errors(train: TrainConfig, fixed: Callable[[], set[str]]) -> list[UserError]:
    """Errors of Megatron's options: unknown keys, keys that something else decides, and values that do not fit.

    fixed: returns the fields of TransformerConfig that the checkpoint, the layout and the loss's normalisation decide.
    """
    decided = fixed() if train.megatron else set()
    refused = dict.fromkeys(LOW_PRECISION, _OF_NUMBERS)
    refused |= dict.fromkeys(decided, "is decided by the checkpoint and the other train keys")
    names = _names(TransformerConfig) - decided
    errors = [*_errors("train.megatron", train.megatron, TransformerConfig, refused, names)]
    for branch, options, kind, listed in (
        ("train.ddp", train.ddp, DistributedDataParallelConfig, OF_BUFFERS),
        ("train.optimizer", train.optimizer, OptimizerConfig, OF_OPTIMIZER),
    ):
        refused = dict.fromkeys(_names(kind) - {*listed}, _DECIDED)
        refused["overlap_param_gather"] = _NOT_GATHERED
        errors += _errors(branch, options, kind, refused, {*listed})
    return [*errors, *precision_errors(train.optimizer)]


def make_config(where: str, kind: Callable[..., Made], fields: Mapping[str, Any]) -> Made:
    """Construct one of Megatron's configurations, which check themselves. Raises UserError with Megatron's message."""
    try:
        return kind(**fields)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        hint = "change the options passed to Megatron"
        raise UserError(where, f"Megatron refuses them ({error})", hint) from error


def effective_options(
    train: TrainConfig,
    config: TransformerConfig,
    buffers: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    names: Iterable[str],
) -> dict[str, dict[str, Any]]:
    """The options that ranks run with, in the form of the recipe's `train` branch.

    names: fields of the model to list in addition to those that the recipe sets. Leaves out the option that megarl
    itself sets for an optimizer on the host: in a recipe it would ask for TransformerEngine's optimizer.
    """
    options_by_branch = {
        "megatron": _values(config, sorted({*names, *train.megatron})),
        "ddp": _values(buffers, OF_BUFFERS),
        "optimizer": _values(optimizer, OF_OPTIMIZER),
    }
    if optimizer.optimizer_cpu_offload and PRECISION_AWARE not in train.optimizer:
        del options_by_branch["optimizer"][PRECISION_AWARE]
    return options_by_branch


def _values(config: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: _written(getattr(config, name)) for name in names}


def _written(value: Any) -> Any:
    """A value as YAML can write it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (bool, int, float, str, list, dict, type(None))):
        return value
    return str(value)


def _errors(
    branch: str, options: Mapping[str, Any], kind: Any, refused: Mapping[str, str], names: set[str]
) -> Iterator[UserError]:
    """Errors of a branch of options. refused: key -> why a recipe may not set it; names: the keys that it may set."""
    hints = get_type_hints(kind)
    for key, value in options.items():
        where = f"{branch}.{key}"
        if key in refused:
            yield UserError(where, refused[key], "remove it")
        elif key in names and key in hints:
            yield from field_errors(where, value, hints[key])
        else:
            otherwise = f"remove it, or see Megatron's {kind.__name__} for the names it has"
            hint = did_you_mean(near(key, sorted(names)), otherwise)
            yield UserError(where, f"{kind.__name__} has no such field", hint)


def _names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind) if field.init}

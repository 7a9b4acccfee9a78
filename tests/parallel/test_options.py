"""Megatron's own options: which a recipe may set, in what words others are refused, and that they reach Megatron."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import TrainConfig
from megarl.parallel import model, optimizer
from megarl.parallel.model import buffers_config, fixed_field_names
from megarl.parallel.optimizer import optimizer_config
from megarl.parallel.options import OF_BUFFERS, OF_OPTIMIZER, effective_options, option_errors
from megarl.types import UserError


def errors(**train: Any) -> list[UserError]:
    return option_errors(TrainConfig(lr=1.0, **train), fixed_field_names)


@pytest.mark.parametrize(
    ("branch", "key", "words"),
    [
        ("megatron", "recompute_granularty", "did you mean recompute_granularity"),
        ("megatron", "tensor_model_parallel_size", "decided by the checkpoint"),
        ("megatron", "moe_aux_loss_coeff", "decided by the checkpoint"),
        ("megatron", "fp8", "train.numbers: engine"),
        ("megatron", "fp8_param", "train.numbers: engine"),
        ("megatron", "fp8_recipe", "train.numbers: engine"),
        ("megatron", "first_last_layers_bf16", "train.numbers: engine"),
        ("ddp", "overlap_grad_reduction", "did you mean overlap_grad_reduce"),
        ("ddp", "overlap_param_gather", "before they are all gathered"),
        ("ddp", "use_distributed_optimizer", "megarl relies on its value"),
        ("optimizer", "adam_beta", "did you mean adam_beta"),
        ("optimizer", "lr", "other keys of the recipe decide it"),
        ("optimizer", "muon_momentum", "megarl relies on its value"),
        ("optimizer", "nonsense", "see Megatron's OptimizerConfig"),
    ],
)
def test_a_wrong_option_is_named(branch: str, key: str, words: str) -> None:
    (error,) = errors(**{branch: {key: 1}})
    assert error.where == f"train.{branch}.{key}"
    assert words in str(error)


def test_all_that_are_listed_are_megatrons_and_take_their_defaults() -> None:
    buffers, adam = DistributedDataParallelConfig(), OptimizerConfig()
    ddp = {name: getattr(buffers, name) for name in OF_BUFFERS}
    optimizer_options = {
        name: str(getattr(adam, name)).removeprefix("torch.")
        for name in OF_OPTIMIZER
        if "dtype" in name
    }
    optimizer_options |= {
        name: getattr(adam, name) for name in OF_OPTIMIZER if name not in optimizer_options
    }
    assert errors(ddp=ddp, optimizer=optimizer_options) == []


def test_values_of_yaml_that_megatrons_fields_take() -> None:
    megatron = {
        "recompute_granularity": "full", "recompute_num_layers": 1, "moe_router_dtype": None, "init_method_std": 1,
        "recompute_modules": ["moe", "mlp"], "window_size": [128, 0], "no_rope_freq": [0, 1],
        "moe_permute_fusion": True,
    }  # fmt: skip
    assert (
        errors(
            megatron=megatron, ddp={"bucket_size": None}, optimizer={"adam_beta1": 0, "adam_eps": 1}
        )
        == []
    )


@pytest.mark.parametrize(
    ("branch", "key", "value", "hint"),
    [
        ("optimizer", "exp_avg_dtype", "bf61", "set it to float32 or bfloat16"),
        ("optimizer", "exp_avg_dtype", ["float32"], "set it to float32 or bfloat16"),
        ("optimizer", "adam_beta1", 5, "set it to a number from 0 to below 1"),
        ("optimizer", "adam_beta2", 1.0, "set it to a number from 0 to below 1"),
        ("optimizer", "adam_beta2", -0.1, "set it to a number from 0 to below 1"),
        ("optimizer", "adam_beta2", True, "set it to a number from 0 to below 1"),
        ("optimizer", "adam_eps", "tiny", "set it to a number above 0"),
        ("optimizer", "adam_eps", 0.0, "set it to a number above 0"),
        ("optimizer", "adam_eps", math.inf, "set it to a number above 0"),
        ("optimizer", "decoupled_weight_decay", 1, "set it to true or false"),
        ("ddp", "bucket_size", "foo", "set it to a whole number above 0, or null"),
        ("ddp", "bucket_size", 0, "set it to a whole number above 0, or null"),
        ("ddp", "bucket_size", 1.5, "set it to a whole number above 0, or null"),
        ("megatron", "recompute_granularity", "ful", "set it to full or selective or null"),
        ("megatron", "recompute_num_layers", True, "set it to a whole number or null"),
        ("megatron", "recompute_modules", ["moe", 1], "set it to a list, each text or null"),
        ("megatron", "window_size", [1], "set it to a list of 2 values or null"),
        ("megatron", "moe_permute_fusion", "yes", "set it to true or false"),
        ("megatron", "attention_backend", "flash", "remove it: no recipe can write such a value"),
    ],
)
def test_a_wrong_value_is_named(branch: str, key: str, value: Any, hint: str) -> None:
    (error,) = errors(**{branch: {key: value}})
    assert error.where == f"train.{branch}.{key}"
    assert repr(value) in error.problem and hint in error.hint


@pytest.mark.parametrize(
    ("options", "wheres"),
    [
        ({}, ["train.optimizer.adam_beta2"]),
        ({"adam_beta2": 0.98}, ["train.optimizer.adam_beta2"]),
        ({"adam_beta1": 0.98, "adam_beta2": 0.95}, ["train.optimizer.adam_beta1"]),
        ({"adam_beta2": 0.95, "exp_avg_sq_dtype": "float32"}, ["train.optimizer"]),
        ({"adam_beta2": 0.95, "main_params_dtype": "bfloat16"}, ["train.optimizer.main_params_dtype"]),
        ({"adam_beta2": 0.95}, []),
    ],
)  # fmt: skip
def test_types_of_the_optimizers_state_that_would_learn_something_else(
    options: dict[str, Any], wheres: list[str]
) -> None:
    given = {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "bfloat16",
    }
    assert [error.where for error in errors(optimizer=given | options)] == wheres


def test_weights_in_float32_have_no_remainders() -> None:
    train = TrainConfig(lr=1.0, optimizer={"use_precision_aware_optimizer": True})
    with pytest.raises(UserError, match=r"set model\.dtype to bfloat16"):
        optimizer_config(train, torch.float32, False)


def test_every_wrong_value_at_once() -> None:
    adam = {"exp_avg_dtype": "bf61", "adam_beta1": 5, "nonsense": 1}
    messages = errors(
        optimizer=adam, ddp={"bucket_size": "foo"}, megatron={"recompute_granularity": "ful"}
    )
    assert len(messages) == 5


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_precision_aware_optimizer_is_accepted_where_transformer_engine_is_not(
    monkeypatch: pytest.MonkeyPatch, offloaded: bool
) -> None:
    """A login node without GPUs checks a recipe of the cluster; an optimizer on the host does without it anyway."""
    monkeypatch.setattr(optimizer, "HAVE_TE", False)
    options = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
    config = optimizer_config(TrainConfig(lr=1.0, optimizer=options), torch.bfloat16, offloaded)
    assert (
        config.use_precision_aware_optimizer
        and config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    )
    assert (config.exp_avg_dtype, config.params_dtype) == (torch.bfloat16, torch.bfloat16)


def test_a_rank_without_transformer_engine_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "HAVE_TE", False)
    monkeypatch.setattr(optimizer, "DEVICE", "cuda")
    train = TrainConfig(lr=1.0, optimizer={"use_precision_aware_optimizer": True})
    with pytest.raises(
        UserError,
        match=r"^train\.optimizer\.use_precision_aware_optimizer: .* with TransformerEngine",
    ):
        optimizer.build_optimizer([], train, torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{}, {"use_precision_aware_optimizer": True}], ids=["not set", "set"]
)
def test_what_an_optimizer_on_the_host_needs_is_no_option_in_force(options: dict[str, Any]) -> None:
    train = TrainConfig(lr=1.0, optimizer=options)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    in_force = effective_options(
        train, config, buffers_config(train), optimizer_config(train, torch.bfloat16, True), ()
    )
    assert in_force["optimizer"].get("use_precision_aware_optimizer") == options.get(
        "use_precision_aware_optimizer"
    )


def test_options_in_force_are_those_of_a_recipe() -> None:
    """Ranks that are given what is told of them run with the same."""
    train_config = TrainConfig(
        lr=1.0, megatron={"moe_router_dtype": "fp64"}, optimizer={"adam_eps": 1e-9}
    )

    def told(train: TrainConfig) -> dict[str, dict[str, Any]]:
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, **train.megatron
        )
        of_optimizer = optimizer_config(train, torch.float32, offloaded=False)
        return effective_options(
            train, config, buffers_config(train), of_optimizer, {"deallocate_pipeline_outputs"}
        )

    in_force = told(train_config)
    assert in_force["megatron"] == {
        "deallocate_pipeline_outputs": False,
        "moe_router_dtype": "fp64",
    }
    assert (in_force["optimizer"]["adam_eps"], in_force["optimizer"]["exp_avg_dtype"]) == (
        1e-9,
        "float32",
    )
    assert told(TrainConfig(lr=1.0, **yaml.safe_load(yaml.safe_dump(in_force)))) == in_force


def test_options_of_the_buffers_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    config = buffers_config(
        TrainConfig(lr=1.0, ddp={"bucket_size": 1_000, "check_for_nan_in_grad": True})
    )
    assert (config.bucket_size, config.check_for_nan_in_grad, config.overlap_grad_reduce) == (
        1_000,
        True,
        False,
    )
    monkeypatch.setattr(model, "TRANSFORMER_ENGINE", True)
    assert buffers_config(TrainConfig(lr=1.0)).overlap_grad_reduce
    assert not buffers_config(
        TrainConfig(lr=1.0, ddp={"overlap_grad_reduce": False})
    ).overlap_grad_reduce


def test_options_of_the_optimizer_pass_through() -> None:
    options = {"adam_beta2": 0.95, "adam_eps": 1e-15, "exp_avg_dtype": "bfloat16"}
    with pytest.raises(UserError, match=r"^train\.optimizer: Megatron refuses them \("):
        # Of a precision-aware optimizer only.
        optimizer_config(TrainConfig(lr=1.0, optimizer=options), torch.bfloat16, False)
    del options["exp_avg_dtype"]
    config = optimizer_config(TrainConfig(lr=1.0, optimizer=options), torch.bfloat16, False)
    assert (config.adam_beta1, config.adam_beta2, config.adam_eps, config.lr) == (
        0.9,
        0.95,
        1e-15,
        1.0,
    )


def test_a_type_that_is_none_is_named() -> None:
    with pytest.raises(
        UserError, match=r"exp_avg_dtype: 'bf61' is no type .* use float32 or bfloat16"
    ):
        optimizer_config(
            TrainConfig(lr=1.0, optimizer={"exp_avg_dtype": "bf61"}), torch.bfloat16, False
        )


def test_megatrons_own_refusal_is_a_users_fault() -> None:
    with pytest.raises(UserError, match=r"^train\.ddp: Megatron refuses them"):
        buffers_config(TrainConfig(lr=1.0, ddp={"bucket_sise": 3}))

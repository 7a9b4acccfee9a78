"""Megatron's own options: which a recipe may set, in what words others are refused, and that they reach Megatron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import Train
from megarl.parallel import model
from megarl.parallel.model import buffers_config, fixed_names
from megarl.parallel.optimizer import optimizer_config
from megarl.parallel.options import OF_BUFFERS, OF_OPTIMIZER, in_force, option_faults
from megarl.types import UserFault


def faults(**train: Any) -> list[UserFault]:
    return option_faults(Train(lr=1.0, **train), fixed_names)


@pytest.mark.parametrize(
    ("branch", "key", "words"),
    [
        ("megatron", "recompute_granularty", "use recompute_granularity"),
        ("megatron", "tensor_model_parallel_size", "decided by the checkpoint"),
        ("megatron", "moe_aux_loss_coeff", "decided by the checkpoint"),
        ("megatron", "fp8", "does not pad packed rows"),
        ("megatron", "fp8_param", "does not pad packed rows"),
        ("ddp", "overlap_grad_reduction", "use overlap_grad_reduce"),
        ("ddp", "overlap_param_gather", "megarl relies on its value"),
        ("ddp", "use_distributed_optimizer", "megarl relies on its value"),
        ("optimizer", "adam_beta", "use adam_beta"),
        ("optimizer", "lr", "other keys of the recipe decide it"),
        ("optimizer", "nonsense", "see Megatron's OptimizerConfig"),
    ],
)
def test_a_wrong_option_is_named(branch: str, key: str, words: str) -> None:
    (fault,) = faults(**{branch: {key: 1}})
    assert fault.where == f"train.{branch}.{key}"
    assert words in str(fault)


def test_every_wrong_option_at_once() -> None:
    megatron = {"nonsense": 1, "num_layers": 2, "bf16": True, "fp8_margin": 0}
    assert len(faults(megatron=megatron, ddp={"nonsense": 1}, optimizer={"lr": 1.0})) == 5


def test_all_that_are_listed_are_megatrons() -> None:
    assert faults(ddp=dict.fromkeys(OF_BUFFERS, 1), optimizer=dict.fromkeys(OF_OPTIMIZER, 1)) == []


def test_options_in_force_are_those_of_a_recipe() -> None:
    """Ranks that are given what is told of them run with the same."""
    given = Train(lr=1.0, megatron={"moe_router_dtype": "fp64"}, optimizer={"adam_eps": 1e-9})

    def told(train: Train) -> dict[str, dict[str, Any]]:
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **train.megatron)
        optimizer = optimizer_config(train, torch.float32, offloaded=False)
        return in_force(config, buffers_config(train), optimizer, {"moe_router_dtype", "deallocate_pipeline_outputs"})

    found = told(given)
    assert found["megatron"] == {"deallocate_pipeline_outputs": False, "moe_router_dtype": "fp64"}
    assert (found["optimizer"]["adam_eps"], found["optimizer"]["exp_avg_dtype"]) == (1e-9, "float32")
    assert told(Train(lr=1.0, **yaml.safe_load(yaml.safe_dump(found)))) == found


def test_options_of_the_buffers_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    made = buffers_config(Train(lr=1.0, ddp={"bucket_size": 1_000, "check_for_nan_in_grad": True}))
    assert (made.bucket_size, made.check_for_nan_in_grad, made.overlap_grad_reduce) == (1_000, True, False)
    monkeypatch.setattr(model, "TRANSFORMER_ENGINE", True)
    assert buffers_config(Train(lr=1.0)).overlap_grad_reduce
    assert not buffers_config(Train(lr=1.0, ddp={"overlap_grad_reduce": False})).overlap_grad_reduce


def test_options_of_the_optimizer_pass_through() -> None:
    options = {"adam_beta2": 0.95, "adam_eps": 1e-15, "exp_avg_dtype": "bfloat16"}
    with pytest.raises(UserFault, match=r"^train\.optimizer: Megatron refuses them \("):
        optimizer_config(Train(lr=1.0, optimizer=options), torch.bfloat16, False)  # of a precision-aware optimizer only
    del options["exp_avg_dtype"]
    made = optimizer_config(Train(lr=1.0, optimizer=options), torch.bfloat16, False)
    assert (made.adam_beta1, made.adam_beta2, made.adam_eps, made.lr) == (0.9, 0.95, 1e-15, 1.0)


def test_a_type_that_is_none_is_named() -> None:
    with pytest.raises(UserFault, match=r"exp_avg_dtype: 'bf61' is no type .* use float32 or bfloat16"):
        optimizer_config(Train(lr=1.0, optimizer={"exp_avg_dtype": "bf61"}), torch.bfloat16, False)


def test_megatrons_own_refusal_is_a_users_fault() -> None:
    with pytest.raises(UserFault, match=r"^train\.ddp: Megatron refuses them"):
        buffers_config(Train(lr=1.0, ddp={"bucket_sise": 3}))

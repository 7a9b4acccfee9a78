"""What each pipeline rank computes again, in Megarl's key and in Megatron's fields."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.models import TrainConfig
from megarl.model.shape import MlaShape, ModelShape
from megarl.placement.recomputation import (
    FIELDS,
    ladder,
    recompute_errors,
    recompute_fields,
    recompute_keys,
    recomputed_parts,
    without_lacking,
)

DENSE = ModelShape(4, 64, 4, 2, 16, 100, ffn_size=96, num_dense_layers=4)
SPARSE = ModelShape(4, 64, 4, 2, 16, 100, num_experts=8, experts_per_token=2, moe_ffn_size=32)
LATENT = ModelShape(
    4, 64, 4, 4, 16, 100, num_experts=8, experts_per_token=2, moe_ffn_size=32, num_dense_layers=1, ffn_size=96,
    num_shared_experts=1, mla=MlaShape(8, 8, 8, 8, 8),
)  # fmt: skip


def config(**keys: Any) -> TrainConfig:
    return TrainConfig(lr=1.0, **keys)


def test_the_first_pipeline_ranks_compute_more_again() -> None:
    train = config(recompute={"layer": 1, "moe": 2, "moe_act": 4, "layernorm": 3})
    parts = [recomputed_parts(train, stage) for stage in range(5)]
    # moe has its activation function in it
    assert parts == [{"layer"}, {"moe", "layernorm"}, {"moe_act", "layernorm"}, {"moe_act"}, set()]
    assert recompute_fields(train, 0)["recompute_method"] == "uniform"
    assert recompute_fields(train, 2)["recompute_modules"] == ["layernorm", "moe_act"]
    # Megatron's own, wherever nothing is
    assert recompute_fields(train, 4) == dict.fromkeys(FIELDS)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, set()),
        ({"recompute_granularity": "selective"}, {"core_attn"}),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, {"moe"}),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, {"layer"}),
    ],
)
def test_megatrons_fields_say_it_for_all_ranks(options: dict[str, Any], parts: set[str]) -> None:
    train = config(megatron={**options, "fp8": None})
    assert recompute_fields(train, 7) == options
    assert recomputed_parts(train, 7) == parts


def test_a_models_ladder_has_its_own_parts_from_nothing_to_whole_layers() -> None:
    # its norms are fused with what is behind them
    assert ladder(DENSE) == [set(), {"mlp"}, {"layer"}]
    assert ladder(SPARSE) == [
        set(),
        {"layernorm", "moe_act"},
        {"layernorm", "moe"},
        {"layer"},
    ]
    assert {"mla_up_proj", "shared_experts", "mlp"} <= ladder(LATENT)[3]


def test_keys_replace_what_a_recipe_says() -> None:
    train = config(recompute={"layer": 8})
    keys = recompute_keys(train, frozenset({"moe"}), 4)
    assert keys == {"recompute": {"layer": 0, "moe": 4}}
    assert recomputed_parts(config(**keys), 3) == {"moe"}
    megatron = {"recompute_granularity": "full", "recompute_num_layers": 1}
    keys = recompute_keys(config(megatron=megatron), frozenset(), 4)
    assert keys == {"recompute": {}, "megatron": dict.fromkeys(megatron)}


def test_parts_that_a_model_lacks_and_keys_that_say_it_twice_are_named() -> None:
    assert recompute_errors(config(recompute={"moe": 1}), None) == []
    assert recompute_errors(config(recompute={"moe": 1, "layer": 2}), SPARSE) == []
    (error,) = recompute_errors(config(recompute={"mla_up_proj": 1}), SPARSE)
    assert error.where == "train.recompute.mla_up_proj" and "moe_act" in error.hint
    of_scorer = without_lacking(config(recompute={"mla_up_proj": 1, "moe": 2}), SPARSE)
    assert of_scorer.recompute == {"mla_up_proj": 0, "moe": 2}
    assert recompute_errors(of_scorer, SPARSE) == []
    twice = config(recompute={"layer": 1}, megatron={"recompute_granularity": "full"})
    (error,) = recompute_errors(twice, SPARSE)
    assert error.where == "train.megatron.recompute_granularity"

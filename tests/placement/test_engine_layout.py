"""What the engines' layouts refuse, by recipe key, and what they say to write instead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.model.precision import FP8_TILES, Precision
from megarl.model.shape import IndexerShape, MlaShape, ModelShape
from megarl.placement.engine_layout import EngineLayout

MOE = ModelShape(4, 128, 8, 4, 16, 200, num_experts=8, experts_per_token=2, moe_ffn_size=128)
DENSE = ModelShape(4, 128, 8, 4, 16, 200, num_dense_layers=4, ffn_size=96)
DEEPSEEK = replace(
    MOE,
    num_dense_layers=1,
    ffn_size=96,
    num_shared_experts=1,
    mla=MlaShape(128, 64, 64, 64, 64),
    router_bias=True,
)

REFUSED = {
    "too many engines": (MOE, EngineLayout(3, 2, 1, first=1), 4, "count", "set it to 1"),
    "too many ranks": (
        MOE,
        EngineLayout(1, 8, 8),
        4,
        "count",
        "set rollout.engine.tp to at most 4",
    ),
    "attention heads": (DENSE, EngineLayout(1, 3, 1), 16, "tp", "2 or 4"),
    "kv heads": (replace(MOE, num_heads=24), EngineLayout(1, 6, 1), 16, "tp", "4 or 8"),
    "experts": (
        replace(MOE, num_experts=12),
        EngineLayout(1, 8, 8),
        16,
        "ep",
        "set rollout.engine.ep to 4",
    ),
    "ep of tp": (MOE, EngineLayout(1, 4, 8), 16, "ep", "set rollout.engine.ep to 4"),
    "dp of tp": (MOE, EngineLayout(1, 4, 1, dp=3), 16, "dp", "2 or 4"),
    "dp of a dense model": (
        DENSE,
        EngineLayout(1, 4, 1, dp=2),
        16,
        "dp",
        "set rollout.engine.dp to 1",
    ),
    "an expert's width": (
        replace(MOE, moe_ffn_size=6),
        EngineLayout(1, 4, 1),
        16,
        "tp",
        "set rollout.engine.tp to 2",
    ),
    "a dense layer's width": (
        replace(DENSE, ffn_size=12),
        EngineLayout(1, 8, 1),
        16,
        "tp",
        "rollout.engine.tp to 4",
    ),
    "shared experts": (
        replace(DEEPSEEK, moe_ffn_size=12),
        EngineLayout(1, 8, 8),
        16,
        "tp",
        "to divisors of it",
    ),
    "whole layers without DP attention": (
        MOE,
        EngineLayout(1, 4, 1, whole_dense=True),
        16,
        "dense",
        "dense to cut",
    ),
    "heads of groups without groups": (
        MOE,
        EngineLayout(1, 4, 1, group_head=True),
        16,
        "head",
        "head to engine",
    ),
    "DeepEP and cut experts": (
        MOE,
        EngineLayout(1, 4, 2, 2, whole_dense=True, deepep=True),
        16,
        "experts",
        "ep to 4",
    ),
    "DeepEP and cut layers": (
        MOE,
        EngineLayout(1, 4, 4, 2, deepep=True),
        16,
        "experts",
        "dense to whole",
    ),
    "DeepEP without DP attention": (
        MOE,
        EngineLayout(1, 4, 4, deepep=True),
        16,
        "experts",
        "dp to 2 or more",
    ),
    "more ranks than experts": (
        replace(DEEPSEEK, num_experts=4),
        EngineLayout(1, 8, 4),
        16,
        "tp",
        "to 4",
    ),
}


MIXTRAL = replace(MOE, family="MixtralForCausalLM")
MINIMAX = replace(MOE, family="MiniMaxM2ForCausalLM")
REFUSED |= {
    "dp that the class lacks": (MIXTRAL, EngineLayout(1, 4, 1, dp=2), 16, "dp", "set it to 1"),
    "head that the class lacks": (
        MINIMAX,
        EngineLayout(1, 4, 1, dp=2, group_head=True),
        16,
        "head",
        "set it to engine",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_names_the_key_and_a_value_that_fits(case: str) -> None:
    shape, engine, gpus, key, hint = REFUSED[case]
    errors = engine.errors(shape, gpus)
    assert {error.where for error in errors} == {f"rollout.engine.{key}"}
    assert any(hint in error.hint for error in errors), [error.hint for error in errors]


@pytest.mark.parametrize("shape", [MOE, DEEPSEEK, DENSE])
@pytest.mark.parametrize(
    "engine", [EngineLayout(1, 1, 1), EngineLayout(2, 4, 1, first=8), EngineLayout(1, 8, 1)]
)
def test_what_fits_is_accepted(shape: ModelShape, engine: EngineLayout) -> None:
    assert engine.errors(shape, 16) == []


def test_dp_attention_cuts_the_attention_over_its_groups_alone() -> None:
    assert [error.where for error in EngineLayout(1, 16, 8).errors(MOE, 16)] == [
        "rollout.engine.tp"
    ]
    assert EngineLayout(1, 16, 8, dp=2).errors(MOE, 16) == []


def test_plain_weights_are_those_that_the_model_has_and_sglang_keeps_apart() -> None:
    alone = EngineLayout(1, 1, 1)
    deepep = EngineLayout(1, 2, 2, dp=2, whole_dense=True, whole_shared=True, deepep=True)

    def wheres(shape: ModelShape, precision: Precision, engine: EngineLayout = alone) -> list[str]:
        errors = replace(engine, precision=precision).errors(shape, 8)
        return [error.where for error in errors]

    kinds = Precision("fp8", plain=("kv_b_proj", "shared_experts"))
    last = Precision("fp8", plain_last_layers=1)
    wide = replace(DEEPSEEK, ffn_size=128)
    assert wheres(wide, kinds) == wheres(wide, last) == []
    assert wheres(MOE, kinds).count("precision.plain") == 2
    assert "precision.plain_last_layers" in wheres(
        wide, replace(last, plain_last_layers=wide.num_layers)
    )
    assert wheres(wide, last, deepep) == ["precision.plain_last_layers"]
    assert wheres(wide, kinds, deepep) == wheres(wide, replace(last, weights="plain"), deepep) == []


def test_fp8_asks_that_no_rank_cuts_a_tile() -> None:
    assert (
        EngineLayout(1, 1, 1, precision=FP8_TILES).errors(replace(DEEPSEEK, ffn_size=128), 8) == []
    )
    for change, what in (
        ({"ffn_size": 192}, "a dense layer"),
        ({"moe_ffn_size": 64}, "an expert"),
        ({"mla": replace(DEEPSEEK.mla or MlaShape(1, 1, 1, 1, 1), q_lora_rank=96)}, "q_a_proj"),
    ):
        errors = EngineLayout(1, 1, 1, precision=FP8_TILES).errors(
            replace(replace(DEEPSEEK, ffn_size=128), **change), 8
        )
        assert any(what in error.problem for error in errors), what
        assert all("or rollout.engine.weights to plain" in error.hint for error in errors)


def test_what_only_a_gpu_refuses() -> None:
    assert EngineLayout(1, 4, 1).gpu_errors(MOE) == []
    (error,) = EngineLayout(1, 3, 1).gpu_errors(MOE)
    assert (error.where, "256" in error.problem) == ("rollout.engine.tp", True)


def test_what_only_a_cpu_refuses() -> None:
    assert EngineLayout(1, 2, 1).cpu_errors(MOE) == []
    assert EngineLayout(1, 1, 1).cpu_errors(DEEPSEEK) == []
    assert EngineLayout(1, 1, 1, precision=FP8_TILES).cpu_errors(MOE) == []
    assert ["key/value heads" in f.problem for f in EngineLayout(1, 8, 8).cpu_errors(MOE)] == [
        True,
        False,
    ]
    indexer = IndexerShape(2, 64, 8, interleaved_rope=False)
    (error,) = EngineLayout(1, 1, 1).cpu_errors(replace(DEEPSEEK, indexer=indexer))
    assert "indexer of Qwen3MoeForCausalLM has kernels for GPUs alone" in error.problem
    (error,) = EngineLayout(1, 2, 1).cpu_errors(DENSE)
    assert "the width 96 of a dense layer over 2" in error.problem


def test_an_engine_with_any_of_the_slots_is_not_without_them() -> None:
    layout = EngineLayout(3, 2, 1, first=4)
    assert layout.engines_without({0, 5, 6}) == [2]
    assert layout.engines_without(range(4)) == [0, 1, 2]

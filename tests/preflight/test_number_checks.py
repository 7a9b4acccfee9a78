"""What ranks that compute with the engines' numbers are refused with, each in one line. Needs a config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.placement.roles import engine_precision, resolve
from megarl.preflight.number_checks import number_errors
from tests.plan import plans


def told(folder: Path, family: str = "deepseek-v3", **changes: Any) -> list[str]:
    keys = {"pp": 4, "ep": 8, "layers_per_stage": (16, 15, 15, 15)} if "deepseek" in family else {}
    recipe = plans.recipe(folder, family, 32, **keys, **changes.pop("train", {"numbers": "engine"}))
    values = recipe.model_dump()
    values["rollout"]["engine"]["weights"] = changes.pop("weights", "fp8")
    values["precision"] = {"plain": ("kv_b_proj",)} | changes.pop("precision", {})
    recipe = type(recipe).model_validate(values | changes)
    return [str(error) for error in number_errors(resolve(recipe))]


def test_good_recipes_are_good(tmp_path: Path) -> None:
    assert told(tmp_path) == []
    assert told(tmp_path, precision={"scales": "powers_of_two"}) == []
    assert told(tmp_path, train={}, weights="plain", precision={"plain": ()}) == []


def test_scales_are_powers_of_two_unless_a_recipe_says_otherwise(tmp_path: Path) -> None:
    of_ranks = {
        numbers: plans.recipe(tmp_path, "qwen3-30b", 8, numbers=numbers)
        for numbers in ("plain", "engine")
    }
    scales = {numbers: engine_precision(recipe).scales for numbers, recipe in of_ranks.items()}
    assert scales == {"plain": "exact", "engine": "powers_of_two"}


@pytest.mark.parametrize("option", ["fp8_gemm_runner_backend", "moe_runner_backend"])
def test_kernels_that_choose_scales_of_their_own_are_named(tmp_path: Path, option: str) -> None:
    recipe = plans.recipe(tmp_path, "qwen3-30b", 8, numbers="engine")
    values = recipe.model_dump()
    values["rollout"]["engine"]["weights"] = "fp8"

    def of(backend: str) -> list[str]:
        values["rollout"]["engine"]["sglang"] = {option: backend}
        return [str(error) for error in number_errors(resolve(type(recipe).model_validate(values)))]

    assert of("deep_gemm") == []
    (line,) = of("flashinfer_trtllm")
    assert line.startswith(f"rollout.engine.sglang.{option}: flashinfer_trtllm does not go with")


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"weights": "plain"}, "train.numbers: engine, but the engines' weights are plain"),
        ({"precision": {"scales": "exact"}}, "precision.scales: exact, but kernels"),
        ({"precision": {"plain": ()}}, "train.numbers: engine, but SGLang multiplies kv_b_proj"),
        ({"lora": {"rank": 8}}, "train.numbers: engine, but with adapters"),
        ({"family": "deepseek-v3.2"}, "train.numbers: engine, but DeepseekV32ForCausalLM has an"),
        (
            {"train": {"numbers": "engine", "megatron": {"moe_router_padding_for_fp8": True}}},
            "train.megatron.moe_router_padding_for_fp8: does not go with train.numbers",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_named(
    tmp_path: Path, changes: dict[str, Any], start: str
) -> None:
    (line,) = told(tmp_path, **changes)
    assert line.startswith(start), line

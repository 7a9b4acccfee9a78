"""Parts of layers that are computed again, asked about before a run, on the machine of the run and on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.parallel.refusals import megatron_errors
from megarl.placement.roles import resolve
from tests.plan import plans

STAGES = (16, 15, 15, 15)


def errors(folder: Path, device: str = "cpu", **train: Any) -> list[str]:
    recipe = plans.recipe(folder, "deepseek-v3", 32, pp=4, ep=8, layers_per_stage=STAGES, **train)
    return [str(error) for error in megatron_errors(resolve(recipe).policy, device)]


def test_each_stage_is_asked_and_the_same_answer_is_told_once(tmp_path: Path) -> None:
    overlap = {"moe_shared_expert_overlap": True}
    keys = {"layer": 1, "shared_experts": 3, "layernorm": 2}
    (error,) = errors(tmp_path, recompute=keys, megatron=overlap)
    assert "shared_experts recompute cannot work" in error
    assert errors(tmp_path, recompute={"layer": 4}, megatron=overlap) == []


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", ["train.recompute.moe_act"]), ("cuda", [])]
)
def test_an_activation_function_is_computed_again_with_transformer_engine_alone(
    tmp_path: Path, device: str, expected: list[str]
) -> None:
    told = errors(tmp_path, device, recompute={"layer": 1, "moe_act": 4})
    assert [line.split(": ")[0] for line in told] == expected

"""What shared prefixes are refused with, each in one line that names both keys. Needs a config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.placement.roles import resolve
from megarl.preflight.prefix_checks import prefix_errors
from tests.plan import plans


def told(folder: Path, **train: Any) -> list[str]:
    keys = {"pp": 4, "ep": 8, "layers_per_stage": (16, 15, 15, 15), "share_prefixes": True} | train
    recipe = plans.recipe(folder, "deepseek-v3", 32, **keys)
    return [str(error) for error in prefix_errors(resolve(recipe))]


def test_linear_attention_has_no_shared_prefixes(tmp_path: Path) -> None:
    recipe = plans.recipe(tmp_path, "qwen3-next", 8, ep=8, share_prefixes=True)
    (line,) = [str(error) for error in prefix_errors(resolve(recipe))]
    assert line.startswith("train.share_prefixes: true, but linear attention")


def test_an_indexer_has_no_shared_prefixes(tmp_path: Path) -> None:
    recipe = plans.recipe(tmp_path, "glm-5", 8, ep=8, share_prefixes=True)
    (line,) = [str(error) for error in prefix_errors(resolve(recipe))]
    assert line.startswith("train.share_prefixes: true, but an indexer")


def test_what_does_not_depend_on_a_prefixs_copies_is_good(tmp_path: Path) -> None:
    losses = {"aux_loss": 0.01, "z_loss": 0.01, "router_bias_rate": 0.001}
    assert told(tmp_path, replay="r2", **losses) == []
    assert told(tmp_path, share_prefixes=False, replay="r3", mtp_loss=0.1) == []
    unset = {"moe_router_force_load_balancing": False, "moe_expert_capacity_factor": None}
    unset |= {"apply_rope_fusion": False, "overlap_moe_expert_parallel_comm": False}
    assert told(tmp_path, megatron=unset) == []


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"mtp_loss": 0.1}, "train.mtp_loss"),
        ({"replay": "r3"}, "train.replay"),
        ({"cp": 2}, "train.cp"),
        ({"cp": "auto"}, "train.cp"),
        (
            {"megatron": {"moe_expert_capacity_factor": 1.0}},
            "train.megatron.moe_expert_capacity_factor",
        ),
        ({"megatron": {"moe_input_jitter_eps": 0.1}}, "train.megatron.moe_input_jitter_eps"),
        (
            {"megatron": {"moe_router_force_load_balancing": True}},
            "train.megatron.moe_router_force_load_balancing",
        ),
        (
            {"megatron": {"overlap_moe_expert_parallel_comm": True}},
            "train.megatron.overlap_moe_expert_parallel_comm",
        ),
        ({"megatron": {"apply_rope_fusion": True}}, "train.megatron.apply_rope_fusion"),
    ],
)
def test_what_is_refused(tmp_path: Path, train: dict[str, Any], key: str) -> None:
    (line,) = told(tmp_path, **train)
    assert line.startswith("train.share_prefixes: true, but ") and key in line
    assert "set it to false" in line

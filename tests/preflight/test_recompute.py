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
    keys = {"pp": 4, "ep": 8, "layers_per_stage": STAGES} | train
    recipe = plans.recipe(folder, "deepseek-v3", 32, **keys)
    return [str(error) for error in megatron_errors(resolve(recipe).policy, device)]


def test_each_stage_is_asked_and_the_same_answer_is_told_once(tmp_path: Path) -> None:
    graphs = {"cuda_graph_impl": "local"}
    (error,) = errors(tmp_path, recompute={"layer": 2, "layernorm": 1}, megatron=graphs)
    assert "full recompute is only supported" in error
    assert errors(tmp_path, recompute={"moe": 2, "layernorm": 1}, megatron=graphs) == []


def test_shared_experts_of_a_later_stage_do_not_run_beside_an_exchange(tmp_path: Path) -> None:
    overlap = {"moe_shared_expert_overlap": True}
    keys = {"layer": 1, "shared_experts": 3, "layernorm": 2}
    (error,) = errors(tmp_path, recompute=keys, megatron=overlap)
    assert error.startswith("train.megatron.moe_shared_expert_overlap: ")
    assert errors(tmp_path, recompute={"layer": 4}, megatron=overlap) == []


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", ["train.recompute.moe_act"]), ("cuda", [])]
)
def test_an_activation_function_is_computed_again_with_transformer_engine_alone(
    tmp_path: Path, device: str, expected: list[str]
) -> None:
    told = errors(tmp_path, device, recompute={"layer": 1, "moe_act": 4})
    assert [line.split(": ")[0] for line in told] == expected


def test_megatron_takes_passes_in_pairs(tmp_path: Path) -> None:
    pairs = {"overlap_moe_expert_parallel_comm": True}
    again = {"layernorm": 2, "mla_up_proj": 2, "moe_act": 1, "mlp": 2, "shared_experts": 2}
    keys = {"pp": 2, "vpp": 2, "megatron": pairs, "recompute": again}
    assert errors(tmp_path, "cuda", **keys) == []
    (error,) = errors(tmp_path, "cuda", **keys, mtp_loss=0.1)
    assert error.startswith("train.megatron.overlap_moe_expert_parallel_comm: ")


@pytest.mark.parametrize(
    ("option", "scope", "is_refused"),
    [
        ({"cuda_graph_impl": "local"}, {}, True),
        ({"enable_cuda_graph": True}, {"cuda_graph_scope": "full_iteration"}, True),
        ({"external_cuda_graph": True}, {"cuda_graph_scope": "attn,mlp"}, True),
        ({"cuda_graph_impl": "transformer_engine"}, {"cuda_graph_scope": "mlp"}, False),
        ({"cuda_graph_impl": "none"}, {}, False),
    ],
)
def test_a_graph_of_attention_or_a_router_does_not_follow_rows_by_length(
    tmp_path: Path, option: dict[str, Any], scope: dict[str, str], is_refused: bool
) -> None:
    """It would repeat the exchanges of the first row's ranks."""
    (name,) = option
    keys: dict[str, Any] = {"cp": "auto", "tokens_per_micro_batch": 1024}
    told = errors(tmp_path, megatron=option | scope, **keys)
    of_graph = [
        line for line in told if line.startswith(f"train.megatron.{name}: with train.cp: auto")
    ]
    assert len(of_graph) == is_refused
    fixed = errors(tmp_path, megatron=option | scope)
    assert not [line for line in fixed if "train.cp: auto" in line]

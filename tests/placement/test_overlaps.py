"""Which of Megatron's overlaps a recipe may have, and in what words the others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.config.models import TrainConfig
from megarl.model.shape import ModelShape
from megarl.placement.overlaps import (
    PAIRED_PASSES,
    SHARED_EXPERTS,
    overlap_errors,
    without_unused,
)
from megarl.placement.train_layout import TrainLayout

SHAPE = ModelShape(
    4, 64, 4, 2, 16, 100, num_experts=8, experts_per_token=2, moe_ffn_size=32, num_shared_experts=1
)  # fmt: skip
LAYOUT = TrainLayout(8, 1, 2, 4, vpp=2)


def errors(
    option: str,
    *,
    shape: ModelShape = SHAPE,
    layout: TrainLayout = LAYOUT,
    dtype: str = "bfloat16",
    options: dict[str, Any] | None = None,
    branch: str = "train",
    **keys: Any,
) -> list[str]:
    train = TrainConfig(lr=1.0, megatron={option: True, **(options or {})}, **keys)
    return [str(error) for error in overlap_errors(train, shape, layout, dtype, branch)]


def test_what_is_exact_is_allowed() -> None:
    assert errors(PAIRED_PASSES) == []
    assert errors(PAIRED_PASSES, layout=replace(LAYOUT, pp=1, vpp=1)) == []
    parts = {"layernorm": 2, "moe_act": 2, "mla_up_proj": 2, "shared_experts": 1}
    assert errors(PAIRED_PASSES, recompute=parts, replay="r2", aux_loss=0.1) == []
    assert errors(SHARED_EXPERTS, recompute={"layer": 2}, mtp_loss=0.1) == []
    assert errors(PAIRED_PASSES, options={PAIRED_PASSES: False, "tp_comm_overlap": False}) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layout": replace(LAYOUT, ep=1)}, "no tokens go to experts of other ranks; remove it"),
        ({"shape": replace(SHAPE, num_experts=0)}, "no tokens go to experts"),
        ({"dtype": "float32"}, "Megatron refuses it in float32"),
        ({"layout": replace(LAYOUT, vpp=1)}, "train.pp is 2 without virtual stages"),
        ({"layout": replace(LAYOUT, max_cp=2)}, "set train.cp to a number"),
        ({"recompute": {"layer": 1}}, "does not compute layer again"),
        ({"recompute": {"moe": 2}}, "does not compute moe again"),
        ({"options": {"moe_layer_recompute": True}}, "moe_layer_recompute is set too"),
        ({"layout": TrainLayout(8, 1, 1, 8)}, "lower train.ep below 8"),
        ({"layout": TrainLayout(8, 1, 1, 8)}, "moe_token_dispatcher_type to flex, or remove it"),
        (
            {"layout": TrainLayout(8, 1, 1, 8), "branch": "critic.ranks"},
            "lower critic.ranks.ep below 8",
        ),
        ({"layout": replace(LAYOUT, vpp=1), "branch": "critic.ranks"}, "critic.ranks.pp is 2"),
        ({"mtp_loss": 0.1}, "set train.mtp_loss to 0"),
        (
            {"shape": replace(SHAPE, num_mtp_layers=1), "layout": TrainLayout(4, 1, 1, 4)},
            "set train.pp and train.vpp to 2",
        ),
        ({"options": {SHARED_EXPERTS: True}}, "both want the same exchange"),
    ],
)
def test_passes_are_not_paired_where_megatron_would_compute_something_else(
    keys: dict[str, Any], words: str
) -> None:
    (error,) = errors(PAIRED_PASSES, **keys)
    assert error.startswith(f"train.megatron.{PAIRED_PASSES}: ") and words in error


def test_experts_of_deepep_or_of_several_ranks_have_an_input_of_their_own() -> None:
    assert errors(PAIRED_PASSES, layout=TrainLayout(16, 1, 1, 8, expert_tp=2)) == []
    layout = TrainLayout(8, 1, 1, 8)
    assert errors(PAIRED_PASSES, layout=layout, options={"moe_token_dispatcher_type": "flex"}) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"shape": replace(SHAPE, num_shared_experts=0)}, "the model has no shared experts"),
        ({"options": {"moe_token_dispatcher_type": "flex"}}, "is not alltoall"),
        ({"recompute": {"shared_experts": 1}}, "leave shared_experts out of train.recompute"),
    ],
)
def test_shared_experts_need_an_exchange_to_run_beside(keys: dict[str, Any], words: str) -> None:
    (error,) = errors(SHARED_EXPERTS, **keys)
    assert error.startswith(f"train.megatron.{SHARED_EXPERTS}: ") and words in error


@pytest.mark.parametrize(
    ("shape", "ep", "trains", "kept"),
    [
        (SHAPE, 4, True, {PAIRED_PASSES, SHARED_EXPERTS}),
        (SHAPE, 4, False, {SHARED_EXPERTS}),
        (SHAPE, 1, True, {SHARED_EXPERTS}),
        (replace(SHAPE, num_experts=0, num_shared_experts=0), 1, True, set()),
    ],
)
def test_an_auxiliary_model_has_the_overlaps_of_its_exchanges(
    shape: ModelShape, ep: int, trains: bool, kept: set[str]
) -> None:
    others = {"moe_token_dispatcher_type": "alltoall"}
    train = TrainConfig(lr=1.0, megatron={PAIRED_PASSES: True, SHARED_EXPERTS: True, **others})
    left = without_unused(train, shape, replace(LAYOUT, ep=ep), trains=trains).megatron
    assert left == dict.fromkeys(kept, True) | others


@pytest.mark.parametrize(
    "option",
    ["tp_comm_overlap", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release"],
)
def test_what_no_rank_may_do_is_refused_by_name(option: str) -> None:
    (error,) = errors(option)
    assert error.startswith(f"train.megatron.{option}: ") and error.endswith("; remove it")

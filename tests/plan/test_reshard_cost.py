"""The reshard's figures, held against the maps by hand and against what the architecture states for DeepSeek-V3."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.config.hardware import load_hardware
from megarl.model.hf_config import model_shape
from megarl.model.precision import FP8_TILES, PLAIN
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import resolve, train_layout
from megarl.placement.train_layout import TrainLayout
from megarl.plan.reshard_cost import (
    ReshardPlan,
    bound_s,
    expected_s,
    gather_bound_s,
    gathered_bytes,
    plan_reshard,
)
from megarl.preflight.model_checks import stand_ins
from megarl.resharding import fp8, megatron_map, sglang_map
from megarl.resharding.shards import Part
from megarl.resharding.traffic import Traffic, count_traffic
from tests.plan import recipes as planning

CARD = load_hardware(planning.H800)


def plan_of(folder: Path, *overrides: str) -> ReshardPlan:
    return plan_reshard(resolve(stand_ins(planning.small(folder, *overrides))[0]), CARD)


def small_model_bytes() -> int:
    attention = 256 * (8 + 2 * 4) * 32 + 8 * 32 * 256 + 2 * 32
    layer = attention + 2 * 256 + 8 * 256 + 8 * 3 * 256 * 128
    return 2 * (4 * layer + 2 * 1024 * 256 + 256)


def test_what_arrives_is_local_or_came_over_a_wire(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    parts = plan.local_bytes, plan.nvlink_bytes, plan.fabric_in_bytes
    assert sum(part.mean for part in parts) == plan.dest_bytes.mean
    assert plan.fabric_in_bytes.mean == plan.fabric_out_bytes.mean > 0
    assert plan.dest_bytes.mean > small_model_bytes() / 4
    assert 0 < plan.bound_s < plan.expected_s and plan.rounds > 0


def test_one_node_has_no_fabric(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "placement.gpus_per_node=8")
    assert plan.fabric_in_bytes.max == 0 and plan.nvlink_bytes.max > 0
    assert plan.gather_bound_s == pytest.approx(plan.gather_everything_bytes.max * 7 / 8 / 160e9)


def test_gathering_brings_everything_that_a_rank_does_not_hold(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.tp=1", "train.pp=2", "train.ep=1")
    recipe = planning.small(tmp_path, "train.tp=1", "train.pp=2", "train.ep=1")
    stages = [
        megatron_map.shards(model_shape(tmp_path), train_layout(recipe), rank) for rank in (0, 4)
    ]
    held = [2 * sum(shard.area for shard in stage) for stage in stages]
    assert sum(held) == small_model_bytes()
    assert plan.gather_everything_bytes.mean == small_model_bytes() / 2
    assert plan.gather_everything_bytes.max == small_model_bytes() - min(held)


def dest_bytes(sources: list[Part], targets: list[Part]) -> int:
    whole = fp8.with_scales(sources, targets)
    return int(count_traffic(whole, targets, 4, gpus_per_node=4, dtype="bfloat16").dest.max())


def test_fp8_engines_take_half_and_gathering_does_not_shrink() -> None:
    shape = ModelShape(2, 256, 4, 4, 128, 1024, 4, 2, 256)
    train, members = TrainLayout(4, 1, 2, 2), 4
    sources = megatron_map.parts(shape, train)
    gathered = [
        gathered_bytes(
            sources,
            sglang_map.parts(shape, EngineLayout(1, 2, 1, precision=FP8_TILES if fp8 else PLAIN)),
            members,
            "bfloat16",
        )
        for fp8 in (False, True)
    ]
    assert gathered[0].tolist() == gathered[1].tolist()
    layouts = [EngineLayout(1, 2, 1, precision=precision) for precision in (PLAIN, FP8_TILES)]
    wide, narrow = (dest_bytes(sources, sglang_map.parts(shape, layout)) for layout in layouts)
    # of a rank: layers' projections
    tiled = 2 * (4 * 3 * 256 * 256 + 256 * (4 + 2 * 4) * 128 + 4 * 128 * 256) // 2
    assert wide - narrow == pytest.approx(tiled, rel=1e-3), (
        "a byte less of each, but for the scales"
    )


def account_of(**bytes_of: list[int]) -> Traffic:
    zeros = dict.fromkeys(
        (
            "dest",
            "local",
            "node_in",
            "node_out",
            "fabric_in",
            "fabric_out",
            "minimum_wire",
            "minimum_fabric",
        ),
        [0, 0],
    )
    return Traffic(**{name: np.array(values) for name, values in (zeros | bytes_of).items()})


def test_the_bound_is_the_slower_of_a_nodes_cards_and_a_gpus_links() -> None:
    billions = 10**9
    node = account_of(minimum_fabric=[800 * billions, 0], minimum_wire=[100 * billions, 0])
    assert bound_s(node, 8, CARD) == pytest.approx(800 / (8 * 50))
    gpu = account_of(minimum_fabric=[8 * billions, 0], minimum_wire=[500 * billions, 0])
    assert bound_s(gpu, 8, CARD) == pytest.approx(500 / (50 + 200))


def test_the_shorter_way_is_hidden_but_for_one_send_stage_of_four() -> None:
    account = account_of(fabric_in=[45 * 10**9, 0], node_out=[0, 32 * 10**9])
    assert expected_s(account, CARD) == pytest.approx(1.0 + 0.2 / 4)


def test_gathering_at_its_best_by_hand() -> None:
    assert gather_bound_s(800e9, 16, 8, CARD) == pytest.approx(max(800 / 8 / 45, 800 * 7 / 8 / 160))
    assert gather_bound_s(800e9, 1, 8, CARD) == 0

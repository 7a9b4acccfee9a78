"""The rank map: what sits on each slot, and how runs of numbers are told."""

from __future__ import annotations

from pathlib import Path

from megarl.config import Recipe
from megarl.parallel.engine_layout import EngineLayout
from megarl.parallel.layout import TrainLayout
from megarl.parallel.roles import RoleName
from megarl.plan.model_size import ModelSize
from megarl.plan.slots import pipeline_stages, slot_map, spans
from megarl.types import ModelShape
from tests.plan import plans
from tests.plan import recipes as planning

SHAPE = ModelShape(8, 64, 4, 4, 16, 300)


def size(recipe: Recipe, role: RoleName, first: int, layout: TrainLayout) -> ModelSize:
    return plans.size(role, SHAPE, recipe, layout, first, ())


def test_every_slot_says_node_ranks_and_engine(tmp_path: Path) -> None:
    recipe = planning.small(tmp_path, "placement.gpus=10", "placement.gpus_per_node=4")
    policy, critic = TrainLayout(8, 2, 2, 2), TrainLayout(4, 2, 1, 2)
    sizes: dict[RoleName, ModelSize] = {
        "policy": size(recipe, "policy", 0, policy),
        "critic": size(recipe, "critic", 6, critic),
    }
    slots = slot_map(recipe, sizes, EngineLayout(2, 3, 1, first=4))
    assert [(one.slot, one.node, one.gpu) for one in slots[3:6]] == [(3, 0, 3), (4, 1, 0), (5, 1, 1)]
    assert [sorted(one.ranks) for one in slots] == [["policy"]] * 6 + [["critic", "policy"]] * 2 + [["critic"]] * 2
    assert slots[7].ranks["policy"] == policy.coords(7) and slots[7].ranks["critic"] == critic.coords(1)
    assert [(one.engine, one.engine_rank) for one in slots[3:]] == [
        (None, None), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip


def test_stages_are_runs_of_slots_with_their_layers(tmp_path: Path) -> None:
    found = pipeline_stages(size(planning.small(tmp_path), "policy", 8, TrainLayout(8, 2, 2, 2, vpp=2)))
    assert [(one.slots, one.layers) for one in found] == [
        (range(8, 12), (0, 1, 4, 5)),
        (range(12, 16), (2, 3, 6, 7)),
    ]


def test_numbers_are_told_as_runs() -> None:
    assert spans((0, 1, 4, 5, 7)) == "0-1, 4-5, 7"
    assert spans(range(3, 4)) == "3" and spans(()) == "none"

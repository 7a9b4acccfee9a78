"""Settings that do not go with experts that move, and the tables by which SGLang finds experts behind DeepEP.

Those without DeepEP are tested where a real engine samples: tests/resharding/test_end_to_end.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config import EngineConfig, Recipe
from megarl.config.loading import load_recipe
from megarl.cpu import sglang_patches
from megarl.placement.expert_places import Places
from megarl.rollout.sglang import expert_maps
from megarl.rollout.sglang.arguments import server_arguments
from megarl.rollout.sglang.expert_maps import place_errors
from tests.rollout.sglang.test_arguments import SETTINGS

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
KEY = "rollout.engine.place_experts"
REFUSED = [
    (["rollout.engine.ep=1"], f"{KEY}: true, but each slot of an engine has all experts"),
    (["train.replay=r2"], f"train.replay: r2, but {KEY} needs the routes"),
    (["rollout.seeded=true"], "rollout.seeded: true, but"),
    (["lora={rank: 4, sync: adapters}"], "lora.sync: adapters: the frozen weights are sent once"),
]


def recipe(*overrides: str) -> Recipe:
    keys = (f"{KEY}=true", "rollout.engine.tp=2", "rollout.engine.ep=2", "train.replay=r3")
    return load_recipe(QUICKSTART, [*keys, *overrides])


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_go_with_experts_that_move(overrides: list[str], message: str) -> None:
    (error,) = place_errors(recipe(*overrides))
    assert message in str(error)
    assert place_errors(recipe(*overrides, f"{KEY}=false")) == []
    assert place_errors(recipe()) == []


def dispatch_algorithm(layout: dict[str, Any], *, moves: bool) -> str | None:
    settings = replace(
        SETTINGS,
        layout=replace(SETTINGS.layout, **layout),
        engine=EngineConfig(place_experts=moves),
    )
    return server_arguments(settings, "a.loader", "cuda").get("ep_dispatch_algorithm")


def test_sglang_reads_its_table_of_experts_behind_deepep_alone() -> None:
    deepep = {"tp": 8, "ep": 8, "dp": 8, "deepep": True, "whole_dense": True}
    assert dispatch_algorithm(deepep, moves=True) == "static"
    assert dispatch_algorithm(deepep, moves=False) is None
    assert dispatch_algorithm({"tp": 2, "ep": 2}, moves=True) is None


class Layer(torch.nn.Module):
    """What SGLang's layer of experts has where DeepEP dispatches."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_id = number
        self.dispatcher = SimpleNamespace()
        self.w13_weight = torch.zeros(1)


@pytest.mark.slow
def test_behind_deepep_each_choice_becomes_the_slot_of_its_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's own table and its own lookup; of three layers the first is dense."""
    location, num_experts = identity_location(num_layers=3, num_experts=8), 8
    monkeypatch.setattr(expert_maps, "_location", lambda: location)
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), Layer(1), Layer(2)])
    tables = {
        name: tensor for name, tensor in vars(location).items() if hasattr(tensor, "data_ptr")
    }
    addresses = {name: tensor.data_ptr() for name, tensor in tables.items()}
    for seed in range(3):
        places: Places = tuple(
            tuple(Random(seed + layer).sample(range(num_experts), num_experts)) for layer in (0, 9)
        )
        assert expert_maps.error(model, places) is None
        expert_maps.write(model, places)
        chosen = torch.randint(num_experts, (64, 2))
        assert torch.equal(slots_of(chosen, location, 0), chosen)
        for layer, row in enumerate(places, start=1):
            assert torch.equal(torch.tensor(row)[slots_of(chosen, location, layer)], chosen)
    assert {name: tensor.data_ptr() for name, tensor in tables.items()} == addresses
    message = "of 1 layers, SGLang's model has 2"
    assert message in str(expert_maps.error(model, places[:1]))


def identity_location(num_layers: int, num_experts: int) -> Any:
    sglang_patches.prepare()
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata

    slots = torch.arange(num_experts).repeat(num_layers, 1)
    of_each = torch.nn.functional.pad(slots[..., None], (0, num_experts - 1), value=-1)
    return ExpertLocationMetadata(
        physical_to_logical_map=slots.clone(),
        physical_to_logical_map_cpu=slots.clone(),
        logical_to_all_physical_map=of_each.clone(),
        logical_to_all_physical_map_cpu=of_each.clone(),
        logical_to_all_physical_map_num_valid=torch.ones_like(slots),
        ep_size=2,
        logical_to_rank_dispatch_physical_map=slots.clone(),
    )


def slots_of(chosen: torch.Tensor, location: Any, layer: int) -> torch.Tensor:
    from sglang.srt.eplb.expert_location_dispatch import (
        ExpertLocationDispatchInfo,
        topk_ids_logical_to_physical,
    )

    info = ExpertLocationDispatchInfo(
        ep_dispatch_algorithm="static",
        partial_logical_to_rank_dispatch_physical_map=location.logical_to_rank_dispatch_physical_map[
            layer
        ],
        partial_logical_to_all_physical_map=location.logical_to_all_physical_map[layer],
        partial_logical_to_all_physical_map_num_valid=location.logical_to_all_physical_map_num_valid[
            layer
        ],
        num_physical_experts=8,
    )
    return topk_ids_logical_to_physical(chosen, info)

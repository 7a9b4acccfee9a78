"""The plan of a run that samples through servers of others: their memory and time are not in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.placement.roles import resolve
from megarl.plan.layout_search import search
from megarl.plan.picture import draw
from megarl.plan.report import page, plan_json
from megarl.plan.reshard_cost import weight_file_bytes
from megarl.plan.run_plan import make_plan
from megarl.types import UserError
from tests.plan import plans

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return plans.recipe(tmp_path, "tiny", 4, engine={"external": ["a:1", "b:2"]})


def test_servers_take_nothing_of_the_runs_gpus(recipe: Recipe, tmp_path: Path) -> None:
    plan = make_plan(recipe, plans.H800)
    assert plan.fits
    assert all(slot.engine is None and slot.ranks for slot in plan.slots)
    for parts in plan.memory.device.values():
        assert parts.engine_weights_bytes == parts.kv_cache_bytes == 0
    assert plan.step.rollout_s == 0 and plan.step.train_s > 0 and plan.ranks_wait_s == 0
    num_bytes = weight_file_bytes(resolve(recipe))
    assert plan.reshard.expected_s == pytest.approx(2 * num_bytes / plans.H800.disk_bytes_per_s)
    words = page(plan)
    assert "engines: 2 SGLang servers of others, on none of these slots: a:1, b:2" in words
    assert "whose memory and time are not in this plan" in words
    json.dumps(plan_json(plan))
    draw(plan, tmp_path / "plan.png")


def test_what_helps_too_small_gpus_is_no_change_of_engines(recipe: Recipe) -> None:
    small = plans.H800.model_copy(update={"memory_bytes": 1_500_000_000})
    plan = make_plan(recipe, small)
    assert plan.errors
    assert not any("rollout.engine" in str(error) for error in plan.errors)


def test_nothing_is_searched(recipe: Recipe) -> None:
    with pytest.raises(UserError, match="how long external engines take"):
        search(recipe, plans.H800, "train")

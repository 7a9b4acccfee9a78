"""What a page says of a run from its recipe alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.hardware import load_hardware
from megarl.config.loading import load_recipe
from megarl.placement.roles import resolve
from megarl.plan.reshard_cost import plan_reshard
from megarl.report.planned import planned

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def test_the_rank_map_has_each_slot_with_its_ranks_and_its_engine(
    quickstart_inputs: list[str],
) -> None:
    """tp 2, pp 2 on four slots, with one engine of tp 2."""
    result = planned(load_recipe(QUICKSTART, quickstart_inputs))
    policy = [slot["ranks"]["policy"] for slot in result.slots]
    assert [(ranks["tp"], ranks["pp"]) for ranks in policy] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    engines = [(slot["engine"], slot["engine_rank"]) for slot in result.slots]
    assert engines == [(0, 0), (0, 1), (None, None), (None, None)]
    assert result.notes == [
        "the recipe names no placement.hardware: the plan's memory is not shown"
    ]


def test_the_least_bytes_of_a_reshard_are_what_engines_want_and_do_not_hold(
    quickstart_inputs: list[str],
) -> None:
    recipe = load_recipe(QUICKSTART, quickstart_inputs)
    hardware = load_hardware(str(ROOT / "recipes" / "hardware" / "h100.yaml"))
    plan = plan_reshard(resolve(recipe), hardware)
    wanted = 2 * (plan.dest_bytes.mean - plan.local_bytes.mean)  # of both ranks of the engine
    assert planned(recipe).minimum_wire_bytes == pytest.approx(wanted)
    assert wanted > 0


def test_a_model_that_is_gone_is_a_note(quickstart_inputs: list[str], tmp_path: Path) -> None:
    recipe = load_recipe(QUICKSTART, [*quickstart_inputs, f"model.path={tmp_path / 'gone'}"])
    result = planned(recipe)
    assert result.minimum_wire_bytes is None
    assert result.notes[0].startswith("placement and least bytes of a reshard are not all known: ")


@pytest.mark.slow
def test_with_a_hardware_file_each_phase_has_the_plans_memory(quickstart_inputs: list[str]) -> None:
    hardware = ROOT / "recipes" / "hardware" / "h100.yaml"
    overrides = [*quickstart_inputs, f"placement.hardware={hardware}"]
    result = planned(load_recipe(QUICKSTART, overrides))
    assert {"rollout", "train", "reshard"} <= set(result.memory)
    assert all(sum(parts.values()) > 0 for parts in result.memory.values())
    assert result.notes == []

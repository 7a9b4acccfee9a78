"""When a run's engines are brought to another number, and what the user is told; the fleet is stood in for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.fleet.engine_count import EngineCount
from megarl.fleet.fleet import Fleet
from megarl.placement.roles import resolve
from megarl.tracking.engine_requests import request_engines
from tests.plan import plans

PLACEMENT = {"train_gpus": 2, "first_engine_gpu": 2}


class Cluster:
    """Nodes of one slot each; `num_free`: further ones that may be taken."""

    def __init__(self, num_slots: int, num_free: int) -> None:
        self.num_slots = num_slots
        self.num_free = num_free

    def extend_slots(self, gpus: int) -> int:
        taken = min(self.num_free, max(0, gpus - self.num_slots))
        self.num_slots += taken
        self.num_free -= taken
        return self.num_slots

    def shrink_slots(self, gpus: int) -> None:
        self.num_free += self.num_slots - gpus
        self.num_slots = gpus


class Processes:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def add(self, slots: Any) -> None:
        self.seen.append(("add", [*slots]))

    def remove(self, count: int) -> None:
        self.seen.append(("remove", count))


class Run:
    """With two engines of one GPU, behind two training ranks, and room for as many as are free."""

    def __init__(self, folder: Path, num_free: int, max_count: int | None = 4) -> None:
        self.folder = folder
        self.lines: list[str] = []
        engine = {"count": 2, "max_count": max_count}
        recipe = plans.recipe(folder, "tiny", 6, ep=2, engine=engine, placement=PLACEMENT)
        self.cluster = Cluster(4, num_free)
        self.processes = Processes()
        fleet: Any = Fleet.__new__(Fleet)
        engines = type("Engines", (), {"processes": self.processes})
        fleet.__dict__.update(
            _cluster=self.cluster, engines=engines, roles=resolve(recipe), say=self.lines.append
        )
        self.fleet: Fleet = fleet
        self.count = EngineCount()

    def between_steps(self, request: int | None = None) -> int:
        """The engines that the next step has."""
        if request is not None:
            request_engines(self.folder, request)
        self.count.follow(self.fleet, self.folder)
        return self.fleet.roles.engines.count


def test_without_a_request_nothing_changes(tmp_path: Path) -> None:
    run = Run(tmp_path, num_free=2)
    assert run.between_steps() == 2 == run.between_steps(2)
    assert (run.processes.seen, run.lines) == ([], [])


def test_engines_are_added_behind_the_others_and_leave_from_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path, num_free=2)
    assert [run.between_steps(4), run.between_steps(), run.between_steps(1)] == [4, 4, 1]
    assert run.processes.seen == [("add", [4, 5]), ("remove", 3)]
    started, left = run.lines
    assert started == "engines 2 to 3 have started, beside the next step"
    assert left.startswith("engines 1 to 3 have left in 0.") and left.endswith("the GPUs are free")
    assert run.cluster.num_slots == 3, "nodes without an engine are given back"
    assert run.fleet.roles.num_members == 3, "of the next reshard"


def test_what_has_no_room_yet_is_told_once_and_tried_between_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, num_free=0)
    assert [run.between_steps(4), run.between_steps()] == [2, 2]
    run.cluster.num_free = 1
    assert run.between_steps() == 3
    run.cluster.num_free = 1
    assert run.between_steps() == 4
    later = "it is tried again between steps"
    assert run.lines == [
        f"4 engines are asked for, and there are GPUs for 2: {later}",
        "engine 2 has started, beside the next step",
        "engine 3 has started, beside the next step",
    ]


@pytest.mark.parametrize(("max_count", "request_"), [(4, 5), (None, 1)])
def test_an_earlier_request_that_a_resumed_run_cannot_meet_is_left(
    tmp_path: Path, max_count: int | None, request_: int
) -> None:
    """Its recipe has another maximum than when it was asked."""
    run = Run(tmp_path, num_free=9, max_count=max_count)
    assert [run.between_steps(request_), run.between_steps()] == [2, 2]
    (line,) = run.lines
    assert line.startswith(f"the request for {request_} engines is left: ")
    assert "rollout.engine.max_count" in line and run.processes.seen == []


def test_a_run_on_nodes_begins_without_those_of_later_engines(tmp_path: Path) -> None:
    """Unless another model is behind them; on one machine Ray has all slots from the start."""
    recipe = Run(tmp_path, num_free=0).fleet.roles.recipe
    nodes = recipe.placement.model_copy(update={"network": "nodes", "gpus_per_node": 1})
    assert recipe.first_gpus == 6
    assert recipe.model_copy(update={"placement": nodes}).first_gpus == 4
    more = nodes.model_copy(update={"gpus": 7})
    assert recipe.model_copy(update={"placement": more}).first_gpus == 7


def test_the_maximum_moves_no_engine(tmp_path: Path) -> None:
    roles = Run(tmp_path, num_free=0).fleet.roles
    assert roles.most_engines == replace(roles.engines, count=4)
    assert roles.engine_slots == range(2, 4)

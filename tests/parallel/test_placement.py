"""Which slots train, which sample, and which do both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.parallel.placement import critic_recipe, node_faults, shared_slots, slot_faults
from tests.parallel.worlds import recipe


@pytest.mark.parametrize(
    ("train_gpus", "first", "shared"),
    [(8, 0, range(4)), (4, 4, range(0)), (6, 4, range(4, 6)), (2, 0, range(2)), (4, 6, range(0))],
)
def test_memory_is_shared_where_both_sides_sit(train_gpus: int, first: int, shared: range) -> None:
    assert sorted(shared_slots([range(train_gpus), range(first, first + 4)])) == list(shared)


def test_any_two_of_several_sides_share() -> None:
    assert sorted(shared_slots([range(2), range(3, 5), range(1, 2), range(4, 6)])) == [1, 4]


@pytest.mark.parametrize(
    ("gpus", "train_gpus", "first", "faulty"),
    [
        (8, 8, 0, []),
        (8, 4, 4, []),
        (6, 4, 2, []),
        (8, 10, 0, ["placement.train_gpus"]),
        (9, 4, 5, ["placement.first_engine_gpu"]),
        (9, 4, 4, ["placement.gpus"]),
    ],
)
def test_every_slot_exists_and_is_used(gpus: int, train_gpus: int, first: int, faulty: list[str]) -> None:
    found = slot_faults(gpus, TrainLayout(train_gpus, 1, 1, 1), EngineLayout(count=2, tp=2, ep=1, first=first))
    assert [fault.where for fault in found] == faulty


@pytest.mark.parametrize(
    ("gpus", "critic", "faulty"),
    [
        (8, range(6, 8), []),
        (6, range(1, 5), []),
        (8, range(6, 9), ["critic.ranks.gpus"]),
        (9, range(7, 9), ["placement.gpus"]),
        (9, range(6, 8), ["placement.gpus"]),
    ],
)
def test_a_critic_has_its_place_behind_the_engines_or_among_them(gpus: int, critic: range, faulty: list[str]) -> None:
    """Two slots train, the next four sample."""
    engines = EngineLayout(count=2, tp=2, ep=1, first=2)
    found = slot_faults(gpus, TrainLayout(2, 1, 1, 1), engines, {"critic": critic})
    assert [fault.where for fault in found] == faulty


def test_the_engines_follow_the_training_ranks_without_a_gap() -> None:
    """Whoever else sits there: it has no part in the exchange."""
    engines = EngineLayout(count=1, tp=2, ep=1, first=4)
    (fault,) = slot_faults(6, TrainLayout(2, 1, 1, 1), engines, {"critic": range(2, 4)})
    assert fault.where == "placement.first_engine_gpu"


def on_nodes(*, train: dict[str, Any] | None = None, first: int = 0, critic: int = 0, **engine: Any) -> Recipe:
    """16 GPUs on nodes of 4, the critic's ranks from one of them on."""
    made = recipe(Path("none"), TrainLayout(16, 1, 1, 1), **(train or {}))
    tree = made.model_dump(mode="json")
    tree["placement"] |= {"network": "nodes", "gpus_per_node": 4, "first_engine_gpu": first}
    tree["rollout"]["engine"] |= engine
    tree["critic"]["ranks"] |= {"first_gpu": critic, "gpus": 4}
    return Recipe.model_validate(tree)


@pytest.mark.parametrize(
    ("made", "faulty"),
    [
        (on_nodes(train={"tp": 4}, tp=4, count=4), []),
        (on_nodes(train={"tp": 2, "pp": 4}, tp=8, count=2), []),
        (on_nodes(train={"tp": 8}, tp=2, count=8), ["train.tp", "critic.ranks.tp"]),
        (on_nodes(train={"tp": 2}, critic=1, tp=2), ["critic.ranks.tp"]),
        (on_nodes(tp=3), ["rollout.engine.tp"]),
        (on_nodes(tp=4, first=2), ["rollout.engine.tp"]),
        (on_nodes(tp=8, first=4), []),
        (on_nodes(tp=6), ["rollout.engine.tp"]),
        (on_nodes(tp=8, dp=2), []),
    ],
)
def test_what_talks_at_every_layer_lies_inside_a_node_and_engines_fill_nodes(made: Recipe, faulty: list[str]) -> None:
    found = node_faults(made, {"critic": range(made.critic.ranks.first_gpu, 8)})
    assert [fault.where for fault in found] == faulty


def test_one_machine_has_no_edges() -> None:
    made = on_nodes(train={"tp": 8}, tp=16)
    alone = made.model_copy(update={"placement": made.placement.model_copy(update={"gpus_per_node": 16})})
    assert node_faults(alone, {}) == []


def test_an_engine_that_is_said_to_span_nodes_needs_their_network() -> None:
    made = on_nodes(tp=8)
    loopback = made.model_copy(update={"placement": made.placement.model_copy(update={"network": "loopback"})})
    assert [fault.where for fault in node_faults(loopback, {})] == ["placement.network"]
    assert (made.engine_nodes, loopback.engine_nodes, on_nodes(tp=4).engine_nodes) == (2, 1, 1)


def test_a_gpu_has_its_number_on_its_node() -> None:
    made = on_nodes()
    assert [made.placement.gpu_of(slot) for slot in (3, 4, 9)] == [3, 0, 1]
    loopback = made.placement.model_copy(update={"network": "loopback"})
    assert loopback.gpu_of(9) == 9, "all are on this machine, whatever is said of fast links"
    assert critic_recipe(made).placement.gpu_of(5) == 1, "the critic's ranks are on the same nodes"

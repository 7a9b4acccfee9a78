"""Training ranks and engines against the GPU slots and the nodes, and micro-batches against the longest sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import Role, Roles, resolve
from megarl.placement.train_layout import TrainLayout
from megarl.preflight.data_checks import budget_errors
from megarl.preflight.layout_checks import (
    layout_errors,
    most_engines_errors,
    node_errors,
    slot_errors,
)
from tests.parallel.worlds import recipe


def placed(gpus: int, train_gpus: int, engines: EngineLayout, critic: range | None = None) -> Roles:
    """So many training ranks on the first slots, the engines, and a critic on these slots."""
    roles = resolve(recipe(Path("none"), TrainLayout(train_gpus, 1, 1, 1)))
    critic_role = None
    if critic:
        layout = TrainLayout(len(critic), 1, 1, 1)
        critic_role = replace(roles.policy, name="critic", layout=layout, first_slot=critic.start)
    whole = with_placement(roles.recipe, gpus=gpus)
    return replace(roles, recipe=whole, engines=engines, critic=critic_role)


def with_placement(recipe: Recipe, **keys: object) -> Recipe:
    return recipe.model_copy(update={"placement": recipe.placement.model_copy(update=keys)})


def policy(*, budget: int, cp: int = 1) -> Role:
    role_recipe = recipe(
        Path("none"), TrainLayout(8, 1, 1, 1, cp=cp), tokens_per_micro_batch=budget
    )
    return resolve(role_recipe).policy


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
def test_every_slot_exists_and_is_used(
    gpus: int, train_gpus: int, first: int, faulty: list[str]
) -> None:
    errors = slot_errors(placed(gpus, train_gpus, EngineLayout(count=2, tp=2, ep=1, first=first)))
    assert [error.where for error in errors] == faulty


@pytest.mark.parametrize(
    ("gpus", "first", "most", "told"),
    [
        (6, 2, 4, []),
        (6, 2, 2, ["GPUs, of which training and engines use the first 4"]),
        (6, 2, 1, ["1 is less than rollout.engine.count (2)"]),
        (6, 2, 5, ["5 engines of 1 ranks end at GPU 7, there are 6"]),
        (4, 1, 3, ["share no GPU with other models, and GPU 1 has both"]),
        (2, 0, 2, ["share no GPU with other models, and GPU 0 has both"]),
    ],
)
def test_engines_that_may_come_later_have_gpus_of_their_own(
    gpus: int, first: int, most: int, told: list[str]
) -> None:
    roles = placed(gpus, 2, EngineLayout(count=2, tp=1, ep=1, first=first))
    rollout = roles.recipe.rollout
    engine = rollout.engine.model_copy(update={"count": 2, "max_count": most})
    rollout = rollout.model_copy(update={"engine": engine})
    roles = replace(roles, recipe=roles.recipe.model_copy(update={"rollout": rollout}))
    errors = [*most_engines_errors(roles)] or [*slot_errors(roles)]
    assert len(errors) == len(told)
    assert all(words in str(error) for words, error in zip(told, errors, strict=True))


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
def test_a_critic_has_its_place_behind_the_engines_or_among_them(
    gpus: int, critic: range, faulty: list[str]
) -> None:
    """Two slots train, the next four sample."""
    engines = EngineLayout(count=2, tp=2, ep=1, first=2)
    errors = slot_errors(placed(gpus, 2, engines, critic))
    assert [error.where for error in errors] == faulty


def test_a_model_that_cannot_be_read_is_not_told_that_it_cannot_draft() -> None:
    roles = placed(8, 8, EngineLayout(count=4, tp=2, ep=1, draft=2))
    assert roles.policy.model.known_shape is None
    assert not [error for error in layout_errors(roles, "cuda") if "draft" in error.where]


def test_the_engines_follow_the_training_ranks_without_a_diff() -> None:
    """Whoever else sits there: it has no part in the exchange."""
    engines = EngineLayout(count=1, tp=2, ep=1, first=4)
    (error,) = slot_errors(placed(6, 2, engines, range(2, 4)))
    assert error.where == "placement.first_engine_gpu"


def on_nodes(
    *, train: dict[str, Any] | None = None, first: int = 0, critic: int = 0, **engine: Any
) -> Recipe:
    """16 GPUs on nodes of 4, the critic's ranks from one of them on."""
    node_recipe = recipe(Path("none"), TrainLayout(16, 1, 1, 1), **(train or {}))
    tree: dict[str, Any] = node_recipe.model_dump(mode="json") | {"algorithm": {"name": "ppo"}}
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
def test_what_talks_at_every_layer_lies_inside_a_node_and_engines_fill_nodes(
    made: Recipe, faulty: list[str]
) -> None:
    errors = node_errors(resolve(made))
    assert [error.where for error in errors] == faulty


def test_one_machine_has_no_edges() -> None:
    alone = with_placement(on_nodes(train={"tp": 8}, tp=16), gpus_per_node=16)
    assert node_errors(resolve(alone)) == []


def test_an_engine_that_is_said_to_span_nodes_needs_their_network() -> None:
    spanning = on_nodes(tp=8)
    loopback = with_placement(spanning, network="loopback")
    assert [error.where for error in node_errors(resolve(loopback))] == ["placement.network"]
    assert (spanning.engine_nodes, loopback.engine_nodes, on_nodes(tp=4).engine_nodes) == (2, 1, 1)


def test_a_micro_batch_holds_the_longest_sequence_as_long_as_it_is_padded() -> None:
    assert budget_errors(policy(budget=105), 105, "a sequence") == []
    (error,) = budget_errors(policy(budget=105, cp=2), 105, "a sequence")
    assert str(error) == (
        "train.tokens_per_micro_batch: 105 is less than a sequence (108 tokens); set it to at least 108"
    )


@pytest.mark.parametrize(
    ("longest", "fits"), [(104, 26), (120, 30), (150, 38), (200, 50), (220, 224)]
)
def test_a_row_by_length_holds_the_longest_sequence(longest: int, fits: int) -> None:
    """The recipe's is of 104 tokens, over 4 ranks with 26 to 50 tokens each, 2 with 52 to 102, and 1 with more."""
    made = recipe(Path("none"), TrainLayout(8, 1, 1, 1), cp="auto", tokens_per_micro_batch=26)
    made = overlaid(
        made, {"data": {"max_prompt_tokens": 50}, "rollout": {"max_response_tokens": 54}}
    )
    errors = budget_errors(resolve(made).policy, longest, "a sequence")
    if longest <= 104:
        assert errors == []
        return
    (error,) = errors
    assert error.hint == f"set it to {fits}"
    mended = overlaid(made, {"train": {"tokens_per_micro_batch": fits}})
    assert budget_errors(resolve(mended).policy, longest, "a sequence") == []

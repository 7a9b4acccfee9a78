"""The roles of a recipe: whose checkpoint, which layout, which slots, and what is wrong with a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.model import hf_config
from megarl.placement.roles import Role, engine_layout, resolve, shared_slots
from megarl.placement.train_layout import TrainLayout
from megarl.types import UserError
from tests.model.test_hf_config import CONFIG, SHAPE
from tests.parallel.worlds import recipe


def made(path: Path, **branches: dict[str, Any]) -> Recipe:
    """A recipe on 8 GPUs in which some branches have other values."""
    tree = recipe(path, TrainLayout(8, 2, 1, 1), mtp_loss=0.1, replay="r2").model_dump(mode="json")
    return Recipe.model_validate(
        tree | {name: (tree[name] or {}) | keys for name, keys in branches.items()}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_every_role_is_resolved_from_one_reading_of_each_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    read_json = hf_config.read_json
    monkeypatch.setattr(hf_config, "read_json", lambda file: read.append(file) or read_json(file))
    judge = {"path": str(folder), "ranks": {"first_gpu": 4, "gpus": 2, "tp": 1}}
    keys = {"algorithm": {"name": "ppo"}, "critic": {"lr": 0.5}, "reward_model": judge}
    roles = resolve(made(folder, **keys, reference={"use": True, "path": str(folder)}))
    assert read == [folder / "config.json"] * 4
    assert list(roles.models) == ["policy", "critic", "reward_model"]
    assert [role.slots for role in roles.models.values()] == [range(8), range(8), range(4, 6)]
    assert [role.branch for role in roles.models.values()] == [
        "train",
        "critic.ranks",
        "reward_model.ranks",
    ]
    assert [role.shape.num_labels for role in roles.models.values()] == [0, 1, 1]
    assert roles.policy.shape == SHAPE and roles.reference and roles.reference.known_shape == SHAPE
    assert len(roles.shared_slots) == 8


@pytest.mark.parametrize(
    ("budget", "longest", "max_cp"), [(16, 16, 1), (16, 17, 2), (8, 32, 4), (7, 14, 4), (1, 8, 4)]
)
def test_rows_by_length_have_as_many_ranks_as_the_longest_sample_needs(
    folder: Path, budget: int, longest: int, max_cp: int
) -> None:
    """Each has two chunks of one length: of an odd budget a token is never used."""
    train = {"cp": "auto", "tokens_per_micro_batch": budget}
    prompts = {"max_prompt_tokens": longest - 1}
    layout = resolve(made(folder, train=train, data=prompts)).policy.layout
    assert (layout.cp, layout.dp, layout.max_cp) == (1, 4, max_cp)
    assert layout.tokens_align == (2 * max_cp if max_cp > 1 else 1)


def test_a_reward_model_splits_no_rows_by_length(folder: Path) -> None:
    """It is told, because the budget of one rank would cut chats."""
    keys: dict[str, dict[str, Any]] = {
        "train": {"cp": "auto"},
        "reward_model": {"path": str(folder)},
    }
    (error,) = resolve(made(folder, **keys)).models["reward_model"].layout_errors()
    assert error.where == "reward_model.ranks.cp"
    keys["reward_model"]["ranks"] = {"cp": 1}
    assert not resolve(made(folder, **keys)).models["reward_model"].layout_errors()


def test_auxiliary_ranks_read_their_own_values_in_the_policys_keys(folder: Path) -> None:
    ranks = {"gpus": 4, "tp": 4}
    critic = resolve(
        made(folder, algorithm={"name": "vapo"}, critic={"lr": 0.5, "ranks": ranks})
    ).critic
    assert critic and critic.layout == TrainLayout(4, 4, 1, 1)
    critic_recipe = critic.recipe
    assert (critic_recipe.train.lr, critic_recipe.train.mtp_loss, critic_recipe.train.replay) == (
        0.5,
        0.0,
        "off",
    )
    assert critic_recipe.model.path == str(folder) and critic_recipe.reference.path is None
    nodes = made(
        folder, algorithm={"name": "ppo"}, placement={"network": "nodes", "gpus_per_node": 4}
    )
    critic = resolve(nodes).critic
    assert critic and critic.recipe.placement.gpu_of(5) == 1, (
        "the critic's ranks are on the same nodes"
    )


def test_engines_with_attention_groups_hold_dense_layers_whole(folder: Path) -> None:
    """Unless the recipe says otherwise; shared experts where fp8 tiles would be cut, or DeepEP brings the tokens."""

    def flags(**keys: Any) -> list[bool]:
        layout = engine_layout(made(folder, rollout={"engine": {"tp": 4, "ep": 4, **keys}}))
        return [layout.whole_dense, layout.whole_shared, layout.group_head, layout.deepep]

    assert flags() == [False] * 4
    assert flags(dp=2) == [True, False, True, False]
    assert flags(dp=2, weights="fp8") == [True, True, True, False]
    assert flags(dp=2, dense="cut", head="engine", weights="fp8") == [False] * 4
    assert flags(dp=2, experts="deepep") == [True] * 4
    assert flags(dense="whole", head="group") == [True, False, True, False], (
        "which is refused: test_engine_layout.py"
    )


def test_prime_rewards_by_logits_and_sampling_alone_has_no_critic(folder: Path) -> None:
    prime = made(folder, algorithm={"name": "prime", "kl_coefficient": 0.1})
    critic = resolve(prime).critic
    assert critic and not critic.has_scores and critic.shape == SHAPE
    alone = resolve(prime, learns=False)
    assert alone.critic is None and alone.policy.recipe.algorithm.kl_coefficient == 0


def test_a_checkpoint_that_is_not_there_is_an_error_of_its_role_alone(tmp_path: Path) -> None:
    roles = resolve(made(tmp_path / "gone", algorithm={"name": "ppo"}))
    assert roles.policy.layout == TrainLayout(8, 2, 1, 1) and roles.policy.model.known_shape is None
    assert (
        isinstance(roles.policy.model.error, UserError)
        and roles.policy.model.error.problem == "no such file"
    )
    with pytest.raises(UserError, match="no such file"):
        _ = roles.policy.shape
    assert resolve(made(tmp_path, algorithm={"name": "grop"})).critic is None, (
        "that is told by its key"
    )


def test_a_model_that_cannot_be_built_still_has_a_shape(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": -1}))
    model = resolve(made(folder)).policy.model
    assert model.known_shape == SHAPE and model.facts is None
    assert model.error and model.error.problem == "max_position_embeddings is -1"


def test_errors_have_the_keys_of_their_role(folder: Path) -> None:
    def wheres(role: Role | None) -> list[str]:
        assert role
        return [f"{error.where}: {error.hint}" for error in role.layout_errors()]

    (line,) = wheres(resolve(made(folder, placement={"train_gpus": 7})).policy)
    assert line.startswith("placement.train_gpus: ")
    (line,) = wheres(
        resolve(made(folder, algorithm={"name": "ppo"}, critic={"ranks": {"gpus": 7}})).critic
    )
    assert line.startswith("critic.ranks.gpus: ") and "lower critic.ranks.tp" in line


@pytest.mark.parametrize(
    ("experts_per_token", "rank", "experts", "expected"),
    [
        (8, 16, None, 2),  # Kimi-K2: 16 / 8
        (2, 8, None, 4),  # the quickstart: 8 / 2
        (6, 16, None, 2),  # 2.67, rounded down
        (8, 4, None, 1),
        (8, 16, 16, 16),
        (8, 16, 0, 0),
    ],
)
def test_adapters_of_an_experts_share_are_as_large_as_others(
    folder: Path, experts_per_token: int, rank: int, experts: int | None, expected: int
) -> None:
    """The rank of other layers over the experts of a token, unless the recipe has it; alpha is over the own rank."""
    config = CONFIG | {"num_experts": 8, "num_experts_per_tok": experts_per_token}
    (folder / "config.json").write_text(json.dumps(config))
    lora = resolve(made(folder, lora={"rank": rank, "alpha": 32, "experts": experts})).policy.lora
    assert lora and (lora.rank, lora.expert_rank) == (rank, expected)
    assert lora.scale_of(False) == 32 / rank
    assert not expected or lora.scale_of(True) == 32 / expected


def test_without_experts_their_rank_is_that_of_all_layers(folder: Path) -> None:
    dense = {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 8}
    (folder / "config.json").write_text(json.dumps(CONFIG | dense))
    lora = resolve(made(folder, lora={"rank": 16})).policy.lora
    assert lora and lora.expert_rank == 16


@pytest.mark.parametrize(
    ("train_gpus", "first", "shared"),
    [(8, 0, range(4)), (4, 4, range(0)), (6, 4, range(4, 6)), (2, 0, range(2)), (4, 6, range(0))],
)
def test_memory_is_shared_where_both_sides_sit(train_gpus: int, first: int, shared: range) -> None:
    assert sorted(shared_slots([range(train_gpus), range(first, first + 4)])) == list(shared)


def test_any_two_of_several_sides_share() -> None:
    assert sorted(shared_slots([range(2), range(3, 5), range(1, 2), range(4, 6)])) == [1, 4]

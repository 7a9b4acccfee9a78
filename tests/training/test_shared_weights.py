"""Critic and reward model with the policy's frozen weights, beside adapters and heads of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import Recipe
from megarl.device import Address
from megarl.placement.roles import resolve
from megarl.placement.train_layout import TrainLayout
from megarl.preflight.model_checks import reward_model_errors
from megarl.training.calls import ScoreCall
from tests.parallel.adapters import digest, lora_recipe, set_b
from tests.parallel.checkpoints import write, write_rewarding_adapters
from tests.parallel.gradients import LR, VOCAB_SIZE, check_learning, recorded, uneven_part
from tests.parallel.test_scorers import conversations, scores_of
from tests.parallel.worlds import numbers, role_of, run_ranks

pytestmark = pytest.mark.slow

ONE_RANK = TrainLayout(1, 1, 1, 1)
LAYOUTS = {"tp2 pp2 ep2": TrainLayout(4, 2, 2, 2), "vpp2 dp2": TrainLayout(4, 1, 2, 1, vpp=2)}
STEPS = 3


def policy_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The weights that a policy's rank of this layout has in common with the critic: all but the heads."""
    from megarl.checkpoints.hf_import import load_hf
    from megarl.parallel.model import TRANSFORMER_ENGINE
    from megarl.resharding import megatron_map

    shards = megatron_map.shards(trainer.shape, trainer.layout, trainer.rank, TRANSFORMER_ENGINE)
    weights = {
        name: torch.empty_like(param)
        for name, param in trainer.params().items()
        if "output_layer" not in name
    }
    load_hf(
        trainer._recipe.model.path,
        [shard for shard in shards if shard.name != "score.weight"],
        weights,
    )
    return weights


def learn(rank: int, meet: Address, made: Any, folder: Path | None) -> dict[str, Any]:
    """Values from adapters that are not 0, steps that give the memory back between them, and values again.

    folder: a checkpoint is written there, or, if it has one, read before the last values.
    """
    from megarl.parallel.shared_weights import heads
    from megarl.resharding.memory_handles import share_params
    from megarl.training.auxiliary import AuxiliaryRank

    critic: Any = AuxiliaryRank(rank, role_of(made, "critic", has_scores=True), meet, "values")
    frozen = policy_weights(critic)
    critic.share(share_params(frozen))
    assert is_same_memory(critic, frozen)
    before = digest(frozen)
    set_b(critic)
    part = uneven_part(critic)
    metrics, (first,) = [], critic.values_of([part.micro_batches])
    with recorded(critic) as learning:
        for _ in range(STEPS):
            critic.offload()
            held = (critic.params() | critic.factors()).items()
            assert {
                name for name, param in held if param.untyped_storage().nbytes()
            } == frozen.keys()
            critic.onload()
            metrics.append(numbers(critic.train_step(part.micro_batches, first, part.norms, LR)))
    if folder and (folder / "metadata.json").exists():
        set_b(critic)
        for head in heads(critic._model._unwrapped):
            head.data.zero_()
        critic.load(folder)
    elif folder:
        critic.save(folder, number=1)
        critic.finish_save(number=2)
    assert digest(frozen) == before, "no step has changed the policy's weights"
    (last,) = critic.values_of([part.micro_batches])
    return {"first": first.values, "last": last.values, "metrics": metrics, "learning": learning}


@torch.no_grad()
def is_same_memory(critic: Any, frozen: dict[str, torch.Tensor]) -> bool:
    """Whether the critic sees what is written into every weight of the policy, and holds no other frozen ones."""
    kept = {name: param.clone() for name, param in frozen.items()}
    for param in frozen.values():
        param.fill_(7.0)
    seen = {name for name, param in critic.params().items() if bool((param == 7.0).all())}
    for name, param in frozen.items():
        param.copy_(kept[name])
    heads = {"output_layer.weight"} if critic._model.is_last_stage else set()
    return (
        seen == frozen.keys()
        and {name.rpartition("vpp1.")[2] for name in critic.params().keys() - seen} == heads
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("model"), "qwen3-moe", vocab_size=VOCAB_SIZE, pad_token_id=None
    )


def world(path: Path, layout: TrainLayout, folder: Path | None = None) -> list[dict[str, Any]]:
    return run_ranks(layout.world_size, learn, lora_recipe(path, layout, weight_decay=0.1), folder)


@pytest.fixture(scope="module")
def alone(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return world(path, ONE_RANK, folder)[0], folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_critic_learns_in_every_layout_what_one_rank_does(
    path: Path, alone: tuple[dict[str, Any], Path], name: str
) -> None:
    """Its head too; and what it has learnt is in a checkpoint, which another layout reads."""
    expected, folder = alone
    layout = LAYOUTS[name]
    # Megatron's optimizers do not change that
    ranks = world(path, layout, folder if layout.ep == 1 else None)
    for rank, result in enumerate(ranks):
        at = layout.coords(rank)
        is_last = at.pp == layout.pp - 1
        for when in ("first", "last"):
            values = expected[when][at.dp :: layout.dp] if is_last else ()
            assert (result[when] is None) == (not is_last)
            for value_T, expected_T in zip(result[when] or (), values, strict=True):
                np.testing.assert_allclose(value_T, expected_T, atol=1e-4)
        for metrics, reference in zip(result["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx({key: reference[key] for key in metrics}, rel=1e-4)
    # a head of zeros gives the adapters no gradient in the first step
    check_learning([rank["learning"] for rank in ranks], [expected["learning"]], least=0.0)


def score(rank: int, meet: Address, made: Any) -> Any:
    from megarl.resharding.memory_handles import share_params
    from megarl.training.reward_model import RewardModelRank

    reward_model: Any = RewardModelRank(rank, role_of(made, "reward_model", has_scores=True), meet)
    frozen = policy_weights(reward_model)
    reward_model.share(share_params(frozen))
    assert is_same_memory(reward_model, frozen)
    scores = reward_model.score(ScoreCall(conversations()))
    tensors = (reward_model.params() | reward_model.factors()).items()
    kept = [tensor for name, tensor in tensors if name not in frozen]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
    }
    assert sum(storages.values()) == sum(4 * tensor.numel() for tensor in kept), (
        "nothing else stays"
    )
    reward_model.offload()
    reward_model.onload()
    assert np.array_equal(
        np.concatenate(scores), np.concatenate(reward_model.score(ScoreCall(conversations())))
    )
    return scores


def test_a_reward_models_scores_are_those_of_peft(tiny_model: Path, tmp_path: Path) -> None:
    """Adapters of a rank and of targets of their own, and a head, as PEFT writes them of a classifier."""
    model = write_rewarding_adapters(tiny_model, tmp_path / "adapters")
    layout = TrainLayout(2, 2, 1, 2)
    settings = lora_recipe(tiny_model, layout).model_dump() | {
        "reward_model": {"adapters": str(tmp_path / "adapters")}
    }
    role = resolve(Recipe.model_validate(settings)).reward_model
    assert role and role.lora and (role.lora.rank, role.lora.targets) == (6, ("o_proj", "q_proj"))
    assert reward_model_errors(resolve(Recipe.model_validate(settings)), []) == []
    scores_by_group = run_ranks(layout.world_size, score, role.recipe)[0]
    for scores, expected in zip(scores_by_group, scores_of(model, tiny_model), strict=True):
        np.testing.assert_allclose(scores, expected, atol=1e-4)

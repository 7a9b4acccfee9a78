"""What a plan counts of adapters is what the ranks train; and what that takes of memory and seconds."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.model.hf_config import model_shape
from megarl.model.lora_pairs import LoraSize
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import reference_copy, resolve
from megarl.placement.train_layout import TrainLayout
from megarl.plan.adapter_sizes import adapter_parameters, adapter_slot_bytes, adapters_in_words
from megarl.plan.engine_memory import weight_bytes
from megarl.plan.model_size import ModelSize, sizes_of
from megarl.plan.optimizer_memory import GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES
from megarl.plan.run_plan import RunPlan, make_plan
from megarl.plan.step_time import policy_time
from megarl.types import UserErrors
from tests.parallel.adapters import lora_recipe
from tests.parallel.checkpoints import write
from tests.parallel.worlds import run_world
from tests.plan import plans
from tests.plan.test_step_time import MODEL

LAYOUTS = {
    "tp2 pp2 ep2": TrainLayout(4, 2, 2, 2),
    "vpp2": TrainLayout(2, 1, 2, 1, vpp=2),
    "ep2 etp2": TrainLayout(4, 1, 1, 2, expert_tp=2),
}


def held(trainer: Any) -> list[dict[str, int]]:
    """What this rank's chunks have, in the order of the stages' chunks."""
    from megarl.parallel.meta import size_of

    return [asdict(size_of(chunk.module, trainer.shape)) for chunk in trainer._model.chunks]


@pytest.mark.slow
def test_the_factors_are_those_that_ranks_train(tmp_path: Path) -> None:
    path = write(tmp_path, "deepseek-v3", vocab_size=200, pad_token_id=None)
    recipes = {name: lora_recipe(path, layout) for name, layout in LAYOUTS.items()}
    planned = sizes_of([resolve(recipe).models for recipe in recipes.values()], whole=False)
    for (name, layout), sizes in zip(LAYOUTS.items(), planned, strict=True):
        for rank, chunks in enumerate(run_world(recipes[name], held)):
            stage = sizes["policy"].stages[layout.coords(rank).pp]
            for key in ("dense", "expert", "frozen"):
                assert [chunk[key] for chunk in chunks] == [
                    asdict(chunk)[key] for chunk in stage
                ], (
                    name,
                    rank,
                    key,
                )


def test_a_trillion_parameters_have_ten_billion_of_rank_16(tmp_path: Path) -> None:
    """Computed apart: 384 experts of 60 layers have 16 x 3 x (7168 + 2048) each, and the rest has 0.1 of 10.2 B."""
    shape = model_shape(plans.recipe(tmp_path, "kimi-k2", 1).model.path)
    experts = 60 * 384 * 16 * 3 * (7168 + 2048)
    assert (
        adapter_parameters(shape, LoraSize(16, 16, 32.0, ("gate_proj", "up_proj", "down_proj")))
        > experts
    )
    whole = adapter_parameters(shape, LoraSize(16, 16, 32.0, ()))
    assert experts < whole < 1.02 * experts
    assert adapter_parameters(shape, LoraSize(16, 0, 32.0, ())) == whole - experts


def test_experts_share_the_rank_of_the_other_layers(tmp_path: Path) -> None:
    """Computed apart: each expert of 8 for a token has 16 / 8, and the same size in words."""
    recipe = with_lora(plans.recipe(tmp_path, "kimi-k2", 1), alpha=32)
    shape, lora = model_shape(recipe.model.path), resolve(recipe).policy.lora
    assert lora
    experts = 60 * 384 * 2 * 3 * (7168 + 2048)
    without = adapter_parameters(shape, replace(lora, expert_rank=0))
    assert adapter_parameters(shape, lora) - without == experts
    assert adapters_in_words(shape, lora) == (
        f"adapters of rank 16, 2 in each routed expert; alpha / rank is 2 and 16; {without + experts:,} parameters"
    )
    assert adapters_in_words(shape, replace(lora, expert_rank=0)) == (
        f"adapters of rank 16; alpha / rank is 2; {without:,} parameters"
    )


def test_sglang_makes_slots_for_all_experts_beside_any_mlp(tmp_path: Path) -> None:
    """Also where experts have no adapters; not where only the attention has."""
    shape, engine = (
        model_shape(plans.recipe(tmp_path, "kimi-k2", 1).model.path),
        EngineLayout(1, 64, 64, dp=64),
    )
    all_layers = LoraSize(16, 16, 32.0, (), sync="adapters")
    whole, without, attention = (
        adapter_slot_bytes(shape, engine, size, "bfloat16")[0]
        for size in (
            all_layers,
            replace(all_layers, expert_rank=0),
            replace(all_layers, targets=("o_proj",)),
        )
    )
    assert attention < whole / 5 and without == whole


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    engine = {"count": 8, "tp": 8, "ep": 8, "dp": 1}
    return plans.recipe(
        tmp_path_factory.mktemp("model"), "qwen3-30b", 64, pp=2, ep=8, tp=4, engine=engine
    )


def with_lora(recipe: Recipe, **keys: Any) -> Recipe:
    return Recipe.model_validate(recipe.model_dump() | {"lora": {"rank": 16, **keys}})


@pytest.fixture(scope="module")
def full(recipe: Recipe) -> RunPlan:
    return make_plan(recipe, plans.H800, in_full=False)


@pytest.fixture(scope="module")
def merged(recipe: Recipe) -> RunPlan:
    return make_plan(with_lora(recipe), plans.H800, in_full=False)


@pytest.mark.slow
def test_what_adapters_save(full: RunPlan, merged: RunPlan) -> None:
    size, parts = merged.sizes["policy"], merged.memory.device["train"]
    assert parts.weights_bytes > full.memory.device["train"].weights_bytes
    trained = max(size.trained(stage) for stage in range(2))
    assert (
        parts.grads_bytes == GRADIENT_BYTES * trained < full.memory.device["train"].grads_bytes / 20
    )
    state = max(size.optimizer_share(stage) for stage in range(2)) * (MASTER_BYTES + MOMENTS_BYTES)
    assert parts.optimizer_bytes == pytest.approx(state, rel=1e-6)
    frozen = merged.memory.host["frozen_weights"]
    assert 8 * parts.weights_bytes < frozen < 1.5 * 8 * parts.weights_bytes, (
        "from which the sums are made"
    )
    assert (
        merged.memory.host_bytes - frozen < full.memory.host_bytes / 2
        and "frozen_weights" not in full.memory.host
    )
    times, others = merged.learning["policy"], full.learning["policy"]
    assert 0.66 < times.updates_s / others.updates_s < 0.9, (
        "two of three products, and the same exchanges"
    )
    assert times.gradients_s > 0
    assert (
        times.optimizer_s < others.optimizer_s / 20 and times.gradients_s < others.gradients_s / 20
    )
    assert merged.reshard == full.reshard, "the merged weights travel"


@pytest.mark.slow
def test_what_adapters_on_their_own_save_and_take(recipe: Recipe, merged: RunPlan) -> None:
    """SGLang's two slots in every phase, its weights on the host meanwhile, and a thousandth of the bytes in a step."""
    alone = make_plan(with_lora(recipe, sync="adapters"), plans.H800, in_full=False)
    shape, engine = alone.sizes["policy"].shape, alone.engine
    slots = adapter_slot_bytes(shape, engine, alone.sizes["policy"].lora, "bfloat16")
    for phase in ("train", "reshard"):
        added = alone.memory.device[phase].other_bytes - merged.memory.device[phase].other_bytes
        assert added == slots[0] == max(slots)
    # Of TP 8 a GPU has an eighth of the factors that are cut, and its own experts' whole.
    whole = 2 * 2 * adapter_parameters(shape, LoraSize(16, 16, 32.0, ()))
    assert whole / 8 < slots[0] < whole / 6
    weights = weight_bytes(shape, engine, "bfloat16")[0]
    assert "frozen_weights" not in alone.memory.host
    assert (
        alone.memory.host["engine_weights"] == 8 * weights
        and "engine_weights" not in merged.memory.host
    )
    assert alone.reshard.dest_bytes.max < merged.reshard.dest_bytes.max / 20
    assert alone.reshard.expected_s < merged.reshard.expected_s / 5
    assert adapter_slot_bytes(shape, engine, merged.sizes["policy"].lora, "bfloat16") == [0] * 8


def test_the_reference_is_the_policy_without_adapters(recipe: Recipe) -> None:
    full = overlaid(recipe, {"reference": {"use": True}})
    kinds = full, with_lora(full), with_lora(full, sync="adapters")
    assert [bool(reference_copy(kind)) for kind in kinds] == [True, False, False]
    swapped, merged, alone = (policy_time(kind, MODEL).reference_s for kind in kinds)
    assert 0 < alone < swapped == merged, "merged weights make place too"


def test_what_adapters_refuse_is_refused_by_the_plan(recipe: Recipe) -> None:
    offloaded = overlaid(recipe, {"train": {"optimizer_offload": True}})
    with pytest.raises(UserErrors, match="train.optimizer_offload: True, but not tried with lora"):
        make_plan(with_lora(offloaded), plans.H800)


def test_only_the_policy_has_adapters(recipe: Recipe) -> None:
    with_critic = overlaid(recipe, {"algorithm": {"name": "vapo"}})
    models = resolve(with_lora(with_critic)).models
    assert {name: role.lora is not None for name, role in models.items()} == {
        "policy": True,
        "critic": False,
    }
    assert ModelSize.of(models["critic"], ()).adapter_parameters == 0


@pytest.mark.slow
def test_a_critic_that_shares_the_weights_costs_its_adapters_and_head(recipe: Recipe) -> None:
    """Beside the policy, whose weights stay on the GPU; a critic of its own learns and moves all of its weights."""
    content = recipe.model_dump() | {
        "algorithm": {"name": "ppo"},
        "lora": {"rank": 16, "sync": "adapters"},
    }
    whole, shared = (
        make_plan(
            Recipe.model_validate(content | {"critic": {"shares_weights": shares}}),
            plans.H800,
            in_full=False,
        )
        for shares in (False, True)
    )
    size, policy = shared.sizes["critic"], shared.sizes["policy"]
    head = size.shape.hidden_size
    assert [size.trained(stage) for stage in range(2)] == [
        policy.trained(0),
        policy.trained(1) + head,
    ]
    parts = shared.memory.device["critic"]
    assert parts.weights_bytes < whole.memory.device["critic"].weights_bytes * 0.6
    assert parts.optimizer_bytes < whole.memory.device["critic"].optimizer_bytes / 20
    assert shared.memory.host["offloaded_weights"] < whole.memory.host["offloaded_weights"] / 20
    assert shared.learning["critic"].total_s < whole.learning["critic"].total_s

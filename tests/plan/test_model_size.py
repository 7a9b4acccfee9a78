from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl import device
from megarl.config import Recipe
from megarl.model.hf_config import model_shape
from megarl.model.shape import ModelShape
from megarl.model.tensors import hf_tensors
from megarl.placement.roles import resolve, train_layout
from megarl.placement.train_layout import TrainLayout
from megarl.plan.model_size import ModelSize, model_sizes, sizes_of
from megarl.resharding import megatron_map
from megarl.types import UserError
from tests.parallel import worlds
from tests.parallel.worlds import role_of
from tests.plan import plans
from tests.plan import recipes as planning

pytestmark = pytest.mark.slow

# Totals of the published checkpoints' model.safetensors.index.json (total_size / 2 bytes; Qwen's model cards: 30.5 B,
# 235 B), DeepSeek-V3's as of its report, arXiv 2412.19437: "671B total parameters with 37B activated", without the MTP
# module. Active parameters are given by the cards with two digits; of Kimi-K2 (32 B) without one of the tables.
PUBLISHED = {
    "qwen3-30b": (30_532_122_624, 3.3e9),
    "qwen3-235b": (235_093_634_560, 22e9),
    "deepseek-v3": (671e9, 37e9),
    "kimi-k2": (1026.4e9, 32.9e9),
    # Hugging Face's count, 685B, has the MTP module and its copies of embedding and head: 13.5e9
    "deepseek-v3.2": (672e9, 38e9),
    # the model card of zai-org/GLM-5: 744B, 40B of them active
    "glm-5": (744e9, None),
    # docs.nvidia.com, NeMo AutoModel's page of Moonlight: 16B total
    "moonlight-16b-a3b": (16e9, None),
    # Hugging Face's count of files in bfloat16, vpyn/MiniMax-M2.5-M2.7-M2.X-CARVE-CDRAGON-BF16: 229B params
    "minimax-m2": (229e9, None),
    # the model card of tencent/Hy3-preview: 295B, and 3.8B of the MTP layer, which is left out
    "hy-v3": (295e9, None),
    # Hugging Face's count, nm-testing/Mixtral-8x7B-Instruct-v0.1-FP8-quantized: 46.7B; arXiv 2401.04088: 13B active
    "mixtral-8x7b": (46.7e9, 13e9),
    # their names, and the model card of Qwen3.6-35B-A3B
    "qwen3.5-35b-a3b": (35e9, None),
    "qwen3.5-397b-a17b": (397e9, None),
    # its model card: 14.3B in total, 2.7B activated
    "qwen1.5-moe-a2.7b": (14.3e9, 2.7e9),
}
ROUNDED_TO = {  # the unit of a total that is published with few digits
    "deepseek-v3.2": 1e9,
    "glm-5": 1e9,
    "moonlight-16b-a3b": 1e9,
    "minimax-m2": 1e9,
    "hy-v3": 1e9,
    "mixtral-8x7b": 1e8,
    "qwen3.5-35b-a3b": 1e9,
    "qwen3.5-397b-a17b": 1e9,
    "qwen1.5-moe-a2.7b": 1e8,
}
# Of vision towers, which published totals count: transformers' Qwen3_5MoeVisionModel with its defaults, and the
# language model's width as out_hidden_size (so NVIDIA's example of Qwen3.5-397B-A17B for Megatron-LM).
TOWERS = {"qwen3.5-35b-a3b": 446_571_248, "qwen3.5-397b-a17b": 456_010_480}
# Megatron builds these by night, of many thousand modules each. By day tests/model/test_families.py loads a small one
# of each family through the map of its tensors, which are counted here.
BY_NIGHT = {"qwen3-235b", "qwen3.5-397b-a17b", "minimax-m2", "hy-v3"}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {  # model, GPUs, axes
    "pp": ("tiny", 4, {"pp": 4, "mtp_loss": 0.1}),
    "all": ("tiny", 16, {"tp": 2, "pp": 2, "ep": 4, "cp": 2, "mtp_loss": 0.1}),
    "frozen": ("tiny", 4, {"tp": 2, "pp": 2, "ep": 2}),
    "vpp": ("tiny", 4, {"pp": 2, "vpp": 2, "ep": 2}),
    "uneven": ("tiny", 4, {"pp": 2, "ep": 2, "layers_per_stage": [3, 1]}),
    "etp": ("tiny", 4, {"tp": 2, "ep": 1}),
    "tied": ("tiny-tied", 4, {"tp": 2, "pp": 2}),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSize]:
    """Everything that these tests look at, from one start of the program."""
    folder = tmp_path_factory.mktemp("models")
    recipes = {name: plans.recipe(folder, name, 1) for name in PUBLISHED if name not in BY_NIGHT}
    stages = {"pp": 16, "ep": 32, "layers_per_stage": [3, *[4] * 14, 2]}
    recipes |= {
        name: plans.recipe(folder, name, 512, **stages)
        for name in ("deepseek-v3", "deepseek-v3.2", "kimi-k2")
    }
    stages |= {"layers_per_stage": [3, *[5] * 15]}
    recipes["glm-5"] = plans.recipe(folder, "glm-5", 512, **stages)
    recipes |= {
        name: plans.recipe(folder, model, gpus, **train)
        for name, (model, gpus, train) in LAYOUTS.items()
    }
    all_sizes = sizes_of([resolve(recipe).models for recipe in recipes.values()], whole=True)
    return {name: sizes["policy"] for name, sizes in zip(recipes, all_sizes, strict=True)}


def check_published(name: str, parameters: int) -> None:
    published, _ = PUBLISHED[name]
    unit = ROUNDED_TO.get(name)
    if unit:
        assert abs(parameters + TOWERS.get(name, 0) - published) <= unit / 2
    else:
        assert parameters == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tensors_of_whole_models_are_as_large_as_published(name: str, tmp_path: Path) -> None:
    shape = model_shape(plans.recipe(tmp_path, name, 1).model.path)
    sizes = hf_tensors(replace(shape, num_mtp_layers=0))
    check_published(name, sum(map(math.prod, sizes.values())))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in BY_NIGHT)) for name in PUBLISHED],
)
def test_whole_models_have_as_many_parameters_as_published(
    built: dict[str, ModelSize], name: str, tmp_path: Path
) -> None:
    _, active = PUBLISHED[name]
    size = built.get(name) or model_sizes(plans.recipe(tmp_path, name, 1))["policy"]
    check_published(name, size.parameters)
    shape = size.shape
    expert = 3 * shape.hidden_size * shape.moe_ffn_size
    assert size.routed == shape.num_sparse_layers * shape.num_experts * expert
    if active:
        assert size.active_parameters == pytest.approx(active, rel=0.02)


def test_prediction_ahead_is_counted_apart(built: dict[str, ModelSize]) -> None:
    """DeepSeek-V3's module is 14 B with its copies of embedding and head, which are the main model's."""
    size = built["deepseek-v3"]
    assert size.mtp_parameters + 2 * 129280 * 7168 == pytest.approx(14e9, rel=0.05)
    (last,) = size.stages[-1]
    assert last.frozen == size.mtp_parameters - (256 - 8) * 3 * 7168 * 2048  # at EP 32


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_together_hold_what_the_weight_map_says(
    built: dict[str, ModelSize], name: str
) -> None:
    size, layout = built[name], built[name].layout
    ranks = range(layout.world_size)
    held = sum(
        chunk.elements - chunk.padding
        for rank in ranks
        for chunk in size.stages[layout.coords(rank).pp]
    )
    mapped = [shard for rank in ranks for shard in megatron_map.shards(size.shape, layout, rank)]
    assert held == sum(
        shard.area for shard in mapped if not shard.name.endswith("e_score_correction_bias")
    )


@pytest.mark.parametrize(("dtype", "name"), [("float32", "adamw"), ("bfloat16", "muon")])
def test_real_ranks_hold_as_much(tmp_path: Path, dtype: str, name: str) -> None:
    """Weights, gradients, and the optimizer's state: shared out over ranks that hold the same, to the element."""
    recipe = plans.recipe(tmp_path, "tiny", 4, tp=2, pp=2, ep=2, dtype=dtype, optimizer_name=name)
    size = model_sizes(recipe)["policy"]
    ranks = worlds.run_ranks(4, _hold, recipe)
    masters = 4 if dtype == "bfloat16" else 0
    stepped = of_matrices = 0.0
    for rank, (elements, grads_bytes, _) in enumerate(ranks):
        (chunk,) = size.stages[size.layout.coords(rank).pp]
        assert elements == chunk.elements
        assert grads_bytes == 4 * chunk.trained
        stepped += chunk.dense / size.layout.dp + chunk.expert / size.layout.edp
        of_matrices += size.muon(size.layout.coords(rank).pp).elements
    assert (
        sum(state_bytes for *_, state_bytes in ranks) == (8 + masters) * stepped - 4 * of_matrices
    )
    assert (of_matrices > stepped / 3) == (name == "muon")


def _hold(rank: int, meet: device.Address, recipe: Recipe) -> tuple[int, int, int]:
    """(elements of the weights, bytes of their gradients, of the optimizer's state) of a rank as training builds it."""
    from megarl.parallel import dist_checkpoint
    from megarl.parallel.rank_model import RankModel
    from megarl.training.matrix_parts import matrix_parts

    store = device.join_store(meet, 60.0)
    role = role_of(recipe)
    parts = matrix_parts(role.shape, role.layout, rank, transformer_engine=False)
    held = RankModel(rank, role, store, tp_split_params=(), matrix_parts=parts)
    held.make_optimizer()
    dist_checkpoint.start_states(held.optimizer)
    params = [param for chunk in held.chunks for param in chunk.parameters()]
    in_model = {param.untyped_storage().data_ptr() for param in params}
    shards = [shard for group in held.optimizer.param_groups for shard in group["params"]]
    masters = [shard for shard in shards if shard.untyped_storage().data_ptr() not in in_model]
    states = [
        state
        for optimizer in held.optimizer.chained_optimizers
        for state in optimizer.optimizer.state.values()
    ]
    kinds = ("exp_avg", "exp_avg_sq", "momentum")
    moments = [state[name] for state in states for name in kinds if name in state]
    grads = sum(param.main_grad.nbytes for param in params if param.requires_grad)
    return (
        sum(param.numel() for param in params),
        grads,
        sum(tensor.nbytes for tensor in [*masters, *moments]),
    )


def test_scorers_have_one_row_in_place_of_the_vocabulary(tmp_path: Path) -> None:
    recipe = plans.recipe(
        tmp_path, "tiny", 2, ep=2, algorithm={"name": "ppo"},
        reward_model={"path": str(tmp_path / "tiny"), "ranks": {"first_gpu": 1, "gpus": 1, "ep": 1}},
    )  # fmt: skip
    sizes = model_sizes(recipe)
    policy, critic = sizes["policy"], sizes["critic"]
    assert critic.parameters == policy.parameters - (300 - 1) * 64
    assert [size.trains for size in sizes.values()] == [True, True, False]
    assert list(sizes["reward_model"].slots) == [1]
    assert train_layout(critic.recipe) == critic.layout == policy.layout
    assert critic.mtp_parameters == 0


def test_what_megatron_cannot_build_is_the_users_fault(tmp_path: Path) -> None:
    recipe = plans.recipe(tmp_path, "tiny", 1)
    file = tmp_path / "tiny" / "config.json"
    file.write_text(json.dumps(plans.CONFIGS["tiny"] | {"hidden_act": "gelu"}), encoding="utf-8")
    with pytest.raises(UserError, match="hidden_act"):
        model_sizes(recipe)


def test_stages_are_runs_of_slots_with_their_layers(tmp_path: Path) -> None:
    layout = TrainLayout(8, 2, 2, 2, vpp=2)
    size = plans.size(
        "policy", ModelShape(8, 64, 4, 4, 16, 300), planning.small(tmp_path), layout, 8, ()
    )
    assert size.stage_slots() == [range(8, 12), range(12, 16)]
    assert [size.layers(stage) for stage in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]

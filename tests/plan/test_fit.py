from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Recipe, TrainConfig
from megarl.config.hardware import Hardware
from megarl.config.loading import load_recipe, overlaid
from megarl.model.hf_config import model_shape
from megarl.model.precision import FP8_TILES
from megarl.model.shape import IndexerShape
from megarl.parallel.chunk_sizes import ChunkSize
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import RoleName, resolve, train_layout
from megarl.placement.train_layout import TrainLayout
from megarl.plan.activations import (
    activation_bytes,
    in_flight,
    kept_and_recomputed,
    logits_bytes,
    row_of,
)
from megarl.plan.engine_memory import (
    Settings,
    running_bytes,
    settings_of,
    token_bytes,
    weight_bytes,
)
from megarl.plan.fit import are_valid, cache_advice
from megarl.plan.model_size import ModelSize, model_sizes
from megarl.plan.optimizer_memory import state_bytes
from megarl.plan.phase_memory import CONTEXT_BYTES, PINNED_SHARE, communicators
from tests.plan import plans

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
QWEN3 = model_shape(plans.ROOT / "recipes" / "models" / "qwen3-30b-a3b")
CHUNK = ChunkSize(
    dense=400_000_000, expert=3_600_000_000, frozen=1_000_000, buffer_bytes=1000, padding=0
)


def sizes_of(
    recipe: Recipe, chunk: ChunkSize = CHUNK, **roles: ModelSize
) -> dict[RoleName, ModelSize]:
    """As if every rank held one such chunk for each virtual stage."""
    layout = train_layout(recipe)
    stages = ((chunk,) * layout.vpp,) * layout.pp
    policy = plans.size("policy", model_shape(recipe.model.path), recipe, layout, 0, stages)
    return {"policy": policy, **roles}  # type: ignore[dict-item]


def beside(recipe: Recipe, role: RoleName, first: int, gpus: int) -> ModelSize:
    layout = TrainLayout(gpus, 1, 1, gpus)
    shape = replace(model_shape(recipe.model.path), num_labels=1)
    return plans.size(role, shape, recipe, layout, first, ((CHUNK,),))


@pytest.fixture
def made(tmp_path: Path) -> Recipe:
    """Qwen3-30B on 8 shared GPUs, all recomputed."""
    engine = {"count": 2, "tp": 4, "ep": 4, "sglang": {"mem_fraction_static": 0.8}}
    return plans.recipe(tmp_path, "qwen3-30b", 8, tp=4, ep=8, megatron=FULL, engine=engine)


def test_who_computes_has_the_memory_and_the_others_their_least(made: Recipe) -> None:
    size = sizes_of(made)["policy"]
    plan = plans.count(made, plans.H800, {"policy": size})
    assert list(plan.device) == ["rollout", "train", "reshard"]
    weights = 4_001_000_000 * 2 + 1000
    train, rollout, reshard = (plan.device[phase] for phase in ("train", "rollout", "reshard"))
    assert (train.weights_bytes, rollout.weights_bytes, reshard.weights_bytes) == (weights,) * 3
    assert (train.grads_bytes, rollout.grads_bytes, reshard.grads_bytes) == (16_000_000_000, 0, 0)
    # DP 2, one replica of each expert
    assert train.optimizer_bytes == 12 * (400_000_000 // 2 + 3_600_000_000)
    assert rollout.optimizer_bytes == reshard.optimizer_bytes == 0
    assert train.engine_weights_bytes == train.kv_cache_bytes == reshard.kv_cache_bytes == 0
    assert (
        reshard.engine_weights_bytes
        == rollout.engine_weights_bytes
        == plan.device["rollout"].engine_weights_bytes
    )
    assert reshard.reshard_bytes == 2 * made.reshard.round_bytes
    assert plan.host["offloaded_optimizer"] == pytest.approx(
        PINNED_SHARE * 8 * train.optimizer_bytes
    )
    assert plan.slot_bytes["train"] == [train.total_bytes] * 8


def test_an_optimizer_on_the_host_leaves_nothing_on_the_gpu(made: Recipe) -> None:
    offloading = overlaid(made, {"train": {"optimizer_offload": True}})
    plan = plans.count(offloading, plans.H800, sizes_of(offloading))
    assert [parts.optimizer_bytes for parts in plan.device.values()] == [0] * 3
    share = 400_000_000 // 2 + 3_600_000_000
    gradients, masters, moments = PINNED_SHARE * 4, 4, 8
    assert plan.host["optimizer"] == pytest.approx(8 * share * (gradients + masters + moments))
    assert "offloaded_optimizer" not in plan.host


@pytest.mark.parametrize(
    ("options", "in_bfloat16", "in_float32"),
    [
        ({}, 12, 8),
        # Megatron refuses it without the precision-aware optimizer
        ({"exp_avg_dtype": "bfloat16"}, 12, 8),
        ({"use_precision_aware_optimizer": True}, 10, 12),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False}, 12, 12),
        (
            {
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": "bfloat16",
                "exp_avg_sq_dtype": "bfloat16",
            },
            6,
            8,
        ),
    ],
)
def test_the_optimizers_state_by_hand(
    options: dict[str, Any], in_bfloat16: int, in_float32: int
) -> None:
    """Bytes of a weight: TransformerEngine's FusedAdam keeps a bfloat16 weight's lower half, or a master of its own."""
    train = TrainConfig(lr=1.0, optimizer=options)
    assert (state_bytes(train, 2), state_bytes(train, 4)) == (in_bfloat16, in_float32)


def test_nobody_lends_a_gpu_of_its_own(tmp_path: Path) -> None:
    recipe = plans.recipe(
        tmp_path, "qwen3-30b", 12, ep=8, megatron=FULL, engine={"count": 1, "tp": 4, "ep": 4},
        placement={"train_gpus": 8, "first_engine_gpu": 8},
    )  # fmt: skip
    plan = plans.count(recipe, plans.H800, sizes_of(recipe))
    assert plan.fullest_slot["train"] < 8
    assert plan.device["train"].engine_weights_bytes == 0
    train, rollout, reshard = (plan.slot_bytes[phase] for phase in ("train", "rollout", "reshard"))
    assert train[8] == reshard[8] - plan.device["reshard"].reshard_bytes
    state = 4 * 4_000_000_000 + 12 * (400_000_000 // 8 + 3_600_000_000)
    assert train[0] > rollout[0] > state  # gradients and optimizer stay where they are
    assert "offloaded_optimizer" not in plan.host


def test_a_critic_and_a_reward_model_have_phases_of_their_own(made: Recipe) -> None:
    sizes = sizes_of(
        made, critic=beside(made, "critic", 0, 8), reward_model=beside(made, "reward_model", 4, 4)
    )  # fmt: skip
    plan = plans.count(made, plans.H800, sizes)
    assert list(plan.device) == ["rollout", "score", "critic", "train", "reshard"]
    weights = plan.device["train"].weights_bytes
    # the policy's, which engines map, and its own
    assert plan.device["critic"].weights_bytes == 2 * weights
    assert plan.device["score"].weights_bytes == 2 * weights
    assert plan.fullest_slot["score"] >= 4
    assert plan.device["score"].grads_bytes == plan.device["score"].optimizer_bytes == 0
    assert plan.device["rollout"].weights_bytes == weights
    assert plan.host["offloaded_weights"] == pytest.approx(12 * PINNED_SHARE * weights)


SHARE = CHUNK.dense // 2 + CHUNK.expert  # of the optimizer at DP 2, with one replica of each expert


@pytest.mark.parametrize(
    ("overrides", "copied"),
    [
        # of each element the weight, its float32 master and two moments
        ({}, 8 * SHARE * (2 + 12)),
        ({"checkpoint": {"asynchronous": False}}, 0),
        # the state is on the host, where it is read in place
        ({"train": {"optimizer_offload": True}}, 8 * SHARE * 2),
    ],
)
def test_a_checkpoint_takes_two_boxes_of_a_host_and_copies_of_what_changes_meanwhile(
    made: Recipe, overrides: dict[str, Any], copied: int
) -> None:
    saving = overlaid(overlaid(made, {"checkpoint": {"every": 5}}), overrides)
    plan = plans.count(saving, plans.H800, sizes_of(saving))
    assert list(plan.device) == ["rollout", "train", "reshard"], "GPUs hold nothing for it"
    assert plan.host["checkpoint"] == 8 * 2 * 128 * 2**20 + copied


def test_checkpoints_of_a_critic_take_their_turn_unless_they_are_asynchronous(made: Recipe) -> None:
    saving = overlaid(made, {"checkpoint": {"every": 5}})
    sizes = sizes_of(saving, critic=beside(made, "critic", 0, 8))
    both = plans.count(saving, plans.H800, sizes).host["checkpoint"]
    alone = plans.count(saving, plans.H800, sizes_of(saving)).host["checkpoint"]
    critic_share = CHUNK.dense // 8 + CHUNK.expert
    assert both - alone == 8 * (2 * 128 * 2**20 + critic_share * (2 + 12))
    in_turn = overlaid(saving, {"checkpoint": {"asynchronous": False}})
    assert plans.count(in_turn, plans.H800, sizes).host["checkpoint"] == 8 * 2 * 128 * 2**20


def test_copies_of_the_state_are_there_twice_and_on_two_nodes(made: Recipe, tmp_path: Path) -> None:
    """Weights of the rank, 12 bytes of its share of master weights and moments; for 16 GPUs DP 4, experts in two."""
    copying = overlaid(made, {"checkpoint": {"memory_copies": True}})
    plan = plans.count(copying, plans.H800, sizes_of(copying))
    state = 2 * CHUNK.trained + 12 * (CHUNK.dense // 2 + CHUNK.expert)
    assert plan.host["memory_copies"] == 8 * 2 * state
    wider = plans.recipe(
        tmp_path, "qwen3-30b", 16, tp=4, ep=8, checkpoint={"memory_copies": True},
        engine={"count": 4, "tp": 4},
    )  # fmt: skip
    two_nodes = plans.count(wider, plans.H800, sizes_of(wider))
    state = 2 * CHUNK.trained + 12 * (CHUNK.dense // 4 + CHUNK.expert // 2)
    assert two_nodes.host["memory_copies"] == 8 * 2 * 2 * state
    off = overlaid(copying, {"run": {"restarts": 0}})
    assert "memory_copies" not in plans.count(off, plans.H800, sizes_of(off)).host


def test_a_reference_waits_on_the_host(made: Recipe) -> None:
    with_one = overlaid(made, {"reference": {"use": True}})
    plan = plans.count(with_one, plans.H800, sizes_of(with_one))
    assert plan.host["reference"] == pytest.approx(
        PINNED_SHARE * 8 * plan.device["train"].weights_bytes
    )


def test_tokens_in_the_cache_by_hand() -> None:
    """DeepSeek-V3: 61 x (512 + 64) x 2 bytes = 70,272 on every rank; Qwen3-30B at TP 4: 2 x 48 x 1 x 128 x 2."""
    assert token_bytes(plans.V3, EngineLayout(1, 16, 16), 2) == 70_272
    assert token_bytes(QWEN3, EngineLayout(1, 4, 4), 2) == 24_576
    # and of each layer 128 numbers of the indexer's key in fp8, and a scale; in fp8 4 scales and 64 numbers in 16 bits
    sparse = replace(plans.V3, indexer=IndexerShape(64, 128, 2048, interleaved_rope=False))
    assert token_bytes(sparse, EngineLayout(1, 16, 16), 2) == 61 * (2 * 576 + 132)
    assert token_bytes(sparse, EngineLayout(1, 16, 16), 1) == 61 * (656 + 132)
    # fewer heads than ranks: each is held twice
    assert token_bytes(QWEN3, EngineLayout(1, 8, 8), 2) == 24_576
    assert token_bytes(QWEN3, EngineLayout(1, 4, 4, dp=4), 1) == 49_152


def test_the_cache_is_what_the_weights_leave(made: Recipe) -> None:
    plan = plans.count(made, plans.H800, sizes_of(made))
    rollout = plan.device["rollout"]
    graphs = 512 * 2 * 2**20
    standing = (
        2 * CONTEXT_BYTES + (communicators(train_layout(made)) + 2) * plans.H800.communicator_bytes
    )
    free = plans.H800.memory_bytes - rollout.weights_bytes - standing
    budget = 0.8 * free - rollout.engine_weights_bytes
    assert budget - 24_576 < rollout.kv_cache_bytes <= budget
    assert rollout.other_bytes == standing + graphs
    assert plan.kv.tokens == rollout.kv_cache_bytes // 24_576
    assert plan.kv.concurrency_longest == plan.kv.tokens // 10_240
    assert plan.kv.concurrency_mean == plan.kv.tokens // plan.kv.running_tokens


def test_sglangs_own_limits_count(made: Recipe, tmp_path: Path) -> None:
    def with_engine(**sglang: Any) -> Recipe:
        return plans.recipe(
            tmp_path, "qwen3-30b", 8, ep=8, engine={"count": 2, "tp": 4, "ep": 4, "sglang": sglang}
        )

    plan = plans.count(with_engine(max_total_tokens=50_000), plans.H800, sizes_of(made))
    assert plan.kv.tokens == 50_000
    halved = plans.count(with_engine(kv_cache_dtype="fp8_e4m3"), plans.H800, sizes_of(made))
    assert halved.kv.token_bytes == 12_288
    assert 0.8 < settings_of(with_engine(), plans.H800).mem_fraction_static < 0.9
    assert settings_of(with_engine(cuda_graph_max_bs_decode=64), plans.H800).graph_sequences == 64
    assert settings_of(with_engine(disable_cuda_graph=True), plans.H800).graph_sequences == 0


@pytest.mark.parametrize(
    ("sglang", "are_on"),
    [
        ({}, False),
        ({"cuda_graph_backend_prefill": "breakable"}, True),
        ({"cuda_graph_backend_prefill": "disabled"}, False),
        ({"disable_prefill_cuda_graph": False}, True),
        ({"disable_prefill_cuda_graph": False, "disable_cuda_graph": True}, False),
        ({"cuda_graph_backend_prefill": "breakable", "disable_cuda_graph": True}, True),
    ],
    ids=str,
)
def test_graphs_of_prompts_count_where_a_recipe_turns_them_on(
    tmp_path: Path, sglang: dict[str, Any], are_on: bool
) -> None:
    engine = {"count": 2, "tp": 4, "ep": 4, "sglang": {"mem_fraction_static": 0.8, **sglang}}
    recipe = plans.recipe(tmp_path, "qwen3-30b", 8, ep=8, engine=engine)
    assert settings_of(recipe, plans.H800).prefill_graphs_mib == are_on * 1536


def test_engine_weights_are_the_models_and_fp8_halves_them() -> None:
    """671 B in bfloat16 over 32 ranks, each with all down projections and routers, and what is made of kv_b_proj."""
    bf16 = weight_bytes(plans.V3, EngineLayout(1, 32, 32), "bfloat16")
    derived = 61 * 4 * (128 + 128) * 512 * 2
    on_every_rank = 61 * (1536 + 512 + 64) * 7168 + 58 * 256 * 7168
    assert sum(bf16) - 32 * derived == pytest.approx(2 * (671.026e9 + 31 * on_every_rank), rel=1e-4)
    fp8 = weight_bytes(plans.V3, EngineLayout(1, 16, 16, precision=FP8_TILES), "bfloat16")
    assert sum(fp8) == pytest.approx(sum(bf16) / 2, rel=0.03)


def test_logits_of_drafts_are_verified_by_each_group() -> None:
    """Of 1,024 sequences on 16 groups: 64 a group, each with the logits of its token and of two drafts."""
    chosen = Settings(0.8, 8192, 64, None, 2)
    for group_head, rows in ((True, 64), (False, 1024)):
        engine = EngineLayout(1, 16, 16, dp=16, whole_dense=True, group_head=group_head)
        (activations, plain), (same, drafted) = (
            running_bytes(plans.V3, replace(engine, draft=draft), chosen, 1024) for draft in (0, 2)
        )
        assert same == activations
        assert plain == rows * 129_280 * 6
        assert drafted == 3 * (plain + 64 * 129_280 * 12)


@pytest.mark.parametrize("stage", range(4))
def test_1f1b_has_fewer_in_flight_on_later_stages(stage: int) -> None:
    layout = TrainLayout(4, 1, 4, 1)
    assert in_flight(layout, stage, plans.MANY) == [4 - stage]
    assert in_flight(layout, stage, 2) == [min(2, 4 - stage)]


def test_a_pass_beside_anothers_pass_back_keeps_one_micro_batch_more() -> None:
    """Megatron's combined 1F1B; never more than an update has."""
    layout = TrainLayout(8, 1, 2, 4, vpp=2)
    plain, ahead = (in_flight(layout, 0, plans.MANY, ahead=ahead) for ahead in (False, True))
    assert sum(ahead) == sum(plain) + 1
    one_stage = TrainLayout(8, 1, 1, 8)
    assert in_flight(one_stage, 0, plans.MANY, ahead=True) == [2]
    assert in_flight(one_stage, 0, 1, ahead=True) == [1]


def test_interleaved_chunks_take_turns() -> None:
    """PP 2, VPP 2: rank 0 warms up with 2 (2 - 0 - 1) + 2 = 4 units and runs the fifth: chunks 0 0 1 1 0."""
    layout = TrainLayout(2, 1, 2, 1, vpp=2)
    assert in_flight(layout, 0, plans.MANY) == [3, 2]
    assert in_flight(layout, 1, plans.MANY) == [2, 1]
    assert in_flight(layout, 0, 2) == [2, 2]


def test_a_dense_layer_by_hand(tmp_path: Path) -> None:
    """TP 2: the norms' inputs and outputs are split by tokens, the rest by heads and columns."""
    recipe = plans.recipe(tmp_path, "tiny-tied", 2, tp=2, tokens_per_micro_batch=1000)
    row = row_of(sizes_of(recipe)["policy"])
    norms = 4 * 500 * 64 * 2
    attention = 1000 * ((2 * (4 + 2) + 2) * 16 * 2 + 4 * 16 * 2 + 4 * 4) / 2
    mlp = 1000 * 4 * 96 * 2 / 2
    assert sum(row.layer(dense=True).values()) == norms + attention + mlp
    assert row.boundary_bytes == 500 * 64 * 2


def test_recomputing_more_keeps_less(tmp_path: Path) -> None:
    recipe = plans.recipe(tmp_path, "deepseek-v3", 32, pp=1, ep=32)
    row, layers = row_of(sizes_of(recipe)["policy"]), [True, False, False, False]
    kept = [
        kept_and_recomputed(row, layers, options)[0]
        for options in (
            {},
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            {
                "recompute_granularity": "selective",
                "recompute_modules": ["moe_act", "mla_up_proj", "layernorm"],
            },
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 3,
            },
            FULL,
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
        )
    ]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    assert kept[-2:] == [4 * row.boundary_bytes, 2 * row.boundary_bytes]


def test_logits_are_in_chunks(tmp_path: Path) -> None:
    """logprobs.py's own figure: 32,768 tokens of a vocabulary of 151,936 at TP 8 take 0.7 GB beside the gradients."""
    recipe = plans.recipe(tmp_path, "qwen3-30b", 8, tp=8, ep=8, tokens_per_micro_batch=32768)
    rows, hidden = 152_576 // 8, 2048
    gradients = rows * hidden * (4 + 2) + 2 * 32768 * hidden * 2
    assert logits_bytes(sizes_of(recipe)["policy"], 0) - gradients == pytest.approx(0.7e9, rel=0.05)


def test_activations_of_a_pipeline_by_hand(tmp_path: Path) -> None:
    """Two stages of two layers: two micro-batches in flight on the first, one and the last norm on the last."""
    recipe = plans.recipe(tmp_path, "tiny-tied", 2, pp=2, tokens_per_micro_batch=1000)
    size = sizes_of(recipe)["policy"]
    row = row_of(size)
    kept, again = 2 * sum(row.layer(dense=True).values()), row.working_bytes(dense=True)
    assert activation_bytes(size, 0, plans.MANY) == 2 * kept + again
    assert activation_bytes(size, 0, 1) == kept + again
    assert activation_bytes(size, 1, plans.MANY) == kept + 2 * row.boundary_bytes + again


@pytest.mark.slow
def test_what_is_too_large_says_what_helps(tmp_path: Path) -> None:
    """The real sizes, on cards of which each phase wants a little more than there is."""
    engine = {"count": 1, "tp": 2, "ep": 2}
    recipe = plans.recipe(tmp_path, "tiny", 2, ep=2, engine=engine, tokens_per_micro_batch=65536)
    small = Hardware.model_validate({**plans.H800.model_dump(), "memory_bytes": 3_000_000_000})
    size = model_sizes(recipe)["policy"]
    plan = plans.memory(recipe, small, {"policy": size})
    errors = {str(error).split(" phase")[0].split()[-1]: error for error in plan.errors}
    assert errors["train"].where == "train.tokens_per_micro_batch"
    assert "H800 has 3.0 GB" in errors["train"].problem
    assert f"to {2048 + 8192}" in errors["train"].hint
    changed = overlaid(recipe, {"train": {"tokens_per_micro_batch": 10240}})
    device = plans.count(changed, small, {"policy": replace(size, recipe=changed)}).device
    assert device["train"].total_bytes <= 3_000_000_000 < plan.device["train"].total_bytes


def test_nothing_is_advised_that_shared_prefixes_are_refused_with(tmp_path: Path) -> None:
    recipe = plans.recipe(tmp_path, "tiny", 2, ep=2, engine={"count": 1, "tp": 2, "ep": 2})
    validity = [
        are_valid(resolve(overlaid(recipe, {"train": {"cp": cp, "share_prefixes": shares}})))
        for shares in (False, True)
        for cp in (1, 2)
    ]
    assert validity == [True, True, True, False]


def test_a_full_host_is_said_too(tmp_path: Path) -> None:
    """With engines on slots of their own no knob is turned: there is no other way than more or other nodes."""
    recipe = plans.recipe(
        tmp_path, "qwen3-30b", 12, ep=8, engine={"count": 1, "tp": 4, "ep": 4},
        placement={"train_gpus": 8, "first_engine_gpu": 8}, megatron=FULL,
    )  # fmt: skip
    poor = Hardware.model_validate({**plans.H800.model_dump(), "host_bytes": 10_000_000_000})
    plan = plans.memory(recipe, poor, sizes_of(recipe, replace(CHUNK, expert=1_000_000_000)))
    (error,) = plan.errors
    assert (error.where, "host would hold" in error.problem) == ("placement.gpus", True)


@pytest.mark.parametrize(
    ("name", "overrides", "is_advised"),
    [
        ("grpo_qwen3_30b", [], True),
        ("grpo_qwen3_30b", ["rollout.engine.ep=1"], False),
        # a dense layer is 85.5 tiles wide
        ("grpo_glm4_5_air", [], False),
    ],
)
def test_fp8_engines_are_advised_where_they_cut_no_tile(
    name: str, overrides: list[str], is_advised: bool
) -> None:
    recipe = load_recipe(plans.ROOT / "recipes" / f"{name}.yaml", overrides)
    assert recipe.model.config
    shape = model_shape(plans.ROOT / recipe.model.config)
    memory: Any = SimpleNamespace(
        errors=[], kv=SimpleNamespace(concurrency_mean=1, wanted=9, concurrency_longest=1)
    )
    full: Any = SimpleNamespace(peak_bytes=2, capacity_bytes=1), None
    (line,) = cache_advice(recipe, shape, memory, lambda _: full)
    assert ("rollout.engine.weights" in line) == is_advised

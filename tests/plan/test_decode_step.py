"""A decoding step: each part by hand, and the whole against published figures of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.hardware import Hardware
from megarl.model.precision import FP8_TILES
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.plan.decode_step import (
    ACCEPTED,
    ATTENTION_SHARE,
    LAYER_S,
    STEP_S,
    EngineSpeed,
    all_to_all_s,
)
from megarl.plan.engine_memory import token_bytes, weight_bytes
from tests.plan import plans
from tests.plan.plans import EXPERTS_BYTES, H800, SHAPE, V3

CARD = H800
EMBEDDING_BYTES = 32000 * 1024 * 2
READ = CARD.hbm_bytes_per_s * CARD.hbm_share
NVLINK = {"nvlink_bytes_per_s": 450e9}
CARDS = {
    "H800": CARD,
    "H100": CARD.model_copy(update=NVLINK),
    "H200": CARD.model_copy(update=NVLINK | {"hbm_bytes_per_s": 4.8e12}),
    "H20": CARD.model_copy(
        update=NVLINK | {"hbm_bytes_per_s": 4e12, "bf16_flops": 148e12, "fp8_flops": 296e12},
    ),
}


def speed_of(layout: EngineLayout, kv_bytes: float = 0.0, shape: ModelShape = SHAPE) -> EngineSpeed:
    embedding = EMBEDDING_BYTES / layout.attention_tp
    return plans.speed_of(layout, kv_bytes, shape, embedding)


def test_one_sequence_reads_its_experts_alone_and_no_embedding() -> None:
    speed = speed_of(EngineLayout(1, 1, 1))
    assert (speed.expert_bytes, speed.other_bytes) == (EXPERTS_BYTES, 1e8)
    step = speed.step(1, 100)
    assert step.experts == pytest.approx(EXPERTS_BYTES * 8 / 64 / READ)
    assert step.other_weights == pytest.approx(1e8 / READ)
    assert (step.exchanges, step.kernels) == (0.0, pytest.approx(10 * LAYER_S + STEP_S))
    assert speed.step(64, 100).experts == pytest.approx(EXPERTS_BYTES * (1 - (7 / 8) ** 64) / READ)
    assert speed.step_s(1, 100) == sum(vars(step).values())


def test_the_cache_is_read_by_the_length_of_what_runs() -> None:
    assert speed_of(EngineLayout(1, 1, 1), 1e5).step(4, 500).attention == pytest.approx(
        4 * 500 * 1e5 / READ
    )
    groups = EngineLayout(1, 4, 4, dp=4)  # a quarter of the sequences in each
    assert speed_of(groups, 1e5).step(4, 500).attention == pytest.approx(500 * 1e5 / READ)


def test_latent_attention_multiplies_with_compressed_keys() -> None:
    """DeepSeek-V3: 61 layers of 128 heads of 2 x 512 + 64, 106 GFLOP a token of 6,252 before it."""
    layout = EngineLayout(1, 8, 8, dp=8, precision=FP8_TILES)
    card = CARDS["H200"]  # on an H800 reading the cache takes a twentieth longer than this
    speed = EngineSpeed(V3, layout, card, 8, "bfloat16", 80e9, token_bytes(V3, layout, 2))
    flops = 2 * 61 * 128 * 1088 * 6252
    assert flops == pytest.approx(106.2e9, rel=1e-3)
    assert speed.step(8 * 48, 6252).attention == pytest.approx(
        48 * flops / (card.bf16_flops * ATTENTION_SHARE)
    )


def test_many_sequences_are_bound_by_products() -> None:
    few, many = (speed_of(EngineLayout(1, 1, 1)).step(running, 10) for running in (4000, 8000))
    assert many.experts == pytest.approx(2 * few.experts) and many.other_weights == pytest.approx(
        2 * few.other_weights
    )


def test_an_engine_over_nodes_waits_for_the_network() -> None:
    inside, over = (speed_of(EngineLayout(1, tp, 1)).step(1, 10).exchanges for tp in (8, 16))
    assert inside > 20 * CARD.nvlink_latency_s and over > 20 * CARD.nic_latency_s


def test_whole_layers_and_groups_of_one_gpu_exchange_nothing_for_them() -> None:
    """Of a model with a dense layer: attention's sums in groups, the dense layer's and the experts' over all."""
    shape = replace(SHAPE, num_dense_layers=1, ffn_size=2048)
    cut = speed_of(EngineLayout(1, 8, 8, dp=4), shape=shape).step(1, 10).exchanges
    whole = (
        speed_of(EngineLayout(1, 8, 8, dp=4, whole_dense=True), shape=shape).step(1, 10).exchanges
    )
    single = (
        speed_of(EngineLayout(1, 8, 8, dp=8, whole_dense=True), shape=shape).step(1, 10).exchanges
    )
    latency = CARD.nvlink_latency_s
    assert cut - whole == pytest.approx(latency, rel=0.01)
    assert whole - single == pytest.approx(10 * latency, rel=0.01)


def test_whole_shared_experts_are_computed_for_all_gathered_tokens() -> None:
    shape = replace(SHAPE, num_shared_experts=1)
    shared = 2 * 10 * 3 * 1024 * 512
    for deepep, times in ((False, 1.0), (True, 1 / 8)):
        whole, cut = (
            speed_of(EngineLayout(1, 8, 8, 8, whole_dense=True, whole_shared=at, deepep=deepep), shape=shape)
            .step(80_000, 1).other_weights
            for at in (True, False)
        )  # fmt: skip
        extra = 80_000 * shared * (times - 1 / 8) / (CARD.bf16_flops * CARD.prefill_share)
        assert whole - cut == pytest.approx(extra, abs=1e-12)


def test_all_to_all_is_of_the_nearest_size_that_was_measured() -> None:
    assert all_to_all_s(CARD, 64, 128) == pytest.approx(487e-6, rel=0.01)
    assert all_to_all_s(CARD, 72, 128) == all_to_all_s(CARD, 64, 128)
    assert all_to_all_s(CARD, 8, 0) == CARD.deepep_latency_s


WIDE = {
    "precision": FP8_TILES,
    "whole_dense": True,
    "whole_shared": True,
    "group_head": True,
    "deepep": True,
}
# (card, engine, redundant experts, sequences, tokens before each, seconds of a step). None of these runs had megarl's
# settings; two of them hide exchanges under the other half's products.
PUBLISHED = {
    # lmsys.org, "Deploying DeepSeek with PD disaggregation and large-scale expert parallelism on 96 H100", 2025-05-05:
    # 2,785 tokens a second on each of 72, 256 sequences on each, 2,000 tokens of input
    "SGLang, EP72, 256 a GPU": (
        "H100",
        EngineLayout(1, 72, 72, 72, **WIDE),
        32,
        72 * 256,
        2050,
        256 / 2785,
    ),
    # github.com/deepseek-ai/profile-data: decode, EP128, 128 a GPU, 4,096 tokens: 2,325 tokens a second
    "DeepSeek, EP128, 128 a GPU": (
        "H800",
        EngineLayout(1, 128, 128, 128, **WIDE),
        0,
        128 * 128,
        4096,
        128 / 2325,
    ),
    # InferenceX, pull request 870: 8 H200, 1,024 tokens each way; 64 at once: 224 tokens a second on each; 8: 12.8 ms
    "InferenceX, TP8, 64": (
        "H200",
        EngineLayout(1, 8, 8, precision=FP8_TILES),
        0,
        64,
        1536,
        64 / (224 * 8),
    ),
    "InferenceX, TP8, 8": ("H200", EngineLayout(1, 8, 8, precision=FP8_TILES), 0, 8, 1536, 12.8e-3),
    # Ant Group at lmsys.org, 2025-09-26: 16 H20, one draft, 1.8 tokens a step; 423 tokens a second on each
    "Ant, EP16, 12 a GPU": (
        "H20",
        EngineLayout(1, 16, 16, 16, draft=1, **WIDE),
        0,
        16 * 12,
        4500,
        12 * 1.8 / 423,
    ),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_figures_are_met_within_a_quarter(case: str) -> None:
    card, engine, redundant, running, context, seconds = PUBLISHED[case]
    hardware: Hardware = CARDS[card]
    shape = replace(V3, num_experts=V3.num_experts + redundant)
    speed = speed_of_weights(shape, engine, hardware)
    assert speed.step(running, context).total == pytest.approx(seconds, rel=0.25)


def speed_of_weights(shape: ModelShape, engine: EngineLayout, hardware: Hardware) -> EngineSpeed:
    weights = max(weight_bytes(shape, engine, "bfloat16"))
    return EngineSpeed(
        shape, engine, hardware, 8, "bfloat16", weights, token_bytes(shape, engine, 2)
    )


def drafting(draft: int, running: int = 1536) -> tuple[EngineSpeed, int, int]:
    """DeepSeek-V3 on 32 H800: the engine, its sequences and the tokens before each."""
    return (
        speed_of_weights(V3, EngineLayout(1, 32, 32, 32, draft=draft, **WIDE), CARD),
        running,
        4096,
    )


def test_verifying_drafts_reads_the_cache_and_the_weights_once() -> None:
    few, running, context = drafting(0, 32)
    plain, checked = few.step(running, context), drafting(1)[0].step(running, context)
    assert plain.drafts == 0.0 and plain.total == few.step_s(running, context)
    assert checked.other_weights == pytest.approx(plain.other_weights, rel=0.01), (
        "without the draft's"
    )
    assert checked.kernels == plain.kernels
    assert plain.experts < checked.experts < 2 * plain.experts
    assert checked.attention < 2 * plain.attention * 62 / 61


def test_the_draft_model_costs_about_a_layer_for_each_draft_the_output_layer_and_a_launch() -> None:
    steps = [speed.step(running, context) for speed, running, context in map(drafting, (1, 2, 3))]
    layer = drafting(0)[0].step(1536, 4096).total / 61
    assert all(
        0.5 * layer < step.drafts / draft - STEP_S < 3 * layer
        for draft, step in enumerate(steps, start=1)
    )
    assert steps[0].drafts < steps[1].drafts < steps[2].drafts


def test_a_step_with_drafts_is_longer_and_gives_more_tokens() -> None:
    for running in (32, 1536):
        speeds = [drafting(draft)[0] for draft in range(4)]
        totals = [speed.step(running, 4096).total for speed in speeds]
        assert totals == sorted(totals) and totals[3] < 4 * totals[0]
        tokens = [
            total / speed.step_s(running, 4096) for total, speed in zip(totals, speeds, strict=True)
        ]
        assert tokens == pytest.approx(ACCEPTED)
    assert drafting(1)[0].step_s(32, 4096) < drafting(0)[0].step_s(32, 4096), (
        "a few sequences wait for weights"
    )


def test_a_draft_model_takes_memory_for_a_layer() -> None:
    """Its weights: one layer with experts, a share of 1 / 58 of all such layers; its cache: one of 62 layers."""
    without, with_one = (EngineLayout(1, 32, 32, 32, draft=draft, **WIDE) for draft in (0, 1))
    more = max(weight_bytes(V3, with_one, "bfloat16")) - max(weight_bytes(V3, without, "bfloat16"))
    experts = 8 * 3 * 7168 * 2048
    assert experts < more < 3 * experts
    assert drafting(1)[0]._draft_bytes == more
    assert token_bytes(V3, with_one, 2) * 61 == token_bytes(V3, without, 2) * 62

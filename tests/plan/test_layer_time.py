"""A training rank's layers: each exchange by hand, and whole updates against published speeds of training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.hardware import load_hardware
from megarl.model.hf_config import model_shape
from megarl.model.shape import MlaShape, ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.plan.batch import RankWork, Samples
from megarl.plan.layer_time import COUNTS_S, LAYER_S, RankLayers
from megarl.plan.step_time import ComputingModel
from megarl.training.flops import train_work
from megarl.types import RecomputedPart
from tests.plan.plans import SHAPE

RECIPES = Path(__file__).parents[2] / "recipes"
CARDS = {name: load_hardware(RECIPES / "hardware" / f"{name}.yaml") for name in ("h800", "h100")}
CARD = CARDS["h800"]
NVLINK, FABRIC = 160e9, 45e9  # bytes/s that large messages reach
MODELS = {
    name: model_shape(RECIPES / "models" / name) for name in ("qwen3-235b-a22b", "qwen3-30b-a3b")
}
TOKENS = 4096
MESSAGE = TOKENS * 1024 * 2


def layers_of(
    world: int, tp: int = 1, pp: int = 1, ep: int = 1, *, cp: int = 1, vpp: int = 1,
    shape: ModelShape = SHAPE, deepep: bool = False,
) -> RankLayers:  # fmt: skip
    return RankLayers(shape, TrainLayout(world, tp, pp, ep, cp, vpp), CARD, 8, deepep)


def test_one_rank_exchanges_nothing() -> None:
    assert vars(layers_of(1).exchanges(TOKENS)) == {
        "tensor": 0,
        "experts": 0,
        "context": 0,
        "pipeline": 0,
    }


def test_tensor_parallel_ranks_gather_tokens_and_scatter_sums_in_each_layer() -> None:
    """Around attention; around dense MLPs and shared experts, too, which TP cuts, and not around routed experts."""
    once = 2 * 3 / 4 * MESSAGE / NVLINK
    assert layers_of(8, tp=4, ep=8).exchanges(TOKENS).tensor == pytest.approx(10 * once)
    shape = replace(SHAPE, num_dense_layers=3, ffn_size=2048)
    assert layers_of(8, tp=4, ep=8, shape=shape).exchanges(TOKENS).tensor == pytest.approx(
        13 * once
    )
    shape = replace(shape, num_shared_experts=1)
    assert layers_of(8, tp=4, ep=8, shape=shape).exchanges(TOKENS).tensor == pytest.approx(
        20 * once
    )


def test_each_copy_of_a_token_goes_to_its_expert_and_back() -> None:
    """Of 8 copies 7 leave a GPU of 8; of 16 GPUs half of the copies leave the node, and 7 of 16 go to neighbours."""
    inside = layers_of(8, ep=8).exchanges(TOKENS).experts
    assert inside == pytest.approx(10 * 2 * 7 * MESSAGE / NVLINK)
    over = layers_of(16, ep=16).exchanges(TOKENS).experts
    assert over == pytest.approx(10 * 2 * 4 * MESSAGE / FABRIC)
    assert layers_of(8, tp=4, ep=8).exchanges(TOKENS).experts == pytest.approx(inside / 4)


def test_deepep_sends_a_token_once_to_each_node_and_rank() -> None:
    inside = layers_of(8, ep=8, deepep=True).exchanges(TOKENS).experts
    assert inside == pytest.approx(10 * 2 * 7 * (1 - (7 / 8) ** 8) * MESSAGE / NVLINK)
    over = layers_of(32, ep=32, deepep=True).exchanges(TOKENS).experts
    assert over == pytest.approx(10 * 2 * 3 * (1 - (3 / 4) ** 8) * MESSAGE / FABRIC)


def test_ranks_that_split_an_expert_gather_its_tokens() -> None:
    """EP 1 puts ETP at TP: no copy leaves for another expert's rank."""
    exchanges = layers_of(2, tp=2).exchanges(TOKENS)
    assert exchanges.experts == pytest.approx(10 * 2 * 8 * (MESSAGE / 2) / NVLINK)


def test_rows_by_length_pass_keys_and_values_among_their_own_ranks() -> None:
    """Half of a rank's tokens are in rows of its own, a quarter in those of 2, and a quarter in those of 4 ranks."""
    layout = TrainLayout(4, 1, 1, 1, max_cp=4)
    shares = {1: 0.5, 2: 0.25, 4: 0.25}
    by_length = RankLayers(SHAPE, layout, CARD, 8, cp_shares=shares).exchanges(TOKENS)
    of_four = layers_of(4, cp=4).exchanges(4 * TOKENS)
    assert by_length.context == pytest.approx((0.25 * 1 + 0.25 * 3) / 3 * of_four.context)
    assert by_length.experts == layers_of(4).exchanges(TOKENS).experts


def test_context_parallel_ranks_pass_keys_and_values_round_a_ring() -> None:
    kv_bytes = TOKENS * 2 * 4 * 64 * 2
    assert layers_of(4, cp=4).exchanges(TOKENS).context == pytest.approx(
        10 * 3 / 4 * kv_bytes / NVLINK
    )
    assert layers_of(8, cp=4, tp=2).exchanges(TOKENS).context == pytest.approx(
        10 * 3 / 4 * kv_bytes / 2 / NVLINK
    )
    latent = replace(SHAPE, mla=MlaShape(None, 32, 128, 64, 96))
    latent_bytes = TOKENS * 16 * (128 + 64 + 96) * 2
    assert layers_of(16, cp=16, shape=latent).exchanges(TOKENS).context == pytest.approx(
        10 * 15 / 16 * latent_bytes / FABRIC
    )


def test_each_virtual_stage_sends_its_hidden_states_on() -> None:
    assert layers_of(16, pp=2).exchanges(TOKENS).pipeline == pytest.approx(MESSAGE / FABRIC)
    assert layers_of(8, pp=2).exchanges(TOKENS).pipeline == pytest.approx(MESSAGE / NVLINK)
    assert layers_of(16, pp=2, vpp=5, tp=4).exchanges(TOKENS).pipeline == pytest.approx(
        5 * MESSAGE / 4 / FABRIC
    )


def test_passes_back_send_as_much_and_what_is_computed_again_is_not_received_again() -> None:
    exchanges = layers_of(16, pp=2, tp=2, cp=2, ep=4).exchanges(TOKENS)
    inside = exchanges.tensor + exchanges.experts
    assert exchanges.total(1, 0) == pytest.approx(inside + exchanges.context + exchanges.pipeline)
    assert exchanges.total(2, 1) == pytest.approx(
        3 * inside + 4 * exchanges.context + 2 * exchanges.pipeline
    )


def test_a_micro_batch_reads_weights_and_launches_kernels_however_short_it_is() -> None:
    moved, read = 3 * 2e9 + 2 * 4e9, 3.35e12 * 0.7
    whole, deepep_s = (
        layers_of(8, ep=8, pp=1, deepep=on).micro_batch_s(2e9, 4e9, 2, 1) for on in (False, True)
    )
    assert deepep_s == pytest.approx(moved / read + 10 * 4 * LAYER_S)
    assert whole - deepep_s == pytest.approx(10 * 2 * COUNTS_S)


def test_a_pipeline_waits_for_its_fullest_stage() -> None:
    assert layers_of(4, pp=2).unevenness == 1
    uneven = RankLayers(SHAPE, TrainLayout(4, 1, 4, 1, stage_layers=(3, 3, 2, 2)), CARD, 8)
    assert uneven.unevenness == pytest.approx(3 / 2.5)


# --- published speeds ----------------------------------------------------------------------------------------------


EXPERTS: frozenset[RecomputedPart] = frozenset({"moe"})
LAYERS: frozenset[RecomputedPart] = frozenset({"layer"})


@dataclass(frozen=True)
class Run:
    """A published run: its layout, sequences a step, micro-batch in sequences, and TFLOP/s of model FLOPs a GPU.

    Megatron counts causal attention as half of T^2, and nothing for layers (or their experts alone) computed again.
    """

    tflops: float
    tp: int
    ep: int
    pp: int
    vpp: int
    sequences: int
    length: int = 4096
    micro_batch: int = 1
    cp: int = 1
    card: str = "h100"
    deepep: bool = True
    again: frozenset[RecomputedPart] = frozenset()
    world: int = 256
    model: str = "qwen3-235b-a22b"


# All with tokens spread evenly. github.com/yanring/Megatron-MoE-ModelZoo, best_practice/qwen3/readme.md: 256 H100.
TP2_EP32_PP8 = Run(245, 2, 32, 8, 4, 2048)
TP2_EP8_PP32 = Run(200, 2, 8, 32, 3, 2048, deepep=False)
TP4_EP8_PP8 = Run(167, 4, 8, 8, 4, 2048)
PUBLISHED = [
    TP2_EP32_PP8,
    TP2_EP8_PP32,
    TP4_EP8_PP8,
    # The same page, "Long Context".
    Run(295, 4, 8, 8, 4, 256, 16384, again=EXPERTS),
    Run(335, 4, 8, 8, 4, 256, 32768, cp=2, again=EXPERTS),
    Run(368, 4, 8, 8, 4, 256, 65536, cp=4, again=EXPERTS),
    Run(389, 4, 8, 8, 4, 256, 131072, cp=8, again=EXPERTS),
    # github.com/alibaba/Pai-Megatron-Patch/issues/658: 256 H800; 1,541, 1,507, 1,462 and 1,428 tokens a second and GPU.
    Run(229, 1, 8, 32, 3, 4096, micro_batch=4, card="h800", deepep=False, again=LAYERS),
    Run(224, 2, 8, 32, 3, 4096, micro_batch=4, card="h800", deepep=False, again=LAYERS),
    Run(217, 2, 8, 32, 3, 2048, card="h800", deepep=False),
    Run(212, 1, 8, 32, 3, 2048, card="h800", deepep=False, again=EXPERTS),
    # github.com/NVIDIA/Megatron-LM, examples/moe_recipes/qwen3_30b/h100, figure of pull request 5728: 32 H100.
    Run(240.5, 1, 8, 1, 1, 256, world=32, model="qwen3-30b-a3b"),
]


def planned_tflops(run: Run) -> float:
    """Model FLOPs a GPU and second, in 10^12, that the plan expects."""
    shape = MODELS[run.model]
    stages = run.pp * run.vpp
    most = -(-shape.num_layers // stages)
    # the first and the last stages, beside embedding and output layer
    shorter = most * stages - shape.num_layers
    lengths = [
        most - (stage < shorter // 2 or stage >= stages - (shorter + 1) // 2)
        for stage in range(stages)
    ]
    layout = TrainLayout(run.world, run.tp, run.pp, run.ep, run.cp, run.vpp, 0, tuple(lengths))
    micro_batches = run.sequences / (layout.dp * run.micro_batch)
    tokens = run.sequences * run.length / layout.dp
    work = RankWork(
        1, layout.dp, run.sequences / layout.dp, tokens, tokens, micro_batches, micro_batches,
        layout.bubble_micro_batches / micro_batches, 1.0,
    )  # fmt: skip
    experts = shape.num_experts / run.ep * 3 * shape.hidden_size * shape.moe_ffn_size
    attention = (
        2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads) / run.tp
    )
    weights = shape.num_layers / run.pp * (experts + attention)
    samples = Samples(
        1, 1, run.sequences, run.sequences, 0, run.length, np.full(run.sequences, run.length)
    )
    layers = RankLayers(shape, layout, CARDS[run.card], 8, run.deepep)
    model = ComputingModel(
        layers, samples, work, [run.again] * run.pp, False, False, 2 * weights, 4 * weights, 0.0, 1,
        expert_grads_bytes=4 * experts * shape.num_layers / run.pp,
    )  # fmt: skip
    seconds = model.updates_s
    return run.sequences * train_work(shape)(run.length) / run.world / seconds / 1e12


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.tflops} TFLOP/s on {run.card}")
def test_published_speeds_are_met_within_a_quarter(run: Run) -> None:
    assert planned_tflops(run) == pytest.approx(run.tflops, rel=0.25)


def test_published_layouts_have_their_order_and_about_their_ratios() -> None:
    runs = [TP2_EP32_PP8, TP2_EP8_PP32, TP4_EP8_PP8]
    first, *others = [planned_tflops(run) for run in runs]
    assert [first, *others] == sorted([first, *others], reverse=True)
    for run, speed in zip(runs[1:], others, strict=True):
        assert speed / first == pytest.approx(run.tflops / TP2_EP32_PP8.tflops, rel=0.25)

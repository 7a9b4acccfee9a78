"""A training rank's layers: each exchange by hand, and whole updates against published speeds of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from megarl.config.hardware import load_hardware
from megarl.model.hf_config import read_model
from megarl.model.precision import FP8_TILES
from megarl.model.shape import MlaShape, ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.plan.batch import RankWork, Samples
from megarl.plan.expert_exchange import EvenRouting, routing_of
from megarl.plan.fp8_training import fp8_linears
from megarl.plan.layer_time import COUNTS_S, LAYER_S, Overlap, RankLayers, overlaps_of
from megarl.plan.step_time import ComputingModel
from megarl.training.flops import train_work
from megarl.types import RecomputedPart
from tests.plan.plans import SHAPE

RECIPES = Path(__file__).parents[2] / "recipes"
CARDS = {name: load_hardware(RECIPES / "hardware" / f"{name}.yaml") for name in ("h800", "h100")}
CARD = CARDS["h800"]
NVLINK, FABRIC = 160e9, 45e9  # bytes/s that large messages reach
MODELS = {
    name: read_model(RECIPES / "models" / name)
    for name in ("qwen3-235b-a22b", "qwen3-30b-a3b", "deepseek-v3")
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
    """Of 64 experts 8 are chosen, none of which is among 8 of them, or 16, with these chances."""
    of_rank, of_node = (math.comb(64 - own, 8) / math.comb(64, 8) for own in (8, 16))
    inside = layers_of(8, ep=8, deepep=True).exchanges(TOKENS).experts
    assert inside == pytest.approx(10 * 2 * 7 * (1 - of_rank) * MESSAGE / NVLINK)
    over = layers_of(32, ep=32, deepep=True).exchanges(TOKENS).experts
    assert over == pytest.approx(10 * 2 * 3 * (1 - of_node) * MESSAGE / FABRIC)


def test_a_router_with_groups_sends_to_fewer_nodes() -> None:
    """With two of four groups, each the experts of a node, a token misses half of the nodes and a little more.

    So little goes over the fabric then that the ranks wait for the copies inside nodes.
    """
    plain = layers_of(32, ep=32, deepep=True)
    grouped = replace(plain, routing=EvenRouting(64, 8, groups=4, top_groups=2))
    of_node, of_rank = (
        1 / 2 + 1 / 2 * math.comb(32 - own, 8) / math.comb(32, 8) for own in (16, 2)
    )
    assert grouped.copies.fabric == pytest.approx(3 * (1 - of_node))
    inside = 10 * 2 * 28 * (1 - of_rank) * MESSAGE / NVLINK
    assert grouped.exchanges(TOKENS).experts == pytest.approx(inside)


def test_ranks_that_split_an_expert_gather_its_tokens() -> None:
    """EP 1 puts ETP at TP: no copy leaves for another expert's rank."""
    exchanges = layers_of(2, tp=2).exchanges(TOKENS)
    assert exchanges.experts == pytest.approx(10 * 2 * 8 * (MESSAGE / 2) / NVLINK)


def test_rows_by_length_pass_keys_and_values_among_their_own_ranks() -> None:
    """All wait for a quarter of the tokens in rows of 2 ranks, and for a quarter in those of 4."""
    layout = TrainLayout(4, 1, 1, 1, max_cp=4)
    shares = {2: 0.25, 4: 0.25}
    by_length = RankLayers(SHAPE, layout, CARD, 8, ring_shares=shares).exchanges(TOKENS)
    of_four = layers_of(4, cp=4).exchanges(4 * TOKENS)
    assert by_length.context == pytest.approx((0.25 * 1 + 0.25 * 3) / 3 * of_four.context)
    assert by_length.experts == layers_of(4).exchanges(TOKENS).experts
    nodes = RankLayers(SHAPE, layout, CARD, 2, ring_shares=shares).exchanges(TOKENS)
    on_fabric = (0.25 * 1 + 0.25 * 3 * NVLINK / FABRIC) / 3 * of_four.context
    assert nodes.context == pytest.approx(on_fabric), "four ranks are on two nodes of two"


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


def test_passes_are_paired_once_the_pipeline_is_full() -> None:
    """Of 8 micro-batches of one stage the first is alone forward; of 2 stages, twice cut, 5 of the first's 16 are."""
    assert layers_of(8, ep=8).paired_share(8) == pytest.approx(7 / 8)
    assert layers_of(16, pp=2, ep=8, vpp=2).paired_share(7.5) == pytest.approx(11 / 16)
    assert layers_of(16, pp=2, ep=8, vpp=2).paired_share(1) == 0


def test_only_what_megatron_is_told_to_hide_is_hidden() -> None:
    assert overlaps_of({}) == frozenset()
    assert overlaps_of({"overlap_moe_expert_parallel_comm": False}) == frozenset()
    assert overlaps_of({"moe_shared_expert_overlap": True}) == {"shared_experts"}
    assert overlaps_of({"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}) == {
        "experts"
    }


def test_a_pipeline_waits_for_its_fullest_stage() -> None:
    assert layers_of(4, pp=2).stage_loads == [1.0, 1.0]
    uneven = RankLayers(SHAPE, TrainLayout(4, 1, 4, 1, stage_layers=(3, 3, 2, 2)), CARD, 8)
    assert max(uneven.stage_loads) == pytest.approx(3 / 2.5)


# --- published speeds ----------------------------------------------------------------------------------------------


Parts = frozenset[RecomputedPart]
SELECTED: Parts = frozenset({"layernorm", "moe_act"})
EXPERTS: Parts = frozenset({"layernorm", "moe"})
LAYERS: Parts = frozenset({"layer"})
LATENT_AND_MLP: Parts = frozenset({"mla_up_proj", "mlp"})
HIDDEN: frozenset[Overlap] = frozenset({"experts"})


@dataclass(frozen=True)
class Run:
    """A published run: its layout, sequences a step, micro-batch in sequences, and TFLOP/s of model FLOPs a GPU.

    Megatron counts causal attention as half of T^2, and nothing for layers (or parts of them) computed again. stages:
    the layers of each virtual stage, where the source says them.
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
    again: Parts = frozenset()
    world: int = 256
    model: str = "qwen3-235b-a22b"
    hidden: frozenset[Overlap] = frozenset()
    stages: tuple[int, ...] = ()
    fp8: bool = False


def of_tokens(model: str, tokens_per_s: float) -> float:
    """TFLOP/s a GPU that trains on so many tokens a second, in sequences of 4096."""
    return tokens_per_s * train_work(MODELS[model].shape)(4096) / 4096 / 1e12


def h800(
    tokens_per_s: float, tp: int, ep: int, pp: int, vpp: int, sequences: int, again: Parts,
    *, micro_batch: int = 1, deepep: bool = False,
) -> Run:  # fmt: skip
    """Of the runs of Qwen3-235B on 256 H800, which are published in tokens a second and GPU."""
    tflops = of_tokens("qwen3-235b-a22b", tokens_per_s)
    return Run(
        tflops, tp, ep, pp, vpp, sequences, micro_batch=micro_batch, card="h800", deepep=deepep, again=again
    )  # fmt: skip


def qwen_30b(
    tflops: float, *, deepep: bool = True, hidden: frozenset[Overlap] = frozenset()
) -> Run:
    """Of the runs of Qwen3-30B on 16 H100.

    Those with DeepEP ran HybridEP and had the router in CUDA graphs, the others no graphs and no fused permutation;
    of those with and without an overlap each pair differs in nothing else.
    """
    return Run(
        tflops, 1, 16, 1, 1, 1024, deepep=deepep, world=16, model="qwen3-30b-a3b", hidden=hidden
    )


def of_step(seconds: float) -> float:
    """TFLOP/s of those runs by the seconds of a step."""
    return of_tokens("qwen3-30b-a3b", 1024 * 4096 / 16 / seconds)


# All in bfloat16 but two, with tokens spread evenly over experts, none of them dropped; HybridEP sends what DeepEP
# sends. Those two are in fp8 by TransformerEngine's blockwise recipe, forward and backward. Not here are runs in fp8
# with a scale for each tensor, with FSDP, on GB200, and those whose layout, lengths or seconds of training alone are
# not stated: NeMo-RL's performance summary, verl's and slime's steps, Megatron-Bridge's older DeepSeek-V3 in fp8 (which
# does not say what it hides), and DeepSeek's own report, whose schedule is not Megatron's: its 180,000 hours of an H800
# for 10^12 tokens (1,543 a second) are 1.4 times as fast as the plan of PP 16 and EP 64 in fp8. DualPipe hides all
# exchanges and most of the bubble, and sends tokens in fp8.
# Contrary to the plan are, of the same pages: Qwen3.5-35B, which takes 23.5 s a step and 82.7 s with combined 1F1B
# (Megatron-Bridge's SKILL.md); and the run of 1189.2 tokens a second
# below, which with overlap_grad_reduce and overlap_param_gather has 1104.8, and with TP's overlap, too, 1119.3. That
# page says of 128 micro-batches an update that both changed nothing much; the plan has a gain of less than 1 %.
TP2_EP32_PP8 = Run(245, 2, 32, 8, 4, 2048, again=SELECTED)
TP2_EP8_PP32 = Run(200, 2, 8, 32, 3, 2048, deepep=False, again=SELECTED)
TP4_EP8_PP8 = Run(167, 4, 8, 8, 4, 2048)
FLEX = qwen_30b(of_step(24.714))
FLEX_HIDDEN = qwen_30b(of_step(20.992), hidden=HIDDEN)
ALLTOALL = qwen_30b(of_step(41.25), deepep=False)
ALLTOALL_HIDDEN = qwen_30b(of_step(31.31), deepep=False, hidden=HIDDEN)
TP2_EP32_PP8_HIDDEN = replace(TP2_EP32_PP8, tflops=276, hidden=HIDDEN)
QWEN_30B_H100 = Run(240.5, 1, 8, 1, 1, 256, world=32, model="qwen3-30b-a3b")
QWEN_30B_H100_FP8 = replace(QWEN_30B_H100, tflops=242.9, fp8=True)
PUBLISHED = [
    # github.com/yanring/Megatron-MoE-ModelZoo, best_practice/qwen3/readme.md: 256 H100.
    TP2_EP32_PP8,
    TP2_EP32_PP8_HIDDEN,
    TP2_EP8_PP32,
    TP4_EP8_PP8,
    # The same page, "Long Context".
    Run(295, 4, 8, 8, 4, 256, 16384, again=EXPERTS),
    Run(335, 4, 8, 8, 4, 256, 32768, cp=2, again=EXPERTS),
    Run(368, 4, 8, 8, 4, 256, 65536, cp=4, again=EXPERTS),
    Run(389, 4, 8, 8, 4, 256, 131072, cp=8, again=EXPERTS),
    # github.com/NVIDIA/Megatron-LM, examples/moe_recipes/{qwen3_235b,qwen3_30b}/h100/bf16_*.yaml, figures of pull
    # request 5728. The first file names HybridEP, what is computed again, combined 1F1B, delay_wgrad_compute and the
    # router in CUDA graphs; it is the configuration of 276 TFLOP/s above in later software.
    Run(302.0, 2, 32, 8, 4, 2048, again=SELECTED, hidden=HIDDEN),
    QWEN_30B_H100,
    # The same with fp8_32GPU_TP1PP1EP8.yaml.
    QWEN_30B_H100_FP8,
    # The same, deepseek_v3/h100/fp8_1024GPU_TP2PP8EP64.yaml: the stages, and what is hidden and computed again; 1,412
    # tokens a second and GPU in arXiv 2603.07685, table 11.
    Run(
        of_tokens("deepseek-v3", 1412.0), 2, 64, 8, 4, 8192, again=LATENT_AND_MLP, world=1024, model="deepseek-v3",
        hidden=HIDDEN, stages=(3, *[2] * 29, 0, 0), fp8=True,
    ),
    # github.com/NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-moe-comm-overlap/SKILL.md and pull request 5094:
    # seconds of a step on 16 H100 with and without `overlap_moe_expert_parallel_comm`.
    FLEX,
    FLEX_HIDDEN,
    ALLTOALL,
    ALLTOALL_HIDDEN,
    # The same, docs/model-verification/models/deepseek-v3.md and perf_recipes/deepseek/h100/deepseek_v3.py: 1,061
    # tokens a second and GPU, with multi-token prediction.
    Run(
        of_tokens("deepseek-v3", 1061.2), 2, 64, 8, 4, 16384, again=LATENT_AND_MLP, world=1024, model="deepseek-v3",
        stages=(1, *[2] * 30, 0),
    ),
    # github.com/InternLM/xtuner, docs/zh_cn/benchmark/megatron_moe_benchmark.md: 256 H800.
    h800(1540.7, 1, 8, 32, 3, 4096, LAYERS, micro_batch=4),
    h800(1520.8, 1, 8, 32, 3, 8192, LAYERS, micro_batch=8),
    h800(1506.8, 2, 8, 32, 3, 4096, LAYERS, micro_batch=4),
    h800(1414.7, 2, 8, 32, 1, 8192, LAYERS, micro_batch=4),
    h800(1461.6, 2, 8, 32, 3, 2048, SELECTED),
    h800(1428.0, 1, 8, 32, 3, 2048, EXPERTS),
    h800(1273.5, 2, 32, 8, 4, 2048, SELECTED, deepep=True),
    h800(1189.2, 2, 8, 8, 1, 2048, SELECTED),
    h800(925.9, 2, 32, 8, 4, 2048, SELECTED),
    h800(923.5, 4, 8, 8, 4, 2048, frozenset()),
]  # fmt: skip


class KeepsLogits(ComputingModel):
    """A model whose backward pass finds all logits in memory, as in the published runs."""

    @property
    def logits_again(self) -> int:
        return 0


def planned_tflops(run: Run) -> float:
    """Model FLOPs a GPU and second, in 10^12, that the plan expects."""
    model = MODELS[run.model]
    shape = model.shape
    stages = run.pp * run.vpp
    most = -(-shape.num_layers // stages)
    # the first and the last stages, beside embedding and output layer
    shorter = most * stages - shape.num_layers
    lengths = run.stages or [
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
    layers = RankLayers(
        shape, layout, CARDS[run.card], 8, run.deepep, run.hidden,
        routing=routing_of(shape, model.facts),
    )  # fmt: skip
    policy = KeepsLogits(
        layers, samples, work, [run.again] * run.pp, False, False, 2 * weights, 4 * weights, 0.0, 1,
        expert_grads_bytes=4 * experts * shape.num_layers / run.pp, trains_mtp=shape.num_mtp_layers > 0,
        fp8=fp8_linears(shape, FP8_TILES, "fp8") if run.fp8 else None,
    )  # fmt: skip
    seconds = policy.updates_s + policy.gradients_s
    return run.sequences * train_work(shape)(run.length) / run.world / seconds / 1e12


@pytest.mark.parametrize(
    "run", PUBLISHED, ids=lambda run: f"{run.tflops:.0f} TFLOP/s on {run.card}"
)
def test_published_speeds_are_met_within_19_percent(run: Run) -> None:
    assert planned_tflops(run) == pytest.approx(run.tflops, rel=0.19)


def of_one_model() -> Iterator[tuple[Run, Run]]:
    """Each two runs of a model on one kind of GPU, the faster one first."""
    for one, other in combinations(sorted(PUBLISHED, key=lambda run: -run.tflops), 2):
        if (one.model, one.card) == (other.model, other.card):
            yield one, other


def test_published_runs_have_their_order() -> None:
    """Of a model on one kind of GPU, wherever one is a quarter faster than the other."""
    plans = {run: planned_tflops(run) for run in PUBLISHED}
    for faster, slower in of_one_model():
        if faster.tflops > 1.25 * slower.tflops:
            assert plans[faster] > plans[slower], (faster, slower)


def test_published_layouts_have_about_their_ratios() -> None:
    runs = [TP2_EP32_PP8, TP2_EP8_PP32, TP4_EP8_PP8]
    first, *others = [planned_tflops(run) for run in runs]
    for run, speed in zip(runs[1:], others, strict=True):
        assert speed / first == pytest.approx(run.tflops / TP2_EP32_PP8.tflops, rel=0.25)


@pytest.mark.parametrize(
    ("plain", "hidden"),
    [(FLEX, FLEX_HIDDEN), (ALLTOALL, ALLTOALL_HIDDEN), (TP2_EP32_PP8, TP2_EP32_PP8_HIDDEN)],
)
def test_what_is_hidden_gains_about_what_it_gained(plain: Run, hidden: Run) -> None:
    """So near that HIDDEN_SHARE is 0.7: with 0.6 or 0.8 one of the three is not met."""
    gained = planned_tflops(hidden) / planned_tflops(plain)
    assert gained == pytest.approx(hidden.tflops / plain.tflops, rel=0.1)


def test_fp8_gains_next_to_nothing_where_products_are_small() -> None:
    """As published. Of DeepSeek-V3, whose products are large, no run with and without it is known."""
    gained = planned_tflops(QWEN_30B_H100_FP8) / planned_tflops(QWEN_30B_H100)
    published = QWEN_30B_H100_FP8.tflops / QWEN_30B_H100.tflops
    assert gained == pytest.approx(published, rel=0.05)

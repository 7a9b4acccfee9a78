"""Training in the engine's fp8 by plan: which products are in fp8, and what quantising takes; published speeds are in
test_layer_time.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.fp8 import Fp8Backward
from megarl.model.precision import FP8_TILES, Precision
from megarl.model.shape import ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.plan.activations import RowSize
from megarl.plan.fp8_training import CODE_BYTES, KERNELS_SHARE, Module, fp8_linears
from megarl.plan.layer_time import LAYER_S, RankLayers
from megarl.training.flops import (
    module_forward_flops,
    output_forward_flops,
    total_forward_flops,
)
from tests.plan.plans import H800, SHAPE, V3
from tests.plan.test_step_time import MODEL

LENGTHS = np.array([4096, 100])
TOKENS = int(LENGTHS.sum())


@pytest.mark.parametrize("shape", [SHAPE, V3], ids=["grouped-query", "latent"])
def test_all_products_are_in_fp8_but_attention_router_and_output_layer(shape: ModelShape) -> None:
    router = 2 * TOKENS * shape.num_sparse_layers * shape.hidden_size * shape.num_experts
    plain = output_forward_flops(shape, LENGTHS) + router
    plain += module_forward_flops(shape, LENGTHS)["core_attn"]
    in_fp8 = fp8_linears(shape, FP8_TILES, "fp8").flops(TOKENS)
    assert in_fp8 + plain == pytest.approx(total_forward_flops(shape, LENGTHS))


def test_what_the_engines_keep_plain_is_plain_in_training_too() -> None:
    everything = fp8_linears(V3, FP8_TILES, "fp8")
    kept = fp8_linears(V3, Precision("fp8", 2, ("kv_b_proj", "shared_experts")), "fp8")
    shared: set[Module] = {"shared_experts"}
    assert everything.flops(1, shared) == 2 * 58 * 3 * 7168 * 2048
    assert kept.flops(1, shared) == 0 and not kept.has("shared_experts")
    # queries alone, from 1,536 numbers to 128 heads of 192, in 59 of 61 layers
    assert kept.flops(1, {"mla_up_proj"}) == 2 * 59 * 1536 * 128 * 192
    assert kept.flops(1, {"mlp"}) == everything.flops(1, {"mlp"}), "the dense layers come first"


@pytest.mark.parametrize(
    ("backward", "passes"), [("high_precision", 1), ("dequantised", 1), ("fp8", 3)]
)
def test_an_update_saves_half_of_the_products_in_fp8_and_quantises(
    backward: Fp8Backward, passes: int
) -> None:
    """Of 10 layers: 1,024 numbers to 24 heads of 64, the result, and two linear layers for each expert."""
    inputs = 10 * (1024 + 1024 + 8 * (1024 + 512))
    outputs = 10 * (24 * 64 + 1024 + 8 * (1024 + 1024))
    moved = {
        "high_precision": 0.0,
        "dequantised": (2 + CODE_BYTES) * inputs,
        "fp8": CODE_BYTES * inputs + (2 + 2 * CODE_BYTES) * outputs,
    }[backward]
    moved += (2 + CODE_BYTES) * inputs
    fp8 = fp8_linears(SHAPE, FP8_TILES, backward)
    changed = replace(MODEL, fp8=fp8)
    tokens = 8 * 100
    reached = 16 * H800.bf16_flops * H800.compute_share
    saved = passes * fp8.flops(tokens) / reached / 2
    moved_s = tokens * moved / 16 / H800.hbm_reached_per_s
    difference = MODEL._products_s(1, 1) - changed._products_s(1, 1)
    assert difference == pytest.approx(saved - moved_s, rel=1e-3)


def test_each_update_quantises_its_weights_once_and_each_micro_batch_launches_more_kernels() -> (
    None
):
    """Two ranks of TP, two of PP and four of EP: 5 layers with 16 experts each on a rank."""
    fp8 = fp8_linears(SHAPE, FP8_TILES, "fp8")
    weights = 5 * (1024 * 64 * (16 + 8 + 16) / 2 + 16 * 3 * 1024 * 512)
    assert fp8.rank_weights(TrainLayout(16, tp=2, pp=2, ep=4)) == pytest.approx(weights)
    update_s = replace(MODEL, fp8=fp8)._fp8_update_s(fp8, 1, 1)
    # four micro-batches, each with a pass forward and one back, read codes in place of weights
    moved_s = weights * (2 + 2 - 4 * 2) / H800.hbm_reached_per_s
    assert update_s == pytest.approx(moved_s + 4 * 5 * 3 * KERNELS_SHARE * LAYER_S)


def test_codes_are_kept_for_the_backward_pass_and_original_inputs_are_not() -> None:
    """Of experts the inputs become half as large; of attention's result and a shared expert's input a copy comes in."""
    layout = TrainLayout(1, 1, 1, 1)
    rows = {
        backward: RowSize(V3, layout, 4096, 2, fp8_linears(V3, FP8_TILES, backward))
        for backward in ("high_precision", "dequantised", "fp8")
    }
    plain = RowSize(V3, layout, 4096, 2).layer(dense=False)
    assert rows["high_precision"].layer(dense=False) == plain
    kept = rows["dequantised"].layer(dense=False)
    assert rows["fp8"].layer(dense=False) == kept
    assert kept["experts_in"] == pytest.approx(plain["experts_in"] * CODE_BYTES / 2)
    result = 4096 * 128 * 128
    assert kept["attention_out"] - plain["attention_out"] == pytest.approx(result * CODE_BYTES)
    shared = 4096 * (7168 * CODE_BYTES - 2048 * (2 - CODE_BYTES))
    assert kept["shared"] - plain["shared"] == pytest.approx(shared)


def test_a_card_without_fp8_gains_nothing() -> None:
    fp8 = fp8_linears(SHAPE, FP8_TILES, "fp8")
    card = H800.model_copy(update={"fp8_flops": None})
    old = replace(MODEL, layers=RankLayers(SHAPE, MODEL.layers.layout, card, 8))
    assert replace(old, fp8=fp8).updates_s > old.updates_s

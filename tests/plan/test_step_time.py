"""The step's estimate: each formula by hand, and that phases which are not there take nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.hardware import load_hardware
from megarl.placement.train_layout import TrainLayout
from megarl.plan import step_time
from megarl.plan.batch import RankWork, Samples
from megarl.plan.layer_time import (
    COUNTS_S,
    HIDDEN_SHARE,
    KERNELS_SHARE,
    LAYER_S,
    Overlap,
    RankLayers,
)
from megarl.plan.rollout_time import NO_ROLLOUT
from megarl.plan.step_time import ComputingModel, TrainTime
from megarl.training.flops import (
    forward_flops,
    module_forward_flops,
    output_forward_flops,
    train_work,
)
from tests.plan import recipes as planning
from tests.plan.plans import EXPERTS_BYTES, SHAPE

CARD = load_hardware(planning.H800)
SAMPLES = Samples(2, 2, 8, 8, 50, 400, np.full(8, 50))
LAYOUT = TrainLayout(16, tp=2, pp=2, ep=4)
LAYERS = RankLayers(SHAPE, LAYOUT, CARD, 8)
MODEL = ComputingModel(
    LAYERS, SAMPLES, RankWork(2, 4, 1, 100, 400, 4, 4, 0.25, 0.8), [frozenset()] * 2, False, True, 2e9, 4e9, 3e9, 10**9,
    expert_grads_bytes=1e9,
)  # fmt: skip
REACHED = 16 * 989.4e12 * CARD.compute_share


def output_s(lengths: np.ndarray, passes: int) -> float:
    """Of the output layer, as if all pipeline ranks had a part of it."""
    return passes * output_forward_flops(SHAPE, lengths) / REACHED


def last_stage_s(products: float, lengths: np.ndarray) -> float:
    """Products of the last of two pipeline ranks in an update, whose backward pass computes the logits again."""
    return products - output_s(lengths, 3) + 2 * output_s(lengths, 4)


def test_updates_are_products_exchanges_and_micro_batches_stretched_by_bubble_and_imbalance() -> (
    None
):
    lengths = np.full(8, 100)
    products = last_stage_s(8 * train_work(SHAPE)(100) / REACHED, lengths)
    exchanges = LAYERS.exchanges(8 * 100 / 4)
    each = LAYERS.micro_batch_s(2e9, 4e9, 1, 1)
    learning = MODEL.learning_time()
    assert learning.updates_s == pytest.approx(
        1.25 * ((products + exchanges.total(1, 1)) / 0.8 + 2 * 4 * each)
    )
    again = replace(MODEL, recomputed=[frozenset({"layer"})] * 2).learning_time()
    layers_again = 8 * forward_flops(SHAPE, 100) / REACHED - output_s(lengths, 1)
    whole = (products + layers_again + exchanges.total(2, 1)) / 0.8
    whole += 2 * 4 * LAYERS.micro_batch_s(2e9, 4e9, 2, 1)
    assert again.updates_s == pytest.approx(1.25 * whole)


def test_prompts_that_others_bring_are_not_computed() -> None:
    """Half of the samples of 100 tokens are computed from their prompt's 50 tokens on."""
    share = replace(MODEL.share, saved_prompts=0.5)
    work = train_work(SHAPE)
    computed = last_stage_s(8 * work(100) / REACHED, np.full(8, 100))
    saved = last_stage_s(4 * work(50) / REACHED, np.full(4, 50))
    products = computed - saved
    exchanges = LAYERS.exchanges((8 * 100 - 4 * 50) / 4).total(1, 1)
    each = LAYERS.micro_batch_s(2e9, 4e9, 1, 1)
    assert replace(MODEL, share=share).updates_s == pytest.approx(
        1.25 * ((products + exchanges) / 0.8 + 2 * 4 * each)
    )


def test_parts_of_layers_that_are_computed_again_take_their_products_exchanges_and_kernels() -> (
    None
):
    lengths = SAMPLES.lengths
    reached = 16 * 989.4e12 * CARD.compute_share
    moe = module_forward_flops(SHAPE, lengths)["moe"] / reached + LAYERS.part_s("moe", 8 * 100 / 4)
    each = LAYERS.part_micro_batch_s("moe")
    again = replace(MODEL, recomputed=[frozenset({"moe"})] * 2)
    assert again.updates_s - MODEL.updates_s == pytest.approx(1.25 * (moe / 0.8 + 2 * 4 * each))
    whole = replace(MODEL, recomputed=[frozenset({"layer"})] * 2)
    assert MODEL.updates_s < again.updates_s < whole.updates_s


def test_experts_weights_are_read_again_whether_they_are_trained_or_frozen() -> None:
    read_s = EXPERTS_BYTES / (2 * 4) / CARD.hbm_reached_per_s
    launched_s = 5 * (KERNELS_SHARE["moe"] * LAYER_S + COUNTS_S)
    assert LAYERS.part_micro_batch_s("moe") == pytest.approx(read_s + launched_s)
    adapted = replace(MODEL, frozen_bytes=1.9e9, grads_bytes=2e8, expert_grads_bytes=0.0)
    again_s = [
        replace(model, recomputed=[frozenset({"moe"})] * 2).updates_s - model.updates_s
        for model in (MODEL, adapted)
    ]
    assert again_s[0] == pytest.approx(again_s[1])


def test_the_stage_that_computes_most_again_sets_the_pace_unless_it_has_fewer_layers() -> None:
    first = replace(MODEL, recomputed=[frozenset({"layer"}), frozenset()])
    assert first.updates_s > MODEL.updates_s
    second = replace(MODEL, recomputed=[frozenset(), frozenset({"layer"})])
    assert second.updates_s > first.updates_s, "it has the output layer besides"
    shorter = replace(LAYERS, layout=replace(LAYOUT, stage_layers=(4, 6)))
    assert replace(first, layers=shorter).updates_s < first.updates_s


def hiding(overlap: Overlap, **shape: int) -> ComputingModel:
    of_shape = replace(SHAPE, **shape)
    return replace(MODEL, layers=replace(LAYERS, shape=of_shape, overlaps=frozenset({overlap})))


def without(model: ComputingModel) -> ComputingModel:
    return replace(model, layers=replace(model.layers, overlaps=frozenset()))


def test_exchanges_of_experts_are_hidden_behind_products_where_passes_are_paired() -> None:
    """Two of the first stage's four micro-batches are alone; nothing is hidden without a backward pass."""
    model = hiding("experts")
    shorter = min(
        2 * LAYERS.exchanges(8 * 100 / 4).experts,
        8 * train_work(SHAPE)(100) / (16 * 989.4e12 * CARD.compute_share),
    )
    hidden = 1.25 * HIDDEN_SHARE * 0.5 * shorter / 0.8
    assert without(model).updates_s - model.updates_s == pytest.approx(hidden)
    assert model.forward_s() == without(model).forward_s()


def test_shared_experts_are_hidden_behind_their_layers_exchange_in_every_pass() -> None:
    model = hiding("shared_experts", num_shared_experts=1)
    layers = model.layers
    tokens = 8 * 100 / 4
    reached = 16 * 989.4e12 * CARD.compute_share
    products = module_forward_flops(layers.shape, SAMPLES.lengths)["shared_experts"] / reached
    plain = without(model)
    forward_s, updates_s = (
        plain.forward_s() - model.forward_s(),
        plain.updates_s - model.updates_s,
    )
    # the bubble of one pass over both updates, and of each update
    for passes, times, bubble, gained in ((1, 1, 0.125, forward_s), (3, 2, 0.25, updates_s)):
        shared = passes * products + times * layers.part_s("shared_experts", tokens)
        hidden = HIDDEN_SHARE * min(times * layers.exchanges(tokens).experts, shared)
        assert gained == pytest.approx((1 + bubble) * hidden / 0.8)
    plain = hiding("shared_experts")
    assert plain.updates_s == without(plain).updates_s


def test_all_stages_wait_for_the_one_with_the_most_layers() -> None:
    layout = replace(LAYOUT, stage_layers=(9, 1))
    uneven = replace(MODEL, layers=replace(LAYERS, layout=layout))
    of_output_s = 1.125 * output_s(SAMPLES.lengths, 1) / 0.8
    layers_s = MODEL.forward_s() - 2 * of_output_s
    assert uneven.forward_s() == pytest.approx(layers_s * 9 / 5)


def test_multi_token_prediction_is_a_layer_of_the_last_stage_and_its_logits() -> None:
    """It computes beside no pass without gradients."""
    shape = replace(SHAPE, num_mtp_layers=1)
    predicting = replace(MODEL, layers=replace(LAYERS, shape=shape), trains_mtp=True)
    of_output_s = 1.25 * 2 * output_s(SAMPLES.lengths, 4) / 0.8
    layers_s = MODEL.updates_s - of_output_s
    of_layer_s = layers_s * 2 / SHAPE.num_layers
    assert predicting.updates_s == pytest.approx(MODEL.updates_s + of_layer_s + of_output_s)
    assert predicting.forward_s() == MODEL.forward_s()


def test_a_forward_pass_fills_the_pipeline_once_for_however_many_updates() -> None:
    assert MODEL.forward_s(0) == 0
    assert MODEL.forward_s() == MODEL.forward_s(2)
    assert MODEL.forward_s(1) / MODEL.forward_s(2) == pytest.approx(1.25 / (2 * 1.125))


@pytest.mark.parametrize(
    ("keys", "needs_old_logprobs", "has_reference"),
    [
        (["algorithm.name=grpo"], True, True),
        (["algorithm.name=dapo"], True, False),
        (["algorithm.name=reinforce_pp"], True, True),
    ],
)
def test_the_old_policy_and_the_reference_are_asked_where_they_are_read(
    keys: list[str], needs_old_logprobs: bool, has_reference: bool, tmp_path: Path
) -> None:
    recipe = planning.small(tmp_path, "algorithm.kl_coefficient=null", *keys)
    times = step_time.policy_time(recipe, MODEL)
    assert (times.old_logprobs_s > 0, times.reference_s > 0) == (needs_old_logprobs, has_reference)
    once = replace(MODEL, share=replace(MODEL.share, updates=1))
    one_update = step_time.policy_time(recipe, once)
    # pays its KL in the reward
    assert (one_update.old_logprobs_s > 0) == (keys == ["algorithm.name=reinforce_pp"])
    dropping = planning.small(
        tmp_path, "algorithm.kl_coefficient=null", *keys, "algorithm.rollout_correction=icepop"
    )
    assert step_time.policy_time(dropping, once).old_logprobs_s > 0
    # the first of two updates has its own
    half = MODEL.forward_s(2 if keys == ["algorithm.name=reinforce_pp"] else 1)
    assert times.old_logprobs_s == pytest.approx(half)
    if has_reference:
        assert times.reference_s == pytest.approx(
            MODEL.forward_s() + 4 * 2e9 / CARD.pcie_bytes_per_s
        )


def test_gradients_of_experts_are_summed_over_their_own_replicas() -> None:
    """Experts' over 2 replicas, the rest over 4; half as much again comes back as weights."""
    volume = 1e9 / 2 + (4e9 - 1e9) * 3 / 4
    assert MODEL.gradients_s == pytest.approx(1.5 * volume / 45e9)
    in_a_node = replace(MODEL, layers=replace(LAYERS, gpus_per_node=16))
    assert in_a_node.gradients_s == pytest.approx(1.5 * volume / 160e9)


def test_sums_of_gradients_are_hidden_behind_the_last_backward_pass_and_weights_are_not() -> None:
    """Of 2 updates with 4 micro-batches each, whose backward passes are two thirds of the products."""
    products = 8 * train_work(SHAPE)(100) / (16 * 989.4e12 * CARD.compute_share)
    hidden = HIDDEN_SHARE * products * 2 / 3 / 8
    beside = replace(MODEL, sums_beside=True)
    assert MODEL.gradients_s - beside.gradients_s == pytest.approx(hidden)
    long = replace(beside, samples=replace(SAMPLES, responses=SAMPLES.responses * 10**6))
    assert MODEL.gradients_s - long.gradients_s == pytest.approx(
        HIDDEN_SHARE * MODEL.gradients_s / 1.5
    )


def test_an_optimizer_on_the_host_crosses_pcie_and_is_not_moved() -> None:
    on_host = replace(MODEL, offloads=True)
    assert on_host.memory_s == replace(MODEL, takes_turns=False).memory_s == 0
    assert MODEL.memory_s == pytest.approx(2 * 3e9 / 50e9)
    assert MODEL.optimizer_s == pytest.approx(2 * 3e9 / (3.35e12 * 0.7))
    assert on_host.optimizer_s == pytest.approx(2 * 3e9 / 40e9 + 6 * 0.25e9 / 50e9)


def test_a_checkpoint_costs_its_step_the_copies_or_the_files_too(tmp_path: Path) -> None:
    def seconds(*keys: str) -> float:
        return step_time.save_s(planning.small(tmp_path, *keys).checkpoint, MODEL, 2)

    assert seconds() == 0
    assert seconds("checkpoint.every=10") == pytest.approx(5e9 / 50e9 / 10)
    files = 14e9 / (2 * 5e9)
    assert seconds("checkpoint.every=10", "checkpoint.asynchronous=false") == pytest.approx(
        (0.1 + files) / 10
    )


def test_a_total_is_the_sum_of_its_phases() -> None:
    assert TrainTime(1, 2, 4, 8, 16, 32, 64).total_s == 127
    assert step_time.StepTime(1, 2, 4, 8, 16, 32, 64).total_s == 127


def test_ranks_wait_for_what_a_phase_beside_them_takes_longer() -> None:
    """Learning takes 2 + 4 + 8 s, and the phase beside it 10, 20 and 30 s of the rollout's 25 s in the mean."""
    others = step_time.StepTime(0, 2, 4, 8, 0, 32, 64)
    rollout = replace(NO_ROLLOUT, prefill_s=5.0, decode_s=20.0)
    assert others.with_rollout(rollout) == replace(others, rollout_s=25)
    ahead = others.with_rollout(replace(rollout, beside_s=(10.0, 20.0, 30.0)))
    assert (ahead.rollout_s, ahead.ahead_s) == (5, (0 + 6 + 16) / 3)
    assert ahead.total_s == 5 + 14 + 22 / 3 + 96

"""Prefixes that are computed once change nothing: every layout learns what one rank learns without sharing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.controller.samples import samples_of
from megarl.device import Address
from megarl.placement.train_layout import TrainLayout
from megarl.samples.summaries import summary
from megarl.training.batching import plan_updates
from megarl.training.calls import TrainCall
from megarl.types import TrainSequence
from tests.parallel.adapters import lora_recipe, set_b
from tests.parallel.checkpoints import write
from tests.parallel.gradients import DENOMINATOR, LR, VOCAB_SIZE, recorded, steps
from tests.parallel.precision import dtype
from tests.parallel.test_parity import LOSSES, RECOMPUTE, check
from tests.parallel.worlds import (
    assign,
    numbers,
    ragged,
    recipe,
    role_of,
    run_ranks,
    run_world,
    world_part,
)
from tests.samples.responses import random_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        dtype() == "bfloat16", reason="TransformerEngine's attention does not share prefixes"
    ),
]

ONE_RANK, TP2_EP2 = TrainLayout(1, 1, 1, 1), TrainLayout(2, 2, 1, 2)
STEPS = 2
GROUPS, SAMPLES, MICRO_BATCHES = 4, 5, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3-moe": LOSSES,
    "deepseek-v3": LOSSES | {"router_bias_rate": 1e-3},
}
# layout, keys of train
LAYOUTS: dict[str, tuple[TrainLayout, dict[str, Any]]] = {
    "one rank": (ONE_RANK, {}),
    "tp2 pp2 ep2": (TrainLayout(4, 2, 2, 2), {"megatron": RECOMPUTE["full"]}),
    "tp2 vpp2 ep4": (TrainLayout(8, 2, 2, 4, vpp=2), {"megatron": RECOMPUTE["selective"]}),
    "dp2": (TrainLayout(2, 1, 1, 1), {}),
}
CASES = [("qwen3-moe", "one rank"), ("qwen3-moe", "tp2 pp2 ep2"), ("qwen3-moe", "dp2")]
CASES += [
    ("deepseek-v3", "one rank"),
    ("deepseek-v3", "tp2 pp2 ep2"),
    ("deepseek-v3", "tp2 vpp2 ep4"),
]


def samples() -> list[TrainSequence]:
    """Groups of samples that begin with the same prompt, of any length, and in part with the same answer."""
    rng = np.random.default_rng(5)
    sequences = []
    for sequence in ragged(GROUPS * SAMPLES, VOCAB_SIZE, seed=3):
        if len(sequences) % SAMPLES == 0:
            first = sequence.token_ids_T
        longest = min(len(first), len(sequence.token_ids_T))
        num_shared = int(rng.integers(longest // 2, longest + 1))
        token_ids_T = np.concatenate([first[:num_shared], sequence.token_ids_T[num_shared:]])
        sequences.append(replace(sequence, token_ids_T=token_ids_T))
    return sequences


def train(trainer: Any, **more: Any) -> dict[str, Any]:
    """Logprobs, then steps; the samples of a group are on several ranks, and in several micro-batches of a rank."""
    sequences, at = samples(), trainer.layout.coords(trainer.rank)
    micro_batches = assign(sequences, at.dp, trainer.layout.dp, MICRO_BATCHES)
    part = world_part(micro_batches, sequences, DENOMINATOR, **more)
    rows = [trainer._pack(batch) for batch in micro_batches]
    num_tokens = [
        (len(row.token_ids_L), sum(row.lengths)) for row in rows if row.shared is not None
    ]
    logprobs = trainer.token_outputs(micro_batches)
    with recorded(trainer) as learning:
        metrics = steps(trainer, part, STEPS)
    return {"logprobs": logprobs, "metrics": metrics, "learning": learning, "tokens": num_tokens}


def run(path: Path, family: str, layout: TrainLayout, **keys: Any) -> list[dict[str, Any]]:
    made = recipe(path, layout, grad_clip=1.0, weight_decay=0.1, **SETTINGS[family], **keys)
    return run_world(made, train)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each family's checkpoint and what one rank makes of it without sharing."""
    by_family = {}
    for family in SETTINGS:
        path = write(
            tmp_path_factory.mktemp(family), family, vocab_size=VOCAB_SIZE, pad_token_id=None
        )
        (result,) = run(path, family, ONE_RANK)
        assert result["tokens"] == []
        by_family[family] = path, result
    return by_family


@pytest.mark.parametrize(("family", "name"), CASES)
def test_layout_equals_one_rank_without(one_rank: dict[str, Any], family: str, name: str) -> None:
    """Unverified on a GPU.

    parallel/prefix_attention.py: products of torch on CUDA, for a GPU without TransformerEngine. To check first: this
    test there. TransformerEngine itself is refused: it would need the log-sum-exp of its attention, by which parts are
    joined in both passes, and rotary angles by position in its fused kernels.
    """
    path, expected = one_rank[family]
    layout, keys = LAYOUTS[name]
    ranks = run(path, family, layout, share_prefixes=True, **keys)
    for rank in ranks:
        shared, whole = np.sum(rank["tokens"], axis=0)
        assert shared < 0.9 * whole, "rows were to share"
    check(ranks, layout, expected)


def replay(trainer: Any) -> dict[str, Any]:
    """Experts are recorded in one pass and replayed in the steps."""
    from megarl.parallel.routing import Choices

    at = trainer.layout.coords(trainer.rank)
    micro_batches = assign(samples(), at.dp, trainer.layout.dp, MICRO_BATCHES)
    choices = [Choices(is_recording=True) for _ in micro_batches]
    trainer.token_outputs(micro_batches, choices)
    for choice in choices:
        choice.is_recording = False
    return train(trainer, choices=choices)


def test_replayed_experts(one_rank: dict[str, Any]) -> None:
    """Those of a shared token count as often as samples have it."""
    path, _ = one_rank["deepseek-v3"]
    results = [
        run_world(recipe(path, layout, aux_loss=0.02, share_prefixes=shares), replay)
        for layout, shares in ((TP2_EP2, True), (ONE_RANK, False))
    ]
    check(results[0], TP2_EP2, results[1][0])


def train_adapters(trainer: Any) -> dict[str, Any]:
    set_b(trainer)
    return train(trainer)


def test_adapters(one_rank: dict[str, Any]) -> None:
    path, _ = one_rank["qwen3-moe"]
    results = [
        run_world(lora_recipe(path, layout, share_prefixes=shares), train_adapters)
        for layout, shares in ((TP2_EP2, True), (ONE_RANK, False))
    ]
    check(results[0], TP2_EP2, results[1][0])


def learn_as_planned(trainer: Any) -> list[Any]:
    """Of plans with shared prompts and without: the rows of each micro-batch, and the metrics of two updates."""
    from megarl.parallel.packing import Split, pack

    rng = np.random.default_rng(2)
    rewards_G = np.arange(SAMPLES, dtype=np.float32) % 2
    groups = [
        replace(
            random_group(rng, VOCAB_SIZE, rng.integers(1, 7, SAMPLES).tolist()), rewards_G=rewards_G
        )
        for _ in range(GROUPS)
    ]
    refs = samples_of([summary(group) for group in groups], "grpo", version=0)
    plain = partial(pack, split=Split(), device="cpu")
    results = []
    for shares, packed in ((True, trainer._pack), (False, plain)):
        trainer._pack = packed
        updates = plan_updates(
            refs,
            updates=2,
            dp=1,
            token_budget=32,
            aggregation="token_mean",
            work=float,
            shares_prompts=shares,
        )
        call: TrainCall[Any] = TrainCall("grpo", updates, dict(enumerate(groups)), 0.0, state=None)
        metrics = [numbers(of_update) for of_update in trainer.train(call)]
        results.append(([len(update.micro_batches[0]) for update in updates], metrics))
    return results


def test_a_step_learns_as_planned(one_rank: dict[str, Any]) -> None:
    """Micro-batches that only have room for their samples where a prompt is there once."""
    path, _ = one_rank["qwen3-moe"]
    ((shared, plain),) = run_world(
        recipe(path, ONE_RANK, share_prefixes=True, **LOSSES), learn_as_planned
    )
    assert all(mine < other for mine, other in zip(shared[0], plain[0], strict=True))
    for mine, other in zip(shared[1], plain[1], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
        assert mine["grad_norm"] > 1e-3 and mine["loss"] != 0.0


def learn_values(rank: int, meet: Address, made: Any) -> dict[str, Any]:
    from megarl.training.auxiliary import AuxiliaryRank

    critic: Any = AuxiliaryRank(rank, role_of(made, "critic", has_scores=True), meet, "values")
    sequences = samples()
    part = world_part(assign(sequences, 0, 1, MICRO_BATCHES), sequences, DENOMINATOR)
    (values,) = critic.values_of([part.micro_batches])
    with recorded(critic) as learning:
        metrics = [
            numbers(critic.train_step(part.micro_batches, values, part.norms, LR))
            for _ in range(STEPS)
        ]
    return {"logprobs": values.values, "metrics": metrics, "learning": learning}


def test_a_critics_values(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "deepseek-v3",
        head="ForSequenceClassification",
        vocab_size=VOCAB_SIZE,
        pad_token_id=None,
        num_labels=1,
    )
    results = [
        run_ranks(
            layout.world_size, learn_values, recipe(path, layout, share_prefixes=shares, **LOSSES)
        )
        for layout, shares in ((TP2_EP2, True), (ONE_RANK, False))
    ]
    check(results[0], TP2_EP2, results[1][0])

"""Objectives of a whole sequence, whose tokens context-parallel ranks share out, learn what they do on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.algos import ALGORITHMS
from megarl.parallel.layout import TrainLayout
from megarl.training.batching import MicroBatch, SampleRef, Update, plan_updates
from megarl.training.credit import sample_advantages
from megarl.training.train_sequences import train_sequences
from megarl.types import FloatArray, Hyperparameters, Prompt, Sample, SampleGroup, SamplePart, TrainSequence
from tests.parallel.checkpoints import write
from tests.parallel.gradients import check_learning, recorded
from tests.parallel.worlds import numbers, recipe, run_world

pytestmark = pytest.mark.slow

VOCAB_SIZE, LR, BUDGET = 47, 1e-3, 64
LAYOUTS = {
    "cp2": TrainLayout(2, 1, 1, 1, cp=2),
    "cp2 dp2": TrainLayout(4, 1, 1, 1, cp=2),
}
WIDE = Hyperparameters(aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)
# Rules, and how far from the engine a near and a far sample are: the log of pi_old / mu summed, or as the tokens' mean.
CASES: dict[str, tuple[Hyperparameters, float, float, bool]] = {
    "gspo": (WIDE, 0.0, 0.1, False),
    "mis_sequence": (replace(WIDE, mismatch="mis_sequence"), 0.3, 1.2, True),
    "mis_geometric": (replace(WIDE, mismatch="mis_geometric"), 0.002, 0.05, False),
}
AHEAD = (-0.5, -0.05, 0.05, 0.5)  # mean log-ratios of samples to their old policy: half of them beyond the clip


def samples(count: int) -> tuple[dict[int, SampleGroup], list[SampleRef]]:
    """Groups of one, with responses of 1 to 19 tokens."""
    rng = np.random.default_rng(11)
    groups, refs = {}, []
    for index in range(count):
        prompt, length = rng.integers(0, VOCAB_SIZE, rng.integers(1, 8)), 1 if index == 3 else int(rng.integers(2, 20))
        nothing = np.zeros(length, np.float32)
        sample = Sample(rng.integers(0, VOCAB_SIZE, length), nothing, "", True, (SamplePart(0, length),))
        one = Prompt(str(index), "", tuple(prompt.tolist()), "")
        groups[index] = SampleGroup(one, (sample,), nothing[:1], nothing[:1].astype(np.bool_))
        refs.append(SampleRef(index, 0, len(prompt) + length, length, advantage=float(rng.normal())))
    return groups, refs


def seen_by_engine(ref: SampleRef, logp_T: FloatArray, case: str) -> tuple[FloatArray, FloatArray]:
    """(old policy's, engine's) logprobs of a sample at known distances from the policy's."""
    _, near, far, is_sum = CASES[case]
    length, distance = ref.response_length, far if ref.group // 2 % 2 else near
    jitter_T = np.random.default_rng(ref.group).normal(0, 0.02, (2, length))
    jitter_T -= jitter_T.mean(1, keepdims=True)
    old, engine = logp_T.copy(), np.zeros_like(logp_T)
    old[-length:] += jitter_T[0] - AHEAD[ref.group % 4]
    engine[-length:] = old[-length:] + jitter_T[1] - (distance / length if is_sum else distance)
    return old, engine


def update_of(trainer: Any, case: str, refs: Sequence[SampleRef], groups: dict[int, SampleGroup]) -> dict[str, float]:
    """One optimizer update, as a run plans it; raises AssertionError where a rank is not left empty by few samples."""
    from megarl.parallel.pipeline import Norms
    from megarl.training.policy import UpdateShare

    layout, rules = trainer.layout, CASES[case][0]
    plan: Update = plan_updates(
        refs, updates=1, dp=layout.dp, token_budget=BUDGET, aggregation=rules.aggregation, work=float,
        align=layout.tokens_align,
    )[0]  # fmt: skip
    mine: tuple[MicroBatch, ...] = plan.micro_batches[layout.coords(trainer.rank).dp]
    made: list[list[TrainSequence]] = train_sequences(mine, groups, rules.aggregation)
    flat = [ref for batch in mine for ref in batch]
    found = [seen_by_engine(ref, one, case) for ref, one in zip(flat, trainer.token_outputs(made), strict=True)]
    engines = iter([engine for _, engine in found])
    advantages = iter(sample_advantages(flat, [one for batch in made for one in batch]))
    made = [
        [replace(one, engine_logp_T=next(engines), advantage_T=next(advantages)) for one in batch] for batch in made
    ]
    norms = Norms(plan.denominator, plan.tokens, plan.loss_tokens)
    part = UpdateShare(made, norms, old_logp=[old for old, _ in found])
    return numbers(trainer.train_step(part, LR, ALGORITHMS["gspo"].loss(rules))) | {"samples": len(flat)}


def train(trainer: Any) -> dict[str, Any]:
    """Of each case an update of many samples, and one of a single sample, without any for the other ranks."""
    groups, refs = samples(12)
    with recorded(trainer) as learning:
        metrics = [update_of(trainer, case, part, groups) for case in CASES for part in (refs, refs[1:2])]
    return {"metrics": metrics, "learning": learning}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCAB_SIZE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def one_rank(path: Path) -> dict[str, Any]:
    (found,) = run_world(recipe(path, TrainLayout(1, 1, 1, 1)), train)
    for metrics in found["metrics"][::2]:
        assert 0 < metrics["clipped"] < 1, "both sides of the clip are to be seen"
    for metrics in found["metrics"][2::2]:
        assert 0 < metrics["mismatch_masked"] < 1, "and of the mismatch's bound"
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sequences_objective_equals_one_ranks(path: Path, one_rank: dict[str, Any], name: str) -> None:
    layout = LAYOUTS[name]
    ranks = run_world(recipe(path, layout), train)
    counts = [[metrics.pop("samples") for metrics in rank["metrics"]] for rank in ranks]
    if layout.dp > 1:
        assert {tuple(one[1::2]) for one in counts} == {(0, 0, 0), (1, 1, 1)}, "a rank has nothing to learn from"
    for rank in ranks:
        for mine, one in zip(rank["metrics"], one_rank["metrics"], strict=True):
            assert mine == pytest.approx({stat: one[stat] for stat in mine}, rel=1e-4, abs=1e-5)
    check_learning([rank["learning"] for rank in ranks], [one_rank["learning"]])

"""What is known of whole sequences, or of what is kept of an update, is the same in every layout.

Objectives of a whole sequence, whose tokens context-parallel ranks share out; and mismatch corrections, which drop
tokens once the old policy's log-probabilities are known, on the last stage of each data-parallel rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megarl.placement.train_layout import TrainLayout
from megarl.training.batching import MicroBatch, SampleRef, plan_updates
from megarl.training.calls import TrainCall
from megarl.training.shares import Logprobs
from megarl.training.train_sequences import train_sequences
from megarl.types import FloatArray, Hyperparameters, Prompt, SampleGroup
from tests.parallel.checkpoints import write
from tests.parallel.gradients import check_learning, recorded
from tests.parallel.worlds import LONGEST, numbers, recipe, run_world
from tests.samples.responses import response, with_row

pytestmark = pytest.mark.slow

VOCAB_SIZE, LR, BUDGET = 47, 1e-3, 64
LAYOUTS = {
    "pp2": TrainLayout(2, 1, 2, 1),
    "cp2 dp2": TrainLayout(4, 1, 1, 1, cp=2),
    "cp auto": TrainLayout(4, 1, 1, 1, max_cp=2),
}
WIDE = Hyperparameters(aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)
PENALISED = replace(
    WIDE, aggregation="token_mean", entropy_coefficient=0.01, positive_nll=0.1, whiten=True
)
# Rules, and how far from the engine a near and a far sample are: the log of pi_old / mu summed, or as the tokens' mean.
CASES: dict[str, tuple[Hyperparameters, float, float, bool]] = {
    "gspo": (WIDE, 0.0, 0.1, False),
    "mis_sequence": (replace(WIDE, rollout_correction="mis_sequence"), 0.3, 1.2, True),
    "mis_geometric": (replace(WIDE, rollout_correction="mis_geometric"), 0.002, 0.05, False),
    "icepop": (replace(PENALISED, rollout_correction="icepop"), 0.0, 2.5, False),
    "icepop of samples": (
        replace(PENALISED, rollout_correction="icepop", aggregation="sequence_mean"),
        0.0,
        2.5,
        False,
    ),
}
# mean log-ratios of samples to their old policy: half of them beyond the clip
AHEAD = (-0.5, -0.05, 0.05, 0.5)


def samples(count: int) -> tuple[dict[int, SampleGroup], list[SampleRef]]:
    """Groups of one, with responses of 1 to 19 tokens."""
    rng = np.random.default_rng(11)
    groups, refs = {}, []
    for index in range(count):
        prompt, length = (
            rng.integers(0, VOCAB_SIZE, rng.integers(1, 8)),
            1 if index == 3 else int(rng.integers(2, 20)),
        )
        nothing = np.zeros(length, np.float32)
        group_prompt = Prompt(str(index), "", tuple(prompt.tolist()), "")
        sample = response(group_prompt.token_ids, rng.integers(0, VOCAB_SIZE, length), nothing)
        groups[index] = SampleGroup(
            group_prompt, (sample,), nothing[:1], nothing[:1].astype(np.bool_)
        )
        facts = {"advantage": float(rng.normal()), "is_correct": index % 3 == 1}
        refs.append(SampleRef(index, 0, len(prompt) + length, length, **facts))
    return groups, refs


def seen_by_engine(ref: SampleRef, logp_T: FloatArray, case: str) -> tuple[FloatArray, FloatArray]:
    """(old policy's, engine's) logprobs of a sample at known distances from the policy's."""
    _, near, far, is_sum = CASES[case]
    length, distance = ref.response_length, far if ref.group // 2 % 2 else near
    if case.startswith("icepop"):  # which decides by the token; all tokens of sample 5 are far
        distance = np.where((np.arange(length) % 3 == 1) | (ref.group == 5), far, near)
    jitter_T = np.random.default_rng(ref.group).normal(0, 0.02, (2, length))
    jitter_T -= jitter_T.mean(1, keepdims=True)
    old, engine = logp_T.copy(), np.zeros_like(logp_T)
    old[-length:] += jitter_T[0] - AHEAD[ref.group % 4]
    engine[-length:] = old[-length:] + jitter_T[1] - (distance / length if is_sum else distance)
    return old, engine


def update_of(
    trainer: Any, case: str, refs: Sequence[SampleRef], groups: dict[int, SampleGroup]
) -> dict[str, float]:
    """A step of one optimizer update, as a run plans it, after an observation of the old policy."""
    layout, rules = trainer.layout, CASES[case][0]
    (plan,) = plan_updates(
        refs, updates=1, dp=layout.dp, token_budget=BUDGET if layout.max_cp == 1 else LONGEST // layout.max_cp,
        aggregation=rules.aggregation, work=float, align=layout.tokens_align, multiple=layout.batch_multiple,
        max_cp=layout.max_cp,
    )  # fmt: skip
    micro_batches: tuple[MicroBatch, ...] = plan.micro_batches[layout.coords(trainer.rank).dp]
    flat, old_logp, rank_groups = (
        [ref for batch in micro_batches for ref in batch],
        None,
        dict(groups),
    )
    outputs = trainer.token_outputs(train_sequences(micro_batches, groups, rules.aggregation))
    if outputs is not None:
        old_logp = []
        for ref, logp_T in zip(flat, outputs, strict=True):
            old_T, engine_T = seen_by_engine(ref, logp_T, case)
            old_logp.append(old_T)
            (sample,) = groups[ref.group].samples
            sample = with_row(sample, engine_logp_T=engine_T[-ref.response_length :])
            rank_groups[ref.group] = replace(groups[ref.group], samples=(sample,))
    logprobs = Logprobs([old_logp], [None], [None], None)
    call = TrainCall(
        "gspo", [replace(plan, micro_batches=(micro_batches,))], rank_groups, LR, logprobs
    )
    with patch.object(trainer, "_hyperparameters", lambda _: rules):
        (stats,) = trainer.train(call)
    return numbers(stats) | {"samples": len(flat)}


def train(trainer: Any) -> dict[str, Any]:
    """Of each case an update of many samples, and one of a single sample, without any for the other ranks.

    Then an update that observes the old policy itself, of samples whose engine was sure of every token: no ratio is
    above 1, and so none is within the bounds.
    """
    groups, refs = samples(12)
    with recorded(trainer) as learning:
        metrics = [
            update_of(trainer, case, part, groups) for case in CASES for part in (refs, refs[1:2])
        ]
    (plan,) = plan_updates(
        refs, updates=1, dp=1, token_budget=BUDGET, aggregation="token_mean", work=float, multiple=2
    )
    rules = replace(PENALISED, rollout_correction="icepop", rollout_correction_low=1.5)
    with patch.object(trainer, "_hyperparameters", lambda _: rules):
        (nothing,) = trainer.train(TrainCall("gspo", [plan], groups, LR, state=None))
    return {"metrics": metrics, "learning": learning, "nothing": numbers(nothing)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCAB_SIZE, num_hidden_layers=4
    )


@pytest.fixture(scope="module")
def one_rank(path: Path) -> dict[str, Any]:
    (result,) = run_world(recipe(path, TrainLayout(1, 1, 1, 1)), train)
    for metrics in result["metrics"][::2]:
        assert 0 < metrics["clipped"] < 1, "both sides of the clip are to be seen"
    for metrics in result["metrics"][2::2]:
        assert 0 < metrics["rollout_correction_masked"] < 1, "and of the mismatch's bound"
    check_denominators(result["metrics"][::2])
    return result


def check_denominators(metrics: Sequence[dict[str, float]]) -> None:
    """What is kept is what the bound says: of the far samples, or of every third token and of sample 5, nothing."""
    _, refs = samples(12)
    far = [ref.group // 2 % 2 == 1 for ref in refs]
    tokens = sum(ref.response_length for ref in refs)
    of_near = sum(ref.response_length for ref, is_far in zip(refs, far, strict=True) if not is_far)
    by_token = sum(
        sum(t % 3 != 1 for t in range(ref.response_length)) for ref in refs if ref.group != 5
    )
    assert [update["tokens"] for update in metrics] == [
        tokens,
        of_near,
        of_near,
        by_token,
        by_token,
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sequences_objective_equals_one_ranks(
    path: Path, one_rank: dict[str, Any], name: str
) -> None:
    layout = LAYOUTS[name]
    ranks = run_world(recipe(path, layout), train)
    counts = [[metrics.pop("samples") for metrics in rank["metrics"]] for rank in ranks]
    if layout.dp > 1:
        of_ranks = {tuple(of_rank[1::2]) for of_rank in counts}
        assert of_ranks == {(0,) * len(CASES), (1,) * len(CASES)}, (
            "a rank has nothing to learn from"
        )
    for rank in ranks:
        for rank_metrics, expected in zip(rank["metrics"], one_rank["metrics"], strict=True):
            assert rank_metrics == pytest.approx(
                {stat: expected[stat] for stat in rank_metrics}, rel=1e-4, abs=1e-5
            )
        for stat, value in {
            "loss": 0.0,
            "grad_norm": 0.0,
            "tokens": 0.0,
            "rollout_correction_masked": 1.0,
        }.items():
            assert rank["nothing"].get(stat, value) == value, (
                "where nothing is kept, nothing is learnt"
            )
    # every other step is of one sample, which has few of the tokens
    check_learning([rank["learning"] for rank in ranks], [one_rank["learning"]], least=0.5)

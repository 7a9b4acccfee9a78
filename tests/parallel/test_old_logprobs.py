"""The pass before a step's updates may leave out what the first update's own pass gives, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megarl.algos import Algorithm
from megarl.algos.losses import DIFF
from megarl.algos.statistics import LOSS, Statistics
from megarl.config import AlgorithmConfig
from megarl.placement.train_layout import TrainLayout
from megarl.training.batching import SampleRef, Update, plan_updates
from megarl.training.calls import TrainCall
from megarl.training.row_diffs import RowDiffs
from megarl.types import Row, SampleGroup
from tests.parallel.adapters import lora_recipe, set_b
from tests.parallel.conftest import write_checkpoint
from tests.parallel.test_fused_adam import HALVES
from tests.parallel.test_parity import RECOMPUTE
from tests.parallel.worlds import recipe, run_world, trained
from tests.samples.responses import random_group, with_row

pytestmark = pytest.mark.slow

VOCAB_SIZE, LAYERS, EXPERTS, TOP_K, UPDATES, LR = 100, 4, 8, 2, 3, 1e-2
# layout, keys of train, and whether there are adapters
WORLDS: dict[str, tuple[TrainLayout, dict[str, Any], bool]] = {
    "one rank": (TrainLayout(1, 1, 1, 1), {}, False),
    "vpp2, r2": (TrainLayout(2, 1, 2, 1, vpp=2), {"replay": "r2"}, False),
    "cp2 ep2, r3": (TrainLayout(2, 1, 1, 2, cp=2), {"replay": "r3"}, False),
    "tp2 dp2, r2, full recompute": (
        TrainLayout(4, 2, 1, 1),
        {"replay": "r2", "megatron": RECOMPUTE["full"]},
        False,
    ),
    "pp2 dp2, lora": (TrainLayout(4, 1, 2, 1), {}, True),
    "bfloat16, merged lora, r3, small states": (
        TrainLayout(1, 1, 1, 1),
        {"replay": "r3", "dtype": "bfloat16", "optimizer": HALVES},
        True,
    ),
}
# algorithm -> its overrides, and how many updates the pass is of
ALGORITHMS: dict[str, tuple[dict[str, Any], int]] = {
    "grpo": ({"rollout_correction": "tis"}, UPDATES - 1),
    "gspo": ({}, UPDATES - 1),
    "rloo": ({}, UPDATES - 1),
    "dapo": ({"rollout_correction": "icepop"}, UPDATES),
}


# what divides ranks, and what a model's updates are computed with, is the same for every algorithm
EVERYWHERE = ("grpo", "dapo")

# a pass of all samples
EVERY_UPDATE = patch.object(
    Algorithm, "updates_with_pass", lambda _, __, num_updates: range(num_updates)
)


@dataclass(frozen=True)
class Step:
    """What a rank has after a step; passes: of how many updates the policy computed the logprobs before it."""

    passes: int
    metrics: list[Statistics]
    weights: dict[str, torch.Tensor]
    rows: RowDiffs


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS
    )


def sampled() -> tuple[dict[int, SampleGroup], list[SampleRef]]:
    """Groups of four samples, near enough to the policy for corrections, whose engine chose experts at random."""
    rng = np.random.default_rng(3)
    groups, refs = {}, []
    for number in range(UPDATES):
        lengths = rng.integers(2, 12, 4).tolist()
        group = random_group(rng, VOCAB_SIZE, lengths)
        samples = []
        for index, (sample, length) in enumerate(zip(group.samples, lengths, strict=True)):
            experts = [rng.permutation(EXPERTS)[:TOP_K] for _ in range((4 + length) * LAYERS)]
            experts_TMK = np.reshape(experts, (4 + length, LAYERS, TOP_K)).astype(np.uint8)
            logp_T = rng.normal(-4.5, 1.0, length).astype(np.float32)
            samples.append(with_row(sample, engine_logp_T=logp_T, routed_experts=experts_TMK))
            refs.append(SampleRef(number, index, 5 + length, length, advantage=(-1.0) ** index))
        groups[number] = SampleGroup(group.prompt, tuple(samples), group.rewards_G, group.correct_G)
    return groups, refs


def call_of(trainer: Any, algorithm: str) -> TrainCall[Any]:
    """A step of several updates, as a run plans it."""
    layout = trainer.layout
    groups, refs = sampled()
    plans = plan_updates(
        refs, updates=UPDATES, dp=layout.dp, token_budget=32, aggregation="token_mean", work=float,
        align=layout.tokens_align, multiple=layout.batch_multiple,
    )  # fmt: skip
    dp = layout.coords(trainer.rank).dp
    share = [
        Update((plan.micro_batches[dp],), plan.denominator, plan.tokens, plan.loss_tokens)
        for plan in plans
    ]
    return TrainCall(algorithm, share, groups, LR, state=None)


def rows_by_update(trainer: Any) -> list[list[Row]]:
    """The rows of this rank's share of each update, in the order of its passes."""
    call = call_of(trainer, "grpo")
    return [
        [call.groups[ref.group].samples[ref.sample].only_row for batch in batches for ref in batch]
        for update in call.updates
        for batches in update.micro_batches
    ]


def set_algorithm(trainer: Any, name: str, **changes: Any) -> None:
    """Have the trainer's recipe name this algorithm, without a reference."""
    algorithm = AlgorithmConfig(name=name, kl_coefficient=0.0, **changes)
    trainer._has_reference = False
    trainer._recipe = trainer._recipe.model_copy(update={"algorithm": algorithm})


def from_start(trainer: Any) -> Callable[[str], Step]:
    """A function that trains a step of an algorithm, always from the state that the trainer has now."""
    if trainer._model.adapters:
        set_b(trainer)
    num_bytes, small = trainer.begin_copy()
    state = trainer.copied_bytes(0, num_bytes).copy()
    trainer.end_copy()

    def train(algorithm: str) -> Step:
        trainer.begin_restore(num_bytes)
        trainer.restore_bytes(0, state)
        trainer.finish_restore(small)
        with patch.object(trainer, "outputs_by_share", wraps=trainer.outputs_by_share) as outputs:
            metrics = trainer.train(call_of(trainer, algorithm))
        weights = {name: weight.clone() for name, weight in trained(trainer).items()}
        (shares, *_), _ = outputs.call_args
        return Step(len(shares), metrics, weights, trainer.row_diffs())

    return train


def differences(step: Step, expected: Step, tolerance: float) -> list[str]:
    """What differs between two steps from the same state by more than a part of it, or for weights of the rate."""
    differing = [
        name
        for name, weight in step.weights.items()
        if float((weight - expected.weights[name]).abs().mean()) > tolerance * LR
    ]
    for update, other in zip(step.metrics, expected.metrics, strict=True):
        assert update.keys() == other.keys()
        differing += [
            statistic.name
            for statistic, parts in update.items()
            if parts != pytest.approx(other[statistic], rel=tolerance, abs=tolerance)
        ]
    if not np.allclose(step.rows.diffs, expected.rows.diffs, rtol=tolerance, atol=0.0):
        differing.append("the rows' differences")
    if bool(step.rows.by_version) != bool(len(step.rows.diffs)):
        differing.append("the versions")
    return differing


def skip(trainer: Any, algorithms: Sequence[str]) -> dict[str, Any]:
    """By algorithm, how a step whose pass leaves out what it may differs from one whose pass is of all samples."""
    train = from_start(trainer)
    has_factors = trainer._model.adapters and not trainer._model.adapters.are_in_weights
    facts: dict[str, Any] = {}
    for algorithm in algorithms:
        changes, _ = ALGORITHMS[algorithm]
        set_algorithm(trainer, algorithm, **changes)
        with EVERY_UPDATE:
            expected = train(algorithm)
        step = train(algorithm)
        facts[algorithm] = (
            (expected.passes, step.passes),
            differences(step, expected, 1e-4 if has_factors else 0.0),
            [{statistic.name for statistic in update} for update in step.metrics],
        )
    return facts


@pytest.mark.parametrize("name", WORLDS)
def test_the_first_updates_own_pass_gives_its_old_logprobs(path: Path, name: str) -> None:
    """Weights, statistics and the rows' differences are equal to the last bit, routing replay's among them.

    With adapters beside the weights a forward pass is rounded in another way where it has no gradient.
    """
    layout, train, lora = WORLDS[name]
    made = lora_recipe(path, layout, **train) if lora else recipe(path, layout, **train)
    algorithms = tuple(ALGORITHMS) if name == "one rank" else EVERYWHERE
    ranks = run_world(made, skip, algorithms)
    for facts in ranks:
        for algorithm in algorithms:
            passes, differing, _ = facts[algorithm]
            assert passes == (UPDATES, ALGORITHMS[algorithm][1])
            assert differing == [], algorithm
    first, *others = ranks[-1]["grpo"][2]
    assert ("replay/differing_share" in first) == ("replay" in train)
    assert all(DIFF.name in update for update in (first, *others))


def bypass(trainer: Any) -> dict[str, Any]:
    """A step with the engine's logprobs as the old ones, and one whose pass is made to return these."""
    train = from_start(trainer)
    engine_logp = [
        [np.concatenate(([0.0] * 5, row.engine_logp_T)).astype(np.float32) for row in rows]
        for rows in rows_by_update(trainer)
    ]
    set_algorithm(trainer, "grpo")
    plain = train("grpo")
    flat = [logp_T for of_update in engine_logp for logp_T in of_update]
    returned = flat if trainer._model.is_last_stage else None
    with EVERY_UPDATE, patch.object(trainer, "token_outputs", return_value=returned):
        expected = train("grpo")
    set_algorithm(trainer, "grpo", old_logprobs="engine")
    step = train("grpo")
    return {
        "passes": step.passes,
        "differing": differences(
            replace(step, metrics=[], rows=expected.rows), replace(expected, metrics=[]), 0.0
        ),
        "diffs": [[update.get(DIFF) for update in one.metrics] for one in (step, plain)],
        "losses": [[update.get(LOSS) for update in one.metrics] for one in (step, expected)],
        "rows": (step.rows.diffs, plain.rows.diffs),
    }


@pytest.mark.parametrize("name", ["one rank", "pp2 dp2, lora"])
def test_the_engines_logprobs_take_no_pass_and_are_compared_with_the_first_updates(
    path: Path, name: str
) -> None:
    layout, _, lora = WORLDS[name]
    ranks = run_world(lora_recipe(path, layout) if lora else recipe(path, layout), bypass)
    for facts in ranks:
        assert facts["passes"] == 0 and facts["differing"] == []
        assert facts["losses"][0] == facts["losses"][1]
        mine, plain = facts["rows"]
        assert np.array_equal(mine, plain[: len(mine)]) and len(mine) < len(plain) or not len(plain)
    (first, *later), (plain_first, *_) = ranks[-1]["diffs"]
    assert first is not None and first == plain_first and later == [None] * (UPDATES - 1)

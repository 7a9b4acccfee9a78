"""Rewards of single tokens, from logprobs of real models: KL penalties, and PRIME's process rewards."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megarl.config import AlgorithmConfig, ReferenceConfig
from megarl.device import Address
from megarl.placement.roles import is_reporting_rank
from megarl.placement.train_layout import TrainLayout
from megarl.training.batching import SampleRef, TokenValues, Update, key_of, plan_updates
from megarl.training.calls import TokenValuesCall, TrainCall
from megarl.types import SampleGroup
from tests.parallel.conftest import write_checkpoint
from tests.parallel.precision import within
from tests.parallel.worlds import numbers, recipe, role_of, run_ranks
from tests.samples.responses import random_group

pytestmark = pytest.mark.slow

ONE_RANK = TrainLayout(1, 1, 1, 1)
LAYOUTS = {
    "dp2": TrainLayout(2, 1, 1, 1),
    "tp2 pp2": TrainLayout(4, 2, 2, 1),
    "cp2 ep2": TrainLayout(2, 1, 1, 2, cp=2),
    "cp auto": TrainLayout(4, 1, 1, 1, max_cp=2),
}
VOCAB_SIZE, GROUPS, LR = 100, 3, 1e-3
ALGORITHMS = ("ppo", "reinforce_pp", "reinforce_pp_baseline", "prime", "on_policy_distillation")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy, and another model of the same shape."""
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}
    policy, teacher = (tmp_path_factory.mktemp(name) for name in ("policy", "teacher"))
    return write_checkpoint(policy, **sizes), write_checkpoint(
        teacher, **sizes, initializer_range=0.05
    )


def batch() -> tuple[list[SampleGroup], list[SampleRef]]:
    """Groups of 1, 2 and 3 samples of 1 to 6 tokens, every other one correct."""
    rng = np.random.default_rng(9)
    groups, refs = [], []
    for number in range(GROUPS):
        lengths = rng.integers(1, 7, number + 1).tolist()
        groups.append(random_group(rng, VOCAB_SIZE, lengths))
        refs += [
            SampleRef(
                number,
                i,
                5 + length,
                length,
                reward=sign,
                advantage=sign,
                is_correct=sign > 0,
            )
            for i, (length, sign) in enumerate(zip(lengths, cycle([1.0, -1.0]), strict=False))
        ]
    return groups, refs


def plan(layout: TrainLayout, dp_rank: int, updates: int, outcomes: bool = True) -> list[Update]:
    """This data-parallel rank's part of the batch."""
    refs = [ref if outcomes else replace(ref, advantage=0.0) for ref in batch()[1]]
    budget = 24 if layout.max_cp == 1 else 8  # of 6 to 11 tokens some are longer
    plans = plan_updates(
        refs, updates=updates, dp=layout.dp, token_budget=budget, aggregation="sequence_mean", work=float,
        align=layout.tokens_align, max_cp=layout.max_cp,
    )  # fmt: skip
    return [
        Update(
            (update.micro_batches[dp_rank],), update.denominator, update.tokens, update.loss_tokens
        )
        for update in plans
    ]


def token_values_of(refs: list[SampleRef], seed: int) -> TokenValues:
    """Token values as an auxiliary model might compute them."""
    return {
        key_of(ref): np.random.default_rng([seed, *key_of(ref)])
        .normal(size=ref.response_length)
        .astype(np.float32)
        for ref in refs
    }


def reports(rank: Any) -> bool:
    """Whether the controller has it return token values."""
    return is_reporting_rank(rank.layout, rank.rank)


def as_by_ray(state: Any) -> Any:
    """A rank's state as it comes back through Ray's object store: its arrays cannot be written to."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=[bytes(buffer.raw()) for buffer in buffers])


def pay(rank: int, meet: Address, made: Any) -> dict[str, Any]:
    """One step with each algorithm, one after the other; PPO's critic gets the KL penalties first."""
    from megarl.training.policy import PolicyRank

    trainer: Any = PolicyRank(rank, role_of(made), meet)
    layout, (groups, refs) = trainer.layout, batch()
    at, numbered = layout.coords(rank), dict(enumerate(groups))
    readers = (
        [frozenset(map(key_of, refs[:3])), frozenset(map(key_of, refs[3:]))]
        if reports(trainer)
        else []
    )
    results: dict[str, Any] = {}
    for algorithm in ALGORITHMS:
        share = plan(layout, at.dp, updates=2 if algorithm in ("ppo", "prime") else 1)
        values, state = [token_values_of(refs[:2], 4), token_values_of(refs[2:], 4)], None
        if algorithm == "ppo":
            call = TokenValuesCall("ppo", share, numbered, readers)
            *results["penalties"], state = trainer.compute_logprobs(call)
        updates = trainer.train(TrainCall(algorithm, share, numbered, LR, state, values))
        results[algorithm] = [numbers(update) for update in updates]
    return results


def distil(rank: int, meet: Address, made: Any) -> dict[str, Any]:
    """Two models' log-probabilities of every token, and one step of distillation."""
    from megarl.parallel import host_offload
    from megarl.training.policy import PolicyRank
    from megarl.training.train_sequences import train_sequences

    trainer: Any = PolicyRank(rank, role_of(made), meet)
    groups, _ = batch()
    (update,) = plan(ONE_RANK, 0, 1, outcomes=False)
    share = train_sequences(update.micro_batches[0], dict(enumerate(groups)), "token_mean")
    masks = [sequence.loss_mask_T for row in share for sequence in row]
    student = trainer.token_outputs(share)
    with host_offload.swapped_in(trainer.params(), trainer._reference):
        teacher = trainer.token_outputs(share)
    diffs = [(a - b)[m] for a, b, m in zip(student, teacher, masks, strict=True)]
    numbered = dict(enumerate(groups))
    call = TrainCall("on_policy_distillation", [update], numbered, LR, state=None)
    (metrics,) = trainer.train(call)
    return {
        "diff": np.concatenate(diffs).sum() / update.denominator,
        "loss": numbers(metrics)["loss"],
    }


def world(
    models: tuple[Path, Path],
    layout: TrainLayout,
    work: Any,
    algorithm: str = "grpo",
    replay: str = "off",
) -> list[Any]:
    changes = {
        "reference": ReferenceConfig(use=True, path=str(models[1])),
        "algorithm": AlgorithmConfig(
            name=algorithm, prime_beta=0.5 if algorithm == "prime" else None
        ),
    }
    run_recipe = recipe(models[0], layout, replay=replay).model_copy(update=changes)
    return run_ranks(layout.world_size, work, run_recipe)


@pytest.fixture(scope="module")
def one_rank(models: tuple[Path, Path]) -> dict[str, Any]:
    return world(models, ONE_RANK, pay)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_pays_what_one_rank_does(
    models: tuple[Path, Path], one_rank: dict[str, Any], name: str
) -> None:
    layout = LAYOUTS[name]
    ranks = world(models, layout, pay)
    for reader, expected in enumerate(one_rank["penalties"]):
        of_ranks = [rank["penalties"][reader] for rank in ranks if rank["penalties"]]
        assert sorted(key for penalties in of_ranks for key in penalties) == sorted(expected), (
            "each sample once"
        )
        for penalties in of_ranks:
            for key, value_T in penalties.items():
                np.testing.assert_allclose(value_T, expected[key], atol=within(1e-5))
    assert any(np.abs(value_T).max() > 1e-4 for value_T in one_rank["penalties"][0].values())
    for algorithm in ALGORITHMS:
        for rank in ranks:
            for metrics, reference in zip(rank[algorithm], one_rank[algorithm], strict=True):
                assert metrics == pytest.approx(
                    {key: reference[key] for key in metrics}, rel=within(2e-4), abs=1e-6
                ), algorithm


def reuse(rank: int, meet: Address, made: Any) -> list[Any]:
    """Metrics of PPO's updates at learning rate 0: with the logprobs of a call before, and without."""
    from megarl.training.policy import PolicyRank

    trainer: Any = PolicyRank(rank, role_of(made), meet)
    groups, refs = batch()
    share, numbered = plan(trainer.layout, 0, updates=2), dict(enumerate(groups))
    state = trainer.compute_logprobs(TokenValuesCall("ppo", share, numbered)).state
    call = TrainCall("ppo", share, numbered, 0.0, as_by_ray(state), [token_values_of(refs, 4)])
    with patch.object(trainer, "token_outputs", side_effect=AssertionError("it computes again")):
        metrics = trainer.train(call)
    return [metrics, trainer.train(replace(call, state=None))]


@pytest.mark.parametrize("replay", ["off", "r2"])
def test_logprobs_of_a_call_before_spare_the_computation_and_change_nothing(
    models: tuple[Path, Path], replay: str
) -> None:
    from megarl.training.routing_statistics import DIFFERING_SHARE

    for observed, computed in world(models, LAYOUTS["tp2 pp2"], reuse, replay=replay):
        assert observed == computed
        assert (DIFFERING_SHARE in observed[0]) == (replay == "r2")


def test_distillation_is_the_reverse_kl_of_each_token(models: tuple[Path, Path]) -> None:
    """On the policy's own samples, at the first update: E[log student - log teacher]."""
    (result,) = world(models, ONE_RANK, distil, "on_policy_distillation")
    assert result["loss"] == pytest.approx(result["diff"], rel=1e-5)
    assert abs(result["diff"]) > 0.01


def learn_outcomes(rank: int, meet: Address, made: Any) -> dict[str, Any]:
    """Three steps of PRIME's model, each on its own process rewards."""
    from megarl.training.auxiliary import AuxiliaryRank

    model: Any = AuxiliaryRank(rank, role_of(made, "critic"), meet, "process_rewards")
    groups, refs = batch()
    share = plan(model.layout, model.layout.coords(rank).dp, updates=2)
    numbered = dict(enumerate(groups))
    readers = [frozenset(map(key_of, refs))] if reports(model) else []
    results = {"process_rewards": [], "metrics": []}
    for _ in range(3):
        *process_rewards, state = model.values(TokenValuesCall("prime", share, numbered, readers))
        results["process_rewards"] += process_rewards or [{}]
        updates = model.train(TrainCall("prime", share, numbered, LR, as_by_ray(state)))
        results["metrics"].append([numbers(update) for update in updates])
        model.offload()
        model.onload()
    return results


@pytest.fixture(scope="module")
def outcomes_of_one_rank(models: tuple[Path, Path]) -> dict[str, Any]:
    """At first all process rewards are 0; then correct responses are worth more."""
    (result,) = world(models, ONE_RANK, learn_outcomes, "prime")
    _, refs = batch()
    assert all(not value_T.any() for value_T in result["process_rewards"][0].values())
    assert result["metrics"][0][0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    total = {ref.is_correct: 0.0 for ref in refs}
    for ref in refs:
        total[ref.is_correct] += result["process_rewards"][2][key_of(ref)].sum()
    assert total[True] > 0 > total[False]
    return result


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_learns_the_process_rewards_of_one_rank(
    models: tuple[Path, Path], outcomes_of_one_rank: dict[str, Any], name: str
) -> None:
    """The process rewards of three steps are the same in any layout as on one rank.

    Unverified on a GPU.

    training/auxiliary.py: the implicit reward model's own reference: pinned weights that change places with
    parameters which are put away between phases. To check first: the process rewards equal those of the CPU.
    """
    expected, ranks = outcomes_of_one_rank, world(models, LAYOUTS[name], learn_outcomes, "prime")
    for step in range(3):
        merged = {
            key: value_T for rank in ranks for key, value_T in rank["process_rewards"][step].items()
        }
        assert merged.keys() == expected["process_rewards"][step].keys()
        for key, value_T in merged.items():
            np.testing.assert_allclose(
                value_T, expected["process_rewards"][step][key], atol=within(1e-4)
            )
        for rank in ranks:
            for metrics, other in zip(
                rank["metrics"][step], expected["metrics"][step], strict=True
            ):
                assert metrics == pytest.approx(
                    {key: other[key] for key in metrics}, rel=within(1e-3), abs=1e-5
                )

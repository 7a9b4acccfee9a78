"""Episodes are learnt from as samples, whatever their rows: cutting an episode into rows changes nothing.

What is compared is of each trained token of each episode: its advantage, its weight and what else its loss reads; and
the denominators, and the loss sums of the real losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import ALGORITHMS
from megarl.algos.losses import outcome_loss, turn_diffs, value_loss
from megarl.algos.rollout_correction import ROLLOUT_CORRECTION_BOUNDS, drops
from megarl.controller.samples import samples_of
from megarl.parallel.packing import PackedRow, Split, pack
from megarl.samples.summaries import summary
from megarl.tracking.metrics import update_metrics
from megarl.training import kept_tokens
from megarl.training.auxiliary import critic_returns
from megarl.training.batching import (
    Key,
    SampleRef,
    TokenValues,
    Update,
    key_of,
    plan_updates,
    refs_of,
    spread,
)
from megarl.training.credit import with_token_advantages
from megarl.training.train_sequences import train_sequence, train_sequences
from megarl.types import (
    Aggregation,
    FloatArray,
    Hyperparameters,
    Prompt,
    SampleGroup,
    TrainSequence,
)
from tests.samples.responses import with_row
from tests.training.episodes import cut, episode

VERSION, LONGEST, BUDGET, ROOMY = 4, 40, 72, 10_000
AGGREGATIONS: list[Aggregation] = ["token_mean", "sequence_mean", "sequence_sum", "constant"]
ALONE = {"sum_over_all": lambda one: one, "max_over_all": lambda one: one}
# by seed, group, sample and token
NUMBERS = np.random.default_rng(0).normal(size=(7, 4, 4, 40)).astype(np.float32)
Tokens = tuple[list[tuple[int, int]], np.ndarray]  # group and sample of each token, and its values


def groups_of(seed: int, turns: Sequence[int], per_group: int = 3) -> list[SampleGroup]:
    """Episodes of so many turns, each of one row; the last of a group is a greedy one."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, start in enumerate(range(0, len(turns), per_group)):
        group_turns = turns[start : start + per_group]
        prompt = Prompt(
            str(number), "", tuple(rng.integers(0, 99, rng.integers(1, 6)).tolist()), "7"
        )
        samples = [
            episode(prompt, rng, count, pays=bool(rng.integers(2))) for count in (*group_turns, 2)
        ]
        samples[-1] = replace(samples[-1], is_baseline=True)
        rewards_G = (rng.integers(0, 3, len(samples)) / 2).astype(np.float32)
        groups.append(SampleGroup(prompt, tuple(samples), rewards_G, rewards_G > 0.5))
    return groups


def cut_up(groups: Sequence[SampleGroup], seed: int) -> list[SampleGroup]:
    """The same episodes, cut before turns that are drawn at random; the first one before its second turn."""
    rng = np.random.default_rng([seed, 1])

    def of_group(number: int, group: SampleGroup) -> SampleGroup:
        samples = [
            cut(
                sample,
                [*rng.integers(0, 6, 3).tolist(), *([1] if (number, at) == (0, 0) else [])],
            )
            for at, sample in enumerate(group.samples)
        ]
        return replace(group, samples=tuple(samples))

    return [of_group(number, group) for number, group in enumerate(groups)]


@dataclass(frozen=True)
class Step:
    """What a step learns from: its plan, and the sequences of all ranks one rank after the other."""

    plans: list[Update]
    refs: list[SampleRef]
    sequences: list[TrainSequence]
    hyperparameters: Hyperparameters


def on_tokens(refs: Sequence[SampleRef], groups: Sequence[SampleGroup], seed: int) -> TokenValues:
    """A number for each trained token, by its place in the episode; on the others one that may not be read."""
    values: TokenValues = {}
    for ref in refs:
        rows = groups[ref.group].samples[ref.sample].rows
        before, row = sum(earlier.num_trained for earlier in rows[: ref.row]), rows[ref.row]
        numbers_T = NUMBERS[seed, ref.group, ref.sample, before : before + row.num_trained]
        values[key_of(ref)] = np.full(ref.response_length, np.nan, np.float32)
        values[key_of(ref)][row.trained_T] = numbers_T
    return values


def step_of(
    name: str,
    groups: Sequence[SampleGroup],
    *,
    dp: int = 1,
    updates: int = 1,
    budget: int = ROOMY,
    **changes: Any,
) -> Step:
    row = ALGORITHMS[name]
    hparams = replace(
        row.hyperparameters, **({"positive_nll": 0.5} if row.surrogate else {}), **changes
    )
    # 0.05 is 0 for so few tokens
    hparams = replace(hparams, lambda_alpha=1.0 if hparams.lambda_alpha else 0.0)
    refs = samples_of([summary(group) for group in groups], name, version=VERSION)
    plans = plan_updates(
        refs, updates=updates, dp=dp, token_budget=budget, aggregation=hparams.aggregation, longest_response=LONGEST,
        work=lambda length: float(length**2),
    )  # fmt: skip
    shares = [
        replace(plan, micro_batches=(plan.micro_batches[rank],))
        for rank in range(dp)
        for plan in plans
    ]
    uncredited = [
        sequence
        for share in shares
        for batch in train_sequences(
            share.micro_batches[0],
            dict(enumerate(groups)),
            hparams.aggregation,
            share.nll_weight(hparams.positive_nll),
        )
        for sequence in batch
    ]
    rank_refs = refs_of(shares)
    values, pays = on_tokens(rank_refs, groups, 1), on_tokens(rank_refs, groups, 2)
    penalties = None
    if hparams.pays_kl:
        penalties = [spread(pays[key_of(ref)], ref) for ref in rank_refs]
    sequences = with_token_advantages(
        row, hparams, rank_refs, uncredited, values, penalties, **ALONE
    )
    return Step(plans, rank_refs, sequences, hparams)


def tokens_of(step: Step, extra: Sequence[Sequence[FloatArray]] = ()) -> Tokens:
    """Of each trained token, sample by sample, everything that a loss reads of it. extra: arrays of each sequence."""
    samples, values = [], []
    for place in sorted(range(len(step.refs)), key=lambda place: key_of(step.refs[place])):
        ref, sequence = step.refs[place], step.sequences[place]
        nothing_T, turn_T = (
            np.zeros(ref.length),
            sequence.loss_mask_T if sequence.turn_T is None else sequence.turn_T,
        )
        rows = [
            sequence.loss_weight_T,
            sequence.engine_logp_T,
            sequence.advantage_T,
            sequence.nll_weight_T,
            sequence.is_stale_T,
            turn_T,
        ]
        rows = np.array(
            [
                nothing_T if row_T is None else row_T
                for row_T in (*rows, *(of[place] for of in extra))
            ]
        )
        assert not rows[:, ~sequence.loss_mask_T].any(), "0 where nothing is trained on"
        of_sample = np.full((ref.length, 2), [sequence.reward, sequence.outcome])
        values.append(
            np.column_stack([sequence.token_ids_T, *rows, of_sample])[sequence.loss_mask_T]
        )
        samples += [key_of(ref)[:2]] * len(values[-1])
    return samples, np.concatenate(values)


def same(mine: Tokens, other: Tokens) -> None:
    assert mine[0] == other[0]
    np.testing.assert_allclose(mine[1], other[1], rtol=1e-5, atol=1e-6)


TURNS = st.lists(st.integers(1, 5), min_size=2, max_size=7)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=40)
@given(
    turns=TURNS, seed=st.integers(0, 2**20), dp=st.integers(1, 3), updates=st.integers(1, 2),
    budget=st.sampled_from([BUDGET, ROOMY]), aggregation=st.sampled_from([None, *AGGREGATIONS]),
)  # fmt: skip
def test_cutting_an_episode_into_rows_changes_nothing(
    name, turns, seed, dp, updates, budget, aggregation
):
    """Nor do ranks, updates, and micro-batches in which the rows of an episode do not fit together."""
    groups = groups_of(seed, turns)
    options: dict[str, Any] = {"aggregation": aggregation} if aggregation else {}
    whole = step_of(name, groups, updates=updates, **options)
    rows = step_of(name, cut_up(groups, seed), dp=dp, updates=updates, budget=budget, **options)
    same(tokens_of(rows), tokens_of(whole))
    for update, other in zip(rows.plans, whole.plans, strict=True):
        assert (update.denominator, update.loss_tokens, update.correct_tokens) == (
            other.denominator, other.loss_tokens, other.correct_tokens,
        )  # fmt: skip
        samples = [
            {key_of(ref)[:2] for hand in plan.micro_batches for b in hand for ref in b}
            for plan in (update, other)
        ]
        assert samples[0] == samples[1], "all rows of a sample are in its update"
        ranks = [
            {key_of(ref)[:2] for batch in hand for ref in batch} for hand in update.micro_batches
        ]
        assert sum(map(len, ranks)) == len(set().union(*ranks)), "and on one rank"
        assert all(
            sum(ref.length for ref in batch) <= budget
            for hand in update.micro_batches
            for batch in hand
        )
        if budget == ROOMY:
            batches = [
                {key_of(ref)[:2] for ref in batch}
                for hand in update.micro_batches
                for batch in hand
            ]
            assert sum(map(len, batches)) == len(set().union(*batches)), "and in one micro-batch"


@settings(max_examples=20)
@given(turns=TURNS, seed=st.integers(0, 2**20))
def test_a_critics_returns_are_of_the_whole_episode(turns, seed):
    groups, tokens = groups_of(seed, turns), []
    for variant in (groups, cut_up(groups, seed)):
        step = step_of("ppo", variant)
        values, pays = on_tokens(step.refs, variant, 1), on_tokens(step.refs, variant, 2)
        old_values, penalties = (
            [spread(token_values[key_of(ref)], ref) for ref in step.refs]
            for token_values in (values, pays)
        )
        hparams = replace(step.hyperparameters, critic_lambda=0.7, gamma=0.9)
        tokens.append(
            tokens_of(step, [critic_returns(step.sequences, old_values, penalties, hparams)])
        )
    same(tokens[1], tokens[0])


def losses(
    name: str, groups: Sequence[SampleGroup], budget: int, dp: int, **changes: Any
) -> list[Any]:
    """Loss sum / denominator of the row's own loss, the gradient of each trained token, and the gaps by turns.

    Of an auxiliary model's too, where the row has one. Everything of a masked token is not a number.
    """
    step = step_of(name, groups, budget=budget, dp=dp, **changes)
    outputs = {seed: on_tokens(step.refs, groups, seed) for seed in (3, 4, 5, 6)}
    by_key, plan = of_kept(step, outputs[4])
    row = ALGORITHMS[name]
    total, auxiliary, diffs = 0.0, 0.0, {}
    gradient: dict[Key, FloatArray] = {}
    for refs in [batch for hand in plan.micro_batches for batch in hand if batch]:
        arrays = {
            seed: [spread(of[key_of(ref)], ref) for ref in refs] for seed, of in outputs.items()
        }
        sequences = [by_key[key_of(ref)] for ref in refs]
        packed: PackedRow = pack(
            sequences, arrays[4], arrays[5], arrays[6], arrays[6], split=Split(), device="cpu"
        )
        logp_T = of_sequences(packed, arrays[3]).requires_grad_()
        assert packed.old_logp_T is not None
        loss, _ = row.loss(step.hyperparameters)(
            logp_T, logp_T.detach() ** 2, packed.old_logp_T, packed.targets
        )
        if row.critic == "process_rewards":
            auxiliary += float(outcome_loss(logp_T.detach(), packed.targets, beta=0.05)[0])
        if row.critic == "values":
            auxiliary += float(value_loss(logp_T.detach(), packed.targets, value_clip=0.2)[0])
        loss.backward()
        total += float(loss.detach())
        assert logp_T.grad is not None
        for ref, start in zip(refs, packed.starts, strict=True):
            gradient[key_of(ref)] = np.pad(
                logp_T.grad.numpy()[start : start + ref.length - 1], (1, 0)
            )
        for statistic, value in turn_diffs(packed.old_logp_T, packed.targets).items():
            diffs[statistic] = np.add(diffs.get(statistic, 0.0), value.numpy())
    ordered = [gradient[key_of(ref)] for ref in step.refs]
    assert all(
        not one_T[~of.loss_mask_T].any() for one_T, of in zip(ordered, step.sequences, strict=True)
    )
    by_token = tokens_of(step, [ordered])[1][:, -3].tolist()
    assert math.isfinite(total) and math.isfinite(auxiliary) and any(by_token)
    return [
        total / plan.denominator,
        auxiliary,
        by_token,
        update_metrics([{k: tuple(v) for k, v in diffs.items()}], ""),
    ]


def of_kept(step: Step, old_logp: TokenValues) -> tuple[dict[Key, TrainSequence], Update]:
    """The sequences as the loss of a run gets them, and the plan, divided by what the mismatch correction keeps."""
    by_key = {
        key_of(ref): sequence for ref, sequence in zip(step.refs, step.sequences, strict=True)
    }
    (plan,), hparams = step.plans, step.hyperparameters
    if not drops(hparams):
        return by_key, plan
    kept = [
        kept_tokens.without_dropped(
            [[by_key[key_of(ref)] for ref in batch] for batch in hand],
            [spread(old_logp[key_of(ref)], ref) for batch in hand for ref in batch],
            hparams,
        )
        for hand in plan.micro_batches
    ]
    counts = np.sum([kept_tokens.counts_of(hand) for hand in kept], axis=0).tolist()
    assert 0 < counts[0] < plan.loss_tokens, "some tokens are kept, and some are dropped"
    divided = kept_tokens.divided_by_kept(plan, counts, hparams, LONGEST)
    kept = [kept_tokens.reweighted(hand, divided, hparams) for hand in kept]
    keys = [key_of(ref) for hand in plan.micro_batches for batch in hand for ref in batch]
    return dict(
        zip(keys, [sequence for hand in kept for batch in hand for sequence in batch], strict=True)
    ), divided


def of_sequences(row: PackedRow, arrays: Sequence[FloatArray]) -> torch.Tensor:
    """Values of sequences at the places of a packed row that predict them."""
    values_T = torch.full((len(row.targets.loss_mask_T),), math.nan)
    for start, array in zip(row.starts, arrays, strict=True):
        values_T[start : start + len(array) - 1] = torch.from_numpy(array[1:])
    return values_T


@pytest.mark.parametrize("rollout_correction", ["off", *ROLLOUT_CORRECTION_BOUNDS])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_losses_of_whole_sequences_are_of_whole_episodes(
    name: str, rollout_correction: Any
) -> None:
    """GSPO's ratio, a mismatch of sequences and PRIME's cross-entropy add up the tokens of all rows of an episode."""
    groups = groups_of(5, [3, 1, 4, 2, 5, 2])
    changes: dict[str, Any] = {
        "rollout_correction": rollout_correction,
        "aggregation": "sequence_mean",
    }
    if rollout_correction == "mis_sequence":
        changes |= {"rollout_correction_high": 400.0}
    if rollout_correction == "mis_geometric":
        changes |= {"rollout_correction_low": 0.3, "rollout_correction_high": 3.0}
    whole, rows = (
        losses(name, groups, ROOMY, 1, **changes),
        losses(name, cut_up(groups, 5), ROOMY, 2, **changes),
    )
    assert rows[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    assert rows[1] == pytest.approx(whole[1], rel=1e-5)
    assert rows[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-6)
    assert rows[3] == pytest.approx(whole[3], rel=1e-6) and len(whole[3]) > 2


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "gspo"])
def test_losses_of_tokens_do_not_ask_for_one_micro_batch(name: str) -> None:
    groups = groups_of(5, [3, 5, 4, 5, 5, 5])
    whole, rows = losses(name, groups, ROOMY, 1), losses(name, cut_up(groups, 5), 40, 2)
    assert rows[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    assert rows[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-6)


def test_what_the_model_did_not_sample_is_context_alone() -> None:
    """By hand: a turn of two tokens, an observation of two, a turn of one; three tokens in all are trained on."""
    prompt = Prompt("p", "", (1, 2), "")
    sample = episode(prompt, np.random.default_rng(1), 1, longest=1)
    sample = with_row(
        sample, response_ids_T=np.array([5, 6, 7, 8, 9]), engine_logp_T=np.array([-1, -2, 0, 0, -3], np.float32),
        trained_T=np.array([True, True, False, False, True]), token_rewards_T=np.array([0, 0.5, 0, 0, 0], np.float32),
    )  # fmt: skip
    group = SampleGroup(prompt, (sample,), np.ones(1, np.float32), np.ones(1, np.bool_))
    ref = SampleRef(0, 0, 7, 5, num_trained=3, num_stale=2, is_correct=True, reward=1.0)
    sequence = train_sequence(group, ref, "sequence_mean", 0.25)
    assert sequence.token_ids_T.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert sequence.loss_mask_T.tolist() == [False, False, True, True, False, False, True]
    np.testing.assert_allclose(sequence.loss_weight_T, [0, 0, 1 / 3, 1 / 3, 0, 0, 1 / 3], rtol=1e-6)
    assert sequence.engine_logp_T.tolist() == [0, 0, -1, -2, 0, 0, -3]
    assert sequence.is_stale_T is not None and sequence.is_stale_T.tolist() == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert sequence.nll_weight_T is not None and sequence.nll_weight_T.tolist() == [
        0,
        0,
        0.25,
        0.25,
        0,
        0,
        0.25,
    ]
    assert sequence.turn_T is not None and sequence.turn_T.tolist() == [0, 0, 1, 1, 0, 0, 2]
    assert sequence.token_rewards_T is not None and sequence.token_rewards_T.tolist() == [
        0,
        0,
        0,
        0.5,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo", [1.5, 1.5, 1.0]),  # lambda 1 and values of 0: what is still to come
        ("reinforce_pp", [1.5, 1.5, 1.0]),
        ("dr_grpo", [0.75, 0.75, 0.75]),  # less the mean of 1.5 and 0
        ("remax", [1.5, 1.5, 1.5]),
        ("rloo", [1.5, 1.5, 1.5]),
        ("on_policy_distillation", [0.0, 0.0, 0.0]),
        ("prime", [1.5, 1.5, 1.5]),
    ],
)
def test_a_turns_reward_is_earned_by_the_tokens_before_it_or_compared(
    name: str, expected: list[float]
) -> None:
    """0.5 for the first of two turns and 1 for the whole, beside an episode (and a greedy one) without any reward."""
    rng = np.random.default_rng(1)
    prompt = Prompt("p", "", (1, 2), "")
    sample, other = (episode(prompt, rng, 2, longest=1, pays=False) for _ in range(2))
    ids_T, trained_T = np.array([5, 6, 7, 8]), np.array([True, True, False, True])
    logp_T = np.zeros(4, np.float32)
    facts = replace(sample.facts, sampled_tokens=3)  # type: ignore[type-var]
    sample = with_row(
        replace(sample, facts=facts),
        response_ids_T=ids_T,
        engine_logp_T=logp_T,
        trained_T=trained_T,
        parts=(replace(sample.only_row.parts[0], num_tokens=4),),
        token_rewards_T=np.array([0, 0.5, 0, 0], np.float32),
    )
    samples = (
        (sample, other, replace(other, is_baseline=True)) if name == "remax" else (sample, other)
    )
    rewards_G = np.array([1.0, 0.0, 0.0], np.float32)[: len(samples)]
    group = SampleGroup(prompt, samples, rewards_G, rewards_G > 0)
    short, row = summary(group), ALGORITHMS[name]
    assert short.total_rewards_G[:2].tolist() == [1.5, 0.0] and short.rewards_G[:2].tolist() == [
        1.0,
        0.0,
    ]
    refs = samples_of([short], name)
    sequences = [train_sequence(group, ref, "token_mean") for ref in refs]
    hparams = replace(row.hyperparameters, whiten=False, gae_lambda=1.0, kl_coefficient=0.0)
    nothing = {key_of(ref): np.zeros(ref.response_length, np.float32) for ref in refs}
    first, *_ = with_token_advantages(row, hparams, refs, sequences, nothing, None, **ALONE)
    assert first.advantage_T is not None
    assert first.advantage_T[first.loss_mask_T].tolist() == pytest.approx(expected)
    if row.critic == "values":
        values = [np.zeros(ref.length, np.float32) for ref in refs]
        returns, *_ = critic_returns(sequences, values, None, replace(hparams, critic_lambda=None))
        assert returns[first.loss_mask_T].tolist() == pytest.approx(expected)


def test_a_rank_with_and_one_without_turns_say_the_same_statistics() -> None:
    """Also one whose row is padding: they are added up over all ranks."""
    groups = groups_of(1, [1, 3])
    with_turns = [
        train_sequence(groups[0], ref, "token_mean")
        for ref in samples_of([summary(groups[0])], "grpo")
    ]
    plain = [replace(sequence, turn_T=None) for sequence in with_turns]
    stats = []
    for sequences in (with_turns, plain, []):
        row = pack(
            sequences,
            [sequence.engine_logp_T + 1 for sequence in sequences],
            split=Split(),
            device="cpu",
        )
        assert row.old_logp_T is not None
        stats.append(
            {
                statistic: value.tolist()
                for statistic, value in turn_diffs(row.old_logp_T, row.targets).items()
            }
        )
    assert stats[0].keys() == stats[1].keys() == stats[2].keys()
    tokens = sum(int(sequence.loss_mask_T.sum()) for sequence in with_turns)
    stale = sum(
        int(sequence.is_stale_T.sum()) for sequence in with_turns if sequence.is_stale_T is not None
    )
    for values in stats[:2]:
        assert (
            sum(count for _, count in values.values())
            == sum(diff for diff, _ in values.values())
            == tokens - stale
        )
    assert not any(map(any, stats[2].values()))
    assert sum(value[1] > 0 for value in stats[1].values()) == 1

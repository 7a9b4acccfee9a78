"""Every row of the table learns the same, however its samples are packed, split and dealt over ranks.

The expected loss is worked out sample by sample, each in a row of its own; the mean over them as the aggregation says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import ALGORITHMS
from megarl.algos.rollout_correction import ROLLOUT_CORRECTION_BOUNDS, dropped, drops
from megarl.algos.segments import segment_mean, segment_sum
from megarl.algos.statistics import Statistics
from megarl.parallel.packing import Split, pack
from megarl.tracking.metrics import train_metrics
from megarl.training import kept_tokens
from megarl.training.batching import Key, MicroBatch, SampleRef, Update, key_of, plan_updates
from megarl.training.credit import sample_advantages
from megarl.training.train_sequences import train_sequences
from megarl.types import (
    Aggregation,
    FloatArray,
    Hyperparameters,
    Prompt,
    RolloutCorrection,
    SampleGroup,
    TrainSequence,
)
from tests.samples.responses import response, with_row

PER_GROUP, LONGEST, BUDGET = 3, 9, 48
FROM_REWARDS = [name for name, row in ALGORITHMS.items() if row.learns_from == "rewards"]
# whose equal rewards are no reason to change
OF_GROUPS = ["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo"]


@dataclass(frozen=True)
class Batch:
    """Samples, what the policy [length, float64] and its forerunners say of their responses' tokens."""

    groups: dict[int, SampleGroup]
    refs: list[SampleRef]
    logp: dict[Key, torch.Tensor]
    entropy: dict[Key, torch.Tensor]
    old_logp: dict[Key, FloatArray]
    reference_logp: dict[Key, FloatArray]

    def leaves(self) -> list[torch.Tensor]:
        return [*self.logp.values(), *self.entropy.values()]


def batch_of(lengths: Sequence[int], seed: int) -> Batch:
    """Responses of these lengths, three to a prompt; some near the old policy and the engine, some far from them."""
    rng = np.random.default_rng(seed)
    groups, batch = {}, Batch({}, [], {}, {}, {}, {})
    for number, start in enumerate(range(0, len(lengths), PER_GROUP)):
        group_lengths = lengths[start : start + PER_GROUP]
        prompt, samples = Prompt(str(number), "", tuple(range(rng.integers(1, 5))), ""), []
        for index, length in enumerate(group_lengths):
            key, logp = (number, index, 0), rng.uniform(-3, -0.1, length)
            old = logp + rng.normal(0, rng.choice([1e-4, 0.3]), length)
            engine = old + rng.normal(0, rng.choice([1e-3, 0.5]), length)
            batch.logp[key] = torch.from_numpy(logp).requires_grad_()
            batch.entropy[key] = torch.from_numpy(rng.uniform(0, 2, length)).requires_grad_()
            batch.old_logp[key], batch.reference_logp[key] = (
                (values + at).astype(np.float32)
                for values, at in ((old, 0.0), (logp, rng.normal(0, 0.3, length)))
            )
            samples.append(response(prompt.token_ids, np.arange(length), engine.astype(np.float32)))
            total = len(prompt.token_ids) + length
            facts = {"advantage": float(rng.normal()), "is_correct": bool(rng.integers(2))}
            batch.refs.append(SampleRef(number, index, total, length, **facts))
        nothing = np.zeros(len(group_lengths), np.float32)
        groups[number] = SampleGroup(prompt, tuple(samples), nothing, nothing.astype(np.bool_))
    return replace(batch, groups=groups)


def with_prompt(group: SampleGroup, prompt: Prompt) -> SampleGroup:
    samples = tuple(with_row(sample, prompt_ids=prompt.token_ids) for sample in group.samples)
    return replace(group, prompt=prompt, samples=samples)


def padded(batch: Batch, ref: SampleRef, values: FloatArray, junk: float) -> FloatArray:
    """A response's values as an array of the whole sequence, with junk on the prompt."""
    return np.pad(values, (ref.length - ref.response_length, 0), constant_values=junk)


Seen = tuple[float, list[torch.Tensor], Statistics]


def add(total: Statistics, found: Statistics) -> None:
    """Statistics of more micro-batches to those of others."""
    for statistic, values in found.items():
        together = max if statistic.reduction.is_max else lambda pair: math.fsum(pair)
        total[statistic] = tuple(
            map(together, zip(total.get(statistic, (0.0,) * len(values)), values, strict=True))
        )


def seen(
    name: str,
    hparams: Hyperparameters,
    batch: Batch,
    shares: Sequence[Sequence[MicroBatch]],
    *,
    plan: Update | None = None,
    aggregation: Aggregation | None = None,
    split: Split = Split(),  # noqa: B008
    junk: float = 0.0,
) -> Seen:
    """(loss, its gradient by logprobs and entropies, statistics) of all ranks' micro-batches.

    With the plan they are divided as a run divides them, by what the mismatch correction keeps; else they are sums.
    What is not learnt from is junk, in the policy's outputs as in what the old, the reference and the engine say of it.
    """
    for leaf in batch.leaves():
        leaf.grad = None
    total, stats = 0.0, {}
    sequences_by_share, plan = given_of(
        hparams, batch, shares, plan, aggregation or hparams.aggregation, junk
    )
    for micro_batches, sequence_batches in zip(shares, sequences_by_share, strict=True):
        for refs, uncredited in zip(micro_batches, sequence_batches, strict=True):
            pairs = zip(uncredited, sample_advantages(refs, uncredited), strict=True)
            sequences = [
                replace(sequence, advantage_T=advantage_T) for sequence, advantage_T in pairs
            ]
            old, reference = (
                [padded(batch, ref, values[key_of(ref)], junk) for ref in refs]
                for values in (batch.old_logp, batch.reference_logp)
            )
            row = pack(sequences, split=split, device="cpu", old_logp=old, reference_logp=reference)
            assert row.old_logp_T is not None
            targets, free_T = row.targets, ~row.targets.sampled_T
            targets = replace(
                targets, engine_logp_T=targets.engine_logp_T.masked_fill(free_T, junk)
            )
            # Everything that the mask does not name is junk, which the gradient is asked of, too.
            junk_T = torch.full((2, len(free_T)), junk, dtype=torch.float64, requires_grad=True)
            at = [
                start + ref.length - ref.response_length - 1
                for start, ref in zip(row.starts, refs, strict=True)
            ]
            places = [
                torch.arange(start, start + ref.response_length)
                for start, ref in zip(at, refs, strict=True)
            ]
            logp_T, entropy_T = (
                junk_T[i].index_put((torch.cat(places),), torch.cat([values[key_of(ref)] for ref in refs]))
                if refs else junk_T[i] * 1
                for i, values in enumerate((batch.logp, batch.entropy))
            )  # fmt: skip
            loss, statistics = ALGORITHMS[name].loss(hparams)(
                logp_T, entropy_T, row.old_logp_T, targets
            )
            loss.backward()
            assert junk_T.grad is not None and not junk_T.grad.any(), (
                "what is not learnt from has a gradient"
            )
            total += float(loss.detach())
            add(
                stats,
                {
                    statistic: tuple(value.reshape(-1).tolist())
                    for statistic, value in statistics.items()
                },
            )
    divisor = plan.denominator if plan else 1.0
    gradients = [
        torch.zeros_like(tensor) if tensor.grad is None else tensor.grad / divisor
        for tensor in batch.leaves()
    ]
    return total / divisor, gradients, stats


def given_of(
    hparams: Hyperparameters,
    batch: Batch,
    shares: Sequence[Sequence[MicroBatch]],
    plan: Update | None,
    aggregation: Aggregation,
    junk: float,
) -> tuple[list[list[list[TrainSequence]]], Update | None]:
    """The sequences of all ranks' micro-batches as a run makes them, and the plan, divided by what is kept of it."""
    nll_weight = plan.nll_weight(hparams.positive_nll) if plan else 0.0
    sequences = [train_sequences(share, batch.groups, aggregation, nll_weight) for share in shares]
    if not drops(hparams):
        return sequences, plan
    olds = [
        [padded(batch, ref, batch.old_logp[key_of(ref)], junk) for refs in share for ref in refs]
        for share in shares
    ]
    sequences = [
        kept_tokens.without_dropped(*pair, hparams) for pair in zip(sequences, olds, strict=True)
    ]
    if plan is None:
        return sequences, None
    counts = np.sum([kept_tokens.counts_of(share) for share in sequences], axis=0).tolist()
    of_kept = kept_tokens.divided_by_kept(plan, counts, hparams, LONGEST)
    return [kept_tokens.reweighted(share, of_kept, hparams) for share in sequences], of_kept


def kept_of(batch: Batch, ref: SampleRef, hparams: Hyperparameters) -> torch.Tensor:
    """Which tokens of a response the mismatch correction keeps."""
    engine_T = torch.from_numpy(batch.groups[ref.group].samples[ref.sample].only_row.engine_logp_T)
    everything_T, one_sample_T = (
        torch.ones(len(engine_T)) > 0,
        torch.zeros(len(engine_T), dtype=torch.int64),
    )
    if not drops(hparams):
        return everything_T
    old_T = torch.from_numpy(batch.old_logp[key_of(ref)])
    return ~dropped(old_T, engine_T, everything_T, one_sample_T, hparams)


def expected(name: str, hparams: Hyperparameters, batch: Batch) -> Seen:
    """The mean that the aggregation names, of samples that each are seen alone, behind a prompt of one token."""
    prompt = Prompt("", "", (0,), "")
    one_token = {number: with_prompt(group, prompt) for number, group in batch.groups.items()}
    alone, of_policy = replace(batch, groups=one_token), replace(hparams, positive_nll=0.0)
    kept = {key_of(ref): kept_of(batch, ref, hparams) for ref in batch.refs}
    counts = {key: int(kept_T.sum()) for key, kept_T in kept.items()}
    tokens, samples = (
        max(1, sum(counts.values())),
        max(1, sum(count > 0 for count in counts.values())),
    )
    loss, gradients = 0.0, [torch.zeros_like(leaf) for leaf in batch.leaves()]
    stats: Statistics = {}
    for ref in batch.refs:
        share = {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / max(1, counts[key_of(ref)]) / samples,
            "sequence_sum": 1 / samples,
            "constant": 1 / LONGEST / samples,
        }[hparams.aggregation]
        shares = [[(replace(ref, length=1 + ref.response_length),)]]
        sample_loss, sample_gradients, statistics = seen(
            name, of_policy, alone, shares, aggregation="token_mean"
        )
        loss += sample_loss * share
        gradients = [
            total + gradient * share
            for total, gradient in zip(gradients, sample_gradients, strict=True)
        ]
        add(stats, statistics)
    if hparams.positive_nll and ALGORITHMS[name].surrogate:
        correct = [key_of(ref) for ref in batch.refs if ref.is_correct]
        count = max(1, sum(counts[key] for key in correct))
        for place, (key, logp) in enumerate(batch.logp.items()):
            if key in correct:
                loss -= hparams.positive_nll * float(logp.detach()[kept[key]].sum()) / count
                gradients[place] = gradients[place] - hparams.positive_nll / count * kept[key]
    return loss, gradients, stats


def same(mine: Seen, other: Seen) -> None:
    """Within what float32 weights allow; the loss is a sum of terms of about 1 that cancel."""
    assert mine[0] == pytest.approx(other[0], rel=1e-5, abs=2e-6)
    for gradient, other_gradient in zip(mine[1], other[1], strict=True):
        torch.testing.assert_close(gradient, other_gradient, rtol=1e-5, atol=2e-6)
    assert train_metrics([mine[2]]) == pytest.approx(train_metrics([other[2]]), rel=1e-5, abs=1e-6)


def all_at_once(name: str, rollout_correction: RolloutCorrection) -> Hyperparameters:
    """The row's own hparams with every penalty."""
    more = {
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "positive_nll": 0.1,
        "rollout_correction": rollout_correction,
    }
    return replace(ALGORITHMS[name].hyperparameters, **more)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=10),
    seed=st.integers(0, 2**31),
    rollout_correction=st.sampled_from(["off", *ROLLOUT_CORRECTION_BOUNDS]),
    dp=st.integers(1, 4),
    budget=st.sampled_from([LONGEST + 7, BUDGET, 10_000]),
    split=st.sampled_from([Split(), Split(tp=4), Split(tp=2, cp=2, align=4)]),
    shuffle=st.randoms(use_true_random=False),
)
def test_neither_prompts_packing_splitting_nor_ranks_change_what_is_learnt(
    name, lengths, seed, rollout_correction, dp, budget, split, shuffle
):
    """Ranks without a sample among them, whose rows are padding."""
    batch, hparams = batch_of(lengths, seed), all_at_once(name, rollout_correction)
    (plan,) = plan_updates(
        batch.refs, updates=1, dp=dp, token_budget=budget, aggregation=hparams.aggregation, longest_response=LONGEST,
        work=lambda length: length + length**2 / 16, align=split.align,
    )  # fmt: skip
    shares = [
        [tuple(shuffle.sample(refs, len(refs))) for refs in rank] for rank in plan.micro_batches
    ]
    shuffle.shuffle(shares)
    result = seen(name, hparams, batch, shares, plan=plan, split=split, junk=math.nan)
    same(result, expected(name, hparams, batch))


@pytest.mark.parametrize("name", FROM_REWARDS)
def test_without_an_advantage_there_is_nothing_to_learn(name):
    batch = batch_of([1, 1, 5, 9], seed=2)
    refs = tuple(replace(ref, advantage=0.0) for ref in batch.refs)
    hparams = replace(
        ALGORITHMS[name].hyperparameters,
        kl_coefficient=0.0,
        positive_nll=0.0,
        rollout_correction="mis_token",
    )
    loss, gradients, _ = seen(name, hparams, batch, [[refs]])
    assert loss == 0.0 and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("reward", [0.0, 0.7, -1.0])
def test_equal_rewards_have_no_advantage(name, reward):
    for size in (2, 3, 16):
        advantages = ALGORITHMS[name].sample_advantages(torch.full((size,), reward))
        assert advantages == pytest.approx([0.0] * size, abs=1e-9)


def test_sums_over_long_sequences_are_exact():
    """Added up one by one in float32, 100,000 tokens of 0.1 are 9998.6."""
    values_T, mask_T = torch.full((100_001,), 0.1), torch.arange(100_001) > 0
    sequence_T = torch.zeros(100_001, dtype=torch.int64)
    for over, value in ((segment_sum, 1e4), (segment_mean, 0.1)):
        result_T = over(values_T, mask_T, sequence_T)
        assert result_T.dtype == torch.float32 and result_T[0].item() == pytest.approx(
            value, rel=1e-7
        )

"""The groups of a step: how they are sampled, and what of them is trained on, with which advantage.

A step has as many groups as asked for, or, with dynamic sampling, as many mixed groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.algos import ALGORITHMS
from megarl.config import Recipe
from megarl.fleet.rank_groups import RolloutBatch
from megarl.rollout.episodes import Sampling
from megarl.rollout.rewards import MEND
from megarl.training.batching import SampleRef
from megarl.types import FloatArray, GroupSummary, Hyperparameters, IntArray, Metrics, Prompt, UserFault

# (prompts, number of the round) -> their groups
SampleRound = Callable[[Sequence[Prompt], int], RolloutBatch]
TakePrompts = Callable[[int], list[Prompt]]


def sampling_of(recipe: Recipe, step: int, number: int = 0) -> Sampling:
    """How the responses of a training step are sampled in round `number`, from 0, of dynamic sampling."""
    rollout = recipe.rollout
    return Sampling(
        rollout.samples_per_prompt,
        rollout.max_response_tokens,
        rollout.temperature,
        rollout.top_p,
        stream=(recipe.run.seed, step, number) if number else (recipe.run.seed, step),
        with_baseline=ALGORITHMS[recipe.algorithm.name].greedy_baseline,
    )


def is_mixed(group: GroupSummary) -> bool:
    """Whether the group has correct and wrong samples; other groups teach nothing (DAPO, arXiv 2503.14476, eq. 11)."""
    correct = group.correct_G[group.drawn_G]
    return bool(correct.any() and not correct.all())


def collect(
    wanted: int, hyperparameters: Hyperparameters, take: TakePrompts, sample: SampleRound, leftover: RolloutBatch
) -> tuple[RolloutBatch, RolloutBatch, Metrics]:
    """(the step's `wanted` groups, the groups left over for the next step, counts for the record).

    With dynamic sampling prompts are drawn, more of them than groups are missing, until there are enough mixed groups;
    the leftover groups of the step before come first. After max_rounds the step trains on the groups that there are, or
    the run stops, as the recipe says. Raises UserFault(algorithm.max_rounds) in the latter case, and without any group.
    """
    if not hyperparameters.dynamic_sampling:
        return sample(take(wanted), 0), RolloutBatch([], []), {}
    kept, drawn, rounds, correct = leftover, 0, 0, []
    while len(kept.refs) < wanted and rounds < hyperparameters.max_rounds:
        count = hyperparameters.num_drawn(wanted - len(kept.refs))
        new = sample(take(count), rounds)
        places = [index for index, group in enumerate(new.summaries) if is_mixed(group)]
        correct += [group.correct_G[group.drawn_G].mean() for group in new.summaries]
        kept = _joined(kept, _chosen(new, places))
        drawn, rounds = drawn + count, rounds + 1
    found = len(kept.refs)
    if found < wanted and (hyperparameters.when_short == "stop" or not found):
        raise _too_few(found, wanted, drawn, rounds, hyperparameters)
    step, rest = _chosen(kept, range(min(found, wanted))), _chosen(kept, range(wanted, found))
    mixed = found - len(leftover.refs)
    accuracy = {"sampling/accuracy": float(np.mean(correct))} if correct else {}
    return (
        step,
        rest,
        accuracy
        | {
            "sampling/rounds": rounds,
            "sampling/drawn": drawn,
            "sampling/mixed_share": mixed / drawn if drawn else 1.0,
            "sampling/carried_in": len(leftover.refs),
            "sampling/carried_out": len(rest.refs),
            "sampling/missing": max(0, wanted - found),
        },
    )


def _too_few(found: int, wanted: int, drawn: int, rounds: int, hyperparameters: Hyperparameters) -> UserFault:
    drawn_in = f"{drawn} prompts in {rounds} rounds, and the leftover groups,"
    problem = f"{drawn_in} gave {found} groups with right and wrong answers, not {wanted}"
    mend = "raise it or algorithm.oversample, or use data of other difficulty"
    if hyperparameters.when_short == "stop" and found:
        mend += ", or set algorithm.when_short to train"
    return UserFault("algorithm.max_rounds", problem, mend)


def with_overlong_penalty(rollout: RolloutBatch, hyperparameters: Hyperparameters, longest: int) -> RolloutBatch:
    """The groups with the soft overlong penalty added to each reward, where the hyperparameters set one."""
    if not hyperparameters.overlong_share:
        return rollout
    summaries = []
    for group in rollout.summaries:
        penalty_G = overlong_penalty(group.response_lengths_G, longest, hyperparameters.overlong_share * longest)
        summaries.append(replace(group, rewards_G=(group.rewards_G + penalty_G).astype(np.float32)))
    return RolloutBatch(summaries, rollout.refs)


def overlong_penalty(lengths_G: IntArray, longest: int, cache: float) -> FloatArray:
    """0 up to longest - cache tokens, from there linearly down to -1 at longest (DAPO, arXiv 2503.14476, eq. 13)."""
    return np.clip((longest - cache - lengths_G) / cache, -1.0, 0.0).astype(np.float32)


def _chosen(rollout: RolloutBatch, places: Sequence[int]) -> RolloutBatch:
    return RolloutBatch([rollout.summaries[place] for place in places], [rollout.refs[place] for place in places])


def _joined(first: RolloutBatch, second: RolloutBatch) -> RolloutBatch:
    return RolloutBatch(first.summaries + second.summaries, first.refs + second.refs)


def samples_of(
    groups: Sequence[GroupSummary], algorithm: str, *, only_finished: bool = False, version: int = -1
) -> list[SampleRef]:
    """Every drawn sample with its advantage. version: of the policy; samples of earlier versions are stale.

    only_finished: without responses that were cut. Where the algorithm compares with a greedy sample, groups without a
    greedy sample are left out.
    """
    samples, row = [], ALGORITHMS[algorithm]
    for index, group in enumerate(groups):
        rewards_G = torch.tensor(group.rewards_G)
        if row.greedy_baseline:
            if group.baseline is None:
                continue
            rewards_G = rewards_G - rewards_G[group.baseline]
        drawn = np.flatnonzero(group.drawn_G)
        for sample, advantage in zip(drawn.tolist(), row.sample_advantages(rewards_G[drawn]), strict=True):
            if only_finished and not group.finished_G[sample]:
                continue
            is_correct, response = bool(group.correct_G[sample]), int(group.response_lengths_G[sample])
            length, is_stale = group.prompt_length + response, group.version < version
            own = {"reward": float(group.rewards_G[sample]), "advantage": advantage}
            samples.append(
                SampleRef(index, sample, length, response, **own, is_correct=is_correct, is_stale=is_stale)
            )
    return samples


def refuse_empty(samples: Sequence[SampleRef], groups: Sequence[GroupSummary]) -> None:
    """Raises UserFault where a step has no sample to train on."""
    if samples:
        return
    if not any(group.finished_G.any() for group in groups):
        mend = "raise it, or set algorithm.overlong_filter to false"
        raise UserFault("rollout.max_response_tokens", "every response of the step was cut", mend)
    raise UserFault("reward.function", "the verdict on every greedy sample of the step failed", MEND)

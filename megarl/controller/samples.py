"""The groups of a step: the phases in which they are sampled, and what of them is trained on, with which advantage.

A step has as many groups as asked for, or, with dynamic sampling, as many mixed groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megarl.algos import ALGORITHMS
from megarl.cluster.actor import Ref
from megarl.config import Recipe
from megarl.fleet.rank_groups import NO_GROUPS, GroupBuffer, RolloutBatch
from megarl.samples.buffer import BufferSizes, Entry, PartialSummary
from megarl.training.batching import SampleRef
from megarl.types import (
    TRUNCATED,
    BoolArray,
    FloatArray,
    GroupSummary,
    Hyperparameters,
    IntArray,
    Metrics,
    PhaseBalance,
    UserError,
    num_stale,
)
from megarl.types.reward_result import REWARD_HINT
from megarl.types.sampling import Sampling

# (buffer, how many prompts to draw, number of the round of drawing for this step) -> the buffer with their drawn
# prompts
Admit = Callable[[GroupBuffer, int, int], GroupBuffer]
# The buffer -> the same after a phase, in which every open group has gone on, and how evenly the engines worked in it.
Advance = Callable[[GroupBuffer], tuple[GroupBuffer, PhaseBalance]]


def sampling_of(recipe: Recipe, step: int, number: int = 0) -> Sampling:
    """How responses are sampled whose prompts a training step draws in its round `number`, from 0."""
    rollout = recipe.rollout
    return Sampling(
        rollout.samples_per_prompt,
        rollout.max_response_tokens,
        rollout.temperature,
        rollout.top_p,
        phase_tokens=rollout.phase_tokens,
        stream=(recipe.run.seed, step, number) if number else (recipe.run.seed, step),
        with_baseline=ALGORITHMS[recipe.algorithm.name].greedy_baseline,
    )


def is_mixed(group: GroupSummary) -> bool:
    """Whether the group has correct and wrong samples; other groups teach nothing (DAPO, arXiv 2503.14476, eq. 11)."""
    correct = group.correct_G[group.drawn_G]
    return bool(correct.any() and not correct.all())


@dataclass(frozen=True)
class Limits:
    """How many groups a step trains on, and how many are in flight: in the buffer, open or complete.

    in_flight: at most, as many as `BufferSizes` allows. steps_left: of the run after this step; None: it has no end.
    ahead: the phase that a step would begin with is sampled while the ranks learn in the step before. is_phased:
    responses are sampled in phases.
    """

    wanted: int
    in_flight: int
    hyperparameters: Hyperparameters
    ahead: int = 0
    is_phased: bool = False
    steps_left: int | None = None

    @property
    def buffer_sizes(self) -> BufferSizes:
        return BufferSizes(self.wanted, self.in_flight)

    def of_next_step(self) -> Limits:
        """Those of the step after this one; the last step's are followed by those of a run that goes on from it."""
        return replace(self, steps_left=self.steps_left and self.steps_left - 1)

    def num_admitted(self, buffer: GroupBuffer, rounds: int, drawn: int) -> int:
        """How many prompts to draw before the next phase; rounds, drawn: of drawing in this step, and their prompts.

        In phases a step draws few prompts at a time, so that max_rounds counts as many prompts as a round has for a
        whole step.
        """
        missing = self.buffer_sizes.num_missing(buffer, self.steps_left)
        rule = self.hyperparameters
        count = rule.num_drawn(missing) if missing else 0
        if not rule.dynamic_sampling:
            return count
        if self.is_phased:
            return min(count, max(0, rule.max_rounds * rule.num_drawn(self.wanted) - drawn))
        if rounds < rule.max_rounds:
            return count
        return 0

    def is_short(self, buffer: GroupBuffer) -> bool:
        """Whether the step has fewer complete groups than it trains on."""
        return len(buffer.finished) < self.wanted

    def begins_with_phase(self, buffer: GroupBuffer) -> bool:
        """Whether a step with this buffer has a phase at all.

        Open groups go on for one phase in every step at least, so that none grows old without growing.
        """
        return bool(buffer.open) or self.is_short(buffer)

    def completed(
        self, before: GroupBuffer, after: GroupBuffer
    ) -> tuple[GroupBuffer, list[GroupSummary]]:
        """The buffer after a phase, without what dynamic sampling drops, and the groups that are complete now."""
        was_open = {entry.number for entry in before.open}
        new = [entry for entry in after.finished if entry.number in was_open]
        if self.hyperparameters.dynamic_sampling:
            after = after.without_dropped([entry for entry in new if not _is_kept(entry)])
        return after, RolloutBatch.of(new).summaries


@dataclass(frozen=True)
class Collected:
    """What the phases of a step have found. before, buffer: at its begin, and for the next, without the chosen groups.

    complete: every group that became complete. rounds: of drawing. balances: of the phases.
    """

    before: GroupBuffer
    buffer: GroupBuffer
    chosen: RolloutBatch = NO_GROUPS
    complete: tuple[GroupSummary, ...] = ()
    rounds: int = 0
    balances: tuple[PhaseBalance, ...] = ()

    @property
    def drawn(self) -> int:
        """How many prompts were drawn."""
        return self.buffer.next_number - self.before.next_number

    def advanced(
        self, limits: Limits, before: GroupBuffer, after: GroupBuffer, balance: PhaseBalance
    ) -> Collected:
        """With a phase more; before, after: the buffer when it began, with what was drawn for it, and when it ended."""
        buffer, complete = limits.completed(before, after)
        return replace(
            self,
            buffer=buffer,
            complete=(*self.complete, *complete),
            rounds=self.rounds + (buffer.next_number > self.buffer.next_number),
            balances=(*self.balances, balance),
        )

    def counts(self, limits: Limits) -> Metrics:
        """What dynamic sampling drew and kept; {} without it."""
        if not limits.hyperparameters.dynamic_sampling:
            return {}
        metrics: Metrics = {
            "sampling/drawn": self.drawn,
            "sampling/mixed_share": 1.0,
            "sampling/carried_in": len(self.before.finished),
            "sampling/carried_out": len(self.buffer.finished),
            "sampling/rounds": self.rounds,
            "sampling/missing": limits.wanted - len(self.chosen.refs),
        }
        if self.complete:
            accuracies = [group.correct_G[group.drawn_G].mean() for group in self.complete]
            metrics["sampling/accuracy"] = float(np.mean(accuracies))
            metrics["sampling/mixed_share"] = float(np.mean([*map(is_mixed, self.complete)]))
        return metrics


def waiting_metrics(chosen: Sequence[GroupSummary], buffer: GroupBuffer) -> Metrics:
    """What waits in the buffer after a step, beside what the step trains on.

    `groups`: that wait; `open`: of these, those with open samples. `longest_mean`: the mean over them of the tokens
    that a group's longest response has so far (of open episodes: of all after the prompt); `longest_trained_mean`: the
    same of the chosen groups.
    """
    trained = [group.response_lengths_G.max() for group in chosen]
    metrics: Metrics = {
        "buffer/groups": len(buffer.entries),
        "buffer/open": len(buffer.open),
        "buffer/longest_trained_mean": float(np.mean(trained)),
    }
    if buffer.entries:
        longest = [_longest(entry) for entry in buffer.entries]
        metrics["buffer/longest_mean"] = float(np.mean(longest))
    return metrics


def _longest(entry: Entry[Ref]) -> int:
    """Tokens of the longest response of a group, as far as it is sampled."""
    summary = entry.summary
    if isinstance(summary, PartialSummary):
        return summary.context_tokens - len(entry.prompt.token_ids)
    return int(summary.response_lengths_G.max())


def collect(limits: Limits, buffer: GroupBuffer, admit: Admit, advance: Advance) -> Collected:
    """The groups that a step trains on, after as many phases as they need.

    Before each phase as many prompts are drawn as may be in flight. Then there are phases until enough groups are
    complete; the lowest numbers are trained on. With dynamic sampling groups that are not mixed are dropped; once as
    many prompts were drawn as max_rounds allows and no group is open, the step trains on the groups that there are, or
    the run stops, as the recipe says. Raises UserError(algorithm.max_rounds) in the latter case, and without any group.
    """
    collected = Collected(before=buffer, buffer=buffer)
    if limits.ahead:
        is_wanted = limits.is_short(buffer)
    else:
        is_wanted = limits.begins_with_phase(buffer)
    while is_wanted:
        if count := limits.num_admitted(buffer, collected.rounds, collected.drawn):
            buffer = admit(buffer, count, collected.rounds + limits.ahead)
        after, balance = advance(buffer)
        collected = collected.advanced(limits, buffer, after, balance)
        buffer = collected.buffer
        is_wanted = limits.is_short(buffer) and bool(
            buffer.open or limits.num_admitted(buffer, collected.rounds, collected.drawn)
        )
    chosen = buffer.ready(limits.wanted)
    if limits.is_short(buffer) and (limits.hyperparameters.when_short == "stop" or not chosen):
        raise _too_few(len(chosen), collected, limits)
    next_buffer = buffer.without_trained(chosen).after_step(limits.buffer_sizes, limits.steps_left)
    return replace(collected, buffer=next_buffer, chosen=RolloutBatch.of(chosen))


def _is_kept(entry: Entry[Ref]) -> bool:
    return isinstance(entry.summary, GroupSummary) and is_mixed(entry.summary)


def staleness(groups: Sequence[GroupSummary], version: int, bound: int) -> Metrics:
    """By how many versions the policy is newer than the weights that sampled a step's tokens; {} where it never is.

    `share_k`: of the tokens, those that are k versions old. parts_mean: of a sample, each of one version. Raises
    RuntimeError where a token is older than the bound.
    """
    drawn = [group.parts_G[sample] for group in groups for sample in np.flatnonzero(group.drawn_G)]
    ages = np.array([version - part.version for parts in drawn for part in parts], np.int64)
    tokens_by_age = np.bincount(
        ages, weights=[part.num_tokens for parts in drawn for part in parts]
    )
    oldest = len(tokens_by_age) - 1
    if oldest > bound:
        raise RuntimeError(
            f"a step has tokens that are {oldest} versions old, and the bound is {bound}"
        )
    if not bound:
        return {}
    shares = tokens_by_age / tokens_by_age.sum()
    return {
        "stale/token_mean": float(shares @ np.arange(oldest + 1)),
        "stale/token_max": oldest,
        "stale/parts_mean": len(ages) / len(drawn),
        **{f"stale/share_{age}": float(share) for age, share in enumerate(shares)},
    }


def _too_few(num_chosen: int, collected: Collected, limits: Limits) -> UserError:
    drawn_in = (
        f"{collected.drawn} prompts in {collected.rounds} rounds, and the groups of the buffer,"
    )
    problem = (
        f"{drawn_in} gave {num_chosen} groups with right and wrong answers, not {limits.wanted}"
    )
    hint = "raise it or algorithm.oversample, or use data of other difficulty"
    if limits.hyperparameters.when_short == "stop" and num_chosen:
        hint += ", or set algorithm.when_short to train"
    return UserError("algorithm.max_rounds", problem, hint)


def with_overlong_penalty(
    rollout: RolloutBatch, hyperparameters: Hyperparameters, longest: int
) -> RolloutBatch:
    """The groups with the soft overlong penalty added to each reward, where the hyperparameters set one.

    An episode without room for a further turn has the whole penalty: the observation that did not fit is not among its
    tokens.
    """
    if not hyperparameters.overlong_share:
        return rollout
    summaries = []
    for group in rollout.summaries:
        lengths_G = used_tokens_G(group)
        for sample, facts in enumerate(group.facts):
            if facts is not None and facts.end == "max_tokens":
                lengths_G[sample] = longest
        penalty_G = overlong_penalty(lengths_G, longest, hyperparameters.overlong_share * longest)
        summaries.append(replace(group, rewards_G=(group.rewards_G + penalty_G).astype(np.float32)))
    return RolloutBatch(summaries, rollout.refs)


def with_scores(rollout: RolloutBatch, scores: Sequence[FloatArray], weight: float) -> RolloutBatch:
    """The groups with `weight` times each response's score added to its reward.

    Raises UserError(reward_model.path) for a score that is no finite number.
    """
    summaries = []
    for group, scores_G in zip(rollout.summaries, scores, strict=True):
        if not np.isfinite(scores_G).all():
            problem = f"scores {scores_G} in answer to {group.prompt_text!r}"
            raise UserError("reward_model.path", problem, "use another model, or model.dtype")
        rewards_G = group.rewards_G + weight * scores_G
        summaries.append(replace(group, rewards_G=rewards_G.astype(np.float32)))
    return RolloutBatch(summaries, rollout.refs)


def used_tokens_G(group: GroupSummary) -> IntArray:
    """The tokens of each sample that count against its limit: `rollout.max_response_tokens` or `episode.max_tokens`.

    Of an episode those of its longest conversation after the prompt, observations among them, or all that the model has
    sampled in it where these are more.
    """
    longest = [max((row.response_length for row in rows), default=0) for rows in group.rows]
    return np.maximum(group.response_lengths_G, np.array(longest, np.int64))


def truncated_G(group: GroupSummary) -> BoolArray:
    """Which samples a limit of tokens has cut; not the episodes that have ended otherwise without an answer."""
    is_truncated_G = ~group.finished_G
    for sample, facts in enumerate(group.facts):
        if facts is not None:
            is_truncated_G[sample] = facts.end in TRUNCATED
    return is_truncated_G


def overlong_penalty(lengths_G: IntArray, longest: int, cache: float) -> FloatArray:
    """0 up to longest - cache tokens, from there linearly down to -1 at longest (DAPO, arXiv 2503.14476, eq. 13)."""
    return np.clip((longest - cache - lengths_G) / cache, -1.0, 0.0).astype(np.float32)


def samples_of(
    groups: Sequence[GroupSummary],
    algorithm: str,
    *,
    only_finished: bool = False,
    version: int = -1,
) -> list[SampleRef]:
    """The rows of every drawn sample with its advantage. version: of the policy; tokens of earlier versions are stale.

    Rows in which the model sampled nothing are left out. only_finished: without samples that a limit of tokens has cut;
    an episode that ended by its turns, its broken calls or its time is learnt from. Where the algorithm compares with a
    greedy sample, groups without a greedy sample are left out.
    """
    samples = []
    row = ALGORITHMS[algorithm]
    for index, group in enumerate(groups):
        if row.greedy_baseline and group.baseline is None:
            continue
        if row.credits_turns:
            rewards_G = group.rewards_G
        else:
            rewards_G = group.total_rewards_G
        compared_G = torch.tensor(rewards_G)
        if row.greedy_baseline:
            compared_G = compared_G - compared_G[group.baseline]
        drawn = np.flatnonzero(group.drawn_G).tolist()
        is_truncated_G = truncated_G(group)
        for sample, advantage in zip(drawn, row.sample_advantages(compared_G[drawn]), strict=True):
            if only_finished and is_truncated_G[sample]:
                continue
            for number, summary in enumerate(group.rows[sample]):
                if not summary.num_trained:
                    continue
                ref = SampleRef(
                    index,
                    sample,
                    summary.length,
                    summary.response_length,
                    row=number,
                    reward=float(rewards_G[sample]),
                    advantage=advantage,
                    is_correct=bool(group.correct_G[sample]),
                    num_stale=num_stale(summary.parts, version),
                )
                if summary.num_trained < summary.response_length:
                    ref = replace(ref, num_trained=summary.num_trained)
                if summary.has_group_prompt:
                    ref = replace(ref, num_shared=summary.length - summary.response_length)
                samples.append(ref)
    return samples


def refuse_empty(samples: Sequence[SampleRef], groups: Sequence[GroupSummary]) -> None:
    """Raises UserError where a step has no sample to train on."""
    if samples:
        return
    if all(truncated_G(group).all() for group in groups):
        hint = "raise it, or set algorithm.overlong_filter to false"
        raise UserError("rollout.max_response_tokens", "every response of the step was cut", hint)
    raise UserError(
        "reward.function", "the verdict on every greedy sample of the step failed", REWARD_HINT
    )

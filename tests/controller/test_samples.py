"""Which groups a step trains on: filtered, refilled, left over for the next step, and what happens with too few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos import ALGORITHMS
from megarl.controller.samples import (
    Limits,
    collect,
    is_mixed,
    overlong_penalty,
    refuse_empty,
    samples_of,
    staleness,
    with_overlong_penalty,
)
from megarl.fleet.rank_groups import GroupBuffer, RolloutBatch
from megarl.samples.buffer import Entry, RolloutBuffer
from megarl.samples.summaries import summary
from megarl.tracking.metrics import rollout_metrics
from megarl.training.batching import SampleRef
from megarl.types import (
    EpisodeEnd,
    GroupSummary,
    Hyperparameters,
    PhaseBalance,
    Prompt,
    SampleGroup,
    SamplePart,
    UserError,
)
from tests.samples.responses import response, response_rows, with_row
from tests.training.episodes import cut, episode

BALANCE = PhaseBalance((1,), tail_s=0.0, idle_s=0.0, seconds=0.0)
DYNAMIC = Hyperparameters(dynamic_sampling=True, oversample=1.0, max_rounds=4)


def learnt(samples: Sequence[SampleRef]) -> list[tuple[int, int, float | None]]:
    """Group, sample and advantage of each."""
    return [(ref.group, ref.sample, ref.advantage) for ref in samples]


def group(name: str, correct: Sequence[bool]) -> GroupSummary:
    count = len(correct)
    correct_G = np.array(correct)
    rewards_G = correct_G.astype(np.float32)
    return GroupSummary(
        name,
        "",
        ("",) * count,
        response_rows(1, [(SamplePart(0, length),) for length in range(1, count + 1)]),
        np.ones(count, np.bool_),
        rewards_G,
        correct_G,
    )


class Source:
    """Prompts 0, 1, 2..., of which every group is complete after one phase; what comes of prompt n is right[n]."""

    def __init__(self, right: Sequence[Sequence[bool]]) -> None:
        self.right, self.rounds = right, []

    def admit(self, buffer: GroupBuffer, count: int, number: int) -> GroupBuffer:
        self.rounds.append((number, count))
        names = range(buffer.next_number, buffer.next_number + count)
        return buffer.admitted([Prompt(str(name), "", (1,), "") for name in names], (number,), 2)

    def advance(self, buffer: GroupBuffer) -> tuple[GroupBuffer, PhaseBalance]:
        return buffer.updated([self.complete(entry) for entry in buffer.open]), BALANCE

    def complete(self, entry: Entry[Any]) -> Entry[Any]:
        name = entry.prompt.id
        return replace(entry, summary=group(name, self.right[int(name)]), ref=f"ref {name}")

    def collect(
        self, wanted: int, hyperparameters: Hyperparameters, buffer: GroupBuffer | None = None
    ) -> Any:
        limits = Limits(wanted, wanted, hyperparameters)
        collected = collect(limits, buffer or GroupBuffer(), self.admit, self.advance)
        return collected.chosen, collected.buffer, collected.counts(limits)


MIXED, RIGHT, WRONG = (True, False), (True, True), (False, False)


def names(groups: RolloutBatch | GroupBuffer) -> list[str]:
    batch = RolloutBatch.of(groups.entries) if isinstance(groups, RolloutBuffer) else groups
    assert [f"ref {group_summary.prompt_text}" for group_summary in batch.summaries] == batch.refs
    return [group_summary.prompt_text for group_summary in batch.summaries]


def test_without_it_a_step_is_what_was_drawn() -> None:
    source = Source([RIGHT, MIXED, WRONG])
    step, buffer, done = source.collect(3, Hyperparameters())
    assert (names(step), names(buffer), done, source.rounds) == (["0", "1", "2"], [], {}, [(0, 3)])
    assert (buffer.trained, buffer.dropped, buffer.next_number) == (0b111, 0, 3)


def test_groups_are_filtered_refilled_and_left_over() -> None:
    source = Source([MIXED, RIGHT, WRONG, MIXED, WRONG, MIXED, MIXED, MIXED, MIXED, MIXED, RIGHT])
    eager = replace(DYNAMIC, oversample=1.5)
    step, buffer, done = source.collect(3, eager)
    assert source.rounds == [(0, 5), (1, 2)], "half as many again as are missing"
    assert (names(step), names(buffer)) == (["0", "3", "5"], ["6"])
    assert (buffer.trained, buffer.dropped, buffer.next_number) == (0b101001, 0b10110, 7)
    assert done == {
        "sampling/rounds": 2, "sampling/drawn": 7, "sampling/mixed_share": 4 / 7, "sampling/carried_in": 0,
        "sampling/carried_out": 1, "sampling/missing": 0, "sampling/accuracy": pytest.approx((4 * 0.5 + 1) / 7),
    }  # fmt: skip
    step, buffer, done = source.collect(3, eager, buffer)
    assert source.rounds[2:] == [(0, 3)]
    assert (names(step), names(buffer)) == (["6", "7", "8"], ["9"]), (
        "groups of the buffer come first"
    )
    assert (done["sampling/carried_in"], done["sampling/mixed_share"]) == (1, 1.0)


def test_enough_that_waits_needs_no_new_sample() -> None:
    source = Source([MIXED] * 4)
    waiting, _ = source.advance(source.admit(GroupBuffer(), 4, 0))
    step, buffer, done = source.collect(3, DYNAMIC, waiting)
    assert (names(step), names(buffer), source.rounds) == (["0", "1", "2"], ["3"], [(0, 4)])
    counts = [done[f"sampling/{name}"] for name in ("drawn", "carried_in", "carried_out")]
    assert counts == [0, 4, 1]


def test_a_step_that_stays_short_trains_on_what_there_is() -> None:
    source = Source([RIGHT, MIXED, *[WRONG] * 20])
    step, buffer, done = source.collect(3, DYNAMIC)
    assert (names(step), names(buffer)) == (["1"], [])
    assert (len(source.rounds), done["sampling/missing"]) == (DYNAMIC.max_rounds, 2)


def test_in_phases_a_step_may_draw_as_many_prompts_as_all_rounds_would() -> None:
    """However few are missing at a time: four times three, of which each phase here completes what it draws."""
    source = Source([MIXED, MIXED, *[WRONG] * 30])
    limits = Limits(3, 3, DYNAMIC, is_phased=True)
    collected = collect(limits, GroupBuffer(), source.admit, source.advance)
    done = collected.counts(limits)
    assert (names(collected.chosen), names(collected.buffer)) == (["0", "1"], [])
    assert source.rounds == [(0, 3), *((number, 1) for number in range(1, 10))]
    assert (done["sampling/drawn"], done["sampling/rounds"]) == (DYNAMIC.max_rounds * 3, 10)


@pytest.mark.parametrize(("when_short", "first"), [("stop", MIXED), ("train", WRONG)])
def test_or_stops_and_says_how_many_there_were(when_short: Any, first: Any) -> None:
    """Whatever is asked for: with nothing at all there is nothing to train on."""
    source = Source([first, *[WRONG] * 20])
    with pytest.raises(
        UserError, match="4 rounds, and the groups of the buffer, gave . groups .*, not 3"
    ) as e:
        source.collect(3, replace(DYNAMIC, when_short=when_short))
    assert e.value.where == "algorithm.max_rounds"


def test_the_soft_punishment_of_the_paper() -> None:
    """Longest 20480, the last 4096 tokens count (DAPO, arXiv 2503.14476, eq. 13)."""
    lengths_G = np.array([1, 16384, 16384 + 1024, 16384 + 4096, 30000])
    assert overlong_penalty(lengths_G, 20480, 4096).tolist() == [0, 0, -0.25, -1, -1]
    rollout = RolloutBatch([group("a", (True, False, True, False, True))], ["ref a"])  # type: ignore[list-item]
    # Lengths 1 to 5, of which 4 and 5 are long.
    (short,) = with_overlong_penalty(rollout, Hyperparameters(overlong_share=0.4), 5).summaries
    assert short.rewards_G.tolist() == [1.0, 0.0, 1.0, -0.5, 0.0]
    assert with_overlong_penalty(rollout, Hyperparameters(), 5) is rollout


def test_a_greedy_sample_is_compared_with_and_not_learnt_from() -> None:
    """ReMax: R - R(greedy) (arXiv 2310.10505)."""
    drawn = replace(
        group("a", (True, False, True)),
        baseline=1,
        rewards_G=np.array([1.0, 0.25, -0.5], np.float32),
    )
    expected = [(0, 0, 0.75), (0, 2, -0.75)]
    assert learnt(samples_of([drawn, group("b", (True, False))], "remax")) == expected
    assert learnt(samples_of([drawn], "dr_grpo")) == expected
    assert not is_mixed(drawn), "the baseline's verdict is not one of the group's"
    metrics = rollout_metrics([drawn], compares_samples=False)
    assert (metrics["reward/accuracy"], metrics["rollout/samples"]) == (1.0, 2.0)


def test_what_was_cut_counts_in_its_group_and_teaches_nothing() -> None:
    cut = replace(group("a", (True, False, True)), finished_G=np.array([True, False, True]))
    everything, finished = samples_of([cut], "grpo"), samples_of([cut], "grpo", only_finished=True)
    assert [ref.num_stale for ref in samples_of([cut], "grpo", version=1)] == [1, 2, 3]
    assert not any(ref.num_stale for ref in samples_of([cut], "grpo", version=0))
    assert [ref.sample for ref in finished] == [0, 2]
    assert finished == [everything[0], everything[2]], "the advantages are those of all three"


@pytest.mark.parametrize("algorithm", [name for name, row in ALGORITHMS.items() if row.surrogate])
def test_one_sample_of_a_prompt_teaches_where_samples_are_not_compared(algorithm: str) -> None:
    """`needs_group` is what the function of the row does: only then is a sample's advantage also the others'."""
    row = ALGORITHMS[algorithm]
    advantage, other = (
        row.sample_advantages(torch.tensor([1.0, reward]))[0] for reward in (0.0, 0.5)
    )
    assert (advantage != other) == row.needs_group
    if row.needs_group or algorithm == "on_policy_distillation":  # whose rewards are the teacher's
        return
    baseline = int(row.greedy_baseline)
    groups = [
        group(name, (correct, *[True] * baseline)) for name, correct in (("a", True), ("b", False))
    ]
    groups = [replace(short, baseline=1 if baseline else None) for short in groups]
    samples = samples_of(groups, algorithm)
    assert [(ref.group, ref.sample, ref.advantage if row.advantage else ref.reward) for ref in samples] == [
        (0, 0, 1.0 - baseline), (1, 0, 0.0 - baseline),
    ]  # fmt: skip
    assert rollout_metrics(groups, compares_samples=False)["rollout/samples"] == 2.0


def test_rows_share_the_prompt_of_their_group_and_no_other() -> None:
    plain = group("a", (True, False))
    ((first,), (second,)) = plain.rows
    other = replace(second, has_group_prompt=False)
    refs = samples_of([replace(plain, rows=((first,), (other,)))], "grpo")
    prompt = first.length - first.response_length
    assert prompt > 0 and [ref.num_shared for ref in refs] == [prompt, 0]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "dr_grpo"])
def test_groups_of_different_sizes_have_their_own_advantages(algorithm: str) -> None:
    """As verdicts that failed leave them; a group of one has nobody to be better than."""
    samples = samples_of(
        [group("a", (True, False, True)), group("b", (False,)), group("c", RIGHT)], algorithm
    )
    (_, _, first), (_, _, second), *others = learnt(samples)
    assert first and second and first > 0 > second
    assert others == [(0, 2, first), (1, 0, 0.0), (2, 0, 0.0), (2, 1, 0.0)]


def test_staleness_is_of_tokens_and_never_beyond_the_bound() -> None:
    """Of seven tokens of two samples one is two versions old, two are one version old."""
    mixed = SamplePart(3, 1), SamplePart(4, 2), SamplePart(5, 1)
    short = replace(group("a", MIXED), rows=response_rows(1, [mixed, (SamplePart(5, 3),)]))
    assert staleness([short], 5, 2) == {
        "stale/token_mean": pytest.approx(4 / 7), "stale/token_max": 2, "stale/parts_mean": 2.0,
        "stale/share_0": pytest.approx(4 / 7), "stale/share_1": pytest.approx(2 / 7),
        "stale/share_2": pytest.approx(1 / 7),
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="tokens that are 2 versions old, and the bound is 1"):
        staleness([short], 5, 1)
    assert staleness([group("a", MIXED)], 0, 0) == {}, "nothing to tell where no group ever waits"


def episodes(correct: Sequence[bool]) -> SampleGroup:
    """Episodes of one row, of 1, 2, 3... turns; each turn and observation is one token, of the versions 2 to 4."""
    rng = np.random.default_rng(len(correct))
    prompt = Prompt("e", "", (1, 2, 3), "")
    samples = tuple(
        episode(prompt, rng, 1 + turns, longest=1, pays=False) for turns in range(len(correct))
    )
    return SampleGroup(prompt, samples, np.array(correct, np.float32), np.array(correct))


def in_rows(of: SampleGroup) -> SampleGroup:
    """The same episodes with a row for each turn."""
    return replace(of, samples=tuple(cut(sample, range(9)) for sample in of.samples))


def test_long_episodes_are_punished_by_the_tokens_that_count_against_their_limit() -> None:
    """Of one row 1, 3, 5, 7 and 9 tokens of at most 10, observations among them: the last 4 are long.

    In rows of a turn each, only what was sampled adds up, to 5 tokens. An observation that did not fit is in no row.
    """
    whole = episodes((True, False, True, False, True))
    penalised = Hyperparameters(overlong_share=0.4)

    def rewards(of: SampleGroup) -> list[float]:
        refs: list[Any] = ["ref"]
        (short,) = with_overlong_penalty(RolloutBatch([summary(of)], refs), penalised, 10).summaries
        assert short.response_lengths_G.tolist() == [1, 2, 3, 4, 5]
        return short.rewards_G.tolist()

    assert rewards(whole) == [1.0, 0.0, 1.0, -0.25, 0.25]
    assert rewards(in_rows(whole)) == [1.0, 0.0, 1.0, 0.0, 1.0]
    full = ended(whole, ["max_tokens", "cut", "max_turns", "answered", "done"])
    assert rewards(full) == [0.0, 0.0, 1.0, -0.25, 0.25]


def ended(of: SampleGroup, ends: Sequence[EpisodeEnd]) -> SampleGroup:
    """The same episodes, which ended so."""
    samples = [
        replace(sample, facts=replace(sample.facts, end=end), finished=end in ("answered", "done"))
        for sample, end in zip(of.samples, ends, strict=True)
        if sample.facts is not None
    ]
    return replace(of, samples=tuple(samples))


def test_the_overlong_filter_leaves_out_truncated_episodes_alone() -> None:
    """What ended by its turns, its broken calls or its time is learnt from: nothing else would teach it."""
    ends: list[EpisodeEnd] = ["answered", "max_tokens", "bad_calls", "cut", "max_turns", "timeout"]
    short = summary(ended(episodes((True, False, False, False, False, True)), ends))
    assert [ref.sample for ref in samples_of([short], "grpo", only_finished=True)] == [0, 2, 4, 5]
    cut_off = summary(ended(episodes((True, False)), ["max_tokens", "cut"]))
    assert samples_of([cut_off], "grpo", only_finished=True) == []
    with pytest.raises(UserError, match="every response of the step was cut"):
        refuse_empty([], [cut_off])


@pytest.mark.parametrize(
    ("correct", "is_kept"), [((True, False, False), True), ((True,) * 3, False)]
)
def test_dynamic_sampling_compares_episodes(correct: tuple[bool, ...], is_kept: bool) -> None:
    """One right episode of several rows is no mixed group by itself; and the rows do not change the advantages."""
    whole = episodes(correct)
    short, cut_up = summary(whole), summary(in_rows(whole))
    assert is_mixed(short) == is_mixed(cut_up) == is_kept
    refs = samples_of([cut_up], "dapo")
    assert [(ref.sample, ref.row, ref.tokens) for ref in refs] == [
        (0, 0, 1), (1, 0, 1), (1, 1, 1), (2, 0, 1), (2, 1, 1), (2, 2, 1),
    ]  # fmt: skip
    assert set(learnt(refs)) == set(learnt(samples_of([short], "dapo")))


def test_a_sample_has_one_ref_for_each_row_with_sampled_tokens() -> None:
    """Lengths of prompt, of all that follows, and of what was sampled; an episode without a turn has none."""
    whole = episodes((False, False, True))
    silent = response(whole.prompt.token_ids, np.zeros(0, np.int64))
    short = summary(replace(whole, samples=(silent, *whole.samples[1:])))
    refs = samples_of([short], "dr_grpo", version=3)
    assert [(ref.sample, ref.length, ref.response_length, ref.tokens, ref.num_trained) for ref in refs] == [
        (1, 6, 3, 2, 2), (2, 8, 5, 3, 3),
    ]  # fmt: skip
    assert refs[1].advantage == pytest.approx(2 / 3), "of three episodes"
    stale = [
        sum(part.num_tokens for part in parts if part.version < 3) for parts in short.parts_G[1:]
    ]
    assert [ref.num_stale for ref in refs] == stale and sum(stale)
    assert samples_of([summary(whole)], "dr_grpo")[0].num_trained is None, (
        "of one turn: as a response"
    )


def test_staleness_counts_what_was_sampled() -> None:
    whole = episodes((False, True, False, True))
    of_whole, of_rows = (staleness([summary(form)], 4, 2) for form in (whole, in_rows(whole)))
    assert of_whole == of_rows
    versions_T = np.concatenate([
        np.repeat([part.version for part in row.parts], [part.num_tokens for part in row.parts])[row.trained_T]
        for row in (sample.only_row for sample in whole.samples)
    ])  # fmt: skip
    assert of_whole["stale/token_mean"] == pytest.approx(float((4 - versions_T).mean()))


def test_the_rewards_of_turns_are_a_part_of_what_episodes_are_compared_by() -> None:
    """But for algorithms that credit the tokens before a turn's end with it."""
    whole = episodes((True, True))
    rewards_T = np.array([0.25, 0, 0.5], np.float32)
    whole = replace(
        whole, samples=(whole.samples[0], with_row(whole.samples[1], token_rewards_T=rewards_T))
    )
    short = summary(whole)
    for name in ("grpo", "rloo", "prime", "remax"):
        of = replace(short, baseline=0) if name == "remax" else short
        assert [ref.reward for ref in samples_of([of], name)][-1] == 1.75
    for name in ("ppo", "vapo", "reinforce_pp"):
        assert [ref.reward for ref in samples_of([short], name)] == [1.0, 1.0]
    assert rollout_metrics([short], compares_samples=False)["reward/mean"] == pytest.approx(1.375)

"""From statistics of samples and updates to what a step's record says."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from megarl.algos.losses import DIFF, DIFF_MAX, ENTROPY, EXPLAINED_VARIANCE, RETURN, VALUE
from megarl.algos.rollout_correction import ESS
from megarl.algos.statistics import (
    CLIPPED,
    GRAD_NORM,
    LOSS,
    MAX,
    SUM,
    TOKENS,
    UPDATE_MEAN,
    Statistic,
    Statistics,
    over_tokens,
)
from megarl.tracking.metrics import (
    age_metrics,
    balance_metrics,
    eval_metrics,
    failed_share,
    fault_metrics,
    idle_metrics,
    idle_shares,
    pick_samples,
    rollout_metrics,
    train_metrics,
    update_metrics,
)
from megarl.types import (
    EpisodeEnd,
    EpisodeFacts,
    GroupSummary,
    Metrics,
    PhaseBalance,
    RowSummary,
    SamplePart,
    StepSeconds,
    TranscriptEntry,
)
from megarl.types.worker_faults import ServiceFaults, WorkerFaults
from tests.samples.responses import response_rows

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"

ARRAYS = ("finished_G", "rewards_G", "correct_G")


def group(
    prompt: str, rewards: list[float], lengths: list[int], finished: list[bool] | None = None
) -> GroupSummary:
    return GroupSummary(
        prompt_text=prompt,
        answer="7",
        responses=tuple(f"{prompt}{i}" for i in range(len(rewards))),
        rows=response_rows(5, [(SamplePart(3, length),) for length in lengths]),
        finished_G=np.array(finished or [True] * len(rewards)),
        rewards_G=np.array(rewards, np.float32),
        correct_G=np.array(rewards) >= 1.0,
    )


def means(*groups: GroupSummary) -> Metrics:
    return rollout_metrics(groups, compares_samples=False)


def test_faults_are_added_up_over_groups_and_engines() -> None:
    judge = ServiceFaults("judge", retries=3, lost=1, outages=1, down_s=2.5)
    sandbox = ServiceFaults("sandbox", retries=2, down_s=1.0)
    quiet = group("p", [1.0], [2])
    first = replace(quiet, faults={"reward": WorkerFaults(1, (judge, sandbox))})
    second = replace(
        quiet, faults={"reward": WorkerFaults(0, (judge,)), "episode": WorkerFaults(4)}
    )
    assert fault_metrics([quiet, first, quiet, second]) == {
        "reward/workers_replaced": 1.0,
        "reward/retries": 8.0,
        "reward/calls_lost": 2.0,
        "reward/breaker_open_s": 6.0,
        "episode/workers_replaced": 4.0,
        "episode/retries": 0.0,
        "episode/calls_lost": 0.0,
        "episode/breaker_open_s": 0.0,
    }
    assert fault_metrics([quiet]) == {}


def emptied(of: GroupSummary, num_dropped: int) -> GroupSummary:
    """The group whose samples were all dropped, because their rewards failed."""
    nothing = np.ones(0)
    return replace(
        of,
        responses=(),
        num_dropped=num_dropped,
        finished_G=nothing,
        rewards_G=nothing,
        correct_G=nothing,
    )


def test_rollout_metrics_are_means_over_samples_not_over_groups() -> None:
    groups = [group("a", [1.0, 1.0, 1.0], [2, 2, 2]), group("b", [0.0], [10], [False])]
    metrics = means(*groups)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/accuracy"] == 0.75
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.75 * 0.25))
    assert metrics["rollout/response_length_mean"] == 4.0
    assert metrics["rollout/response_length_max"] == 10.0
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["rollout/samples"] == 4
    assert "rollout/accepted" not in metrics, "without drafts"


def test_accepted_tokens_are_a_mean_over_all_verifications() -> None:
    quick = replace(group("a", [1.0, 1.0], [11, 21]), verifications=15, prefills=2)
    # the first token of each needs none
    slow = replace(group("b", [0.0, 0.0], [4, 1]), verifications=3, prefills=2)
    assert means(quick, slow)["rollout/accepted"] == (10 + 20 + 3) / 18
    assert means(quick, slow, group("c", [1.0], [500]))["rollout/accepted"] == 33 / 18, (
        "of no drafts"
    )
    phased = replace(quick, prefills=7)  # responses of four phases and of three
    assert means(phased, slow)["rollout/accepted"] == (32 - 7 + 3) / 18
    greedy = replace(group("a", [1.0, 1.0], [11, 999]), verifications=5, prefills=1, baseline=1)
    assert means(greedy)["rollout/accepted"] == 2.0


def test_balance_is_the_busiest_groups_work_and_the_tails_of_all_rounds() -> None:
    """Every round waits for its busiest group: 30 + 4 tokens, where 20 + 3 would have been even."""
    rounds = [PhaseBalance((10, 30), 2.5, 1.0, 9.0), PhaseBalance((4, 2), 0.5, 0.25, 2.0)]
    seconds = {"rollout/tail_s": 3.0, "rollout/idle_s": 1.25}
    assert balance_metrics(rounds) == {"rollout/imbalance": pytest.approx(34 / 23)} | seconds
    ahead = PhaseBalance((7,), 0.0, 0.0, 1.0)  # on one of the two engines
    assert balance_metrics([*rounds, ahead])["rollout/imbalance"] == pytest.approx(
        (34 + 7) / (23 + 7)
    )
    assert balance_metrics([]) == {}, "all groups were left over from the step before"


def test_what_rounds_were_expected_to_take_is_compared_with_what_they_took() -> None:
    fit = StepSeconds(0.5, 0.25, 0.125)
    rounds = [PhaseBalance((1,), 0.0, 0.0, 7.0), PhaseBalance((1,), 0.0, 0.0, 4.0, fit, 3.0)]
    rounds.append(PhaseBalance((1,), 0.0, 0.0, 6.0, fit, 6.0))
    metrics = balance_metrics(rounds)
    assert metrics["plan/rollout_error"] == pytest.approx(0.1), (
        "of the rounds that have rounds before them"
    )
    assert (metrics["plan/step_s"], metrics["plan/sequence_s"], metrics["plan/read_s"]) == (
        0.5,
        0.25,
        0.125,
    )


def test_gpus_that_only_train_wait_for_samples_and_those_that_only_sample_for_the_rest() -> None:
    phases = {"time/rollout_s": 5.0, "time/train_s": 7.0, "time/ahead_s": 1.0, "time/eval_s": 2.0}
    assert idle_metrics(phases, 20.0, 11.0) == {"idle/ranks_s": 8.0, "idle/engines_s": 7.0}
    assert idle_metrics({}, 1.0, 0.0) == {"idle/ranks_s": 0.0, "idle/engines_s": 1.0}


def test_each_role_has_the_share_of_the_step_in_which_it_has_nothing_to_do() -> None:
    phases = {"time/rollout_s": 5.0, "time/train_s": 7.0, "time/eval_s": 2.0}
    scored = [replace(group("a", [1.0], [2]), reward_worker_s=seconds) for seconds in (1.0, 3.0)]
    assert idle_shares(phases, 16.0, 4.0, scored, num_engines=2) == {
        "idle/ranks_share": 7 / 16,
        "idle/engines_share": 10 / 16,
        "idle/reward_workers_share": 14 / 16,
    }


def test_failed_reward_results_are_a_share_of_all_samples_dropped_or_not() -> None:
    dropped = replace(group("a", [1.0], [2]), failures=("x", "y", "z"), num_dropped=3)
    penalised = replace(group("b", [1.0, 0.0, 0.0, -1.0], [2, 2, 2, 2]), failures=("x",))
    empty = replace(group("c", [], []), failures=("x",), num_dropped=1)
    assert means(dropped, penalised)["reward/failed"] == 0.5
    assert failed_share([]) == 0.0
    metrics = eval_metrics({"hard": [dropped, empty], "easy": [empty, penalised]})
    assert metrics["eval/hard/accuracy"] == 1.0 and metrics["eval/easy/accuracy"] == 0.25, (
        "of those that were judged"
    )
    assert metrics["eval/failed"] == 0.6
    assert [
        sample["prompt"] for sample in pick_samples([dropped, empty, penalised], 3, {}, {})
    ] == [
        "a",
        "b",
        "b",
    ]


def test_train_metrics_of_several_updates() -> None:
    """Means over the updates, means over all their tokens, and each update's own loss, gradient norm and tokens."""
    aux_loss = Statistic("aux_loss", UPDATE_MEAN)
    names = (LOSS, GRAD_NORM, TOKENS, CLIPPED, DIFF, DIFF_MAX, aux_loss)
    parts = ((0.5,), (2.0,), (6.0,), (3.0, 6.0), (1.0, 6.0), (0.4, 6.0), (1.0,))
    first: Statistics = dict(zip(names, parts, strict=True))
    parts = ((0.3,), (1.0,), (2.0,), (1.0, 2.0), (1.0, 2.0), (0.6, 2.0), (3.0,))
    second: Statistics = dict(zip(names, parts, strict=True))
    assert train_metrics([first, second]) == {
        "train/loss": 0.4,
        "train/grad_norm": 1.5,
        "train/tokens": 8.0,
        "train/clipped": 0.5,
        "train/aux_loss": 2.0,
        "rollout/logprob_diff_mean": 0.25,
        "rollout/logprob_diff_max": 0.6,
        "train/loss/1": 0.5,
        "train/loss/2": 0.3,
        "train/grad_norm/1": 2.0,
        "train/grad_norm/2": 1.0,
        "train/tokens/1": 6.0,
        "train/tokens/2": 2.0,
    }
    assert not any("/1" in name for name in update_metrics([first, second], "critic"))


def test_a_warm_starts_updates_have_a_room_of_their_own() -> None:
    update: Statistics = {LOSS: (0.5,), ENTROPY: (6.0, 8.0), DIFF: (4e-6, 8.0)}
    assert train_metrics([update], room="warm_start") == {
        "warm_start/loss": 0.5,
        "warm_start/entropy": 0.75,
        "rollout/logprob_diff_mean": 5e-7,
    }


def test_statistics_of_some_updates_alone_and_of_nothing() -> None:
    """Replay is compared in the first update; a mean of no tokens is not published."""
    some, nothing = Statistic("replay/logprob_diff"), Statistic("nothing")
    without: Statistics = {nothing: (0.0, 0.0), DIFF_MAX: (0.0, 0.0)}
    assert train_metrics([{some: (3.0, 6.0)}, without]) == {"replay/logprob_diff": 0.5}


def test_a_new_statistic_is_published_as_its_reduction_says() -> None:
    """No table knows it: what a loss declares is enough, from its tokens on, over micro-batches and processes."""
    new = [Statistic("mean"), Statistic("room/largest", MAX), Statistic("total", SUM)]
    mask_T, values_T = (
        torch.tensor([True, False, True, True, True]),
        torch.tensor([1.0, 9.0, 2.0, 0.0, 0.0]),
    )
    stats_by_name = over_tokens(mask_T, dict.fromkeys(new, values_T))
    update = pickle.loads(
        pickle.dumps(
            {name: tuple(value.reshape(-1).tolist()) for name, value in stats_by_name.items()}
        )
    )
    assert train_metrics([update]) == {"train/mean": 0.75, "room/largest": 2.0, "train/total": 3.0}


def test_every_evaluation_set_weighs_the_same() -> None:
    sets = {
        "hard": [group("a", [0.0], [1])],
        "easy": [group("b", [1.0], [1]), group("c", [1.0], [1])],
    }
    metrics = eval_metrics(sets)
    assert (
        metrics["eval/hard/accuracy"],
        metrics["eval/easy/accuracy"],
        metrics["eval/accuracy"],
    ) == (
        0.0,
        1.0,
        0.5,
    )
    assert metrics["eval/failed"] == 0.0
    assert not any("@" in name for name in metrics), "one answer to each prompt"
    assert eval_metrics({}) == {}


def test_several_answers_to_a_prompt() -> None:
    """Of four: two right ones ahead of single wrong ones, a tie of right and wrong, one right beside three wrong."""
    answers = {"ahead": "7 7 8 9", "tie": "7 7 8 8", "behind": "8 7 8 8", "silent": " , , , "}
    sets = []
    for name, text in answers.items():
        replies = tuple(
            reply.strip() for reply in (text.split(",") if "," in text else text.split())
        )
        right = [float(reply == "7") for reply in replies]
        sets.append(
            replace(
                group(name, right, [1] * 4), given_answers=replies, correct_G=np.array(right) > 0
            )
        )
    metrics = eval_metrics({"set": sets})
    assert metrics["eval/set/avg@4"] == metrics["eval/set/accuracy"] == 5 / 16
    assert metrics["eval/set/pass@4"] == 3 / 4
    assert metrics["eval/set/maj@4"] == (1 + 0.5 + 0 + 0) / 4
    lost = replace(
        sets[0], responses=sets[0].responses[:3], num_dropped=1, **dict.fromkeys(ARRAYS, np.ones(3))
    )
    lost = replace(lost, given_answers=lost.given_answers[:3])
    assert "eval/set/maj@4" in eval_metrics({"set": [lost, lost]}), "as many as were asked for"


def test_an_episode_has_one_vote_whatever_its_rows() -> None:
    """Two right episodes of one row against one wrong one of three: the majority is right."""
    rows = RowSummary(9, 4, 2, (SamplePart(3, 2),))
    summary = replace(group("a", [1.0, 1.0, 0.0], [2, 2, 6]), given_answers=("7", "7", "8"))
    metrics = eval_metrics({"set": [replace(summary, rows=((rows,), (rows,), (rows,) * 3))]})
    assert (metrics["eval/set/maj@3"], metrics["eval/set/pass@3"], metrics["eval/set/avg@3"]) == (
        1.0,
        1.0,
        2 / 3,
    )


def test_what_happened_in_episodes_is_told_where_there_are_any() -> None:
    rows = (
        (RowSummary(9, 4, 2, (SamplePart(3, 2),)),),
        (RowSummary(9, 4, 3, ()), RowSummary(9, 2, 2, ())),
    )
    facts = (
        EpisodeFacts(1, 0, 0, 0.0, "answered", 2),
        EpisodeFacts(4, 3, 1, 2.5, "max_turns", 9, 3, 1, 40, 30),
    )
    summary = replace(
        group("a", [1.0, 0.0], [2, 5]), rows=rows, facts=facts, turn_rewards_G=np.array([0.5, 0.0])
    )
    metrics = means(summary, group("b", [1.0], [100]))
    ends = {
        name: value for name, value in metrics.items() if name.startswith("episode/end/") and value
    }
    assert ends == {"episode/end/answered": 0.5, "episode/end/max_turns": 0.5}
    assert sum(name.startswith("episode/end/") for name in metrics) == len(get_args(EpisodeEnd)), (
        "all ends in all steps"
    )
    assert {name: value for name, value in metrics.items() if "episode/" in name and "/end/" not in name} == {
        "episode/turns_mean": 2.5, "episode/turns_max": 4.0, "episode/calls_mean": 1.5, "episode/call_errors": 1 / 3,
        "episode/tool_s_mean": 1.25, "episode/tool_s_max": 2.5, "episode/rows_mean": 1.5,
        "episode/masked_share": pytest.approx(3 / 10), "episode/dropped_tokens": 4.0, "episode/turn_reward_mean": 0.25,
        "episode/dropped/unawaited": 3.0, "episode/dropped/anew": 1.0,
        "episode/prefix_hit_share": 0.75, "episode/begun_anew": 0.0,
    }  # fmt: skip
    assert (
        metrics["reward/mean"] == pytest.approx(2.5 / 3)
        and metrics["rollout/response_length_max"] == 100
    )
    assert not any("episode" in name for name in means(group("b", [1.0], [100])))
    greedy = means(replace(summary, baseline=1))
    assert (greedy["episode/turns_max"], greedy["episode/rows_mean"]) == (1.0, 1.0)
    assert "episode/prefix_hit_share" not in greedy, "nothing could be cached"
    assert [sample["reward"] for sample in pick_samples([summary], 2, {}, {})] == [1.5, 0.0]


def test_an_evaluation_set_of_episodes_has_its_own_turns_and_calls() -> None:
    """Each set's, in the mean over its episodes; a prompt whose verdicts failed has none."""
    facts = [
        EpisodeFacts(turns, calls, 0, 0.0, "answered", 2)
        for turns, calls in ((1, 0), (4, 3), (3, 4))
    ]
    one, two = (
        replace(group("a", [1.0, 0.0], [2, 5]), facts=tuple(facts[:2])),
        group("b", [1.0], [2]),
    )
    metrics = eval_metrics(
        {"hard": [one, replace(two, facts=(facts[2],)), emptied(two, 1)], "plain": [two]}
    )
    assert (metrics["eval/hard/turns_mean"], metrics["eval/hard/calls_mean"]) == (8 / 3, 7 / 3)
    assert not [
        name
        for name in metrics
        if name.startswith("eval/plain/") and ("turns" in name or "calls" in name)
    ]


def test_samples_are_picked_from_as_many_groups_as_possible_with_places_and_advantages() -> None:
    """Places from 0, by which the samples of a prompt are found; a sample that is not trained on has no advantage."""
    groups = [
        group("a", [1.0, 0.0], [1, 1]),
        group("b", [0.0], [1]),
        group("c", [0.5, 0.0], [1, 1]),
    ]
    advantages = {(0, 0): 0.7, (0, 1): -0.7, (1, 0): None, (2, 1): 0.0}
    picked = pick_samples(groups, 9, advantages, {})
    keys = ("response", "group", "sample", "advantage")
    assert [tuple(sample[key] for key in keys) for sample in picked] == [
        *(("a0", 0, 0, 0.7), ("b0", 1, 0, None), ("c0", 2, 0, None)),
        *(("a1", 0, 1, -0.7), ("c1", 2, 1, 0.0)),
    ]
    assert (
        pick_samples(groups, 4, advantages, {}) == picked[:4] and pick_samples([], 3, {}, {}) == []
    )


def test_samples_have_the_tokens_of_their_rows_where_all_are_known() -> None:
    groups = [group("a", [1.0, 0.0], [1, 1])]
    (known, other) = pick_samples(groups, 2, {}, {(0, 0, 0): {"token_ids": [7]}, (1, 1, 0): {}})
    assert known["rows"] == [{"token_ids": [7]}]
    assert "rows" not in other


def test_differences_by_age_are_published_where_tokens_are_older_than_the_policy() -> None:
    assert age_metrics({0: 0.1}) == age_metrics({}) == {}
    assert age_metrics({0: 0.1, 2: 0.3, 40: 9.0}) == {
        "rollout/logprob_diff_age_0": 0.1,
        "rollout/logprob_diff_age_2": 0.3,
    }


def test_a_sample_has_its_source_where_the_row_names_one() -> None:
    groups = [replace(group("a", [1.0], [1]), source="gsm8k"), group("b", [0.0], [1])]
    named, other = pick_samples(groups, 2, {}, {})
    assert named["source"] == "gsm8k"
    assert "source" not in other


def test_groups_without_variance_are_those_whose_drawn_samples_have_one_reward() -> None:
    equal, mixed, single = (
        group("a", [0.7, 0.7, 0.7], [1, 1, 1]),
        group("b", [1.0, 0.0], [1, 1]),
        group("c", [0.3], [1]),
    )
    share = "reward/groups_without_variance"
    assert rollout_metrics([equal, mixed, single, mixed], compares_samples=True)[share] == 0.5
    assert share not in means(equal, mixed), "the algorithm compares no samples"
    turns = replace(mixed, turn_rewards_G=np.array([0.0, 1.0]))  # 1 + 0 and 0 + 1
    assert rollout_metrics([turns, mixed], compares_samples=True)[share] == 0.5
    greedy = replace(mixed, baseline=1)
    assert rollout_metrics([greedy, mixed, emptied(mixed, 2)], compares_samples=True)[share] == 0.5


def test_samples_of_episodes_have_all_that_was_said() -> None:
    facts = EpisodeFacts(1, 0, 0, 0.5, "answered", 2)
    first: tuple[TranscriptEntry, ...] = (
        {"role": "assistant", "text": "a0", "calls": [], "reward": 0.0},
    )
    summary = replace(group("a", [1.0, 0.0], [2, 2]), facts=(facts, facts), transcripts=(first,))
    shown, other = pick_samples([summary], 2, {}, {})
    assert shown["episode"] == {
        "turns": list(first), "calls": 0, "call_errors": 0, "end": "answered", "tool_s": 0.5
    }  # fmt: skip
    assert shown.keys() - other.keys() == {"episode"}, "of which the summary has no transcript"


def test_what_a_critics_values_explain_of_the_returns() -> None:
    """Returns 0, 1, 1, 2 (variance 1/2); values 0.5 too low for two of them: the errors' variance is 1/16."""
    update: Statistics = {
        LOSS: (0.3,),
        GRAD_NORM: (2.0,),
        CLIPPED: (1.0, 4.0),
        VALUE: (3.0, 4.0),
        RETURN: (4.0, 4.0),
    }
    update[EXPLAINED_VARIANCE] = (4.0, 6.0, 1.0, 0.5, 4.0)
    metrics = update_metrics([update, update], "critic")
    assert metrics["critic/explained_variance"] == pytest.approx(1 - (0.125 - 0.0625) / 0.5)
    assert (metrics["critic/loss"], metrics["critic/clipped"], metrics["critic/value_mean"]) == (
        0.3,
        0.25,
        0.75,
    )
    flat: Statistics = {EXPLAINED_VARIANCE: (4.0, 4.0, 1.0, 0.5, 4.0)}
    assert update_metrics([flat], "critic") == {"critic/explained_variance": 0.0}, (
        "nothing to explain"
    )


def test_the_effective_sample_size_is_a_share_of_the_tokens() -> None:
    """Kish: weights 1, 1, 0, 0 are as good as half of the samples."""
    assert train_metrics([{ESS: (2.0, 2.0, 4.0)}]) == {
        "train/rollout_correction_ess": pytest.approx(0.5)
    }

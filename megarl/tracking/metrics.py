"""One flat `room/name` record: what ranks and engines report of a step, as means and shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import get_args

import numpy as np

from megarl.algos.statistics import Statistics
from megarl.types import (
    EpisodeEnd,
    EpisodeFacts,
    GroupSummary,
    Metrics,
    PhaseBalance,
    RowSummary,
    episode_dict,
)
from megarl.types.episodes import DropReason
from megarl.types.json_objects import JsonObject
from megarl.types.worker_faults import WorkerFaults, all_faults

# The advantage of a sample by its places in the step's groups and in its group; None: the algorithm gives it none.
Advantages = Mapping[tuple[int, int], float | None]
# by the numbers of group, sample and row in the step
ShownTokens = Mapping[tuple[int, int, int], JsonObject]
_MOST_AGE = 8  # in versions, of tokens that have a number of their own


def rollout_metrics(groups: Sequence[GroupSummary], *, compares_samples: bool) -> Metrics:
    """Means over all samples of a step that were drawn; `truncated` is the share that did not end by itself.

    compares_samples: the algorithm's advantages compare the samples of a group. Then `reward/groups_without_variance`
    is added: the share of the groups whose rewards are all equal, which give no gradient.

    The length of an episode is that of the tokens which the model sampled, its reward that of its turns, too.
    `accepted`, with drafts: mean response tokens per verification; the first token of each phase of a response comes
    from the pass that reads what is before it.
    """
    drawn = [group.drawn_G for group in groups]
    pairs = list(zip(groups, drawn, strict=True))
    rewards = np.concatenate([group.total_rewards_G[drawn_G] for group, drawn_G in pairs])
    lengths = np.concatenate([group.response_lengths_G[drawn_G] for group, drawn_G in pairs])
    finished = np.concatenate([group.finished_G[drawn_G] for group, drawn_G in pairs])
    correct = np.concatenate([group.correct_G[drawn_G] for group, drawn_G in pairs])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/accuracy": float(correct.mean()),
        "reward/failed": failed_share(groups),
        "rollout/samples": float(len(rewards)),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated": float(1.0 - finished.mean()),
    }
    if compares_samples:
        metrics["reward/groups_without_variance"] = share_without_variance(groups)
    # not those that another engine sampled
    drafted = [(group, drawn_G) for group, drawn_G in pairs if group.verifications]
    if drafted:
        verified = sum(
            int(group.response_lengths_G[drawn_G].sum()) - group.prefills
            for group, drawn_G in drafted
        )
        verifications = sum(group.verifications for group, _ in drafted)
        metrics["rollout/accepted"] = verified / verifications
    return metrics | episode_metrics(groups)


def share_without_variance(groups: Sequence[GroupSummary]) -> float:
    """Of the groups with samples, the share in which all have one reward, as that of a single sample."""
    rewards = [group.total_rewards_G[group.drawn_G] for group in groups]
    is_equal = [bool((rewards_G == rewards_G[0]).all()) for rewards_G in rewards if len(rewards_G)]
    return sum(is_equal) / len(is_equal)


def episode_metrics(groups: Sequence[GroupSummary]) -> Metrics:
    """Of a step's episodes that were drawn and have facts; {} where there are none.

    `call_errors`: of all calls, the share that was broken or failed; `masked_share`: of all tokens after the prompts,
    those that the model did not sample; `dropped_tokens`: sampled ones that are in no row, `dropped/...`: of each
    reason; `begun_anew`: how often an episode did; `prefix_hit_share`: of the tokens of turns' contexts that the engine
    had computed before, those that it found in its cache; `end/...`: the share of the episodes that ended so.
    """
    facts: list[EpisodeFacts] = []
    rows: list[tuple[RowSummary, ...]] = []
    turn_rewards: list[float] = []
    for group in groups:
        for sample, of_sample in enumerate(group.facts):
            if of_sample and group.drawn_G[sample]:
                facts.append(of_sample)
                rows.append(group.rows[sample])
                if group.turn_rewards_G is not None:
                    turn_rewards.append(group.turn_rewards_G[sample])
    if not facts:
        return {}
    tokens = sum(row.response_length for of_episode in rows for row in of_episode)
    trained = sum(row.num_trained for of_episode in rows for row in of_episode)
    turns = [episode.turns for episode in facts]
    calls = [episode.calls for episode in facts]
    tool_s = [episode.tool_s for episode in facts]
    dropped = {
        f"episode/dropped/{reason}": float(
            sum(getattr(episode, f"dropped_{reason}") for episode in facts)
        )
        for reason in get_args(DropReason)
    }
    ends = [episode.end for episode in facts]
    metrics = {
        "episode/turns_mean": float(np.mean(turns)),
        "episode/turns_max": float(max(turns)),
        "episode/calls_mean": float(np.mean(calls)),
        "episode/call_errors": sum(episode.call_errors for episode in facts) / max(sum(calls), 1),
        "episode/tool_s_mean": float(np.mean(tool_s)),
        "episode/tool_s_max": float(max(tool_s)),
        "episode/rows_mean": sum(map(len, rows)) / len(rows),
        "episode/masked_share": 1.0 - trained / tokens if tokens else 0.0,
        "episode/dropped_tokens": sum(dropped.values()),
        "episode/begun_anew": float(sum(episode.begun_anew for episode in facts)),
        **dropped,
        **{f"episode/end/{end}": ends.count(end) / len(ends) for end in get_args(EpisodeEnd)},
    }
    if reusable := sum(episode.reusable_tokens for episode in facts):
        cached = sum(episode.cached_tokens for episode in facts)
        metrics["episode/prefix_hit_share"] = cached / reusable
    if turn_rewards:
        metrics["episode/turn_reward_mean"] = float(np.mean(turn_rewards))
    return metrics


def balance_metrics(rounds: Sequence[PhaseBalance]) -> Metrics:
    """How evenly the engines worked in a step's sampling phases, each of which waits for its last sample.

    `imbalance`: tokens of the busiest attention group over the mean group's; `tail_s`: from 90 % of a round's samples
    to all of them; `idle_s`: of the mean engine with nothing left, until the round's end. The busiest groups' tokens,
    the means and the seconds are each added up over the rounds. A step without a round has none of them.

    `plan/rollout_error`: by which share the rounds before let expect other seconds than the step's rounds took;
    `plan/step_s`, `plan/sequence_s`, `plan/read_s`: what they let expect of an engine, see `StepSeconds`.
    """
    if not rounds:
        return {}
    # not all engines have part in a round that is sampled ahead
    tokens = [balance.group_tokens for balance in rounds]
    even = sum(sum(groups) / len(groups) for groups in tokens)
    metrics: Metrics = {
        "rollout/imbalance": sum(map(max, tokens)) / even,
        "rollout/tail_s": sum(balance.tail_s for balance in rounds),
        "rollout/idle_s": sum(balance.idle_s for balance in rounds),
    }
    foretold = [balance for balance in rounds if balance.fit]
    seconds = sum(balance.seconds for balance in foretold)
    if foretold and foretold[-1].fit and seconds:
        expected_s = sum(balance.expected_s for balance in foretold)
        metrics |= {f"plan/{name}": value for name, value in asdict(foretold[-1].fit).items()}
        metrics["plan/rollout_error"] = abs(expected_s / seconds - 1)
    return metrics


def idle_metrics(phases: Metrics, step_s: float, sampled_s: float) -> Metrics:
    """Seconds of a step in which GPUs that only train, or only sample, had nothing to do.

    phases: seconds by `time/<phase>_s`. sampled_s: that engines had samples, the evaluation's apart.
    """
    eval_s = phases.get("time/eval_s", 0.0)
    waited_s = phases.get("time/rollout_s", 0.0) + phases.get("time/ahead_s", 0.0)
    return {
        "idle/ranks_s": waited_s + eval_s,
        "idle/engines_s": max(0.0, step_s - sampled_s - eval_s),
    }


def idle_shares(
    phases: Metrics,
    step_s: float,
    sampled_s: float,
    groups: Sequence[GroupSummary],
    num_engines: int,
) -> Metrics:
    """The share of a step in which each role had nothing to do, whoever shares its GPUs.

    phases, sampled_s: as of `idle_metrics`. groups: all that were scored in the step, by so many engines.
    """
    idle = idle_metrics(phases, step_s, sampled_s)
    shares = {
        "idle/ranks_share": min(1.0, idle["idle/ranks_s"] / step_s),
        "idle/engines_share": idle["idle/engines_s"] / step_s,
    }
    worked_s = [group.reward_worker_s for group in groups if group.reward_worker_s is not None]
    if worked_s and num_engines:
        rewarding_s = sum(worked_s) / num_engines
        shares["idle/reward_workers_share"] = max(0.0, 1.0 - rewarding_s / step_s)
    return shares


def failed_share(groups: Sequence[GroupSummary]) -> float:
    """Of all samples, those whose reward failed, in the groups or dropped from them."""
    asked = sum(len(group.rewards_G) + group.num_dropped for group in groups)
    return sum(len(group.failures) for group in groups) / max(asked, 1)


def fault_metrics(groups: Sequence[GroupSummary]) -> Metrics:
    """Of a step's worker processes and the services that they call; {} where nothing went wrong.

    `workers_replaced`: processes that were ended; `retries`: tries of calls that were made again; `calls_lost`: calls
    without an answer; `breaker_open_s`: seconds in which calls were held back, summed over engines.
    """
    metrics: Metrics = {}
    for room, faults in faults_by_room(groups).items():
        services = faults.services
        metrics |= {
            f"{room}/workers_replaced": float(faults.ended),
            f"{room}/retries": float(sum(service.retries for service in services)),
            f"{room}/calls_lost": float(sum(service.lost for service in services)),
            f"{room}/breaker_open_s": sum(service.down_s for service in services),
        }
    return metrics


def faults_by_room(groups: Sequence[GroupSummary]) -> dict[str, WorkerFaults]:
    """The faults of all groups together, `reward` and `episode`."""
    parts: dict[str, list[WorkerFaults]] = {}
    for group in groups:
        for room, faults in group.faults.items():
            parts.setdefault(room, []).append(faults)
    return {room: all_faults(faults) for room, faults in sorted(parts.items())}


def train_metrics(updates: Sequence[Statistics], room: str = "train") -> Metrics:
    """`update_metrics` of the policy; room: `train` or `warm_start`.

    With several updates some statistics are also published for each update, as `train/loss/1`...
    """
    metrics = update_metrics(updates, room)
    if len(updates) == 1:
        return metrics
    for number, update in enumerate(updates, start=1):
        each = {name: values for name, values in update.items() if name.each_update}
        metrics |= {
            f"{name}/{number}": value for name, value in update_metrics([each], room).items()
        }
    return metrics


def update_metrics(updates: Sequence[Statistics], room: str) -> Metrics:
    """The statistics of a model's updates in one step, reduced over the updates that have them, by published names.

    room: the first part of the names; `critic` for auxiliary models.
    """
    metrics: Metrics = {}
    for statistic in {statistic: None for update in updates for statistic in update}:
        reduction = statistic.reduction
        columns = zip(
            *(update[statistic] for update in updates if statistic in update), strict=True
        )
        if reduction.is_max:
            parts = [max(column) for column in columns]
        elif reduction.is_update_mean:
            parts = [sum(column) / len(column) for column in columns]
        else:
            parts = [sum(column) for column in columns]
        number = reduction.result(*parts)
        if number is not None:
            metrics[statistic.published_in(room)] = number
    return metrics


def eval_metrics(sets: Mapping[str, Sequence[GroupSummary]]) -> Metrics:
    """Of each evaluation set; `eval/accuracy`, their mean: every set weighs the same, whatever its size.

    With k > 1 samples of each prompt `accuracy` is avg@k, the mean over all of them; pass@k: the share of prompts of
    which any is right; maj@k: of which the answer that most of them give is right. Sets of episodes have their mean
    turns and calls.
    """
    if not sets:
        return {}
    metrics: Metrics = {}
    for name, asked in sets.items():
        groups = [group for group in asked if len(group.rewards_G)]  # others' rewards failed
        of_set = {
            "accuracy": _mean([group.correct_G for group in groups]),
            "response_length_mean": _mean([group.response_lengths_G for group in groups]),
            "truncated": 1.0 - _mean([group.finished_G for group in groups]),
        }
        if facts := [episode for group in groups for episode in group.facts if episode]:
            of_set["turns_mean"] = float(np.mean([episode.turns for episode in facts]))
            of_set["calls_mean"] = float(np.mean([episode.calls for episode in facts]))
        k = max(len(group.responses) + group.num_dropped for group in groups)
        if k > 1:
            of_set[f"avg@{k}"] = of_set["accuracy"]
            of_set[f"pass@{k}"] = float(np.mean([group.correct_G.any() for group in groups]))
            of_set[f"maj@{k}"] = float(np.mean([_majority(group) for group in groups]))
        metrics |= {f"eval/{name}/{key}": value for key, value in of_set.items()}
    accuracies = [metrics[f"eval/{name}/accuracy"] for name in sets]
    metrics["eval/accuracy"] = sum(accuracies) / len(accuracies)
    metrics["eval/failed"] = failed_share([group for asked in sets.values() for group in asked])
    return metrics


def _mean(arrays: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(arrays).mean())


def _majority(group: GroupSummary) -> float:
    """Whether the answer given most often is right; among equally many, the share of them that are."""
    votes: dict[str, list[bool]] = {}
    answers = group.given_answers or group.responses
    for answer, is_correct in zip(answers, group.correct_G, strict=True):
        if answer:
            votes.setdefault(answer, []).append(bool(is_correct))
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    ahead = [any(are_correct) for are_correct in votes.values() if len(are_correct) == most]
    return sum(ahead) / len(ahead)


def age_metrics(diffs: Mapping[int, float]) -> Metrics:
    """|engine - trainer| logprob by the age of tokens in versions; {} where no token is older than the policy.

    That of older tokens has the distance between the two policies in it.
    """
    if max(diffs, default=0) == 0:
        return {}
    return {
        f"rollout/logprob_diff_age_{age}": diff for age, diff in diffs.items() if age <= _MOST_AGE
    }


def pick_samples(
    groups: Sequence[GroupSummary], count: int, advantages: Advantages, tokens: ShownTokens
) -> list[JsonObject]:
    """The first sample of every group, then the second of every group... until there are `count`.

    `group` and `sample` are its places, from 0, in the step's groups and in its group, `advantage` is None where it has
    none, `source` is there where its data row names one. Those of episodes have `episode`: the whole of it, see
    `episode_dict`. `rows` are the tokens of its rows, where they are known.
    """
    most = max((len(group.responses) for group in groups), default=0)
    places = (
        (at, sample)
        for sample in range(most)
        for at in range(len(groups))
        if sample < len(groups[at].responses)
    )
    return [
        {
            "group": at,
            "sample": sample,
            **_sample(groups[at], sample, advantages.get((at, sample))),
            **_tokens(groups[at], at, sample, tokens),
        }
        for at, sample in islice(places, count)
    ]


def _tokens(group: GroupSummary, at: int, sample: int, tokens: ShownTokens) -> JsonObject:
    """The rows' tokens; {} where those of a row are not known, as of samples that were not trained on."""
    rows = [tokens.get((at, sample, row)) for row in range(len(group.rows[sample]))]
    if not rows or None in rows:
        return {}
    return {"rows": rows}


def _sample(group: GroupSummary, index: int, advantage: float | None) -> JsonObject:
    sample = {
        "prompt": group.prompt_text,
        "answer": group.answer,
        "response": group.responses[index],
        "reward": float(group.total_rewards_G[index]),
        "advantage": advantage,
        "correct": bool(group.correct_G[index]),
        "length": int(group.response_lengths_G[index]),
        "finished": bool(group.finished_G[index]),
        # -1: no token was sampled
        "version": max((part.version for part in group.parts_G[index]), default=-1),
    }
    if group.source:
        sample["source"] = group.source
    facts = group.facts[index] if index < len(group.transcripts) else None
    if facts is None:
        return sample
    return sample | {"episode": episode_dict(facts, group.transcripts[index])}

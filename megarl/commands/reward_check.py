"""`megarl reward-check`: the results of a reward function on its data's own answers, others, and hostile responses.

Or, with `--samples`, on the samples of a file, compared with the rewards that the file has.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megarl.config import RewardConfig
from megarl.data.files import answered_rows
from megarl.printable import one_line, short, show
from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.samples.parquet import open_samples
from megarl.types import UserError
from megarl.types.reward_result import Failure, RewardResult

_OWN = "its own answer"
_OTHER = "another row's answer"
_EMPTY = "an empty response"
_BOMBS = "bombs"
_BEFORE = "in the file"
_ANEW = "anew"
_START_S = 600.0

BOMBS = (
    "a" * 1_000_000,
    "the answer is " * 50_000,
    "a" * 30 + "!",
    "a " * 50_000,
    "<think>" * 20_000,
    "(" * 50_000,
    "{" * 50_000 + "}" * 50_000,
    "[" * 50_000 + "]" * 50_000,
    '{"a":' * 20_000,
    "\x00" * 1000,
    "\ud800 \udfff",
    "9" * 100_000,
    "1e999999999",
    "9**9**9**9",
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{99999999!}",
    r"\boxed{" * 10_000,
    "import os; os._exit(0)",
)


class Trial(NamedTuple):
    """A response that was scored. place: of its row in the data, or the id of its prompt."""

    place: str
    response: str
    result: RewardResult | Failure


def reward_config(
    function: str, arguments: Sequence[str], timeout_s: float, memory_mb: int
) -> RewardConfig:
    """arguments: as key=value. Raises UserError for one that is not."""
    given = dict(_argument(text) for text in arguments)
    return RewardConfig(
        function=function, arguments=given, timeout_s=timeout_s, memory_mb=memory_mb
    )


def check(
    config: RewardConfig, data: Path | None, samples: Path | None, answer_column: str, number: int
) -> bool:
    """Print what was found in the first rows of a file of data, or the first groups of a file of samples.

    Whether no reward failed. Raises UserError for a wrong function or file, and unless one file is given. Responses
    are scored as in a run: in a process of its own, within the same limits.
    """
    if data and not samples:
        return _check_rows(config, data, answer_column, number)
    if samples and not data:
        return _check_samples(config, samples, number)
    raise UserError(
        "--data", "either it or --samples must be given", "name a file of rows, or one of samples"
    )


def _check_rows(config: RewardConfig, data: Path, answer_column: str, num_rows: int) -> bool:
    rows = answered_rows(str(data), "--data", answer_column, num_rows)
    reward_workers = RewardWorkers(config, _START_S)
    try:
        found = _reward_results(reward_workers, rows)
        slowest_s = reward_workers.slowest_s
    finally:
        reward_workers.shutdown()
    show(_report(found))
    _show_slowest(slowest_s, config)
    own, other = (_mean(found[kind]) for kind in (_OWN, _OTHER))
    if own is not None and other is not None and own <= other:
        show(
            "a row's own answer is worth no more than another's: does the function read it as a response?"
        )
    return _show_failures([trial for of_kind in found.values() for trial in of_kind])


def _check_samples(config: RewardConfig, path: Path, num_groups: int) -> bool:
    """How the rewards differ from the file's. Functions that take it get each sample's episode."""
    file = open_samples(path)
    groups = chain.from_iterable(file.groups(step) for step in range(1, file.num_steps + 1))
    found: dict[str, list[Trial]] = {_BEFORE: [], _ANEW: []}
    reward_workers = RewardWorkers(config, _START_S)
    try:
        for group in islice(groups, num_groups):
            responses = [sample.text for sample in group.samples]
            before = map(RewardResult, group.rewards_G.tolist(), group.correct_G.tolist())
            episodes = [sample.episode for sample in group.samples]
            anew = reward_workers.wait_for_rewards(
                group.prompt.answer, group.prompt.row, responses, episodes
            )
            for kind, reward_results in ((_BEFORE, before), (_ANEW, anew)):
                pairs = zip(responses, reward_results, strict=True)
                found[kind] += [
                    Trial(group.prompt.id, response, reward_result)
                    for response, reward_result in pairs
                ]
        slowest_s = reward_workers.slowest_s
    finally:
        reward_workers.shutdown()
    show(_report(found))
    trials = zip(found[_BEFORE], found[_ANEW], strict=True)
    _show_changes([(before.result, after.result) for before, after in trials])
    _show_slowest(slowest_s, config)
    return _show_failures(found[_ANEW])


def _show_changes(pairs: Sequence[tuple[RewardResult | Failure, RewardResult | Failure]]) -> None:
    judged = [
        (one, other)
        for one, other in pairs
        if isinstance(one, RewardResult) and isinstance(other, RewardResult)
    ]
    rewards = sum(np.float32(before.reward) != np.float32(after.reward) for before, after in judged)
    gained = sum(after.correct and not before.correct for before, after in judged)
    lost = sum(before.correct and not after.correct for before, after in judged)
    changed = f"{rewards} of {len(judged)} rewards changed"
    show(f"{changed}; {gained} samples became correct, and {lost} are correct no longer")


def _show_slowest(slowest_s: float, config: RewardConfig) -> None:
    show(f"the slowest verdict took {slowest_s:.3f} s of {config.timeout_s:g} s")


def _show_failures(trials: Sequence[Trial]) -> bool:
    """A line for each kind of failure; whether there is none."""
    failures = [
        (trial.result.words, trial) for trial in trials if isinstance(trial.result, Failure)
    ]
    first = dict(reversed(failures))
    for words, count in Counter(words for words, _ in failures).most_common():
        trial = first[words]
        show(
            one_line(
                f"failed {count} x: {words}, first on response {short(trial.response)} to {trial.place}"
            )
        )
    return not failures


def _argument(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise UserError(
            f"--argument {text}",
            "is not of the form key=value",
            "write for example --argument wrong=-1",
        )
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _reward_results(
    reward_workers: RewardWorkers, rows: Sequence[tuple[str, str, Mapping[str, Any]]]
) -> dict[str, list[Trial]]:
    found: dict[str, list[Trial]] = {_OWN: [], _OTHER: [], _EMPTY: [], _BOMBS: []}
    answers = list(dict.fromkeys(answer for _, answer, _ in rows))
    for place, answer, row in rows:
        other = answers[(answers.index(answer) + 1) % len(answers)]
        responses = {_OWN: answer, _EMPTY: ""} | ({_OTHER: other} if other != answer else {})
        reward_results = reward_workers.wait_for_rewards(answer, row, list(responses.values()))
        for (kind, response), reward_result in zip(responses.items(), reward_results, strict=True):
            found[kind].append(Trial(place, response, reward_result))
    place, answer, row = rows[0]
    reward_results = reward_workers.wait_for_rewards(answer, row, BOMBS)
    found[_BOMBS] = [
        Trial(place, bomb, reward_result)
        for bomb, reward_result in zip(BOMBS, reward_results, strict=True)
    ]
    return found


def _mean(trials: Sequence[Trial]) -> float | None:
    rewards = [trial.result.reward for trial in trials if isinstance(trial.result, RewardResult)]
    if rewards:
        return sum(rewards) / len(rewards)
    return None


def _report(found: Mapping[str, Sequence[Trial]]) -> str:
    lines = [f"{'response':<22}{'verdicts':>10}{'reward':>10}{'correct':>10}{'failed':>10}"]
    for kind, of_kind in found.items():
        reward_results = [
            trial.result for trial in of_kind if isinstance(trial.result, RewardResult)
        ]
        mean = _mean(of_kind)
        reward = "-" if mean is None else f"{mean:.3f}"
        if reward_results:
            correct = f"{sum(one.correct for one in reward_results) / len(reward_results):.1%}"
        else:
            correct = "-"
        lines.append(
            f"{kind:<22}{len(of_kind):>10}{reward:>10}{correct:>10}{len(of_kind) - len(reward_results):>10}"
        )
    return "\n".join(lines)

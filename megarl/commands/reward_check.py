"""`megarl reward-check`: the results of a reward function on its data's own answers, others, and hostile responses.

Or, with `--samples`, on the samples of a file, compared with the rewards that the file has.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megarl.config import RewardConfig
from megarl.data.files import answered_rows
from megarl.printable import one_line, short, show
from megarl.rollout.reward_workers.by_source import Episodes, RewardWorkers
from megarl.samples.parquet import open_samples
from megarl.types import UserError
from megarl.types.reward_result import Failure, RewardResult

_OWN = "its own answer"
_OTHER = "another row's answer"
_EMPTY = "an empty response"
_START_S = 600.0
AnsweredRow = tuple[str, str, Mapping[str, Any]]  # its place, its answer, its columns

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
    return RewardConfig(
        function=function,
        arguments=dict(_argument(text) for text in arguments),
        timeout_s=timeout_s,
        memory_mb=memory_mb,
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
    hint = "set --answer to one of {columns}"
    rows = answered_rows(str(data), "--data", answer_column, num_rows, hint)
    with _workers(config) as workers:
        trials = _trials_of_rows(workers, rows)
        slowest_s = workers.slowest_s
    show(_report(trials))
    _show_slowest(slowest_s, config)
    own_mean = _mean(trials[_OWN])
    other = _mean(trials[_OTHER])
    if own_mean is not None and other is not None and own_mean <= other:
        show(
            "a row's own answer is worth no more than another's: does the function read it as a response?"
        )
    return _show_failures([*chain.from_iterable(trials.values())])


def _check_samples(config: RewardConfig, path: Path, num_groups: int) -> bool:
    """How the rewards differ from the file's. Functions that take it get each sample's episode."""
    file = open_samples(path)
    groups = chain.from_iterable(file.groups(step) for step in range(1, file.num_steps + 1))
    before: list[RewardResult] = []
    anew: list[Trial] = []
    with _workers(config) as workers:
        for group in islice(groups, num_groups):
            before += map(RewardResult, group.rewards_G.tolist(), group.correct_G.tolist())
            anew += _trials(
                workers,
                (group.prompt.id, group.prompt.answer, group.prompt.row),
                [sample.text for sample in group.samples],
                [sample.episode for sample in group.samples],
            )
        slowest_s = workers.slowest_s
    in_file = [
        Trial(trial.place, trial.response, result)
        for trial, result in zip(anew, before, strict=True)
    ]
    show(_report({"in the file": in_file, "anew": anew}))
    _show_changes(before, anew)
    _show_slowest(slowest_s, config)
    return _show_failures(anew)


def _show_changes(results: Sequence[RewardResult], trials: Sequence[Trial]) -> None:
    pairs = [
        (before, trial.result)
        for before, trial in zip(results, trials, strict=True)
        if isinstance(trial.result, RewardResult)
    ]
    rewards = sum(np.float32(before.reward) != np.float32(after.reward) for before, after in pairs)
    gained = sum(after.correct and not before.correct for before, after in pairs)
    lost = sum(before.correct and not after.correct for before, after in pairs)
    show(
        f"{rewards} of {len(pairs)} rewards changed; {gained} samples became correct, "
        f"and {lost} are correct no longer"
    )


def _show_slowest(slowest_s: float, config: RewardConfig) -> None:
    show(f"the slowest verdict took {slowest_s:.3f} s of {config.timeout_s:g} s")


def _show_failures(trials: Sequence[Trial]) -> bool:
    """A line for each kind of failure; whether there is none."""
    first: dict[str, Trial] = {}
    counts: Counter[str] = Counter()
    for trial in trials:
        if isinstance(trial.result, Failure):
            first.setdefault(trial.result.words, trial)
            counts[trial.result.words] += 1
    for words, count in counts.most_common():
        place = f"first on response {short(first[words].response)} to {first[words].place}"
        show(one_line(f"failed {count} x: {words}, {place}"))
    return not counts


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


def _trials_of_rows(workers: RewardWorkers, rows: Sequence[AnsweredRow]) -> dict[str, list[Trial]]:
    trials: dict[str, list[Trial]] = {_OWN: [], _OTHER: [], _EMPTY: []}
    answers = list(dict.fromkeys(answer for _, answer, _ in rows))
    for row in rows:
        answer = row[1]
        responses = {_OWN: answer, _EMPTY: ""}
        if len(answers) > 1:
            responses[_OTHER] = answers[(answers.index(answer) + 1) % len(answers)]
        scored = _trials(workers, row, list(responses.values()))
        for kind, trial in zip(responses, scored, strict=True):
            trials[kind].append(trial)
    return trials | {"bombs": _trials(workers, rows[0], BOMBS)}


def _trials(
    workers: RewardWorkers, row: AnsweredRow, responses: Sequence[str], episodes: Episodes = ()
) -> list[Trial]:
    """Score the responses to one row."""
    place, answer, columns = row
    results = workers.wait_for_rewards(answer, columns, responses, episodes)
    return [
        Trial(place, response, result) for response, result in zip(responses, results, strict=True)
    ]


@contextmanager
def _workers(config: RewardConfig) -> Iterator[RewardWorkers]:
    workers = RewardWorkers(config, _START_S)
    try:
        yield workers
    finally:
        workers.shutdown()


def _mean(trials: Sequence[Trial]) -> float | None:
    rewards = [trial.result.reward for trial in trials if isinstance(trial.result, RewardResult)]
    if rewards:
        return sum(rewards) / len(rewards)
    return None


def _report(trials: Mapping[str, Sequence[Trial]]) -> str:
    lines = [f"{'response':<22}{'verdicts':>10}{'reward':>10}{'correct':>10}{'failed':>10}"]
    for kind, of_kind in trials.items():
        results = [trial.result for trial in of_kind if isinstance(trial.result, RewardResult)]
        reward = "-"
        correct = "-"
        if results:
            reward = f"{_mean(of_kind):.3f}"
            correct = f"{sum(result.correct for result in results) / len(results):.1%}"
        failed = len(of_kind) - len(results)
        lines.append(f"{kind:<22}{len(of_kind):>10}{reward:>10}{correct:>10}{failed:>10}")
    return "\n".join(lines)

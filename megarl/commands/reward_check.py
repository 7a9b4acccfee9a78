"""`megarl reward-check`: the verdicts of a reward on its data's own answers, on others, and on hostile responses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import RewardConfig
from megarl.printable import one_line, show
from megarl.rollout.data_files import answered_rows
from megarl.rollout.rewards import Failure, Verdict, short
from megarl.rollout.verdicts.scorers import Scorers
from megarl.types import UserFault

Found = list[tuple[str, Verdict | Failure]]  # response, result
_OWN, _OTHER, _EMPTY, _BOMBS = "its own answer", "another row's answer", "an empty response", "bombs"
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


def check(
    function: str,
    arguments: Sequence[str],
    data: Path,
    answer_column: str,
    num_rows: int,
    *,
    timeout_s: float,
    memory_mb: int,
) -> bool:
    """Print what was found; whether no verdict failed. Raises UserFault for a wrong function, file or argument.

    Responses are scored as in a run: in a process of its own, within the same limits.
    """
    rows = answered_rows(str(data), "--data", answer_column, num_rows)
    given = dict(_argument(text) for text in arguments)
    config = RewardConfig(function=function, arguments=given, timeout_s=timeout_s, memory_mb=memory_mb)
    scorers = Scorers(config, _START_S)
    try:
        found = _verdicts(scorers, rows)
        slowest_s = scorers.slowest_s
    finally:
        scorers.shutdown()
    show(_report(found))
    show(f"the slowest verdict took {slowest_s:.3f} s of {timeout_s:g} s")
    own, other = (_mean(found[kind]) for kind in (_OWN, _OTHER))
    if own is not None and other is not None and own <= other:
        show("a row's own answer is worth no more than another's: does the function read it as a response?")
    every = [pair for of_kind in found.values() for pair in of_kind]
    failures = [(one.words, response) for response, one in every if isinstance(one, Failure)]
    first = dict(reversed(failures))
    for words, count in Counter(words for words, _ in failures).most_common():
        show(one_line(f"failed {count} x: {words}, first on response {short(first[words])}"))
    return not failures


def _argument(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise UserFault(f"--argument {text}", "is not of the form key=value", "write for example --argument wrong=-1")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _verdicts(scorers: Scorers, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Found]:
    found: dict[str, Found] = {_OWN: [], _OTHER: [], _EMPTY: [], _BOMBS: []}
    answers = list(dict.fromkeys(answer for answer, _ in rows))
    for answer, row in rows:
        other = answers[(answers.index(answer) + 1) % len(answers)]
        responses = {_OWN: answer, _EMPTY: ""} | ({_OTHER: other} if other != answer else {})
        verdicts = scorers.wait_for_verdicts(answer, row, list(responses.values()))
        for (kind, response), verdict in zip(responses.items(), verdicts, strict=True):
            found[kind].append((response, verdict))
    answer, row = rows[0]
    found[_BOMBS] = list(zip(BOMBS, scorers.wait_for_verdicts(answer, row, BOMBS), strict=True))
    return found


def _mean(found: Found) -> float | None:
    rewards = [one.reward for _, one in found if isinstance(one, Verdict)]
    return sum(rewards) / len(rewards) if rewards else None


def _report(found: Mapping[str, Found]) -> str:
    lines = [f"{'response':<22}{'verdicts':>10}{'reward':>10}{'correct':>10}{'failed':>10}"]
    for kind, of_kind in found.items():
        verdicts = [one for _, one in of_kind if isinstance(one, Verdict)]
        mean = _mean(of_kind)
        reward = "-" if mean is None else f"{mean:.3f}"
        correct = f"{sum(one.correct for one in verdicts) / len(verdicts):.1%}" if verdicts else "-"
        lines.append(f"{kind:<22}{len(of_kind):>10}{reward:>10}{correct:>10}{len(of_kind) - len(verdicts):>10}")
    return "\n".join(lines)

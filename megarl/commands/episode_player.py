"""Plays turns in the model's place, in an episode of the real worker processes, and compares what came of them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from megarl.commands.episode_turns import ScriptedTurn
from megarl.rollout.environments.pool import EnvironmentFailure
from megarl.rollout.environments.results import CallResult
from megarl.rollout.environments.thread import EnvironmentThread
from megarl.rollout.rewards import Verdict

_numbers = count()


@dataclass(frozen=True)
class PlayedStep:
    """One answer to the model. name: of the tool, or `reset` or `reply`; given: what was asked of it; recorded: the
    data's own answer. result: None where `reply` has ended the episode."""

    name: str
    given: str
    result: CallResult | None
    recorded: str | None = None


@dataclass
class PlayedEpisode:
    """What an episode's turns led to. num_turns: those that were answered; failure: why its environment failed; text:
    of the last turn played."""

    steps: list[PlayedStep] = field(default_factory=list)
    num_turns: int = 0
    text: str = ""
    verdict: Verdict | None = None
    failure: str = ""


async def play(
    thread: EnvironmentThread,
    row: Mapping[str, Any],
    seed: int,
    turns: Sequence[ScriptedTurn],
    restart_before: int | None = None,
) -> PlayedEpisode:
    """Play an episode to its end. restart_before: the turn before which its process is ended.

    Raises UserFault where the processes cannot be started again.
    """
    name, record = f"check-{next(_numbers)}", PlayedEpisode()
    try:
        began = time.perf_counter()
        opening = await thread.open(name, row, seed)
        if opening is not None:
            record.steps.append(PlayedStep("reset", "", CallResult(opening, seconds=time.perf_counter() - began)))
        for number, turn in enumerate(turns):
            if number == restart_before:
                await thread.restart()
            record.text = turn.content
            steps = await _answers(thread, name, turn)
            record.steps += steps
            record.num_turns += bool(steps)
            if not steps or any(step.result is None or step.result.done for step in steps):
                break
    except EnvironmentFailure as failure:
        record.failure = str(failure)
    try:
        record.verdict = await thread.finish(name)
    except EnvironmentFailure as failure:
        record.failure = str(failure)
    return record


async def _answers(thread: EnvironmentThread, name: str, turn: ScriptedTurn) -> list[PlayedStep]:
    recorded = [*turn.recorded, *[None] * len(turn.calls or "1")]
    if turn.calls:
        results = await thread.call(name, turn.calls)
        return [
            PlayedStep(call[0], as_json(call[1]), result, told)
            for call, result, told in zip(turn.calls, results, recorded[: len(results)], strict=True)
        ]
    if not thread.has_reply:
        return []
    return [PlayedStep("reply", turn.content, await thread.reply(name, turn.content), recorded[0])]


def difference(first: PlayedEpisode, second: PlayedEpisode) -> tuple[str, str] | None:
    """The name of the first answer that is another in the second record, and a sentence about it; None: all are equal.

    The seconds that they took are not compared.
    """
    for one, other in zip(first.steps, second.steps, strict=False):
        if _timeless(one.result) != _timeless(other.result):
            return one.name, f"{one.name} gave {_words(one.result)} first, then {_words(other.result)}"
    if first.failure != second.failure:
        failure = second.failure or first.failure
        return failure, failure
    if first.verdict != second.verdict:
        return "reward", f"reward gave {first.verdict} first, then {second.verdict}"
    return None


def as_json(value: object) -> str:
    """Arguments of a call for a reader."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return "(no JSON)"


def _timeless(result: CallResult | None) -> CallResult | None:
    return result and replace(result, seconds=0.0)


def _words(result: CallResult | None) -> str:
    return "nothing" if result is None else repr(result.text[:60])

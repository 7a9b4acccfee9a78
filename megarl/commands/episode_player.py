"""Plays turns in the model's place, in an episode of the real worker processes, and compares what came of them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from megarl.commands.episode_turns import ScriptedTurn
from megarl.environments.runtime.environment_thread import EnvironmentFailure, EnvironmentThread
from megarl.environments.runtime.results import CallResult
from megarl.episodes.tool_calls import BadCall, ToolCall
from megarl.episodes.transcript import TranscriptWriter
from megarl.types import EpisodeEnd, EpisodeFacts, episode_dict
from megarl.types.json_objects import Columns, JsonObject
from megarl.types.reward_result import RewardResult

_numbers = count()


@dataclass(frozen=True)
class PlayedStep:
    """One answer to the model. name: of the tool, or `reset` or `reply`; given: what was asked of it; recorded: the
    data's own answer. result: None where `reply` has ended the episode. is_call: of a tool."""

    name: str
    given: str
    result: CallResult | None
    recorded: str | None = None
    is_call: bool = False


@dataclass
class PlayedEpisode:
    """What an episode's turns led to. num_turns: those that were answered; failure: why its environment failed; text:
    of the last turn played; end: why it has ended, `max_turns` where there was no further turn."""

    steps: list[PlayedStep] = field(default_factory=list)
    num_turns: int = 0
    text: str = ""
    reward_result: RewardResult | None = None
    failure: str = ""
    end: EpisodeEnd = "max_turns"
    transcript: TranscriptWriter = field(default_factory=TranscriptWriter)

    def episode(self) -> JsonObject:
        """The episode as a reward function gets it in a run."""
        calls = [step.result for step in self.steps if step.is_call and step.result]
        tool_s = sum(step.result.seconds for step in self.steps if step.result)
        end = "environment" if self.failure else self.end
        facts = EpisodeFacts(
            self.num_turns,
            len(calls),
            sum(result.error is not None for result in calls),
            tool_s,
            end,
            0,
        )
        return episode_dict(facts, self.transcript.transcript())


async def play(
    thread: EnvironmentThread,
    row: Columns,
    seed: int,
    turns: Sequence[ScriptedTurn],
    restart_before: int | None = None,
) -> PlayedEpisode:
    """Play an episode to its end. restart_before: the turn before which its process is ended.

    Raises UserError where the processes cannot be started again.
    """
    name = f"check-{next(_numbers)}"
    record = PlayedEpisode()
    try:
        began = time.perf_counter()
        opening = await thread.open(name, row, seed)
        if opening is not None:
            record.steps.append(
                PlayedStep("reset", "", CallResult(opening, seconds=time.perf_counter() - began))
            )
            record.transcript.add_message(opening)
        for number, turn in enumerate(turns):
            if number == restart_before:
                await thread.restart()
            record.text = turn.content
            record.transcript.add_turn(turn.content)
            steps = await _answers(thread, name, turn)
            record.steps += steps
            record.num_turns += bool(steps)
            _take_down(record.transcript, turn, [step.result for step in steps if step.result])
            if not steps or any(step.result is None or step.result.done for step in steps):
                if any(step.result and step.result.done for step in steps):
                    record.end = "done"
                else:
                    record.end = "answered"
                break
    except EnvironmentFailure as failure:
        record.failure = str(failure)
    try:
        record.reward_result = await thread.finish(name)
    except EnvironmentFailure as failure:
        record.failure = str(failure)
    return record


async def _answers(thread: EnvironmentThread, name: str, turn: ScriptedTurn) -> list[PlayedStep]:
    recorded = [*turn.recorded, *[None] * len(turn.calls or "1")]
    if turn.calls:
        results = await thread.call(name, turn.calls)
        return [
            PlayedStep(call[0], as_json(call[1]), result, recorded_answer, is_call=True)
            for call, result, recorded_answer in zip(
                turn.calls, results, recorded[: len(results)], strict=True
            )
        ]
    if not thread.has_reply:
        return []
    return [PlayedStep("reply", turn.content, await thread.reply(name, turn.content), recorded[0])]


def _take_down(
    transcript: TranscriptWriter, turn: ScriptedTurn, results: Sequence[CallResult]
) -> None:
    """What was said to a turn. A call that no model can make counts as one that could not be read."""
    for result in results:
        transcript.add_reward(result.reward)
        if not turn.calls:
            transcript.add_message(result.text)
    asked = [
        ToolCall(name, arguments)
        if isinstance(arguments, Mapping) and result.error != "unknown"
        else BadCall(name, result.text)
        for (name, arguments), result in zip(turn.calls, results, strict=False)
    ]
    if asked:
        transcript.add_calls(asked, results, [result.text for result in results])


def difference(first: PlayedEpisode, second: PlayedEpisode) -> tuple[str, str] | None:
    """The name of the first answer that is another in the second record, and a sentence about it; None: all are equal.

    The seconds that they took are not compared.
    """
    for step, other in zip(first.steps, second.steps, strict=False):
        if _timeless(step.result) != _timeless(other.result):
            return (
                step.name,
                f"{step.name} gave {_words(step.result)} first, then {_words(other.result)}",
            )
    if first.failure != second.failure:
        failure = second.failure or first.failure
        return failure, failure
    if first.reward_result != second.reward_result:
        return "reward", f"reward gave {first.reward_result} first, then {second.reward_result}"
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
    if result is None:
        return "nothing"
    return repr(result.text[:60])

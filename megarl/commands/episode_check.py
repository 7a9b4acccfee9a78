"""`megarl episode-check`: tries a recipe's tools or environment without a model, in the worker processes of a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.commands.episode_player import PlayedEpisode, PlayedStep, difference, play
from megarl.commands.episode_turns import (
    ScriptedTurn,
    hostile_turns,
    made_up,
    read_turns,
    turns_of_file,
)
from megarl.config import Recipe
from megarl.data.files import BadRow, RowErrors, answered_rows, column
from megarl.environments.runtime.environment_thread import EnvironmentThread, environment_settings
from megarl.environments.runtime.results import CallResult
from megarl.environments.runtime.tool_loading import ENVIRONMENT, TOOLS
from megarl.episodes.template import ChatTemplate
from megarl.model.tokenizer import load_tokenizer
from megarl.preflight import episode_checks, reward_checks
from megarl.printable import one_line, short, show
from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.rollout.rewards import WHERE, describe_failure
from megarl.types import UserError, UserErrors
from megarl.types.reward_result import REWARD_HINT, Failure, RewardResult

_HINTS = {  # of the errors of a call that are not the model's
    "timeout": "make it faster or end it yourself, or raise episode.call_timeout_s",
    "memory": "let it take less memory, or raise episode.memory_mb",
    "ended": "let it raise an exception in place of ending its process",
    "result": "return text, a value that JSON can hold, None or an Observation",
}
_ENDS = ("timeout", "memory", "ended")
_FAILED = "let the method return or reply with words: an exception there ends the episode as `environment`"
_SEED = "draw all that is random from self.seed, or set `replayable = False`"
_RECORDED = "record the demonstrations again, or mend the tool"
_TEXT = "Hello."
_ROWS = 3
_SHOWN = 300  # characters of a text


@dataclass(frozen=True)
class _Row:
    place: str
    answer: str
    values: Mapping[str, Any]


def check(recipe: Recipe, num_rows: int | None, turns: Path | None, samples: Path | None) -> None:
    """Print what the tools or the environment answer on the first rows of the first training file.

    turns: a file of the assistant's turns, an episode in each line; without it the demonstrations of data.messages are
    played, or calls that are made up. samples: a file whose episodes are played again in place of all that. num_rows:
    of the data (None: 3), or prompts of `samples` (None: all). Raises UserErrors with what should be mended.
    """
    if recipe.episode is None:
        raise UserError(
            "episode",
            "the recipe has none",
            "name tools or an environment there, as docs/environments.md says",
        )
    if errors := episode_checks.key_errors(recipe):
        raise UserErrors(errors)
    if recipe.episode.agent:
        raise UserError(
            "episode.agent",
            "what an agent has done cannot be repeated"
            if samples
            else "an agent cannot be tried without a model",
            "call it in a test with a chat of your own, or name tools or an environment",
        )
    if samples:
        if turns:
            raise UserError("--turns", "the turns are those of --samples", "leave one of them out")
        from megarl.commands.episode_replay import replay  # half a second

        replay(recipe, samples, num_rows)
        return
    rows = _rows(recipe, num_rows or _ROWS)
    if turns:
        scripts = turns_of_file(turns)
    else:
        scripts = _demonstrated(rows, recipe.data.messages)
    thread = EnvironmentThread(environment_settings(recipe, workers=1))
    try:
        trial = _Trial(recipe, thread, rows)
        trial.describe()
        asyncio.run(trial.run(scripts or [trial.made_up(row) for row in rows]))
    finally:
        thread.shutdown()
    trial.score()
    show(f"result: {len(trial.errors) or 'nothing'} to correct")
    if trial.errors:
        raise UserErrors([*trial.errors.values()])


def _rows(recipe: Recipe, num_rows: int) -> list[_Row]:
    where, file = next(iter(recipe.data.train_files.items()))
    answer_column = file.answer or recipe.data.answer
    hint = "set data.answer to one of {columns}"
    return [_Row(*row) for row in answered_rows(file.path, where, answer_column, num_rows, hint)]


def _demonstrated(rows: Sequence[_Row], name: str | None) -> list[list[ScriptedTurn]]:
    """The demonstrations in a column of the rows; none where there is no such column in the recipe."""
    if name is None:
        return []
    scripts = []
    bad = RowErrors("data.messages")
    for row in rows:
        try:
            messages = column(row.values, name, "set data.messages to one of {columns}")
            scripts.append(read_turns(messages))
        except BadRow as error:
            bad.add(row.place, error)
    if errors := bad.errors():
        raise UserErrors(errors)
    return scripts


@dataclass
class _Trial:
    """What is tried, and the errors that were found: by name and kind, so that each is told once."""

    recipe: Recipe
    thread: EnvironmentThread
    rows: Sequence[_Row]
    errors: dict[tuple[str, str], UserError] = field(default_factory=dict)
    played: list[tuple[_Row, PlayedEpisode]] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.recipe.episode
        if self.recipe.episode.environment:
            self._where = ENVIRONMENT
        else:
            self._where = TOOLS
        self._most_tokens = self.recipe.episode.max_observation_tokens
        self._template: ChatTemplate | None = None
        for error in reward_checks.key_errors(self.recipe.reward, has_own=self.thread.has_reward):
            self.errors.setdefault(("reward", error.where), error)
        if Path(self.recipe.model.path).is_dir():
            try:
                self._template = ChatTemplate(load_tokenizer(self.recipe.model.path))
            except UserError as error:
                self.errors.setdefault(("tokenizer", ""), error)

    def describe(self) -> None:
        """Print what the model is told of the tools, and what the environment does."""
        offer = self.thread.offer
        for schema in offer.schemas:
            function = schema["function"]
            is_async = function["name"] in offer.is_async
            kind = "async, many calls at once" if is_async else "plain, one call at a time"
            show(f"tool {function['name']} ({kind}): {function['description']}")
            parameters = function["parameters"]
            for name, argument in parameters["properties"].items():
                must = "required" if name in parameters.get("required", ()) else "optional"
                show(f"  {name}, {must}: {json.dumps(argument)}")
            for name, of_type in parameters.get("$defs", {}).items():
                show(f"  type {name}: {json.dumps(of_type)}")
        if self._where == ENVIRONMENT:
            for name in ("reset", "reply", "reward", "close"):
                what = "async" if name in offer.is_async else "plain"
                show(f"method {name}: {what if name in offer.has else 'not defined'}")
            show(f"replayable: {'yes' if offer.is_replayable else 'no'}")
        if self._template is None:
            show(
                "texts are not cut to episode.max_observation_tokens: model.path has no tokenizer here"
            )

    def made_up(self, row: _Row) -> list[ScriptedTurn]:
        """Turns for a row that has no others; the last text is its answer, for the reward function."""
        text = _TEXT if self.thread.has_reply else row.answer
        return made_up(self.thread.schemas, text, replies=self.thread.has_reply)

    async def run(self, scripts: Sequence[Sequence[ScriptedTurn]]) -> None:
        """Play the scripts on the rows, in turn; then hostile turns on the first row."""
        for number, script in enumerate(scripts):
            row = self.rows[number % len(self.rows)]
            seed = self.recipe.run.seed + number % len(self.rows)
            show(f"episode on {row.place}, seed {seed}")
            record = await play(self.thread, row.values, seed, script)
            self._tell(row, record)
            self.played.append((row, record))
            if not any(step.result and step.result.error in _ENDS for step in record.steps):
                await self._repeat(row, seed, script, record)
        await self._try_hostile()

    def _tell(self, row: _Row, record: PlayedEpisode) -> None:
        for step in record.steps:
            show(f"  {_asked(step)}: {self._read(step.result)}")
            self._judge(step, row.place)
            self._compare(step, row.place)
        if record.failure:
            show(f"  the environment failed: {record.failure}")
            self._add(record.failure, "", f"{row.place}: {record.failure}", _FAILED)
        if record.reward_result:
            show(f"  reward of the environment: {_in_words(record.reward_result)}")

    def _read(self, result: CallResult | None) -> str:
        """An answer as the model reads it, in one line."""
        if result is None:
            return "None, which ends the episode"
        text = result.text
        facts = [f"{result.seconds:.3f} s"]
        if result.reward:
            facts.append(f"reward {result.reward:g}")
        if result.done:
            facts.append("done")
        if self._template:
            text = self._template.without_special_tokens(text)
            left_out = len(self._template.ids(text)) - self._most_tokens
            if left_out > 0:
                facts.append(f"without {left_out} tokens in its middle")
        return f"{_cut(text)} ({', '.join(facts)})"

    def _judge(self, step: PlayedStep, place: str) -> bool:
        """Whether an answer is one; else it becomes an error."""
        if step.result is None or step.result.error not in _HINTS:
            return True
        problem = f"{place}: {step.result.text}"
        self._add(step.name, step.result.error, problem, _HINTS[step.result.error])
        return False

    def _compare(self, step: PlayedStep, place: str) -> None:
        if step.recorded is None or step.result is None:
            return
        if step.recorded.strip() != step.result.text.strip():
            problem = (
                f"{place}: the result of {_asked(step)} is {short(step.recorded)} in the data, "
                f"and now {short(step.result.text)}"
            )
            self._add(step.name, "recorded", problem, _RECORDED, where="data.messages")

    async def _repeat(
        self, row: _Row, seed: int, script: Sequence[ScriptedTurn], first: PlayedEpisode
    ) -> None:
        """Play an episode twice more: as before, and with the end of its process in the middle."""
        again = await play(self.thread, row.values, seed, script)
        changed = difference(first, again)
        problem = "a second run with the same seed gives other results"
        has_promised = self._where == ENVIRONMENT and self.thread.offer.is_replayable
        if not changed and has_promised:
            ended = await play(
                self.thread, row.values, seed, script, restart_before=first.num_turns // 2
            )
            changed = difference(first, ended)
            problem = "a replay after the end of its process gives other results"
        if changed:
            name, words = changed
            show(f"  {problem}: {words}")
            if has_promised:
                self._add(name, "repeated", f"{row.place}: {problem}: {words}", _SEED)
        else:
            also = ", also after the end of its process" if has_promised else ""
            show(f"  the same results in another run{also}")

    async def _try_hostile(self) -> None:
        show(f"hostile turns on {self.rows[0].place}")
        left_out = {name for name, kind in self.errors if kind in _ENDS}
        for hostile in hostile_turns(self.thread.schemas, replies=self.thread.has_reply):
            if hostile.name in left_out:
                continue
            record = await play(
                self.thread, self.rows[0].values, self.recipe.run.seed, [hostile.turn]
            )
            answers = [step for step in record.steps if step.name != "reset"]
            place = f"{hostile.name}, {hostile.case}"
            if record.failure:
                outcome = record.failure
                self._add(hostile.name, "failure", f"{place}: {record.failure}", _FAILED)
            else:
                outcome = self._read(answers[0].result) if answers else "no answer"
            show(f"  {place}: {outcome}")
            if not all(self._judge(step, place) for step in answers):
                left_out.add(hostile.name)
        for name in sorted(left_out):
            show(f"  {name}: no more were tried")

    def score(self) -> None:
        """Score the episodes with the recipe's reward functions, unless the environment gives rewards."""
        reward = self.recipe.reward
        if self.thread.has_reward or not (reward.function or reward.by_source):
            return
        try:
            reward_workers = RewardWorkers(
                reward.model_copy(update={"workers": 1}), self.recipe.run.timeout_s
            )
        except UserError as error:
            self.errors.setdefault((WHERE, ""), error)
            return
        try:
            for row, record in self.played:
                text = record.text
                (result,) = reward_workers.wait_for_rewards(
                    row.answer, row.values, [text], [record.episode()]
                )
                if isinstance(result, Failure):
                    problem = describe_failure(result, text, row.answer, row.place)
                    self._add(WHERE, "", problem, REWARD_HINT, where=WHERE)
                else:
                    answer = short(row.answer)
                    show(
                        f"reward of {row.place} for {short(text)}, answer {answer}: {_in_words(result)}"
                    )
        finally:
            reward_workers.shutdown()

    def _add(self, name: str, kind: str, problem: str, hint: str, where: str = "") -> None:
        error = UserError(where or self._where, problem, hint)
        self.errors.setdefault((name, kind), error)


def _in_words(result: RewardResult) -> str:
    return f"{result.reward:g}, {'correct' if result.correct else 'not correct'}"


def _asked(step: PlayedStep) -> str:
    if step.given:
        return f"{step.name} {_cut(step.given)}"
    return step.name


def _cut(text: str) -> str:
    if len(text) <= _SHOWN:
        return one_line(text)
    return f"{one_line(text[:_SHOWN])}... ({len(text)} characters)"

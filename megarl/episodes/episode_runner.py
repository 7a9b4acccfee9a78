"""The turns of an episode: the model samples, and tools or an environment answer, until one of the ends.

Every turn is sampled after exactly the tokens that its row has; what is said in between is appended by the splice.
Where the rollout has phases, one may leave an episode open in a turn, before its answer, or after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from megarl.config.episode import EpisodeConfig
from megarl.environments.runtime.environment_thread import (
    EnvironmentFailure,
    EnvironmentThread,
    ReplayFailure,
)
from megarl.environments.runtime.results import CallResult
from megarl.episodes.messages import BadMessages, assistant_message, rendered, results_of
from megarl.episodes.open_episode import (
    EpisodeOverdue,
    EpisodeState,
    PhaseOver,
    ToolTime,
    left_open,
    resumed,
)
from megarl.episodes.rows import EpisodeResult, EpisodeRows, SampledTurn, TurnSampler
from megarl.episodes.tally import Tally
from megarl.episodes.template import TemplateRefusal, user
from megarl.episodes.tool_calls import CallFormat, ToolCall, Turn
from megarl.episodes.transcript import TranscriptWriter
from megarl.episodes.turn_tokenizer import ToolResult, TurnTokenizer
from megarl.model.tokenizer import chat_messages
from megarl.samples.accounting import longest_row
from megarl.samples.buffer import phases_of
from megarl.types import EpisodeEnd, EpisodeProgress, Prompt, Sample, UserError
from megarl.types.json_objects import Message
from megarl.types.reward_result import Failure
from megarl.types.sampling import Sampling

_MOST_BAD_TURNS = 3  # in a row, whose calls could not be made at all
_FIRST_TOKEN = 1  # room that a turn needs at least


class EpisodeRunner:
    """Runs the episodes of one engine. calls: None where the environment has no tools."""

    def __init__(
        self,
        config: EpisodeConfig,
        sampler: TurnSampler,
        environment: EnvironmentThread,
        turn_tokenizer: TurnTokenizer,
        calls: CallFormat | None,
        *,
        max_prompt_tokens: int,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._environment = environment
        self._turn_tokenizer = turn_tokenizer
        self._calls = calls
        self._numbers = count()
        self._max_prompt_tokens = max_prompt_tokens
        self._renders = config.history == "render"

    async def run(
        self,
        prompt: Prompt,
        sampling: Sampling,
        place: int,
        begun: Sample | None = None,
        assigned_tokens: int = 0,
    ) -> EpisodeResult:
        """One episode, sample number `place` of its prompt, or a phase of it. sampling.max_tokens: of a turn.

        begun: as the phase before has left it. assigned_tokens: with which it was dealt to the engine; 0: those of the
        prompt. Raises what the sampler raises, and UserError where what answers can no longer be used.
        """
        config = self._config
        opened = (begun.open_episode if begun else None) or EpisodeProgress(0, {})
        rows = EpisodeRows(
            self._sampler,
            f"episode-{next(self._numbers)}",
            prompt,
            sampling,
            place,
            self._max_prompt_tokens,
            config.max_tokens,
        )
        await rows.begin(longest_row(begun) if begun else len(prompt.token_ids))
        transcript = TranscriptWriter(begun.transcript if begun else ())
        rows.tally = Tally(**opened.account, transcript=transcript)
        phase_s = config.phase_tool_s if sampling.phase_tokens else None
        tools = ToolTime(rows.tally, phase_s, config.timeout_s, opened.seconds)
        state: EpisodeState | None = None  # while the environment has not begun
        end: EpisodeEnd | None = None  # where the phase leaves the episode open
        failure: Failure | None = None
        try:
            state = await self._state(rows, tools, begun, opened)
            end = await self._take_turns(state)
        except EnvironmentFailure as error:
            end = "environment"
            failure = Failure(str(error))
        except EpisodeOverdue:
            end = "timeout"
        except PhaseOver:
            pass
        finally:  # the engine's place is free before the environment thinks about the reward
            await rows.end(assigned_tokens or len(prompt.token_ids))
        phases = opened.phases + 1
        if end is None and phases < phases_of(config.max_tokens, sampling.phase_tokens):
            history = await self._environment.leave(rows.name, tools.operations)
            sample = left_open(rows, tools, state, phases, history, renders=self._renders)
            return EpisodeResult(sample, None)
        if state is None and failure is None:
            await self._environment.leave(rows.name, 0)
            failure = self._reset_failure(phases, has_timed_out=end == "timeout")
            return EpisodeResult(rows.sample("environment"), failure)
        reward_result = None
        try:
            reward_result = await tools.unlimited(self._environment.finish(rows.name))
        except EnvironmentFailure as error:
            end = "environment"
            failure = Failure(str(error))
        return EpisodeResult(rows.sample(end or "timeout"), failure or reward_result)

    def _reset_failure(self, phases: int, *, has_timed_out: bool) -> Failure:
        """Why an episode whose environment never began has no reward."""
        config = self._config
        if has_timed_out:
            limit = f"episode.timeout_s ({config.timeout_s:g} s)"
            return Failure(f"{limit} had passed before the end of reset")
        limit = f"episode.phase_tool_s ({config.phase_tool_s:g} s)"
        return Failure(f"reset took longer than {limit} in {phases} phases")

    async def _state(
        self, rows: EpisodeRows, tools: ToolTime, begun: Sample | None, opened: EpisodeProgress
    ) -> EpisodeState:
        """The state that the phase before has left, or a new one where there is none, or it cannot be made again.

        In a new one the environment's first words are appended to the prompt as one more message of the user.
        """
        prompt = rows.prompt
        seed = rows.sampling.group_seed
        if begun and opened.following != "begin":
            again = self._environment.resume(rows.name, prompt.row, seed, opened.history)
            try:
                tools.operations = await tools.unlimited(again)
            except ReplayFailure:
                rows.tally.begin_anew()
            else:
                return resumed(rows, tools, begun, opened)
        messages = chat_messages(prompt.messages)
        opening = await tools.wait(self._environment.open(rows.name, prompt.row, seed))
        if opening is None:
            return EpisodeState(rows, tools, rows.open(prompt.token_ids), messages)
        rows.tally.transcript.add_message(opening)
        messages = [*messages, user(self._turn_tokenizer.template.without_special_tokens(opening))]
        ids = await self._said(self._turn_tokenizer.first, messages)
        if len(ids) > self._max_prompt_tokens:
            limit = f"data.max_prompt_tokens is {self._max_prompt_tokens}"
            raise EnvironmentFailure(
                f"with the text of reset the prompt has {len(ids)} tokens, and {limit}"
            )
        return EpisodeState(rows, tools, rows.open(ids), messages)

    async def _take_turns(self, state: EpisodeState) -> EpisodeEnd:
        """Until the episode ends.

        Raises PhaseOver where the phase leaves it open, and EpisodeOverdue where it had no seconds left for an answer.
        """
        while True:
            if not state.is_answered and (end := await self._turn(state)):
                return end
            if not await self._go_on(state):
                return "max_tokens"
            if state.tools.is_overdue:
                return "timeout"
            if state.rows.is_phase_over:
                raise PhaseOver
            state.turn = None
            state.is_answered = False

    async def _turn(self, state: EpisodeState) -> EpisodeEnd | None:
        """The next turn, or what a phase has left of one, and its answer; the end where the episode ends with it."""
        rows = state.rows
        turn = state.turn
        if turn is None or turn.is_open:
            # a resumed run has a lower limit
            if turn and rows.turn_tokens(state.conversation, turn) <= len(turn.ids):
                return "max_tokens"
            state.turn = turn = await rows.turn(state.conversation, turn)
            if turn.is_open:
                raise PhaseOver
            if turn.cut_by:
                return turn.cut_by
        if end := await self._answer(state, turn):
            return end
        if state.tally.turns >= self._config.max_turns:
            return "max_turns"
        state.is_answered = True
        return None

    async def _go_on(self, state: EpisodeState) -> bool:
        """Whether there is room for a further turn after what was said, which the conversation then has."""
        conversation = state.conversation
        rows = state.rows
        ids = state.said
        if ids is None:
            whole = await self._said(rendered, state.messages, self._turn_tokenizer)
            if rows.room(len(whole)) < _FIRST_TOKEN:
                return False
            if not conversation.is_start_of(whole):
                state.conversation = rows.open(whole)
                return True
            ids = whole[len(conversation.ids) :]
        if (
            rows.room(conversation.prompt_length, conversation.response_length + len(ids))
            < _FIRST_TOKEN
        ):
            return False
        conversation.add_message(ids)
        return True

    async def _answer(self, state: EpisodeState, turn: SampledTurn) -> EpisodeEnd | None:
        """What tools or the environment say to a turn is `state.said` then; its reward goes to the turn.

        Returns the end where the episode ends with the turn. PhaseOver changes nothing.
        """
        ids = turn.ids
        if self._calls:
            read = await asyncio.to_thread(self._read, ids, state.after_tools)
        else:
            read = Turn(turn.text)
        if read.calls:
            return await self._called(state, read, ids)
        if not self._environment.has_reply:
            return "answered"
        reply = await state.tools.wait(self._environment.reply(state.rows.name, read.content))
        if reply is None:
            return "answered"
        state.conversation.add_reward(reply.reward)
        state.after_tools = False
        state.bad_turns = 0
        shown = await asyncio.to_thread(self._cut, reply.text)
        state.tally.transcript.add_reward(reply.reward)
        state.tally.transcript.add_message(shown)
        if reply.done:
            return "done"
        if self._renders:
            state.messages += [self._message(state, read, ids), user(shown)]
            state.said = None
        else:
            state.said = await self._said(self._turn_tokenizer.user, shown, after=ids[-1])
        return None

    async def _called(
        self, state: EpisodeState, read: Turn, ids: Sequence[int]
    ) -> EpisodeEnd | None:
        """The results of a turn's calls, in their order; a call that cannot be made is answered with the reason."""
        tally = state.tally
        good = [call for call in read.calls if isinstance(call, ToolCall)]
        call_results, is_overdue = await self._made(state, good)
        message = self._message(state, read, ids)
        results_of_good = iter(call_results)
        results = [
            next(results_of_good)
            if isinstance(call, ToolCall)
            else CallResult(call.reason, error="arguments")
            for call in read.calls
        ]
        shown = await asyncio.to_thread(lambda: [self._cut(result.text) for result in results])
        tally.calls += len(results)
        tally.call_errors += sum(result.error is not None for result in results)
        state.after_tools = True
        state.bad_turns = 0 if good else state.bad_turns + 1
        reward = sum(result.reward for result in results)
        state.conversation.add_reward(reward)
        tally.transcript.add_reward(reward)
        tally.transcript.add_calls(read.calls, results, shown)
        if is_overdue:
            return "timeout"
        if any(result.done for result in results):
            return "done"
        if state.bad_turns == _MOST_BAD_TURNS:
            return "bad_calls"
        if self._renders:
            state.messages += [message, *results_of(message, shown)]
            state.said = None
        else:
            tool_results = [
                ToolResult(text, call.name, call.id)
                for text, call in zip(shown, read.calls, strict=True)
            ]
            state.said = await self._said(
                self._turn_tokenizer.tool_results, tool_results, after=ids[-1]
            )
        return None

    async def _made(
        self, state: EpisodeState, calls: Sequence[ToolCall]
    ) -> tuple[list[CallResult], bool]:
        """The results of calls, and whether they were given up because the episode had no seconds left."""
        asked = [(call.name, call.arguments) for call in calls]
        try:
            return await state.tools.wait(self._environment.call(state.rows.name, asked)), False
        except EpisodeOverdue:
            words = f"was given up, because episode.timeout_s ({self._config.timeout_s:g} s) had passed."
            return [CallResult(f"{call.name} {words}", error="timeout") for call in calls], True

    def _message(self, state: EpisodeState, read: Turn, ids: Sequence[int]) -> Message:
        """A turn as the message that is rendered, before its calls are counted."""
        return assistant_message(
            read,
            self._turn_tokenizer.turn_text(ids),
            self._turn_tokenizer.template,
            state.tally.calls,
        )

    async def _said(
        self, turn_tokenizer: Callable[..., list[int]], *words: Any, **options: Any
    ) -> list[int]:
        """The tokens of what is said to the model. Raises EnvironmentFailure where the template refuses the words."""
        try:
            return await asyncio.to_thread(turn_tokenizer, *words, **options)
        except (UserError, TemplateRefusal, BadMessages) as error:
            raise EnvironmentFailure(f"the chat template refuses the message ({error})") from error

    def _read(self, ids: Sequence[int], after_tools: bool) -> Turn:
        assert self._calls
        return self._calls.read(self._turn_tokenizer.turn_text(ids), after_tools=after_tools)

    def _cut(self, text: str) -> str:
        """The text without markup, of whose tokens the middle is left out where it has too many."""
        most = self._config.max_observation_tokens
        text = self._turn_tokenizer.template.without_special_tokens(text)
        ids = self._turn_tokenizer.template.ids(text)
        if len(ids) <= most:
            return text
        head = ids[: most - most // 2]
        tail = ids[len(ids) - most // 2 :]
        decode = self._turn_tokenizer.template.decode
        return f"{decode(head)}\n[... {len(ids) - most} tokens left out ...]\n{decode(tail) if tail else ''}"

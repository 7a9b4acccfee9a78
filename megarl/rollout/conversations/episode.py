"""The turns of an episode: the model samples, and tools or an environment answer, until one of the ends.

Every turn is sampled after exactly the tokens that its row has; what is said in between is appended by the splice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from megarl.config.episode import EpisodeConfig
from megarl.rollout.conversations.conversation import Conversation
from megarl.rollout.conversations.messages import BadMessages, assistant_message, rendered, results_of
from megarl.rollout.conversations.rows import EpisodeResult, EpisodeRows, Tally, TurnSampler
from megarl.rollout.conversations.splice import Splice, ToolResult
from megarl.rollout.conversations.template import Message, TemplateRefusal, user
from megarl.rollout.conversations.tool_calls import CallFormat, ToolCall, Turn
from megarl.rollout.environments.pool import EnvironmentFailure
from megarl.rollout.environments.results import CallResult
from megarl.rollout.rewards import Failure, Verdict
from megarl.rollout.sglang.arguments import Sampling
from megarl.rollout.sglang.deterministic import sample_seed
from megarl.rollout.template_check import chat_messages
from megarl.types import EpisodeEnd, Prompt, Sample, UserFault

_MOST_BAD_TURNS = 3  # in a row, whose calls could not be made at all
_FIRST_TOKEN = 1  # room that a turn needs at least


class EnvironmentClient(Protocol):
    """What answers the model: `EnvironmentThread`. Methods as of `EnvironmentPool`."""

    @property
    def has_reply(self) -> bool: ...
    async def open(self, episode: str, row: Mapping[str, Any], seed: int) -> str | None: ...
    async def call(self, episode: str, calls: Sequence[tuple[str, object]]) -> list[CallResult]: ...
    async def reply(self, episode: str, text: str) -> CallResult | None: ...
    async def finish(self, episode: str) -> Verdict | None: ...


@dataclass(frozen=True)
class _Answer:
    """What follows a turn: what is said to the model, or the reason why the episode ends with the turn.

    ids: the tokens of the next message; None: the history is rendered anew.
    """

    ids: Sequence[int] | None = ()
    end: EpisodeEnd | None = None


@dataclass
class _State:
    """An episode between two turns. history: its messages in OpenAI's form, which are kept to be rendered."""

    rows: EpisodeRows
    conversation: Conversation
    history: list[Message]
    began_s: float
    after_tools: bool = False  # whether the last message was the results of calls
    bad_turns: int = 0  # in a row, whose calls could not be made at all

    @property
    def tally(self) -> Tally:
        return self.rows.tally


class EpisodeRunner:
    """Runs the episodes of one engine. calls: None where the environment has no tools."""

    def __init__(
        self,
        config: EpisodeConfig,
        sampler: TurnSampler,
        environment: EnvironmentClient,
        splice: Splice,
        calls: CallFormat | None,
        *,
        max_prompt_tokens: int,
    ) -> None:
        self._config, self._sampler, self._environment = config, sampler, environment
        self._splice, self._calls, self._numbers = splice, calls, count()
        self._max_prompt_tokens = max_prompt_tokens
        self._renders = config.history == "render"

    async def run(self, prompt: Prompt, sampling: Sampling, place: int) -> EpisodeResult:
        """One episode, sample number `place` of its prompt. sampling.max_tokens: of a turn.

        Raises what the sampler raises, and UserFault where what answers can no longer be used.
        """
        name, verdict, failure = f"episode-{next(self._numbers)}", None, None
        await self._sampler.begin(name, len(prompt.token_ids))
        limits = self._max_prompt_tokens, self._config.max_tokens
        rows = EpisodeRows(self._sampler, name, sampling, place, *limits)
        try:
            try:
                state = await self._begun(rows, prompt, sampling)
                end = await self._take_turns(state, sampling.max_tokens)
            except EnvironmentFailure as error:
                end, failure = "environment", error
        finally:  # the engine's place is free before the environment thinks about the reward
            await rows.end(len(prompt.token_ids))
        try:
            verdict = await self._timed(rows.tally, self._environment.finish(name))
        except EnvironmentFailure as error:
            end, failure = "environment", error
        return EpisodeResult(rows.sample(end, prompt.token_ids), Failure(str(failure)) if failure else verdict)

    async def _begun(self, rows: EpisodeRows, prompt: Prompt, sampling: Sampling) -> _State:
        """The environment's first words are appended to the prompt as one more message of the user."""
        began_s, given = time.monotonic(), prompt.messages
        opening = await self._timed(rows.tally, self._environment.open(rows.name, prompt.row, group_seed(sampling)))
        history = chat_messages(given)
        if opening is None:
            return _State(rows, rows.open(prompt.token_ids), history, began_s)
        rows.tally.transcript.add_message(opening)
        history = [*history, user(self._splice.template.without_special_tokens(opening))]
        ids = await self._said(self._splice.first, history)
        if len(ids) > self._max_prompt_tokens:
            limit = f"data.max_prompt_tokens is {self._max_prompt_tokens}"
            raise EnvironmentFailure(f"with the text of reset the prompt has {len(ids)} tokens, and {limit}")
        return _State(rows, rows.open(ids), history, began_s)

    async def _take_turns(self, state: _State, turn_tokens: int) -> EpisodeEnd:
        """turn_tokens: of a turn at most."""
        rows, config = state.rows, self._config
        while True:
            is_whole = rows.turn_tokens(state.conversation) == turn_tokens
            turn = await rows.turn(state.conversation)
            if not turn.finished:
                return "cut" if is_whole else "max_tokens"
            answer = await self._answer(state, turn)
            if answer.end:
                return answer.end
            if state.tally.turns == config.max_turns:
                return "max_turns"
            if not await self._go_on(state, answer.ids):
                return "max_tokens"
            if time.monotonic() - state.began_s > config.timeout_s:
                return "timeout"

    async def _go_on(self, state: _State, ids: Sequence[int] | None) -> bool:
        """Whether there is room for a further turn after what was said, which the conversation then has."""
        conversation, rows = state.conversation, state.rows
        if ids is None:
            whole = await self._said(rendered, state.history, self._splice)
            if rows.room(len(whole)) < _FIRST_TOKEN:
                return False
            if not conversation.is_start_of(whole):
                state.conversation = rows.open(whole)
                return True
            ids = whole[len(conversation.ids) :]
        if rows.room(conversation.prompt_length, conversation.response_length + len(ids)) < _FIRST_TOKEN:
            return False
        conversation.add_message(ids)
        return True

    async def _answer(self, state: _State, turn: Sample) -> _Answer:
        """What tools or the environment say to a turn; its reward goes to the turn."""
        ids = turn.response_ids_T.tolist()
        read = await asyncio.to_thread(self._read, ids, state.after_tools) if self._calls else Turn(turn.text)
        if self._renders:
            template, text = self._splice.template, self._splice.turn_text(ids)
            state.history.append(assistant_message(read, text, template, state.tally.calls))
        if read.calls:
            return await self._called(state, read, ids[-1])
        if not self._environment.has_reply:
            return _Answer(end="answered")
        reply = await self._timed(state.tally, self._environment.reply(state.rows.name, read.content))
        if reply is None:
            return _Answer(end="answered")
        state.conversation.add_reward(reply.reward)
        state.after_tools, state.bad_turns = False, 0
        shown = await asyncio.to_thread(self._cut, reply.text)
        state.tally.transcript.add_reward(reply.reward)
        state.tally.transcript.add_message(shown)
        if reply.done:
            return _Answer(end="done")
        if self._renders:
            state.history.append(user(shown))
            return _Answer(None)
        return _Answer(await self._said(self._splice.user, shown, after=ids[-1]))

    async def _called(self, state: _State, read: Turn, stop: int) -> _Answer:
        """The results of a turn's calls, in their order; a call that cannot be made is answered with the reason."""
        tally, name = state.tally, state.rows.name
        good = [call for call in read.calls if isinstance(call, ToolCall)]
        made = await self._timed(tally, self._environment.call(name, [(call.name, call.arguments) for call in good]))
        results = iter(made)
        texts = [next(results).text if isinstance(call, ToolCall) else call.reason for call in read.calls]
        shown = await asyncio.to_thread(lambda: [self._cut(text) for text in texts])
        tally.calls, state.after_tools = tally.calls + len(read.calls), True
        tally.call_errors += len(read.calls) - sum(result.error is None for result in made)
        state.bad_turns = 0 if good else state.bad_turns + 1
        reward = sum(result.reward for result in made)
        state.conversation.add_reward(reward)
        tally.transcript.add_reward(reward)
        tally.transcript.add_calls(read.calls, made, shown)
        if any(result.done for result in made):
            return _Answer(end="done")
        if state.bad_turns == _MOST_BAD_TURNS:
            return _Answer(end="bad_calls")
        if self._renders:
            state.history += results_of(state.history[-1], shown)
            return _Answer(None)
        told = [ToolResult(text, call.name, call.id) for text, call in zip(shown, read.calls, strict=True)]
        return _Answer(await self._said(self._splice.tool_results, told, after=stop))

    async def _said(self, splice: Callable[..., list[int]], *words: Any, **how: Any) -> list[int]:
        """The tokens of what is said to the model. Raises EnvironmentFailure where the template refuses the words."""
        try:
            return await asyncio.to_thread(splice, *words, **how)
        except (UserFault, TemplateRefusal, BadMessages) as error:
            raise EnvironmentFailure(f"the chat template refuses the message ({error})") from error

    def _read(self, ids: Sequence[int], after_tools: bool) -> Turn:
        assert self._calls
        return self._calls.read(self._splice.turn_text(ids), after_tools=after_tools)

    def _cut(self, text: str) -> str:
        """The text without markup, of whose tokens the middle is left out where it has too many."""
        most, text = self._config.max_observation_tokens, self._splice.template.without_special_tokens(text)
        ids = self._splice.template.ids(text)
        if len(ids) <= most:
            return text
        head, tail = ids[: most - most // 2], ids[len(ids) - most // 2 :]
        decode = self._splice.template.decode
        return f"{decode(head)}\n[... {len(ids) - most} tokens left out ...]\n{decode(tail) if tail else ''}"

    async def _timed(self, tally: Tally, waits: Any) -> Any:
        began_s = time.monotonic()
        try:
            return await waits
        finally:
            tally.tool_s += time.monotonic() - began_s


def group_seed(sampling: Sampling) -> int:
    """Of the environments of a prompt's episodes, which are compared with each other and so get the same instance."""
    return sample_seed(sampling.stream, -1)

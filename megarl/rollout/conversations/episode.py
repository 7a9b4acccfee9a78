"""The turns of an episode: the model samples, and tools or an environment answer, until one of the ends.

Every turn is sampled after exactly the tokens that its row has; what is said in between is appended by the splice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np

from megarl.config.episode import EpisodeConfig
from megarl.rollout.conversations.conversation import Conversation
from megarl.rollout.conversations.splice import Splice, ToolResult
from megarl.rollout.conversations.template import TemplateRefusal
from megarl.rollout.conversations.tool_calls import CallFormat, ToolCall, Turn
from megarl.rollout.environments.pool import EnvironmentFailure
from megarl.rollout.environments.results import CallResult
from megarl.rollout.rewards import Failure, Verdict
from megarl.rollout.sglang.arguments import Sampling
from megarl.rollout.sglang.deterministic import sample_seed
from megarl.types import EpisodeEnd, EpisodeFacts, Prompt, Sample, UserFault

_MOST_BAD_TURNS = 3  # in a row, whose calls could not be made at all
_ENDS_BY_ITSELF = ("answered", "done")
_FIRST_TOKEN = 1  # room that a turn needs at least


class EnvironmentClient(Protocol):
    """What answers the model: `EnvironmentThread`. Methods as of `EnvironmentPool`."""

    @property
    def has_reply(self) -> bool: ...
    async def open(self, episode: str, row: Mapping[str, Any], seed: int) -> str | None: ...
    async def call(self, episode: str, calls: Sequence[tuple[str, object]]) -> list[CallResult]: ...
    async def reply(self, episode: str, text: str) -> CallResult | None: ...
    async def finish(self, episode: str) -> Verdict | None: ...


class TurnSampler(Protocol):
    """What samples the turns: `Engine`."""

    async def turn(
        self, conversation: str, number: int, context_ids: Sequence[int], sampling: Sampling, place: int, rows: int
    ) -> Sample: ...
    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None: ...


@dataclass(frozen=True)
class EpisodeResult:
    """An episode as a sample. verdict: the environment's, or why it failed; None: the reward function decides."""

    sample: Sample
    verdict: Verdict | Failure | None


@dataclass
class _Tally:
    """What has happened in an episode so far."""

    turns: int = 0
    calls: int = 0
    call_errors: int = 0
    tool_s: float = 0.0
    sampled_tokens: int = 0
    bad_turns: int = 0  # in a row
    last: Sample | None = None
    after_tools: bool = False  # whether the last message was the results of calls
    first_turn_ended_s: float = 0.0  # when the first turn had ended
    verifications: int = 0
    prefills: int = 0


@dataclass(frozen=True)
class _Answer:
    """What follows a turn: the tokens of the next message, or the reason why the episode ends with the turn."""

    ids: Sequence[int] = ()
    end: EpisodeEnd | None = None


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

    async def run(self, prompt: Prompt, sampling: Sampling, place: int) -> EpisodeResult:
        """One episode, sample number `place` of its prompt. sampling.max_tokens: of a turn.

        Raises what the sampler raises, and UserFault where what answers can no longer be used.
        """
        name, tally = f"episode-{next(self._numbers)}", _Tally()
        conversation, verdict, failure = Conversation(prompt.token_ids), None, None
        try:
            try:
                opening = await self._timed(tally, self._environment.open(name, prompt.row, _group_seed(sampling)))
                if opening is not None:
                    conversation = Conversation(await self._opened(prompt, opening))
                end = await self._take_turns(name, conversation, tally, sampling, place)
            except EnvironmentFailure as error:
                end, failure = "environment", error
        finally:  # the engine's place is free before the environment thinks about the reward
            await self._sampler.complete(name, len(prompt.token_ids), conversation.response_length)
        try:
            verdict = await self._timed(tally, self._environment.finish(name))
        except EnvironmentFailure as error:
            end, failure = "environment", error
        sample = _sample(conversation, tally, end, is_own_prompt=not conversation.begins_with(prompt.token_ids))
        return EpisodeResult(sample, Failure(str(failure)) if failure else verdict)

    async def _opened(self, prompt: Prompt, opening: str) -> list[int]:
        """The tokens of the prompt with the environment's first words as one more message of the user."""
        given, text = prompt.messages, self._splice.template.without_special_tokens(opening)
        before = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        ids = await self._said(self._splice.first, [*before, {"role": "user", "content": text}])
        if len(ids) > self._max_prompt_tokens:
            limit = f"data.max_prompt_tokens is {self._max_prompt_tokens}"
            raise EnvironmentFailure(f"with the text of reset the prompt has {len(ids)} tokens, and {limit}")
        return ids

    async def _take_turns(
        self, name: str, conversation: Conversation, tally: _Tally, sampling: Sampling, place: int
    ) -> EpisodeEnd:
        while True:
            room = self._config.max_tokens - conversation.response_length
            own = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            turn = await self._sampler.turn(name, tally.turns, conversation.ids, own, place, conversation.known_rows)
            conversation.add_turn(turn)
            _count(tally, turn)
            if not turn.finished:
                return "cut" if own.max_tokens == sampling.max_tokens else "max_tokens"
            answer = await self._answer(name, conversation, tally, turn)
            if answer.end:
                return answer.end
            if tally.turns == self._config.max_turns:
                return "max_turns"
            if conversation.response_length + len(answer.ids) + _FIRST_TOKEN > self._config.max_tokens:
                return "max_tokens"
            if time.monotonic() - tally.first_turn_ended_s > self._config.timeout_s:
                return "timeout"
            conversation.add_message(answer.ids)

    async def _answer(self, name: str, conversation: Conversation, tally: _Tally, turn: Sample) -> _Answer:
        """What tools or the environment say to a turn; its reward goes to the turn."""
        ids = turn.response_ids_T.tolist()
        read = await asyncio.to_thread(self._read, ids, tally.after_tools) if self._calls else Turn(turn.text)
        if read.calls:
            return await self._called(name, conversation, tally, read, ids[-1])
        if not self._environment.has_reply:
            return _Answer(end="answered")
        reply = await self._timed(tally, self._environment.reply(name, read.content))
        if reply is None:
            return _Answer(end="answered")
        conversation.add_reward(reply.reward)
        tally.after_tools, tally.bad_turns = False, 0
        if reply.done:
            return _Answer(end="done")
        shown = await asyncio.to_thread(self._cut, reply.text)
        return _Answer(await self._said(self._splice.user, shown, after=ids[-1]))

    async def _called(self, name: str, conversation: Conversation, tally: _Tally, read: Turn, stop: int) -> _Answer:
        """The results of a turn's calls, in their order; a call that cannot be made is answered with the reason."""
        good = [call for call in read.calls if isinstance(call, ToolCall)]
        made = await self._timed(tally, self._environment.call(name, [(call.name, call.arguments) for call in good]))
        results = iter(made)
        texts = [next(results).text if isinstance(call, ToolCall) else call.reason for call in read.calls]
        shown = await asyncio.to_thread(lambda: [self._cut(text) for text in texts])
        told = [ToolResult(text, call.name, call.id) for text, call in zip(shown, read.calls, strict=True)]
        tally.calls, tally.after_tools = tally.calls + len(read.calls), True
        tally.call_errors += len(read.calls) - sum(result.error is None for result in made)
        tally.bad_turns = 0 if good else tally.bad_turns + 1
        conversation.add_reward(sum(result.reward for result in made))
        if any(result.done for result in made):
            return _Answer(end="done")
        if tally.bad_turns == _MOST_BAD_TURNS:
            return _Answer(end="bad_calls")
        return _Answer(await self._said(self._splice.tool_results, told, after=stop))

    async def _said(self, splice: Callable[..., list[int]], *words: Any, **how: Any) -> list[int]:
        """The tokens of what is said to the model. Raises EnvironmentFailure where the template refuses the words."""
        try:
            return await asyncio.to_thread(splice, *words, **how)
        except (UserFault, TemplateRefusal) as error:
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

    async def _timed(self, tally: _Tally, waits: Any) -> Any:
        began_s = time.monotonic()
        try:
            return await waits
        finally:
            tally.tool_s += time.monotonic() - began_s


def _group_seed(sampling: Sampling) -> int:
    """Of the environments of a prompt's episodes, which are compared with each other and so get the same instance."""
    return sample_seed(sampling.stream, -1)


def _count(tally: _Tally, turn: Sample) -> None:
    tally.turns += 1
    tally.first_turn_ended_s = tally.first_turn_ended_s or time.monotonic()
    tally.sampled_tokens += len(turn.response_ids_T)
    tally.verifications += turn.verifications
    tally.prefills += turn.prefills
    tally.last = turn


def _sample(conversation: Conversation, tally: _Tally, end: EpisodeEnd, *, is_own_prompt: bool) -> Sample:
    row = conversation.row()
    facts = EpisodeFacts(tally.turns, tally.calls, tally.call_errors, tally.tool_s, end, tally.sampled_tokens)
    return Sample(
        response_ids_T=row.response_ids_T,
        engine_logp_T=row.engine_logp_T.astype(np.float32),
        text=tally.last.text if tally.last else "",
        finished=end in _ENDS_BY_ITSELF,
        parts=row.parts,
        routed_experts=row.routed_experts,
        verifications=tally.verifications,
        prefills=tally.prefills,
        prompt_ids=row.prompt_ids if is_own_prompt else None,
        trained_T=row.trained_T,
        token_rewards_T=row.token_rewards_T,
        facts=facts,
    )

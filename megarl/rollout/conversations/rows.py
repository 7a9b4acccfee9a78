"""The conversations of one episode, each of which becomes a row, and the account of what happened in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import numpy as np

from megarl.rollout.conversations.conversation import Conversation
from megarl.rollout.conversations.transcript import TranscriptWriter
from megarl.rollout.rewards import Failure, Verdict
from megarl.rollout.sglang.arguments import Sampling
from megarl.types import EpisodeEnd, EpisodeFacts, Sample

ENDS_BY_ITSELF = ("answered", "done")


class TurnSampler(Protocol):
    """What samples the turns: `Engine`."""

    async def begin(self, conversation: str, prompt_tokens: int) -> None: ...
    async def turn(
        self, conversation: str, number: int, context_ids: Sequence[int], sampling: Sampling, place: int, rows: int
    ) -> Sample: ...
    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None: ...


@dataclass(frozen=True)
class EpisodeResult:
    """An episode as a sample. verdict: that of its environment or agent, or why there is none; None: the reward
    function decides."""

    sample: Sample
    verdict: Verdict | Failure | None


@dataclass
class Tally:
    """What has happened in an episode so far."""

    turns: int = 0
    calls: int = 0
    call_errors: int = 0
    tool_s: float = 0.0
    sampled_tokens: int = 0
    dropped_tokens: int = 0
    last: Sample | None = None
    verifications: int = 0
    prefills: int = 0
    reusable_tokens: int = 0
    cached_tokens: int = 0
    transcript: TranscriptWriter = field(default_factory=TranscriptWriter)


class EpisodeRows:
    """The conversations of an episode, which is sample number `place` of its prompt.

    max_tokens: of a conversation after its prompt, and of all that is sampled in the episode. A conversation has at
    most max_prompt_tokens + max_tokens.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        name: str,
        sampling: Sampling,
        place: int,
        max_prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        self.name, self.tally = name, Tally()
        self._sampler, self._sampling, self._place = sampler, sampling, place
        self._context_tokens, self._max_tokens = max_prompt_tokens + max_tokens, max_tokens
        self._conversations: list[Conversation] = []
        self._numbers = count()
        self._abandoned: set[asyncio.Task[Sample]] = set()

    def open(self, prompt_ids: Sequence[int]) -> Conversation:
        """A further conversation, which begins with these tokens."""
        conversation = Conversation(prompt_ids)
        self._conversations.append(conversation)
        return conversation

    def room(self, prompt_tokens: int, response_tokens: int = 0) -> int:
        """How many tokens the model may sample in a conversation that has so many; 0 or less: none."""
        in_context = self._context_tokens - prompt_tokens - response_tokens
        return min(in_context, self._max_tokens - max(response_tokens, self.tally.sampled_tokens))

    def turn_tokens(self, conversation: Conversation) -> int:
        """How many tokens the next turn may have."""
        return min(self._sampling.max_tokens, self.room(conversation.prompt_length, conversation.response_length))

    async def turn(self, conversation: Conversation, heard: Sequence[str] = ()) -> Sample:
        """The model's next turn in a conversation; where the caller is cancelled it is sampled to its end and dropped.

        heard: the texts before it that the transcript has not yet.
        """
        row = self._conversations.index(conversation)
        limits = replace(
            self._sampling,
            max_tokens=self.turn_tokens(conversation),
            stream=(*self._sampling.stream, row) if row else self._sampling.stream,  # not the numbers of another row
        )
        asked, known = conversation.asked(), conversation.known_rows
        turn = asyncio.ensure_future(
            self._sampler.turn(
                self.name, next(self._numbers), conversation.ids, limits, self._place, known
            )
        )
        try:
            sample = await asyncio.shield(turn)
        except asyncio.CancelledError:
            self._abandoned.add(turn)
            raise
        conversation.add_turn(sample, asked)
        self._count(sample)
        self.tally.last = sample
        self.tally.reusable_tokens += known
        self.tally.cached_tokens += min(sample.cached_tokens, known)  # more may be another episode's
        for text in heard:
            self.tally.transcript.add_message(text)
        self.tally.transcript.add_turn(sample.text)
        return sample

    async def end(self, prompt_tokens: int) -> None:
        """Wait for turns that nobody awaits any more, which are dropped, and give the engine's place to others.

        prompt_tokens: as of the sampler's `begin`.
        """
        try:
            while self._abandoned:
                sample = await self._abandoned.pop()
                self._count(sample)
                self.tally.dropped_tokens += len(sample.response_ids_T)
        finally:
            longest = max((one.response_length for one in self._conversations), default=0)
            await self._sampler.complete(self.name, prompt_tokens, longest)

    def sample(self, end: EpisodeEnd, prompt_ids: Sequence[int]) -> Sample:
        """The episode, which has ended. prompt_ids: of the group."""
        tally = self.tally
        asked = [one for one in self._conversations if one.has_turns] or self._conversations[:1]
        first, *more = [one.row() for one in asked or [Conversation(prompt_ids)]]
        facts = EpisodeFacts(
            tally.turns,
            tally.calls,
            tally.call_errors,
            tally.tool_s,
            end,
            tally.sampled_tokens,
            tally.dropped_tokens,
            tally.reusable_tokens,
            tally.cached_tokens,
        )
        is_groups_prompt = np.array_equal(first.prompt_ids if first.prompt_ids is not None else [], prompt_ids)
        return Sample(
            response_ids_T=first.response_ids_T,
            engine_logp_T=first.engine_logp_T.astype(np.float32),
            text=tally.last.text if tally.last else "",
            finished=end in ENDS_BY_ITSELF,
            parts=first.parts,
            routed_experts=first.routed_experts,
            verifications=tally.verifications,
            prefills=tally.prefills,
            prompt_ids=None if is_groups_prompt else first.prompt_ids,
            trained_T=first.trained_T,
            token_rewards_T=first.token_rewards_T,
            more_rows=tuple(more),
            facts=facts,
            transcript=tally.transcript.transcript(),
        )

    def _count(self, turn: Sample) -> None:
        tally = self.tally
        tally.turns += 1
        tally.sampled_tokens += len(turn.response_ids_T)
        tally.verifications += turn.verifications
        tally.prefills += turn.prefills

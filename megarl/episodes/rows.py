"""The conversations of one episode, each of which becomes a row, and the account of what happened in it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from megarl.episodes.conversation import Conversation
from megarl.episodes.paced import paced
from megarl.episodes.tally import Tally
from megarl.types import EpisodeEnd, EpisodeProgress, Prompt, Row, Sample
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.sampling import Sampling

ENDS_BY_ITSELF = ("answered", "done")


class TurnSampler(Protocol):
    """What samples the turns: `Engine`."""

    async def begin(self, conversation: str, prompt_tokens: int) -> None: ...
    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample: ...
    async def complete(
        self, conversation: str, prompt_tokens: int, response_tokens: int
    ) -> None: ...
    def text(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class EpisodeResult:
    """An episode as a sample. verdict: that of its environment or agent, or why there is none; None: the reward
    function decides, or the episode is open. refused_fields: how often the endpoint has refused each field."""

    sample: Sample
    reward_result: RewardResult | Failure | None
    refused_fields: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the model with all of its parts. cut_by: the limit that has cut it; is_open: the phase has cut it."""

    ids: Sequence[int]
    text: str
    cut_by: EpisodeEnd | None = None
    is_open: bool = False


class EpisodeRows:
    """The conversations of an episode, which is sample number `place` of its prompt.

    max_tokens: of a conversation after its prompt, and of all that is sampled in the episode and not dropped. A
    conversation has at most max_prompt_tokens + max_tokens. sampling.phase_tokens: of all that is sampled here.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        name: str,
        prompt: Prompt,
        sampling: Sampling,
        place: int,
        max_prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        self.name = name
        self.prompt = prompt
        self.tally = Tally()
        self._sampler = sampler
        self.sampling = sampling  # of the turns; max_tokens: of a turn
        self._place = place
        self._context_tokens = max_prompt_tokens + max_tokens
        self._max_tokens = max_tokens
        self._conversations: list[Conversation] = []
        self._numbers = count()
        self._abandoned: set[asyncio.Future[Sample]] = set()
        self._reserved = 0  # tokens that the turns in flight may have
        self._turn_ended = asyncio.Event()  # another one for each turn
        self.last: SampledTurn | None = None  # of those asked for
        self._last_number = -1
        self._phase_sampled = 0
        self._restored_length = 0
        self.error: BaseException | None = None  # what the sampler has raised

    async def begin(self, num_tokens: int) -> None:
        """Wait for a place at the engine, for a conversation that has so many tokens."""
        await paced(self._sampler.begin(self.name, num_tokens))

    def open(self, prompt_ids: Sequence[int]) -> Conversation:
        """A further conversation, which begins with these tokens."""
        conversation = Conversation(self._shared(prompt_ids))
        self._conversations.append(conversation)
        return conversation

    def restore(self, begun: Sample, opened: EpisodeProgress) -> tuple[Conversation, SampledTurn]:
        """Take the rows of an earlier phase: the last of them, and its last turn."""
        for row, digest in zip(begun.rows, opened.digests, strict=True):
            prompt_ids = self._shared(row.prompt_ids)
            self._conversations.append(Conversation.restored(row, prompt_ids, digest))
        self._restored_length = self._longest
        last = self._conversations[-1]
        ids = last.ids[len(last.ids) - opened.turn_tokens :]
        self.last = SampledTurn(ids, self._sampler.text(ids), is_open=opened.following == "turn")
        return last, self.last

    def _shared(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The prompt of a conversation: that of the group itself where it has the same tokens."""
        if list(self.prompt.token_ids) == list(prompt_ids):
            return self.prompt.token_ids
        return array("i", prompt_ids)

    def room(self, prompt_tokens: int, response_tokens: int = 0) -> int:
        """How many tokens the model may sample in a conversation that has so many; 0 or less: none.

        Those that turns in flight may have are not left over.
        """
        return self._room(prompt_tokens, response_tokens, self._reserved)

    def _room(self, prompt_tokens: int, response_tokens: int, reserved: int) -> int:
        in_context = self._context_tokens - prompt_tokens - response_tokens
        return min(
            in_context, self._max_tokens - max(response_tokens, self.tally.kept_tokens + reserved)
        )

    async def wait_for_room(self, prompt_tokens: int, response_tokens: int) -> bool:
        """Whether a turn has room, once it does not depend on turns in flight, of other conversations."""
        while self._reserved:
            most = self._room(prompt_tokens, response_tokens, 0)
            if self.room(prompt_tokens, response_tokens) >= min(most, self.sampling.max_tokens):
                break
            await self._turn_ended.wait()
        return self.room(prompt_tokens, response_tokens) > 0

    @property
    def num_abandoned(self) -> int:
        """The turns that nobody awaits any more."""
        return len(self._abandoned)

    def turn_tokens(self, conversation: Conversation, begun: SampledTurn | None = None) -> int:
        """How many tokens the next turn may have, or the open turn that a phase before has begun."""
        left = self.room(conversation.prompt_length, conversation.response_length)
        if begun:
            left += len(begun.ids)
        return min(self.sampling.max_tokens, left)

    @property
    def is_phase_over(self) -> bool:
        """Whether the phase allows no further token."""
        return self._phase_tokens == 0

    @property
    def _phase_tokens(self) -> int | None:
        """How many tokens the phase still allows; None: any number."""
        limit = self.sampling.phase_tokens
        if limit is None:
            return None
        return limit - self._phase_sampled

    async def turn(
        self,
        conversation: Conversation,
        begun: SampledTurn | None = None,
        heard: Sequence[str] = (),
        read: Callable[[SampledTurn], Awaitable[None]] | None = None,
        requested_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> SampledTurn:
        """The model's next turn in a conversation, or the open turn `begun` with what was missing.

        It is open where the phase cuts it. Where the caller is cancelled it is sampled to its end and dropped. heard:
        the texts before it that the transcript has not yet. read: is awaited before the turn counts as delivered; where
        it raises the turn is dropped. requested_tokens: the most that the agent asks for; None: no request. stop: as of
        `Sampling`. Raises what the sampler raises; the first of that is `error`.
        """
        begun_ids = begun.ids if begun else []
        any_turn = self.sampling.max_tokens
        if requested_tokens is not None:
            any_turn = min(requested_tokens, any_turn)
        most = min(any_turn, self.turn_tokens(conversation, begun))
        left = most - len(begun_ids)
        limits = self._turn_sampling(conversation, left, stop)
        known = conversation.known_rows
        reusable = known if self._phase_sampled else 0  # the cache has nothing of the phases before
        number = next(self._numbers)
        work = self._sampler.turn(self.name, number, conversation.ids, limits, self._place, known)
        self._reserved += limits.max_tokens
        asked_for = asyncio.ensure_future(self._sampled(work, limits.max_tokens))
        try:
            sample = await asyncio.shield(asked_for)
            new_ids = sample.only_row.response_ids_T.tolist()
            ids = [*begun_ids, *new_ids]
            is_open = not sample.finished and len(new_ids) == limits.max_tokens < left
            cut_by: EpisodeEnd | None = None
            if not sample.finished and not is_open:
                cut_by = "cut" if most == any_turn else "max_tokens"
            text = self._sampler.text(ids) if begun else sample.text
            turn = SampledTurn(ids, text, cut_by, is_open)
            if read:
                await read(turn)
        except BaseException:
            has_failed = asked_for.done() and not asked_for.cancelled() and asked_for.exception()
            if not has_failed:
                self._abandoned.add(asked_for)
            raise
        conversation.add_turn(sample)
        if number > self._last_number:
            self._last_number = number
            self.last = turn
        self.tally.turns += not begun
        self.tally.reusable_tokens += reusable
        # more may be another episode's
        self.tally.cached_tokens += min(sample.cached_tokens, reusable)
        for text in heard:
            self.tally.transcript.add_message(text)
        if not is_open:
            self.tally.transcript.add_turn(turn.text)
        return turn

    def _turn_sampling(
        self, conversation: Conversation, left: int, stop: tuple[str, ...]
    ) -> Sampling:
        """How a turn that has `left` tokens at most is sampled in this phase."""
        return replace(
            self.sampling,
            max_tokens=left if self._phase_tokens is None else min(left, self._phase_tokens),
            phase_tokens=None,
            stream=self._stream(conversation),
            stop=stop,
        )

    def _stream(self, conversation: Conversation) -> tuple[int, ...]:
        """The key of a conversation's random numbers, made from its prompt, whatever the order of rows.

        The first conversation with the group's own prompt has the key of a single response.
        """
        prompt_ids = conversation.prompt_ids
        stream = self.sampling.stream
        earlier = self._conversations[: self._conversations.index(conversation)]
        twins = sum(other.prompt_ids == prompt_ids for other in earlier)
        if prompt_ids is self.prompt.token_ids and not twins:
            return stream
        return (*stream, conversation.prompt_key, twins)

    async def _sampled(self, work: Coroutine[Any, Any, Sample], tokens: int) -> Sample:
        """A turn that has reserved so many tokens; what it has counts from its end, whoever awaits it."""
        try:
            turn = await paced(work)
        except Exception as error:
            self.error = self.error or error
            raise
        finally:
            self._reserved -= tokens
            self._turn_ended.set()
            self._turn_ended = asyncio.Event()
        self.tally.sampled_tokens += turn.num_trained
        self.tally.verifications += turn.verifications
        self.tally.prefills += turn.prefills
        self._phase_sampled += turn.num_trained
        return turn

    async def end(self, prompt_tokens: int) -> None:
        """Wait for turns that nobody awaits any more, which are dropped, and give the engine's place to others.

        prompt_tokens: with which the sample was dealt to the engine.
        """
        try:
            while self._abandoned:
                sample = await self._abandoned.pop()
                self.tally.turns += 1
                self.tally.dropped_unawaited += sample.num_trained
        finally:
            await self._sampler.complete(
                self.name, prompt_tokens, max(0, self._longest - self._restored_length)
            )

    @property
    def _longest(self) -> int:
        return max(
            (conversation.response_length for conversation in self._conversations), default=0
        )

    def sample(self, end: EpisodeEnd) -> Sample:
        """The episode, which has ended."""
        tally = self.tally
        text = self.last.text if self.last else ""
        if self.last and self.last.is_open:
            tally.transcript.add_turn(text)
        return Sample(
            self._rows(),
            text,
            finished=end in ENDS_BY_ITSELF,
            verifications=tally.verifications,
            prefills=tally.prefills,
            facts=tally.facts(end, self.sampling.group_seed),
            transcript=tally.transcript.transcript(),
        )

    def open_sample(self, opened: EpisodeProgress) -> Sample:
        """The episode as a phase leaves it; opened: without account and digests, which the rows have."""
        digests = tuple(conversation.digest for conversation in self._asked())
        return Sample(
            self._rows(),
            text="",
            finished=False,
            is_open=True,
            verifications=self.tally.verifications,
            prefills=self.tally.prefills,
            transcript=self.tally.transcript.entries,
            open_episode=replace(opened, account=self.tally.account, digests=digests),
        )

    def _asked(self) -> list[Conversation]:
        """The conversations that have turns; the first or an empty one where none has."""
        asked = [
            conversation for conversation in self._conversations if conversation.has_turns
        ] or self._conversations[:1]
        return asked or [Conversation(self.prompt.token_ids)]

    def _rows(self) -> tuple[Row, ...]:
        return tuple(conversation.row() for conversation in self._asked())

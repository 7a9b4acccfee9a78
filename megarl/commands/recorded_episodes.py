"""Episodes of a file played again: their turns are given as tokens, and tools or an environment answer them anew.

The runner of episodes gets these turns in place of an engine's, so that they are read, answered and tokenised as in a
rollout. Whatever is before a turn must be, token for token, what the file has before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.episodes.rows import EpisodeResult
from megarl.episodes.template import num_shared
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.printable import short
from megarl.types import Row, Sample, SamplePart
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.sampling import Sampling

_SHARED_SHOWN = 16  # tokens before the first that differs
_LONGEST = 160  # characters of a text
Judged = RewardResult | Failure | None


@dataclass(frozen=True)
class RecordedTurn:
    """A turn that a file has. context_ids: all tokens of its conversation before it; reward: of the turn."""

    context_ids: Sequence[int]
    ids: Sequence[int]
    reward: float


def recorded_turns(sample: Sample) -> list[RecordedTurn]:
    """The turns of an episode, row by row: tokens that the model sampled with no other between them."""
    turns = []
    for row in sample.rows:
        prompt_length = len(row.prompt_ids)
        ids = [*row.prompt_ids, *row.response_ids_T.tolist()]
        edges = np.flatnonzero(np.diff(np.pad(row.trained_T.astype(np.int8), 1))).tolist()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if row.token_rewards_T is None:
                reward = 0.0
            else:
                reward = float(row.token_rewards_T[end - 1])
            first = prompt_length + begin
            turns.append(RecordedTurn(ids[:first], ids[first : prompt_length + end], reward))
    return turns


class RecordedEpisode:
    """The turns of one episode, given until one is asked for after other tokens than those in the file.

    num_given: turns that were given; difference: why no further one was, or "".
    """

    def __init__(self, turns: Sequence[RecordedTurn], turn_tokenizer: TurnTokenizer) -> None:
        self.turns = turns
        self.num_given = 0
        self.difference = ""
        self._turn_tokenizer = turn_tokenizer

    def next_turn(self, context_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """The tokens of the next turn; none, which cuts the episode, where the file has none or others before it."""
        self.difference = self._difference(context_ids, max_tokens)
        if self.difference:
            return ()
        self.num_given += 1
        return self.turns[self.num_given - 1].ids

    def _difference(self, context_ids: Sequence[int], max_tokens: int) -> str:
        if self.num_given == len(self.turns):
            shown = self._text(context_ids, len(context_ids))
            return _differs(
                f"after turn {self.num_given}", "the episode's end", f"a further turn after {shown}"
            )
        turn = self.turns[self.num_given]
        if turn.context_ids != list(context_ids):
            shared = num_shared(turn.context_ids, context_ids)
            file, now = (self._text(ids, shared) for ids in (turn.context_ids, context_ids))
            return _differs(f"before turn {self.num_given + 1}", f"{file} at token {shared}", now)
        if len(turn.ids) > max_tokens:
            return _differs(
                f"in turn {self.num_given + 1}", f"{len(turn.ids)} tokens", f"room for {max_tokens}"
            )
        return ""

    def _text(self, ids: Sequence[int], place: int) -> str:
        """The text around a place in a conversation."""
        first = max(0, place - _SHARED_SHOWN)
        return short(self._turn_tokenizer.template.decode(ids[first : place + _LONGEST]), _LONGEST)


class RecordedSampler:
    """Gives the turns of recorded episodes in place of an engine; `place` of `EpisodeRunner.run` says of which."""

    def __init__(self, turn_tokenizer: TurnTokenizer) -> None:
        self.episodes: dict[int, RecordedEpisode] = {}
        self._turn_tokenizer = turn_tokenizer

    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        """There is always a place."""

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        """The next turn, with 0 as its logprobs; it has finished where its last token is a stop token."""
        ids = self.episodes[place].next_turn(context_ids, sampling.max_tokens)
        finished = bool(ids) and ids[-1] in self._turn_tokenizer.stop_ids
        row = Row.response(
            context_ids,
            np.asarray(ids, np.int64),
            np.zeros(len(ids), np.float32),
            (SamplePart(0, len(ids)),),
        )
        return Sample((row,), self.text(ids), finished)

    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        """Nobody waits for the place."""

    def text(self, ids: Sequence[int]) -> str:
        """As of `Engine`."""
        return self._turn_tokenizer.template.tokenizer.decode(list(ids), skip_special_tokens=True)


def first_difference(
    recorded: RecordedEpisode,
    sample: Sample,
    now: EpisodeResult,
    rewards: tuple[Judged, Judged],
) -> str:
    """What first came out otherwise when an episode was played again; "": everything came out the same.

    sample: of the file. rewards: those of the environment, in the file and now; None where they are not compared.
    """
    facts = sample.facts
    facts_now = now.sample.facts
    number = recorded.num_given
    assert facts and facts_now
    if recorded.difference:
        return recorded.difference
    end = f"the end `{facts_now.end}`"
    if isinstance(now.reward_result, Failure):
        end += f" ({now.reward_result.words})"
    if number < len(recorded.turns):
        return _differs(f"before turn {number + 1}", "another turn", end)
    if facts_now.end != facts.end:
        return _differs(f"after turn {number}", f"the end `{facts.end}`", end)
    for place, (before, after) in enumerate(
        zip(recorded.turns, recorded_turns(now.sample), strict=True), 1
    ):
        if before.reward != after.reward:
            return _differs(
                f"at turn {place}", f"the reward {before.reward:g}", f"the reward {after.reward:g}"
            )
    before, after = map(_reward, rewards)
    return "" if before == after else _differs("at the end", before, after)


def _differs(place: str, recorded: str, replayed: str) -> str:
    """place: in the episode; recorded, replayed: what the file has there, and what came in its place."""
    return f"{place} the file has {recorded}, and now there is {replayed}"


def _reward(judged: Judged) -> str:
    """A reward in words, with every bit of the float32 that a file keeps."""
    if isinstance(judged, RewardResult):
        return f"the reward {np.float32(judged.reward)!s} ({'correct' if judged.correct else 'not correct'})"
    return "no reward"

"""Episodes between two phases: when a phase leaves one open, what is kept of it, and how the next phase goes on.

No instance of an environment is kept: what was done with it is done again, in another one, and must come to the same.
"""

from __future__ import annotations

import math
import time
from asyncio import timeout
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megarl.episodes.conversation import Conversation
from megarl.episodes.rows import EpisodeRows, SampledTurn
from megarl.episodes.tally import Tally
from megarl.model.tokenizer import chat_messages
from megarl.types import EpisodeProgress, Sample
from megarl.types.json_objects import Message

Result = TypeVar("Result")


class PhaseOver(Exception):
    """The episode has had its tokens of the phase, or its seconds of tools."""


class EpisodeOverdue(Exception):
    """The episode has had its seconds."""


class ToolTime:
    """Awaits tools and environments, and counts the seconds and the results.

    phase_s: the seconds of tools in a phase; None: any number. timeout_s: those of the episode; seconds: of them, those
    of the phases before. operations: results, those of the phases before among them.
    """

    def __init__(
        self, tally: Tally, phase_s: float | None, timeout_s: float, seconds: float = 0.0
    ) -> None:
        self._tally = tally
        self._timeout_s = timeout_s
        self._began_s = time.monotonic() - seconds
        if phase_s is None:
            self._phase_left_s = math.inf
        else:
            self._phase_left_s = phase_s
        self.operations = 0

    @property
    def seconds(self) -> float:
        """Since the episode had its first place at an engine, in phases alone."""
        return time.monotonic() - self._began_s

    @property
    def is_overdue(self) -> bool:
        """Whether the episode has had its seconds."""
        return self.seconds > self._timeout_s

    async def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of an operation, which is given up where it takes longer than is left.

        Raises, then and later, EpisodeOverdue where the episode has no seconds left, and PhaseOver where the phase has
        none.
        """
        left_s = self._timeout_s - self.seconds
        over = EpisodeOverdue
        if self._phase_left_s < left_s:
            left_s = self._phase_left_s
            over = PhaseOver
        if left_s <= 0:
            work.close()
            raise over
        began_s = time.monotonic()
        limit = timeout(left_s)
        try:
            async with limit:
                result = await self.unlimited(work)
        except TimeoutError:
            if not limit.expired():
                raise
            raise over from None
        finally:
            self._phase_left_s -= left_s if limit.expired() else time.monotonic() - began_s
        self.operations += 1
        return result

    async def unlimited(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of what has no limit: the reward, and what is done again."""
        began_s = time.monotonic()
        try:
            return await work
        finally:
            self._tally.tool_s += time.monotonic() - began_s


@dataclass
class EpisodeState:
    """An episode between two turns.

    messages: in OpenAI's form, which are kept to be rendered. turn: the last one. is_answered: what follows it is
    known, as `said`: the tokens of the next message; None: the messages are rendered anew. after_tools: whether the
    last message was the results of calls. bad_turns: in succession, whose calls could not be made at all.
    """

    rows: EpisodeRows
    tools: ToolTime
    conversation: Conversation
    messages: list[Message]
    turn: SampledTurn | None = None
    is_answered: bool = False
    said: Sequence[int] | None = None
    after_tools: bool = False
    bad_turns: int = 0

    @property
    def tally(self) -> Tally:
        return self.rows.tally


def left_open(
    rows: EpisodeRows,
    tools: ToolTime,
    state: EpisodeState | None,
    phases: int,
    history: str | None,
    *,
    renders: bool,
) -> Sample:
    """The episode as a sample that goes on later. phases: that it has had; history: of its environment."""
    if state is None:
        return rows.open_sample(EpisodeProgress(phases, {}, seconds=tools.seconds))
    turn = state.turn
    assert turn, "a phase allows a token"
    if turn.is_open:
        following = "turn"
    elif state.is_answered:
        following = "message"
    else:
        following = "answer"
    messages: list[Message] = []
    if renders:
        messages = state.messages[len(chat_messages(rows.prompt.messages)) :]
    opened = EpisodeProgress(
        phases,
        account={},
        following=following,
        seconds=tools.seconds,
        turn_tokens=len(turn.ids),
        said=None if state.said is None else tuple(state.said),
        messages=tuple(messages),
        history=history,
        after_tools=state.after_tools,
        bad_turns=state.bad_turns,
    )
    return rows.open_sample(opened)


def resumed(
    rows: EpisodeRows, tools: ToolTime, begun: Sample, opened: EpisodeProgress
) -> EpisodeState:
    """The state of an episode that a phase has left open, with its rows."""
    conversation, turn = rows.restore(begun, opened)
    return EpisodeState(
        rows,
        tools,
        conversation,
        [*chat_messages(rows.prompt.messages), *opened.messages],
        turn,
        opened.following == "message",
        opened.said,
        opened.after_tools,
        opened.bad_turns,
    )

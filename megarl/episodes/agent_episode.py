"""The requests of an agent's episode: each goes on with one of its conversations, or opens another.

A request goes on with a conversation where its messages are that conversation's, with one or more behind them. Then the
tokens of the conversation stay as they are, and what is new is appended by the splice. Any other request, of a
sub-agent or of a history that was shortened, is rendered and opens another conversation of the same episode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megarl.config.episode import EpisodeConfig
from megarl.environments.agents.chat import ChatAnswer, ChatRefused, ChatRequest, EpisodeOver
from megarl.episodes.agent_tools import ToolSet, ToolSets, calls_of
from megarl.episodes.conversation import Conversation
from megarl.episodes.messages import BadMessages, assistant_message, checked, rendered, said
from megarl.episodes.request_sampling import PolicySampling
from megarl.episodes.rows import EpisodeRows, SampledTurn
from megarl.episodes.tool_calls import BadCall, Turn
from megarl.printable import describe_error
from megarl.types import EpisodeEnd
from megarl.types.json_objects import JsonObject, Message

Messages = Sequence[Mapping[str, Any]]


@dataclass
class _Thread:
    """A conversation as its agent sees it.

    is_free: its last turn was delivered whole, and no request goes on with it yet. stop: the token that ended that
    turn; None: a stop text ended it.
    """

    conversation: Conversation
    tools: ToolSet
    messages: list[Message] = field(default_factory=list)
    is_free: bool = False
    stop: int | None = None
    heard: Messages = ()  # what was said before the next turn
    num_calls: int = 0  # of all turns

    def goes_on_with(self, messages: Messages, tools: ToolSet) -> bool:
        length = len(self.messages)
        return (
            self.is_free
            and self.tools.key == tools.key
            and len(messages) > length
            and list(messages[:length]) == self.messages
        )

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A block in which no other request may take the conversation; where it raises the conversation is free."""
        self.is_free = False
        try:
            yield
        except BaseException:
            self.is_free = True
            raise


class AgentEpisode:
    """Answers the requests of one episode. All in the event loop that made it."""

    def __init__(
        self,
        rows: EpisodeRows,
        tool_sets: ToolSets,
        config: EpisodeConfig,
        policy: PolicySampling | None = None,
    ) -> None:
        self._rows = rows
        self._tool_sets = tool_sets
        self._config = config
        self._policy = policy or PolicySampling()
        self._threads: list[_Thread] = []
        self._in_flight = 0  # open requests that already count as a turn
        self._idle_since: float | None = None  # None: the agent has not begun
        self._over: tuple[EpisodeEnd, str] | None = None
        self._cut_by: EpisodeEnd | None = None  # why the last turn has no end
        self._tasks: set[asyncio.Task[Any]] = set()  # open requests
        # how often the endpoint has refused each; set when it has closed
        self.refused_fields: Mapping[str, int] = {}

    @property
    def end(self) -> EpisodeEnd:
        """Why the episode has ended."""
        end = self._over[0] if self._over else "answered"
        if end == "answered":
            return self._cut_by or end
        return end

    @property
    def is_at_limit(self) -> bool:
        """Whether a request has been refused because the episode had reached a limit."""
        return self._over is not None

    def stop(self, end: EpisodeEnd, words: str) -> None:
        """Answer no further request; the first reason counts."""
        self._over = self._over or (end, words)

    def begin(self) -> None:
        """The agent begins, perhaps anew: its time counts from now on."""
        self._idle_since = time.monotonic()

    async def close(self) -> None:
        """The agent has ended: requests in flight are cancelled, and no further one is answered."""
        self._count_idle()
        self.stop("answered", "the episode has ended")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Raises ChatRefused and EpisodeOver. To be run as a task of its own, which `close` may cancel."""
        task = asyncio.current_task()
        assert task
        self._check_over()
        self._count_idle()
        self._tasks.add(task)
        try:
            return await self._answered(request)
        except BadMessages as bad:
            raise ChatRefused(str(bad)) from bad
        except (ChatRefused, EpisodeOver):
            raise
        except Exception as error:
            # messages and schemas are anybody's, and libraries raise anything for them
            if not self._rows.error:
                raise ChatRefused(
                    f"the request cannot be answered ({describe_error(error)})"
                ) from error
            self.stop("agent", "the engine has failed")
            raise EpisodeOver("the engine has failed") from error
        finally:
            self._tasks.discard(task)
            self._idle_since = time.monotonic()

    async def _answered(self, request: ChatRequest) -> ChatAnswer:
        self._policy.check(request, self._rows.sampling)
        tools = await asyncio.to_thread(self._tool_sets.of, request.tools)
        messages = await asyncio.to_thread(checked, request.messages, tools.turn_tokenizer.template)
        self._check_turns()
        self._in_flight += 1
        try:
            return await self._turn(await self._thread(messages, tools), messages, request)
        finally:
            self._in_flight -= 1

    def _count_idle(self) -> None:
        """The time in which no request is in flight is the agent's own."""
        if not self._tasks and self._idle_since is not None:
            self._rows.tally.tool_s += time.monotonic() - self._idle_since

    def _check_turns(self) -> None:
        """Raises EpisodeOver where there may be no further turn."""
        most = self._config.max_turns
        turns = self._rows.tally.turns + self._in_flight + self._rows.num_abandoned
        if self._over is None and turns >= most:
            self.stop(
                "max_turns",
                f"the episode has had {most} turns, as many as episode.max_turns allows",
            )
        self._check_over()

    def _check_over(self) -> None:
        if self._over:
            raise EpisodeOver(self._over[1])

    async def _check_room(self, prompt_tokens: int, response_tokens: int = 0) -> None:
        """Raises EpisodeOver where a conversation of so many tokens has no room for a turn."""
        if not await self._rows.wait_for_room(prompt_tokens, response_tokens):
            tokens = prompt_tokens + response_tokens
            most = self._config.max_tokens
            self.stop(
                "max_tokens",
                f"a conversation of {tokens} tokens has no room: episode.max_tokens is {most}",
            )
            self._check_over()

    async def _thread(self, messages: list[JsonObject], tools: ToolSet) -> _Thread:
        """The conversation that the messages go on with, which then has them, or a new one; it is not free."""
        if self._config.history == "render":
            return await self._rendered(messages, tools)
        known = [thread for thread in self._threads if thread.goes_on_with(messages, tools)]
        for thread in sorted(known, key=lambda thread: len(thread.messages), reverse=True):
            if not thread.goes_on_with(messages, tools):  # another request has taken it
                continue
            new = messages[len(thread.messages) :]
            with thread.taken():
                ids = await asyncio.to_thread(
                    said, new, thread.messages[-1], tools.turn_tokenizer, thread.stop
                )
                if ids is not None:
                    return await self._continued(thread, ids, new)
            thread.is_free = True
        ids = await asyncio.to_thread(rendered, messages, tools.turn_tokenizer)
        return await self._opened(ids, messages, tools)

    async def _rendered(self, messages: list[JsonObject], tools: ToolSet) -> _Thread:
        """The longest conversation that the rendered messages begin with, or a new one."""
        ids = await asyncio.to_thread(rendered, messages, tools.turn_tokenizer)
        known = [
            thread
            for thread in self._threads
            if thread.is_free and thread.conversation.is_start_of(ids)
        ]
        if not known:
            return await self._opened(ids, messages, tools)
        thread = max(known, key=lambda thread: len(thread.conversation.ids))
        with thread.taken():
            new_ids = ids[len(thread.conversation.ids) :]
            await self._continued(thread, new_ids, _last_heard(messages))
        thread.tools = tools
        return thread

    async def _continued(self, thread: _Thread, ids: Sequence[int], new: Messages) -> _Thread:
        """The conversation with further tokens, which are those of new messages.

        It is free again once its turn is delivered; a turn that is not delivered ends the conversation.
        """
        conversation = thread.conversation
        await self._check_room(conversation.prompt_length, conversation.response_length + len(ids))
        if ids:
            conversation.add_message(ids)
        thread.heard = new
        return thread

    async def _opened(self, ids: Sequence[int], messages: Messages, tools: ToolSet) -> _Thread:
        await self._check_room(len(ids))
        thread = _Thread(self._rows.open(ids), tools, heard=_last_heard(messages))
        self._threads.append(thread)
        return thread

    async def _turn(self, thread: _Thread, messages: Messages, request: ChatRequest) -> ChatAnswer:
        conversation = thread.conversation
        prompt_tokens = len(thread.conversation.ids)
        readings: list[_Read] = []

        async def read(turn: SampledTurn) -> None:
            readings.append(await asyncio.to_thread(_read, thread, turn.ids, request.stop))

        heard = [message["content"] for message in thread.heard]
        turn = await self._rows.turn(
            conversation,
            heard=heard,
            read=read,
            requested_tokens=request.max_tokens,
            stop=request.stop,
        )
        message, num_calls, num_bad = readings[0]
        tally = self._rows.tally
        tally.calls = tally.calls + num_calls
        tally.call_errors = tally.call_errors + num_bad
        thread.num_calls += num_calls
        if self._rows.last is turn:
            self._cut_by = turn.cut_by
        if not turn.cut_by:
            last = turn.ids[-1]
            if last in thread.tools.turn_tokenizer.stop_ids:
                thread.stop = last
            else:
                thread.stop = None
            thread.is_free = True
        thread.messages = [*messages, message]
        calls = calls_of(message)
        tokens = len(turn.ids)
        if turn.cut_by:
            finish = "length"
        elif calls:
            finish = "tool_calls"
        else:
            finish = "stop"
        return ChatAnswer(message["content"], calls, finish, prompt_tokens, tokens)


_Read = tuple[JsonObject, int, int]  # a turn as a message, its calls, and those that are broken


def _read(thread: _Thread, ids: Sequence[int], stop: Sequence[str]) -> _Read:
    """A turn's tokens as a message. Where a call cannot be read at all, the whole is a text."""
    text = thread.tools.turn_tokenizer.turn_text(ids, stop)
    read = thread.tools.read(
        text, after_tools=bool(thread.heard) and thread.heard[-1]["role"] == "tool"
    )
    bad = [call for call in read.calls if isinstance(call, BadCall)]
    number = len(read.calls)
    if any(call.arguments is None for call in bad):
        read = Turn(text)
    message = assistant_message(read, text, thread.tools.turn_tokenizer.template, thread.num_calls)
    return (
        {key: value for key, value in message.items() if key != "reasoning_content"},
        number,
        len(bad),
    )


def _last_heard(messages: Messages) -> Messages:
    """The messages after the last of the assistant, but for the system's."""
    last = max(
        (place for place, message in enumerate(messages) if message["role"] == "assistant"),
        default=-1,
    )
    return [message for message in messages[last + 1 :] if message["role"] != "system"]

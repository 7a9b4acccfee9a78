"""What an agent is given to ask the model with. Users import it as `megarl.environments`."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from megarl.environments.agents.chat import Access, EpisodeOver
from megarl.types.json_objects import JsonObject, Message, ToolSchema

AT_ONCE = 64  # runs in a process
MOST_BYTES = 2**24  # of a request as JSON
MOST_OPEN = 256  # requests of a run
_NOTHING = b"null"
_Send = Callable[[str, int, bytes], None]


class Chat:
    """Asks the model, as one episode's agent: `message = await chat(messages)`.

    prompt: the messages of the data row's prompt. seed: what is random in an episode must come from it; all episodes of
    one prompt in a step have the same. url, key, socket: of the endpoint that answers the same episode over HTTP, on
    loopback and on a Unix socket; None where it is off.
    """

    def __init__(
        self, send: _Send, prompt: Sequence[Message], seed: int, access: Access | None
    ) -> None:
        """send: writes a message to the parent: its kind, the number of the request, and JSON."""
        self.seed = seed
        self.url = access.url if access else None
        self.key = access.key if access else None
        self.socket = access.socket if access else None
        self._send = send
        self._prompt = prompt
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[JsonObject]] = {}
        self._over: str | None = None

    @property
    def prompt(self) -> list[JsonObject]:
        """A new copy each time, to which an agent can append."""
        return copy.deepcopy([*map(dict, self._prompt)])

    async def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
    ) -> JsonObject:
        """The assistant's message in OpenAI's form, with `tool_calls` where the model calls.

        messages: the whole conversation in OpenAI's form; tools: schemas of the tools that the model may call, and
        that the agent runs. Several requests may be open at once. Raises ValueError with the reason where a request
        cannot be answered, and EpisodeOver from the time that the episode has reached a limit.
        """
        request = _as_json(messages, tools)
        if len(self._answers) >= MOST_OPEN:
            raise ValueError(f"more than {MOST_OPEN} requests are open at once")
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        try:
            if self._over is not None:
                await asyncio.sleep(0)  # an agent that asks again and again can be cancelled here
                raise EpisodeOver(self._over)
            self._send("chat", number, request)
            return await answer
        finally:
            del self._answers[number]
            if answer.cancelled():
                self._send("drop", number, _NOTHING)

    def settle(self, number: int, outcome: JsonObject | Exception) -> None:
        """Answer an open request with a message, or raise an exception in the agent. Called in any thread."""
        if isinstance(outcome, EpisodeOver):
            self._over = self._over or str(outcome)
        answer = self._answers.get(number)
        if answer is not None:
            with suppress(RuntimeError):  # the agent has closed the loop in which it asked
                answer.get_loop().call_soon_threadsafe(_settle, answer, outcome)

    def end(self, words: str) -> None:
        """Answer no further request."""
        self._over = self._over or words
        for number in list(self._answers):
            self.settle(number, EpisodeOver(self._over))


def _settle(answer: asyncio.Future[JsonObject], outcome: JsonObject | Exception) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _as_json(messages: object, tools: object) -> bytes:
    """The request's messages and tools as a JSON array. Raises ValueError for what cannot be sent."""
    for name, value in (("messages", messages), ("tools", tools or [])):
        if not isinstance(value, list | tuple) or not all(isinstance(item, dict) for item in value):
            raise ValueError(f"{name} is not a list of dicts")
    try:
        request = json.dumps([messages, tools or []], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the request is no JSON ({error})") from None
    if len(request) > MOST_BYTES:
        raise ValueError(f"the request has {len(request)} bytes of JSON; {MOST_BYTES} are the most")
    return request

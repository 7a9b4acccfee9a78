"""What an agent says to the model and gets back, whichever way it asks: by a call or over the endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from megarl.types.json_objects import JsonObject, Message, ToolSchema

Finish = Literal["stop", "length", "tool_calls"]  # as OpenAI's finish_reason


class ChatRefused(Exception):
    """A request that cannot be answered; the text tells the agent why, and the episode goes on.

    param: the field of the request that is refused; None: it is not a single one.
    """

    def __init__(self, words: str, param: str | None = None) -> None:
        super().__init__(words)
        self.param = param


class EpisodeOver(Exception):
    """The episode has reached one of its limits, or has ended: the model answers no further request of it."""


@dataclass(frozen=True)
class ChatRequest:
    """messages: in OpenAI's form, the whole conversation, of which the last is not the assistant's.

    tools: schemas in OpenAI's form, in which the model may call; the agent itself makes the calls. stop: texts, the
    first of which ends the answer and is not in it. max_tokens: of the answer. temperature, top_p: what the agent takes
    the model to be sampled with; it is refused where that is not so. None: as the recipe says.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class AgentCall:
    """A call that the model wrote. arguments: JSON text, which need not fit the tool's schema."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatAnswer:
    """One turn of the model. content: what it wrote; of a turn with calls, the words beside them and its reasoning."""

    content: str
    calls: tuple[AgentCall, ...]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int

    def message(self) -> JsonObject:
        """The assistant's message in OpenAI's form, which the agent appends to its messages."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.content} | (
            {"tool_calls": calls} if calls else {}
        )


@dataclass(frozen=True)
class Access:
    """How an agent reaches the endpoint that answers its episode over HTTP. key: secret, so it is not shown.

    socket: the path of the Unix socket.
    """

    url: str
    key: str = field(repr=False)
    socket: str


class ChatHandler(Protocol):
    """Answers the requests of one episode, in any event loop and several at once.

    Raises ChatRefused and EpisodeOver. A request whose caller was cancelled leaves no turn in the episode.
    """

    async def answer(self, request: ChatRequest) -> ChatAnswer: ...

"""Agents that ask with OpenAI's own client: plain, asynchronous, streaming, with tools, over TCP and Unix sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import httpx
import pytest

from megarl.environments.agents.chat import Access, ChatRefused, EpisodeOver
from megarl.environments.endpoint.chat_endpoint import ChatEndpoint
from tests.environments.endpoint.scripted import Scripted, say

openai = pytest.importorskip("openai")
ChatCompletionStreamState = pytest.importorskip(
    "openai.lib.streaming.chat"
).ChatCompletionStreamState

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
HI: Any = {"role": "user", "content": "Hi"}
LONG = "long \u2028 \U0001f600 " * 3000


@pytest.fixture(params=["tcp", "unix"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes a client of OpenAI for an episode."""
    clients: list[Any] = []

    def make(access: Access, **settings: Any) -> Any:
        transport = httpx.HTTPTransport(
            uds=access.socket if request.param == "unix" else None, verify=False
        )
        http = httpx.Client(transport=transport)
        clients.append(
            openai.OpenAI(base_url=access.url, api_key=access.key, http_client=http, **settings)
        )
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def ask(client: Any, **fields: Any) -> Any:
    """The model's answer, in OpenAI's form."""
    return client.chat.completions.create(**{"model": "m", "messages": [HI], **fields})


def test_a_conversation(endpoint: ChatEndpoint, connect: Callable[..., Any]) -> None:
    """The answer, the calls and the usage; the message that is sent back reaches the handler as it was given."""
    first = say("I add.", ("add", '{"a": 1}'), ("add", "not JSON"))
    handler = Scripted(first, say("cut", length=True))
    client = connect(endpoint.open(handler))
    done = ask(client, model="any", tools=[TOOL], stop="x", max_tokens=1)
    (choice,) = done.choices
    assert (done.model, choice.finish_reason, choice.message.content) == (
        "any",
        "tool_calls",
        "I add.",
    )
    assert [(call.id, call.function.arguments) for call in choice.message.tool_calls] == [
        ("call_0", '{"a": 1}'), ("call_1", "not JSON")
    ]  # fmt: skip
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (
        7,
        6,
        13,
    )
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "3"}
        for call in choice.message.tool_calls
    ]
    done = ask(client, messages=[HI, choice.message, *results], tools=[TOOL])
    assert (done.choices[0].finish_reason, done.choices[0].message.tool_calls) == ("length", None)
    assert [list(asked.tools) for asked in handler.requests] == [[TOOL], [TOOL]]
    assert [(asked.stop, asked.max_tokens) for asked in handler.requests] == [
        (("x",), 1),
        ((), None),
    ]
    assert [list(asked.messages) for asked in handler.requests] == [
        [HI],
        [HI, first.message(), *results],
    ]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream(endpoint: ChatEndpoint, connect: Callable[..., Any], usage: bool) -> None:
    """Its chunks make the same answer; no line is longer than what clients read."""
    answer = say(LONG, ("add", '{"a": 1}'), ("add", f'{{"b": "{LONG}"}}'))
    client = connect(endpoint.open(Scripted(answer)))
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    request = {"tools": [TOOL], "stream": True, **options}
    with ask(client.with_streaming_response, **request) as response:
        lines = list(response.iter_lines())
    assert lines[-2] == "data: [DONE]" and max(map(len, lines)) < 1 << 16
    chunks = list(ask(client, **request))
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    done = state.get_final_completion()
    (choice,) = done.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", LONG)
    assert [
        (call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls
    ] == [astuple(call) for call in answer.calls]
    assert {chunk.id for chunk in chunks} == {done.id}
    assert (done.usage and done.usage.total_tokens) == (7 + len(LONG) if usage else None)


def test_the_list_of_models(endpoint: ChatEndpoint, connect: Callable[..., Any]) -> None:
    assert [model.id for model in connect(endpoint.open(Scripted())).models.list()] == ["policy"]


@pytest.mark.parametrize(
    ("failure", "error", "status", "code"),
    [
        (ChatRefused("the prompt is too long"), "BadRequestError", 400, "refused"),
        (EpisodeOver("max_turns is reached"), "PermissionDeniedError", 403, "episode_over"),
        (ValueError("a secret of the engine"), "InternalServerError", 500, "internal_error"),
    ],
)
def test_a_refusal_is_not_asked_again(
    endpoint: ChatEndpoint,
    connect: Callable[..., Any],
    failure: Exception,
    error: str,
    status: int,
    code: str,
) -> None:
    handler = Scripted(failure)
    client = connect(endpoint.open(handler), max_retries=3)
    with pytest.raises(getattr(openai, error)) as caught:
        ask(client)
    assert (caught.value.status_code, caught.value.code, len(handler.requests)) == (status, code, 1)
    assert (str(failure) in caught.value.message) == (code != "internal_error")


def test_an_unsupported_field_is_named(endpoint: ChatEndpoint, connect: Callable[..., Any]) -> None:
    handler = Scripted()
    client = connect(endpoint.open(handler))
    with pytest.raises(openai.BadRequestError, match="seed is not supported") as caught:
        ask(client, seed=1)
    assert caught.value.param == "seed" and not handler.requests


def test_the_responses_api_is_refused_with_what_to_use(
    endpoint: ChatEndpoint, connect: Callable[..., Any]
) -> None:
    """As openai-agents asks by default; the legacy completions, too."""
    client = connect(endpoint.open(Scripted()))
    with pytest.raises(openai.NotFoundError, match=r'set_default_openai_api\("chat_completions"\)'):
        client.responses.create(model="m", input="Hi")
    with pytest.raises(openai.NotFoundError, match="only chat completions"):
        client.completions.create(model="m", prompt="Hi")


def test_refused_fields_are_counted(endpoint: ChatEndpoint, connect: Callable[..., Any]) -> None:
    """By their names, those of the episode's own refusals among them; a program cannot make up any number of names."""
    words = "temperature 0.5 cannot be had"
    access = endpoint.open(
        Scripted(ChatRefused(words, "temperature"), ChatRefused("too long"), say("fine"))
    )
    client = connect(access)
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(client, temperature=0.5)
    assert (caught.value.param, caught.value.code) == ("temperature", "unsupported")
    image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    ways: list[dict[str, Any]] = [{"messages": [HI, image]}, {}, {"seed": 1}]
    ways += [{"extra_body": {f"made_{number}": 1}} for number in range(40)]
    for way in ways:
        with pytest.raises(openai.BadRequestError):
            ask(client, **way)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="Hi")
    ask(client)
    counted = asyncio.run(endpoint.close(access.key))
    assert sum(counted.values()) == 44 and len(counted) == 33 and counted["others"] == 12
    assert {name: counted[name] for name in ("temperature", "messages", "seed")} == {
        "temperature": 1, "messages": 1, "seed": 1
    }  # fmt: skip
    assert asyncio.run(endpoint.close(access.key)) == {}


class _Losing(httpx.HTTPTransport):
    """Loses the first answer, after it was given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.lost = b""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if not self.lost:
            self.lost = response.read()
            raise httpx.ReadTimeout("lost", request=request)
        return response


def test_a_lost_answer_is_given_again(endpoint: ChatEndpoint) -> None:
    """The client sends its request again by itself, and the model is not asked twice."""
    handler, transport = Scripted(say("once"), say("twice")), _Losing(verify=False)
    access = endpoint.open(handler)
    http = httpx.Client(transport=transport)
    with openai.OpenAI(base_url=access.url, api_key=access.key, http_client=http) as client:
        done = ask(client)
        assert (done.choices[0].message.content, len(handler.requests)) == ("once", 1)
        assert done.id.encode() in transport.lost
        done = ask(client)
        assert (done.choices[0].message.content, len(handler.requests)) == ("twice", 2), "no retry"

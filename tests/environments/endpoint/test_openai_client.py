"""Agents that ask with OpenAI's own client: plain, asynchronous, streaming, with tools, over TCP and Unix sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from megarl.environments.agents.chat import Access, ChatRefused, EpisodeOver
from megarl.environments.endpoint.chat_endpoint import ChatEndpoint
from tests.environments.endpoint.scripted import Scripted, say

openai = pytest.importorskip("openai")

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


def test_a_conversation(endpoint: ChatEndpoint, connect: Callable[..., Any]) -> None:
    """The answer, the calls and the usage; the message that is sent back reaches the handler as it was given."""
    first = say("I add.", ("add", '{"a": 1}'), ("add", "not JSON"))
    handler = Scripted(first, say("cut", length=True))
    client = connect(endpoint.open(handler))
    done = client.chat.completions.create(
        model="any", messages=[HI], tools=[TOOL], stop="x", max_tokens=1
    )
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
    done = client.chat.completions.create(
        model="any", messages=[HI, choice.message, *results], tools=[TOOL]
    )
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
    request = {"model": "m", "messages": [HI], "tools": [TOOL], "stream": True, **options}
    with client.chat.completions.with_streaming_response.create(**request) as response:
        lines = list(response.iter_lines())
    assert lines[-2] == "data: [DONE]" and max(map(len, lines)) < 1 << 16
    chunks = list(client.chat.completions.create(**request))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == LONG
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or []):
        made = calls.setdefault(call.index, [call.id, call.function.name, ""])
        made[2] += call.function.arguments
    assert calls == {
        index: [call.id, call.name, call.arguments] for index, call in enumerate(answer.calls)
    }
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == (
        [7 + len(LONG)] if usage else []
    )


def test_many_at_once(endpoint: ChatEndpoint) -> None:
    """Of several episodes, whose requests reach their own handlers alone."""
    handlers = [Scripted(say(f"episode {index}")) for index in range(3)]

    async def ask() -> list[str]:
        accesses = [endpoint.open(handler) for handler in handlers]
        clients = [
            openai.AsyncOpenAI(base_url=access.url, api_key=access.key) for access in accesses
        ]
        asked = [
            client.chat.completions.create(model="m", messages=[HI])
            for client in clients
            for _ in range(8)
        ]
        found = await asyncio.gather(*asked)
        for client, access in zip(clients, accesses, strict=True):
            await client.close()
            await endpoint.close(access.key)
        return [done.choices[0].message.content for done in found]

    assert asyncio.run(ask()) == [f"episode {index}" for index in range(3) for _ in range(8)]
    assert [len(handler.requests) for handler in handlers] == [8, 8, 8]


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
        client.chat.completions.create(model="m", messages=[HI])
    assert (caught.value.status_code, caught.value.code, len(handler.requests)) == (status, code, 1)
    assert (str(failure) in caught.value.message) == (code != "internal_error")


def test_an_unsupported_field_is_named(endpoint: ChatEndpoint, connect: Callable[..., Any]) -> None:
    handler = Scripted()
    client = connect(endpoint.open(handler))
    with pytest.raises(openai.BadRequestError, match="seed is not supported") as caught:
        client.chat.completions.create(model="m", messages=[HI], seed=1)
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
        client.chat.completions.create(model="m", messages=[HI], temperature=0.5)
    assert (caught.value.param, caught.value.code) == ("temperature", "unsupported")
    image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    ways: list[dict[str, Any]] = [
        {"messages": [HI, image]},
        {"messages": [HI]},
        {"messages": [HI], "seed": 1},
    ]
    for way in [
        *ways,
        *({"messages": [HI], "extra_body": {f"made_{number}": 1}} for number in range(40)),
    ]:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", **way)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="Hi")
    client.chat.completions.create(model="m", messages=[HI])
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
        done = client.chat.completions.create(model="m", messages=[HI])
        assert (done.choices[0].message.content, len(handler.requests)) == ("once", 1)
        assert done.id.encode() in transport.lost
        done = client.chat.completions.create(model="m", messages=[HI])
        assert (done.choices[0].message.content, len(handler.requests)) == ("twice", 2), "no retry"


def test_a_client_that_gives_up_is_cancelled(endpoint: ChatEndpoint) -> None:
    """The same request, sent again after that, is another one for the handler."""
    handler = Scripted(say("never read"), say("read"), holds=True)
    access = endpoint.open(handler)

    async def work() -> str:
        async with openai.AsyncOpenAI(base_url=access.url, api_key=access.key) as client:
            asked = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[HI]))
            assert await asyncio.to_thread(handler.await_event) == "asked"
            asked.cancel()
            assert await asyncio.to_thread(handler.await_event) == "cancelled"
            handler.release()
            again = {"x-stainless-retry-count": "1"}
            done = await client.chat.completions.create(
                model="m", messages=[HI], extra_headers=again
            )
            return done.choices[0].message.content

    assert asyncio.run(work()) == "read"

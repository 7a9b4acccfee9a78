"""A handler whose answers are given, and which can be held before it answers; requests as tests send them."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import httpx

from megarl.environments.agents.chat import Access, AgentCall, ChatAnswer, ChatRequest

WAIT_S = 30.0  # for what must happen


class Scripted:
    """Answers requests with the given answers or errors in their order, then repeats the last.

    requests: what was asked; events: "asked", then "answered" or "cancelled", for each request.
    """

    def __init__(self, *answers: ChatAnswer | Exception, holds: bool = False) -> None:
        self._answers = list(answers) or [say("Hello.")]
        self._gate: Future[None] = Future()
        self.requests: list[ChatRequest] = []
        self._events: queue.Queue[str] = queue.Queue()
        if not holds:
            self.release()

    def release(self) -> None:
        """Let all requests be answered."""
        self._gate.set_result(None)

    def await_event(self) -> str:
        """The next event; raises queue.Empty when there is none."""
        return self._events.get(timeout=WAIT_S)

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        self.requests.append(request)
        answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
        self._events.put("asked")
        try:
            await asyncio.shield(asyncio.wrap_future(self._gate))
        except asyncio.CancelledError:
            self._events.put("cancelled")
            raise
        self._events.put("answered")
        if isinstance(answer, Exception):
            raise answer
        return answer


def say(text: str, *calls: tuple[str, str], length: bool = False) -> ChatAnswer:
    """An answer with its text and calls (name, arguments)."""
    agent_calls = tuple(AgentCall(f"call_{index}", *call) for index, call in enumerate(calls))
    finish = "length" if length else "tool_calls" if calls else "stop"
    return ChatAnswer(text, agent_calls, finish, prompt_tokens=7, completion_tokens=len(text))


BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CONTENT = json.dumps(BODY).encode()


def post(
    access: Access, key: str | None = None, content: bytes = CONTENT, **headers: Any
) -> httpx.Response:
    """headers: by name with _ for -."""
    fields: dict[str, Any] = {"Authorization": f"Bearer {access.key if key is None else key}"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(
        f"{access.url}/chat/completions",
        headers=fields,
        content=content,
        timeout=WAIT_S,
        verify=False,
    )


async def apost(
    client: httpx.AsyncClient, access: Access, retries: int = 0, **fields: Any
) -> httpx.Response:
    """The request as OpenAI's client sends it for this time after the first."""
    headers = {"Authorization": f"Bearer {access.key}", "x-stainless-retry-count": str(retries)}
    return await client.post(f"{access.url}/chat/completions", json=BODY | fields, headers=headers)


def connect(access: Access, path: str | None = None) -> socket.socket:
    """Over TCP, or over the Unix socket of this path."""
    if path is not None:
        connection = socket.socket(socket.AF_UNIX)
        # without a time limit it waits until the endpoint takes connections
        connection.connect(path)
        connection.settimeout(WAIT_S)
        return connection
    parts = urlsplit(access.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=WAIT_S)


def head(access: Access, length: int | None, *more: str) -> bytes:
    """The head of a request for a completion. length: of its body, or None for a body in chunks."""
    body = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {access.key}",
        body,
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    """What is sent until the other side closes."""
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received

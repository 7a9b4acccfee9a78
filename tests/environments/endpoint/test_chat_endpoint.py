"""Who is served: keys and their end, requests that are cut off or sent again, and where the endpoint listens."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from megarl.environments.agents.chat import Access, ChatAnswer, ChatRequest
from megarl.environments.endpoint import registry
from megarl.environments.endpoint.chat_endpoint import ChatEndpoint
from tests.environments.endpoint.scripted import (
    CONTENT,
    WAIT_S,
    Scripted,
    apost,
    connect,
    head,
    post,
    say,
)


def test_it_listens_on_loopback_and_in_a_private_folder_alone() -> None:
    """And after the end nowhere."""
    before = {(at.laddr, at.status) for at in psutil.Process().net_connections("inet")}
    endpoint = ChatEndpoint()
    try:
        access = endpoint.open(Scripted())
        opened = [
            at
            for at in psutil.Process().net_connections("inet")
            if (at.laddr, at.status) not in before
        ]
        assert [(at.laddr.ip, at.laddr.port, at.status) for at in opened] == [
            ("127.0.0.1", urlsplit(access.url).port, "LISTEN")
        ]
        folder = os.path.dirname(access.socket)
        assert (
            stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            and os.stat(folder).st_uid == os.geteuid()
        )
        assert len(access.socket) < 108 and access.socket.startswith(tempfile.gettempdir())
    finally:
        endpoint.shutdown()
    endpoint.shutdown()
    assert not os.path.exists(folder)
    with pytest.raises(ConnectionError):
        connect(access)


def test_wrong_late_and_missing_keys_are_refused_alike(endpoint: ChatEndpoint) -> None:
    """Also where there is no such path, and before any body is read."""
    handler, other = Scripted(), Scripted()
    late, access = endpoint.open(other), endpoint.open(handler)
    asyncio.run(endpoint.close(late.key))
    asyncio.run(endpoint.close(late.key))
    refusals = [post(access, key) for key in ("wrong", late.key, access.key[:-1], f"{access.key}x")]
    for raw in (b"Bearer", b"Bearer \xff", access.key.encode(), f"Basic {access.key}".encode()):
        refusals.append(post(access, Authorization=raw))
    refusals.append(httpx.post(f"{access.url}/chat/completions", content=CONTENT, verify=False))
    refusals += [httpx.get(f"{access.url}/{path}", verify=False) for path in ("models", "nothing")]
    assert {(refusal.status_code, refusal.content) for refusal in refusals} == {
        (403, refusals[0].content)
    }
    assert refusals[0].json()["error"]["code"] == "no_episode" and not (
        handler.requests or other.requests
    )
    with connect(access) as connection:
        connection.sendall(head(late, registry.MOST_BODY_BYTES))
        assert b" 403 " in connection.recv(1 << 16)


def test_a_key_is_in_no_log_and_no_answer(
    endpoint: ChatEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    access = endpoint.open(Scripted(say("fine"), ValueError("broken")))
    answers = [
        post(access).text,
        post(access).text,
        post(access, content=b"{").text,
        post(access, f"x{access.key}").text,
    ]
    for line in (f"Bad\x00: {access.key}", f"Authorization: \x01{access.key}", access.key * 300):
        with connect(access) as connection:
            connection.sendall(head(access, 2, line) + b"{}")
            answers.append(connection.recv(1 << 16).decode())
    assert [text.split()[1] for text in answers[4:]] == ["400"] * 3
    assert access.key not in "".join(answers) + caplog.text + repr(access)
    assert "ValueError: broken" in caplog.text, "the handler's own fault is logged"


def test_other_paths_and_methods_are_not_there(endpoint: ChatEndpoint) -> None:
    access = endpoint.open(Scripted())
    headers = {"Authorization": f"Bearer {access.key}"}
    asked = [
        ("GET", "chat/completions"),
        ("POST", "models"),
        ("POST", "completions"),
        ("PUT", "chat/completions"),
    ]
    asked += [
        ("OPTIONS", "models"),
        ("GET", "../metrics"),
        ("DELETE", "models/policy"),
        ("POST", "chat/completions/"),
    ]
    for method, path in asked:
        answer = httpx.request(method, f"{access.url}/{path}", headers=headers, verify=False)
        assert answer.status_code == 404, (method, path)


def test_a_disconnect_cancels_the_request(endpoint: ChatEndpoint) -> None:
    handler = Scripted(holds=True)
    access = endpoint.open(handler)
    for address, family in (
        (access.socket, socket.AF_UNIX),
        (urlsplit(access.url), socket.AF_INET),
    ):
        with socket.socket(family) as connection:
            connection.connect(
                address if isinstance(address, str) else (address.hostname, address.port)
            )
            connection.sendall(head(access, len(CONTENT)) + CONTENT)
            assert handler.await_event() == "asked"
        assert handler.await_event() == "cancelled"


class _Placed(Scripted):
    """Notes the loops in which it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[asyncio.AbstractEventLoop] = []

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        self.loops.append(asyncio.get_running_loop())
        return await super().answer(request)


def test_a_handler_is_called_in_the_loop_that_opened_its_episode(endpoint: ChatEndpoint) -> None:
    """Or in the endpoint's own, which does not change, where no loop did."""
    handler, outside = _Placed(), _Placed()

    async def work() -> asyncio.AbstractEventLoop:
        access = endpoint.open(handler)
        assert (await asyncio.to_thread(post, access)).status_code == 200
        return asyncio.get_running_loop()

    assert handler.loops == [asyncio.run(work())]
    access = endpoint.open(outside)
    assert post(access).status_code == post(access).status_code == 200
    assert len({*outside.loops}) == 1 and outside.loops[0] is not handler.loops[0]


def test_the_end_of_an_episode_cancels_its_requests(endpoint: ChatEndpoint) -> None:
    """And no other's; once it is closed the handler has let go of them, and the agent is answered 403."""
    handler, other = Scripted(holds=True), Scripted(holds=True)

    async def ask() -> list[httpx.Response]:
        accesses = [endpoint.open(handler), endpoint.open(other)]
        async with httpx.AsyncClient(timeout=WAIT_S, verify=False) as client:
            asked = [asyncio.ensure_future(apost(client, access)) for access in accesses]
            for script in (handler, other):
                assert await asyncio.to_thread(script.await_event) == "asked"
            await endpoint.close(accesses[0].key)
            assert handler.await_event() == "cancelled"
            other.release()
            return [await request for request in [*asked, apost(client, accesses[0])]]

    ended, answered, late = asyncio.run(ask())
    assert [response.status_code for response in (ended, answered, late)] == [403, 200, 403]
    assert [response.json()["error"]["code"] for response in (ended, late)] == [
        "episode_over",
        "no_episode",
    ]


def contents(found: list[httpx.Response]) -> list[str]:
    return [response.json()["choices"][0]["message"]["content"] for response in found]


@pytest.fixture
def in_episode(endpoint: ChatEndpoint) -> Callable[..., Any]:
    """Runs a coroutine function with a client and an episode of a handler."""

    def play(handler: Scripted, work: Any) -> Any:
        async def run() -> Any:
            access = endpoint.open(handler)
            async with httpx.AsyncClient(timeout=WAIT_S, verify=False) as client:
                try:
                    return await work(client, access)
                finally:
                    await endpoint.close(access.key)

        return asyncio.run(run())

    return play


def test_a_retry_in_flight_gets_the_same_answer(in_episode: Any) -> None:
    handler = Scripted(say("first"), say("second"), holds=True)

    async def work(client: httpx.AsyncClient, access: Access) -> list[httpx.Response]:
        first = asyncio.ensure_future(apost(client, access))
        assert await asyncio.to_thread(handler.await_event) == "asked"
        others = [asyncio.ensure_future(apost(client, access, retries)) for retries in (1, 2)]
        handler.release()
        return [await request for request in [first, *others]]

    responses = in_episode(handler, work)
    assert (contents(responses), len(handler.requests)) == (["first"] * 3, 1)


def test_only_a_retry_of_the_same_body_and_key_is_given_it(
    in_episode: Any, endpoint: ChatEndpoint
) -> None:
    handler = Scripted(*(say(str(number)) for number in range(9)))
    foreign = Scripted(say("foreign"))

    async def work(client: httpx.AsyncClient, access: Access) -> list[httpx.Response]:
        other = endpoint.open(foreign)
        return [
            await apost(client, access, 1), await apost(client, access, 1), await apost(client, access),
            await apost(client, access, 3), await apost(client, access, 1, user="x"), await apost(client, other, 1),
        ]  # fmt: skip

    responses = in_episode(handler, work)
    assert contents(responses) == ["0", "0", "1", "1", "2", "foreign"]
    assert responses[0].json() == responses[1].json()


def test_a_refused_request_is_asked_again(in_episode: Any) -> None:
    """Its retry is not answered from the record, which has answers alone."""
    handler = Scripted(ValueError("broken"), say("mended"))

    async def work(client: httpx.AsyncClient, access: Access) -> list[httpx.Response]:
        return [await apost(client, access), await apost(client, access, 1)]

    failed, mended = in_episode(handler, work)
    assert failed.status_code == 500 and contents([mended]) == ["mended"]


def test_the_end_answers_what_is_in_flight() -> None:
    handler, endpoint = Scripted(holds=True), ChatEndpoint()

    async def ask() -> httpx.Response:
        access = endpoint.open(handler)
        async with httpx.AsyncClient(timeout=WAIT_S, verify=False) as client:
            asked = asyncio.ensure_future(apost(client, access))
            assert await asyncio.to_thread(handler.await_event) == "asked"
            await asyncio.to_thread(endpoint.shutdown)
            return await asked

    assert asyncio.run(ask()).status_code == 403
    assert handler.await_event() == "cancelled"


def test_a_folder_of_an_ended_process_is_removed() -> None:
    left = Path(tempfile.mkdtemp(prefix="megarl-chat-"))
    (left / "megarl.lock").touch()
    ChatEndpoint().shutdown()
    assert not left.exists()

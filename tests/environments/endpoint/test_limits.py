"""What is too large, too slow, too much or no HTTP is refused, and others are served."""

from __future__ import annotations

import gzip
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import httpx
import pytest

from megarl.environments.agents.chat import Access
from megarl.environments.endpoint import (
    connection_limits,
    http_server,
    registry,
    replies,
    request_fields,
)
from megarl.environments.endpoint.chat_endpoint import ChatEndpoint
from tests.environments.endpoint.scripted import (
    CONTENT,
    WAIT_S,
    Scripted,
    connect,
    head,
    post,
    read_all,
    say,
)


def test_a_large_body_is_refused(endpoint: ChatEndpoint) -> None:
    """Whether its head says so or not; one of just the largest size is read."""
    handler = Scripted()
    access = endpoint.open(handler)
    pad = registry.MOST_BODY_BYTES - len(CONTENT)
    assert post(access, content=CONTENT + b" " * pad).status_code == 200
    with connect(access) as connection:
        connection.sendall(head(access, registry.MOST_BODY_BYTES + 1))
        assert b" 413 " in connection.recv(1 << 16)
    with connect(access) as connection:
        connection.sendall(head(access, None))
        chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        for _ in range((registry.MOST_BODY_BYTES >> 20) + 1):
            connection.sendall(chunk)
        assert b" 413 " in connection.recv(1 << 16)
    assert len(handler.requests) == 1


def test_requests_count_from_their_heads_on(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose bodies have not come yet are in flight, too; when they have ended, others are admitted.

    One more is answered 429, which clients try again.
    """
    monkeypatch.setattr(registry, "MOST_IN_FLIGHT", 2)
    access, until = endpoint.open(Scripted()), time.monotonic() + WAIT_S
    with connect(access) as first, connect(access) as second:
        for connection in (first, second):
            connection.sendall(head(access, len(CONTENT)))
        while (answer := post(access)).status_code != 429:  # the heads have not been read yet
            assert answer.status_code == 200 and time.monotonic() < until
        assert "x-should-retry" not in answer.headers
        for connection in (first, second):
            connection.sendall(CONTENT)
            assert b" 200 " in connection.recv(1 << 16)
    assert post(access).status_code == 200


def test_a_body_is_read_off_the_event_loop(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are served meanwhile."""
    begun, may_end, read_body = threading.Event(), threading.Event(), replies.read_body

    def slow(body: bytes) -> request_fields.Completion:
        begun.set()
        assert may_end.wait(WAIT_S)
        return read_body(body)

    monkeypatch.setattr(replies, "read_body", slow)
    access = endpoint.open(Scripted())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, access)
        assert begun.wait(WAIT_S)
        headers = {"Authorization": f"Bearer {access.key}"}
        assert (
            httpx.get(
                f"{access.url}/models", headers=headers, timeout=WAIT_S, verify=False
            ).status_code
            == 200
        )
        may_end.set()
        assert asked.result().status_code == 200


def test_a_body_of_too_many_parts_is_not_parsed(endpoint: ChatEndpoint) -> None:
    """Python's JSON would let no other thread run for many seconds."""
    access = endpoint.open(Scripted())
    for part in (b"[],", b"0,", b'{"a":', b'"",'):
        answer = post(
            access, content=b'{"metadata":[' + part * ((registry.MOST_BODY_BYTES - 20) // len(part))
        )
        assert (
            answer.status_code == 400
            and "commas and opening brackets" in answer.json()["error"]["message"]
        )


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET", b"POST " + b"/" * 10_000, b"GET / HTTP/1.1\r\n: "],
    ids=["TLS", "no HTTP", "a long path", "no name"],
)  # fmt: skip
def test_garbage_is_answered_400(endpoint: ChatEndpoint, garbage: bytes) -> None:
    access = endpoint.open(Scripted())
    with connect(access) as connection:
        connection.sendall(garbage + b"\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_http"
    assert post(access).status_code == 200, "others are served"


def test_a_compressed_body_is_not_unpacked(endpoint: ChatEndpoint) -> None:
    access = endpoint.open(Scripted())
    assert post(access, content=gzip.compress(CONTENT), Content_Encoding="gzip").status_code == 400


def test_a_broken_body_is_refused(endpoint: ChatEndpoint) -> None:
    access = endpoint.open(Scripted())
    with connect(access) as connection:
        chunked = head(access, None)
        connection.sendall(chunked + b"zz\r\n")
        assert b" 400 " in connection.recv(1 << 16)


def test_an_unread_answer_ends_its_connection(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "READING_S", 0.2)
    access = endpoint.open(Scripted(say("x" * (32 << 20))))
    with connect(access) as connection:
        connection.sendall(head(access, len(CONTENT)) + CONTENT)
        poll = select.poll()
        poll.register(connection, 0)  # errors and hang-ups alone
        assert poll.poll(WAIT_S * 1000), "the connection was not reset"


def test_slow_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle, or before the end of a request's head; and, answered 408, before the end of its body."""
    monkeypatch.setattr(http_server, "IDLE_S", 1.0)
    endpoint = ChatEndpoint()
    try:
        access = endpoint.open(Scripted())
        with connect(access) as idle, connect(access) as slow:
            slow.sendall(b"POST / HT")
            assert (read_all(idle), read_all(slow)) == (b"", b"")
    finally:
        endpoint.shutdown()
    monkeypatch.undo()
    monkeypatch.setattr(replies, "BODY_S", 0.1)
    monkeypatch.setattr(http_server, "_LINGERING_S", 0.1)
    endpoint = ChatEndpoint()
    try:
        access = endpoint.open(Scripted())
        with connect(access) as slow:
            slow.sendall(head(access, 100) + b"{")
            assert b" 408 " in read_all(slow)
    finally:
        endpoint.shutdown()


@pytest.fixture
def many_files() -> Iterator[int]:
    """How many sockets a test may open, of 2,500: each is a file of the client, and one of the endpoint."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, 8192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit if hard < 0 else min(limit, hard), hard))
    yield min(2500, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("says", "most"), [("nothing", 2500), ("a wrong key", 700)])
def test_connections_without_a_key_crowd_out_none_with_one(
    many_files: int, says: str, most: int
) -> None:
    """Over TCP and the Unix socket; connections that have shown a key stay open all the time."""
    endpoint = ChatEndpoint()
    try:
        access, request = endpoint.open(Scripted()), b""
        if says == "a wrong key":
            request = head(replace(access, key="x" * 43), 0)
        for path in (None, access.socket):
            with ExitStack() as held:
                served = held.enter_context(connect(access, path))
                ask(served, access)
                for _ in range(min(many_files, most)):
                    stranger = held.enter_context(connect(access, path))
                    stranger.sendall(request)
                for again in (None, access.socket):
                    with connect(access, again) as new:
                        ask(new, access)
                ask(served, access)
    finally:
        endpoint.shutdown()


def test_the_oldest_connection_without_a_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the other listener stay."""
    monkeypatch.setattr(connection_limits, "MOST_UNAUTHENTICATED", 1)
    monkeypatch.setattr(connection_limits, "MOST_AUTHENTICATED", 1)
    endpoint = ChatEndpoint()
    try:
        access = endpoint.open(Scripted())
        with connect(access) as first, connect(access), connect(access, access.socket) as other:
            third = connect(access)
            with third, suppress(ConnectionResetError):
                assert first.recv(1) == b""
            with connect(access) as fourth:
                for served in (fourth, other):
                    ask(served, access)
    finally:
        endpoint.shutdown()


def test_many_agents_may_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have places, while the event loop is busy: none is taken for one that has no key."""
    monkeypatch.setattr(connection_limits, "MOST_UNAUTHENTICATED", 64)
    monkeypatch.setattr(connection_limits, "MOST_AUTHENTICATED", 192)
    endpoint = ChatEndpoint()
    try:
        accesses = [endpoint.open(Scripted()) for _ in range(180)]
        with ExitStack() as held:
            with endpoint_blocked(endpoint):
                agents = [held.enter_context(connect(access)) for access in accesses]
                for agent, access in zip(agents, accesses, strict=True):
                    agent.sendall(head(access, len(CONTENT)) + CONTENT)
            for agent in agents:
                assert b" 200 " in agent.recv(1 << 16)
    finally:
        endpoint.shutdown()


@pytest.mark.parametrize("says", ["nothing", "a wrong key"])
def test_a_request_that_has_come_is_answered_whoever_else_connects(
    monkeypatch: pytest.MonkeyPatch, many_files: int, says: str
) -> None:
    """Also where most of the places are those of busy agents."""
    monkeypatch.setattr(connection_limits, "MOST_UNAUTHENTICATED", 32)
    monkeypatch.setattr(connection_limits, "MOST_AUTHENTICATED", 32)
    endpoint = ChatEndpoint()
    try:
        access, handler = endpoint.open(Scripted()), Scripted(holds=True)
        busy = endpoint.open(handler)
        request = b"" if says == "nothing" else head(replace(access, key="x" * 43), 0)
        with ExitStack() as held:
            for _ in range(24):
                held.enter_context(connect(busy)).sendall(head(busy, len(CONTENT)) + CONTENT)
                handler.await_event()
            with endpoint_blocked(endpoint):
                served = held.enter_context(connect(access))
                served.sendall(head(access, len(CONTENT)) + CONTENT)
                for _ in range(min(many_files, 400)):
                    held.enter_context(connect(access)).sendall(request)
            assert b" 200 " in served.recv(1 << 16)
            handler.release()
    finally:
        endpoint.shutdown()


def test_the_endpoint_raises_its_limit_of_files(many_files: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    ChatEndpoint().shutdown()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (
        10_240 if hard < 0 else min(10_240, hard)
    )


def test_the_longest_idle_connection_makes_room_for_another_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One episode cannot hold all places of those with a key; without any place the client is told to try again."""
    monkeypatch.setattr(connection_limits, "MOST_AUTHENTICATED", 2)
    endpoint = ChatEndpoint()
    try:
        greedy, handler = endpoint.open(Scripted()), Scripted(holds=True)
        access = endpoint.open(handler)
        with (
            connect(greedy) as first,
            connect(greedy) as second,
            connect(access) as third,
            connect(access) as fourth,
        ):
            for served in (first, second):
                ask(served, greedy)
            for served in (third, fourth):
                served.sendall(head(access, len(CONTENT)) + CONTENT)
                handler.await_event()
            for closed in (first, second):
                with suppress(ConnectionResetError):
                    assert closed.recv(1) == b""
            assert post(greedy).status_code == 429
            handler.release()
            for served in (third, fourth):
                assert b" 200 " in served.recv(1 << 16)
            assert post(greedy).status_code == 200
    finally:
        endpoint.shutdown()


@contextmanager
def endpoint_blocked(endpoint: ChatEndpoint) -> Iterator[None]:
    """Let its event loop do nothing inside the block: what comes meanwhile comes at once."""
    begun, may_end = threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        assert may_end.wait(WAIT_S)

    blocked = endpoint._thread.submit(block())
    assert begun.wait(WAIT_S)
    try:
        yield
    finally:
        may_end.set()
    blocked.result()


def ask(connection: socket.socket, access: Access) -> None:
    """A request that is answered, with the end of its answer."""
    connection.sendall(head(access, len(CONTENT)) + CONTENT)
    answer = b""
    while b"total_tokens" not in answer:
        piece = connection.recv(1 << 16)
        assert piece, "the connection was closed"
        answer += piece
    assert b" 200 " in answer

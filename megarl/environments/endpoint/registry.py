"""The episodes that are open at an endpoint: their keys, their requests in flight, and the answers they were given."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from megarl.environments.agents.chat import ChatAnswer, ChatHandler, ChatRequest, EpisodeOver

KEY_BYTES = 32
MOST_IN_FLIGHT = 64  # requests of one episode
MOST_BODY_BYTES = 16 << 20  # of a body, and of all bodies of an episode that are being read
MOST_NAMES = 32  # of refused fields that are counted apart
_ENDED = "the episode has ended"


class TooManyRequests(Exception):
    """The episode has as many requests in flight as it may have; a later one may be answered."""


@dataclass(eq=False)
class Exchange:
    """A request and its answer. waiting: how many connections wait for it, a retry's among them."""

    task: asyncio.Future[ChatAnswer]
    waiting: int = 0
    number: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))


class OpenEpisode:
    """The requests of one key. All but the constructor is called in the endpoint's loop.

    loop: in which the handler is called; None: in the endpoint's, too.
    """

    def __init__(self, handler: ChatHandler, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._handler = handler
        self._loop = loop
        # by the body's hash: the latest exchange, in flight or answered
        self._record: dict[bytes, Exchange] = {}
        self._in_flight: set[Exchange] = set()
        self._admitted = 0
        self._body_bytes = 0
        self._body_was_read = asyncio.Event()  # another one for each body
        self._has_ended = False
        self.refused: Counter[str] = Counter()  # how often each field was refused

    def count_refused(self, name: str) -> None:
        """Count a refused field or path. A program that makes up names fills no memory."""
        if name not in self.refused and len(self.refused) >= MOST_NAMES:
            name = "others"
        self.refused[name] += 1

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request from its head to its answer. Raises EpisodeOver and TooManyRequests."""
        self._check_open()
        if max(self._admitted, len(self._in_flight)) >= MOST_IN_FLIGHT:
            raise TooManyRequests
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    @asynccontextmanager
    async def room_for_body(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until the bodies that are being read leave room for one of so many bytes. Raises EpisodeOver."""
        while self._body_bytes + num_bytes > MOST_BODY_BYTES:
            await self._body_was_read.wait()
            self._check_open()
        self._body_bytes += num_bytes
        try:
            yield
        finally:
            self._body_bytes -= num_bytes
            self._wake()

    async def ask(
        self, digest: bytes, request: ChatRequest, *, is_retry: bool
    ) -> tuple[Exchange, ChatAnswer]:
        """The handler's answer; a retry is given the one that its body has, or waits for it. digest: of the body.

        Once nobody waits for an answer any more, its request is cancelled. Raises what the handler raises, and
        EpisodeOver.
        """
        self._check_open()
        exchange = self._record.get(digest) if is_retry else None
        exchange = exchange or self._begin(digest, request)
        exchange.waiting += 1
        try:
            await asyncio.wait({exchange.task})
        finally:
            exchange.waiting -= 1
            if not exchange.waiting and not exchange.task.done():
                self._forget(digest, exchange)
                exchange.task.cancel()
        if exchange.task.cancelled():
            raise EpisodeOver(_ENDED)
        return exchange, exchange.task.result()

    async def end(self) -> None:
        """Cancel the requests in flight; in the handler's loop they are cancelled before whatever follows this."""
        self._has_ended = True
        self._wake()
        tasks = [exchange.task for exchange in self._in_flight]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _check_open(self) -> None:
        if self._has_ended:
            raise EpisodeOver(_ENDED)

    def _wake(self) -> None:
        """Let bodies that wait for room look for it."""
        self._body_was_read.set()
        self._body_was_read = asyncio.Event()

    def _begin(self, digest: bytes, request: ChatRequest) -> Exchange:
        exchange = Exchange(self._answer(request))
        self._record[digest] = exchange
        self._in_flight.add(exchange)

        def done(task: asyncio.Future[ChatAnswer]) -> None:
            self._in_flight.discard(exchange)
            if task.cancelled() or task.exception():  # asked for, so that asyncio does not log it
                self._forget(digest, exchange)

        exchange.task.add_done_callback(done)
        return exchange

    def _answer(self, request: ChatRequest) -> asyncio.Future[ChatAnswer]:
        """As a task of its own, whose cancellation reaches the loop that it is in."""
        if self._loop is None:
            return asyncio.ensure_future(self._handler.answer(request))
        return asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._handler.answer(request), self._loop)
        )

    def _forget(self, digest: bytes, exchange: Exchange) -> None:
        if self._record.get(digest) is exchange:
            del self._record[digest]


class OpenEpisodes:
    """The open episodes by the SHA-256 of their keys; the keys themselves are not kept. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, OpenEpisode] = {}

    def add(self, episode: OpenEpisode) -> str:
        """A new key, of 256 random bits."""
        key = secrets.token_urlsafe(KEY_BYTES)
        with self._lock:
            self._by_digest[_digest(key)] = episode
        return key

    def find(self, key: str) -> OpenEpisode | None:
        """The time that it takes tells nothing of the keys: all are compared, each in constant time."""
        key_digest = _digest(key)
        open_episode = None
        with self._lock:
            for digest, episode in self._by_digest.items():
                if hmac.compare_digest(digest, key_digest):
                    open_episode = episode
        return open_episode

    def remove(self, key: str) -> OpenEpisode | None:
        with self._lock:
            return self._by_digest.pop(_digest(key), None)

    def clear(self) -> list[OpenEpisode]:
        """Remove all."""
        with self._lock:
            episodes = list(self._by_digest.values())
            self._by_digest.clear()
        return episodes


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

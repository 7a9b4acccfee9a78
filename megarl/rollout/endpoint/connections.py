"""The limits of HTTP connections, and silence about what clients send."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable

from aiohttp import web  # a requirement of SGLang, without which there is no engine to ask

from megarl.rollout.endpoint import answers

MOST_CONNECTIONS = 2048
IDLE_S = 60.0  # until a connection is closed that has not sent the whole head of a request
_LINGERING_S = 2.0  # to send what is left of a body that was refused

_silent = logging.Logger("megarl.endpoint.http")  # aiohttp's messages quote heads of requests, and they have the keys
_silent.disabled = True


def make_server(answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> web.Server:
    """A server whose requests are cancelled with their connections, and which logs nothing. In a running loop."""
    return _Server(
        answer, handler_cancellation=True, access_log=None, logger=_silent, auto_decompress=False,
        keepalive_timeout=IDLE_S, lingering_time=_LINGERING_S,
    )  # fmt: skip


def _most_connections() -> int:
    """Half of the files that this process may have open are left to the engine."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _Connection(web.RequestHandler):
    """aiohttp's connection, but what is not HTTP is answered without a quotation, and one too many is closed."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._manager and len(self._manager.connections) >= _most_connections():
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
            return
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent")
        body = answers.error("The request is not HTTP that the endpoint reads.", "not_http")
        response = web.json_response(body, status=status)
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> _Connection:
        return _Connection(self, loop=self._loop, **self._kwargs)

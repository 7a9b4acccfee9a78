"""The limits of HTTP connections, and silence about what clients send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web  # a requirement of SGLang, without which there is no engine to ask

from megarl.environments.endpoint import answers
from megarl.environments.endpoint.connection_limits import ConnectionLimits

IDLE_S = 60.0  # until a connection is closed that has not sent the whole head of a request
_LINGERING_S = 2.0  # to send what is left of a body that was refused

# aiohttp's messages quote heads of requests, and they have the keys
_silent = logging.Logger("megarl.endpoint.http")
_silent.disabled = True


def make_server(answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> web.Server:
    """The server of one listener, with limits of its own. In a running loop.

    Its requests are cancelled with their connections, and it logs nothing.
    """
    return _Server(
        answer,
        handler_cancellation=True,
        access_log=None,
        logger=_silent,
        auto_decompress=False,
        keepalive_timeout=IDLE_S,
        lingering_time=_LINGERING_S,
    )


@contextmanager
def authenticated(request: web.BaseRequest) -> Iterator[bool]:
    """While a request with the key of an open episode is answered; False: its listener has no place for it."""
    connection = request.protocol
    limits = _limits(request)
    has_place, closed = limits.authenticate(connection)
    _close(closed)
    try:
        yield has_place
    finally:
        limits.mark_idle(connection)


def unauthenticated(request: web.BaseRequest) -> None:
    """A request has come without the key of an open episode."""
    _limits(request).revoke(request.protocol)


def _limits(request: web.BaseRequest) -> ConnectionLimits[Any]:
    """Those of the request's listener; others where the connection has been closed meanwhile."""
    server = request.protocol._manager
    if isinstance(server, _Server):
        return server.limits
    return ConnectionLimits()


def _close(connection: web.RequestHandler | None) -> None:
    """Close a connection, if one is given, at once and whatever its client has still to read."""
    if connection is not None and isinstance(connection.transport, asyncio.Transport):
        connection.transport.abort()


class _Connection(web.RequestHandler):
    """aiohttp's connection, with a place at its listener; what is not HTTP is answered without a quotation."""

    __slots__ = ("_limits",)

    def __init__(self, server: _Server, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._limits = server.limits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _close(self._limits.add(self))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limits.remove(self)
        super().connection_lost(exc)

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
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.limits: ConnectionLimits[web.RequestHandler] = ConnectionLimits()

    def __call__(self) -> _Connection:
        return _Connection(self, loop=self._loop, **self._kwargs)

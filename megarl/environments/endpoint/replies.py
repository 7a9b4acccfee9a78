"""What a request is answered, and how it is sent: `POST /v1/chat/completions` and `GET /v1/models`, and errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from aiohttp import web  # a requirement of SGLang, without which there is no engine to ask

from megarl.environments.agents.chat import ChatRefused, EpisodeOver
from megarl.environments.endpoint import answers
from megarl.environments.endpoint.registry import MOST_BODY_BYTES, OpenEpisode, TooManyRequests
from megarl.environments.endpoint.request_fields import BadField, Completion, read_body

BODY_S = 30.0  # to send a request's body
READING_S = 60.0  # to read an answer
# OpenAI's clients count with it how often they have sent a request again
_RETRY_COUNT = "x-stainless-retry-count"
_PART = re.compile(r"[.\[]")  # what begins the part of a field, as in messages[1].content
_INSTEAD = {  # other ways of OpenAI's API to ask a model, and what does the same here
    "/v1/responses": "There is no Responses API, only chat completions: client.chat.completions.create of openai, "
    'set_default_openai_api("chat_completions") or OpenAIChatCompletionsModel of openai-agents.',
    "/v1/completions": "There are no completions of texts, only chat completions: client.chat.completions.create.",
}
# struct linger: what has not been read is dropped, and not kept by the kernel
_RESET = struct.pack("ii", 1, 0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """An answer before it is sent. parts: of its body; a list where the length of the whole is sent first."""

    status: int
    parts: Iterable[bytes]
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


async def reply_to(request: web.BaseRequest, episode: OpenEpisode) -> Reply:
    """The answer to a request of an open episode, also where it is refused."""
    try:
        if (request.method, request.path) == ("GET", "/v1/models"):
            return _json_reply(200, answers.models(int(time.time())))
        if request.path in _INSTEAD:
            episode.count_refused(request.path)
            return refusal(404, _INSTEAD[request.path], "not_found")
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            message = "There are POST /v1/chat/completions and GET /v1/models alone."
            return refusal(404, message, "not_found")
        return await _complete(request, episode)
    except BadField as error:
        if error.param:
            episode.count_refused(_PART.split(error.param)[0])
        return refusal(400, f"{error}.", "unsupported", error.param)
    except ChatRefused as error:
        if error.param is None:
            return refusal(400, str(error), "refused")
        episode.count_refused(error.param)
        return refusal(400, f"{error}.", "unsupported", error.param)
    except EpisodeOver as error:
        return refusal(403, str(error) or "The episode is over.", "episode_over")
    except TooManyRequests:
        return refusal(429, "The episode has too many requests in flight.", "too_many_requests")
    except Exception:
        _log.exception("A request of an agent could not be answered.")
        return refusal(500, "The endpoint failed to answer.", "internal_error")


async def _complete(request: web.BaseRequest, episode: OpenEpisode) -> Reply:
    with episode.admitted():
        body = await _body(request, episode)
        if isinstance(body, Reply):
            return body
        digest, asked = body
        exchange, answer = await episode.ask(digest, asked.chat, is_retry=_is_retry(request))
    if asked.stream:
        events = answers.events(asked, answer, exchange.number, exchange.created)
        return Reply(200, events, "text/event-stream")
    return _json_reply(200, answers.whole(asked, answer, exchange.number, exchange.created))


async def _body(request: web.BaseRequest, episode: OpenEpisode) -> tuple[bytes, Completion] | Reply:
    """The body's digest and what it asks for, or the refusal. One that does not tell its length needs all room."""
    length = MOST_BODY_BYTES if request.content_length is None else request.content_length
    too_large = refusal(413, f"The body has more than {MOST_BODY_BYTES} bytes.", "too_large")
    if length > MOST_BODY_BYTES:
        return too_large
    async with AsyncExitStack() as held:
        try:
            async with asyncio.timeout(BODY_S):
                await held.enter_async_context(episode.room_for_body(length))
                body = await _read(request)
        except TimeoutError:
            return refusal(408, "The body was not sent in time.", "too_slow")
        if body is None:
            return too_large
        return await asyncio.to_thread(_parsed, body)


def _parsed(body: bytes) -> tuple[bytes, Completion]:
    return hashlib.sha256(body).digest(), read_body(body)


async def _read(request: web.BaseRequest) -> bytes | None:
    """The body; None where it is too large, of which no more is read than that shows."""
    body = bytearray()
    try:
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > MOST_BODY_BYTES:
                return None
    except (ConnectionError, web.RequestPayloadError):
        raise BadField("", "the body was not sent as its head says") from None
    return bytes(body)


def _is_retry(request: web.BaseRequest) -> bool:
    count = request.headers.get(_RETRY_COUNT, "")
    return count.isdecimal() and int(count[:9]) > 0


def refusal(status: int, message: str, code: str, param: str | None = None) -> Reply:
    headers = {} if status == 429 else {"x-should-retry": "false"}  # which OpenAI's clients heed
    return _json_reply(status, answers.error(message, code, param), headers)


def _json_reply(status: int, body: object, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, [json.dumps(body).encode()], headers=headers or {})


async def send(request: web.BaseRequest, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(
        status=reply.status, headers={"Content-Type": reply.content_type, **reply.headers}
    )
    if isinstance(reply.parts, list):
        response.content_length = sum(map(len, reply.parts))
    try:
        async with asyncio.timeout(READING_S):
            await response.prepare(request)
            for part in reply.parts:
                await response.write(part)
            await response.write_eof()
    except TimeoutError:
        if request.transport:
            connection = request.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            request.transport.abort()
        raise ConnectionError("the client does not read its answer") from None
    return response

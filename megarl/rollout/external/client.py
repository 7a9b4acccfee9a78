"""HTTP requests to one SGLang server: bounded answers, no redirects, no proxies, and the key in the header alone."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

import httpx

from megarl.isolation.service import TryAgain
from megarl.printable import one_line
from megarl.types.json_objects import JsonObject

_MOST_BYTES = 64 << 20
_LONGEST_TEXT = 300
_OK = 200
# uvicorn closes an idle connection after 5 s: one that is younger can be used again
_KEPT_S = 2.0


class ServerFault(TryAgain):
    """A server has given no usable answer. The text goes on from the server's name: "... does not answer"."""


def server_key(variable: str | None) -> str | None:
    """The API key in an environment variable; None: the servers want none. Raises ServerFault where there is none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    # httpx would write another one into its error
    if not key or not (key.isascii() and key.isprintable()):
        raise ServerFault(f"needs the API key of the variable {variable}, which has none")
    return key


class ServerClient:
    """Belongs to the event loop that it is first used in; `close` ends it."""

    def __init__(self, address: str, key: str | None, timeout_s: float) -> None:
        """address: host:port. timeout_s: of an answer, where a request names no other."""
        self.address = address
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=f"http://{address}",
            headers=headers,
            timeout=httpx.Timeout(None, connect=timeout_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_S),
            follow_redirects=False,
            trust_env=False,
        )

    async def get(self, path: str) -> JsonObject:
        """The JSON object that the server answers. Raises ServerFault."""
        return await self.within(self._timeout_s, self.object("GET", path))

    async def post(self, path: str, content: Mapping[str, Any]) -> JsonObject:
        """The same of a request with a JSON object."""
        return await self.within(self._timeout_s, self.object("POST", path, content))

    async def within(self, timeout_s: float, request: Any) -> Any:
        """What a request returns. Raises ServerFault where that takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await request
        except TimeoutError:
            raise ServerFault(f"has not answered for {timeout_s:g} s") from None

    async def object(
        self,
        method: str,
        path: str,
        content: Mapping[str, Any] | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> JsonObject:
        """The JSON object that the server answers, whenever it does. Raises ServerFault."""
        text = await self.text(method, path, content, most_bytes)
        try:
            answer = json.loads(text)
        except ValueError:
            raise ServerFault(f"answers {path} with something that is not JSON") from None
        if not isinstance(answer, dict):
            raise ServerFault(f"answers {path} with JSON that is not an object")
        return answer

    async def text(
        self,
        method: str,
        path: str,
        content: Mapping[str, Any] | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> bytes:
        """The answer as it comes. Raises ServerFault where it is no success, or longer than most_bytes."""
        received = bytearray()
        what = path.partition("?")[0]
        try:
            async with self._client.stream(method, path, json=content) as reply:
                async for chunk in reply.aiter_bytes():
                    received += chunk
                    if len(received) > most_bytes:
                        raise ServerFault(f"answers {what} with more than {most_bytes} bytes")
        except httpx.TransportError as error:
            raise ServerFault(f"does not answer {what} ({type(error).__name__})") from None
        if reply.is_redirect:
            raise ServerFault(f"answers {what} with a redirect, which is not followed")
        if reply.status_code != _OK:
            words = one_line(bytes(received).decode(errors="replace"))[:_LONGEST_TEXT]
            raise ServerFault(f"answers {what} with status {reply.status_code}: {words}")
        return bytes(received)

    async def close(self) -> None:
        await self._client.aclose()

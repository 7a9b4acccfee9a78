"""The endpoint itself: it listens on loopback and on a Unix socket, and serves the episodes that are opened."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from aiohttp import web  # a requirement of SGLang, without which there is no engine to ask

from megarl.cluster.session_folder import SessionFolder, remove_dead
from megarl.device import LOOPBACK
from megarl.environments.agents.chat import Access, ChatHandler
from megarl.environments.endpoint.connection_limits import files_for_most, taken_at_once
from megarl.environments.endpoint.http_server import authenticated, make_server, unauthenticated
from megarl.environments.endpoint.registry import OpenEpisode, OpenEpisodes
from megarl.environments.endpoint.replies import refusal, reply_to, send
from megarl.isolation.loop_thread import LoopThread

_GRACE_S = 2.0  # to deliver answers at the end
_BACKLOG = 4096
_PREFIX = "megarl-chat-"  # of the socket's folder, which lies in the run's own if there is a run


class ChatEndpoint:
    """Serves agents from a thread of its own, so that what they send does not hold up the engine's event loop.

    It listens from its creation to `shutdown`. Raises OSError where it cannot. A handler that raises something other
    than ChatRefused and EpisodeOver is logged, and the agent is answered 500.
    """

    def __init__(self) -> None:
        _allow_open_files(files_for_most())
        self._episodes = OpenEpisodes()
        remove_dead(_PREFIX, tempfile.gettempdir())
        self._folder = SessionFolder(_PREFIX, tempfile.gettempdir())
        self._socket = str(self._folder.path / "http")
        self._thread = LoopThread("endpoint")
        try:
            self._runners, self._url = self._thread.submit(self._listen()).result()
        except BaseException:
            self._thread.end(_nothing())
            self._folder.remove()
            raise

    def open(self, handler: ChatHandler) -> Access:
        """Begin to serve an episode, under a key of its own.

        The handler is called in the event loop that calls this, or, where none does, in the endpoint's own.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        return Access(self._url, self._episodes.add(OpenEpisode(handler, loop)), self._socket)

    async def close(self, key: str) -> dict[str, int]:
        """End it: requests in flight are cancelled, and so are answered 403, as later ones are. From any loop.

        Returns once the handler's tasks are cancelled, how often each field of its requests was refused; nothing where
        the key is not open.
        """
        episode = self._episodes.remove(key)
        if episode is None:
            return {}
        await self._thread.run(episode.end())
        return dict(episode.refused)

    def shutdown(self) -> None:
        """End all episodes, stop listening and remove the socket; harmless when repeated."""
        self._thread.end(self._stop())
        self._folder.remove()

    async def _listen(self) -> tuple[list[web.ServerRunner], str]:
        # One thread reads the bodies of all, so that they have at most half of the interpreter's time.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "endpoint-bodies"))
        runners = [
            web.ServerRunner(make_server(self._answer), shutdown_timeout=_GRACE_S) for _ in range(2)
        ]
        with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
            tcp.bind((LOOPBACK, 0))
            unix.bind(self._socket)
            # a sandbox that it is bound into has another user; the folder is this user's
            os.chmod(self._socket, 0o666)
            for runner, listener in zip(runners, (tcp, unix), strict=True):
                await runner.setup()
                # The server has a descriptor of its own, so that it alone closes what it listens to.
                await web.SockSite(runner, listener.dup(), backlog=taken_at_once()).start()
                listener.listen(_BACKLOG)  # how many the kernel lets wait to be taken
            return runners, f"http://{LOOPBACK}:{tcp.getsockname()[1]}/v1"

    async def _stop(self) -> None:
        await asyncio.gather(*(episode.end() for episode in self._episodes.clear()))
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        episode = self._episodes.find(_key(request))
        if episode is None:
            unauthenticated(request)
            reply = refusal(403, "No episode is open for this key.", "no_episode")
            return await send(request, reply)
        with authenticated(request) as has_place:
            if has_place:
                reply = await reply_to(request, episode)
            else:
                message = "Too many connections have requests."
                reply = refusal(429, message, "too_many_requests")
            return await send(request, reply)


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of this process to as many open files, or to the hard limit where that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    new_soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft < new_soft:
        with suppress(OSError, ValueError):  # a sandbox may forbid it: then there are fewer places
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft, hard))


def _key(request: web.BaseRequest) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return ""


async def _nothing() -> None:
    pass

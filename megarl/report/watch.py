"""A page that follows its runs: a server on loopback, which sends the page and, after each step, its data anew.

Its address has a token of 32 random bytes as the first part of the path: other users of the machine, and pages of
other sites in the same browser, do not know it.
"""

from __future__ import annotations

import gzip
import hmac
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from megarl.device import LOOPBACK
from megarl.report.page import embedded_json, page
from megarl.report.planned import Planned, planned
from megarl.report.run_data import run_data
from megarl.report.run_files import read_run
from megarl.types import UserError
from megarl.types.json_objects import JsonObject

_TOKEN_BYTES = 32
_LARGE_BYTES = 4096  # from which an answer is sent compressed
_RECIPE = "recipe.yaml"
_FILES = ("metrics.jsonl", "samples.jsonl", "losses.jsonl", _RECIPE)
_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass
class FollowedRun:
    """A run's folder, which is read again when one of its files has changed. plans: as of `write_reports`."""

    folder: Path
    plans: bool
    _seen: object = None
    _data: JsonObject = field(default_factory=dict)
    _planned_figures: Planned | None = None
    # size and time of the recipe that is planned; None: none is planned yet
    _planned_from: tuple[int, int] | None = None

    def version(self) -> tuple[tuple[int, int], ...]:
        """Sizes and times of the run's files; a file that is not there has zeros."""
        return tuple(_size_and_time(self.folder / name) for name in _FILES)

    def data(self) -> JsonObject:
        """The object of `run_data`. Raises UserError where the run is gone."""
        version = self.version()
        if version != self._seen:
            recipe_version = _size_and_time(self.folder / _RECIPE)
            run = read_run(self.folder)
            # a run that resumes may have another recipe
            if self.plans and recipe_version != self._planned_from:
                self._planned_figures = planned(run.recipe) if run.recipe else None
                self._planned_from = recipe_version
            self._data = run_data(run, self._planned_figures)
            self._seen = version
        return self._data


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


class PageServer(ThreadingHTTPServer):
    """Serves the page of some runs on a port of 127.0.0.1. Its maker closes it."""

    daemon_threads = True

    def __init__(self, runs: Sequence[FollowedRun], port: int) -> None:
        """port: 0: a free one. Raises UserError where the port is taken."""
        self._runs = runs
        self._reading = Lock()
        self._token = secrets.token_urlsafe(_TOKEN_BYTES)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            problem = f"{LOOPBACK}:{port} cannot be listened on ({error.strerror})"
            raise UserError("--port", problem, "name another port, or 0 for a free one") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self._token}/"

    def answers(self, path: str) -> Callable[[], tuple[str, str]] | None:
        """What answers a request of this path, with the content's type; None: nothing does."""
        _, token, *rest = [*path.split("?", 1)[0].split("/", 2), "", ""][:4]
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        return {"": self._page, "data": self._new_data}.get(rest[0])

    def needs_slash(self, path: str) -> bool:
        """Whether the path is that of the page without its last slash, where the page would ask elsewhere for data."""
        return hmac.compare_digest(path.encode(), f"/{self._token}".encode())

    def version(self) -> str:
        """Changes whenever the data does."""
        return f'"{hash(tuple(run.version() for run in self._runs)):x}"'

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless the browser has only closed its connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def _page(self) -> tuple[str, str]:
        version = self.version()  # before the data: what comes between is asked for once more
        return "text/html", page(self._data(), version=version)

    def _new_data(self) -> tuple[str, str]:
        return "application/json", embedded_json({"runs": self._data()})

    def _data(self) -> list[JsonObject]:
        with self._reading:
            return [run.data() for run in self._runs]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of the page and of its data, whose ETag is the version of the runs' files."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds that a connection may be idle

    def do_GET(self) -> None:
        answer = self.server.answers(self.path)
        if answer is None or not self._is_ours():
            self._send(404, "text/plain", "not here\n")
            return
        if self.server.needs_slash(self.path):
            self._send(308, "text/plain", "", Location=f"{self.path}/")
            return
        version = self.server.version()
        if self.headers.get("If-None-Match") == version:
            self._send(304, "text/plain", "", ETag=version)
            return
        try:
            kind, text = answer()
        except UserError as error:
            self._send(503, "text/plain", f"{error}\n")
            return
        self._send(200, kind, text, ETag=version)

    def _is_ours(self) -> bool:
        """Whether the request names this address: another site's name may lead here, too."""
        port = self.server.server_port
        return self.headers.get("Host") in (f"{LOOPBACK}:{port}", f"localhost:{port}")

    def _send(self, status: int, kind: str, text: str, **headers: str) -> None:
        body = text.encode()
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > _LARGE_BYTES:
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self.send_response(status)
        for name, value in (*_HEADERS.items(), *headers.items()):
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the path has the token."""

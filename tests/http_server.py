"""A real HTTP server in this process, for what is asked over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Gives each request with its JSON body, {} where it has none, to `answer`."""

    answer: Callable[[Handler, dict[str, Any]], None]

    def do_POST(self) -> None:
        type(self).answer(
            self, json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        )

    def do_GET(self) -> None:
        type(self).answer(self, {})

    def send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(answer: Callable[[Handler, dict[str, Any]], None], port: int = 0) -> Iterator[str]:
    """The server's address, for as long as the block lasts. port: 0 for any that is free."""
    handler = type("OneHandler", (Handler,), {"answer": staticmethod(answer)})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

"""The requests of an engine as spans, and how many of them it has."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megarl.timeline import recorder
from megarl.timeline.recorder import REQUESTS


@dataclass(frozen=True)
class _OpenRequest:
    begin_s: float
    prompt_tokens: int
    cause: int


class RequestSpans:
    """Requests that have begun in a recording. All methods run in the event loop of the engine."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenRequest] = {}

    def begin(self, request: str, prompt_tokens: int) -> None:
        """The engine has got a request; it may have to wait for a place."""
        if recorder.is_recording():
            self._open[request] = _OpenRequest(time.monotonic(), prompt_tokens, recorder.cause())
            recorder.level("requests", len(self._open))

    def finish(self, request: str, response_tokens: int | None) -> None:
        """It has answered; response_tokens: None where it was withdrawn or has failed."""
        began = self._open.pop(request, None)
        if began is None:
            return
        recorder.level("requests", len(self._open))
        recorder.add(
            REQUESTS,
            "request",
            began.begin_s,
            cause=began.cause,
            request=request,
            prompt_tokens=began.prompt_tokens,
            response_tokens=response_tokens,
        )

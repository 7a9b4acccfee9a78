"""What the schedulers of an engine did, as spans: recorded in their processes, and fetched from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.timeline import recorder
from megarl.timeline.recorder import FIRST_TOKENS, Children, Recording, from_json

# names of the schedulers' calls
BEGIN = "begin_spans"
END = "end_spans"


def write_spans(file: Path) -> None:
    """In a scheduler: stop recording, and write what was recorded into a file."""
    if recording := recorder.end():
        file.write_text(json.dumps(recorder.as_json(recording)))


def note_first_tokens(batch: Any) -> None:
    """After a prefill: the requests of SGLang's batch whose first token it has sampled."""
    if not recorder.is_recording() or not batch.forward_mode.is_extend():
        return
    for request in batch.reqs:
        if len(request.output_ids) == 1:
            recorder.mark(FIRST_TOKENS, request.rid)


class SchedulerSpans(Children):
    """The schedulers of an engine on its first node, seen from the engine's process."""

    def __init__(self, call: Callable[[str], str | None], files: Mapping[str, Path]) -> None:
        """call: makes a call of all schedulers, and returns why one failed. files: of each scheduler, by its name."""
        self._call = call
        self._files = files
        # why not all schedulers have begun
        self._problem: str | None = None

    def begin(self) -> None:
        for file in self._files.values():
            file.unlink(missing_ok=True)
        self._problem = self._call(BEGIN)

    def end(self) -> dict[str, Recording]:
        problem = self._problem or self._call(END)
        return {name: self._read(file, problem) for name, file in self._files.items()}

    @staticmethod
    def _read(file: Path, problem: str | None) -> Recording:
        if problem is None and file.exists():
            return from_json(json.loads(file.read_text()))
        return Recording(recorder.identity(), [], [], problem=problem or "it wrote no spans")

"""What the schedulers of an engine did, as spans: recorded in their processes, and fetched from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from megarl.timeline import recorder
from megarl.timeline.recorder import FIRST_TOKENS, Children, Recording, from_json

Order = Literal["begin", "end"]
METHOD = "record"  # of the schedulers' calls


def obey(order: Order, file: Path) -> None:
    """In a scheduler: begin to record, or end and write what was recorded into a file."""
    if order == "begin":
        recorder.begin()
    elif recording := recorder.end():
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

    def __init__(self, ask: Callable[[Order], str | None], files: Mapping[str, Path]) -> None:
        """ask: has all schedulers obey, and returns why one could not. files: of each scheduler, by its name."""
        self._ask = ask
        self._files = files
        # why not all schedulers have begun
        self._problem: str | None = None

    def begin(self) -> None:
        for file in self._files.values():
            file.unlink(missing_ok=True)
        self._problem = self._ask("begin")

    def end(self) -> dict[str, Recording]:
        problem = self._problem or self._ask("end")
        return {name: self._read(file, problem) for name, file in self._files.items()}

    @staticmethod
    def _read(file: Path, problem: str | None) -> Recording:
        if problem is None and file.exists():
            return from_json(json.loads(file.read_text()))
        return Recording(recorder.identity(), [], [], problem=problem or "it wrote no spans")

"""`megarl engines`: ask a run for another number of engines."""

from __future__ import annotations

from pathlib import Path

from megarl.config.loading import load_recipe
from megarl.placement.engine_count import count_error
from megarl.printable import Say
from megarl.tracking.draining import RunInFolder
from megarl.tracking.engine_requests import request_engines
from megarl.types import UserError


def ask_for_engines(folder: Path, count: int, say: Say) -> None:
    """Leave the request in the run's folder. Raises UserError where no run lives there, or it cannot have so many."""
    run = RunInFolder.find(folder)
    if run is None:
        hint = "name the folder of a live run, as runs/quickstart"
        raise UserError(str(folder), "no run is alive there", hint)
    if error := count_error(load_recipe(folder / "recipe.yaml", []), count):
        raise error
    try:
        request_engines(folder, count)
    except OSError as error:
        problem = f"no request can be left there ({error.strerror})"
        raise UserError(str(folder), problem, "make room on its disk, or write access") from None
    engines = "engine" if count == 1 else "engines"
    say(f"{folder}: the run on {run.host} is asked for {count} {engines}, from its next step on")

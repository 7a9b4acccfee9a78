"""`megarl drain`: ask a run to end after its step with a checkpoint, and wait until it has."""

from __future__ import annotations

import json
import time
from pathlib import Path

from megarl.printable import Say
from megarl.tracking.draining import (
    FAILED,
    FINISHED,
    NOTHING,
    UNSAVED,
    RunInFolder,
    saved_step,
)
from megarl.types import UserError

_LOOK_S = 0.5
_REPORT_S = 60.0
_GO_ON = "the same command with --resume goes on"
_WORDS = {
    NOTHING: f"the run has ended before its first step, with nothing to save: {_GO_ON}",
    FINISHED: "the run is done: that was its last step",
    FAILED: "the run has failed, as its log says",
    UNSAVED: "the disk did not take the checkpoint, and the run goes on: its log says why",
}


def drain(folder: Path, say: Say, *, wait: bool) -> int:
    """Returns the exit code: 0 where the run has ended and can be resumed or is done, or will end, without `wait`.

    Raises UserError where no run lives that writes to the folder.
    """
    run = RunInFolder.find(folder)
    if run is None:
        raise UserError(
            str(folder),
            "no run is alive there, or it is one of a version without megarl drain",
            "name the folder of a live run, as runs/quickstart; to a run of an earlier version send SIGUSR1",
        )
    try:
        run.ask()
    except OSError as error:
        raise UserError(
            str(folder), f"no request can be left there ({error.strerror})", "send the run SIGUSR1"
        ) from None
    say(f"{folder}: the run on {run.host} is asked to end after its step")
    return _await(run, say, wait=wait)


def _await(run: RunInFolder, say: Say, *, wait: bool) -> int:
    began = time.monotonic()
    reported_at = began
    has_told = False
    while True:
        is_asked = run.is_asked()  # before its outcome, which replaces the request
        if outcome := run.take_outcome():
            say(f"{run.folder}: {_words(outcome)}")
            return 1 if outcome in (FAILED, UNSAVED) else 0
        if not is_asked or run.has_died():
            run.withdraw()
            how = "died" if is_asked else "ended, and did not say how"
            say(
                f"{run.folder}: the run on {run.host} has {how}: {_GO_ON} from its newest checkpoint"
            )
            return 1
        if run.has_seen() and not has_told:
            has_told = True
            say(
                f"{run.folder}: the run ends after the step that is running; {_recorded(run.folder)}"
            )
            if not wait:
                return 0
        if time.monotonic() - reported_at >= _REPORT_S:
            reported_at = time.monotonic()
            minutes = (reported_at - began) / 60
            state = "the step is running" if has_told else "the run has not answered"
            say(
                f"{run.folder}: {state}, {minutes:.0f} min after the request; {_recorded(run.folder)}"
            )
        time.sleep(_LOOK_S)


def _words(outcome: str) -> str:
    step = saved_step(outcome)
    if step is None:
        return _WORDS.get(outcome, f"the run has ended ({outcome})")
    return f"the run has ended, and the checkpoint of step {step} is complete: {_GO_ON}"


def _recorded(folder: Path) -> str:
    """How far the run is."""
    try:
        *_, last = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return f"the last that is recorded is {json.loads(last)['step']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "none is recorded yet"

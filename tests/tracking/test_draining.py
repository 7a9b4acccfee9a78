"""A run hears `megarl drain` while it is busy, and answers in the end, whatever end that is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from megarl.disk import take_lock
from megarl.tracking import draining
from megarl.tracking.draining import (
    FAILED,
    FINISHED,
    NOTHING,
    UNSAVED,
    DrainRequests,
    RunInFolder,
    saved,
    saved_step,
)
from megarl.tracking.run_log import RunLog
from megarl.types import Drained, EndedEarly
from tests.small_disk import small_disk
from tests.test_disk import fill
from tests.tracking.test_run_log import UNTRACKED, quiet, recipe_in


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_log(folder: Path) -> RunLog:
    return RunLog(recipe_in(folder, UNTRACKED), quiet(), can_drain=True)


def found(log: RunLog) -> RunInFolder:
    run = RunInFolder.find(log.folder)
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Drained(12), "saved-000012"),
        (EndedEarly(3), "saved-000003"),
        (Drained(None), NOTHING),
        (None, FINISHED),
        (ValueError("x"), FAILED),
    ],
)
def test_a_request_is_heard_during_a_step_and_answered_at_the_end(
    tmp_path: Path, error: Exception | None, outcome: str
) -> None:
    with suppress(ValueError, EndedEarly), run_log(tmp_path) as log:
        drain = log.drain
        assert drain is not None
        run = found(log)
        assert not run.is_asked() and run.take_outcome() is None
        run.ask()
        # the command's side sees the answer a moment before the run's own
        wait_until(lambda: run.has_seen() and drain.is_wanted)
        assert run.is_asked() and not run.has_died()
        if error:
            raise error
    assert not run.is_asked()
    assert (run.take_outcome(), run.take_outcome()) == (outcome, None)
    assert RunInFolder.find(log.folder) is None
    left = {path.name for path in log.folder.iterdir()} - {"losses.jsonl"}
    assert left == {".lock", "recipe.yaml", "metrics.jsonl", "samples.jsonl"}


def test_a_run_that_declines_may_be_asked_again(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        assert log.drain is not None
        run = found(log)
        for _ in range(2):
            run.ask()
            wait_until(run.has_seen)
            log.drain.decline()
            assert not log.drain.is_wanted and not run.is_asked()
            assert run.take_outcome() == UNSAVED


def test_a_request_to_a_run_that_was_killed_does_not_stop_the_next(tmp_path: Path) -> None:
    log = run_log(tmp_path)
    run = found(log)
    run.ask()
    wait_until(run.has_seen)
    assert log.drain is not None
    log.drain._closing.set()  # what a kill leaves: no answer, and no lock
    log._lock.close()
    assert run.has_died() and RunInFolder.find(log.folder) is None
    with RunLog(recipe_in(tmp_path, UNTRACKED), quiet(), can_drain=True, resume=True) as log:
        assert log.drain is not None
        assert not found(log).is_asked() and not log.drain.is_wanted


def test_a_request_needs_no_room_on_the_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        requests = DrainRequests(disk)
        with (disk / draining.LOCK).open("a") as lock:
            assert take_lock(lock, disk, "run.dir")
            fill(disk)
            run = RunInFolder.find(disk)
            assert run is not None
            run.ask()
            wait_until(run.has_seen)
            requests.close(saved(7))
            assert run.take_outcome() == saved(7)


def test_a_run_of_another_machine_is_judged_by_its_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks may be known to each machine alone."""
    monkeypatch.setattr(draining, "_SILENT_S", 0.2)
    sign = tmp_path / ".alive"
    sign.write_text(json.dumps({"host": "other", "boot": "another", "pid": 1}))
    (tmp_path / draining.LOCK).touch()
    run = RunInFolder.find(tmp_path)
    assert run is not None and run.host == "other"
    touched = sign.stat().st_mtime
    for beat in range(1, 5):
        time.sleep(0.1)
        os.utime(sign, (touched + beat, touched + beat))
        assert not run.has_died()
    wait_until(run.has_died)


@pytest.mark.parametrize("text", ["", "[]", '{"host": 1}', "\xff"])
def test_a_sign_that_is_none_is_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / ".alive").write_text(text, encoding="latin-1")
    assert RunInFolder.find(tmp_path) is None


def test_the_step_is_in_the_outcome() -> None:
    assert [saved_step(saved(step)) for step in (0, 12, 1_234_567)] == [0, 12, 1_234_567]
    assert saved_step(FINISHED) is None

"""What a run has lost is in its folder, and in the table at its end, also where the run itself was lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.tracking.loss_table import read_losses
from megarl.tracking.run_log import RunLog
from megarl.types import EndedEarly
from megarl.types.losses import Losses
from tests.tracking.test_run_log import UNTRACKED, plain, quiet, recipe_in


def test_losses_are_taken_once_they_are_over() -> None:
    now = [100.0]
    losses = Losses(lambda: now[0])
    losses.add("engine 1", "a log\nengine 1: its process died")
    now[0] = 103.0
    losses.add("training rank 0", "it hangs")
    assert losses.take() == []
    now[0] = 110.5
    losses.is_back("engine 1")
    (loss,) = losses.take()
    assert (loss.what, loss.cause) == ("engine 1", "engine 1: its process died")
    assert (loss.at, loss.back_after_s) == ("1970-01-01T00:01:40+00:00", 10.5)
    assert losses.take() == []


def test_one_that_is_lost_twice_before_it_is_back_is_told_twice() -> None:
    losses = Losses()
    for cause in ("first", "second"):
        losses.add("engine 0", cause)
    losses.is_back("engine 0")
    assert [loss.cause for loss in losses.take()] == ["first", "second"]


def test_the_closing_table_tells_what_was_lost_also_of_the_run_before(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, UNTRACKED)
    with pytest.raises(ValueError, match="broke"), RunLog(recipe, quiet()) as log:
        log.losses.add("engine 1", "engine 1: its process died")
        log.losses.is_back("engine 1")
        with log.step(1):
            pass
        log.losses.add("training rank 0", "training rank 0: [b]it hangs[/b]")
        raise ValueError("broke")
    assert read_losses(log.folder / "losses.jsonl")[-1].back_after_s is None
    console, text = plain()
    with RunLog(recipe, console, resume=True, step=1) as log, log.step(2) as record:
        record.add({"reward/mean": 1.0})
    table = text.getvalue().partition("what was lost")[2]
    rows = [line.split("│") for line in table.splitlines() if line.startswith("│")]
    assert [row[2].strip() for row in rows] == ["engine 1", "training rank 0", "the run"]
    assert [row[3].strip() for row in rows[1:]] == ["training rank 0: [b]it hangs[/b]", "broke"]
    assert [bool(row[4].strip()) for row in rows] == [True, False, True]
    # one when it was lost, and one when it was back
    lines = [json.loads(line) for line in (log.folder / "losses.jsonl").read_text().splitlines()]
    names = ["engine 1", "engine 1", "training rank 0", "the run", "the run"]
    assert [line["what"] for line in lines] == names


def test_a_loss_is_written_before_the_process_may_end(tmp_path: Path) -> None:
    with RunLog(recipe_in(tmp_path, UNTRACKED), quiet()) as log:
        log.losses.add("training rank 0", "it hangs")
        (loss,) = read_losses(log.folder / "losses.jsonl")
        assert (loss.what, loss.back_after_s) == ("training rank 0", None)


def test_a_run_that_is_asked_to_end_is_not_lost(tmp_path: Path) -> None:
    with pytest.raises(EndedEarly), RunLog(recipe_in(tmp_path, UNTRACKED), quiet()) as log:
        raise EndedEarly(3)
    assert not (log.folder / "losses.jsonl").exists()


def test_a_broken_line_costs_no_other(tmp_path: Path) -> None:
    good = '{"what": "a", "cause": "b", "at": "c", "began_s": 1.0, "back_after_s": 2.0}'
    (tmp_path / "losses.jsonl").write_text(f'{good}\n[1]\n{{"what": 3}}\nno\n')
    assert [loss.what for loss in read_losses(tmp_path / "losses.jsonl")] == ["a"]
    assert read_losses(tmp_path / "none") == []


def test_a_command_that_fails_at_once_keeps_no_loss_of_an_earlier_one_open(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, UNTRACKED)
    with pytest.raises(ValueError, match="first"), RunLog(recipe, quiet()) as log:
        with log.step(1):
            pass
        raise ValueError("first")
    with pytest.raises(ValueError, match="second"), RunLog(recipe, quiet(), resume=True, step=1):
        raise ValueError("second")
    with RunLog(recipe, quiet(), resume=True, step=1) as log, log.step(2):
        pass
    losses = read_losses(log.folder / "losses.jsonl")
    assert [loss.cause for loss in losses] == ["first", "second"]
    assert all(loss.back_after_s is not None for loss in losses)

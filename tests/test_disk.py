"""A disk that is full, or a folder that is gone, is one line that names it and what was being written."""

from __future__ import annotations

import errno
import json
import math
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.checkpoints.snapshots import Snapshots
from megarl.cluster.ray_session import WorkerFailed
from megarl.disk import (
    has_open_calls,
    is_locked,
    output_error,
    take_lock,
    while_answering,
    writing,
)
from megarl.samples.parquet import writing as writing_samples
from megarl.tracking.run_log import RunLog
from megarl.types import DiskFault, FolderGone, Prompt, SampleGroup, Silence, UserError
from tests.samples.responses import response
from tests.small_disk import read_only, small_disk
from tests.stalling_disk import stalling_disk
from tests.tracking.test_metrics import group
from tests.tracking.test_run_log import plain, recipe_in


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("folder", "it is a folder"),
        ("/dev/full", "it is not a regular file"),
        ("hollow", "it is not a regular file"),
        ("gone/x.png", "is not a folder; make it, or"),
        ("file/x.png", "is not a folder; make it, or"),
        ("n" * 300, "no file can have this name"),
        ("a\0b", "no file can have this name"),
        ("/proc/x.png", "/proc is not a folder to write to"),
    ],
)
def test_where_a_result_could_not_be_written_is_known_before_the_work(
    tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "hollow").symlink_to(tmp_path / "nowhere")
    error = output_error(tmp_path / name, "--picture", replaces=True)
    assert str(error).startswith("--picture ") and problem in str(error)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_result_may_be_new_or_replace_a_file_where_it_may(tmp_path: Path) -> None:
    assert output_error(tmp_path / "new", "--out") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").touch()
    assert output_error(tmp_path / "old", "--out", replaces=True) is None
    error = output_error(tmp_path / "old", "--out")
    assert str(error) == f"--out {tmp_path}/old: it is there already; name another file"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as path:
        yield path


def fill(disk: Path, left: int = 0) -> Path:
    """Take all room of a disk but for so many bytes; what is left is the filler."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    with filler.open("ab") as file:
        file.truncate(filler.stat().st_size - left)
    return filler


def full(folder: Path, what: str) -> str:
    return f"run.dir: no space left in {folder} while writing {what}; make room there, or name a folder on another disk"


def run_log(folder: Path, *overrides: str, **options: Any) -> RunLog:
    return RunLog(recipe_in(folder, *overrides), plain()[0], **options)


def a_step(log: RunLog, step: int, **metrics: float) -> None:
    with log.step(step) as record:
        record.add({"reward/mean": 0.5, **metrics})
        record.samples([group("p", [1.0, 0.0], [2, 3])])


def big_record(log: RunLog) -> None:
    a_step(log, 2, **{f"filler/{number}": 0.1 for number in range(1000)})


def big_samples(log: RunLog) -> None:
    with log.step(2) as record:
        record.samples([group("p" * 30_000, [1.0, 0.0], [2, 3])])


RUN_FILES = "metrics.jsonl and samples.jsonl"


def records(log: RunLog) -> list[int]:
    """The steps of the records on the disk, each of which is whole."""
    lines = (log.folder / "metrics.jsonl").read_text().split("\n")
    assert lines.pop() == ""
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize(("write", "written"), [(big_record, [1]), (big_samples, [1, 2, 3])])
def test_a_run_goes_on_while_the_disk_has_no_room_for_its_steps(
    disk: Path, write: Callable[[RunLog], None], written: list[int]
) -> None:
    """Said once when it begins and once when it is over; no line is lost, or half there meanwhile."""
    console, text = plain()
    with RunLog(recipe_in(disk, "run.trackers=[]", "run.steps=9"), console) as log:
        a_step(log, 1)
        filler = fill(disk, left=8192)
        write(log)
        a_step(log, 3)
        assert records(log) == written
        filler.unlink()
        a_step(log, 4)
        a_step(log, 5)
    assert records(log) == [1, 2, 3, 4, 5]
    samples = (log.folder / "samples.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["step"] for line in samples}) == [1, 2, 3, 4, 5]
    begun, over = [line for line in text.getvalue().splitlines() if RUN_FILES in line]
    problem = (
        f"no space left in {log.folder} while writing {RUN_FILES}: the run goes on, and the lines"
    )
    assert begun.startswith(problem)
    assert over == f"{RUN_FILES} are written again, with the lines of steps 2 to 4 that waited"


def test_a_run_that_ends_while_the_disk_is_full_says_what_is_lost(disk: Path) -> None:
    lost = f"{disk}/try while writing {RUN_FILES}, so that the lines of steps 2 to 3 are lost; make room there"
    with (
        pytest.raises(DiskFault, match=f"run.dir: no space left in {lost}"),
        run_log(disk, "run.trackers=[]") as log,
    ):
        a_step(log, 1)
        fill(disk)
        big_record(log)
        a_step(log, 3)
    assert records(log) == [1]


def test_a_disk_that_is_mounted_read_only_is_written_when_it_is_not_any_more(disk: Path) -> None:
    console, text = plain()
    with RunLog(recipe_in(disk, "run.trackers=[]"), console) as log:
        a_step(log, 1)
        with read_only(disk):
            a_step(log, 2)
            assert records(log) == [1]
        a_step(log, 3)
    assert records(log) == [1, 2, 3]
    begun, over = [line for line in text.getvalue().splitlines() if RUN_FILES in line]
    problem = (
        f"{RUN_FILES} cannot be written in {log.folder} (Read-only file system): the run goes on"
    )
    assert begun.startswith(problem)
    assert over.endswith("are written again, with the lines of steps 2 to 3 that waited")


def test_a_disk_that_does_not_answer_holds_no_step(tmp_path: Path) -> None:
    """Steps wait for it once, and for a moment."""
    console, text = plain()
    with stalling_disk(tmp_path / "disk") as disk:
        recipe = recipe_in(disk.path, "run.trackers=[]", "run.timeout_s=5.0", "run.steps=9999")
        with RunLog(recipe, console) as log:
            a_step(log, 1)
            disk.stop()
            a_step(log, 2)
            began = time.monotonic()
            a_step(log, 3)
            assert time.monotonic() - began < 0.9, "nothing is asked that does not answer"
            disk.go_on()
            last = 3
            while "are written again" not in text.getvalue():
                last += 1
                a_step(log, last)
            assert records(log) == [*range(1, last + 1)]
    begun, over = [line for line in text.getvalue().splitlines() if RUN_FILES in line]
    assert begun.startswith(f"the disk of {log.folder} has not answered for 1 s while {RUN_FILES}")
    assert over.endswith(f"with the lines of steps 2 to {last} that waited")


def test_a_run_ends_on_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    """By another fault, whose line comes last; what is lost is said before it."""
    console, text = plain()
    with (
        stalling_disk(tmp_path / "disk") as disk,
        pytest.raises(ValueError, match="the cause"),
        RunLog(recipe_in(disk.path, "run.trackers=[]", "run.timeout_s=5.0"), console) as log,
    ):
        a_step(log, 1)
        disk.stop()
        a_step(log, 2)
        raise ValueError("the cause")
    assert "so that the lines of step 2 are lost" in text.getvalue()


def test_a_run_that_the_disk_has_no_room_for(disk: Path) -> None:
    fill(disk)
    with pytest.raises(UserError, match=full(disk / "try", "recipe.yaml")):
        run_log(disk)


def test_events_that_the_disk_has_no_room_for_are_written_later(disk: Path) -> None:
    console, text = plain()
    with RunLog(recipe_in(disk), console) as log:
        log._trackers.log(0, {"first": 1.0})
        # the file is opened in the background, and has its head and the recipe before the first record
        while not any(b"first" in file.read_bytes() for file in log.folder.glob("events/*")):
            time.sleep(0.01)
        filler = fill(disk)
        log._trackers.log(1, {f"filler/{number}": 0.1 for number in range(1000)})
        while "tensorboard" not in text.getvalue():
            time.sleep(0.01)
        filler.unlink()
        a_step(log, 2)
    (message,) = [line for line in text.getvalue().splitlines() if "tensorboard" in line]
    assert message == (
        "tensorboard: step 1 is not written, and the run goes on (OSError: [Errno 28] No space left on device); "
        "metrics.jsonl has everything"
    )
    assert (log.folder / "curve.png").exists()
    events = EventAccumulator(str(log.folder / "events")).Reload()
    assert [event.step for event in events.Scalars("filler/999")] == [1]
    assert [event.step for event in events.Scalars("reward/mean")] == [2]


@pytest.mark.parametrize("is_set_aside", [True, False], ids=["from None", "with its context"])
def test_an_error_that_is_raised_from_none_is_not_the_disks(
    tmp_path: Path, is_set_aside: bool
) -> None:
    """Of the process that a rank ran in: what was being handled then is not why it died."""
    with pytest.raises(Exception) as caught, writing(tmp_path, "a checkpoint"):
        try:
            (tmp_path / "none").read_bytes()
        except FileNotFoundError:
            error = RuntimeError("rank 3: its process died")
            if is_set_aside:
                raise error from None
            raise error  # noqa: B904
    assert type(caught.value) is (RuntimeError if is_set_aside else DiskFault)


def test_a_curve_that_the_disk_has_no_room_for_costs_no_run(disk: Path) -> None:
    console, text = plain()
    with RunLog(recipe_in(disk), console) as log:
        a_step(log, 1)
        fill(disk)
    messages = [line for line in text.getvalue().splitlines() if "curve.png is not drawn" in line]
    assert messages == [f"curve.png is not drawn: {full(log.folder, 'curve.png')}"]
    assert not (log.folder / "curve.png").exists(), "half a picture"
    assert "reward/mean" in text.getvalue().split("curve.png is not drawn")[1], "the closing table"


def test_a_curve_that_cannot_be_drawn_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no font\x1b[2J")

    monkeypatch.setattr("megarl.tracking.run_log.draw_curve", fail)
    console, text = plain()
    with RunLog(recipe_in(tmp_path), console) as log:
        a_step(log, 1)
    assert r"curve.png is not drawn: no font\x1b[2J" in text.getvalue()


def test_the_first_error_is_the_last_word_when_closing_fails_too(disk: Path) -> None:
    console, text = plain()
    with (
        pytest.raises(ValueError, match="first"),
        RunLog(recipe_in(disk, "run.trackers=[]"), console) as log,
    ):
        fill(disk)
        big_record(log)
        raise ValueError("first")
    assert "so that the lines of step 2 are lost; make room" in text.getvalue()


def test_a_run_goes_on_from_a_record_that_is_not_whole(disk: Path) -> None:
    """As a killed one may leave it."""
    with run_log(disk) as log:
        a_step(log, 1)
    with (log.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    with run_log(disk, resume=True, step=1) as log:
        a_step(log, 2)
    assert records(log) == [1, 2]


def a_group(num_tokens: int) -> SampleGroup:
    rng = np.random.default_rng(1)
    logp_T = rng.random(num_tokens, dtype=np.float32)
    sample = response((1, 2), rng.integers(0, 90, num_tokens), logp_T, "x")
    prompt = Prompt("1", "p", (1, 2), "7")
    return SampleGroup(prompt, (sample,), np.ones(1, np.float32), np.ones(1, np.bool_))


def test_samples_that_the_disk_has_no_room_for(disk: Path) -> None:
    out = disk / "samples.parquet"
    fill(disk, left=4096)
    message = f"--out: no space left in {disk} while writing samples.parquet; "
    with (
        pytest.raises(UserError, match=message),
        writing_samples(out, 90, 1.0, "--out") as file,
        writing(disk, out.name, "--out"),
    ):
        file.write([a_group(500_000)])
    assert [path.name for path in disk.iterdir()] == ["filler"]
    with (
        pytest.raises(UserError, match="no space left"),
        writing_samples(out, 90, 1.0, "--out") as file,
    ):
        (disk / "filler").unlink()
        for _ in range(30):
            file.write([a_group(3)])
        fill(disk)  # what is left to write is the end of the file, some hundred bytes a step


def test_a_library_that_hides_the_systems_error_is_understood(disk: Path) -> None:
    filler = fill(disk)
    with (
        pytest.raises(UserError, match=f"no space left in {disk} while writing x"),
        writing(disk, "x"),
    ):
        torch.save(torch.zeros(10_000), disk / "x")
    filler.unlink()
    with pytest.raises(RuntimeError, match="another"), writing(disk, "x"):
        raise RuntimeError("another")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "x cannot be written in"),
        (errno.EIO, "put error"),
    ],
)
def test_other_errors_of_a_disk(tmp_path: Path, number: int, says: str) -> None:
    with pytest.raises(UserError, match=says), writing(tmp_path, "x"):
        raise OSError(number, "Input/output error")


def test_a_slow_disk_is_waited_for_and_one_that_does_not_answer_is_not(tmp_path: Path) -> None:
    """What answers is another question: the write itself may take longer than the silence that is detected."""
    with stalling_disk(tmp_path / "disk", write_s=0.02) as disk:
        file = disk.path / "x"
        data = bytes(80 * 2**17)
        assert while_answering(lambda: file.write_bytes(data), disk.path, "x", 1.0) == len(data)
        disk.stop()
        message = f"the disk of {disk.path} has not answered for 1 s while x was written"
        with pytest.raises(Silence, match=message):
            while_answering(lambda: file.write_bytes(b"later"), disk.path, "x", 1.0)
        assert has_open_calls()
        disk.go_on()
        while has_open_calls():
            time.sleep(0.01)
        assert file.read_bytes() == b"later"


def test_an_error_is_an_answer_of_a_disk(disk: Path) -> None:
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        while_answering(lambda: (disk / "x").write_bytes(bytes(9999)), disk, "x", 0.5)
    with pytest.raises(KeyError, match="its own"):
        while_answering(lambda: {}["its own"], disk, "x", 0.5)


def test_a_disk_that_does_not_answer_is_not_asked_about_an_error_that_says_so(
    tmp_path: Path,
) -> None:
    """Whose text comes from a rank, or from the disk's own silence; the test would never end."""
    with stalling_disk(tmp_path / "disk") as disk:
        disk.stop()
        for error in (Silence("the disk has not answered"), WorkerFailed("rank 0: Silence", "")):
            with pytest.raises(type(error)), writing(disk.path, "x"):
                raise error


def test_a_lock_is_seen_while_it_is_held(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with file.open("a") as opened:
        assert not is_locked(file)
        assert take_lock(opened, tmp_path, "run.dir")
        assert is_locked(file)
    assert not is_locked(file)


def test_what_is_no_error_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError), writing(tmp_path, "x"):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    with pytest.raises(UserError, match="its own"), writing(tmp_path, "x"):
        raise UserError("key", "its own", "mend")


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def replace(folder: Path) -> None:
    """As by a second run of the same name."""
    shutil.move(folder, folder.with_name("elsewhere"))
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")


@pytest.mark.parametrize("change", [remove, replace])
@pytest.mark.parametrize("at_end", [False, True])
def test_a_folder_that_is_removed_is_told_at_once(
    tmp_path: Path, change: Callable[[Path], None], at_end: bool
) -> None:
    console, text = plain()
    recipe = recipe_in(tmp_path, "run.trackers=[]")
    with pytest.raises(FolderGone) as caught, RunLog(recipe, console) as log:
        a_step(log, 1)
        change(tmp_path / "try")
        if not at_end:
            a_step(log, 2)
    words = "the folder was removed or replaced while the run wrote metrics.jsonl; what it held is lost, so start"
    assert str(caught.value) == f"{tmp_path}/try: {words} the run again"
    assert "records, samples" not in text.getvalue()
    assert len(text.getvalue().splitlines()) == 2, "where it is written, and one step"
    assert not list(tmp_path.glob("try/curve.png")), "it would be another run's"


def test_a_checkpoint_is_not_written_where_the_run_was(tmp_path: Path) -> None:
    run = tmp_path / "try"
    with (
        pytest.raises(FolderGone, match="while the run wrote the checkpoint"),
        writing(run, "the checkpoint"),
    ):
        Snapshots(run / "checkpoints", print).begin(1)
    assert not run.exists(), "nobody asked for it again"


def test_the_error_survives_the_way_from_another_process(tmp_path: Path) -> None:
    with pytest.raises(FolderGone) as caught, writing(tmp_path / "gone", "x"):
        raise FileNotFoundError(errno.ENOENT, "No such file")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is FolderGone and str(again) == str(caught.value)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def broken(folder: Path, name: str, line: bytes) -> list[str]:
    """What resuming says when the second of three lines is another one; nothing of the run is changed by it."""
    with run_log(folder) as log:
        for step in (1, 2, 3):
            a_step(log, step)
    file = log.folder / name
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], line + b"\n", *lines[2:]]))
    before = files_of(log.folder)
    with pytest.raises(Exception) as caught:
        run_log(folder, "run.sample_log_count=1", resume=True, step=2)
    assert files_of(log.folder) == before
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        ("metrics", b'{"step": 2, "rew', "is not JSON (Unterminated string"),
        ("metrics", b"", "is not JSON (Expecting value"),
        ("metrics", bytes(10), "is not JSON ("),
        ("metrics", b'{"step": 2, "\xff": 1}', "is not JSON ("),
        ("metrics", b"[" * 100_000, "is nested too deep for JSON"),
        ("metrics", b"[1, 2]", "is not a record but list"),
        ("metrics", b'{"reward/mean": 1.0}', "has no whole number as its step"),
        ("metrics", b'{"step": "2"}', "has no whole number as its step"),
        (
            "metrics",
            b'{"step": 2, "reward/mean": "high"}',
            "has something other than a number as 'reward/mean'",
        ),
        (
            "samples",
            b'{"step": 2, "prompt": "a\x01"}',
            "is not JSON (Invalid control character",
        ),
    ],
)
def test_a_broken_line_is_told_by_file_and_line(
    tmp_path: Path, name: str, line: bytes, problem: str
) -> None:
    (message,) = broken(tmp_path, f"{name}.jsonl", line)
    assert message.startswith(f"{tmp_path}/try/{name}.jsonl:2: {problem}")
    assert message.endswith("; remove the line, or choose another run.name")
    assert message.isprintable()


def test_records_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        a_step(log, 1, **{"train/loss": math.nan})
    with run_log(tmp_path, resume=True, step=1) as log:
        assert math.isnan(log._history[0]["train/loss"])


def test_no_character_of_a_sample_reaches_a_terminal(tmp_path: Path) -> None:
    hostile: Any = group("\x1b[2J\u202egpj\ud800数\x9b", [1.0], [2])
    with run_log(tmp_path) as log, log.step(1) as record:
        record.samples([hostile])
    text = (log.folder / "samples.jsonl").read_text(encoding="utf-8")
    assert text.replace("\n", "").isprintable() and "数" in text
    assert json.loads(text)["prompt"] == hostile.prompt_text

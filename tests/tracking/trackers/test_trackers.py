"""What a run notices of its trackers: a line where one fails, and never a delay."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megarl.tracking import trackers as trackers_module
from megarl.tracking.run_log import RunLog
from megarl.tracking.trackers import TRACKERS, Trackers, Writer
from megarl.tracking.trackers.interface import SampleRow, State, code_commit
from megarl.tracking.trackers.wandb_run import WandbRun
from megarl.types import EndedEarly, Metrics
from tests.tracking.test_metrics import group
from tests.tracking.test_run_log import json_lines, plain, recipe_in
from tests.tracking.trackers.conftest import SECRET
from tests.tracking.trackers.runs import history, track, tracked, wandb_records
from tests.tracking.trackers.test_mlflow_run import points, the_run

ROOT = Path(__file__).parents[3]
STEPS: dict[int, Metrics] = {step: {"reward/mean": step / 4} for step in (1, 2, 3)}
ALL = "run.trackers=[tensorboard,wandb,mlflow]"


class Slow:
    """Writes nothing before it is let go, as over a network that does not answer."""

    def __init__(self) -> None:
        self.go, self.was_abandoned = threading.Event(), False
        self.done: list[object] = []

    def open(self) -> str:
        self.go.wait()
        return "seen at https://me:pass@host/run"

    def log(self, step: int, metrics: Metrics) -> None:
        self.done.append(step)

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self.done.append(rows)

    def close(self, state: State) -> None:
        self.done.append(state)

    def abandon(self) -> None:
        self.was_abandoned = True


def writer_of(slow: Slow) -> tuple[Writer, list[str]]:
    lines: list[str] = []
    return Writer("slow", slow, lines.append), lines


def test_a_slow_tracker_is_not_waited_for_and_gets_all_in_order() -> None:
    slow = Slow()
    writer, lines = writer_of(slow)
    for step in range(1100):
        writer.put(f"step {step}", partial(slow.log, step, {}))
    writer.end("finished")
    assert slow.done == []
    assert lines == [
        "slow: step 1000 is left out, 1000 writes are waiting already; metrics.jsonl has everything"
    ]
    slow.go.set()
    writer.join(time.monotonic() + 60)
    assert slow.done == [*range(1000), "finished"]
    assert lines[1:] == ["slow: seen at https://(withheld)@host/run"]
    assert not slow.was_abandoned


def test_a_tracker_that_does_not_end_is_left() -> None:
    slow = Slow()
    writer, lines = writer_of(slow)
    writer.end("failed")
    writer.join(time.monotonic())
    assert not slow.was_abandoned
    writer.leave()
    assert lines == [
        "slow: it does not finish, and is abandoned so that the run can end; metrics.jsonl has everything"
    ]
    assert slow.was_abandoned
    slow.go.set()


@pytest.fixture
def slow_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Trackers, list[Slow]]]:
    """Two trackers of a run whose networks do not answer."""
    slow: list[Slow] = []

    def make(_: object) -> Slow:
        slow.append(Slow())
        return slow[-1]

    for name in ("tensorboard", "mlflow"):
        monkeypatch.setitem(TRACKERS, name, make)
    yield Trackers(["tensorboard", "mlflow"], tracked(tmp_path), lambda line: None), slow
    for tracker in slow:
        tracker.go.set()


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_that_does_not_finish_does_not_wait_long(
    slow_ones: tuple[Trackers, list[Slow]], monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    """Slurm kills a job's processes 30 s after its signal."""
    now, waited = 1000.0, []

    def join(writer: Writer, deadline: float) -> None:
        nonlocal now
        waited.append(deadline - now)
        now = deadline

    monkeypatch.setattr(Writer, "join", join)
    monkeypatch.setattr(trackers_module, "time", SimpleNamespace(monotonic=lambda: now))
    trackers, slow = slow_ones
    trackers.close(state)
    assert sum(waited) <= 10.0
    assert [tracker.was_abandoned for tracker in slow] == [True, True]


def test_a_second_interrupt_lets_go_of_every_tracker(
    slow_ones: tuple[Trackers, list[Slow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "join", interrupted)
    trackers, slow = slow_ones
    with pytest.raises(KeyboardInterrupt):
        trackers.close("finished")
    assert [tracker.was_abandoned for tracker in slow] == [True, True]


def test_a_tracker_that_cannot_start_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "events").touch()
    (line,) = track("tensorboard", tracked(tmp_path), STEPS)
    assert line.startswith(
        "tensorboard: it does not start, and the run goes on without it (FileExistsError: "
    )


@pytest.mark.slow
def test_without_a_key_one_line_says_so(
    tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY")
    (line,) = track("wandb", tracked(tmp_path), STEPS, table=2)
    assert line.startswith(
        "wandb: it does not open, and the run goes on without it (UsageError: No API key configured"
    )


def test_a_tracker_that_fails_on_the_way_says_so_once(tmp_path: Path, offline: Path) -> None:
    lines: list[str] = []
    trackers = Trackers(["mlflow"], tracked(tmp_path), lines.append)
    trackers.log(1, STEPS[1])
    wait_for(
        lambda: (
            bool(lines) and the_run()[1].data.metrics.get("reward/mean") == STEPS[1]["reward/mean"]
        )
    )
    away = offline.rename(tmp_path / "away")
    for step in (2, 3):
        trackers.log(step, STEPS[step])
    wait_for(lambda: len(lines) == 2)
    away.rename(offline)
    trackers.log(4, {"reward/mean": 1.0})
    trackers.close("finished")
    assert len(lines) == 2
    assert lines[1].startswith("mlflow: step 2 is not written, and the run goes on (Exception: ")
    client, run = the_run()
    assert points(client, run, "reward/mean")[-1] == (4, 1.0), "later steps are written again"
    assert run.info.status == "FINISHED"


def wait_for(is_there: Callable[[], bool]) -> None:
    """Until the trackers' own threads have done something."""
    while not is_there():
        time.sleep(0.01)


UNANSWERED = """
import os, signal, sys
from pathlib import Path
from megarl.tracking.trackers import TRACKERS, Trackers
from megarl.tracking.trackers.wandb_run import WandbRun
from tests.tracking.trackers.runs import tracked

made = []
class Kept(WandbRun):
    def __init__(self, run):
        super().__init__(run)
        made.append(self)
TRACKERS["wandb"] = Kept
trackers = Trackers([sys.argv[1]], tracked(Path(sys.argv[2])), print, end_s=0.5)
trackers.log(1, {"reward/mean": 1.0})
for process in made[0]._service if sys.argv[3] else []:
    process.send_signal(getattr(signal, sys.argv[3]))
trackers.log(2, {"reward/mean": 1.0})
trackers.close("finished")
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sent"), [("wandb", "SIGSTOP"), ("wandb", "SIGKILL"), ("wandb", ""), ("mlflow", "")],
    ids=["W&B's process stands still", "it is killed", "W&B does not answer", "MLflow does not answer"],
)  # fmt: skip
def test_a_service_that_does_not_answer_keeps_no_process_from_ending(
    tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch, name: str, sent: str
) -> None:
    """The whole process ends, within the clients' own patience of minutes, and says one line."""
    nowhere = "http://me:0p3nsesame@127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", nowhere)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_MODE", "offline" if sent else "online")
    command = [sys.executable, "-c", UNANSWERED, name, str(tmp_path), sent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{name}: ") and line.endswith("; metrics.jsonl has everything")
    assert "Traceback" not in done.stderr
    assert "0p3nsesame" not in done.stdout + done.stderr and SECRET not in done.stdout + done.stderr


def run_of(folder: Path, error: BaseException | None = None, **how: int | bool) -> Path:
    """A run of all trackers with samples in two steps, of which the last is evaluated."""
    with RunLog(recipe_in(folder, ALL), plain()[0], **how) as log:  # type: ignore[arg-type]
        first = max(int(how.get("step", 0)), 0) + 1
        for step in (first, first + 1):
            with log.step(step) as record:
                record.add(
                    {"reward/mean": step / 4} | ({"eval/accuracy": 0.5} if step > first else {})
                )
                record.samples([group("p", [1.0, 0.0], [2, 3])])
        if error:
            raise error
    return log.folder


def test_a_run_is_told_to_every_tracker(tmp_path: Path, offline: Path) -> None:
    folder = run_of(tmp_path)
    client, run = the_run()
    assert points(client, run, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert run.data.params["train.lr"] == str(recipe_in(tmp_path).train.lr)
    (records,) = wandb_records(folder)
    assert [row["reward/mean"] for row in history(records) if "reward/mean" in row] == [0.25, 0.5]
    assert len(list((folder / "events").iterdir())) == 1
    samples = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    assert samples == ["samples/step-000002.csv"], "of the steps that are evaluated"
    assert {row["step"] for row in json_lines(folder / "samples.jsonl")} == {1, 2}
    assert [row["step"] for row in json_lines(folder / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("x"), "FAILED"), (EndedEarly(1), "KILLED"), (KeyboardInterrupt(), "KILLED")],
)
def test_trackers_know_how_a_run_ended(
    tmp_path: Path,
    offline: Path,
    error: BaseException,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers_module, "EARLY_END_S", 60.0)  # of a machine that is busy
    with pytest.raises(type(error)):
        run_of(tmp_path, error)
    assert the_run()[1].info.status == status


@pytest.mark.slow
def test_a_run_that_begins_anew_in_its_folder_is_another_one(tmp_path: Path, offline: Path) -> None:
    first = run_of(tmp_path)
    before = {name: (first / f"{name}.id").read_text() for name in ("wandb", "mlflow")}
    run_of(tmp_path, resume=True, step=1)
    assert {name: (first / f"{name}.id").read_text() for name in before} == before
    run_of(tmp_path, resume=True, step=-1)
    for name, text in before.items():
        assert (first / f"{name}.id").read_text() != text
        assert (first / f"{name}.1.id").read_text() == text


def test_no_secret_of_the_environment_is_written(tmp_path: Path, offline: Path) -> None:
    run_of(tmp_path)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in files) and any(
        offline in file.parents for file in files
    )
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


def test_wandbs_process_is_there_before_the_runs_own(tmp_path: Path, offline: Path) -> None:
    """The end of a run kills what was started in it (`processes.kill_descendants`)."""
    before = set(psutil.Process().children())
    tracker = WandbRun(tracked(tmp_path))
    (process,) = set(psutil.Process().children()) - before
    assert tracker._service == [process]
    assert SECRET not in " ".join(process.cmdline())
    assert [
        connection
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ] == []
    tracker.abandon()
    assert not process.is_running()


def test_the_commit_is_that_of_the_code(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        assert code_commit() == ""
        return
    head = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert code_commit().removesuffix("-dirty") == head.stdout.strip()


def test_every_tracker_of_the_recipe_is_there() -> None:
    from typing import get_args

    from megarl.config import Tracker as Name

    assert set(TRACKERS) == set(get_args(Name))


def test_an_episode_is_a_cell_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escaped, and every row has every column."""
    slow = Slow()
    slow.go.set()
    monkeypatch.setitem(TRACKERS, "slow", lambda run: slow)
    trackers = Trackers(["slow"], tracked(tmp_path), lambda line: None)
    trackers.table(
        1, [{"response": "a\x1b", "episode": {"turns": ["b\u202e"], "calls": 1}}, {"response": "c"}]
    )
    trackers.close("finished")
    assert slow.done[0] == [
        {"response": "a\\x1b", "episode": '{"turns": ["b\\u202e"], "calls": 1}'}, {"response": "c", "episode": ""}
    ]  # fmt: skip

"""The run's folder and its lines, new or gone on with."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.tracking.metrics import rollout_metrics
from megarl.tracking.run_log import RunLog
from megarl.types import UserError
from megarl.types.worker_faults import ServiceFaults, WorkerFaults
from tests.tracking.test_metrics import group

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


UNTRACKED = "run.trackers=[]"


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, [f"run.dir={folder}", "run.name=try", "run.steps=4", *overrides])


def plain() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=160), text


def quiet() -> Console:
    return plain()[0]


def json_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n")[:-1]]


def run_of_four(folder: Path, console: Console | None = None) -> Path:
    with RunLog(recipe_in(folder), console) as log:
        with log.start() as record, record.phase("eval"):
            record.add({"eval/accuracy": 0.0, "eval/arith/accuracy": 0.0})
        for step in range(1, 5):
            with log.step(step) as record:
                with record.phase("rollout"):
                    groups = [group("p", [1.0, 0.0], [2, 3])]
                record.add(rollout_metrics(groups, compares_samples=False))
                record.add({"rollout/logprob_diff_max": step * 1e-6})
                record.samples(groups)
                record.learnt_from({(0, 0): 0.5, (0, 1): -0.5})
                if step == 4:
                    record.add({"eval/accuracy": 0.9, "eval/arith/accuracy": 0.9})
    return log.folder


DOWN = ServiceFaults("judge", 40, 2, outages=1, down_s=31.2, reason="status 503")
BACK = ServiceFaults("judge", 1, recoveries=1, down_s=5.0, reason="status 503")
MANY = {"a\nstep 9": 1, "seed": 2, **{f"x{number}": 1 for number in range(9)}}


@pytest.mark.parametrize(
    ("facts", "count", "line"),
    [
        ({}, 2, ""),
        (
            {"failures": ("raised \x1b]0;x\x07\u202e\r\nstep 9: no",)},
            1,
            r"step 1: 1 verdict failed, the first raised \x1b]0;x\x07\u202e\r\nstep 9: no",
        ),
        ({"failures": ("slow 'r'", "x")}, 2, "step 1: 4 verdicts failed, the first slow 'r'"),
        (
            {"failed_calls": ("price ran out of memory.",)},
            1,
            "step 1: 1 call of a tool failed, the first: price ran out of memory.",
        ),
        (
            {"failed_calls": ("price returned \x1b]0;x\x07\r\nstep 9: no", "x")},
            2,
            r"step 1: 4 calls of tools failed, the first: price returned \x1b]0;x\x07\r\nstep 9: no",
        ),
        ({"faults": {"reward": WorkerFaults(2, (ServiceFaults("judge", retries=3),))}}, 2, ""),
        (
            {"faults": {"reward": WorkerFaults(0, (DOWN,))}},
            2,
            "step 1: judge is down (status 503; 62 s, summed over engines): 80 tries were repeated, 4 calls "
            "had no answer",
        ),
        (
            {"faults": {"reward": WorkerFaults(0, (DOWN, BACK)), "episode": WorkerFaults(1)}},
            1,
            "step 1: judge was down, and answers again (status 503; 36 s, summed over engines): 41 tries were "
            "repeated, 2 calls had no answer",
        ),
        (
            {"faults": {"episode": WorkerFaults(0, (replace(BACK, service="a\nstep 9", lost=1),))}},
            1,
            r"step 1: a\nstep 9 was down, and answers again (status 503; 5 s, summed over engines): 1 try was "
            "repeated, 1 call had no answer",
        ),
        (
            {"refused_fields": {"seed": 1}},
            1,
            "step 1: 1 request of an agent was refused for a field or a path: seed (1)",
        ),
        (
            {"refused_fields": MANY},
            2,
            r"step 1: 24 requests of agents were refused for a field or a path: seed (4), a\nstep 9 (2), x0 (2), "
            "x1 (2), x2 (2), x3 (2), x4 (2), x5 (2) and 3 others",
        ),
    ],
)
def test_what_has_failed_or_was_refused_is_told_in_a_line(
    tmp_path: Path, facts: dict[str, Any], count: int, line: str
) -> None:
    """Of all groups of a step together, and as what they are: the words of a tool or a program forge nothing."""
    console, text = plain()
    with RunLog(recipe_in(tmp_path), console) as log, log.step(1) as record:
        record.failed([replace(group("p", [1.0, 0.0], [2, 3]), **facts)] * count)
    lines = [
        line for line in text.getvalue().splitlines() if line.startswith(("step 1:", "step 9"))
    ]
    assert lines == [line] * bool(line)


def test_folder_holds_recipe_records_samples_events_and_curve(tmp_path: Path) -> None:
    folder = run_of_four(tmp_path, quiet())
    assert load_recipe(folder / "recipe.yaml") == recipe_in(tmp_path)
    records = json_lines(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert [record.get("eval/accuracy") for record in records] == [0.0, None, None, None, 0.9]
    assert all(isinstance(value, int | float) for record in records for value in record.values())
    assert {"reward/mean", "time/rollout_s", "time/other_s", "time/step_s"} <= set(records[1])
    samples = json_lines(folder / "samples.jsonl")
    assert samples[0] == {
        "step": 1,
        "group": 0,
        "sample": 0,
        "prompt": "p",
        "answer": "7",
        "response": "p0",
        "reward": 1.0,
        "advantage": 0.5,
        "correct": True,
        "length": 2,
        "finished": True,
        "version": 3,
    }
    assert len(samples) == 8
    events = EventAccumulator(str(folder / "events")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (s, 0.5) for s in (1, 2, 3, 4)
    ]
    assert (folder / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_older_run_is_kept(tmp_path: Path) -> None:
    first = run_of_four(tmp_path, quiet())
    before = (first / "metrics.jsonl").read_bytes()
    console, text = plain()
    assert run_of_four(tmp_path, console).name == "try-2"
    assert run_of_four(tmp_path, quiet()).name == "try-3"
    assert (first / "metrics.jsonl").read_bytes() == before
    assert f"{tmp_path}/try exists and is kept" in text.getvalue()


def test_times_add_up(tmp_path: Path) -> None:
    with RunLog(recipe_in(tmp_path, UNTRACKED), quiet()) as log:
        began = time.perf_counter()
        with log.step(1) as step:
            with step.phase("rollout"):
                time.sleep(0.05)
            with step.phase("train"):
                time.sleep(0.02)
            with step.phase("rollout"):
                time.sleep(0.05)
            time.sleep(0.03)
        elapsed = time.perf_counter() - began
    (record,) = json_lines(log.folder / "metrics.jsonl")
    assert 0.1 <= record["time/rollout_s"] < elapsed - 0.05
    assert 0.02 <= record["time/train_s"] < elapsed - 0.13
    assert 0.03 <= record["time/other_s"] < elapsed - 0.12
    assert 0.15 <= record["time/step_s"] <= elapsed
    parts = record["time/rollout_s"] + record["time/train_s"] + record["time/other_s"]
    assert parts == pytest.approx(record["time/step_s"])
    assert not (log.folder / "events").exists()


def test_one_plain_line_a_step_without_a_terminal(tmp_path: Path) -> None:
    console, text = plain()
    run_of_four(tmp_path, console)
    lines = [line for line in text.getvalue().splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert "\x1b" not in text.getvalue()
    learnt = "step 4/4  reward 0.500  accuracy 50.0%  length 2.5  eval 90.0%  "
    assert lines[-1] == f"{learnt}rollout 0.0s other 0.0s step 0.0s  ETA 0:00"
    assert "before training  eval 0.0%  eval 0.0s other 0.0s step 0.0s\n" in text.getvalue()


def test_closing_table_compares_first_and_last(tmp_path: Path) -> None:
    console, text = plain()
    run_of_four(tmp_path, console)
    table = text.getvalue()[text.getvalue().rindex("step 4/4") :].split("\n", 1)[1]
    (accuracy,) = [line for line in table.splitlines() if "eval/accuracy" in line]
    assert "0.000" in accuracy
    assert "0.900" in accuracy
    assert "4.0e-06" in table  # the worst gap
    assert "time/rollout_s, mean" in table


def test_eta_is_the_mean_step_times_the_steps_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("megarl.tracking.run_log.time.perf_counter", lambda: now[0])
    console, text = plain()
    log = RunLog(recipe_in(tmp_path, UNTRACKED), console)
    now[0] = 1000.0  # a long start is no step
    with log.step(1):
        now[0] += 20.0
    with log.step(2):
        now[0] += 40.0
    lines = [line for line in text.getvalue().splitlines() if line.startswith("step ")]
    assert "ETA 1:00" in lines[0]  # 3 steps of 20 s
    assert "ETA 1:00" in lines[1]  # 2 steps of 30 s


def test_a_failed_run_keeps_its_records_and_prints_no_table(tmp_path: Path) -> None:
    console, text = plain()
    with (
        pytest.raises(ValueError, match="broke"),
        RunLog(recipe_in(tmp_path, UNTRACKED), console) as log,
    ):
        with log.step(1) as record:
            record.add({"reward/mean": math.nan})
        with log.step(2):
            raise ValueError("broke")
    (written,) = json_lines(log.folder / "metrics.jsonl")  # the step that failed is no record
    assert written["reward/mean"] is None
    assert (log.folder / "curve.png").exists()
    assert text.getvalue().splitlines()[-1].startswith("step 1/4")


def test_records_are_on_disk_after_each_step(tmp_path: Path) -> None:
    with RunLog(recipe_in(tmp_path, UNTRACKED), quiet()) as log:
        with log.step(1) as record:
            record.add({"reward/mean": 0.25})
            record.samples([group("p", [1.0, 0.0], [2, 3])])
        assert json_lines(log.folder / "metrics.jsonl")[0]["reward/mean"] == 0.25
        assert len(json_lines(log.folder / "samples.jsonl")) == 2


def test_the_warm_start_is_visible(tmp_path: Path) -> None:
    console, text = plain()
    with RunLog(recipe_in(tmp_path, "warm_start.steps=20"), console) as log:
        for step in range(1, 21):
            with log.warm_step(step) as record:
                record.add({"warm_start/loss": 2.0 / step})
                if step == 20:
                    record.add({"eval/accuracy": 0.25})
    records = json_lines(log.folder / "metrics.jsonl")
    assert [record["warm_start/step"] for record in records] == list(range(1, 21))
    assert [record["warm_start/loss"] for record in records] == [
        2.0 / step for step in range(1, 21)
    ]
    assert all(record["step"] == 0 for record in records)
    lines = [line for line in text.getvalue().splitlines() if line.startswith("warm start")]
    assert len(lines) == 10
    assert lines[-1].startswith("warm start 20/20  loss 0.1000  eval 25.0%  ")
    events = EventAccumulator(str(log.folder / "events")).Reload()
    assert [event.step for event in events.Scalars("warm_start/loss")] == list(range(-19, 1))
    assert [event.step for event in events.Scalars("eval/accuracy")] == [0]
    assert not any(tag.startswith(("time/", "train/")) for tag in events.Tags()["scalars"])


def sick_step(log: RunLog, step: int, reward: float, std: float) -> None:
    with log.step(step) as record:
        record.add(
            {"reward/mean": reward, "reward/std": std, "reward/accuracy": reward, "train/lr": 0.5}
        )


def test_a_sick_run_is_told_once_also_over_a_resume(tmp_path: Path) -> None:
    """After the step's own line; what was told before the checkpoint is known from the records, and so is the past."""
    console, text = plain()
    log = RunLog(recipe_in(tmp_path, UNTRACKED), console)
    for step, (reward, std) in enumerate([(0.5, 0.5), (0.0, 0.0), (0.0, 0.0)], start=1):
        sick_step(log, step, reward, std)
    log._lock.close()
    lines = text.getvalue().splitlines()
    (index,) = [number for number, line in enumerate(lines) if "teach nothing" in line]
    assert lines[index - 1].startswith("step 2/4")
    assert (
        lines[index].startswith("step 2: every sample has the reward 0, ")
        and "train.lr (0.5)" in lines[index]
    )

    for after, is_told_again in ((2, False), (1, True)):
        console, text = plain()
        with RunLog(recipe_in(tmp_path, UNTRACKED), console, resume=True, step=after) as log:
            sick_step(log, 3, 0.0, 0.0)
        assert ("step 3: every sample has the reward 0" in text.getvalue()) == is_told_again
        assert not is_told_again or "was 0.5 in step 1: train.lr (0.5)" in text.getvalue()


@pytest.mark.parametrize(
    ("algorithm", "is_told"), [("grpo", True), ("ppo", True), ("on_policy_distillation", False)]
)
def test_a_teacher_needs_no_rewards_that_differ(
    tmp_path: Path, algorithm: str, is_told: bool
) -> None:
    console, text = plain()
    keys = (
        f"algorithm.name={algorithm}",
        "reference.path=x",
        "critic.path=x",
        "algorithm.kl_coefficient=0.1",
    )
    with RunLog(recipe_in(tmp_path, UNTRACKED, *keys), console) as log:
        sick_step(log, 1, 0.0, 0.0)
    assert ("teach nothing" in text.getvalue()) == is_told


def went(folder: Path, steps: int, **how: Any) -> None:
    """A run of some more steps, which is cut off without a word."""
    log = RunLog(recipe_in(folder), quiet(), **how)
    first = how.get("step", 0) + 1
    for step in range(first, first + steps):
        with log.step(step) as record:
            record.add({"reward/mean": step / 10, "eval/accuracy": math.nan})
            record.samples([group(f"prompt\u2028{step}", [1.0], [3])])
    log._lock.close()  # what a kill leaves: nothing is closed in order


def test_a_run_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    """Records and samples after it are done again; a line that the end cut short is dropped."""
    went(tmp_path, 3)
    folder = tmp_path / "try"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    went(tmp_path, 2, resume=True, step=2)
    assert [line["step"] for line in json_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [line["prompt"] for line in json_lines(folder / "samples.jsonl")] == [
        f"prompt\u2028{n}" for n in (1, 2, 3, 4)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["try"]
    log = RunLog(recipe_in(tmp_path), quiet(), resume=True, step=4)
    with log:
        pass
    assert (folder / "curve.png").exists(), "what was there before is in the curve"


def test_a_run_without_a_checkpoint_begins_anew_in_its_folder(tmp_path: Path) -> None:
    went(tmp_path, 2)
    went(tmp_path, 1, resume=True)
    folder = tmp_path / "try"
    assert [line["step"] for line in json_lines(folder / "metrics.jsonl")] == [1]
    assert [line["step"] for line in json_lines(folder / "metrics.1.jsonl")] == [1, 2], (
        "nothing is lost"
    )
    assert (folder / "samples.1.jsonl").exists() and (folder / "events.1").exists()


def test_a_run_that_goes_back_has_the_files_of_one_that_was_killed_and_resumed(
    tmp_path: Path,
) -> None:
    log = RunLog(recipe_in(tmp_path), quiet())
    folder = tmp_path / "try"
    with log:
        log.write_options({"tp": 2})

        def write(*numbers: int) -> None:
            for number in numbers:
                with log.step(number) as record:
                    record.add({"reward/mean": number / 10})
                    record.samples([group(f"prompt {number}", [1.0], [3])])

        write(1, 2, 3)
        log.go_back(3)
        with (folder / "metrics.jsonl").open() as kept:
            log.go_back(1)
            assert kept.read().count("step") == 3 + 3, "a file that is replaced is not emptied"
        write(2, 3)
        assert [line["step"] for line in json_lines(folder / "metrics.jsonl")] == [1, 2, 3]
        assert [line["step"] for line in json_lines(folder / "samples.jsonl")] == [1, 2, 3]
        assert "tp: 2" in (folder / "recipe.yaml").read_text()
        log.go_back(-1)
        write(1)
    assert [line["step"] for line in json_lines(folder / "metrics.jsonl")] == [1]
    assert [line["step"] for line in json_lines(folder / "metrics.1.jsonl")] == [1, 2, 3]


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    with (
        RunLog(recipe_in(tmp_path), quiet()),
        pytest.raises(UserError, match="another process"),
    ):
        RunLog(recipe_in(tmp_path), quiet(), resume=True, step=1)


@pytest.mark.parametrize("resume", [False, True])
def test_a_disk_without_locks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    """And leaves nothing behind but what was there."""
    if resume:
        went(tmp_path, 1)
        (tmp_path / "try" / ".lock").unlink()
    before = sorted(tmp_path.rglob("*"))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", fail)
    refusal = f"run.dir: files in {tmp_path} cannot be locked (Function not implemented); mount it with locks"
    with pytest.raises(UserError, match=re.escape(refusal)):
        RunLog(
            recipe_in(tmp_path),
            quiet(),
            resume=resume,
            step=1 if resume else -1,
        )
    assert sorted(tmp_path.rglob("*")) == before

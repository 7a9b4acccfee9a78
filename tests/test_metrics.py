"""The run's folder and its lines."""

from __future__ import annotations

import io
import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.config import Recipe
from megarl.metrics import RunLog, draw_curve, eval_metrics, pick_samples, rollout_metrics, train_metrics
from megarl.recipe_file import load_recipe
from megarl.types import GroupSummary

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, [f"run.dir={folder}", "run.name=try", "run.steps=4", *overrides])


def group(prompt: str, rewards: list[float], lengths: list[int], finished: list[bool] | None = None) -> GroupSummary:
    return GroupSummary(
        prompt_text=prompt,
        answer="7",
        responses=tuple(f"{prompt}{i}" for i in range(len(rewards))),
        prompt_length=5,
        response_lengths_G=np.array(lengths),
        finished_G=np.array(finished or [True] * len(rewards)),
        rewards_G=np.array(rewards, np.float32),
        correct_G=np.array(rewards) >= 1.0,
        version=3,
    )


def plain() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=160), text


def json_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def run_of_four(folder: Path, console: Console | None = None) -> Path:
    with RunLog(recipe_in(folder), console) as log:
        with log.start() as record, record.phase("eval"):
            record.add({"eval/accuracy": 0.0, "eval/arith/accuracy": 0.0})
        for step in range(1, 5):
            with log.step(step) as record:
                with record.phase("rollout"):
                    groups = [group("p", [1.0, 0.0], [2, 3])]
                record.add({**rollout_metrics(groups), "rollout/logprob_gap_max": step * 1e-6})
                record.samples(groups)
                if step == 4:
                    record.add({"eval/accuracy": 0.9, "eval/arith/accuracy": 0.9})
    return log.folder


def test_rollout_metrics_are_means_over_samples_not_over_groups() -> None:
    groups = [group("a", [1.0, 1.0, 1.0], [2, 2, 2]), group("b", [0.0], [10], [False])]
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/accuracy"] == 0.75
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.75 * 0.25))
    assert metrics["rollout/response_length_mean"] == 4.0
    assert metrics["rollout/response_length_max"] == 10.0
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["rollout/samples"] == 4


def test_train_metrics_of_several_updates() -> None:
    """Means over the updates, sums over all their tokens, and each update's own loss, gradient norm and tokens."""
    first = {"loss": 0.5, "grad_norm": 2.0, "tokens": 6.0, "clipped": 3.0, "gap": 1.0, "gap_max": 0.4, "aux_loss": 1.0}
    second = {"loss": 0.3, "grad_norm": 1.0, "tokens": 2.0, "clipped": 1.0, "gap": 1.0, "gap_max": 0.6, "aux_loss": 3.0}
    assert train_metrics([first, second]) == {
        "train/loss": 0.4,
        "train/grad_norm": 1.5,
        "train/tokens": 8.0,
        "train/clipped": 0.5,
        "train/aux_loss": 2.0,
        "rollout/logprob_gap_mean": 0.25,
        "rollout/logprob_gap_max": 0.6,
        "train/loss/1": 0.5,
        "train/loss/2": 0.3,
        "train/grad_norm/1": 2.0,
        "train/grad_norm/2": 1.0,
        "train/tokens/1": 6.0,
        "train/tokens/2": 2.0,
    }


def test_train_metrics_are_means_over_tokens() -> None:
    sums = {"gap": 4e-6, "gap_max": 3e-6, "clipped": 2.0, "entropy": 6.0}
    assert train_metrics([{"loss": 0.5, "grad_norm": 2.0, "tokens": 8.0, **sums}]) == {
        "train/loss": 0.5,
        "train/grad_norm": 2.0,
        "train/tokens": 8.0,
        "train/clipped": 0.25,
        "train/entropy": 0.75,
        "rollout/logprob_gap_mean": 5e-7,
        "rollout/logprob_gap_max": 3e-6,
    }
    supervised = train_metrics([{"loss": 0.5, "grad_norm": 2.0, "tokens": 8.0}])
    assert not any(name.startswith("rollout/") for name in supervised)


def test_every_evaluation_set_weighs_the_same() -> None:
    sets = {"hard": [group("a", [0.0], [1])], "easy": [group("b", [1.0], [1]), group("c", [1.0], [1])]}
    assert eval_metrics(sets) == {"eval/hard/accuracy": 0.0, "eval/easy/accuracy": 1.0, "eval/accuracy": 0.5}
    assert eval_metrics({}) == {}


def test_samples_come_from_as_many_groups_as_possible() -> None:
    groups = [group("a", [1.0, 0.0], [1, 1]), group("b", [0.0, 1.0, 1.0], [1, 1, 1])]
    assert [sample["response"] for sample in pick_samples(groups, 4)] == ["a0", "b0", "a1", "b1"]
    assert len(pick_samples(groups, 99)) == 5
    assert pick_samples([], 3) == []


def test_folder_holds_recipe_records_samples_events_and_curve(tmp_path: Path) -> None:
    folder = run_of_four(tmp_path, plain()[0])
    assert load_recipe(folder / "recipe.yaml") == recipe_in(tmp_path)
    records = json_lines(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert [record.get("eval/accuracy") for record in records] == [0.0, None, None, None, 0.9]
    assert all(isinstance(value, int | float) for record in records for value in record.values())
    assert {"reward/mean", "time/rollout_s", "time/other_s", "time/step_s"} <= set(records[1])
    samples = json_lines(folder / "samples.jsonl")
    assert samples[0] == {
        "step": 1,
        "prompt": "p",
        "answer": "7",
        "response": "p0",
        "reward": 1.0,
        "correct": True,
        "length": 2,
        "finished": True,
        "version": 3,
    }
    assert len(samples) == 8
    events = EventAccumulator(str(folder / "events")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(s, 0.5) for s in (1, 2, 3, 4)]
    png = (folder / "curve.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (960, 540)


def test_curve_shows_what_was_recorded(tmp_path: Path) -> None:
    draw_curve([{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}], tmp_path / "low.png", "x")
    draw_curve([{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.9}], tmp_path / "high.png", "x")
    assert (tmp_path / "low.png").read_bytes() != (tmp_path / "high.png").read_bytes()


def test_an_older_run_is_kept(tmp_path: Path) -> None:
    first = run_of_four(tmp_path, plain()[0])
    before = (first / "metrics.jsonl").read_bytes()
    console, text = plain()
    assert run_of_four(tmp_path, console).name == "try-2"
    assert run_of_four(tmp_path, plain()[0]).name == "try-3"
    assert (first / "metrics.jsonl").read_bytes() == before
    assert f"{tmp_path}/try exists and is kept" in text.getvalue()


def test_times_add_up(tmp_path: Path) -> None:
    with RunLog(recipe_in(tmp_path, "run.trackers=[]"), plain()[0]) as log:
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
    assert record["time/step_s"] == pytest.approx(elapsed, abs=0.02)
    parts = record["time/rollout_s"] + record["time/train_s"] + record["time/other_s"]
    assert parts == pytest.approx(record["time/step_s"])
    assert not (log.folder / "events").exists()


def test_a_time_belongs_to_one_step(tmp_path: Path) -> None:
    with RunLog(recipe_in(tmp_path, "run.trackers=[]"), plain()[0]) as log:
        with log.step(1) as record, record.phase("reshard"):
            pass
        with log.step(2):
            pass
    first, second = json_lines(log.folder / "metrics.jsonl")
    assert "time/reshard_s" in first
    assert "time/reshard_s" not in second


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


def test_eta_is_the_mean_step_times_the_steps_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("megarl.metrics.time.perf_counter", lambda: now[0])
    console, text = plain()
    log = RunLog(recipe_in(tmp_path, "run.trackers=[]"), console)
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
    with pytest.raises(ValueError, match="broke"), RunLog(recipe_in(tmp_path, "run.trackers=[]"), console) as log:
        with log.step(1) as record:
            record.add({"reward/mean": math.nan})
        with log.step(2):
            raise ValueError("broke")
    (written,) = json_lines(log.folder / "metrics.jsonl")  # the step that failed is no record
    assert written["reward/mean"] is None
    assert (log.folder / "curve.png").exists()
    assert text.getvalue().splitlines()[-1].startswith("step 1/4")


def test_records_are_on_disk_after_each_step(tmp_path: Path) -> None:
    with RunLog(recipe_in(tmp_path, "run.trackers=[]"), plain()[0]) as log:
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
                record.add({"train/loss": 2.0 / step})
                if step == 20:
                    record.add({"eval/accuracy": 0.25})
    records = json_lines(log.folder / "metrics.jsonl")
    assert [record["warm_start/step"] for record in records] == list(range(1, 21))
    assert [record["warm_start/loss"] for record in records] == [2.0 / step for step in range(1, 21)]
    assert all(record["step"] == 0 for record in records)
    lines = [line for line in text.getvalue().splitlines() if line.startswith("warm start")]
    assert len(lines) == 10
    assert lines[-1].startswith("warm start 20/20  loss 0.1000  eval 25.0%  ")
    events = EventAccumulator(str(log.folder / "events")).Reload()
    assert [event.step for event in events.Scalars("warm_start/loss")] == list(range(1, 21))
    assert [event.step for event in events.Scalars("eval/accuracy")] == [0]
    assert not any(tag.startswith(("time/", "train/")) for tag in events.Tags()["scalars"])

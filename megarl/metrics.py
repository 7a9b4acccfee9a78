"""What a run leaves behind: one flat `room/name` record a step, events, samples, a line to watch, a curve, a table."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megarl.config import Recipe
from megarl.types import GroupSummary, Metrics

_PLAIN_WIDTH = 160  # of a log file, where rich would otherwise fold lines at 80
_TABLE = ("eval/accuracy", "reward/mean", "reward/accuracy", "rollout/response_length_mean")
_WORST_GAP = "rollout/logprob_gap_max"
_MEANS = ("loss", "grad_norm", "aux_loss", "z_loss", "mtp_loss")
_REPLAY = ("replay_gap", "replay_gap_without", "replay_gap_tokens", "differing_choices", "replayed_choices")
_NOT_PER_TOKEN = ("tokens", "gap", "gap_max", *_REPLAY)
_SHOWN = (  # metric, its name in the progress line, format, colour
    ("warm_start/loss", "loss", "{:.4f}", "default"),
    ("reward/mean", "reward", "{:.3f}", "green"),
    ("reward/accuracy", "accuracy", "{:.1%}", "green"),
    ("rollout/response_length_mean", "length", "{:.1f}", "default"),
    ("rollout/logprob_gap_mean", "gap", "{:.1e}", "yellow"),
    ("eval/accuracy", "eval", "{:.1%}", "bold green"),
)


def rollout_metrics(groups: Sequence[GroupSummary]) -> Metrics:
    """Means over all samples of a step; `truncated` is the share that was cut at the length limit."""
    rewards = np.concatenate([group.rewards_G for group in groups])
    lengths = np.concatenate([group.response_lengths_G for group in groups])
    finished = np.concatenate([group.finished_G for group in groups])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/accuracy": float(np.concatenate([group.correct_G for group in groups]).mean()),
        "rollout/samples": float(len(rewards)),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated": float(1.0 - finished.mean()),
    }


def train_metrics(updates: Sequence[Metrics]) -> Metrics:
    """Statistics of a step's updates as means; `gap` is |engine - trainer| logprob.

    Losses and the gradient norm are means over the updates, everything else is a sum over masked tokens. With several
    updates those three and the tokens are also there of each, as `train/loss/1`...
    """
    stats = _over_updates(updates)
    tokens = stats["tokens"]
    metrics = {f"train/{name}": stats[name] for name in (*_MEANS, "tokens") if name in stats}
    if "gap" in stats:
        metrics["rollout/logprob_gap_mean"] = stats["gap"] / tokens
        metrics["rollout/logprob_gap_max"] = stats["gap_max"]
    if "replayed_choices" in stats:
        metrics["replay/differing_share"] = stats.get("differing_choices", 0.0) / stats["replayed_choices"]
    if stats.get("replay_gap_tokens"):
        metrics["replay/logprob_gap"] = stats["replay_gap"] / stats["replay_gap_tokens"]
        metrics["replay/logprob_gap_without"] = stats["replay_gap_without"] / stats["replay_gap_tokens"]
    sums = stats.keys() - {*_MEANS, *_NOT_PER_TOKEN}
    metrics |= {f"train/{name}": stats[name] / tokens for name in sorted(sums)}
    if len(updates) > 1:
        each = [(name, number) for name in ("loss", "grad_norm", "tokens") for number in range(1, len(updates) + 1)]
        metrics |= {f"train/{name}/{number}": updates[number - 1][name] for name, number in each}
    return metrics


def _over_updates(updates: Sequence[Metrics]) -> Metrics:
    """Losses and gradient norm as means, other statistics as sums, names ending in _max by maximum."""
    merged: Metrics = {}
    for name in {name: None for update in updates for name in update}:
        values = [update[name] for update in updates if name in update]
        merged[name] = max(values) if name.endswith("_max") else sum(values)
        if name in _MEANS:
            merged[name] /= len(values)
    return merged


def eval_metrics(sets: Mapping[str, Sequence[GroupSummary]]) -> Metrics:
    """Accuracy of each evaluation set, and their mean: every set weighs the same, whatever its size."""
    accuracy = {
        f"eval/{name}/accuracy": float(np.concatenate([group.correct_G for group in groups]).mean())
        for name, groups in sets.items()
    }
    return {**accuracy, "eval/accuracy": sum(accuracy.values()) / len(accuracy)} if accuracy else {}


class Record:
    """One step while it runs: seconds by phase, metrics, samples."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.metrics: Metrics = {}
        self.groups: Sequence[GroupSummary] = ()
        self._phases: Metrics = {}
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds inside to `time/<name>_s`; phases do not overlap."""
        began = time.perf_counter()
        yield
        key = f"time/{name}_s"
        self._phases[key] = self._phases.get(key, 0.0) + time.perf_counter() - began

    def add(self, metrics: Metrics) -> None:
        self.metrics |= metrics

    def samples(self, groups: Sequence[GroupSummary]) -> None:
        """The groups of which some responses are written to samples.jsonl."""
        self.groups = groups

    def close(self) -> Metrics:
        """The flat record; `time/other_s` is what no phase accounts for."""
        step_s = time.perf_counter() - self._began
        times = {**self._phases, "time/other_s": step_s - sum(self._phases.values()), "time/step_s": step_s}
        return {"step": self.step, **{name: float(value) for name, value in (self.metrics | times).items()}}


class RunLog:
    """The run's folder and the terminal.

    Used as a context manager: it draws the curve at the end whatever happened, and the table if all went well. A
    `start`, `warm_step` and `step` give a Record to fill, and write it when their block ends without error.
    """

    def __init__(self, recipe: Recipe, console: Console | None = None) -> None:
        self._recipe = recipe
        self._console = console or _console()
        self.folder = _new_folder(Path(recipe.run.dir), recipe.run.name)
        (self.folder / "recipe.yaml").write_text(recipe.dump_yaml(), encoding="utf-8")
        self._records_file = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._samples_file = (self.folder / "samples.jsonl").open("w", encoding="utf-8")
        self._events = _event_writer(self.folder) if "tensorboard" in recipe.run.trackers else None
        self._history: list[Metrics] = []
        self._began = time.perf_counter()
        self._training_began: float | None = None
        if self.folder.name != recipe.run.name:
            self.say(f"{recipe.run.dir}/{recipe.run.name} exists and is kept")
        self.say(f"this run is written to {self.folder}")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._records_file.close()
        self._samples_file.close()
        if self._events:
            self._events.close()
        if any("eval/accuracy" in record or "reward/mean" in record for record in self._history):
            draw_curve(self._history, self.folder / "curve.png", self._recipe.run.name)
            if error is None:
                self._console.print(self._closing_table())

    def say(self, text: str) -> None:
        """One line to the terminal."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def start(self) -> Iterator[Record]:
        """What is measured before anything is learnt: step 0."""
        record = Record(0)
        yield record
        written = self._write(record)
        self._send(written, 0)
        self._show("before training", written)

    @contextmanager
    def warm_step(self, step: int) -> Iterator[Record]:
        """One supervised step before step 1: recorded as step 0, its `train/` metrics as `warm_start/`.

        Ten lines are shown for the whole phase.
        """
        record, total = Record(0), self._recipe.warm_start.steps
        yield record
        record.metrics = {name.replace("train/", "warm_start/"): value for name, value in record.metrics.items()}
        record.add({"warm_start/step": step})
        written = self._write(record)
        self._send({name: value for name, value in written.items() if name.startswith("warm_start/")}, step)
        self._send({name: value for name, value in written.items() if name.startswith("eval/")}, 0)
        if step == total or step % max(1, total // 10) == 0:
            self._show(f"warm start {step}/{total}", written)

    @contextmanager
    def step(self, step: int) -> Iterator[Record]:
        """One training step, from 1: its record, its samples, its progress line."""
        if self._training_began is None:
            self._training_began = time.perf_counter()
        record, steps = Record(step), self._recipe.run.steps
        yield record
        written = self._write(record)
        self._send(written, step)
        per_step = (time.perf_counter() - self._training_began) / step
        self._show(f"step {step}/{steps}", written, f"ETA {_clock(per_step * (steps - step))}")

    def _write(self, record: Record) -> Metrics:
        metrics = record.close()
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._records_file.write(json.dumps(finite) + "\n")
        self._records_file.flush()
        for sample in pick_samples(record.groups, self._recipe.run.sample_log_count):
            self._samples_file.write(json.dumps({"step": record.step, **sample}, ensure_ascii=False) + "\n")
        self._samples_file.flush()
        self._history.append(metrics)
        return metrics

    def _send(self, metrics: Metrics, step: int) -> None:
        if self._events:
            for name in metrics.keys() - {"step"}:
                self._events.add_scalar(name, metrics[name], step)

    def _show(self, title: str, metrics: Metrics, eta: str = "") -> None:
        """One line: what is learnt, then the seconds of each phase in the order in which they were timed."""
        learnt = [
            f"[{colour}]{label} {form.format(metrics[name])}[/]"
            for name, label, form, colour in _SHOWN
            if name in metrics
        ]
        times = [f"{name[5:-2]} {value:.1f}s" for name, value in metrics.items() if name.startswith("time/")]
        parts = [f"[bold]{title}[/]", *learnt, " ".join(times), f"[cyan]{eta}[/]" if eta else ""]
        self._console.print("  ".join(filter(None, parts)), highlight=False, soft_wrap=True)

    def _closing_table(self) -> Table:
        """First and last value of what is learnt, worst logprob gap, mean seconds of each phase of a step."""
        duration = _clock(time.perf_counter() - self._began)
        table = Table(title=f"{self._recipe.run.name}: {duration}", title_justify="left")
        for column in ("", "first", "last"):
            table.add_column(column, justify="right" if column else "left")
        for name in _TABLE:
            values = [record[name] for record in self._history if name in record]
            if values:
                table.add_row(name, f"{values[0]:.3f}", f"{values[-1]:.3f}")
        gaps = [record[_WORST_GAP] for record in self._history if _WORST_GAP in record]
        if gaps:
            table.add_row(f"{_WORST_GAP}, worst", "", f"{max(gaps):.1e}")
        trained = [record for record in self._history if "reward/mean" in record]
        for name in dict.fromkeys(name for record in trained for name in record if name.startswith("time/")):
            table.add_row(f"{name}, mean", "", f"{sum(record.get(name, 0.0) for record in trained) / len(trained):.2f}")
        table.caption = f"records, samples and curve.png: {self.folder}"
        return table


def pick_samples(groups: Sequence[GroupSummary], count: int) -> list[dict[str, Any]]:
    """The first sample of every group, then the second of every group... until there are `count`."""
    rounds = zip_longest(*([_sample(group, i) for i in range(len(group.responses))] for group in groups))
    return [sample for samples in rounds for sample in samples if sample is not None][:count]


def _sample(group: GroupSummary, index: int) -> dict[str, Any]:
    return {
        "prompt": group.prompt_text,
        "answer": group.answer,
        "response": group.responses[index],
        "reward": float(group.rewards_G[index]),
        "correct": bool(group.correct_G[index]),
        "length": int(group.response_lengths_G[index]),
        "finished": bool(group.finished_G[index]),
        "version": group.version,
    }


def draw_curve(history: Sequence[Metrics], path: Path, title: str) -> None:
    """PNG of mean reward and accuracy by step, with the evaluations as points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", title=title)
    styles = {"reward/mean": "-", "reward/accuracy": "-", "eval/accuracy": "o--"}
    for name, style in styles.items():
        points = [(record["step"], record[name]) for record in history if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    FigureCanvasAgg(figure).print_png(path)


def _new_folder(parent: Path, name: str) -> Path:
    """Make `parent/name`, or name-2, name-3...: an older run is never written over."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _event_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # seconds to import, and an extra of the package

    return SummaryWriter(str(folder / "events"))


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

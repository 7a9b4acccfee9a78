"""A run's folder, terminal and trackers: records, samples, progress lines, the curve and the closing table."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.algos import ALGORITHMS
from megarl.config import Recipe
from megarl.config.yaml_text import options_comment
from megarl.disk import begin, has_ended, take_lock, writing
from megarl.printable import json_line, one_line, printable
from megarl.timeline.recorder import span
from megarl.tracking.appended_files import RunFiles
from megarl.tracking.curve import draw_curve
from megarl.tracking.draining import FAILED, FINISHED, LOCK, NOTHING, DrainRequests, saved
from megarl.tracking.health import Health
from megarl.tracking.loss_table import loss_table, read_losses
from megarl.tracking.metrics import (
    Advantages,
    ShownTokens,
    fault_metrics,
    idle_metrics,
    idle_shares,
    pick_samples,
)
from megarl.tracking.patient_stream import PatientStream
from megarl.tracking.record_lines import read_lines
from megarl.tracking.secrets import without_secrets
from megarl.tracking.step_notes import step_notes
from megarl.tracking.trackers import Trackers
from megarl.tracking.trackers.interface import State, TrackedRun, code_commit
from megarl.types import (
    DiskFault,
    EndedEarly,
    FolderGone,
    GroupSummary,
    Metrics,
    Silence,
    UserError,
    UserErrors,
)
from megarl.types.losses import THE_RUN, Loss, Losses

_PLAIN_WIDTH = 160  # of a log file, where rich would otherwise fold lines at 80
_UNLOCK_S = 5.0
_TABLE = ("eval/accuracy", "reward/mean", "reward/accuracy", "rollout/response_length_mean")
_WORST_DIFF = "rollout/logprob_diff_max"
_SHOWN = (  # metric, its name in the progress line, format, colour
    ("warm_start/loss", "loss", "{:.4f}", "default"),
    ("reward/mean", "reward", "{:.3f}", "green"),
    ("reward/accuracy", "accuracy", "{:.1%}", "green"),
    ("rollout/response_length_mean", "length", "{:.1f}", "default"),
    ("rollout/logprob_diff_mean", "diff", "{:.1e}", "yellow"),
    ("eval/accuracy", "eval", "{:.1%}", "bold green"),
)


class Record:
    """One step while it runs: seconds by phase, metrics, samples."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.metrics: Metrics = {}
        self.groups: Sequence[GroupSummary] = ()
        self.advantages: Advantages = {}
        self.shown_tokens: ShownTokens = {}
        self.scored: list[GroupSummary] = []
        self._phases: Metrics = defaultdict(float)
        self._sampled: tuple[float, int] | None = None
        self._have_own_gpus = False
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds inside to `time/<name>_s`; phases do not overlap."""
        began = time.perf_counter()
        with span(name):
            yield
        self._phases[f"time/{name}_s"] += time.perf_counter() - began

    def add(self, metrics: Metrics) -> None:
        self.metrics |= metrics

    def samples(self, groups: Sequence[GroupSummary]) -> None:
        """Set the groups from which samples.jsonl gets some responses."""
        self.groups = groups

    def learnt_from(self, advantages: Advantages) -> None:
        """Set the advantage of each sample that the step trains on, for samples.jsonl."""
        self.advantages = advantages

    def tokens(self, shown: ShownTokens) -> None:
        """Set the tokens of rows, with their log-probabilities, for samples.jsonl."""
        self.shown_tokens = shown

    def failed(self, groups: Sequence[GroupSummary]) -> None:
        """Add scored groups, whose faults are metrics; failures and refused fields are for the terminal, too."""
        self.scored += groups

    def sampled(self, seconds: float, num_engines: int, *, have_own_gpus: bool) -> None:
        """Set for how long engines had samples in the step's phases of sampling."""
        self._sampled = (seconds, num_engines)
        self._have_own_gpus = have_own_gpus

    def close(self) -> Metrics:
        """The flat record; `time/other_s` is the time outside all phases."""
        step_s = time.perf_counter() - self._began
        if self._sampled:
            seconds, num_engines = self._sampled
            self.add(idle_shares(self._phases, step_s, seconds, self.scored, num_engines))
            if self._have_own_gpus:
                self.add(idle_metrics(self._phases, step_s, seconds))
        self.add(fault_metrics(self.scored))
        other_s = step_s - sum(self._phases.values())
        times = self._phases | {"time/other_s": other_s, "time/step_s": step_s}
        numbers = {name: float(value) for name, value in (self.metrics | times).items()}
        return {"step": self.step, **numbers}


class RunLog:
    """The run's folder and the terminal.

    As a context manager it draws the curve at the end, also after an error, and prints the table without an error.
    `start`, `warm_step` and `step` yield a Record to fill, and write it when their block ends without an error.
    """

    def __init__(
        self,
        recipe: Recipe,
        console: Console | None = None,
        *,
        resume: bool = False,
        step: int = -1,
        can_drain: bool = False,
    ) -> None:
        """resume: write on in the folder of this name, after the records up to `step`; -1: set its records aside.

        can_drain: whether the run hears `megarl drain`, by `drain`.
        """
        self._recipe = recipe
        self._console = console or _console()
        parent = Path(recipe.run.dir)
        name = recipe.run.name
        with writing(parent, f"the run's folder {name}"):
            if resume:
                self.folder = parent / name
            else:
                self.folder = _new_folder(parent, name)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder)
        if resume and step < 0:
            _set_aside(self.folder)
        self._in_force: Mapping[str, Any] | None = None
        self._loss_file = self.folder / "losses.jsonl"
        self.losses = Losses(note=self._note_loss, file=self._loss_file)
        for loss in read_losses(self._loss_file):
            if loss.what == THE_RUN and loss.back_after_s is None:
                self.losses.reopen(loss)
        self._go_on_after(step)
        self.drain = DrainRequests(self.folder) if can_drain else None
        self._began = time.perf_counter()
        if self.folder.name != name:
            self.say(f"{recipe.run.dir}/{name} exists and is kept")
        self.say(
            f"this run {f'goes on after step {step}' if step >= 0 else 'is written'} in {self.folder}"
        )

    def _go_on_after(self, step: int) -> None:
        """Open the files and the trackers, with the records up to `step`."""
        recipe = self._recipe
        self._history = self._begin(step)
        algorithm = ALGORITHMS[recipe.algorithm.name]
        self._health = Health(algorithm.learns_from_rewards).after_all(self._history)
        shown = without_secrets(recipe.model_dump(mode="json"))
        commit = code_commit() if recipe.run.trackers else ""
        tracked = TrackedRun(
            self.folder.name, self.folder, recipe.run.project, shown, commit, first_step=step + 1
        )
        self._trackers = Trackers(recipe.run.trackers, tracked, self.say)
        self._training_began: float | None = None
        self._step = max(step, 0)
        self._first_step = max(step, 0) + 1

    def go_back(self, step: int) -> None:
        """Take back all records after `step`, as a run that is killed and resumes does; -1: set all aside."""
        if all(record["step"] <= step for record in self._history):
            return
        self._close(None)
        self._trackers.close("stopped")
        if step < 0:
            _set_aside(self.folder)
        self._go_on_after(step)
        if self._in_force is not None:
            self.write_options(self._in_force)

    def _begin(self, step: int) -> list[Metrics]:
        """Write the recipe, and open records and samples, cut off after `step`; returns the records that stay."""
        records = self.folder / "metrics.jsonl"
        samples = self.folder / "samples.jsonl"
        errors: list[UserError] = []
        kept_records = read_lines(records, step, errors)
        kept_samples = read_lines(samples, step, errors, only_numbers=False)
        if errors:
            raise UserErrors(errors)
        with writing(self.folder, "recipe.yaml"):
            (self.folder / "recipe.yaml").write_text(self._recipe.dump_yaml(), encoding="utf-8")
        for file, lines in ((records, kept_records), (samples, kept_samples)):
            with writing(self.folder, file.name):
                partial = file.with_suffix(".partial")
                partial.write_bytes(b"".join(raw for raw, _ in lines))
                partial.replace(file)
        timeout_s = self._recipe.run.timeout_s
        self._files = RunFiles(records, samples, self._loss_file, self.say, timeout_s)
        # JSON has null in place of numbers that are not finite.
        return [
            {name: math.nan if value is None else value for name, value in record.items()}
            for _, record in kept_records
        ]

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if _state(error) == "failed":
            self.losses.add(THE_RUN, error)
        self._put_losses()
        try:
            self._close(error)
        finally:
            self._trackers.close(_state(error or sys.exception()))
            if self.drain:
                self.drain.close(_outcome(error or sys.exception()))
            # of a disk that does not answer, the end of this process closes it
            has_ended(begin(self._lock.close), 0.0 if self._files.is_silent else _UNLOCK_S)
        if any("eval/accuracy" in record or "reward/mean" in record for record in self._history):
            self._draw()
            if error is None:
                self._console.print(self._closing_table())
                # a disk that does not answer is not asked again
                if not self._files.is_silent and (losses := read_losses(self._loss_file)):
                    self._console.print(loss_table(losses))

    def _note_loss(self, loss: Loss) -> None:
        """Write a loss at once: Ray may end this process before the next record."""
        self._files.put_losses(self._step, loss.line())
        # the next record tells it
        with suppress(FolderGone):
            self._files.write_losses()

    def _put_losses(self) -> None:
        """Let those that are over be written with the next lines."""
        lines = [loss.line() for loss in self.losses.take()]
        self._files.put_losses(self._step, "".join(lines))

    def _close(self, error: BaseException | None) -> None:
        """Write what waits. Raises the disk's error; of two errors the first is the cause, and the other is said."""
        try:
            self._files.close(is_early=error is not None)
        except (DiskFault, Silence) as fault:
            if error is None:
                raise
            self.say(str(fault))
        except Exception:
            if error is None:
                raise

    def _draw(self) -> None:
        picture = self.folder / "curve.png"
        if self._files.is_silent or self._files.is_gone():
            return
        try:
            with writing(self.folder, picture.name):
                draw_curve(self._history, picture, self._recipe.run.name)
        except Exception as error:  # no reason to fail the run
            with suppress(OSError):
                picture.unlink(missing_ok=True)
            self.say(f"{picture.name} is not drawn: {error}")

    def write_options(self, in_force: Mapping[str, Any]) -> None:
        """Append Megatron's options that the training ranks run with to the saved recipe, as a comment."""
        self._in_force = in_force
        with (
            writing(self.folder, "recipe.yaml"),
            (self.folder / "recipe.yaml").open("a", encoding="utf-8") as file,
        ):
            file.write(options_comment(in_force))

    def say(self, text: str) -> None:
        """One line to the terminal."""
        self._console.print(one_line(text), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def start(self, is_new: bool = True) -> Iterator[Record]:
        """Measurements before training, as step 0. A resumed run has this record already."""
        record = Record(0)
        yield record
        if not is_new:
            return
        written = self._write(record)
        self._trackers.log(0, written)
        self._show("before training", written)

    @contextmanager
    def warm_step(self, step: int) -> Iterator[Record]:
        """One supervised step before step 1: recorded as step 0.

        About ten progress lines are shown for all of these steps.
        """
        record = Record(0)
        total = self._recipe.warm_start.steps
        yield record
        record.add({"warm_start/step": step})
        written = self._write(record)
        # At steps up to 0, which a resumed run does not purge from the trackers.
        for prefix, at in (("warm_start/", step - total), ("eval/", 0)):
            self._trackers.log(
                at, {name: value for name, value in written.items() if name.startswith(prefix)}
            )
        if step == total or step % max(1, total // 10) == 0:
            self._show(f"warm start {step}/{total}", written)

    @contextmanager
    def step(self, step: int) -> Iterator[Record]:
        """One training step, from 1: its record, its samples, its progress line."""
        if self._training_began is None:
            self._training_began = time.perf_counter()
        record = Record(step)
        steps = self._recipe.run.steps
        yield record
        written = self._write(record)
        self._trackers.log(step, written)
        per_step = (time.perf_counter() - self._training_began) / (step - self._first_step + 1)
        self._show(f"step {step}/{steps}", written, f"ETA {_clock(per_step * (steps - step))}")
        self._health, signs = self._health.after(written)
        for sign in signs:
            self.say(sign)

    def _write(self, record: Record) -> Metrics:
        metrics = record.close()
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        count = self._recipe.run.sample_log_count
        samples = pick_samples(record.groups, count, record.advantages, record.shown_tokens)
        lines = [json_line({"step": record.step, **sample}) + "\n" for sample in samples]
        self._step = record.step
        self.losses.is_back(THE_RUN)
        self._put_losses()
        self._files.write(record.step, json.dumps(finite) + "\n", "".join(lines))
        if "eval/accuracy" in metrics:  # the samples of every step are too many for a service
            without_tokens = [
                {name: value for name, value in sample.items() if name != "rows"}
                for sample in samples
            ]
            self._trackers.table(record.step, without_tokens)
        for line in step_notes(record.step, record.scored):
            self.say(line)
        self._history.append(metrics)
        return metrics

    def _show(self, title: str, metrics: Metrics, eta: str = "") -> None:
        """One line: the shown metrics, then the seconds of each phase in the order in which they were timed."""
        shown = [
            f"[{colour}]{label} {form.format(metrics[name])}[/]"
            for name, label, form, colour in _SHOWN
            if name in metrics
        ]
        times = [
            f"{name[5:-2]} {value:.1f}s"
            for name, value in metrics.items()
            if name.startswith("time/")
        ]
        parts = [f"[bold]{title}[/]", *shown, " ".join(times)]
        if eta:
            parts.append(f"[cyan]{eta}[/]")
        self._console.print("  ".join(parts), highlight=False, soft_wrap=True)

    def _closing_table(self) -> Table:
        """First and last value of the main metrics, worst logprob difference, mean seconds of each phase of a step."""
        duration = _clock(time.perf_counter() - self._began)
        table = Table(title=f"{self._recipe.run.name}: {duration}", title_justify="left")
        table.add_column("")
        table.add_column("first", justify="right")
        table.add_column("last", justify="right")
        for name in _TABLE:
            values = [record[name] for record in self._history if name in record]
            if values:
                table.add_row(name, f"{values[0]:.3f}", f"{values[-1]:.3f}")
        diffs = [record[_WORST_DIFF] for record in self._history if _WORST_DIFF in record]
        if diffs:
            table.add_row(f"{_WORST_DIFF}, worst", "", f"{max(diffs):.1e}")
        trained = [record for record in self._history if "reward/mean" in record]
        seconds: Metrics = defaultdict(float)
        for record in trained:
            for name, value in record.items():
                if name.startswith("time/"):
                    seconds[name] += value
        for name, value in seconds.items():
            table.add_row(f"{name}, mean", "", f"{value / len(trained):.2f}")
        table.caption = Text(printable(f"records, samples and curve.png: {self.folder}"))
        return table


def _console() -> Console:
    """Standard output: a terminal, or a log."""
    console = Console()
    if console.is_terminal:
        return console
    log: Any = PatientStream(sys.stdout)
    return Console(width=_PLAIN_WIDTH, file=log)


def _new_folder(parent: Path, name: str) -> Path:
    """Make `parent/name`, or name-2, name-3...: an older run is never overwritten."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / name
    for number in count(2):
        with suppress(FileExistsError):
            folder.mkdir()
            break
        folder = parent / f"{name}-{number}"
    return folder


def _locked(folder: Path) -> IO[str]:
    """The folder's lock file, locked: two processes of one run would overwrite each other's files."""
    lock = (folder / LOCK).open("a", encoding="utf-8")  # truncates nothing, where it is a link
    try:
        is_ours = take_lock(lock, folder.parent, "run.dir")
    except UserError:
        with suppress(OSError):
            folder.rmdir()  # a new one, which is empty
        raise
    if not is_ours:
        hint = "wait until it has ended, or choose another run.name"
        raise UserError("run.name", f"another process writes to {folder}", hint)
    return lock


def _set_aside(folder: Path) -> None:
    """Rename the files of a run without a checkpoint to the next free number, so that nothing is lost."""
    number = 1
    while any(folder.glob(f"*.{number}*")):
        number += 1
    ids = [path for path in folder.glob("*.id") if "." not in path.stem]
    for old in (folder / "metrics.jsonl", folder / "samples.jsonl", folder / "events", *ids):
        if old.exists():
            old.rename(folder / f"{old.stem}.{number}{old.suffix}")


def _state(error: BaseException | None) -> State:
    """How the run ended: SIGUSR1, Ctrl-C and SIGTERM stop it."""
    if error is None:
        return "finished"
    if isinstance(error, EndedEarly | KeyboardInterrupt):
        return "stopped"
    return "failed"


def _outcome(error: BaseException | None) -> str:
    """The same for whoever has asked the run to end after its step."""
    if error is None:
        return FINISHED
    if isinstance(error, EndedEarly):
        return NOTHING if error.step is None else saved(error.step)
    return FAILED


def _clock(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest_s:02d}"
    return f"{minutes}:{rest_s:02d}"

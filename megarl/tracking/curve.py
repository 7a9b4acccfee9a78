"""The picture of a run: reward, accuracy, entropy, response length and gradient norm, the warm start apart from RL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.types import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = tuple[tuple[float, float], ...]
_WARM_STEP = "warm_start/step"
_NUM_COLUMNS = 2  # of panels
_PANEL_INCHES = 5.5, 3.0


@dataclass(frozen=True)
class Line:
    """A metric by training step; warm_name: the metric of the same quantity in the warm start, "" where it has none."""

    name: str
    warm_name: str = ""
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """The lines of one quantity. Those of the warm start have an axis of steps of their own, and the same heights."""

    label: str
    lines: tuple[Line, ...]
    is_logarithmic: bool = False

    def values(self, history: Sequence[Metrics]) -> list[float]:
        """The heights of all its points."""
        points: list[tuple[float, float]] = []
        for line in self.lines:
            points += training_points(history, line) + warm_points(history, line)
        return [value for _, value in points]


PANELS = (
    Panel(
        "reward and accuracy",
        (
            Line("reward/mean"),
            Line("reward/accuracy"),
            Line("eval/accuracy", "eval/accuracy", style="o--"),
        ),
    ),
    Panel(
        "entropy of a token", (Line("train/entropy", "warm_start/entropy"),), is_logarithmic=True
    ),
    Panel("response length in tokens", (Line("rollout/response_length_mean"),)),
    Panel("gradient norm", (Line("train/grad_norm", "warm_start/grad_norm"),), is_logarithmic=True),
)


def last_warm_step(history: Sequence[Metrics]) -> float:
    """The supervised steps that the run began with; 0 without a warm start."""
    return max((record.get(_WARM_STEP, 0.0) for record in history), default=0.0)


def training_points(history: Sequence[Metrics], line: Line) -> Points:
    """(step, value) by training step. Step 0 is the policy before training, which a warm start has as its last step."""
    last = last_warm_step(history)
    kept = [
        record for record in history if record["step"] > 0 or record.get(_WARM_STEP, 0.0) == last
    ]
    return _points(kept, "step", line.name)


def warm_points(history: Sequence[Metrics], line: Line) -> Points:
    """(step of the warm start, value); step 0 is the policy before it."""
    if not line.warm_name or not last_warm_step(history):
        return ()
    numbered = [{_WARM_STEP: 0.0, **record} for record in history if record["step"] == 0]
    return _points(numbered, _WARM_STEP, line.warm_name)


def _points(records: Sequence[Metrics], axis: str, name: str) -> Points:
    return tuple(
        (record[axis], record[name])
        for record in records
        if math.isfinite(record.get(name, math.nan))
    )


def draw_curve(history: Sequence[Metrics], path: Path, title: str) -> None:
    """PNG with a panel for each quantity that the history has."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if panel.values(history)]
    num_columns = max(1, min(_NUM_COLUMNS, len(panels)))
    num_rows = max(1, math.ceil(len(panels) / num_columns))
    width, height = _PANEL_INCHES
    size = (width * num_columns, height * num_rows + 0.4)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    figure.suptitle(title)
    cells = figure.add_gridspec(num_rows, num_columns)
    for number, panel in enumerate(panels):
        cell = cells[divmod(number, num_columns)]
        if last := last_warm_step(history):
            warm_cell, cell = cell.subgridspec(1, 2, width_ratios=(1, 2), wspace=0.0)
            warm_axes = figure.add_subplot(warm_cell, xlabel="warm-start step", ylabel=panel.label)
            _draw_warm_start(warm_axes, panel, history, last)
            axes = figure.add_subplot(cell, xlabel="step", sharey=warm_axes)
            axes.tick_params(axis="y", which="both", left=False, labelleft=False)
        else:
            axes = figure.add_subplot(cell, xlabel="step", ylabel=panel.label)
        _draw_training(axes, panel, history)
        _scale(axes, panel, history)
    FigureCanvasAgg(figure).print_png(path)


def _draw_warm_start(axes: Axes, panel: Panel, history: Sequence[Metrics], last: float) -> None:
    """The supervised steps up to the last, on a grey ground."""
    axes.set_facecolor("0.93")
    for number, line in enumerate(panel.lines):
        _plot(axes, warm_points(history, line), line.style, f"C{number}")
    if not axes.lines:
        centre = (0.5, 0.5)
        axes.annotate(
            "no samples", centre, xycoords="axes fraction", ha="center", va="center", color="0.5"
        )
    axes.set_xlim(-0.06 * last, 1.06 * last)
    axes.grid(alpha=0.3)


def _draw_training(axes: Axes, panel: Panel, history: Sequence[Metrics]) -> None:
    """The training steps. Metrics that are equal in every step, as reward and accuracy may be, are one line."""
    drawn: dict[Points, tuple[str, str, str]] = {}
    for number, line in enumerate(panel.lines):
        points = training_points(history, line)
        if points in drawn:
            name, style, colour = drawn[points]
            drawn[points] = (f"{name} = {line.name}", style, colour)
        elif points:
            drawn[points] = (line.name, line.style, f"C{number}")
    for points, (name, style, colour) in drawn.items():
        _plot(axes, points, style, colour, name)
    axes.grid(alpha=0.3)
    if len(panel.lines) > 1:
        axes.legend(loc="best")


def _scale(axes: Axes, panel: Panel, history: Sequence[Metrics]) -> None:
    """The vertical axis: from 0, or logarithmic, where a 0 is drawn below the smallest positive value."""
    values = panel.values(history)
    if panel.is_logarithmic and min(values) > 0:
        from matplotlib.ticker import LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    elif panel.is_logarithmic:
        smallest = min((value for value in values if value > 0), default=1.0)
        axes.set_yscale("symlog", linthresh=smallest)
    elif min(values) >= 0:
        axes.set_ylim(bottom=0, top=1.08 * max(values) or 1.0)


def _plot(axes: Axes, points: Points, style: str, colour: str, name: str = "") -> None:
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, style, color=colour, label=name or None, markersize=4)

"""Which points of a history the picture has, on which axis, and that it is drawn of them."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from matplotlib.image import imread

from megarl.tracking.curve import PANELS, Line, draw_curve, training_points, warm_points
from megarl.types import Metrics

EVAL = Line("eval/accuracy", "eval/accuracy")
ENTROPY = Line("train/entropy", "warm_start/entropy")
START: list[Metrics] = [{"step": 0, "eval/accuracy": 0.0}]
WARM: list[Metrics] = [
    {"step": 0, "warm_start/step": 1, "warm_start/entropy": 3.0},
    {"step": 0, "warm_start/step": 2, "warm_start/entropy": 2.0, "eval/accuracy": 0.5},
]
TRAINED: list[Metrics] = [
    {"step": 1, "reward/mean": 0.5, "reward/accuracy": 0.5, "train/entropy": 1.0},
    {
        "step": 2,
        "reward/mean": 0.75,
        "reward/accuracy": 0.75,
        "train/entropy": math.nan,
        "eval/accuracy": 0.75,
    },
]


def test_a_warm_start_has_an_axis_of_its_own() -> None:
    """It ends where training begins: its last evaluation is a point of both axes."""
    history = [*START, *WARM, *TRAINED]
    assert warm_points(history, EVAL) == ((0, 0.0), (2, 0.5))
    assert training_points(history, EVAL) == ((0, 0.5), (2, 0.75))
    assert warm_points(history, ENTROPY) == ((1, 3.0), (2, 2.0))
    assert training_points(history, ENTROPY) == ((1, 1.0),), (
        "a number that is not finite is no point"
    )


def test_without_a_warm_start_the_measurement_before_training_is_step_0() -> None:
    history = [*START, *TRAINED]
    assert warm_points(history, EVAL) == warm_points(history, ENTROPY) == ()
    assert training_points(history, EVAL) == ((0, 0.0), (2, 0.75))


def size_of(png: Path) -> tuple[int, int]:
    return struct.unpack(">II", png.read_bytes()[16:24])


@pytest.mark.parametrize(
    ("names", "rows"),
    [(["reward/mean"], 1), (["reward/mean", "train/entropy", "train/grad_norm"], 2)],
)
def test_the_picture_has_a_panel_for_each_quantity_of_the_history(
    tmp_path: Path, names: list[str], rows: int
) -> None:
    draw_curve(
        [{"step": step, **dict.fromkeys(names, 0.5 * step)} for step in (0, 1, 2)],
        tmp_path / "x.png",
        "x",
    )
    width, height = size_of(tmp_path / "x.png")
    assert width == (660 if len(names) == 1 else 1320)
    assert height == 360 * rows + 48


@pytest.mark.parametrize(
    "line", [line for panel in PANELS for line in panel.lines], ids=lambda line: line.name
)
def test_every_line_is_drawn(tmp_path: Path, line: Line) -> None:
    """Another value is another picture, in training and in the warm start, also where a value is 0 or all are."""
    base = [*WARM, *({"step": step, line.name: 0.5} for step in (1, 2, 3))]
    for number, value in enumerate((0.5, 0.0)):
        draw_curve([*base, {"step": 4, line.name: value}], tmp_path / f"{number}.png", "x")
    if line.warm_name:
        draw_curve(
            [*base, {"step": 0, "warm_start/step": 1, line.warm_name: 7.0}],
            tmp_path / "warm.png",
            "x",
        )
    draw_curve([{"step": 1, line.name: 0.0}], tmp_path / "zero.png", "x")
    pictures = [picture.read_bytes() for picture in tmp_path.iterdir()]
    assert len(set(pictures)) == len(pictures)
    assert imread(tmp_path / "zero.png").ndim == 3

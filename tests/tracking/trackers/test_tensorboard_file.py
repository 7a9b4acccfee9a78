"""TensorBoard's file, read back by TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.text.text_plugin import text_array_to_html
from tensorboard.util.tensor_util import make_ndarray

from tests.tracking.trackers.runs import RECIPE, ROWS, track, tracked


def texts(events: Any, tag: str) -> np.ndarray:
    tensor = make_ndarray(events.Tensors(tag)[-1].tensor_proto)
    return np.vectorize(lambda cell: cell.decode())(tensor)


def test_a_run_is_read_back(tmp_path: Path) -> None:
    steps = {-1: {"warm_start/loss": 2.0}, 1: {"reward/mean": 0.5}, 2: {"reward/mean": 0.75}}
    assert track("tensorboard", tracked(tmp_path), steps, table=2) == []
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 0.5),
        (2, 0.75),
    ]
    assert [event.step for event in events.Scalars("warm_start/loss")] == [-1]
    assert yaml.safe_load(str(texts(events, "recipe")[0][0])) == RECIPE
    assert texts(events, "commit").tolist() == [["c0ffee"]]
    table = texts(events, "samples")
    assert table[0].tolist() == list(ROWS[0])
    assert table[1].tolist() == ["1+1=", "2\n\\x1b[2J, or =3", "1.0", "True"]
    assert events.Tensors("samples")[-1].step == 2
    html = str(text_array_to_html(np.vectorize(str.encode)(table), enable_markdown=True))
    assert html.count("<tr>") == 3 and "é|4" in html


def test_what_came_after_the_checkpoint_is_void(tmp_path: Path) -> None:
    track(
        "tensorboard",
        tracked(tmp_path),
        {step: {"reward/mean": 0.1 * step} for step in (1, 2, 3)},
        "failed",
    )
    assert track("tensorboard", tracked(tmp_path, first_step=2), {2: {"reward/mean": 7.0}}) == []
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(event.step, round(event.value, 5)) for event in events.Scalars("reward/mean")] == [
        (1, 0.1),
        (2, 7.0),
    ]

"""A run's training ranks and engine, compared by the command as a user starts it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.numerics.parts import ENGINE, read_side
from tests.end_to_end.conftest import RECIPE

pytestmark = pytest.mark.slow

SMALL = ("placement.gpus=2", "train.pp=1", "--tokens=32")
# the training ranks alone turn pairs of neighbours
ODD_ROPE = "train.megatron.rotary_interleaved=true"


def test_the_culprit_is_on_the_first_line(launch: Callable, tmp_path: Path) -> None:
    """Of a run that has neither samples nor checkpoints yet; the same ranks agree with one that computes as they do."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(RECIPE, run / "recipe.yaml")
    differing = launch(*SMALL, ODD_ROPE, verb="compare-layers", recipe=run)
    assert differing.finish(300) == 3, differing.out + differing.err
    assert differing.out.startswith(
        "layer 0, query after rope differs: training ranks 0, 1 from engine ranks 0, 1; by "
    )
    rows = [line.split() for line in differing.out.splitlines() if line.endswith(" differs")]
    assert rows[0][:4] == ["0", "query", "after", "rope"]
    assert differing.leftovers() == []
    ranks = {part.rank for part in read_side(run / "layers", ENGINE)}
    assert ranks == {0, 1}

    agreeing = launch(*SMALL, ODD_ROPE, "--against=rank", verb="compare-layers", recipe=run)
    agreeing.ends_well(300)
    assert agreeing.out.startswith("all operations agree (55)\n")
    assert not read_side(run / "layers", ENGINE), "files of an earlier comparison"

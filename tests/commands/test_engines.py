"""What `megarl engines` asks a run for, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megarl.cli import app
from megarl.tracking.engine_requests import requested_engines
from megarl.tracking.run_log import RunLog
from tests.tracking.test_run_log import UNTRACKED, recipe_in

SPLIT = ("placement.gpus=5", "placement.train_gpus=2", "placement.first_engine_gpu=2")
MOST = "rollout.engine.max_count=3"


def run_log(folder: Path, *overrides: str) -> RunLog:
    recipe = recipe_in(folder, UNTRACKED, *overrides)
    return RunLog(recipe, Console(quiet=True), can_drain=True)


def asked(folder: Path, count: int) -> tuple[int, str]:
    """The exit code, and the lines."""
    result = CliRunner().invoke(app, ["engines", str(folder), "--count", str(count)])
    return result.exit_code, result.output


def test_a_run_is_asked_again_and_again(tmp_path: Path) -> None:
    with run_log(tmp_path, *SPLIT, MOST) as log:
        for count, words in ((3, "3 engines"), (1, "1 engine")):
            code, line = asked(log.folder, count)
            assert code == 0 and line.endswith(f"is asked for {words}, from its next step on\n")
            assert requested_engines(log.folder) == count


@pytest.mark.parametrize(
    ("overrides", "count", "told"),
    [
        ((*SPLIT, MOST), 0, "--count: 0 engines, and the run has GPUs for 1 to 3 (rollout."),
        ((*SPLIT, MOST), 4, "--count: 4 engines, and the run has GPUs for 1 to 3 (rollout."),
        (SPLIT, 2, "rollout.engine.max_count: is not set in the run's recipe, so that it keeps its 1"),
        ((), 1, "1 engines, which share GPUs with training ranks; give the engines GPUs of their own"),
        (("rollout.engine.external=[a:1]",), 1, "rollout.engine.external: the run samples through servers"),
    ],
    ids=["none", "too many", "no maximum", "colocated", "external"],
)  # fmt: skip
def test_what_a_run_cannot_have_is_refused_in_a_line(
    tmp_path: Path, overrides: tuple[str, ...], count: int, told: str
) -> None:
    with run_log(tmp_path, "rollout.engine.count=1", *overrides) as log:
        code, output = asked(log.folder, count)
        assert code == 2 and told in output and output.count("\n") == 1
        assert requested_engines(log.folder) is None


def test_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    with run_log(tmp_path, *SPLIT, MOST) as log:
        pass
    code, output = asked(log.folder, 2)
    assert code == 2 and output.startswith(f"{log.folder}: no run is alive there; name the folder")
    assert requested_engines(log.folder) is None

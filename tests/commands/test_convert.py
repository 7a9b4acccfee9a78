"""Which checkpoint is converted, and what is told when there is none."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from megarl import cli
from megarl.checkpoints import peft
from megarl.checkpoints.snapshots import Snapshots
from megarl.commands import convert
from megarl.commands.convert import find_snapshot
from megarl.config.loading import load_recipe
from megarl.controller.resuming import FOLDER, Progress
from megarl.model.adapter_config import adapter_keys
from megarl.model.hf_config import model_shape
from megarl.placement.roles import resolve
from megarl.preflight import checks_by_command
from megarl.types import UserErrors
from tests.test_cli import QUICKSTART


@pytest.fixture
def made(tiny_model: Path, tmp_path: Path) -> Any:
    """A run's folder with checkpoints of steps 4 and 8, and its recipe."""
    snapshots = Snapshots(tmp_path / FOLDER, pytest.fail)
    shape = json.loads(json.dumps(asdict(model_shape(tiny_model))))
    for step in (4, 8):
        progress = Progress(
            step,
            version=2,
            attempts=3,
            shape=shape,
            prompts_taken=9,
            data="",
            seed=7,
            trains_mtp=False,
            critic=None,
            buffer={},
            sampling={},
        )
        partial = snapshots.begin(step)
        (partial / "rank-0.pt").write_bytes(b"weights")
        snapshots.commit(partial, asdict(progress), {}, keep=2)
    return load_recipe(QUICKSTART, [f"model.path={tiny_model}"]), tmp_path


@pytest.mark.slow
def test_the_newest_or_the_one_that_is_asked_for(made: Any) -> None:
    recipe, run = made
    assert find_snapshot(recipe, run, run / "out", None, pytest.fail).step == 8
    assert find_snapshot(recipe, run, run / "out", 4, pytest.fail).step == 4


@pytest.mark.slow
@pytest.mark.parametrize(("step", "is_damaged"), [(5, False), (8, True)])
def test_one_that_is_not_there_or_damaged(made: Any, step: int, is_damaged: bool) -> None:
    recipe, run = made
    if is_damaged:
        (run / FOLDER / "step-000008" / "rank-0.pt").write_bytes(b"Weights")
    messages: list[str] = []
    (run / "out").mkdir()
    with pytest.raises(UserErrors) as caught:
        find_snapshot(recipe, run, run / "out", step, messages.append)
    assert str(caught.value).splitlines() == [
        f"{run}/out: it is there already; name another folder",
        f"{run / FOLDER}: there is no whole checkpoint of step {step}; leave --step out for the newest",
    ]
    assert len(messages) == is_damaged


def converted(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["convert", *map(str, arguments)])


def test_a_folder_without_a_run() -> None:
    result = converted("nowhere", "out")
    assert result.exit_code == 2
    assert result.stderr == (
        "nowhere: has no recipe.yaml; name the folder of a run, as runs/quickstart\n"
    )


@pytest.mark.parametrize("flags", [[], ["--fp8"]])
def test_the_format_is_handed_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    asked: list[tuple[Path, bool]] = []
    trainers = SimpleNamespace(
        load_weights=lambda folder: None, export=lambda out, fp8: asked.append((out, fp8))
    )
    monkeypatch.setattr(convert, "Cluster", lambda *_: nullcontext())
    monkeypatch.setattr(convert, "training_fleet", lambda *_: SimpleNamespace(trainers=trainers))
    monkeypatch.setattr(convert, "find_snapshot", lambda *_: SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr(checks_by_command, "check_convert", lambda recipe: None)
    (tmp_path / "recipe.yaml").write_text(QUICKSTART.read_text())
    result = converted(tmp_path, tmp_path / "out", *flags)
    assert result.exit_code == 0, result.output
    assert asked == [(tmp_path / "out", bool(flags))]


@pytest.mark.parametrize(
    ("line", "flags", "told"),
    [
        (
            "",
            ["--adapter"],
            "--adapter: the run's recipe has no lora; leave it out to write the whole model",
        ),
        (
            "lora: {rank: 4}",
            ["--adapter", "--fp8"],
            "--fp8: adapters are written in model.dtype; leave it out, or --adapter to write the merged model in fp8",
        ),
    ],
)
def test_adapters_alone_are_refused_where_there_are_none(
    tmp_path: Path, line: str, flags: list[str], told: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{QUICKSTART.read_text()}\n{line}\n")
    result = converted(tmp_path, tmp_path / "out", *flags)
    assert (result.exit_code, result.output.strip()) == (2, told)


@pytest.mark.slow
def test_adapters_are_written_with_the_ranks_that_the_recipe_means(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 experts for a token each has half the rank, and the folder fits the recipe that it came from."""
    recipe = load_recipe(QUICKSTART, [f"model.path={tiny_model}", "lora.rank=8"])
    shape = model_shape(tiny_model)
    size = resolve(recipe).policy.lora
    assert size and (size.rank, size.expert_rank) == (8, 4)
    factors = {name: torch.zeros(extent) for name, extent in peft._sizes(shape, size).items()}
    monkeypatch.setattr("megarl.parallel.dist_checkpoint.read_factors", lambda folder: factors)
    snapshot: Any = SimpleNamespace(folder=tmp_path)
    convert.convert_adapter(recipe, snapshot, tmp_path / "out", lambda line: None)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    # gate and up as one layer: twice
    assert (config["r"], {*config["rank_pattern"].values()}) == (8, {4, 2 * 4})
    assert adapter_keys(str(tmp_path / "out"))["experts"] == 4
    assert peft.check(str(tmp_path / "out"), shape, size) == []


def test_the_adapters_that_a_run_began_with_are_not_asked_for(tiny_model: Path) -> None:
    """The checkpoint has them as they are now; the folder may be gone."""
    recipe = load_recipe(QUICKSTART, [f"model.path={tiny_model}", "lora.rank=4", "lora.path=gone"])
    checks_by_command.check_convert(recipe)
    lora = resolve(recipe, learns=False).policy.recipe.lora
    assert lora and lora.rank == 4 and lora.path is None


@pytest.mark.slow
def test_a_run_without_checkpoints(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(QUICKSTART, [f"model.path={tiny_model}"])
    (tmp_path / "recipe.yaml").write_text(recipe.dump_yaml())
    monkeypatch.chdir(tmp_path)
    result = converted(".", "no/out", "train.tp=3")
    assert result.exit_code == 2
    assert result.stderr.startswith("train.tp: 3 does not divide the attention heads")
    result = converted(".", "no/out")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"no/out: {tmp_path}/no is not a folder; make it, or name another folder",
        "checkpoints: there is no whole checkpoint; name another run",
    ]

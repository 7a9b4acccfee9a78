"""Which tokens are compared, what a model's choices of experts are, and how ranks are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megarl import cli
from megarl.commands.compare_layers import (
    chosen_experts,
    engine_side,
    find_checkpoint,
    one_rank,
    training_side,
)
from megarl.commands.compared_tokens import compared_tokens
from megarl.config.loading import load_recipe
from megarl.model.hf_config import model_shape
from megarl.numerics import operations
from megarl.numerics.parts import OutputPart
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import resolve
from megarl.placement.train_layout import TrainLayout
from megarl.samples.parquet import writing
from megarl.types import UserError
from tests.samples.test_parquet import group
from tests.test_cli import QUICKSTART


@pytest.fixture
def asked(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    recipe = load_recipe(QUICKSTART, [f"model.path={tiny_model}"])
    return {
        "recipe": recipe,
        "run": tmp_path,
        "samples": None,
        "step": None,
        "weights_step": 2,
        "num_tokens": 32,
        "vocab_size": 40,
        "say": lambda line: None,
    }


def test_tokens_are_those_of_the_steps_samples(asked: dict[str, Any], tmp_path: Path) -> None:
    """Of the checkpoint's step or the newest before it, of model.path the first; none has more than a quarter."""
    lines = [
        {"step": step, "prompt": f"{step}+{step}=", "response": "1234567890"} for step in (2, 4, 4)
    ]
    text = "\n".join([*map(json.dumps, lines), "{"])
    (tmp_path / "samples.jsonl").write_text(text)
    newest = compared_tokens(**{**asked, "weights_step": 5})
    assert [len(token_ids_T) for token_ids_T in newest] == [8, 8]
    for weights_step in (0, 2, 3):
        (of_first,) = compared_tokens(**{**asked, "weights_step": weights_step})
        assert of_first.tolist() != newest[0].tolist() == newest[1].tolist()


def test_samples_of_later_steps_alone_are_not_taken(asked: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 10, "prompt": "1+1=", "response": "2"}')
    lines: list[object] = []
    found = compared_tokens(**{**asked, "weights_step": 5, "say": lines.append})
    assert [len(token_ids_T) for token_ids_T in found] == [8] * 4
    assert "random tokens, as samples.jsonl has none of step 5" in str(lines)


def test_tokens_of_a_file_are_those_that_were_sampled(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "samples.parquet"
    groups = [group(number) for number in range(3)]
    with writing(path, 40, 1.0) as file:
        file.write(groups)
    found = compared_tokens(**{**asked, "samples": path, "num_tokens": 1000})
    for token_ids_T, of_group in zip(found, groups, strict=True):
        row = of_group.samples[0].rows[0]
        assert token_ids_T.tolist() == [*row.prompt_ids, *row.response_ids_T]
    with pytest.raises(UserError, match="has 1 steps, and none 2"):
        compared_tokens(**{**asked, "samples": path, "step": 2})


def test_a_run_without_samples_is_compared_by_random_tokens(asked: dict[str, Any]) -> None:
    found = compared_tokens(**asked)
    assert [len(token_ids_T) for token_ids_T in found] == [8] * 4
    assert max(map(max, found)) < 40
    assert [each.tolist() for each in compared_tokens(**asked)] == [each.tolist() for each in found]


def test_choices_are_put_together_from_parts(tiny_model: Path) -> None:
    shape = model_shape(tiny_model)
    chosen = np.zeros((3, shape.num_experts), np.float32)
    chosen[[0, 0, 1, 1, 2, 2], [1, 4, 0, 7, 2, 3]] = 1
    parts = [
        OutputPart(layer, operations.ROUTER_CHOICES, 0, np.array(tokens), chosen[tokens])
        for layer, tokens in ((0, [0, 1, 2]), (1, [0]), (1, [2]), (2, [0, 1]), (3, [1]))
    ]
    experts_TMK = chosen_experts(parts, shape, 3)
    assert experts_TMK is not None
    assert experts_TMK[:, 0].tolist() == [[1, 4], [0, 7], [2, 3]]
    assert experts_TMK[:, 1].tolist() == [[1, 4], [-1, -1], [2, 3]]
    assert chosen_experts([], shape, 3) is None


def test_ranks_that_hold_an_expert(tiny_model: Path) -> None:
    """Of eight: of a training world by stage and part, of an engine by part."""
    shape = model_shape(tiny_model)
    training = training_side(TrainLayout(8, 2, 2, 2, vpp=2), shape)
    assert training.experts_on(0, 7) == (1, 3)
    assert training.experts_on(1, 0) == (4, 6)
    assert training.named([5]) == "training rank 5 (tp 1, dp 0, pp 1, ep 1)"
    assert training.named([0, 5]) == "training ranks 0, 5"
    engine = engine_side(EngineLayout(1, 4, 2), shape)
    assert engine.experts_on(0, 3) == (0, 1)
    assert engine.experts_on(3, 4) == (2, 3)
    assert engine.named([2]) == "engine rank 2"


def test_the_reference_is_one_rank_of_any_recipe(tiny_model: Path) -> None:
    keys = ["train.vpp=2", "train.etp=1", "placement.gpus=8"]
    recipe = one_rank(load_recipe(QUICKSTART, [f"model.path={tiny_model}", *keys]))
    roles = resolve(recipe, learns=False)
    assert roles.num_training_slots == roles.policy.layout.world_size == 1
    assert roles.policy.layout_errors() == []


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["compare-layers", str(tmp_path)])
    assert done.exit_code == 2
    assert "has no recipe.yaml; name the folder of a run" in done.output


def test_a_step_without_checkpoint_is_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    lines: list[object] = []
    assert find_checkpoint(asked["recipe"], tmp_path, 0, lines.append) is None
    assert not lines
    assert find_checkpoint(asked["recipe"], tmp_path, None, lines.append) is None
    assert lines == ["the run has no checkpoint: the weights are those of model.path"]
    with pytest.raises(UserError, match="has no whole checkpoint of step 3; leave it out"):
        find_checkpoint(asked["recipe"], tmp_path, 3, lines.append)

"""The keys of a recipe beside their defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.algos import ALGORITHMS
from megarl.report.recipe_rows import RecipeRow, recipe_rows
from tests.tracking.test_run_log import recipe_in


def keys_of(folder: Path, *overrides: str) -> dict[str, RecipeRow]:
    return {row.name: row for row in recipe_rows(recipe_in(folder, *overrides))}


def test_each_key_of_the_recipe_is_there_once(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    names = [row.name for row in recipe_rows(recipe)]
    assert len(names) == len(set(names))
    assert {"run.name", "train.lr", "rollout.engine.count", "critic.ranks.tp"} <= set(names)
    assert {name.split(".")[0] for name in names} == set(type(recipe).model_fields)


def test_a_key_differs_where_its_value_is_not_the_default(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "checkpoint.keep=7")
    assert keys["checkpoint.keep"] == RecipeRow("checkpoint.keep", "7", "3")
    assert keys["checkpoint.keep"].differs
    assert keys["run.steps"].default is None
    assert not keys["reshard.verify"].differs
    assert keys["data.eval"].value.startswith('{"arith": {"path": ')


def test_hyperparameters_have_the_values_of_the_row(tmp_path: Path) -> None:
    """As `megarl explain KEY RECIPE` shows them; what the recipe sets to another value differs."""
    keys = keys_of(tmp_path, "algorithm={name: dapo, clip_low: 0.1}")
    row = ALGORITHMS["dapo"].hyperparameters
    assert keys["algorithm.clip_high"] == RecipeRow("algorithm.clip_high", "0.28", "0.28")
    assert keys["algorithm.clip_low"] == RecipeRow("algorithm.clip_low", "0.1", f"{row.clip_low}")
    assert keys["algorithm.clip_low"].differs and not keys["algorithm.clip_high"].differs
    assert keys["algorithm.name"].value == '"dapo"'
    unknown = keys_of(tmp_path, "algorithm={name: nothing}")
    assert unknown["algorithm.clip_high"] == RecipeRow("algorithm.clip_high", "null", "null")


def test_a_branch_that_is_not_there_by_default_has_keys_of_its_own(tmp_path: Path) -> None:
    assert keys_of(tmp_path)["lora"] == RecipeRow("lora", "null", "null")
    keys = keys_of(tmp_path, "lora={rank: 8}")
    assert keys["lora.rank"].value == "8"
    assert "lora" not in keys


def test_secrets_are_withheld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdefghij")
    arguments = "{url: 'http://me:x@host/', password: p4ss, note: abcdefghij, n: [{token: t0k}]}"
    keys = keys_of(tmp_path, f"reward.arguments={arguments}")
    value = keys["reward.arguments"].value
    assert not any(secret in value for secret in ("me:x", "p4ss", "abcdefghij", "t0k"))
    assert value.count("(withheld)") == 4

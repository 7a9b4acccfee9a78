"""The keys of a recipe beside their defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.report.recipe_keys import RecipeKey, recipe_keys
from tests.tracking.test_run_log import recipe_in


def keys_of(folder: Path, *overrides: str) -> dict[str, RecipeKey]:
    return {key.name: key for key in recipe_keys(recipe_in(folder, *overrides))}


def test_each_key_of_the_recipe_is_there_once(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    names = [key.name for key in recipe_keys(recipe)]
    assert len(names) == len(set(names))
    assert {"run.name", "train.lr", "rollout.engine.count", "critic.ranks.tp"} <= set(names)
    assert {name.split(".")[0] for name in names} == set(type(recipe).model_fields)


def test_a_key_differs_where_its_value_is_not_the_default(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "checkpoint.keep=7")
    assert keys["checkpoint.keep"] == RecipeKey("checkpoint.keep", "7", "3")
    assert keys["checkpoint.keep"].differs
    assert keys["run.steps"].default is None
    assert not keys["reshard.verify"].differs
    assert keys["data.eval"].value.startswith('{"arith": {"path": ')


def test_a_branch_that_is_not_there_by_default_has_keys_of_its_own(tmp_path: Path) -> None:
    assert keys_of(tmp_path)["lora"] == RecipeKey("lora", "null", "null")
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

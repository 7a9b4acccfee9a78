"""The schema for editors takes what megarl takes, and refuses what it refuses, key by key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.config.schema import hardware_schema, overlay_schema, recipe_schema
from megarl.types import UserErrors

RECIPES = Path(__file__).parents[2] / "recipes"
WHOLE = Draft202012Validator(recipe_schema())
HARDWARE = Draft202012Validator(hardware_schema())
OVERLAY = Draft202012Validator(overlay_schema())


def errors(validator: Draft202012Validator, value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def written(path: Path) -> Any:
    """A file as an editor's YAML 1.2 reads it: 1e-6 is a number there, and text to PyYAML."""
    text = re.sub(r"(?<=[ {\[,:])(\d+)(e-?\d+)\b", r"\1.0\2", path.read_text(encoding="utf-8"))
    return yaml.safe_load(re.sub(r"([\d.]e)(\d)", r"\1+\2", text))


def test_the_schemas_themselves_are_valid() -> None:
    Draft202012Validator.check_schema(recipe_schema())
    Draft202012Validator.check_schema(overlay_schema())


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_taken(path: Path) -> None:
    assert errors(WHOLE, written(path)) == []


@pytest.mark.parametrize(
    "path", sorted((RECIPES / "overlays").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_overlay_is_taken(path: Path) -> None:
    assert errors(OVERLAY, written(path)) == []


@pytest.mark.parametrize(
    "path", sorted((RECIPES / "hardware").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_hardware_file_is_taken_and_its_faults_are_not(path: Path) -> None:
    figures = written(path)
    assert errors(HARDWARE, figures) == []
    (unknown,) = errors(HARDWARE, figures | {"nvlink": 1.0})
    assert "'nvlink' was unexpected" in unknown
    assert errors(HARDWARE, figures | {"compute_share": 1.5})
    assert errors(HARDWARE, figures | {"deepep_token_s": {"8": 1e-6}}) == []
    del figures["host_bytes"]
    assert errors(HARDWARE, figures) == ["$: 'host_bytes' is a required property"]


def test_an_overlay_is_no_recipe() -> None:
    overlay = written(RECIPES / "overlays" / "smoke.yaml")
    assert any("is a required property" in error for error in errors(WHOLE, overlay))


QUICKSTART = RECIPES / "quickstart.yaml"
WRONG: list[tuple[str, Any]] = [
    ("train.tpp", 2),
    ("run.nam", "x"),
    ("rollot", {}),
    ("train.lr", 11),
    ("train.lr", "fast"),
    ("train.tp", 0),
    ("train.tp", 1.5),
    ("train.cp", "always"),
    ("model.dtype", "fp8"),
    ("run.name", "a b"),
    ("run.timeout_s", 1),
    ("run.trackers", ["aim"]),
    ("run.trackers", "wandb"),
    ("evaluation.temperature", 0.001),
    ("rollout.temperature", 0),
    ("rollout.engine.external", ["localhost"]),
    ("rollout.engine.draft", 4),
    ("algorithm.clip_low", 0),
    ("algorithm.dual_clip", 1),
    ("checkpoint.asynchronous", "yes"),
    ("data.train", 3),
    ("data.train", [{"path": "a.jsonl", "share": 1}]),
    ("data.eval", {"with space": "a.jsonl"}),
    ("evaluation.sets", {"math": {"sample": 1}}),
    ("train.recompute", {"attention": 1}),
    ("train.megatron", 1),
    ("reward.arguments", None),
]
MISSING: list[tuple[str, Any]] = [
    ("data.eval", {"math": {"prompt": "p"}}),
    ("episode", {"max_turns": 3}),
    ("reward.by_source", {"mmlu": {"arguments": {}}}),
]
RIGHT: list[tuple[str, Any]] = [
    ("train.cp", "auto"),
    ("train.lr", 1),
    ("evaluation.temperature", 0),
    ("data.train", "a.jsonl"),
    ("data.train", [{"path": "a.jsonl", "weight": 2}, "b.jsonl"]),
    ("data.eval", {"math": {"path": "m.jsonl", "prompt": "p"}, "aime": "a.parquet"}),
    ("checkpoint.every", None),
    ("episode", {"tools": ["my_tools:price"], "max_tokens": 64}),
    ("lora", {"experts": None}),
    ("train.megatron", {"recompute_method": "uniform", "n": [1]}),
    ("train.recompute", {"moe": 2}),
    ("rollout.engine.external", ["10.0.0.7:30000", "[::1]:30000"]),
    ("algorithm.whiten", None),
]


def laid_over(path: str, value: Any) -> tuple[Any, Any]:
    """The quickstart's keys with another value, and the overlay of this value alone."""
    tree = written(QUICKSTART)
    overlay: dict[str, Any] = {}
    *sections, name = path.split(".")
    branch = tree
    inner = overlay
    for section in sections:
        branch = branch.setdefault(section, {})
        inner = inner.setdefault(section, {})
    branch[name] = value
    inner[name] = value
    return tree, overlay


@pytest.mark.parametrize(("path", "value"), WRONG + MISSING)
def test_what_megarl_refuses_is_refused(path: str, value: Any, tmp_path: Path) -> None:
    tree, overlay = laid_over(path, value)
    file = tmp_path / "overlay.yaml"
    file.write_text(yaml.safe_dump(overlay))
    with pytest.raises(UserErrors):
        load_recipe(QUICKSTART, [str(file)])
    assert errors(WHOLE, tree)
    is_missing = (path, value) in MISSING
    assert bool(errors(OVERLAY, overlay)) != is_missing, "an overlay need not have every key"


@pytest.mark.parametrize(("path", "value"), RIGHT)
def test_what_megarl_takes_is_taken(path: str, value: Any) -> None:
    tree, overlay = laid_over(path, value)
    Recipe.model_validate(tree)
    assert errors(WHOLE, tree) == [] and errors(OVERLAY, overlay) == []


def test_null_takes_a_named_entry_out_in_overlays_alone() -> None:
    for overlay in ({"data": {"eval": {"arith": None}}}, {"evaluation": {"sets": None}}):
        assert errors(OVERLAY, overlay) == []
        assert errors(WHOLE, {**written(QUICKSTART), **overlay})
    assert errors(OVERLAY, {"train": {"recompute": None}})


def test_each_key_says_its_meaning_and_no_title() -> None:
    schema = recipe_schema()
    for name, definition in schema["$defs"].items():
        for key, node in definition.get("properties", {}).items():
            assert node.get("description") or "$ref" in node, f"{name}.{key}"
            assert "title" not in node

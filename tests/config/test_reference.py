"""Every key has a meaning, the page has every key, and its types, bounds and defaults are those of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

import pytest
from pydantic import BaseModel

from megarl.algos import ALGORITHMS
from megarl.config import AlgorithmConfig, Recipe
from megarl.config.fields import Branch, attribute_docstrings
from megarl.config.reference import find_key, keys_of, optional_branch, recipe_keys, reference_page
from megarl.config.unread import UNREAD_WHERE, why_unread
from megarl.types import Hyperparameters, UserError

_PARTS = {tuple: ".N", Mapping: ".NAME"}
PAGE = Path(__file__).parents[2] / "docs" / "recipe_reference.md"


def test_the_page_is_the_one_that_the_classes_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page(), (
        "run megarl explain --reference > docs/recipe_reference.md"
    )


def test_every_key_and_every_branch_has_a_meaning() -> None:
    assert [path for path, key in recipe_keys().items() if not key.meaning] == []
    ends = [path for path, key in recipe_keys().items() if not key.meaning.endswith((".", "?"))]
    assert ends == []


def test_no_key_of_the_classes_is_missing() -> None:
    """By a walk over the classes, and not over the schema."""

    def walk(kind: type[BaseModel], prefix: str) -> list[str]:
        paths = []
        for name, field in kind.model_fields.items():
            paths.append(prefix + name)
            for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(inner, type) and issubclass(inner, Branch):
                    origin: Any = get_origin(field.annotation)
                    part = _PARTS.get(origin, "")
                    paths += [prefix + name + part] if part else []
                    paths += walk(inner, f"{prefix}{name}{part}.")
        return paths

    assert sorted(recipe_keys()) == sorted(walk(Recipe, ""))


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("train.lr", "number from 1e-15 to 10", None),
        ("run.steps", "whole number from 1 to 2^31 - 1", None),
        ("train.cp", "whole number from 1 to 65536, or auto", "1"),
        ("train.lr_schedule", "constant, linear or cosine", "constant"),
        ("checkpoint.every", "whole number from 1 to 2^31 - 1, or null", "null"),
        ("checkpoint.asynchronous", "true or false", "true"),
        ("algorithm.dual_clip", "number above 1, to 1e+09, or null", "null"),
        ("algorithm.clip_high", "number from 1e-09 to 1e+09, or null", "0.2"),
        ("evaluation.temperature", "0, or number from 0.01 to 100", "0"),
        ("run.timeout_s", "number from 5 to 604800", "600"),
        ("placement.hardware", "path, or null", "null"),
        ("run.trackers", "list of: tensorboard, wandb or mlflow", "[]"),
        ("data.eval", "mapping of NAME to a branch", "{}"),
    ],
)
def test_types_and_defaults_in_words(path: str, kind: str, default: str | None) -> None:
    key = recipe_keys()[path]
    assert (key.kind, key.default) == (kind, default)


def test_the_row_of_an_algorithm_decides_about_the_hyperparameters_alone() -> None:
    of_row = {key.name for key in keys_of("algorithm") if key.of_row}
    assert of_row == set(AlgorithmConfig.model_fields) - {"name"}
    assert recipe_keys()["algorithm.clip_high"].default == f"{Hyperparameters().clip_high:g}"
    assert ALGORITHMS["dapo"].hyperparameters.clip_high != Hyperparameters().clip_high


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("train", "train"),
        ("data.eval.aime.path", "data.eval.NAME.path"),
        ("data.train.0.weight", "data.train.N.weight"),
        ("evaluation.sets.aime", "evaluation.sets.NAME"),
        ("train.megatron.recompute_method", "train.megatron"),
        ("reward.arguments.wrong", "reward.arguments"),
    ],
)
def test_a_key_is_found_as_recipes_write_it(written: str, found: str) -> None:
    assert find_key(written).path == found


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("train.lrr", "did you mean train.lr?"),
        ("tran.lr", "did you mean train.lr?"),
        ("lr", "did you mean warm_start.lr or train.lr or critic.lr?"),
        ("train.steps", "did you mean run.steps or run.timeline.steps or warm_start.steps?"),
        ("train.lr.x", "did you mean"),
        ("", "the keys there are run, model, data"),
        ("x" * 300, "the keys there are run, model, data"),
    ],
)
def test_an_unknown_key_is_one_line_with_the_nearest(written: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        find_key(written)
    assert caught.value.hint.startswith(hint) and "\n" not in str(caught.value)


def test_a_required_key_says_of_which_branch() -> None:
    keys = recipe_keys()
    assert optional_branch(keys["train.lr"]) is None
    assert optional_branch(keys["episode.max_tokens"]) == "episode"
    assert optional_branch(keys["data.eval.NAME.path"]) == "data.eval.NAME"


def test_when_nothing_reads_a_key() -> None:
    assert why_unread("train.lr") == []
    assert why_unread("critic") == ["the algorithm has no critic"]
    assert why_unread("rollout.top_p") == ["the algorithm learns from the data's answers"]
    assert why_unread("critic.lr_end") == [
        "the algorithm has no critic",
        "the critic's lr_schedule is constant",
    ]
    assert why_unread("warm_start.lr") == ["warm_start.steps is not set"]
    assert why_unread("reward_model.weight") == [
        "neither reward_model.path nor reward_model.adapters is set"
    ]
    for switch in ("warm_start.steps", "reward_model.path", "reward_model.adapters"):
        assert why_unread(switch) == [], "the switch itself is read"
    assert set(UNREAD_WHERE) <= set(recipe_keys())


class Documented:
    """A class whose names have docstrings, or none."""

    a: int = 1
    """What a is,
    in two lines."""
    b: int = 2
    c: int = 3
    """What c is."""


def test_a_class_without_source_has_no_strings() -> None:
    """As where only compiled modules are installed."""
    scope: dict[str, Any] = {"__name__": "nowhere"}
    exec("class Sourceless:\n    a: int = 1\n    'What a is.'\n", scope)
    assert attribute_docstrings(scope["Sourceless"]) == {}


def test_the_strings_below_names_are_read() -> None:
    assert attribute_docstrings(Documented) == {"a": "What a is,\nin two lines.", "c": "What c is."}

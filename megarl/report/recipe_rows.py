"""The rows of the page's table of a recipe: keys with the values of its run, and whether these are the defaults.

`megarl.config.reference` has the keys of all recipes; here are those that one recipe has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from pydantic_core import PydanticUndefined

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.config import Recipe
from megarl.config.fields import Branch
from megarl.printable import plain_value
from megarl.tracking.secrets import without_secrets


@dataclass(frozen=True)
class RecipeRow:
    """A key, a.b.c, its value and its default as JSON. default: None where every recipe must set the key.

    Of hyperparameters the default is that of the algorithm's row.
    """

    name: str
    value: str
    default: str | None

    @property
    def differs(self) -> bool:
        return self.value != self.default


def recipe_rows(recipe: Recipe) -> list[RecipeRow]:
    """All keys of a recipe in the order of its classes, without secrets."""
    hyperparameters = _hyperparameter_rows(recipe)
    return [hyperparameters.get(row.name, row) for row in _rows(recipe, None, "")]


def _hyperparameter_rows(recipe: Recipe) -> dict[str, RecipeRow]:
    """The rows of the keys that a recipe may leave to its algorithm, by key; empty for an unknown algorithm."""
    algorithm = recipe.algorithm.name
    if algorithm not in ALGORITHMS:
        return {}
    defaults = ALGORITHMS[algorithm].hyperparameters
    values = hyperparameters_of(algorithm, recipe.algorithm)
    rows = {}
    for field in fields(defaults):
        value = _shown(getattr(values, field.name), field.name)
        default = _shown(getattr(defaults, field.name), field.name)
        name = f"algorithm.{field.name}"
        rows[name] = RecipeRow(name, value, default)
    return rows


def _rows(branch: Branch, usual: Branch | None, prefix: str) -> Iterator[RecipeRow]:
    """usual: the branch that is there by default; None: there is no such branch by default."""
    for name, field in type(branch).model_fields.items():
        path = f"{prefix}{name}"
        value = getattr(branch, name)
        if usual is None:
            default = field.get_default(call_default_factory=True)
        else:
            default = getattr(usual, name)
        if isinstance(value, Branch):
            usual_branch = default if isinstance(default, type(value)) else None
            yield from _rows(value, usual_branch, f"{path}.")
        else:
            shown = None if default is PydanticUndefined else _shown(default, name)
            yield RecipeRow(path, _shown(value, name), shown)


def _shown(value: Any, name: str) -> str:
    """A key's value as JSON."""
    return json.dumps(without_secrets(_plain(value), name), ensure_ascii=False, default=plain_value)


def _plain(value: Any) -> Any:
    """Branches in lists and mappings as mappings."""
    if isinstance(value, Branch):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value

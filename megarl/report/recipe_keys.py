"""The keys of a recipe with their values, and whether these are the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from megarl.config import Recipe
from megarl.config.fields import Branch
from megarl.printable import plain_value
from megarl.tracking.secrets import without_secrets


@dataclass(frozen=True)
class RecipeKey:
    """A key, a.b.c, its value and its default as JSON. default: None where every recipe must set the key."""

    name: str
    value: str
    default: str | None

    @property
    def differs(self) -> bool:
        return self.value != self.default


def recipe_keys(recipe: Recipe) -> list[RecipeKey]:
    """All keys of a recipe in the order of its classes, without secrets."""
    return list(_keys(recipe, None, ""))


def _keys(branch: Branch, usual: Branch | None, prefix: str) -> Iterator[RecipeKey]:
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
            yield from _keys(value, usual_branch, f"{path}.")
        else:
            shown = None if default is PydanticUndefined else _shown(default, name)
            yield RecipeKey(path, _shown(value, name), shown)


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

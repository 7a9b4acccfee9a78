"""The value of a key in a recipe, where it is from, and whether the recipe's run reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.config import Recipe
from megarl.config.fields import Branch
from megarl.config.reference import written
from megarl.preflight.notes import unread_reasons


@dataclass(frozen=True)
class KeyValue:
    """text: as a recipe has it. source: in words. unread: why the run does not read the key; empty where it does."""

    text: str
    source: str
    unread: Sequence[str] = ()


def value_of(recipe: Recipe, path: str) -> KeyValue:
    """The value that a key has in a recipe; path: with names and numbers, as data.eval.aime.path."""
    parts = path.split(".")
    sections = list(accumulate(parts, "{}.{}".format))
    reasons = unread_reasons(recipe)
    unread = [reasons[section] for section in sections if reasons.get(section)]
    inner: Any = recipe
    is_set = True
    for part, section in zip(parts, sections, strict=True):
        if isinstance(inner, Branch):
            is_set = is_set and part in inner.model_fields_set
            inner = getattr(inner, part)
            is_missing = inner is None and section != path
        else:
            inner = _entry(inner, part)
            is_missing = inner is None
        if is_missing:
            return KeyValue("none", f"{section} is not set")
    if is_set and inner is not None:
        return KeyValue(_text(inner), "set in the recipe", unread)
    if parts[0] == "algorithm" and len(parts) == 2:
        return _of_row(recipe, parts[1], unread)
    return KeyValue(_text(inner), "set in the recipe" if is_set else "the default", unread)


def _entry(values: Any, part: str) -> Any:
    """An entry of a mapping, or an item of a list by its number; None where there is none."""
    if isinstance(values, Mapping):
        return values.get(part)
    if isinstance(values, tuple | list) and part.isdecimal() and int(part) < len(values):
        return values[int(part)]
    return None


def _of_row(recipe: Recipe, name: str, unread: Sequence[str]) -> KeyValue:
    """A hyperparameter that the recipe leaves to its algorithm's row."""
    algorithm = recipe.algorithm.name
    if name == "name" or algorithm not in ALGORITHMS:
        return KeyValue(_text(getattr(recipe.algorithm, name)), "the default", unread)
    value = getattr(hyperparameters_of(algorithm, recipe.algorithm), name)
    return KeyValue(_text(value), f"of the row of {algorithm}", unread)


def _text(value: Any) -> str:
    """A value on one line; branches, and collections of them, as mappings."""
    if isinstance(value, Branch):
        return written(value.model_dump(mode="json", exclude_unset=True))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    return written(value)

"""`megarl explain`: what a key of a recipe means; `megarl schema`: all keys, for editors.

Neither imports torch, Ray or another heavy library, unless it is asked for the value of a key in a recipe.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megarl.config import Recipe
from megarl.config.reference import Key, find_key, keys_of, optional_branch, reference_page
from megarl.config.schema import hardware_schema, overlay_schema, recipe_schema
from megarl.types import UserError

_PACKAGE = Path(__file__).parents[1]
_READS = re.compile(r"recipe\.([a-z_]+)\b")
_LEAST_WIDTH = 70
_MOST_WIDTH = 120
_LABEL_WIDTH = 11
_LONGEST_VALUE = 40


def reference_text() -> str:
    """The reference page of all keys, without the newline at its end."""
    return reference_page().rstrip("\n")


def explained(path: str | None, recipe: Recipe | None = None) -> str:
    """What `megarl explain` prints of a key or branch, or of all branches without one.

    recipe: whose value of the key is told, too. Raises UserError for an unknown key.
    """
    width = min(max(shutil.get_terminal_size().columns, _LEAST_WIDTH), _MOST_WIDTH)
    if path is None:
        return "\n".join(_table(keys_of(""), width))
    key = find_key(path)
    if key.is_branch:
        return "\n".join(_branch_lines(key, path, recipe, width))
    return "\n".join(_key_lines(key, path, recipe, width))


def schema_text(*, of_overlays: bool, of_hardware: bool) -> str:
    """The JSON schema of recipes, of overlays or of hardware files. Raises UserError where both are asked for."""
    if of_overlays and of_hardware:
        raise UserError("--overlay", "--hardware asks for another schema", "leave one of them out")
    if of_hardware:
        schema = hardware_schema()
    elif of_overlays:
        schema = overlay_schema()
    else:
        schema = recipe_schema()
    return json.dumps(schema, indent=2)


def _key_lines(key: Key, path: str, recipe: Recipe | None, width: int) -> Iterator[str]:
    yield key.path
    yield from _labelled("type", key.kind, width)
    yield from _labelled("default", _default_in_words(key), width)
    first, *others = key.meaning.split("\n\n")
    yield from _labelled("meaning", first, width)
    for paragraph in others:
        yield from _labelled("", paragraph, width)
    if key.takes_any:
        yield from _labelled(
            "", "Keys in it are those of that class, and are passed through.", width
        )
    if recipe:
        from megarl.commands.recipe_values import value_of  # it imports torch

        value = value_of(recipe, path)
        yield from _labelled("value", f"{value.text} ({value.source})", width)
        if value.unread:
            yield from _labelled(
                "", f"This run does not read it: {'; '.join(value.unread)}.", width
            )
    yield from _reading_lines(key, width)


def _branch_lines(branch: Key, path: str, recipe: Recipe | None, width: int) -> Iterator[str]:
    yield branch.path
    for paragraph in branch.meaning.split("\n\n"):
        yield ""
        yield from textwrap.wrap(paragraph, width)
    yield ""
    yield from _reading_lines(branch, width)
    yield ""
    if recipe is None:
        yield from _table(keys_of(branch.path), width)
        return
    from megarl.commands.recipe_values import value_of  # it imports torch

    values = [value_of(recipe, f"{path}.{key.name}").text for key in keys_of(branch.path)]
    yield from _table(keys_of(branch.path), width, values)


def _default_in_words(key: Key) -> str:
    if key.default is None:
        branch = optional_branch(key)
        return f"none: it has to be set where {branch} is" if branch else "none: it has to be set"
    if key.of_row:
        return f"{key.default}, unless the row of algorithm.name has another (docs/algorithms.md)"
    return key.default


def _reading_lines(key: Key, width: int) -> Iterator[str]:
    """Which runs read a key, and which folders of the code."""
    if key.unread:
        yield from _labelled("not read", f"where {' or '.join(key.unread)}", width)
    branch = key.path.partition(".")[0]
    rooms = ", ".join(sorted(_rooms_by_branch()[branch]))
    yield from _labelled("read in", f"{rooms} (the parts of megarl/ that read {branch})", width)


@cache
def _rooms_by_branch() -> dict[str, set[str]]:
    """The rooms of the package whose source reads each branch of a recipe."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in _PACKAGE.rglob("*.py"):
        room = path.relative_to(_PACKAGE).parts[0].removesuffix(".py")
        for branch in _READS.findall(path.read_text(encoding="utf-8")):
            rooms[branch].add(room)
    return rooms


def _labelled(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {label:<{_LABEL_WIDTH}}",
        subsequent_indent=" " * (_LABEL_WIDTH + 2),
        break_on_hyphens=False,
    )


def _cut(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 3]}..."


def _table(keys: list[Key], width: int, values: list[str] | None = None) -> Iterator[str]:
    """Key, default and the first paragraph of the meaning, which is wrapped in its column.

    values: of the keys in a recipe, in place of the defaults.
    """
    names = [key.name for key in keys]
    defaults = ["branch" if key.is_branch else key.default or "-" for key in keys]
    shown = [_cut(value) for value in values or defaults]
    rows = [("key", "value" if values else "default", "meaning")]
    rows += zip(names, shown, (key.summary for key in keys), strict=True)
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for name, value, meaning in rows:
        head = f"{name:<{name_width}}  {value:<{value_width}}  "
        yield from textwrap.wrap(
            meaning,
            width,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
        )

"""`megarl explain`: what a key of a recipe means; `megarl schema`: all keys, for editors.

Neither imports torch, Ray or another heavy library.
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

from megarl.config.reference import Key, find_key, keys_of, optional_branch, reference_page
from megarl.config.schema import overlay_schema, recipe_schema

_PACKAGE = Path(__file__).parents[1]
_READS = re.compile(r"recipe\.([a-z_]+)\b")
_LEAST_WIDTH = 70
_MOST_WIDTH = 120
_LABEL_WIDTH = 11


def explained(key: str | None, *, whole: bool) -> str:
    """What `megarl explain` prints of a key or branch, or of all branches without one.

    whole: the reference page of all keys, in place of it. Raises UserError for an unknown key.
    """
    if whole:
        return reference_page().rstrip("\n")
    width = min(max(shutil.get_terminal_size().columns, _LEAST_WIDTH), _MOST_WIDTH)
    if key is None:
        return "\n".join(_table(keys_of(""), width))
    found = find_key(key)
    if found.is_branch:
        return "\n".join(_branch_lines(found, width))
    return "\n".join(_key_lines(found, width))


def schema_text(*, is_overlay: bool) -> str:
    """The JSON schema of recipes, or of overlays."""
    return json.dumps(overlay_schema() if is_overlay else recipe_schema(), indent=2)


def _key_lines(key: Key, width: int) -> Iterator[str]:
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
    yield from _reading_lines(key, width)


def _branch_lines(branch: Key, width: int) -> Iterator[str]:
    yield branch.path
    for paragraph in branch.meaning.split("\n\n"):
        yield ""
        yield from textwrap.wrap(paragraph, width)
    yield ""
    yield from _reading_lines(branch, width)
    yield ""
    yield from _table(keys_of(branch.path), width)


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


def _table(keys: list[Key], width: int) -> Iterator[str]:
    """Key, default and the first paragraph of the meaning, which is wrapped in its column."""
    names = [key.name for key in keys]
    defaults = ["branch" if key.is_branch else key.default or "-" for key in keys]
    name_width = max(len(name) for name in ["key", *names])
    default_width = max(len(default) for default in ["default", *defaults])
    rows = [("key", "default", "meaning")]
    rows += zip(names, defaults, (key.summary for key in keys), strict=True)
    for name, default, meaning in rows:
        head = f"{name:<{name_width}}  {default:<{default_width}}  "
        yield from textwrap.wrap(
            meaning,
            width,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
        )

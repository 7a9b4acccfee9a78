"""What a shell offers for a key of a recipe: `train.` for `tra`, `train.lr=` for `train.lr`, and a key's choices.

Bash ends a word at `=`, so that in `train.replay=r` the word to complete is `r`, with `train.replay` and `=` before it.
It puts a space behind a single candidate, which a key must not have: a key that is alone is offered with its choices or
its default.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.reference import Key, general_path, keys_of, recipe_keys

_YAML = (".yaml", ".yml")


def complete_override(ctx: Any, incomplete: str) -> list[str]:
    """Candidates for `a.b=c` or an overlay's file. ctx: typer's context of the command, with the words before it."""
    words: Sequence[str] = ctx.params.get("overrides") or ()
    if len(words) > 1 and words[-1] == "=":
        return list(_choices(words[-2]))
    if (
        words and not incomplete and words[-1] and general_path(words[-1])
    ):  # click leaves an `=` out
        return list(_choices(words[-1]))
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={choice}" for choice in _choices(key)]
    return [*_with_values(_candidates(incomplete)), *_files(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Candidates for the key of `megarl explain`."""
    return [key.path for key in _candidates(incomplete)]


def _candidates(incomplete: str) -> list[Key]:
    """The keys that begin so in the branch that is written; in place of a branch that is alone, its keys."""
    branch, _, _ = incomplete.rpartition(".")
    general = general_path(branch)
    if general is None:
        return []
    found = [key for key in _keys_of(general, branch) if key.path.startswith(incomplete)]
    if len(found) == 1 and found[0].is_branch:
        return [*found, *_keys_of(f"{general}.{found[0].name}".lstrip("."), found[0].path)]
    return found


def _keys_of(general: str, branch: str) -> list[Key]:
    """The keys of a branch under the names that are written; a name that is still to be written is NAME or N."""
    return [replace(key, path=f"{branch}.{key.name}".lstrip(".")) for key in keys_of(general)]


def _with_values(keys: Sequence[Key]) -> list[str]:
    words = [f"{key.path}." if key.is_branch else f"{key.path}=" for key in keys]
    if len(keys) == 1:
        values = keys[0].choices or [keys[0].default or ""]
        words += [f"{words[0]}{value}" for value in values]
    return words


def _choices(path: str) -> Sequence[str]:
    """The values that a key can have, where they are few."""
    general = general_path(path)
    return recipe_keys()[general].choices if general else ()


def _files(incomplete: str) -> list[str]:
    """Folders, and YAML files: overlays. A folder that is alone is offered with what is in it."""
    if not incomplete:
        return []
    paths = [Path(name) for name in glob.glob(f"{glob.escape(incomplete)}*")]
    files = sorted(str(path) for path in paths if path.suffix in _YAML)
    folders = sorted(f"{path}/" for path in paths if path.is_dir())
    if len(folders) == 1 and not files and folders[0] != incomplete:
        return [*folders, *_files(folders[0])]
    return [*folders, *files]

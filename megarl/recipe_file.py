"""A recipe on disk: YAML, overlays and `a.b=c` into the frozen tree, with every fault told where it was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from megarl.config import Branch, Recipe
from megarl.types import UserFault, UserFaults

Loaded = TypeVar("Loaded", bound=Branch)
Origins = dict[str, str]  # dotted path -> where the user wrote it: "file:line" or "override a.b=c"
_YAML = (".yaml", ".yml")

_MENDS = {  # pydantic's error types whose own words are for programmers
    "model_type": "write a mapping of keys there",
    "dict_type": "write a mapping of keys there",
    "mapping_type": "write a mapping of keys there",
    "tuple_type": "write a list there",
    "int_type": "write a whole number",
    "float_type": "write a number",
    "string_type": "write text, in quotes when it reads as a number",
    "invalid_key": "the names of keys are text",
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and apply overrides in order: `a.b=c`, whose value is YAML, or the name of an overlay's file.

    An overlay is a YAML file with some of a recipe's keys: mappings merge key by key, anything else is replaced. Raises
    UserFaults with every fault at once: unknown keys with the nearest known one, wrong types, missing keys.
    """
    return load_branch(Recipe, path, overrides)


def load_branch(kind: type[Loaded], path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """The same for a file of another kind than a recipe."""
    faults: list[UserFault] = []
    tree, origins = _read_yaml(Path(path), faults)
    for override in overrides:
        if "=" not in override and Path(override).suffix in _YAML:
            _lay_over(Path(override), tree, origins, faults)
        else:
            _apply(override, tree, origins, faults)
    try:
        loaded = kind.model_validate(tree)
    except ValidationError as error:
        raise UserFaults(faults + _explain(error, tree, origins, str(path), kind)) from None
    if faults:
        raise UserFaults(faults)
    return loaded


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number (YAML 1.2), not text (YAML 1.1)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_yaml(path: Path, faults: list[UserFault]) -> tuple[dict[str, Any], Origins]:
    """The file as plain values, and the line of every key; faults that leave nothing to go on are raised."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        origins = dict(_origins(node, "", str(path), faults)) if node else {}
        tree = loader.construct_document(node) if node else {}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserFaults([UserFault(str(path), f"cannot be read ({reason})", "name a YAML file")]) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        problem = f"not valid YAML ({getattr(error, 'problem', None) or error})"
        raise UserFaults([UserFault(f"{path}:{line}", problem, "correct the syntax")]) from None
    if not isinstance(tree, dict):
        fault = UserFault(str(path), "the file is not a mapping", "write `key: value` lines")
        raise UserFaults([fault])
    return tree, origins


def _origins(node: yaml.Node, prefix: str, file: str, faults: list[UserFault]) -> Iterator[tuple[str, str]]:
    """Every key below `node` with its `file:line`; a key written twice is a fault, for YAML drops one in silence."""
    if not isinstance(node, yaml.MappingNode) or prefix.count(".") > 16:  # an alias may contain itself
        return
    seen: set[str] = set()
    for key, value in node.value:
        path, where = f"{prefix}{key.value}", f"{file}:{key.start_mark.line + 1}"
        if path in seen:
            faults.append(UserFault(where, f"{path} is written twice", "keep one of the two"))
        seen.add(path)
        yield path, where
        yield from _origins(value, f"{path}.", file, faults)


def _apply(override: str, tree: dict[str, Any], origins: Origins, faults: list[UserFault]) -> None:
    """Write one `a.b=c` into the tree."""
    where = f"override {override}"
    dotted, equals, text = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        faults.append(UserFault(where, "not of the form a.b=c", "write for example train.lr=1e-4"))
        return
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError):  # ValueError: a date that no calendar has
        faults.append(UserFault(where, f"{text!r} is not a YAML value", "put text in quotes"))
        return
    branch = tree
    for depth, key in enumerate(keys[:-1]):
        if not isinstance(branch.get(key), dict):
            branch[key] = {}
            origins[".".join(keys[: depth + 1])] = where
        branch = branch[key]
    branch[keys[-1]] = value
    origins[dotted] = where


def _lay_over(path: Path, tree: dict[str, Any], origins: Origins, faults: list[UserFault]) -> None:
    """Write an overlay's keys into the tree."""
    try:
        overlay, places = _read_yaml(path, faults)
    except UserFaults as fault:
        faults += fault.faults
        return
    _merge(overlay, tree)
    origins |= places


def _merge(overlay: Mapping[Any, Any], tree: dict[Any, Any]) -> None:
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(value, tree[key])
        else:
            tree[key] = value


def _explain(
    error: ValidationError, tree: dict[str, Any], origins: Origins, file: str, root: type[Branch]
) -> list[UserFault]:
    """Pydantic's errors in the user's words; a missing key that was only misspelt is not told twice."""
    faults: list[UserFault] = []
    missing: list[tuple[str, str]] = []
    misspelt: set[str] = set()
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        where = _where(path, origins, file)
        if item["type"] == "extra_forbidden":
            guesses = _nearest(path, tree, not where.startswith(f"{file}:"), root)
            misspelt.update(guesses)
            mend = f"did you mean {' or '.join(guesses)}?" if guesses else f"the keys there are {_known(path, root)}"
            faults.append(UserFault(where, f"unknown key {path}", mend))
        elif item["type"] == "missing":
            missing.append((where, path))
        else:
            mend = _MENDS.get(item["type"]) or item["msg"].replace("Input should", "it should")
            faults.append(UserFault(where, f"{path} is {item['input']!r:.80}", mend))
    gone = [(where, path) for where, path in missing if path not in misspelt]
    return faults + [UserFault(where, f"{path} is missing", f"add {path}") for where, path in gone]


def _where(path: str, origins: Origins, file: str) -> str:
    """Where the key, or else the innermost section around it, is written."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, file)


def _fields(section: str, root: type[Branch]) -> dict[str, type[Branch] | None]:
    """Keys of a section ("" is the top) with their branch, None for a leaf."""
    branch: Any = root
    for key in filter(None, section.split(".")):
        of_mapping = get_args(branch)  # whose keys are the user's own
        branch = of_mapping[1] if of_mapping else branch.model_fields[key].annotation
    kinds = {name: field.annotation for name, field in branch.model_fields.items()}
    return {n: k if isinstance(k, type) and issubclass(k, Branch) else None for n, k in kinds.items()}


def _known(path: str, root: type[Branch]) -> str:
    return ", ".join(_fields(path.rpartition(".")[0], root))


def _leaves(root: type[Branch], section: str = "") -> Iterator[str]:
    for name, branch in _fields(section, root).items():
        path = f"{section}.{name}".lstrip(".")
        yield path
        if branch:
            yield from _leaves(root, path)


def _nearest(path: str, tree: Mapping[str, Any], in_override: bool, root: type[Branch]) -> list[str]:
    """Known paths that an unknown one was probably meant to be, at most three, best first.

    Spelling first; among equals, in a file, a key that is not written yet; else the same name in another section.
    """
    section, _, name = path.rpartition(".")
    written: Any = tree
    for key in filter(None, section.split(".")):
        written = written[key]
    distance = {known: _edits(name, known) for known in _fields(section, root)}
    best = min(distance.values())
    if best <= 1 + len(name) // 4:
        near = [known for known, edits in distance.items() if edits == best]
        unwritten = [known for known in near if known not in written]
        names = near if in_override else unwritten or near
        return [f"{section}.{known}".lstrip(".") for known in names][:3]
    return [known for known in _leaves(root) if known.rpartition(".")[2] == name][:3]


def _edits(a: str, b: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour to turn `a` into `b` (Damerau, 1964)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                row[j] = min(row[j], older[j - 2] + 1)
    return row[-1]

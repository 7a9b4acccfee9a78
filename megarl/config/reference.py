"""Every key of a recipe with its type, default and meaning, read from the recipe's JSON schema.

The meaning of a key is the string below its field in the recipe's classes, and of a branch its class's docstring.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from megarl.config.schema import JsonSchema, named_entries, recipe_schema
from megarl.config.unread import why_unread
from megarl.spelling import did_you_mean, near
from megarl.types import Hyperparameters, UserError

_NAMED = "NAME"  # stands in a path for a name of the user's own
_NUMBERED = "N"  # and for the number of a list's item, from 0
_TYPES = {"boolean": "true or false", "string": "text", "null": "null", "object": "mapping"}
_PAGE_HEAD = """# Every key of a recipe

You get every key that a recipe may have, with its type, default and meaning.

`megarl explain KEY` prints a line of this page in the terminal, and `megarl schema` the same keys as a JSON schema for
editors ([how](running.md#help-with-keys)). The page is generated from the classes of the recipe in `megarl/config/` by
`megarl explain --reference`.

NAME in a key is a name of your own, N the number of a list's item, from 0. A key without a default has to be set where
its branch is there. The default of a hyperparameter (`algorithm`) holds unless the row of `algorithm.name` has another
([algorithms.md](algorithms.md)); null in `algorithm` means the row's value.
"""


@dataclass(frozen=True)
class Key:
    """A key of a recipe, or one of its branches: the path `train`, or `train.lr`.

    default: as it is written in a recipe; None where the key has to be set, and of branches. is_required: where the
    branch around it is there. choices: of a key that takes one of a few values. of_row: the algorithm's row may have
    another default. takes_any: keys below it are not megarl's own, as those of train.megatron.
    """

    path: str
    kind: str
    default: str | None
    meaning: str
    is_branch: bool = False
    is_required: bool = False
    choices: tuple[str, ...] = ()
    of_row: bool = False
    takes_any: bool = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first paragraph of the meaning."""
        return self.meaning.partition("\n\n")[0]

    @property
    def unread(self) -> Sequence[str]:
        """When nothing reads the key; empty where every run does."""
        return why_unread(self.path)


@cache
def recipe_keys() -> Mapping[str, Key]:
    """All keys and branches by path, each branch before its keys, in the order of the classes."""
    schema = recipe_schema()
    return {key.path: key for key in _keys_below(schema, "", schema["$defs"])}


def find_key(path: str) -> Key:
    """The key of a path, in which names of the user's own may be written for NAME, and numbers for N.

    Of a path into options that are passed through, the key that passes them. Raises UserError with the nearest keys.
    """
    keys = recipe_keys()
    known = ""
    for part in path.split("."):
        names = {key.name for key in keys_of(known)}
        if part not in names:
            part = next((name for name in (_NAMED, _NUMBERED) if name in names), part)
        inner = f"{known}.{part}".lstrip(".")
        if inner not in keys:
            if known in keys and keys[known].takes_any:
                break
            raise UserError(f"{path:.200}", "there is no such key", _hint(path, known))
        known = inner
    return keys[known]


def general_path(path: str) -> str | None:
    """The path with NAME and N in place of names and numbers; "" is the recipe. None where it leads to no key."""
    known = ""
    for part in filter(None, path.split(".")):
        names = {key.name for key in keys_of(known)}
        if part not in names:
            part = next((name for name in (_NAMED, _NUMBERED) if name in names), "")
        if not part:
            return None
        known = f"{known}.{part}".lstrip(".")
    return known


def optional_branch(key: Key) -> str | None:
    """The innermost branch around a key that a recipe may leave out; None where every recipe has them all."""
    sections = key.path.split(".")[:-1]
    around = [recipe_keys()[".".join(sections[: depth + 1])] for depth in range(len(sections))]
    optional = [branch.path for branch in around if not branch.is_required]
    return optional[-1] if optional else None


def keys_of(branch: str) -> list[Key]:
    """The keys of a branch, without those of the branches in it; "" is the recipe."""
    prefix = f"{branch}." if branch else ""
    return [
        key
        for path, key in recipe_keys().items()
        if path.startswith(prefix) and path != branch and "." not in path[len(prefix) :]
    ]


def reference_page() -> str:
    """docs/recipe_reference.md: a table of keys for each branch."""
    sections = [_PAGE_HEAD]
    for key in recipe_keys().values():
        if key.is_branch:
            sections.append(_section(key))
    return "\n".join(sections)


def _section(branch: Key) -> str:
    lines = [f"## {branch.path}", "", branch.meaning, ""]
    if branch.unread:
        lines += [f"Not read where {' or '.join(branch.unread)}.", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys_of(branch.path):
        if key.is_branch:
            anchor = key.path.replace(".", "").lower()
            lines.append(f"| `{key.path}` | branch | | [below](#{anchor}) |")
            continue
        own = [reason for reason in key.unread if reason not in branch.unread]
        meaning = key.meaning + "".join(f" Not read where {reason}." for reason in own)
        default = "" if key.default is None else f"`{key.default}`"
        cells = (f"`{key.path}`", key.kind, default, " ".join(meaning.split()))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def _hint(path: str, branch: str) -> str:
    """Which keys were probably meant by a path whose first parts are those of a branch."""
    unknown, _, rest = path[len(branch) :].lstrip(".").partition(".")
    siblings = [key.path for key in keys_of(branch)]
    by_name = {sibling.rpartition(".")[2]: sibling for sibling in siblings}
    meant = [by_name[name] for name in near(unknown, by_name)]
    meant = [f"{key}.{rest}" if f"{key}.{rest}" in recipe_keys() else key for key in meant]
    same_name = [key.path for key in recipe_keys().values() if key.name == path.rpartition(".")[2]]
    there = ", ".join(by_name) or "none"
    return did_you_mean(
        meant or same_name or near(path, recipe_keys()), f"the keys there are {there}"
    )


def _keys_below(node: JsonSchema, path: str, definitions: JsonSchema) -> Iterator[Key]:
    """The keys of an object of the schema."""
    required = node.get("required", ())
    for name, inner in node["properties"].items():
        inner_path = f"{path}.{name}".lstrip(".")
        yield _key(inner_path, inner, name in required, definitions)
        for suffix, branch in _branches(inner, definitions):
            if suffix:
                yield Key(
                    path=inner_path + suffix,
                    kind="branch",
                    default=None,
                    meaning=branch.get("description", ""),
                    is_branch=True,
                )
            yield from _keys_below(branch, inner_path + suffix, definitions)


def _key(path: str, node: JsonSchema, is_required: bool, definitions: JsonSchema) -> Key:
    """A key whose value is a node of the schema."""
    branches = list(_branches(node, definitions))
    is_branch = any(not suffix for suffix, _ in branches)
    meaning = node.get("description", "")
    if is_branch:
        meaning = branches[0][1].get("description", "")
    default = node.get("default")
    of_row = path.startswith("algorithm.") and path != "algorithm.name"
    if of_row:
        default = getattr(Hyperparameters(), path.removeprefix("algorithm."))
    return Key(
        path=path,
        kind="branch" if is_branch else _kind(node, definitions),
        default=None if is_required or is_branch else written(default),
        meaning=meaning,
        is_branch=is_branch,
        is_required=is_required,
        choices=_choices(node),
        of_row=of_row,
        takes_any=node.get("additionalProperties") is True,
    )


def _branches(node: JsonSchema, definitions: JsonSchema) -> Iterator[tuple[str, JsonSchema]]:
    """The objects in a node, each with the part of its path: "" for the node itself, .NAME for a mapping's entries."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    if "properties" in node:
        yield "", node
    for option in node.get("anyOf", ()):
        for suffix, branch in _branches(option, definitions):
            yield suffix, {"description": node.get("description", ""), **branch}
    for entry in named_entries(node):
        for _, branch in _branches(entry, definitions):
            yield f".{_NAMED}", branch
    if isinstance(node.get("items"), dict):
        for _, branch in _branches(node["items"], definitions):
            yield f".{_NUMBERED}", branch


def _kind(node: JsonSchema, definitions: JsonSchema) -> str:
    """The type of a value, in words."""
    if "$ref" in node:
        return _kind(definitions[node["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in node:
        return ", or ".join(_kind(option, definitions) for option in node["anyOf"])
    if "enum" in node:
        return ", ".join(map(written, node["enum"][:-1])) + f" or {written(node['enum'][-1])}"
    if "const" in node:
        return written(node["const"])
    if node["type"] in ("integer", "number"):
        words = "whole number" if node["type"] == "integer" else "number"
        return f"{words}{_range(node)}"
    if node["type"] == "array":
        return f"list of: {_kind(node['items'], definitions)}"
    if node.get("format") == "path":
        return "path"
    if "properties" in node:
        return "branch"
    if named_entries(node):
        return f"mapping of {_NAMED} to a branch"
    if "enum" in node.get("propertyNames", {}):
        names = ", ".join(node["propertyNames"]["enum"])
        return f"mapping of {names} to a {_kind(node['additionalProperties'], definitions)}"
    return _TYPES[node["type"]]


def _choices(node: JsonSchema) -> tuple[str, ...]:
    """The values that a node names, as a recipe has them; empty where it does not name them all."""
    if node.get("type") == "boolean":
        return ("true", "false")
    if "anyOf" in node:
        options = [_choices(option) for option in node["anyOf"] if option.get("type") != "null"]
        return tuple(chain.from_iterable(options)) if all(options) else ()
    return tuple(written(value) for value in node.get("enum", ()))


def _range(node: JsonSchema) -> str:
    """The bounds of a number, in words."""
    words = ""
    if "minimum" in node:
        words += f" from {written(node['minimum'])}"
    if "exclusiveMinimum" in node:
        words += f" above {written(node['exclusiveMinimum'])},"
    if "maximum" in node:
        words += f" to {'2^31 - 1' if node['maximum'] == 2**31 - 1 else written(node['maximum'])}"
    return words


def written(value: Any) -> str:
    """A value as a recipe may have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return json.dumps(value)

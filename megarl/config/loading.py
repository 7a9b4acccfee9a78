"""A recipe on disk: YAML, overlays and `a.b=c` into the frozen tree, with every error told where it was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError

from megarl.config import Recipe
from megarl.config.fields import Branch
from megarl.config.yaml_text import Keys, Parsed, dotted, parse, read_file, refusal
from megarl.spelling import did_you_mean, near
from megarl.types import UserError, UserErrors

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Loaded = TypeVar("Loaded", bound=Branch)
_LONGEST_SHOWN = 200  # characters of an override
_MOST_KEYS = 32  # of one dotted path
_YAML = (".yaml", ".yml")
RENAMED = {  # keys of earlier versions, which are refused with the new name
    "algorithm.mismatch": "algorithm.rollout_correction",
    "algorithm.mismatch_low": "algorithm.rollout_correction_low",
    "algorithm.mismatch_high": "algorithm.rollout_correction_high",
    "algorithm.process_scale": "algorithm.prime_beta",
    "rollout.engine.fp8": "rollout.engine.weights (plain or fp8)",
}

_HINTS = {  # pydantic's error types whose own words are for programmers
    "model_type": "write a mapping of keys there",
    "dict_type": "write a mapping of keys there",
    "mapping_type": "write a mapping of keys there",
    "tuple_type": "write a list there",
    "int_type": "write a whole number",
    "float_type": "write a number",
    "string_type": "write text, in quotes when it reads as a number",
    "string_too_short": "write text",
    "string_pattern_mismatch": "write letters, digits, dots, dashes and underscores, a letter or a digit first",
    "bool_type": "write true or false",
    "invalid_key": "the names of keys are text",
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and apply overrides in order: `a.b=c`, whose value is YAML, or the name of an overlay's file.

    An overlay is a YAML file with some of a recipe's keys: mappings merge key by key, anything else is replaced, and
    null takes a named entry (data.eval.NAME) out. Raises UserErrors with every error at once: unknown keys with the
    nearest known one, wrong types, missing keys.
    """
    return load_branch(Recipe, path, overrides)


def overlaid(recipe: Recipe, overlay: Mapping[str, Any]) -> Recipe:
    """A recipe with an overlay's keys laid over it, as a file of them would be."""
    tree = recipe.model_dump(exclude_unset=True)
    _merge(overlay, tree, Recipe, Parsed())
    return Recipe.model_validate(tree)


def overlay_yaml(overlay: Mapping[str, Any]) -> str:
    """The text of an overlay's file; "" for an empty one."""
    if not overlay:
        return ""
    return yaml.safe_dump(dict(overlay), sort_keys=False, default_flow_style=None, width=120)


def load_branch(kind: type[Loaded], path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Like `load_recipe`, for another kind of file."""
    document = _read_yaml(Path(path), kind)
    tree = document.value
    for override in overrides:
        if "=" not in override and Path(override).suffix in _YAML:
            _lay_over(Path(override), kind, tree, document)
        else:
            _apply(override, kind, tree, document)
    _drop_unset_old_keys(tree)
    try:
        loaded = kind.model_validate(tree)
    except ValidationError as error:
        raise UserErrors(document.errors + _explain(error, document, str(path), kind)) from None
    if document.errors:
        raise UserErrors(document.errors)
    return loaded


def _drop_unset_old_keys(tree: dict[str, Any]) -> None:
    """Take out keys of earlier versions that are null or false: the recipe.yaml of a run has every key."""
    for path in RENAMED:
        *branches, key = path.split(".")
        branch: Any = tree
        for name in branches:
            branch = branch.get(name) if isinstance(branch, dict) else None
        if isinstance(branch, dict) and key in branch:
            value = branch[key]
            if value is None or value is False:
                del branch[key]


def _apply(override: str, kind: type[Branch], tree: dict[str, Any], document: Parsed) -> None:
    """Write one `a.b=c` into the tree."""
    where = f"override {override if len(override) <= _LONGEST_SHOWN else override[:_LONGEST_SHOWN] + '...'}"
    name, equals, text = override.partition("=")
    keys = tuple(name.split("."))
    if not equals or not all(keys) or len(keys) > _MOST_KEYS:
        document.errors.append(
            UserError(where, "not of the form a.b=c", "write for example train.lr=1e-4")
        )
        return
    try:
        parsed = parse(text, lambda line: where, lambda path: _is_free(path, kind), keys)
    except UserErrors as error:
        document.errors += error.errors
        return
    branch = tree
    for depth, key in enumerate(keys[:-1]):
        if not isinstance(branch.get(key), dict):
            branch[key] = {}
            document.origins[dotted(keys[: depth + 1])] = where
        branch = branch[key]
    document.origins[name] = where
    if parsed.value is None and _is_named(keys, kind):
        _take_out(keys, branch, kind, document)
    else:
        branch[keys[-1]] = parsed.value
    _note(parsed, document)


def _lay_over(path: Path, kind: type[Branch], tree: dict[str, Any], document: Parsed) -> None:
    """Write an overlay's keys into the tree."""
    try:
        overlay = _read_yaml(path, kind)
    except UserErrors as error:
        document.errors += error.errors
        return
    _note(overlay, document)
    _merge(overlay.value, tree, kind, document)


def _note(parsed: Parsed, document: Parsed) -> None:
    """Add to `document` where the parsed keys are written, and their errors."""
    document.origins |= parsed.origins
    document.errors += parsed.errors
    document.keys_at_fault |= parsed.keys_at_fault


def _read_yaml(path: Path, kind: type[Branch]) -> Parsed:
    """A file whose value is a mapping. Raises UserErrors when there is nothing to go on from."""
    parsed = parse(read_file(path), lambda line: f"{path}:{line}", lambda key: _is_free(key, kind))
    if parsed.value is None:
        parsed.value = {}
    if not isinstance(parsed.value, dict):
        raise refusal(str(path), "the file is not a mapping", "write `key: value` lines")
    return parsed


def _merge(
    overlay: Mapping[Any, Any],
    tree: dict[Any, Any],
    kind: type[Branch],
    document: Parsed,
    section: Keys = (),
) -> None:
    """Write an overlay's keys over those of a section of the tree, in place. section: the keys that lead to it."""
    for key, value in overlay.items():
        keys = (*section, key)
        if value is None and _is_named(keys, kind):
            _take_out(keys, tree, kind, document)
        elif isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(value, tree[key], kind, document, keys)
        else:
            tree[key] = value


def _is_named(keys: Keys, kind: type[Branch]) -> bool:
    """Whether a key is an entry under a name of the user's own (data.eval.NAME), or the mapping of all such."""
    return any(get_origin(_annotation(at, kind)) is Mapping for at in (keys, keys[:-1]))


def _take_out(keys: Keys, branch: dict[Any, Any], kind: type[Branch], document: Parsed) -> None:
    """Remove the entry, or all entries, of a named mapping; a name that is not there is an error."""
    key = keys[-1]
    path = dotted(keys)
    if get_origin(_annotation(keys, kind)) is Mapping:
        branch[key] = {}
    elif key in branch:
        del branch[key]
    else:
        document.errors.append(
            UserError(
                _where(path, document.origins, path),
                f"{path} is null, which takes it out, and there is no such entry",
                did_you_mean(near(key, branch), "leave the line out"),
            )
        )


def _explain(
    error: ValidationError, document: Parsed, file: str, root: type[Branch]
) -> list[UserError]:
    """Pydantic's errors in the user's words; a missing key that was only misspelt is not told twice."""
    errors: list[UserError] = []
    missing: list[tuple[str, str]] = []
    misspelt: set[str] = set()
    for item in error.errors(include_url=False):
        keys = tuple(part for part in item["loc"] if part != "[key]")
        path = dotted(keys)
        where = _where(path, document.origins, file)
        if path in document.keys_at_fault:
            continue
        if item["type"] == "extra_forbidden" and path in RENAMED:
            errors.append(
                UserError(where, f"unknown key {path}", f"it is called {RENAMED[path]} now")
            )
        elif item["type"] == "extra_forbidden":
            guesses = _nearest(keys, document.value, not where.startswith(f"{file}:"), root)
            misspelt.update(guesses)
            there = ", ".join(_annotation(keys[:-1], root).model_fields)
            hint = did_you_mean(guesses, f"the keys there are {there}")
            errors.append(UserError(where, f"unknown key {path}", hint))
        elif item["type"] == "missing":
            missing.append((where, path))
        else:
            # of a mapping whose keys are the user's own
            verb = "has the name" if item["loc"][-1] == "[key]" else "is"
            errors.append(UserError(where, f"{path} {verb} {item['input']!r:.80}", hint_of(item)))
    return errors + [
        UserError(where, f"{path} is missing", f"add {path}")
        for where, path in missing
        if path not in misspelt
    ]


def hint_of(item: ErrorDetails) -> str:
    """What to write instead of a value of the wrong kind."""
    if item["type"] in _HINTS:
        return _HINTS[item["type"]]
    context = item.get("ctx", {})
    if item["type"] == "value_error":
        return str(context["error"])
    if item["type"] == "string_too_long":
        return f"write at most {context['max_length']} characters"
    return item["msg"].replace("Input should", "it should")


def _where(path: str, origins: Mapping[str, str], file: str) -> str:
    """Where the key, or else the innermost section around it, is written."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, file)


def _annotation(keys: Keys, root: type[Branch]) -> Any:
    """The type of the value that the keys lead to, of the mapping that is passed through around it, or None.

    A key may itself contain dots, where it is a name of the user's own.
    """
    kind: Any = root
    for key in keys:
        if get_origin(kind) is dict:
            break
        if get_args(kind):  # of a mapping, whose keys are the user's own, or of a list
            kind = get_args(kind)[get_origin(kind) is not tuple]
        elif (branch := _branch(kind)) and key in branch.model_fields:
            kind = branch.model_fields[key].annotation
        else:
            return None
    return kind


def _branch(kind: Any) -> type[Branch] | None:
    """A type that is a branch; None for a leaf."""
    return kind if isinstance(kind, type) and issubclass(kind, Branch) else None


def _is_free(keys: Keys, root: type[Branch]) -> bool:
    """Whether the value of a key may be of any type: it is inside a mapping that is passed through."""
    return get_origin(_annotation(keys, root)) is dict


def _leaves(root: type[Branch], section: Keys = ()) -> Iterator[str]:
    for name, field in root.model_fields.items():
        keys = (*section, name)
        yield dotted(keys)
        if branch := _branch(field.annotation):
            yield from _leaves(branch, keys)


def _nearest(
    keys: Keys, tree: Mapping[str, Any], in_override: bool, root: type[Branch]
) -> list[str]:
    """Known paths that are probably meant by an unknown path, at most three, best first.

    Spelling first; among equals, in a file, a key that is not written yet; else the same name in another section.
    """
    *section, name = keys
    written: Any = tree
    for key in section:
        written = written[key]
    meant = near(str(name), _annotation(keys[:-1], root).model_fields)
    if not in_override:
        meant = [known for known in meant if known not in written] or meant
    if meant:
        return [dotted((*section, known)) for known in meant[:3]]
    return [known for known in _leaves(root) if known.rpartition(".")[2] == name][:3]

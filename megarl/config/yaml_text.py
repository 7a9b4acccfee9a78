"""YAML text -> plain values, and where each key is written.

Words are read as YAML 1.2 reads them: `off`, `yes` and `2026-01-01` are text, 1e-3 is a number. What YAML 1.1 and 1.2
read as two different values (017, 0o17, 0b11, 1:30) is refused, but for underscores between digits: 1_000 is a number,
as YAML 1.1 has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megarl.types import UserError, UserErrors

_MOST_BYTES = 1024 * 1024
_DEEPEST = 32  # mappings and lists inside each other
_MOST_VALUES = 20_000  # where aliases are counted as what they stand for
_MOST_DIGITS = 40
_TAG = "tag:yaml.org,2002:"
_STR = _TAG + "str"
_SCALARS = tuple(_TAG + name for name in ("str", "int", "float", "bool", "null", "merge", "value"))
_COLLECTIONS = (_TAG + "map", _TAG + "seq")
_OCTAL = re.compile(r"[-+]?0[0-9_]*[0-9]")
_PREFIXED = re.compile(r"[-+]?0(?:[bB][01_]+|[oO][0-7_]+)")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_ODD_LETTER = re.compile("[\0\ufeff\ud800-\udfff]")
# YAML 1.1's further names of the booleans
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}


class _Refused(yaml.MarkedYAMLError):
    """YAML that no recipe has; `note` says what to do."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with the booleans and numbers of YAML 1.2."""

    yaml_implicit_resolvers = {
        first: [
            (tag, words)
            for tag, words in resolvers
            if tag not in (_TAG + "bool", _TAG + "timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Raises _Refused before Python's stack ends, which takes a few function calls for each level, and for an alias
        that would lead to an endless value."""
        mark = self.peek_event().start_mark
        self.depth += 1
        if self.depth > _DEEPEST:
            problem = f"mappings and lists are nested more than {_DEEPEST} deep, and no key of a recipe is"
            raise _Refused(problem=problem, problem_mark=mark, note="take the nesting out")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node is not None and node.end_mark is None:  # it is not read to its end yet
            problem = "an alias stands inside of what it names"
            raise _Refused(problem=problem, problem_mark=mark, note="write the value out")
        return node


_Loader.add_implicit_resolver(
    _TAG + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    _TAG + "float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)

_RESOLVER = _Loader("")  # of single words


# those that lead to a value, the outermost first: text, and numbers in lists
Keys = tuple[Any, ...]


def dotted(keys: Keys) -> str:
    """The keys as a recipe's messages name them: a.b.c."""
    return ".".join(map(str, keys))


@dataclass
class Parsed:
    """A YAML text's value; dotted key -> where it is written; the errors of single values, and whose they are."""

    value: Any = None
    origins: dict[str, str] = field(default_factory=dict)
    errors: list[UserError] = field(default_factory=list)
    keys_at_fault: set[str] = field(default_factory=set)


def read_file(path: Path) -> str:
    """The text of a file; a byte order mark is left out. Raises UserErrors: unreadable, too large, not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = getattr(error, "strerror", None) or error
        raise refusal(str(path), f"cannot be read ({reason})", "name a YAML file") from None
    if len(content) > _MOST_BYTES:
        problem = f"it has more than {_MOST_BYTES} bytes, which no recipe has"
        raise refusal(str(path), problem, "name a YAML file of a recipe's keys")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{path}:{content[: error.start].count(10) + 1}"
        problem = f"not UTF-8 text (the byte 0x{content[error.start]:02x})"
        raise refusal(where, problem, "save the file as UTF-8") from None


def parse(
    text: str, where: Callable[[int], str], is_free: Callable[[Keys], bool], prefix: Keys = ()
) -> Parsed:
    """The value of a YAML text.

    where: a line, counted from 1 -> where it is, for errors and origins. is_free: whether the value of a key may be
    of any type, so that no later check tells of one that is meant otherwise. prefix: the key whose value the text is.
    Raises UserErrors for a text that has no value.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        parsed = Parsed()
        if node is not None:
            _check_size(node, where)
            _walk(node, prefix, where, is_free, parsed)
            parsed.value = loader.construct_document(node)
        return parsed
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"not valid YAML (the character U+{int(error.character):04X} is not allowed)"
        raise refusal(where(line), problem, "remove it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        if isinstance(error, _Refused):
            hint = str(error.note)
        elif prefix:
            problem = f"{text!r:.80} is not a YAML value"
            hint = "put text in quotes"
        else:
            problem = f"not valid YAML ({problem})"
            hint = "correct the syntax"
        raise refusal(where(mark.line + 1 if mark else 1), problem, hint) from None


def refusal(where: str, problem: str, hint: str) -> UserErrors:
    """The only error of a text that has no value."""
    return UserErrors([UserError(where, problem, hint)])


def _check_size(root: yaml.Node, where: Callable[[int], str]) -> None:
    """Aliases of aliases make a short text very long."""
    num_values = 0
    nodes = [root]
    while nodes:
        node = nodes.pop()
        num_values += 1
        if isinstance(node, yaml.MappingNode):
            nodes += chain.from_iterable(node.value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        if num_values > _MOST_VALUES:
            line = where(root.start_mark.line + 1)
            problem = f"it has more than {_MOST_VALUES} values, which no recipe has"
            raise refusal(line, problem, "take the aliases or the values out")


def _walk(
    node: yaml.Node,
    keys: Keys,
    where: Callable[[int], str],
    is_free: Callable[[Keys], bool],
    parsed: Parsed,
) -> None:
    """Note every key below `node` with its place, and the errors of its values; keys: those that lead to the node.

    A key written twice is an error, for YAML drops one in silence. Raises UserErrors for what has no value.
    """
    place = where(node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        error = _scalar_error(node, place, is_free(keys))
        if error:
            parsed.errors.append(error)
            parsed.keys_at_fault.add(dotted(keys))
    elif node.tag not in _COLLECTIONS:
        raise _tag_error(node, place)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _walk(item, keys, where, is_free, parsed)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = where(key.start_mark.line + 1)
            if not isinstance(key, yaml.ScalarNode) or not key.value.isprintable():
                problem = "a key is not printable text on one line"
                raise refusal(line, problem, "write a recipe's key")
            inner = (*keys, key.value)
            name = dotted(inner)
            if name in seen:
                parsed.errors.append(
                    UserError(line, f"{name} is written twice", "keep one of the two")
                )
            seen.add(name)
            parsed.origins[name] = line
            _walk(value, inner, where, is_free, parsed)


def _tag_error(node: yaml.Node, place: str) -> UserErrors:
    tag = str(node.tag).replace(_TAG, "!!")
    problem = f"not valid YAML for a recipe (the tag {tag!r:.60})"
    return refusal(place, problem, "write the value without a tag")


def _scalar_error(node: yaml.ScalarNode, place: str, is_free: bool) -> UserError | None:
    text = node.value
    is_plain = node.style is None
    plain_tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False)) if is_plain else _STR
    if node.tag not in _SCALARS or node.tag not in (plain_tag, _STR):
        raise _tag_error(node, place)
    if odd := _ODD_LETTER.search(text):
        return UserError(place, f"the text has the character U+{ord(odd[0]):04X}", "remove it")
    if not is_plain:
        return None
    if node.tag == _TAG + "int" and len(text) > _MOST_DIGITS:  # Python refuses to read some
        problem = f"{text[:20]}... is a number of {len(text)} digits"
        raise refusal(place, problem, "write a smaller one")
    if _OCTAL.fullmatch(text) and text.strip("+-0_"):
        problem = "begins with a zero, for which YAML 1.1 and 1.2 read two different values"
        sign = text[0] if text[0] in "+-" else ""
        value = sign + text.lstrip("+-0_")
    elif _PREFIXED.fullmatch(text) and text.strip("+-0bBoO_"):
        problem = "is a number in one of YAML 1.1 and 1.2, and text in the other"
        value = int(text.replace("_", ""), 0)
    elif _SEXAGESIMAL.fullmatch(text) and node.tag != _STR:
        problem = "is a number to the base 60 in YAML 1.1, and text in YAML 1.2"
        value = "the number out"
    elif is_free and text.lower() in _SWITCHES:
        value = _SWITCHES[text.lower()]
        problem = f"is {value} in YAML 1.1, and text in YAML 1.2"
    else:
        return None
    hint = f"write {value}, or '{text}' in quotes where text is meant"
    return UserError(place, f"{text} {problem}", hint)


def options_comment(in_force: Mapping[str, Any]) -> str:
    """Megatron's options of a run as lines behind its recipe, each a comment that can be moved into its `train`."""
    text = yaml.safe_dump({"train": dict(in_force)}, sort_keys=False)
    head = "The training ranks ran with these options of Megatron, of which the recipe left some to their defaults:"
    return "".join(f"# {line}\n" for line in [head, *text.splitlines()])

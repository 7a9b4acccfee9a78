"""Cuts a test's assertion in two: what the judged program computes, and what is asked of that. Pure.

`assert abs(area(3) - 28.27) < 0.01` becomes the expression `area(3)`, computed beside the program, and the condition
`abs(_0 - 28.27) < 0.01`, computed where the program never was. So the expected answer stays out of its reach.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True)
class Cut:
    """Expressions of the program, and a condition on their values `_0`, `_1`...; literal: (x,) if that is `_0 == x`."""

    expressions: tuple[str, ...]
    condition: str
    literal: tuple[Any] | None


class _NotApart(Exception):
    pass


def imports_of(texts: Sequence[str]) -> str:
    """The import statements among the tests' texts, and modules of the standard library that they name."""
    lines: dict[str, None] = {}
    for text in texts:
        for node in ast.walk(_parsed(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                lines[ast.unparse(node)] = None
            elif _is_library(node):
                lines[f"import {node.value.id}"] = None  # pyright: ignore[reportAttributeAccessIssue]
    return "\n".join(lines)


def cut(text: str, imports: str) -> list[Cut] | None:
    """The assertions of one test's text; None when the program's part and the condition cannot be told apart."""
    known = {
        (alias.asname or alias.name).partition(".")[0]
        for node in _parsed(imports).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    cuts = []
    for statement in _parsed(text).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        if not isinstance(statement, ast.Assert):
            return None
        try:
            cuts.append(_cut_one(statement.test, known))
        except _NotApart:
            return None
    return cuts


def _cut_one(test: ast.expr, known: set[str]) -> Cut:
    cutter = _Cutter(known, _stored(test))
    condition = ast.fix_missing_locations(ast.Expression(cutter.visit(test)))
    if not cutter.expressions:
        raise _NotApart
    literal = None
    match condition.body:
        case ast.Compare(left=ast.Name(id="_0"), ops=[ast.Eq()], comparators=[right]) if len(cutter.expressions) == 1:
            literal = _literal(right)
    return Cut(tuple(cutter.expressions), ast.unparse(condition), literal)


class _Cutter(ast.NodeTransformer):
    """Puts `_0`, `_1`... where an expression begins with a name that is neither Python's nor imported."""

    def __init__(self, known: set[str], stored: set[str]) -> None:
        self.known, self.stored = known, stored
        self.expressions: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Lambda | ast.NamedExpr):
            raise _NotApart
        name = _root(node)
        if name is None or name in self.known or name in self.stored or name in _BUILTINS:
            return self.generic_visit(node)
        assert isinstance(node, ast.expr)
        if (_loaded(node) & self.stored) - _stored(node):
            raise _NotApart  # it is computed for each turn of a loop in the condition
        self.expressions.append(ast.unparse(node))
        return ast.Name(f"_{len(self.expressions) - 1}", ast.Load())


def _root(node: ast.AST) -> str | None:
    """The name that an expression begins with: `f` of `f(1).x[2]`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_library(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (
        node.value.id in sys.stdlib_module_names
    )


def _loaded(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def _stored(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError):
        return None


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"a test is no Python ({error}): {text[:200]!r}") from error

"""Splits a test's assertion into expressions of the scored program and a condition on their values. Pure.

`assert abs(area(3) - 28.27) < 0.01` becomes the expression `area(3)`, computed in the program's sandbox, and the
condition `abs(_0 - 28.27) < 0.01`, computed in a sandbox that the program never ran in. So the program cannot reach
the expected answer.
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
    """Expressions of the program, and a condition on their values `_0`, `_1`...; literal: (x,) if it is `_0 == x`."""

    expressions: tuple[str, ...]
    condition: str
    literal: tuple[Any] | None


class _Inseparable(Exception):
    """The program's part of an assertion cannot be separated from the condition."""


def imports_of(texts: Sequence[str]) -> str:
    """The import statements of the tests' texts, and imports of the standard library's modules that they name."""
    lines: dict[str, None] = {}
    for text in texts:
        for node in ast.walk(_parsed(text)):
            match node:
                case ast.Import() | ast.ImportFrom():
                    lines[ast.unparse(node)] = None
                case ast.Attribute(value=ast.Name(id=name)) if name in sys.stdlib_module_names:
                    lines[f"import {name}"] = None
    return "\n".join(lines)


def cut(text: str, imports: str) -> list[Cut] | None:
    """The assertions of one test's text; None when one of them cannot be split."""
    known = {
        (alias.asname or alias.name).partition(".")[0]
        for node in _parsed(imports).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    statements = [
        node for node in _parsed(text).body if not isinstance(node, ast.Import | ast.ImportFrom)
    ]
    try:
        return [_cut_one(statement, known) for statement in statements]
    except _Inseparable:
        return None


def _cut_one(statement: ast.stmt, known: set[str]) -> Cut:
    if not isinstance(statement, ast.Assert):
        raise _Inseparable
    cutter = _Cutter(known, _names(statement.test, ast.Store))
    condition = ast.fix_missing_locations(ast.Expression(cutter.visit(statement.test)))
    if not cutter.expressions:
        raise _Inseparable
    literal = None
    match condition.body:
        case ast.Compare(left=ast.Name(id="_0"), ops=[ast.Eq()], comparators=[right]) if (
            len(cutter.expressions) == 1
        ):
            literal = _literal(right)
    return Cut(tuple(cutter.expressions), ast.unparse(condition), literal)


class _Cutter(ast.NodeTransformer):
    """Replaces expressions that begin with a name neither built in nor imported by `_0`, `_1`..."""

    def __init__(self, known: set[str], stored: set[str]) -> None:
        self.known = known
        self.stored = stored
        self.expressions: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Lambda | ast.NamedExpr):
            raise _Inseparable
        name = _root(node)
        if name is None or name in self.known or name in self.stored or name in _BUILTINS:
            return self.generic_visit(node)
        assert isinstance(node, ast.expr)
        if (_names(node, ast.Load) & self.stored) - _names(node, ast.Store):
            raise _Inseparable  # it is computed for each turn of a loop in the condition
        self.expressions.append(ast.unparse(node))
        return ast.Name(f"_{len(self.expressions) - 1}", ast.Load())


def _root(node: ast.AST) -> str | None:
    """The name that an expression begins with: `f` of `f(1).x[2]`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Call):
            node = node.func
        else:
            node = node.value
    if isinstance(node, ast.Name):
        return node.id
    return None


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The names that are read (ast.Load) or assigned (ast.Store) in a node."""
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, context)
    }


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError):
        return None


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"a test is not Python ({error}): {text[:200]!r}") from error

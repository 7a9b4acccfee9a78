"""Count how dense the code is: expressions a line, ternaries and tuple assignments per 1,000 lines, the largest room.

Also how many modules and classes a prompt passes until it is a gradient, as docs/architecture.md names them.

    python scripts/count_code.py             # megarl/
    python scripts/count_code.py tests       # or any other folders

A line of code has something on it besides a comment or a docstring. An expression is a node of Python's syntax tree
(`ast.expr`), docstrings apart. A tuple assignment gives several values to as many targets (`a, b = c, d`); a value that
is unpacked (`a, b = pair`) and an exchange (`a, b = b, a`) are none.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    lines: int  # of the files, with all that is on them
    code_lines: int
    expressions: int
    ternaries: int
    tuple_assignments: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            lines=self.lines + other.lines,
            code_lines=self.code_lines + other.code_lines,
            expressions=self.expressions + other.expressions,
            ternaries=self.ternaries + other.ternaries,
            tuple_assignments=self.tuple_assignments + other.tuple_assignments,
        )


NOTHING = Counts(lines=0, code_lines=0, expressions=0, ternaries=0, tuple_assignments=0)


def count(source: str) -> Counts:
    """The counts of one file's text."""
    tree = ast.parse(source)
    docstrings = [node.body[0].value for node in ast.walk(tree) if _has_docstring(node)]  # type: ignore[attr-defined]
    nodes = [node for node in ast.walk(tree) if node not in docstrings]
    return Counts(
        lines=source.count("\n"),
        code_lines=len(_code_lines(source) - _lines_of(docstrings)),
        expressions=sum(isinstance(node, ast.expr) for node in nodes),
        ternaries=sum(isinstance(node, ast.IfExp) for node in nodes),
        tuple_assignments=sum(assigns_several(node) for node in nodes),
    )


def _has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return ast.get_docstring(node, clean=False) is not None


def _code_lines(source: str) -> set[int]:
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    return numbers


def _lines_of(docstrings: list[ast.expr]) -> set[int]:
    return {
        number
        for node in docstrings
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def assigns_several(node: ast.AST) -> bool:
    """Whether it gives several values to as many targets, but not to the same ones in another order (`a, b = b, a`)."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    return {ast.unparse(each) for each in target.elts} != {
        ast.unparse(each) for each in node.value.elts
    }


def count_folder(folder: Path) -> dict[str, Counts]:
    """The counts of a folder's Python files by its rooms: its packages and its own modules."""
    counts_by_room: dict[str, Counts] = {}
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0]
        counts_by_room[room] = counts_by_room.get(room, NOTHING) + count(
            path.read_text(encoding="utf-8")
        )
    return counts_by_room


def report(folder: Path) -> list[str]:
    rooms = count_folder(folder)
    if not rooms:
        return [f"{folder}: no Python files"]
    total = sum(rooms.values(), NOTHING)
    per_thousand = 1000 / total.code_lines
    largest = max(rooms, key=lambda room: rooms[room].expressions)
    share = rooms[largest].expressions / total.expressions
    return [
        f"{folder.name}: {total.lines:,} lines, {total.code_lines:,} of code, {total.expressions:,} expressions",
        f"  expressions a line of code             {total.expressions / total.code_lines:5.2f}",
        f"  ternaries per 1,000 lines              {total.ternaries * per_thousand:5.1f}",
        f"  tuple assignments per 1,000 lines      {total.tuple_assignments * per_thousand:5.1f}",
        f"  largest room                           {largest}, {share:.0%} of the expressions",
    ]


def way_of_a_prompt(page: str) -> str:
    """The modules and classes in the section of docs/architecture.md that follows a prompt."""
    section = page.partition("## A prompt becomes a gradient")[2].partition("\n## ")[0]
    modules = set(re.findall(r"`([\w/]+/\w+\.py)`", section))
    classes = set(re.findall(r"`((?:[A-Z][a-z]+)+)`", section))
    return (
        f"from a prompt to its gradient            {len(modules)} modules, {len(classes)} classes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, default=[ROOT / "megarl"], help="folders of Python files"
    )
    for folder in parser.parse_args().folders:
        print("\n".join(report(folder.resolve())))
    print(way_of_a_prompt((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()

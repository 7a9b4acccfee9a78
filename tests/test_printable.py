"""Text of others is shown escaped, and nothing of megarl's reaches a terminal by another way."""

from __future__ import annotations

import ast
import io
import json
import sys
import unicodedata
from collections.abc import Iterator

from megarl.printable import is_hidden, json_line, one_line, printable, show
from megarl.types import UserError, UserErrors
from tests.test_imports import PACKAGE, SOURCES

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\r\x00\x7f\x9b31m\u202egpj.exe\u2066\u200b\ufeff\u2028\ud800\U000e0041"
)
# Which functions may print: all that they print is printable, or is coloured by rich around printable text.
DOORS = {
    "printable.py": {"show"},
    "commands/output.py": {"say_all"},
    "tracking/run_log.py": {"say", "_show", "__exit__"},
    "plan/report.py": {"show"},
    "plan/search_report.py": {"_show"},
    "tracking/progress.py": {"progress_bar"},  # names of recipe keys and numbers
    "rollout/rewards/inside_tests.py": {"main"},  # of a sandbox, into a pipe
}


UNESCAPED = {
    "printable.py",
    # these two look for halves of surrogate pairs, and show nothing of what they make
    "data/files.py",
    "environments/endpoint/request_fields.py",
    "episodes/messages.py",  # these three write for the model
    "episodes/template.py",
    "environments/runtime/results.py",
    "report/recipe_rows.py",  # the page escapes what it embeds, and writes it by textContent alone
    "environments/agents/chat_client.py",  # refuses halves of surrogate pairs, and shows nothing
}


def test_no_character_of_a_hostile_text_is_left() -> None:
    shown = printable(HOSTILE)
    assert shown.isascii() and shown.isprintable()
    assert shown.startswith(
        r"\x1b]0;owned\x07\x1b[2J\r\x00\x7f\x9b31m\u202egpj.exe\u2066\u200b\ufeff\u2028\ud800"
    )
    shown.encode("utf-8")


def test_every_character_that_a_terminal_obeys_or_a_reader_does_not_see_is_escaped() -> None:
    shown: list[str] = []
    hidden: list[str] = []
    for character in map(chr, range(sys.maxunicode + 1)):
        is_shown = not unicodedata.category(character).startswith(("C", "Zl", "Zp"))
        (shown if is_shown else hidden).append(character)
    assert not any(map(is_hidden, shown)) and all(map(is_hidden, hidden))
    assert one_line("".join(shown)) == "".join(shown)
    escaped = one_line("".join(hidden))
    assert escaped.isascii() and escaped.isprintable(), "all of them: none is a letter of ASCII"


def test_words_stay_as_they_are() -> None:
    for text in ("naïve café", "数学 😀", "a\nb\tc", r"\boxed{7}", "٣ + ٤", "e\u0301"):
        assert printable(text) == text
    assert one_line("a\nb\tc") == r"a\nb\tc"


def test_a_line_of_json_reads_back_as_it_was_and_hides_nothing() -> None:
    value = {"response": HOSTILE + "数学 😀\n\\u202e", HOSTILE: [1.5, None, True]}
    line = json_line(value)
    assert json.loads(line) == value
    assert not [character for character in line if is_hidden(character)]
    assert "数学 😀" in line, "words of other languages stay readable"
    line.encode("utf-8")


def test_an_error_is_one_printable_line() -> None:
    error = UserError(f"a{HOSTILE}", "b\nforged: line", "c\x1b[31m")
    assert str(error).isprintable() and str(error).count("\\n") == 1
    other = UserError(f"b{HOSTILE}", "b", "c")
    assert str(UserErrors([error, other, error])).count("\n") == 1, (
        "a line for each, and the same text once"
    )


def test_what_is_shown_is_printable() -> None:
    stream = io.StringIO()
    show(f"{HOSTILE}\nnext", stream)
    assert stream.getvalue() == f"{printable(HOSTILE)}\nnext\n"


def _printing(tree: ast.AST, function: str = "") -> Iterator[str]:
    """The functions in which something is printed or written to a standard stream."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call) and _prints(node.func):
            yield inside
        yield from _printing(node, inside)


def _prints(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id == "print"
    if not isinstance(called, ast.Attribute):
        return False
    writes = called.attr in ("write", "writelines")
    return called.attr == "print" or (writes and ast.unparse(called.value).startswith("sys.std"))


def test_printing_has_its_doors() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in SOURCES}
    printing = {name: set(_printing(ast.parse(text))) for name, text in texts.items()}
    assert {name: found for name, found in printing.items() if found} == DOORS
    assert {name for name, text in texts.items() if "ensure_ascii=False" in text} <= UNESCAPED

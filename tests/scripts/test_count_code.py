"""What counts as a line of code, an expression, a ternary and a tuple assignment."""

from __future__ import annotations

from pathlib import Path

from scripts.count_code import Counts, count, report, way_of_a_prompt

SOURCE = '''"""A docstring
of two lines."""

# A comment.
def double(x):
    """Its docstring."""
    first, second = x, 2  # two values for two targets
    first, second = second, first
    pair = (
        first,
        second,
    )
    first, second = pair
    return first if second else x
'''


def test_docstrings_comments_and_empty_lines_are_no_code() -> None:
    counts = count(SOURCE)
    assert (counts.lines, counts.code_lines) == (14, 9)


def test_a_ternary_and_an_assignment_of_two_values_are_counted() -> None:
    counts = count(SOURCE)
    assert (counts.ternaries, counts.tuple_assignments) == (1, 1)


def test_expressions_are_nodes_of_the_syntax_tree() -> None:
    assert count("a = b + 1\n") == Counts(
        lines=1, code_lines=1, expressions=4, ternaries=0, tuple_assignments=0
    )
    assert count('"""Only words."""\n').expressions == 0


def test_a_folder_without_code_is_said_to_have_none(tmp_path: Path) -> None:
    assert report(tmp_path) == [f"{tmp_path}: no Python files"]


def test_the_largest_room_is_a_package_or_a_module(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "large.py").write_text("a = [1, 2, 3]\n")
    (tmp_path / "small.py").write_text("a = 1\n")
    assert report(tmp_path)[-1].split("  ")[-1].strip() == "room, 71% of the expressions"


def test_modules_and_classes_of_the_prompts_section_are_counted_once() -> None:
    page = """## A prompt becomes a gradient
`data/prompts.py` makes a `Prompt`; `data/prompts.py`, again, and `rollout/sglang/engine.py`: a `SampleGroup`.

## A turn is answered
`episodes/rows.py` and an `Episode`.
"""
    assert way_of_a_prompt(page).split("  ")[-1].strip() == "2 modules, 2 classes"

"""Suggestions for misspelt names: the known names that are nearest in edits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_LONGEST_NAME = 100  # a longer name is no misspelling, and comparing it takes long


def did_you_mean(names: Sequence[str], otherwise: str) -> str:
    """The hint of an error: to write one of at most three `names`; `otherwise` where there are none."""
    return f"did you mean {' or '.join(names[:3])}?" if names else otherwise


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names at the smallest edit distance, in their order; none where that distance is too large.

    The largest distance is one letter, and one more for every four letters of the name.
    """
    if len(name) > _LONGEST_NAME:
        return []
    distances = {other: edit_distance(name, other) for other in known}
    smallest = min(distances.values(), default=len(name))
    if smallest > 1 + len(name) // 4:
        return []
    return [other for other, distance in distances.items() if distance == smallest]


def edit_distance(a: str, b: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour to turn `a` into `b` (Damerau, 1964)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        older = before
        before = row
        row = [i]
        for j, other in enumerate(b, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                row[j] = min(row[j], older[j - 2] + 1)
    return row[-1]

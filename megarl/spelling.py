"""The known names that an unknown one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names at the smallest edit distance, in their order; none where that is more than a slip or two.

    A slip is one letter, and one more for each four letters of the name.
    """
    names = list(known)
    if not names or len(name) > 100:
        return []
    distances = {other: edits(name, other) for other in names}
    best = min(distances.values())
    return [other for other, distance in distances.items() if distance == best] if best <= 1 + len(name) // 4 else []


def edits(a: str, b: str) -> int:
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

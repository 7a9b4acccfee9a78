"""Exact matches of the answer."""

from __future__ import annotations

from megarl.types.json_objects import Columns


def score(response: str, answer: str, row: Columns) -> float:
    """1 when response and answer are equal but for surrounding white space, else 0."""
    return float(response.strip() == answer.strip())

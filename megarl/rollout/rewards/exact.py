"""Exact matches of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def score(response: str, answer: str, row: Mapping[str, Any]) -> float:
    """1 when response and answer are equal but for surrounding white space, else 0."""
    return float(response.strip() == answer.strip())

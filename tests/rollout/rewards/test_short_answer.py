"""Exact match of short answers."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.rollout.rewards.short_answer import score

ROW = {"golden_answers": ["Wilhelm Conrad Röntgen", "The Röntgen"], "aliases": ["W. C. Röntgen"]}


@pytest.mark.parametrize(
    ("response", "is_correct"),
    [
        ("<answer>Wilhelm Conrad Röntgen</answer>", True),
        (
            "<think>Was it <answer>Planck</answer>?</think>\n\nIt was <answer> the  röntgen. </answer>",
            True,
        ),
        ("<answer>Röntgen</answer>", True),  # articles do not count
        ("<answer>Planck</answer> and not <answer>Röntgen", False),
        ("<answer>Röntgen</answer> or <answer>Planck</answer>", False),
        ("Wilhelm Conrad Röntgen", False),
        ("<answer>the</answer>", False),
        ("<answer></answer>", False),
        ("<answer>Röntgen or Wilhelm Conrad Röntgen</answer>", False),
        ("<answer>" + "the " * 1000 + "Röntgen</answer>", False),
    ],
)
def test_the_last_answer_is_compared(response: str, is_correct: bool) -> None:
    result = score(response, "unused", ROW)
    assert (result.reward, result.correct) == (float(is_correct), is_correct)


@pytest.mark.parametrize(
    ("row", "arguments", "is_correct"),
    [
        (ROW, {}, False),
        (ROW, {"answers": "aliases"}, True),
        ({}, {}, True),
        ({"golden_answers": []}, {}, True),
        ({"golden_answers": "W C RÖNTGEN"}, {}, True),
        ({"golden_answers": ["WC Röntgen", 1845]}, {}, False),
    ],
)
def test_the_references_are_of_the_row(
    row: dict[str, Any], arguments: dict[str, Any], is_correct: bool
) -> None:
    """The answer's own column counts where the row has no others."""
    result = score("<answer>W. C. Röntgen</answer>", "W. C. Röntgen", row, wrong=-1.0, **arguments)
    assert (result.reward, result.correct, result.answer) == (
        1.0 if is_correct else -1.0,
        is_correct,
        "w c röntgen",
    )

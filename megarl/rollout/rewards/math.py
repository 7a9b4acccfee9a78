"""Mathematical answers, which may be written in many ways: math-verify decides whether two are equal."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from megarl.rollout.rewards.boxes import last_box
from megarl.types.json_objects import Columns
from megarl.types.reward_result import RewardResult

_TAIL = 1000  # characters in which a final answer is looked for where nothing is boxed
_LONGEST = 400  # characters of an answer; data sets have no longer ones
_DEEPEST = 40  # nested brackets, because the parser recurses
_HOSTILE = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\d{60}",  # numbers that are only written to be costly
        r"(?:\^|\*\*)\s*[{(]?\s*-?\d{5}",  # exponents of five digits
        r"(?:\^|\*\*)[\s{(]*-?\d+[\s})]*(?:\^|\*\*)",  # towers of exponents
        r"\d{4}\s*!|!\s*!|!\s*\)\s*!",  # factorials of large numbers, or of each other
        r"[a-zA-Z][^(]{0,80}\)\s*\^\s*\{?\s*\d{3}",  # large powers of sums
        r"\\d?binom.{0,20}?\d{5}",
        r"(?:\\begin\b.*){3}",  # matrices of matrices
    )
]
_DOLLAR = re.compile(r"(?<!\\)\$")  # that is not escaped
_EMPHASIS = re.compile(r"\*\*|`|(?<!\S)\*(?=[^*\n]+\*(?!\w))|(?<=[^\s*])\*(?!\S)")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_ORNAMENT = re.compile(r"\\(?:left|right)(?![a-z])|\\[!,;]|\\?\$|\s|\.$")
_UNDONE = re.compile(r"\\(?:sum|prod|o?i+nt|lim)(?![a-z])")
_TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

# it warns that there is no timeout; the worker has one
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def score(
    response: str, answer: str, row: Columns, *, correct: float = 1.0, wrong: float = 0.0
) -> RewardResult:
    """`correct` if the last \\boxed{...}, or else the final answer in the end of the text, equals the answer.

    Expressions that would be costly to compute (towers of exponents, endless numbers), sums, integrals and limits are
    wrong without being computed, unless the answer has the same kind. One that is not recognised ends its worker; with
    `reward.on_failure: penalise` it counts as wrong too.
    """
    prediction = final_answer(response)
    right = RewardResult(correct, True, _bare(answer))
    if prediction and _bare(prediction) == _bare(answer):
        return right
    if (
        not prediction
        or is_hostile(prediction, answer)
        or (_UNDONE.search(prediction) and not _UNDONE.search(answer))
    ):
        return RewardResult(
            wrong, False, _bare(prediction) if prediction.startswith("\\boxed") else ""
        )
    gold = _gold(answer)
    parsed = parse(prediction, _TARGETS, parsing_timeout=None)  # type: ignore[arg-type]
    if gold and parsed and verify(gold, parsed, timeout_seconds=None):
        return right
    return RewardResult(wrong, False, str(parsed[-1]) if parsed else "")


def final_answer(response: str) -> str:
    """The last \\boxed{...}, or else the end of the text; "" for a box that is empty or not closed."""
    content = last_box(response)
    if content is None:
        return _EMPHASIS.sub("", response[-_TAIL:])
    return f"\\boxed{{{content}}}" if content.strip() else ""


def is_hostile(text: str, answer: str = "") -> bool:
    """Whether a text looks costly to compute in a way that the answer does not."""
    boxed = text.startswith("\\boxed")
    depth = deepest = 0
    for letter in text:
        depth += (letter in "({[") - (letter in ")}]")
        deepest = max(deepest, depth)
    if (boxed and len(text) > _LONGEST) or deepest > _DEEPEST:
        return True
    return any(rule.search(text) and not rule.search(answer) for rule in _HOSTILE)


def _bare(text: str) -> str:
    """The text without its box, and without dollars, spaces and sizes of brackets, which do not change its value."""
    if text.startswith("\\boxed"):
        text = text[text.index("{") + 1 : -1]
    plain = _ORNAMENT.sub("", _TEXT.sub(r"\1", text))
    return re.sub(r"\^\{(\w)\}", r"^\1", re.sub(r"\\[dt]frac", r"\\frac", plain))


@lru_cache(maxsize=64)  # a group's samples have one answer
def _gold(answer: str) -> list[Any]:
    is_marked = _DOLLAR.search(answer) or any(mark in answer for mark in ("\\boxed", "\\(", "\\["))
    return parse(answer if is_marked else f"\\boxed{{{answer}}}", _TARGETS, parsing_timeout=None)  # type: ignore[arg-type]

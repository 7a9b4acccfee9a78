"""Short answers to questions: exact match with one of several references, as in SQuAD (arXiv 1606.05250)."""

from __future__ import annotations

import re
import string

from megarl.types.json_objects import Columns
from megarl.types.reward_result import RewardResult

_OPEN = "<answer>"
_CLOSE = "</answer>"
_LONGEST = 1000  # characters of an answer; those of data sets have a few words
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(
    response: str,
    answer: str,
    row: Columns,
    *,
    answers: str = "golden_answers",
    correct: float = 1.0,
    wrong: float = 0.0,
) -> RewardResult:
    """`correct` if the response's last <answer>...</answer> equals a reference, else `wrong`.

    References are the texts in the row's column `answers`, or `answer` alone where the row has none. Letter case,
    punctuation, articles and white space do not count.
    """
    prediction = _plain(_last(response))
    references = row.get(answers) or [answer]
    if isinstance(references, str):
        references = [references]
    is_correct = bool(prediction) and prediction in map(_plain, references)
    return RewardResult(correct if is_correct else wrong, is_correct, prediction)


def _last(response: str) -> str:
    """The text of the last answer; "" where there is none, or one that is not closed or long."""
    _, opening, rest = response.rpartition(_OPEN)
    text, closing, _ = rest.partition(_CLOSE)
    if opening and closing and len(text) <= _LONGEST:
        return text
    return ""


def _plain(text: object) -> str:
    lower = str(text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", lower).split())

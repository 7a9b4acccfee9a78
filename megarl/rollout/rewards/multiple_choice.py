"""Multiple-choice questions: the letter of the option that a response chooses, if it chooses one."""

from __future__ import annotations

import re

from megarl.rollout.rewards.boxes import last_box
from megarl.types.json_objects import Columns
from megarl.types.reward_result import RewardResult

_WRAP = r"(?:[\s*_$({\[`\"'<>]|\\\()*"
_WRAPS = rf"{_WRAP}(?:\\(?:text|textbf|mathrm|mathbf|boxed)\{{)?{_WRAP}"
_END = r"(?![A-Za-z0-9'’])"
_IN_BOX = re.compile(rf"{_WRAPS}([A-Za-z]){_END}(.*)", re.DOTALL)
_IS = r"(?:\s+is)?(?:\s*:)?"
_LETTER = rf"{_WRAPS}([A-Z]){_END}(?!(?<=I)\s+[a-z])"  # I is also the first person
_ANSWER = re.compile(rf"(?i:\banswer\b{_IS}(?:\s+(?:option|choice)\b)?{_IS}){_LETTER}")
_OPTION = re.compile(rf"(?i:\b(?:option|choice)\b{_IS}){_LETTER}")
_OR_ANOTHER = re.compile(r"[\s*)}\]]*(?:or|and|,|/|&)[\s*({\[]*[A-Z]\b|[\s)}\]]+[A-Z][\s)}\]]*$")
_IN_BRACKETS = re.compile(rf"\(([A-Z])\){_END}")
_STANDING = re.compile(r"(?<![A-Za-z0-9'’\\])([A-Z])(?=[\s.,:;!?)*\]]|$)(?!\s+(?!or\b|and\b)[a-z])")
_TAIL = 2000  # characters


def score(
    response: str,
    answer: str,
    row: Columns,
    *,
    options: str = "ABCDEFGHIJ",
    correct: float = 1.0,
    wrong: float = 0.0,
) -> RewardResult:
    """`correct` if the response chooses the answer's letter, one of the options, else `wrong`."""
    letter = answer.strip().strip("()[].*").upper()
    chosen_letter = chosen(response, options)
    is_right = bool(letter) and chosen_letter == letter
    return RewardResult(correct if is_right else wrong, is_right, chosen_letter or "")


def chosen(response: str, options: str) -> str | None:
    """The letter in the last box, else after the last "answer is", else after the last "option", else the only one in
    brackets or as a word of its own.

    None where there are several such letters, or none.
    """
    tail = response[-_TAIL:]
    box = last_box(tail)
    if box is not None:
        match = _IN_BOX.fullmatch(box)
        if match is None or _OR_ANOTHER.match(match[2]) or match[1].upper() not in options:
            return None
        return match[1].upper()
    for pattern in (_ANSWER, _OPTION):
        matches = [match for match in pattern.finditer(tail) if match[1] in options]
        if matches:
            last = matches[-1]
            return None if _OR_ANOTHER.match(tail, last.end()) else last[1]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    if not lines or len({line for line in lines if line in options}) > 1:
        return None
    for pattern in (_IN_BRACKETS, _STANDING):
        for text in (lines[-1], tail):
            letters = {letter for letter in pattern.findall(text) if letter in options}
            if letters:
                return letters.pop() if len(letters) == 1 else None
    return None

"""The last \\boxed{...} of a response, in which models write their final answer."""

from __future__ import annotations

_BOX = "\\boxed"
_LONGEST = 4000  # characters
_NEAR = 20  # characters between the command and its bracket


def last_box(text: str) -> str | None:
    """The content of the last box; "" where it is empty, or not closed near its start; None: there is no box."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    opening = text.find("{", start, start + _NEAR)
    if opening < 0:
        return ""
    depth = 0
    for index in range(opening, min(len(text), opening + _LONGEST)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if not depth:
                return text[opening + 1 : index]
    return ""

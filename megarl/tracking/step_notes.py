"""What a step tells on the terminal beside its progress line: what has failed, and what was refused. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megarl.types import GroupSummary

_MOST_NAMES = 8


def step_notes(step: int, groups: Sequence[GroupSummary]) -> Iterator[str]:
    """A line each for failed rewards, failed calls of tools, and fields that the endpoint has refused to agents."""
    failures = [failure for group in groups for failure in group.failures]
    if failures:
        verdicts = _counted(len(failures), "verdict", "verdicts")
        yield f"step {step}: {verdicts} failed, the first {failures[0]}"
    failed_calls = [call for group in groups for call in group.failed_calls]
    if failed_calls:
        calls = _counted(len(failed_calls), "call of a tool", "calls of tools")
        yield f"step {step}: {calls} failed, the first: {failed_calls[0]}"
    refused: Counter[str] = Counter()
    for group in groups:
        refused.update(group.refused_fields)
    if refused:
        requests = _counted(refused.total(), "request of an agent was", "requests of agents were")
        often = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
        names = ", ".join(f"{name} ({number})" for name, number in often[:_MOST_NAMES])
        if len(often) > _MOST_NAMES:
            names += f" and {len(often) - _MOST_NAMES} others"
        yield f"step {step}: {requests} refused for a field or a path: {names}"


def _counted(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"

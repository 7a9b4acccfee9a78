"""What a step tells on the terminal beside its progress line: what has failed, and what was refused. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megarl.tracking.metrics import faults_by_room
from megarl.types import GroupSummary
from megarl.types.worker_faults import ServiceFaults

_MOST_NAMES = 8


def step_notes(step: int, groups: Sequence[GroupSummary]) -> Iterator[str]:
    """A line each for failed rewards, failed calls of tools, every service that was down, and refused fields."""
    failures = [failure for group in groups for failure in group.failures]
    if failures:
        verdicts = _counted(len(failures), "verdict", "verdicts")
        yield f"step {step}: {verdicts} failed, the first {failures[0]}"
    failed_calls = [call for group in groups for call in group.failed_calls]
    if failed_calls:
        calls = _counted(len(failed_calls), "call of a tool", "calls of tools")
        yield f"step {step}: {calls} failed, the first: {failed_calls[0]}"
    for faults in faults_by_room(groups).values():
        by_name: dict[str, list[ServiceFaults]] = {}
        for service in faults.services:
            by_name.setdefault(service.service, []).append(service)
        for name, parts in by_name.items():
            if any(part.down_s for part in parts):
                yield f"step {step}: {_outage(name, parts)}"
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


def _outage(name: str, parts: Sequence[ServiceFaults]) -> str:
    """What calls have met of a service that was down for a part of the step. parts: of its engines, in any order."""
    outages = sum(part.outages for part in parts)
    recoveries = sum(part.recoveries for part in parts)
    if outages > recoveries or not recoveries:
        state = "is down"
    else:
        state = "was down, and answers again"
    reason = next((part.reason for part in parts if part.reason), "no answer")
    down_s = sum(part.down_s for part in parts)
    retries = _counted(sum(part.retries for part in parts), "try was", "tries were")
    lost = _counted(sum(part.lost for part in parts), "call", "calls")
    return (
        f"{name} {state} ({reason}; {down_s:.0f} s, summed over engines): "
        f"{retries} repeated, {lost} had no answer"
    )


def _counted(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"

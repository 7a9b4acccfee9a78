"""What a step tells on the terminal beside its progress line: what has failed, and what was refused. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

_MOST_NAMES = 8


def step_notes(
    step: int,
    failures: Sequence[str],
    failed_calls: Sequence[str],
    refused_fields: Mapping[str, int],
) -> Iterator[str]:
    """A line each for failed rewards, failed calls of tools, and fields that the endpoint has refused to agents."""
    if failures:
        count = len(failures)
        yield f"step {step}: {count} {'verdict' if count == 1 else 'verdicts'} failed, the first {failures[0]}"
    if failed_calls:
        count = len(failed_calls)
        if count == 1:
            calls = "call of a tool"
        else:
            calls = "calls of tools"
        yield f"step {step}: {count} {calls} failed, the first: {failed_calls[0]}"
    if refused_fields:
        count = sum(refused_fields.values())
        if count == 1:
            requests = "request of an agent was"
        else:
            requests = "requests of agents were"
        often = sorted(refused_fields.items(), key=lambda item: (-item[1], item[0]))
        names = ", ".join(f"{name} ({number})" for name, number in often[:_MOST_NAMES])
        if len(often) > _MOST_NAMES:
            more = f" and {len(often) - _MOST_NAMES} others"
        else:
            more = ""
        yield f"step {step}: {count} {requests} refused for a field or a path: {names}{more}"

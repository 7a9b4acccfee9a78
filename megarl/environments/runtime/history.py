"""What was done with an instance of an environment, and what came of it: to be done again elsewhere. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from megarl.environments.runtime.environment_processes import JobFailure, JobResult
from megarl.environments.runtime.results import CallResult
from megarl.types.json_objects import Columns, JsonObject

Operation = tuple[Any, ...]  # as the worker reads it, without its number and its instance
# operations that were done together, by their places
Together = dict[int, tuple[Operation, JobResult]]


def to_json(history: Sequence[Together]) -> str | None:
    """The history but for the row and the seed of the episode; None where it cannot be written.

    Calls whose arguments did not fit, which the environment has not seen, are left out.
    """
    steps = [
        [[step[:1] if step[0] == "open" else step, _result(result)] for step, result in _seen(done)]
        for done in history
    ]
    try:
        return json.dumps(steps)
    except (RecursionError, TypeError, ValueError):  # arguments that a model has nested too deeply
        return None


def from_json(text: str, row: Columns, seed: int) -> list[Together]:
    """The history that `to_json` wrote. Raises ValueError and RecursionError where it cannot be read."""
    return [
        {
            place: (_read(step, row, seed), _result_of(result))
            for place, (step, result) in enumerate(done)
        }
        for done in json.loads(text)
    ]


def is_interrupted(result: JobResult) -> bool:
    """Whether it is not known how far an operation came. The instance is replaced, and a replay leaves it out."""
    return isinstance(result, JobFailure) and result.kind in ("timeout", "memory", "ended")


def function_of(operation: Operation) -> str:
    """The name of the user's function that an operation calls."""
    kind = operation[0]
    if kind == "call":
        return operation[1]
    if kind == "open":
        return "reset"
    return kind


def timeless(result: JobResult) -> JobResult:
    """What a replay must come to."""
    if isinstance(result, CallResult | JobFailure):
        return replace(result, seconds=0.0)
    return result


def _seen(done: Together) -> list[tuple[Operation, JobResult]]:
    steps = (done[place] for place in sorted(done))
    return [
        (operation, result)
        for operation, result in steps
        if not (isinstance(result, JobFailure) and result.kind == "arguments")
    ]


def _read(operation: Sequence[Any], row: Columns, seed: int) -> Operation:
    if operation[0] == "open":
        return ("open", row, seed)
    return tuple(operation)


def _result(result: JobResult) -> JsonObject | None:
    if result is None:
        return None
    assert isinstance(result, CallResult | JobFailure), "a reward or a lost job is in no history"
    return asdict(result)


def _result_of(result: JsonObject | None) -> JobResult:
    if result is None:
        return None
    if "kind" in result:
        return JobFailure(**result)
    return CallResult(**result)

"""A run's JSON lines, read back when it is resumed: whole records up to a step, or the fault of a broken line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.types import UserFault, UserFaults

_MEND = "remove the line, or choose another run.name"


@dataclass(frozen=True)
class Line:
    """One record, and its bytes in the file with the end of the line."""

    raw: bytes
    record: Mapping[str, Any]


def read_lines(file: Path, last_step: int, *, only_numbers: bool = True) -> list[Line] | UserFault:
    """The lines up to a step, or the fault of the first broken line in the whole file.

    A last line without a line end was cut off when its run ended: it is left out. only_numbers: every value of a record
    must be a number or null, as in metrics.jsonl.
    """
    *whole, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]
    lines = []
    for number, raw in enumerate(whole, start=1):
        record = _parsed(raw)
        problem = record if isinstance(record, str) else _problem(record, only_numbers)
        if problem:
            return UserFault(f"{file}:{number}", problem, _MEND)
        assert isinstance(record, dict)
        if record["step"] <= last_step:
            lines.append(Line(raw + b"\n", record))
    return lines


def checked(files: Sequence[list[Line] | UserFault]) -> list[list[Line]]:
    """The lines of every file. Raises UserFaults with the faults of broken files."""
    faults = [found for found in files if isinstance(found, UserFault)]
    if faults:
        raise UserFaults(faults)
    return [found for found in files if not isinstance(found, UserFault)]


def _parsed(raw: bytes) -> Any:
    """The record of a line, or in words why the line has none."""
    try:
        found = json.loads(raw.decode("utf-8"))
    except RecursionError:
        return "is nested too deep for JSON"
    except ValueError as error:  # of JSON, or of UTF-8
        return f"is not JSON ({error})"
    return found if isinstance(found, dict) else f"is not a record but {type(found).__name__}"


def _problem(record: Mapping[str, Any], only_numbers: bool) -> str:
    if type(record.get("step")) is not int:
        return "has no whole number as its step"
    wrong = [name for name, value in record.items() if value is not None and type(value) not in (int, float)]
    return f"has something other than a number as {wrong[0]!r}" if only_numbers and wrong else ""

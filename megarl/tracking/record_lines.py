"""A run's own JSON lines, read back when it goes on: whole records up to a step, or where they are broken."""

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
    """One record of the file, and its bytes with the end of the line."""

    raw: bytes
    record: Mapping[str, Any]


def read_lines(file: Path, last_step: int, *, only_numbers: bool = True) -> list[Line] | UserFault:
    """The lines up to a step; the fault of the first broken line of all.

    A last line without its end was cut off with the run that wrote it: it is left out. only_numbers: every value of a
    record is a number or null, as in metrics.jsonl.
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
    """The lines of every file. Raises UserFaults for those that are broken."""
    faults = [found for found in files if isinstance(found, UserFault)]
    if faults:
        raise UserFaults(faults)
    return [found for found in files if not isinstance(found, UserFault)]


def _parsed(raw: bytes) -> Any:
    """The value of a line of JSON, or in words why there is none."""
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
    words = [name for name, value in record.items() if value is not None and type(value) not in (int, float)]
    return f"has something other than a number as {words[0]!r}" if only_numbers and words else ""

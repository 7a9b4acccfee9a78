"""A run's JSON lines, read back when it is resumed: whole records up to a step, or the error of a broken line."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.types import UserError
from megarl.types.json_objects import JsonObject

_HINT = "remove the line, or choose another run.name"


def read_lines(
    file: Path, last_step: int, errors: list[UserError], *, only_numbers: bool = True
) -> list[tuple[bytes, JsonObject]]:
    """(bytes in the file with the end of the line, record) of each line up to a step.

    The first broken line in the whole file is added to `errors`. A last line without a line end was cut off when its
    run ended: it is left out. only_numbers: every value of a record must be a number or null, as in metrics.jsonl.
    """
    *whole, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]
    lines = []
    for number, raw in enumerate(whole, start=1):
        record = _parsed(raw, only_numbers)
        if isinstance(record, str):
            errors.append(UserError(f"{file}:{number}", record, _HINT))
            break
        if record["step"] <= last_step:
            lines.append((raw + b"\n", record))
    return lines


def _parsed(raw: bytes, only_numbers: bool) -> JsonObject | str:
    """The record of a line, or in words why the line has none."""
    try:
        record = json.loads(raw.decode("utf-8"))
    except RecursionError:
        return "is nested too deep for JSON"
    except ValueError as error:  # of JSON, or of UTF-8
        return f"is not JSON ({error})"
    if not isinstance(record, dict):
        return f"is not a record but {type(record).__name__}"
    if type(record.get("step")) is not int:
        return "has no whole number as its step"
    wrong = [
        name
        for name, value in record.items()
        if value is not None and type(value) not in (int, float)
    ]
    if only_numbers and wrong:
        return f"has something other than a number as {wrong[0]!r}"
    return record

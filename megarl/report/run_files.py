"""What the folder of a run holds: records, samples, losses and the recipe, also while the run is alive."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.tracking.loss_table import read_losses
from megarl.tracking.record_lines import read_lines
from megarl.types import UserError, UserErrors
from megarl.types.json_objects import JsonObject, depth
from megarl.types.losses import Loss

_DIGITS = 6  # of a number on the page
MOST_SAMPLE_BYTES = 64 * 1024 * 1024  # on a page, as lines of samples.jsonl
_LAST_STEP = 2**63
_DEEPEST = 100  # of a sample's JSON
_MOST_ID = 2**53  # of whole numbers that a browser reads exactly
_MOST_RECORDS = 5000  # on a page


@dataclass
class FolderContents:
    """A run's folder, read.

    records: of metrics.jsonl, whose numbers that are not finite are None. samples: lines of samples.jsonl. losses:
    None where losses.jsonl is there and cannot be read. recipe: None where recipe.yaml is not one of this version;
    recipe_text is its text then. notes: what is left out, a line each.
    """

    folder: Path
    records: Sequence[JsonObject]
    samples: Sequence[JsonObject]
    losses: Sequence[Loss] | None
    recipe: Recipe | None
    recipe_text: str
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.absolute().name


def read_run(folder: Path) -> FolderContents:
    """Read a run's folder. Raises UserError where there is no run."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise UserError(
            str(folder),
            "has no metrics.jsonl",
            "name the folder of a run that has begun, as runs/quickstart",
        )
    notes: list[str] = []
    try:
        records = _records(file, notes)
        samples = _samples(folder / "samples.jsonl", notes)
        recipe, text = _recipe(folder / "recipe.yaml", notes)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise UserError(str(folder), problem, "see the permissions of its files") from None
    losses = _losses(folder / "losses.jsonl", notes)
    return FolderContents(folder, records, samples, losses, recipe, text, notes)


def columns(records: Sequence[JsonObject]) -> JsonObject:
    """The records by metric, each a list with a number or None for each record."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [_shortened(record.get(name)) for record in records] for name in names}


def _shortened(value: float | None) -> float | None:
    """A number with the digits that a page shows; whole numbers stay as they are."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def _records(file: Path, notes: list[str]) -> list[JsonObject]:
    errors: list[UserError] = []
    lines = read_lines(file, _LAST_STEP, errors)
    notes += [f"{error}: the records from there on are left out" for error in errors]
    every = math.ceil(len(lines) / _MOST_RECORDS)
    if every > 1:
        notes.append(
            f"metrics.jsonl is long: one of {every} records is shown, and each evaluation and the last record"
        )
    return [
        {name: _floatable(value) for name, value in record.items()}
        for number, (_, record) in enumerate(lines)
        if number % every == 0 or number == len(lines) - 1 or "eval/accuracy" in record
    ]


def _floatable(value: float | None) -> float | None:
    """The number, or None where it is a whole number beyond the largest float, which JSON may have."""
    is_too_large = isinstance(value, int) and abs(value) > sys.float_info.max
    return None if is_too_large else value


def _samples(file: Path, notes: list[str]) -> list[JsonObject]:
    """The whole lines of samples.jsonl; of a file that no browser would take, evenly chosen ones."""
    if not file.is_file():
        notes.append("samples.jsonl is not there: no samples are shown")
        return []
    # odd, so that it is not always the same place in the groups of a step
    every = math.ceil(file.stat().st_size / MOST_SAMPLE_BYTES) | 1
    samples = []
    num_broken = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            if number % every or not line.endswith(b"\n"):
                continue
            sample = _parsed(line)
            if sample is None:
                num_broken += 1
            else:
                samples.append(sample)
    if every > 1:
        notes.append(f"samples.jsonl is large: one of {every} samples is shown")
    if num_broken:
        notes.append(f"samples.jsonl has {num_broken} lines that are no samples: they are left out")
    return samples


def _parsed(line: bytes) -> JsonObject | None:
    """The sample of a line; None where it has none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # the page's data has a few levels more
    return value if _is_sample(value) and depth(value) <= _DEEPEST else None


def _is_sample(value: Any) -> bool:
    match value:
        case {"step": int(), "prompt": str(), "response": str(), "reward": int() | float() | None}:
            rows = value.get("rows", [])
            return (
                _is_showable(value.get("episode"))
                and _are_turns(value)
                and isinstance(rows, list)
                and all(_is_row(row) for row in rows)
            )
    return False


def _is_row(value: Any) -> bool:
    """Whether it is the tokens of a row, as `row_diffs.shown_tokens` makes them."""
    match value:
        case {
            "token_ids": list(token_ids),
            "engine_logp": list(engine_logp),
            "trainer_logp": list(trainer_logp),
            "trained": list(trained),
            "parts": list(parts),
        }:
            arrays = (token_ids, engine_logp, trainer_logp, trained)
            whole = [*token_ids, *trained, *(number for part in parts for number in _pair(part))]
            return (
                len({len(array) for array in arrays}) == 1
                and all(isinstance(number, int) and abs(number) < _MOST_ID for number in whole)
                and all(isinstance(number, int | float) for number in engine_logp + trainer_logp)
            )
    return False


def _pair(part: Any) -> list[Any]:
    """A version and its number of tokens; of anything else what is no number."""
    return part if isinstance(part, list) and len(part) == 2 else [part]


def _is_showable(value: Any) -> bool:
    """Whether the page can show an episode; its fields stand beside the sample's, whose `rows` it must not replace."""
    if not isinstance(value, dict):
        return True
    return "rows" not in value and _are_turns(value)


def _are_turns(value: JsonObject) -> bool:
    """Whether the turns, if there are any, and their calls are objects."""
    turns = value.get("turns")
    if not isinstance(turns, list):
        return True
    for turn in turns:
        if not isinstance(turn, dict):
            return False
        calls = turn.get("calls")
        if isinstance(calls, list) and not all(isinstance(call, dict) for call in calls):
            return False
    return True


def _losses(file: Path, notes: list[str]) -> list[Loss] | None:
    try:
        file.open("rb").close()
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"losses.jsonl cannot be read ({error.strerror}): no losses are shown")
        return None
    return read_losses(file)


def _recipe(file: Path, notes: list[str]) -> tuple[Recipe | None, str]:
    if not file.is_file():
        notes.append("recipe.yaml is not there: neither the recipe nor the placement is shown")
        return None, ""
    try:
        return load_recipe(file), ""
    except UserErrors as raised:
        reason = raised.errors[0]
        notes.append(f"recipe.yaml is shown as it is, for this version cannot read it: {reason}")
        return None, file.read_text(encoding="utf-8", errors="replace")

"""Print the accuracies of a run's evaluations in one line, for scripts that compare runs.

    python scripts/show_accuracies.py LABEL SINCE RECIPE [a.b=c ...]

RECIPE and what follows are as for `megarl train`, whose options are passed over. Of the recipe's runs it is the last;
where none has written a record since SINCE (Unix seconds), as with --dry-run, nothing is printed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.loading import load_recipe

_LABEL_WIDTH = 32


def last_records(folder: Path, name: str, since: float) -> Path | None:
    """metrics.jsonl of the last of the runs `name`, `name-2`...; None where none has written there since then."""
    run_pattern = re.compile(re.escape(name) + r"(-\d+)?")
    files = [
        file for file in folder.glob("*/metrics.jsonl") if run_pattern.fullmatch(file.parent.name)
    ]
    times = {file: file.stat().st_mtime for file in files}
    last = max(files, key=times.__getitem__, default=None)
    return last if last and times[last] >= since else None


def line(label: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The accuracies of all records that have one, each after the moment that it is of."""
    cells = [
        f"{_moment(record):>12} {record['eval/accuracy']:6.1%}"
        for record in records
        if "eval/accuracy" in record
    ]
    return f"{label:{_LABEL_WIDTH}}{''.join(cells)}"


def _moment(record: Mapping[str, Any]) -> str:
    if record["step"]:
        return f"step {record['step']}"
    return "warm start" if "warm_start/loss" in record else "before"


def main() -> None:
    label, since, recipe, *others = sys.argv[1:]
    run = load_recipe(Path(recipe), [word for word in others if not word.startswith("-")]).run
    if file := last_records(Path(run.dir), run.name, float(since)):
        print(
            line(
                label,
                [json.loads(record) for record in file.read_text(encoding="utf-8").splitlines()],
            )
        )


if __name__ == "__main__":
    main()

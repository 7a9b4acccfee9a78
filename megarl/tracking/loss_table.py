"""losses.jsonl of a run, which a run that resumes goes on with, and the table of it at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from megarl.printable import printable
from megarl.types.losses import Loss

_MOST_LETTERS = 80  # of a cause


def read_losses(file: Path) -> list[Loss]:
    """The losses of a run so far, each as its last line has it. Lines that are none are passed over."""
    losses: dict[tuple[str, float], Loss] = {}
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError):
                loss = Loss(**json.loads(line))
                losses[str(loss.what), float(loss.began_s)] = loss
    return list(losses.values())


def loss_table(losses: Sequence[Loss]) -> Table:
    """A row for each loss: when, what, why, and after how many seconds its work went on."""
    table = Table(title="what was lost", title_justify="left")
    columns: list[tuple[str, Any]] = [
        ("UTC", "left"), ("what", "left"), ("why", "left"), ("back after, s", "right")
    ]  # fmt: skip
    for name, justify in columns:
        table.add_column(name, justify=justify)
    for loss in losses:
        back = f"{loss.back_after_s:.1f}" if isinstance(loss.back_after_s, float) else ""
        cells = (
            str(loss.at)[:19].replace("T", " "),
            loss.what,
            str(loss.cause)[:_MOST_LETTERS],
            back,
        )
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    return table

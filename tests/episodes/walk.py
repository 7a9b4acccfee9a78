"""An environment whose episodes phases leave open: it counts steps, and waits where its row says so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.environments import Environment, Observation


class Walk(Environment):
    """row: `gate`, a file that has to be there for `fetch`; `closed`: for `reset`."""

    def __init__(self) -> None:
        self._steps = 0
        self._row: Mapping[str, Any] = {}

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        self._row = row
        if row.get("closed"):
            await asyncio.Event().wait()
        return row.get("opening")

    def step(self, count: int) -> Observation:
        """Go some steps."""
        self._steps += count
        return Observation(f"you went {self._steps}", reward=count / 8)

    async def fetch(self) -> str:
        """What lies behind the gate."""
        if not Path(self._row["gate"]).exists():
            await asyncio.Event().wait()
        self._steps += 1
        return f"found after {self._steps}"

    def where(self) -> int:
        """The process."""
        return os.getpid()

    def reply(self, text: str) -> Observation | None:
        self._steps += 1
        return Observation(f"you said {text} at {self._steps}", reward=0.25)

    def reward(self) -> float:
        return self._steps / 4


class OnlyOnce(Walk):
    """The same, which cannot be done again."""

    replayable = False


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number

"""The number of a run's engines, which changes between two steps when `megarl engines` asks for another."""

from __future__ import annotations

import time
from pathlib import Path

from megarl.fleet.fleet import Fleet
from megarl.placement.engine_count import count_error
from megarl.tracking.engine_requests import requested_engines


class EngineCount:
    """Brings the engines to the number that was asked for last, as far as there is room; it is made with the run.

    Between two steps no engine samples: what is open waits in the rollout buffer, and goes on with the engines that
    the next phase has. So engines can leave, and no sample is lost or drawn twice.
    """

    def __init__(self) -> None:
        # a request that cannot be met, of which the user was told
        self._told: int | None = None

    def follow(self, fleet: Fleet, folder: Path) -> None:
        """Start or end engines where another number is asked for; folder: of the run. Between two steps.

        Engines that start do so beside the next step's work.
        """
        asked = requested_engines(folder)
        before = fleet.roles.engines.count
        if asked in (None, before):
            return
        if error := count_error(fleet.roles.recipe, asked):
            self._tell_once(fleet, asked, f"the request for {asked} engines is left: {error}")
            return
        began_s = time.monotonic()
        count = fleet.set_engines(asked)
        if count < before:
            seconds = time.monotonic() - began_s
            fleet.say(f"{_names(count, before)} left in {seconds:.1f} s, and the GPUs are free")
        elif count > before:
            fleet.say(f"{_names(before, count)} started, beside the next step")
        if count != asked:
            problem = f"{asked} engines are asked for, and there are GPUs for {count}"
            self._tell_once(fleet, asked, f"{problem}: it is tried again between steps")

    def _tell_once(self, fleet: Fleet, asked: int, line: str) -> None:
        if self._told != asked:
            self._told = asked
            fleet.say(line)


def _names(start: int, stop: int) -> str:
    """The engines with these numbers, and a verb for what they do."""
    if stop - start == 1:
        return f"engine {start} has"
    return f"engines {start} to {stop - 1} have"

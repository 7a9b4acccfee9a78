"""`megarl plan`: the report of a run that is not started, or of a search for a faster one, as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.config.hardware import load_hardware
from megarl.plan.run_plan import RunPlan, make_plan

if TYPE_CHECKING:
    from megarl.plan.search import Side


def planned(recipe: Recipe, hardware: Path | str | None, share: float, *, as_json: bool) -> tuple[RunPlan, str]:
    """The plan and its report, to be printed. hardware: its file; share: of the longest response, the mean one."""
    from megarl.plan.report import page, plan_json

    found = make_plan(recipe, load_hardware(hardware), share)
    return found, json.dumps(plan_json(found)) if as_json else page(found)


def searched(recipe: Recipe, hardware: Path | str | None, side: Side, share: float, *, as_json: bool) -> str:
    """What a search found, to be printed. Arguments as of `planned`."""
    from megarl.plan.search import search
    from megarl.plan.search_report import search_json, search_page

    found = search(recipe, load_hardware(hardware), side, share)
    return json.dumps(search_json(found)) if as_json else search_page(found)

"""`megarl plan`: the report of a run that is not started, or of a search for a faster one, as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.config.hardware import Hardware, load_hardware
from megarl.disk import writing
from megarl.plan.batch import MEAN_RESPONSE_SHARE
from megarl.plan.run_plan import RunPlan, make_plan

if TYPE_CHECKING:
    from megarl.plan.layout_search import Side


def planned(
    recipe: Recipe, hardware: Path | str | None, share: float | None, *, as_json: bool
) -> tuple[RunPlan, str]:
    """The plan and its report, to be printed. hardware, share: as of `_inputs`."""
    from megarl.plan.report import page, plan_json

    run_plan = make_plan(recipe, *_inputs(recipe, hardware, share))
    return run_plan, json.dumps(plan_json(run_plan)) if as_json else page(run_plan)


def _inputs(
    recipe: Recipe, hardware: Path | str | None, share: float | None
) -> tuple[Hardware, float]:
    """The hardware, and the mean response length as a share of the longest.

    hardware: its file; None: placement.hardware. share: None: MEAN_RESPONSE_SHARE.
    """
    return load_hardware(hardware or recipe.placement.hardware), share or MEAN_RESPONSE_SHARE


def draw_picture(run_plan: RunPlan, path: Path) -> None:
    """Write the plan as a PNG. Raises UserError where the disk refuses it."""
    from megarl.plan.picture import draw

    with writing(path.absolute().parent, path.name, "--picture"):
        draw(run_plan, path)


def searched(
    recipe: Recipe, hardware: Path | str | None, side: Side, share: float | None, *, as_json: bool
) -> str:
    """What a search found, to be printed. hardware, share: as of `_inputs`."""
    from megarl.plan.layout_search import search
    from megarl.plan.search_report import search_json, search_page

    assumed_hardware, response_share = _inputs(recipe, hardware, share)
    result = search(recipe, assumed_hardware, side, response_share)
    if as_json:
        return json.dumps(search_json(result))
    return search_page(result)

"""What follows from a run's recipe without the run: who is where, the least bytes of a reshard, the plan's memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from megarl.config import Recipe
from megarl.config.hardware import load_hardware
from megarl.placement.roles import Roles, resolve
from megarl.plan.reshard_cost import minimum_wire_bytes
from megarl.plan.run_plan import make_plan, slot_map
from megarl.types import UserError, UserErrors
from megarl.types.json_objects import JsonObject


@dataclass
class Planned:
    """slots: a row of the rank map each. minimum_wire_bytes: of all members in a reshard; None: not known.

    memory: of each phase, the plan's bytes of the fullest GPU by part. notes: what could not be planned, a line each.
    """

    slots: list[JsonObject] = field(default_factory=list)
    minimum_wire_bytes: int | None = None
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def planned(recipe: Recipe) -> Planned:
    """Everything that the recipe, and the model's config.json where it names it, allow to say."""
    result = Planned()
    try:
        roles = resolve(recipe)
        result.slots = _slots(roles)
        if not recipe.rollout.engine.external:
            result.minimum_wire_bytes = minimum_wire_bytes(roles)
    except (UserError, UserErrors) as error:
        result.notes.append(f"placement and least bytes of a reshard are not all known: {error}")
        return result
    if recipe.placement.hardware is None:
        result.notes.append(
            "the recipe names no placement.hardware: the plan's memory is not shown"
        )
        return result
    try:
        plan = make_plan(recipe, load_hardware(recipe.placement.hardware), in_full=False)
        result.memory = {phase: asdict(parts) for phase, parts in plan.memory.device.items()}
    except (UserError, UserErrors) as error:
        result.notes.append(f"the memory is not planned: {error}")
    return result


def _slots(roles: Roles) -> list[JsonObject]:
    slots = slot_map(roles.recipe, roles.models, roles.engines)
    return [
        {
            "slot": slot.slot,
            "node": slot.node,
            "gpu": slot.gpu,
            "ranks": {role: asdict(coords) for role, coords in slot.ranks.items()},
            "engine": slot.engine,
            "engine_rank": slot.engine_rank,
        }
        for slot in slots
    ]

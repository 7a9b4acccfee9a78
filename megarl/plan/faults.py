"""What keeps a recipe from being planned, as far as it can be known without its data, its checkpoint and a GPU."""

from __future__ import annotations

from megarl.algos import ALGORITHMS, has_critic
from megarl.config import Recipe
from megarl.parallel.hf_config import auxiliary_shape, hf_facts, model_shape
from megarl.parallel.placement import auxiliary_slots, engine_layout, node_faults, slot_faults, train_layout
from megarl.plan.batch import budget_faults
from megarl.plan.model_size import Role, roles
from megarl.preflight.check import batch_faults
from megarl.preflight.models import loss_faults, renamed
from megarl.preflight.rules import rule_faults
from megarl.preflight.sampling import sampling_faults
from megarl.types import UserFault

Faults = list[UserFault]


def plan_faults(recipe: Recipe) -> Faults:
    """All that a plan cannot go on from, layouts as on GPUs; the recipe is one of `at_hand`."""
    if recipe.algorithm.name not in ALGORITHMS:
        problem, mend = f"{recipe.algorithm.name!r} is no algorithm", f"choose from {', '.join(ALGORITHMS)}"
        return [UserFault("algorithm.name", problem, mend)]
    faults = rule_faults(recipe) + sampling_faults(recipe)
    for role, own in roles(recipe).items():
        faults += _world_faults(own, role)
    try:
        shape = model_shape(recipe.model.path)
    except UserFault:  # told of the policy's ranks
        return faults
    engine, beside = engine_layout(recipe), auxiliary_slots(recipe, has_critic(recipe.algorithm.name))
    faults += engine.faults(shape, recipe.placement.gpus) or engine.gpu_faults(shape)
    faults += slot_faults(recipe.placement.gpus, train_layout(recipe), engine, beside)
    return faults + node_faults(recipe, beside) + batch_faults(recipe) + loss_faults(recipe, shape)


def _world_faults(own: Recipe, role: Role) -> Faults:
    """Of one model's ranks: its shape, its layout, its micro-batches."""
    layout = train_layout(own)
    faults = budget_faults("train" if role == "policy" else f"{role}.ranks", own, layout)
    try:
        shape = model_shape(own.model.path) if role == "policy" else auxiliary_shape(own.model.path, "values")
        hf_facts(own.model.path)
    except UserFault as fault:
        return [*faults, fault]
    found = layout.faults(shape)
    return faults + (found if role == "policy" else [renamed(fault, role) for fault in found])

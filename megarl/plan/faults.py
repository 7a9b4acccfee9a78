"""Why a recipe cannot be planned, as far as that can be known without its data, its checkpoint and a GPU."""

from __future__ import annotations

from megarl.algos import ALGORITHMS
from megarl.parallel.roles import Role, Roles
from megarl.preflight.layout import batch_faults, engine_faults, node_faults, slot_faults
from megarl.preflight.lengths import budget_faults
from megarl.preflight.models import loss_faults
from megarl.preflight.rules import rule_faults
from megarl.preflight.sampling import sampling_faults
from megarl.types import UserFault

Faults = list[UserFault]


def plan_faults(roles: Roles) -> Faults:
    """Everything that keeps a recipe from being planned, with layouts as on GPUs; the recipe is one of `stand_ins`."""
    recipe, shape = roles.recipe, roles.policy.model.known_shape
    faults = rule_faults(recipe) + sampling_faults(recipe)
    if recipe.algorithm.name not in ALGORITHMS:
        return faults
    for role in roles.models.values():
        faults += _role_faults(role)
    if shape is None:  # a fault of the policy's
        return faults
    faults += engine_faults(roles, shape, "cuda") + slot_faults(roles) + node_faults(roles)
    return faults + batch_faults(recipe) + loss_faults(recipe, shape)


def _role_faults(role: Role) -> Faults:
    """Faults of one model's micro-batches, its config.json and its layout."""
    data, rollout = role.recipe.data, role.recipe.rollout
    what = "data.max_prompt_tokens and rollout.max_response_tokens together"
    faults = budget_faults(role, data.max_prompt_tokens + rollout.max_response_tokens, what)
    return [*faults, role.model.fault] if role.model.fault else faults + role.layout_faults()

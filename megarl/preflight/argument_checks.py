"""What Megatron's and SGLang's own classes say of the arguments that they would get."""

from __future__ import annotations

from collections.abc import Container

from megarl.algos import ALGORITHMS
from megarl.config import EngineConfig, Recipe
from megarl.device import DEVICE, LOOPBACK, Address
from megarl.placement.roles import Roles
from megarl.rollout.engine_settings import engine_settings
from megarl.rollout.sglang.arguments import Endpoint, NodeSpan, server_arguments, sglang_errors
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

# any name: it is looked up where the weights arrive
_LOADER = "megarl.rollout.sglang.scheduler:load"


@listed
def argument_errors(roles: Roles, device: str, absent: Container[str]) -> ErrorIterator:
    """Errors that Megatron's and SGLang's own classes find in the arguments that they would get.

    They are asked about a run on this machine only where the recipe gives them something to judge (`asks_megatron`,
    `asks_sglang`). SGLang's are not asked where the engines' layout is wrong or the algorithm unknown, and neither is
    where the model's shape cannot be read: other checks report these.
    """
    shape = roles.policy.model.known_shape
    if shape is None:
        return
    recipe = roles.recipe
    if asks_megatron(recipe, device):
        yield from _megatron_errors(roles, device, absent)
    is_known = recipe.algorithm.name in ALGORITHMS
    has_engines = is_known and not recipe.rollout.engine.external
    has_engines = has_engines and not roles.engines.errors(shape, recipe.placement.gpus)
    if has_engines and asks_sglang(recipe, device):
        yield from _sglang_errors(recipe, device)


def asks_megatron(recipe: Recipe, device: str) -> bool:
    """Whether Megatron's classes are asked, whose import takes seconds: they get options, or the run is elsewhere."""
    return device != DEVICE or recipe.train.passes_options


def asks_sglang(recipe: Recipe, device: str) -> bool:
    """Whether SGLang's class is asked, whose import takes seconds: it gets more than sizes, or the run is elsewhere."""
    engine = recipe.rollout.engine
    sizes_alone = EngineConfig(count=engine.count, tp=engine.tp, ep=engine.ep)
    asks_more = recipe.rollout.seeded or recipe.train.replay != "off" or recipe.lora is not None
    return device != DEVICE or engine != sizes_alone or asks_more


def _megatron_errors(roles: Roles, device: str, absent: Container[str]) -> ErrorIterator:
    from megarl.parallel.refusals import megatron_errors

    for role in roles.models.values():
        if role.name != "reward_model" or "reward_model.path" not in absent:
            yield from megatron_errors(role, device)


def _sglang_errors(recipe: Recipe, device: str) -> ErrorIterator:
    """Errors of the first engine's arguments: others differ in slots and seeds. Another check reports unknown ones."""
    try:
        if sglang_errors(recipe.rollout.engine.sglang):
            return
    except UserError:
        return
    from megarl.rollout.sglang.option_check import server_errors

    span = None
    if recipe.engine_nodes > 1:
        span = NodeSpan(recipe.engine_nodes, 0, Address(LOOPBACK, 1), Endpoint(b""))
    arguments = server_arguments(engine_settings(recipe, 0, span), _LOADER, device)
    yield from server_errors(arguments | {"device": device})

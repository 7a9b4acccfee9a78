"""Which GPU slots a recipe gives to training and which to the engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megarl.parallel.layout import EngineLayout, TrainLayout, divisors, nearest
from megarl.types import UserFault

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.roles import RanksConfig


def train_layout(recipe: Recipe) -> TrainLayout:
    """The training ranks; rank r is on slot r."""
    train, placement = recipe.train, recipe.placement
    return TrainLayout(
        placement.train_gpus or placement.gpus,
        train.tp,
        train.pp,
        train.ep,
        cp=train.cp,
        vpp=train.vpp,
        expert_tp=train.etp or 0,
        stage_layers=train.layers_per_stage,
    )


def is_reporting_rank(layout: TrainLayout, rank: int) -> bool:
    """Whether this rank says what all that have the same samples could say: the first of the last stage."""
    at = layout.coords(rank)
    return (at.tp, at.cp, at.pp) == (0, 0, layout.pp - 1)


def engine_layout(recipe: Recipe) -> EngineLayout:
    """The engines, from slot `first` on."""
    engine = recipe.rollout.engine
    first = recipe.placement.first_engine_gpu
    return EngineLayout(engine.count, engine.tp, engine.ep, engine.dp, engine.fp8, first)


def critic_recipe(recipe: Recipe) -> Recipe:
    """The recipe as the critic's ranks read it: its checkpoint, axes and learning rate in the policy's places."""
    critic = recipe.critic
    given = critic.model_dump(include={"lr", "warmup_steps", "lr_schedule", "lr_end"})
    own = {key: value for key, value in given.items() if value is not None}
    return _recipe_beside(recipe, critic.path, critic.ranks, own)


def reward_recipe(recipe: Recipe) -> Recipe:
    """The same for the reward model's."""
    return _recipe_beside(recipe, recipe.reward_model.path, recipe.reward_model.ranks, {})


def _recipe_beside(recipe: Recipe, path: str | None, ranks: RanksConfig, own: dict[str, Any]) -> Recipe:
    axes = {key: value for key, value in ranks if value is not None and key in type(recipe.train).model_fields}
    train = recipe.train.model_copy(update={**axes, **own, "mtp_loss": 0.0, "replay": "off"})
    gpus = ranks.gpus or train_layout(recipe).world_size
    placement = recipe.placement.model_copy(update={"gpus": gpus, "train_gpus": None, "first_engine_gpu": 0})
    model = recipe.model.model_copy(update={"path": path or recipe.model.path, "config": None})
    return recipe.model_copy(
        update={"model": model, "train": train, "placement": placement, "reference": type(recipe.reference)()}
    )


def without_reference(recipe: Recipe) -> Recipe:
    """For ranks that measure no distance from one."""
    algorithm = recipe.algorithm.model_copy(update={"kl_coefficient": 0.0})
    return recipe.model_copy(update={"reference": type(recipe.reference)(), "algorithm": algorithm})


def auxiliary_slots(recipe: Recipe, uses_critic: bool) -> dict[str, range]:
    """The slots of each model beside the policy, by the branch of the recipe that describes it."""
    found = {}
    if uses_critic:
        found["critic"] = _slots(recipe.critic.ranks, critic_recipe(recipe))
    if recipe.reward_model.path:
        found["reward_model"] = _slots(recipe.reward_model.ranks, reward_recipe(recipe))
    return found


def _slots(ranks: RanksConfig, own: Recipe) -> range:
    return range(ranks.first_gpu, ranks.first_gpu + own.placement.gpus)


def shared_slots(sides: Iterable[range]) -> frozenset[int]:
    """The slots on which several sides sit, and take turns with the memory."""
    seen: set[int] = set()
    shared: set[int] = set()
    for side in sides:
        shared |= seen & set(side)
        seen |= set(side)
    return frozenset(shared)


def slot_faults(
    gpus: int, train: TrainLayout, engine: EngineLayout, beside: dict[str, range] | None = None
) -> list[UserFault]:
    """Slots that do not exist, or that nobody uses. (Engines beyond the last slot: EngineLayout.faults.)

    beside: the slots of the other models, as of `slots_beside`.
    """
    found = []
    beside = beside or {}
    for branch, slots in beside.items():
        if slots.stop > gpus:
            problem = f"its ranks are on the slots {slots.start} to {slots.stop - 1}, placement.gpus is {gpus}"
            mend = f"lower it or {branch}.ranks.first_gpu"
            found.append(UserFault(f"{branch}.ranks.gpus", problem, mend))
    if train.world_size > gpus:
        problem = f"{train.world_size} is more than placement.gpus ({gpus})"
        found.append(UserFault("placement.train_gpus", problem, f"set it to at most {gpus}"))
    of_others = {slot for slots in beside.values() for slot in slots}
    if engine.first > train.world_size:  # the exchange numbers its members without a gap
        problem = f"{engine.first} leaves a gap behind the {train.world_size} GPUs that train"
        found.append(UserFault("placement.first_engine_gpu", problem, f"set it to at most {train.world_size}"))
    used = {*range(train.world_size), *range(engine.first, engine.end)} | of_others
    if len(used) < gpus and not found:
        idle = min(set(range(gpus)) - used)
        if idle == len(used):
            problem, mend = f"{gpus} GPUs, of which training and engines use the first {idle}", f"set it to {idle}"
        else:
            problem, mend = f"{gpus} GPUs, of which nobody uses number {idle}", "leave no gap"
        found.append(UserFault("placement.gpus", problem, mend))
    return found


def node_faults(recipe: Recipe, beside: dict[str, range]) -> list[UserFault]:
    """Groups that talk at every layer and would do so between nodes; engines that lie across a node's edge.

    beside: as for `slot_faults`.
    """
    node, found = recipe.placement.gpus_per_node, []
    if max(recipe.placement.gpus, engine_layout(recipe).end) <= node:
        return found
    sides = {"train": (recipe, 0)}
    own = {"critic": critic_recipe, "reward_model": reward_recipe}
    sides |= {f"{branch}.ranks": (own[branch](recipe), slots.start) for branch, slots in beside.items()}
    for key, (side, first) in sides.items():
        tp = side.train.tp
        if node % tp or first % tp:
            problem = f"{tp} ranks at a time, from GPU {first} on, would not all lie inside nodes of {node} GPUs"
            first_mend = f"set {key}.first_gpu to a multiple of it"
            mend = f"set it to {nearest(tp, divisors(node))}" if node % tp else first_mend
            found.append(UserFault(f"{key}.tp", problem, mend))
    return found + _engine_faults(recipe)


def _engine_faults(recipe: Recipe) -> list[UserFault]:
    node, engine, layout = recipe.placement.gpus_per_node, recipe.rollout.engine, engine_layout(recipe)
    inside = node % engine.tp == 0 and layout.first % engine.tp == 0
    whole = engine.tp % node == 0 and layout.first % node == 0
    if not inside and not whole:
        problem = f"{engine.tp} ranks, from GPU {layout.first} on, neither lie in nodes of {node} GPUs nor fill them"
        mend = f"choose a divisor or a multiple of {node}, and placement.first_engine_gpu as a multiple of it"
        return [UserFault("rollout.engine.tp", problem, mend)]
    if whole and engine.tp > node and recipe.placement.network == "loopback":
        problem = f"an engine of {engine.tp} ranks is on several nodes of {node} GPUs, which meet on no loopback"
        return [UserFault("placement.network", problem, "set it to nodes, or correct placement.gpus_per_node")]
    return []

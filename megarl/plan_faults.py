"""What keeps a recipe from being planned, as far as it can be known without its data, its checkpoint and a GPU."""

from __future__ import annotations

from pathlib import Path

from megarl.algos import ALGORITHMS, has_critic
from megarl.config import Recipe
from megarl.model_faults import loss_faults
from megarl.parallel.hf_config import beside_shape, hf_facts, model_shape
from megarl.parallel.layout import EngineLayout
from megarl.parallel.placement import engine_layout, slot_faults, slots_beside, train_layout
from megarl.plan_batch import budget_faults
from megarl.plan_model import roles
from megarl.rule_faults import rule_faults
from megarl.types import ModelShape, UserFault

Faults = list[UserFault]
_BRANCHES = {"policy": "train", "critic": "critic.ranks", "reward_model": "reward_model.ranks"}


def readable(recipe: Recipe) -> Recipe:
    """The recipe with model.config in the place of every checkpoint that is not at hand.

    A reference, critic or reward model is then taken to be as large as the policy.
    """
    config = recipe.model.config
    if config is None:
        return recipe

    def there(path: str | None) -> str | None:
        return config if path and not (Path(path) / "config.json").is_file() else path

    return recipe.model_copy(
        update={
            name: branch.model_copy(update={"path": there(branch.path)})
            for name, branch in recipe
            if name in ("model", "reference", "critic", "reward_model")
        }
    )


def plan_faults(recipe: Recipe) -> Faults:
    """All that a plan cannot go on from, layouts as on GPUs; the recipe is `readable`."""
    if recipe.algorithm.name not in ALGORITHMS:
        problem, mend = f"{recipe.algorithm.name!r} is no algorithm", f"choose from {', '.join(ALGORITHMS)}"
        return [UserFault("algorithm.name", problem, mend)]
    faults = rule_faults(recipe)
    for role, own in roles(recipe).items():
        faults += _world_faults(own, _BRANCHES[role], says="logits" if role == "policy" else "values")
    try:
        shape = model_shape(recipe.model.path)
    except UserFault:  # told of the policy's ranks
        return faults
    engine = engine_layout(recipe)
    faults += engine.faults(shape, recipe.placement.gpus) or engine.gpu_faults(shape)
    faults += slot_faults(
        recipe.placement.gpus, train_layout(recipe), engine, slots_beside(recipe, has_critic(recipe.algorithm.name))
    )
    return faults + _node_faults(recipe, engine) + _batch_faults(recipe) + loss_faults(recipe, shape)


def _world_faults(own: Recipe, branch: str, says: str) -> Faults:
    """Of one model's ranks: its shape, its layout, its micro-batches. branch: of the keys that describe them."""
    layout = train_layout(own)
    faults = budget_faults(branch, own, layout)
    try:
        shape = _shape(own.model.path, says)
        hf_facts(own.model.path)
    except UserFault as fault:
        return [*faults, fault]
    return faults + [_renamed(fault, branch) for fault in layout.faults(shape)]


def _shape(path: str, says: str) -> ModelShape:
    return model_shape(path) if says == "logits" else beside_shape(path, says)


def _renamed(fault: UserFault, branch: str) -> UserFault:
    """A fault of the policy's keys as one of those that stand for them in another branch."""
    words = {"placement.gpus": f"{branch}.gpus", "train.": f"{branch}."} if branch != "train" else {}

    def own(text: str) -> str:
        for policys, theirs in words.items():
            text = text.replace(policys, theirs)
        return text

    return UserFault(own(fault.where), own(fault.problem), own(fault.mend))


def _node_faults(recipe: Recipe, engine: EngineLayout) -> Faults:
    """An engine lies inside a node, or begins at one and fills whole nodes."""
    node = recipe.placement.gpus_per_node
    if engine.tp % node == 0 and engine.first % node == 0:
        return []
    starts = range(engine.first, engine.end, engine.tp)
    split = [index for index, start in enumerate(starts) if start // node != (start + engine.tp - 1) // node]
    if not split:
        return []
    problem = f"engine {split[0]} would neither lie inside a node of {node} GPUs nor fill whole ones"
    mend = f"choose rollout.engine.tp and placement.first_engine_gpu so that engines do not cross a multiple of {node}"
    return [UserFault("rollout.engine.tp", problem, mend)]


def _batch_faults(recipe: Recipe) -> Faults:
    updates, rollout = recipe.train.updates_per_step, recipe.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    if updates <= samples:
        return []
    problem = f"{updates} is more than the {samples} samples of a step"
    return [UserFault("train.updates_per_step", problem, f"set it to at most {samples}")]

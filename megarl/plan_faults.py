"""What keeps a recipe from running, as far as it can be known without its data, its checkpoint and a GPU."""

from __future__ import annotations

from pathlib import Path

from megarl.algos import has_critic
from megarl.config import Recipe
from megarl.eval_faults import eval_faults
from megarl.model_faults import loss_faults, renamed
from megarl.parallel.hf_config import beside_shape, hf_facts, model_shape
from megarl.parallel.placement import critic_recipe, reward_recipe, train_layout
from megarl.plan_batch import budget_faults
from megarl.preflight import context_faults, engine_option_faults, layout_faults, train_option_faults
from megarl.rule_faults import rule_faults
from megarl.types import UserFault


def readable(recipe: Recipe) -> Recipe:
    """The recipe with model.config in the place of every checkpoint that is not at hand.

    A reference, critic or reward model is then taken to be as large as the policy.
    """
    config = recipe.model.config
    if config is None:
        return recipe

    def there(path: str | None) -> str | None:
        return config if path and not Path(path).is_dir() else path

    return recipe.model_copy(
        update={
            name: branch.model_copy(update={"path": there(branch.path)})
            for name, branch in recipe
            if name in ("model", "reference", "critic", "reward_model")
        }
    )


def plan_faults(recipe: Recipe) -> list[UserFault]:
    """Everything that a plan cannot go on from, and keys that a run would refuse; layouts as on GPUs.

    The recipe is `readable`.
    """
    faults = rule_faults(recipe) + eval_faults(recipe)
    faults += engine_option_faults(recipe) + train_option_faults(recipe)
    faults += budget_faults("train", recipe, train_layout(recipe))
    faults += layout_faults(recipe, on_cpu=False) + _beside_faults(recipe)
    try:
        shape = model_shape(recipe.model.path)
        hf_facts(recipe.model.path)
    except UserFault as fault:
        return [*faults, fault]
    return faults + loss_faults(recipe, shape) + context_faults(recipe)


def _beside_faults(recipe: Recipe) -> list[UserFault]:
    """Of the layouts of the models beside the policy; a model that cannot be read is told where it is the policy's."""
    faults, beside = [], {}
    if has_critic(recipe.algorithm.name):
        beside["critic"] = critic_recipe(recipe)
    if recipe.reward_model.path:
        beside["reward_model"] = reward_recipe(recipe)
    for branch, own in beside.items():
        faults += budget_faults(f"{branch}.ranks", own, train_layout(own))
        try:
            shape = beside_shape(own.model.path, "values")
        except UserFault as fault:
            faults += [] if own.model.path == recipe.model.path else [renamed(fault, branch)]
            continue
        faults += [renamed(fault, branch) for fault in train_layout(own).faults(shape)]
    return faults

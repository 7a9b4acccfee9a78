"""Notes, not faults: keys that a recipe sets and that no part of the run reads, and values that are hardly meant.

Contradictory and impossible values are refused elsewhere (value_faults, rule_faults). A recipe whose critic is switched
off by an overlay is still a good recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from megarl.algos import has_critic, has_reference, learns_from_answers
from megarl.config import Recipe
from megarl.config.fields import Branch
from megarl.parallel.roles import train_layout

_HIGH_RATE = 0.1


def _warm_start(recipe: Recipe) -> str:
    warm = recipe.warm_start
    return "" if warm.steps or "steps" in warm.model_fields_set else "warm_start.steps is not set"


def _project(recipe: Recipe) -> str:
    return "" if set(recipe.run.trackers) - {"tensorboard"} else "run.trackers names neither wandb nor mlflow"


def _sources(recipe: Recipe) -> str:
    return "" if recipe.reward.by_source else "reward.by_source names no source"


def _samples(recipe: Recipe) -> str:
    name = recipe.algorithm.name
    return f"{name} learns from the data's answers" if learns_from_answers(name) else ""


def _evaluation(recipe: Recipe) -> str:
    return "" if recipe.data.eval or "eval" in recipe.data.model_fields_set else "data.eval names no set"


def _top_p(recipe: Recipe) -> str:
    temperatures = [recipe.evaluation.of(name).temperature for name in recipe.data.eval]
    is_greedy = temperatures and not any(temperatures)
    return "at temperature 0 the most probable token is taken" if is_greedy else _evaluation(recipe)


def _schedule(recipe: Recipe) -> str:
    return "train.lr_schedule is constant" if recipe.train.lr_schedule == "constant" else ""


def _reference(recipe: Recipe) -> str:
    if has_reference(recipe.algorithm, recipe.reference.use):
        return ""
    return "reference.use is false and algorithm.kl_coefficient is 0"


def _critic(recipe: Recipe) -> str:
    return "" if has_critic(recipe.algorithm.name) else f"{recipe.algorithm.name} has no critic"


def _critic_schedule(recipe: Recipe) -> str:
    is_constant = (recipe.critic.lr_schedule or recipe.train.lr_schedule) == "constant"
    return _critic(recipe) or ("the critic's lr_schedule is constant" if is_constant else "")


def _reward_model(recipe: Recipe) -> str:
    return "" if recipe.reward_model.path else "reward_model.path is not set"


def _checkpoint(recipe: Recipe) -> str:
    checkpoint = recipe.checkpoint
    is_meant = checkpoint.every or "every" in checkpoint.model_fields_set
    return "" if is_meant else "checkpoint.every is not set: a checkpoint is written on SIGUSR1 alone"


def _always(recipe: Recipe) -> str:
    return ""


# Key or section -> why nothing reads it, or "". The longest entry that a key begins with counts. Where a switch is set
# to off explicitly (warm_start.steps, data.eval, checkpoint.every), no note is made about the keys that it governs.
USED_WHEN: Mapping[str, Callable[[Recipe], str]] = {
    "run": _always,
    "run.project": _project,
    "model": _always,
    "data": _always,
    "algorithm": _always,  # rule_faults
    "warm_start": _warm_start,
    "warm_start.steps": _always,
    "reward": _always,  # reward_faults
    "reward.source": _sources,
    "rollout": _always,
    "rollout.temperature": _samples,
    "rollout.top_p": _samples,
    "evaluation": _evaluation,
    "evaluation.top_p": _top_p,
    "evaluation.sets": _always,  # eval_faults
    "train": _always,
    "train.lr_end": _schedule,
    "reference.use": _always,
    "reference.path": _reference,
    "critic": _critic,
    "critic.lr_end": _critic_schedule,
    "reward_model": _reward_model,
    "reward_model.path": _always,
    "checkpoint": _checkpoint,
    "checkpoint.every": _always,
    "reshard": _always,
    "placement": _always,
}


def advice(recipe: Recipe) -> list[str]:
    """One sentence for each reason why keys are not read, and for each value that is hardly meant."""
    keys_of: dict[str, list[str]] = {}
    for key in _given(recipe, ""):
        reason = USED_WHEN[_entry(key)](recipe)
        if reason:
            keys_of.setdefault(reason, []).append(key)
    unread = [
        f"{' and '.join(sorted(keys))} {'is' if len(keys) == 1 else 'are'} set, and nothing reads "
        f"{'it' if len(keys) == 1 else 'them'}: {reason}"
        for reason, keys in keys_of.items()
    ]
    return unread + list(_odd_values(recipe))


def _given(branch: Branch, prefix: str) -> Iterator[str]:
    """The keys that are set to another value than their default, below the branch."""
    for name in branch.model_fields_set:
        value = getattr(branch, name)
        default = type(branch).model_fields[name].get_default(call_default_factory=True)
        if isinstance(value, Branch):
            yield from _given(value, f"{prefix}{name}.")
        elif value != default:
            yield f"{prefix}{name}"


def _entry(key: str) -> str:
    while key not in USED_WHEN:
        key = key.rpartition(".")[0]
    return key


def _odd_values(recipe: Recipe) -> Iterator[str]:
    rates = {"train.lr": recipe.train.lr}
    if recipe.warm_start.steps:
        rates["warm_start.lr"] = recipe.warm_start.lr
    if has_critic(recipe.algorithm.name) and recipe.critic.lr is not None:
        rates["critic.lr"] = recipe.critic.lr
    for key, rate in rates.items():
        if rate > _HIGH_RATE:
            yield f"{key} is {rate:g}, and rates of AdamW above {_HIGH_RATE:g} destroy a model"
    rollout, layout = recipe.rollout, train_layout(recipe)
    per_update = rollout.prompts_per_step * rollout.samples_per_prompt // recipe.train.updates_per_step
    if layout.dp > per_update and not learns_from_answers(recipe.algorithm.name):
        yield f"{layout.dp} data-parallel ranks share the {per_update} samples of an update: some of them have none"
    if rollout.engine.count > rollout.prompts_per_step:
        count, prompts = rollout.engine.count, rollout.prompts_per_step
        yield f"{count} engines (rollout.engine.count) share the {prompts} prompts of a step: some of them have none"

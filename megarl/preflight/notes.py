"""Notes, which do not stop a run: keys that nothing reads, and values that are probably mistakes.

Contradictory and impossible values are refused elsewhere (limit_errors, hyperparameter_errors). A recipe whose critic
is switched off by an overlay is still a good recipe.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.algos import (
    ALGORITHMS,
    has_critic,
    has_reference,
    hyperparameters_of,
    learns_from_answers,
)
from megarl.config import Recipe
from megarl.config.fields import Branch
from megarl.placement.roles import train_layout
from megarl.samples.buffer import num_phases, staleness_bound

_HIGH_RATE = 0.1
_LOW_LORA_RATE = 5e-6  # rates of full training by reinforcement are about 1e-6


def unread_reasons(recipe: Recipe) -> dict[str, str]:
    """Key or section -> why nothing reads it, or "". The longest entry that a key begins with counts.

    Where a switch is set to off explicitly (warm_start.steps, data.eval, checkpoint.every), no note is made about the
    keys that it governs. Other checks tell of `algorithm` (hyperparameter_errors) and `evaluation.sets` (eval_errors).
    """
    name = recipe.algorithm.name
    learns_from_samples = not learns_from_answers(name)
    from_answers = _unless(learns_from_samples, f"{name} learns from the data's answers")
    names_sets = bool(recipe.data.eval) or "eval" in recipe.data.model_fields_set
    evaluation = _unless(names_sets, "data.eval names no set")
    temperatures = [recipe.evaluation.of(each).temperature for each in recipe.data.eval]
    is_greedy = bool(temperatures) and not any(temperatures)
    greedy = "at temperature 0 the most probable token is taken"
    critic = _unless(has_critic(name), f"{name} has no critic")
    critic_schedule = recipe.critic.lr_schedule or recipe.train.lr_schedule
    critic_lr = _unless(critic_schedule != "constant", "the critic's lr_schedule is constant")
    has_kl = has_reference(recipe.algorithm, recipe.reference.use)
    no_kl = "reference.use is false and algorithm.kl_coefficient is 0"
    has_reward_model = bool(recipe.reward_model.path or recipe.reward_model.adapters)
    has_agent = recipe.episode is not None and recipe.episode.agent is not None
    agent = _unless(not has_agent, "an agent makes its own calls")
    has_project = bool(set(recipe.run.trackers) - {"tensorboard"})
    warms = bool(recipe.warm_start.steps) or "steps" in recipe.warm_start.model_fields_set
    saves = bool(recipe.checkpoint.every) or "every" in recipe.checkpoint.model_fields_set
    has_schedule = recipe.train.lr_schedule != "constant"
    is_phased = recipe.rollout.phase_tokens is not None
    on_signal = "checkpoint.every is not set: a checkpoint is written on SIGUSR1 alone"
    return dict.fromkeys(Recipe.model_fields, "") | {
        "data.messages": _unless(recipe.episode is not None, "episode is not set"),
        "episode.phase_tool_s": _unless(is_phased, "rollout.phase_tokens is not set"),
        "episode.max_observation_tokens": agent,
        "episode.call_timeout_s": agent,
        "run.project": _unless(has_project, "run.trackers names neither wandb nor mlflow"),
        "warm_start": _unless(warms, "warm_start.steps is not set"),
        "warm_start.steps": "",
        "reward.source": _unless(bool(recipe.reward.by_source), "reward.by_source names no source"),
        "rollout.temperature": from_answers,
        "rollout.top_p": from_answers,
        "rollout.phase_tokens": from_answers,
        "rollout.prompts_in_flight": from_answers,
        "rollout.ahead": from_answers,
        "evaluation": evaluation,
        "evaluation.top_p": greedy if is_greedy else evaluation,
        "evaluation.sets": "",
        "train.lr_end": _unless(has_schedule, "train.lr_schedule is constant"),
        "reference.path": _unless(has_kl, no_kl),
        "critic": critic,
        "critic.lr_end": critic or critic_lr,
        "reward_model": _unless(has_reward_model, "reward_model.path is not set"),
        "reward_model.path": "",
        "reward_model.adapters": "",
        "checkpoint": _unless(saves, on_signal),
        "checkpoint.every": "",
    }


def _unless(is_read: bool, reason: str) -> str:
    """Empty for what is read, else the reason why it is not."""
    return "" if is_read else reason


def recipe_notes(recipe: Recipe) -> list[str]:
    """One sentence for each reason why keys are not read, and for each value that is probably a mistake."""
    keys_of: dict[str, list[str]] = {}
    reasons = unread_reasons(recipe)
    for key in _given(recipe, ""):
        entry = key
        while entry not in reasons:
            entry = entry.rpartition(".")[0]
        if reasons[entry]:
            keys_of.setdefault(reasons[entry], []).append(key)
    notes = [
        f"{' and '.join(sorted(keys))} {'is' if len(keys) == 1 else 'are'} set, and nothing reads "
        f"{'it' if len(keys) == 1 else 'them'}: {reason}"
        for reason, keys in keys_of.items()
    ]
    return notes + list(_phases(recipe)) + list(_odd_values(recipe))


def _given(branch: Branch, prefix: str) -> Iterator[str]:
    """The keys that are set to another value than their default, below the branch."""
    for name in branch.model_fields_set:
        value = getattr(branch, name)
        default = type(branch).model_fields[name].get_default(call_default_factory=True)
        if isinstance(value, Branch):
            yield from _given(value, f"{prefix}{name}.")
        elif value != default:
            yield f"{prefix}{name}"


def _phases(recipe: Recipe) -> Iterator[str]:
    """How old what a step trains on may be, and whether phases gain anything."""
    name = recipe.algorithm.name
    rollout = recipe.rollout
    if (
        not (rollout.phase_tokens or rollout.ahead)
        or name not in ALGORITHMS
        or learns_from_answers(name)
    ):
        return
    bound = staleness_bound(recipe, hyperparameters_of(name, recipe.algorithm))
    phases = num_phases(recipe)
    what = "episode" if recipe.episode else "response"
    if phases > 1:
        why = f"the longest {what} takes {phases} phases"
    else:
        why = f"a step's {what}s are sampled ahead"
    yield f"{why}: a token is trained on at most {bound} versions later"
    if rollout.phase_tokens and rollout.in_flight == rollout.prompts_per_step:
        usual = 2 * rollout.prompts_per_step
        yield f"rollout.prompts_in_flight is rollout.prompts_per_step: a step waits for all of them; set it to {usual}"


def _odd_values(recipe: Recipe) -> Iterator[str]:
    rates = {"train.lr": recipe.train.lr}
    if recipe.warm_start.steps:
        rates["warm_start.lr"] = recipe.warm_start.lr
    if has_critic(recipe.algorithm.name) and recipe.critic.lr is not None:
        rates["critic.lr"] = recipe.critic.lr
    for key, rate in rates.items():
        if rate > _HIGH_RATE:
            yield f"{key} is {rate:g}, and rates of AdamW above {_HIGH_RATE:g} destroy a model"
    if recipe.lora and recipe.train.lr < _LOW_LORA_RATE:
        yield f"train.lr is {recipe.train.lr:g}: adapters (lora) learn best at about 10 times the rate of all weights"
    rollout = recipe.rollout
    layout = train_layout(recipe)
    per_update = (
        rollout.prompts_per_step * rollout.samples_per_prompt // recipe.train.updates_per_step
    )
    if layout.dp > per_update and not learns_from_answers(recipe.algorithm.name):
        yield f"{layout.dp} data-parallel ranks share the {per_update} samples of an update: some of them have none"
    if rollout.engine.draft and not recipe.train.mtp_loss:
        yield "train.mtp_loss is 0: the MTP layer stays frozen, and fewer drafts (rollout.engine.draft) get accepted"
    if rollout.engine.count > rollout.prompts_per_step:
        count = rollout.engine.count
        prompts = rollout.prompts_per_step
        yield f"{count} engines (rollout.engine.count) share the {prompts} prompts of a step: some of them have none"

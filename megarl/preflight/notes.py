"""Notes, which do not stop a run: keys that nothing reads, and values that are probably mistakes.

Contradictory and impossible values are refused elsewhere (limit_errors, hyperparameter_errors). A recipe whose critic
is switched off by an overlay is still a good recipe.
"""

from __future__ import annotations

import os
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
from megarl.config.unread import UNREAD_WHERE
from megarl.placement.overlaps import PAIRED_PASSES
from megarl.placement.roles import train_layout
from megarl.samples.buffer import num_phases, staleness_bound

_HIGH_RATE = 0.1
_LOW_LORA_RATE = 5e-6  # rates of full training by reinforcement are about 1e-6


def unread_reasons(recipe: Recipe) -> dict[str, str]:
    """Key or section -> why nothing reads it, or "" where something does. Keys inside of a section are unread with it.

    Where a switch is set to off explicitly (warm_start.steps, data.eval), no note is made about the
    keys that it governs. Other checks tell of `algorithm` (hyperparameter_errors) and `evaluation.sets` (eval_errors).
    """
    name = recipe.algorithm.name
    return {
        key: "" if is_read else UNREAD_WHERE[key].format(algorithm=name)
        for key, is_read in {**_is_read(recipe), **_is_read_for_recovery(recipe)}.items()
    }


def _is_read(recipe: Recipe) -> dict[str, object]:
    """Key or section of `UNREAD_WHERE` -> whether something reads it."""
    name = recipe.algorithm.name
    samples = not learns_from_answers(name)
    temperatures = [recipe.evaluation.of(each).temperature for each in recipe.data.eval]
    has_no_agent = recipe.episode is None or recipe.episode.agent is None
    critic_schedule = recipe.critic.lr_schedule or recipe.train.lr_schedule
    return {
        "data.messages": recipe.episode,
        "episode.phase_tool_s": recipe.rollout.phase_tokens,
        "episode.max_observation_tokens": has_no_agent,
        "episode.call_timeout_s": has_no_agent,
        "run.project": set(recipe.run.trackers) - {"tensorboard"},
        "run.compare_replicas_every": _has_replicas(recipe),
        "warm_start": _is_wanted(recipe.warm_start, "steps"),
        "rollout.temperature": samples,
        "rollout.top_p": samples,
        "rollout.phase_tokens": samples,
        "rollout.prompts_in_flight": samples,
        "rollout.ahead": samples,
        "evaluation": _is_wanted(recipe.data, "eval") or recipe.evaluation.sets,
        "evaluation.top_p": any(temperatures) or not temperatures,
        "reshard.round_bytes": not recipe.rollout.engine.external,
        "run.timeline.profile_ranks": recipe.run.timeline.steps,
        "train.fp8_backward": recipe.train.numbers == "engine",
        "train.lr_end": recipe.train.lr_schedule != "constant",
        "reference.path": has_reference(recipe.algorithm, recipe.reference.use),
        "critic": has_critic(name),
        "critic.lr_end": critic_schedule != "constant" or not has_critic(name),
        "reward_model": recipe.reward_model.path or recipe.reward_model.adapters,
    }


def _is_read_for_recovery(recipe: Recipe) -> dict[str, object]:
    """The same of the keys for what a run does after failures."""
    return {
        "run.restart_window_s": recipe.run.restarts,
        "run.on_silent_fault": recipe.run.restarts or recipe.run.on_silent_fault == "stop",
        "checkpoint.memory_copies": recipe.run.restarts,
    }


def _has_replicas(recipe: Recipe) -> bool:
    """Whether several ranks may hold the same weights: the policy's, or a critic's in a layout of its own."""
    layout = train_layout(recipe)
    return layout.tp * layout.cp * layout.dp > 1 or has_critic(recipe.algorithm.name)


def _is_wanted(branch: Branch, switch: str) -> bool:
    """Whether a branch's switch is on, or explicitly off."""
    return bool(getattr(branch, switch)) or switch in branch.model_fields_set


def recipe_notes(recipe: Recipe) -> list[str]:
    """One sentence for each reason why keys are not read, and for each value that is probably a mistake."""
    keys_of: dict[str, list[str]] = {}
    reasons = unread_reasons(recipe)
    for key in _given(recipe, ""):
        entry = key
        while entry and not reasons.get(entry):
            entry = entry.rpartition(".")[0]
        if entry:
            keys_of.setdefault(reasons[entry], []).append(key)
    notes = []
    for reason, keys in keys_of.items():
        if len(keys) == 1:
            notes.append(f"{keys[0]} is set, and nothing reads it: {reason}")
        else:
            named = " and ".join(sorted(keys))
            notes.append(f"{named} are set, and nothing reads them: {reason}")
    return [*notes, *_phases(recipe), *_odd_values(recipe), *_connections(recipe)]


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


def _connections(recipe: Recipe) -> Iterator[str]:
    """What keeps passes in pairs from hiding anything, in this process's environment, as launch scripts make it."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if recipe.train.megatron.get(PAIRED_PASSES) and os.environ.get(name) == "1":
        problem = f"passes of train.megatron.{PAIRED_PASSES} wait for one another"
        yield f"{name} is 1: {problem}; set it to 32 on all nodes"


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

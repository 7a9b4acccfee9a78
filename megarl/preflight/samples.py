"""Whether a recipe can train on a file of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.algos import ALGORITHMS
from megarl.parallel.roles import Roles
from megarl.preflight.data import budget_faults
from megarl.rollout.sample_file import SampleFile
from megarl.types import ModelShape, SampleGroup, UserFault


def sample_faults(samples: SampleFile, roles: Roles) -> list[UserFault]:
    """Every fault of a file for this recipe. The whole file is read, and the policy's shape must be known."""
    recipe, shape, context = roles.recipe, roles.policy.shape, roles.policy.model.context_tokens
    where, train, faults = str(samples.path), recipe.train, []
    try:
        seen = [_seen(samples.groups(step), shape) for step in range(1, samples.num_steps + 1)]
    except UserFault as fault:
        return [fault]
    if recipe.run.steps > samples.num_steps:
        problem = f"{recipe.run.steps} is more than the {samples.num_steps} steps in {where}"
        faults.append(UserFault("run.steps", problem, f"set it to at most {samples.num_steps}, or sample more"))
    if recipe.rollout.temperature != samples.temperature:
        problem = f"{recipe.rollout.temperature}, and {where} was sampled at {samples.temperature}"
        faults.append(UserFault("rollout.temperature", problem, f"set it to {samples.temperature}, or sample anew"))
    highest = max((step.highest_id for step in seen), default=0)
    if highest >= shape.vocab_size or samples.vocab_size != shape.vocab_size:
        problem = f"it was sampled from a vocabulary of {samples.vocab_size} (highest id {highest})"
        mend = f"the vocabulary of model.path has {shape.vocab_size}: name the model that made the file"
        faults.append(UserFault(where, problem, mend))
    longest = max((step.longest for step in seen), default=0)
    for role in roles.models.values():
        if role.trains:
            faults += budget_faults(role, longest, f"the longest sequence in {where}")
    if context is not None and longest > context:
        problem = f"its longest sequence has {longest} tokens, the model's context is {context}"
        faults.append(UserFault(where, problem, "sample shorter ones, or name the model that made the file"))
    fewest = min(samples.num_samples, default=0)
    if fewest < train.updates_per_step:
        problem = f"{train.updates_per_step} is more than the {fewest} samples of a step in {where}"
        faults.append(UserFault("train.updates_per_step", problem, f"set it to at most {fewest}"))
    algorithm = ALGORITHMS.get(recipe.algorithm.name)
    if algorithm and algorithm.greedy_baseline and not all(step.has_baselines for step in seen):
        problem = f"{recipe.algorithm.name} compares with greedy samples, and {where} has steps without any"
        mend = f"sample with algorithm.name={recipe.algorithm.name}"
        faults.append(UserFault("algorithm.name", problem, mend))
    if algorithm and algorithm.needs_group and not any(step.has_groups for step in seen):
        problem = f"{recipe.algorithm.name} compares the samples of a prompt, and {where} has one of each prompt"
        mend = "choose an algorithm that does not, or sample with rollout.samples_per_prompt of at least 2"
        faults.append(UserFault("algorithm.name", problem, mend))
    if train.replay == "r3" and not all(step.has_experts for step in seen):
        problem = f"r3 replays the experts that the engine chose, and {where} does not have them of this model"
        faults.append(UserFault("train.replay", problem, "set it to off or r2, or sample with train.replay=r3"))
    return faults


@dataclass(frozen=True)
class _Seen:
    """What the checks need to know of one step's samples.

    has_experts: every sample has routed experts, in the model's own shape. has_baselines: a group has a greedy sample.
    has_groups: a group has at least two other samples.
    """

    highest_id: int
    longest: int
    has_experts: bool
    has_baselines: bool
    has_groups: bool


def _seen(groups: Sequence[SampleGroup], shape: ModelShape) -> _Seen:
    sequences = [(group.prompt.token_ids, sample) for group in groups for sample in group.samples]
    lengths = [len(prompt) + len(sample.response_ids_T) for prompt, sample in sequences]
    layers, chosen = shape.num_layers - shape.num_dense_layers, shape.experts_per_token
    experts = [sample.routed_experts for _, sample in sequences]
    return _Seen(
        highest_id=max((int(max((*prompt, sample.response_ids_T.max()))) for prompt, sample in sequences), default=0),
        longest=max(lengths, default=0),
        has_experts=all(
            of is not None and of.shape == (length - 1, layers, chosen)
            for of, length in zip(experts, lengths, strict=True)
        ),
        has_baselines=any(sample.is_baseline for _, sample in sequences),
        has_groups=any(sum(not sample.is_baseline for sample in group.samples) > 1 for group in groups),
    )

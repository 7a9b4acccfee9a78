"""Faults of rollouts in phases or ahead, in which a step trains on tokens that earlier policies have sampled."""

from __future__ import annotations

from megarl.algos import ALGORITHMS, hyperparameters_of, learns_from_answers
from megarl.config import Recipe
from megarl.parallel.roles import Roles
from megarl.types import UserFault

_RESPONSE = "response has more than {} tokens (rollout.max_response_tokens)"


def phase_faults(roles: Roles) -> list[UserFault]:
    """Every fault of the keys of phases, where the algorithm is known and learns from samples."""
    recipe = roles.recipe
    name, rollout = recipe.algorithm.name, recipe.rollout
    if name not in ALGORITHMS or learns_from_answers(name):
        return []
    faults = _size_faults(recipe)
    key = "phase_tokens" if rollout.phase_tokens else "ahead" if rollout.ahead else None
    if key is None:
        return faults
    if ALGORITHMS[name].greedy_baseline:
        problem = f"is set, and {name} compares the samples of a prompt with a greedy response of the same policy"
        mend = "leave it out, or choose another algorithm.name"
        faults.append(UserFault(f"rollout.{key}", problem, mend))
    if hyperparameters_of(name, recipe.algorithm).mismatch == "off":
        problem = f"off, and with rollout.{key} earlier policies have sampled a part of the tokens"
        faults.append(UserFault("algorithm.mismatch", problem, f"set it to tis or icepop, or leave rollout.{key} out"))
    if rollout.ahead and not roles.unshared_engines:
        problem = "1, and every engine shares GPUs with other models, to which it gives the memory while they compute"
        mend = "set it to 0, or give engines GPUs of their own: placement.first_engine_gpu, placement.train_gpus"
        faults.append(UserFault("rollout.ahead", problem, mend))
    return faults


def _size_faults(recipe: Recipe) -> list[UserFault]:
    rollout, where, faults = recipe.rollout, "rollout.prompts_in_flight", []
    phase, longest, wanted = rollout.phase_tokens, recipe.longest_sample, rollout.prompts_per_step
    if phase is not None and phase >= longest:
        what = "episode has more than {} tokens (episode.max_tokens)" if recipe.episode else _RESPONSE
        problem = f"{phase}, and no {what.format(longest)}"
        faults.append(UserFault("rollout.phase_tokens", problem, "set it to less, or leave it out"))
    if rollout.in_flight < wanted:
        problem = f"{rollout.in_flight}, and a step trains on {wanted} (rollout.prompts_per_step)"
        faults.append(UserFault(where, problem, f"set it to at least {wanted}; with phases {2 * wanted} is usual"))
    elif rollout.in_flight > wanted and phase is None:
        problem = f"{rollout.in_flight}, and without rollout.phase_tokens a step begins what it trains on"
        faults.append(UserFault(where, problem, "set rollout.phase_tokens too, or leave it out"))
    return faults

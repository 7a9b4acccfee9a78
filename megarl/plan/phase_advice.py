"""Whether a rollout in phases, or beside training, would make steps shorter: of a few sizes the best is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.algos import ALGORITHMS, learns_from_answers
from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.plan.phased_rollout import PhasedRollout

_PHASES = (4, 2, 8)  # of the longest response, in the order in which they are tried
_IN_FLIGHT = (1.5, 2, 4)  # prompts, over those of a step
_WHOLE = {"phase_tokens": None, "prompts_in_flight": None}
_WORTH_IT = 1.1  # times fewer seconds
# the size with the lowest bound on staleness is chosen among those within this of the fastest
_ABOUT_AS_FAST = 1.05


@dataclass(frozen=True)
class TriedPhases:
    """A recipe with its rollout, and the seconds of a step with it."""

    recipe: Recipe
    rollout: PhasedRollout
    step_s: float


# A recipe with other phases -> what they bring, or None where its memory does not fit.
TryPhases = Callable[[Recipe], TriedPhases | None]


def phase_advice(recipe: Recipe, try_phases: TryPhases, *, may_be_ahead: bool) -> list[str]:
    """Which phases would make a step shorter, and how old its tokens would be; one sentence or none.

    The recipe's own memory must fit. may_be_ahead: engines have GPUs of their own, as `rollout.ahead` needs.
    """
    name = recipe.algorithm.name
    rollout = recipe.rollout
    if learns_from_answers(name) or recipe.episode is not None:
        return []
    row = ALGORITHMS[name]
    takes_engine = recipe.algorithm.old_logprobs == "engine"
    is_refused = row.greedy_baseline or (takes_engine and row.has_sequence_ratio)
    if is_refused or rollout.max_response_tokens < max(_PHASES):
        return []
    now = try_phases(recipe)
    if now is None:
        return []
    trials = list(_other_phases(now, try_phases))
    if may_be_ahead:
        trials += _other_ahead([now, *trials], try_phases)
    fastest_s = min((trial.step_s for trial in trials), default=now.step_s)
    near = [trial for trial in trials if trial.step_s <= _ABOUT_AS_FAST * fastest_s]
    best = min(near, key=lambda trial: (trial.rollout.bound, trial.step_s), default=now)
    gain = now.step_s / best.step_s
    if gain >= _WORTH_IT:
        return [_sentence(recipe, best, gain)]
    return []


def _sentence(recipe: Recipe, best: TriedPhases, gain: float) -> str:
    old = vars(recipe.rollout)
    new = best.recipe.rollout
    keys = []
    for name in ("phase_tokens", "prompts_in_flight", "ahead"):
        value = getattr(new, name)
        if value != old[name]:
            keys.append(f"{name} {'null' if value is None else value}")
    if (new.phase_tokens or new.ahead) and not recipe.algorithm.corrects_engine:
        keys.append("algorithm.rollout_correction tis")
    first, *others = keys
    if others:
        first += f" with {' and '.join(others)}"
    effect = f"rollout.{first} would take {gain:.1f}x fewer seconds a step"
    bound = best.rollout.bound
    if not bound:
        return effect
    versions = f"{bound} version{'s' * (bound != 1)}"
    return (
        f"{effect}; tokens are at most {versions} old ({best.rollout.token_mean:.1f} in the mean)"
    )


def _other_phases(now: TriedPhases, try_phases: TryPhases) -> Iterator[TriedPhases]:
    """More and more prompts until the KV cache is full, then the fastest number of them with other phases.

    Other phases are not tried where these are slower than the recipe, nor shorter ones where longer ones are faster.
    """
    recipe = now.recipe
    longest = recipe.rollout.max_response_tokens
    prompts = recipe.rollout.prompts_per_step
    first, *others = _PHASES
    trials_by_prompts: dict[int, TriedPhases] = {}
    for in_flight in (int(times * prompts) for times in _IN_FLIGHT):
        trial = try_phases(
            _with(recipe, phase_tokens=longest // first, prompts_in_flight=in_flight)
        )
        if trial is None:
            break
        trials_by_prompts[in_flight] = trial
        if trial.rollout.time.running < trial.rollout.open_sequences:
            break
    yield from trials_by_prompts.values()
    if recipe.rollout.phase_tokens and (whole := try_phases(_with(recipe, **_WHOLE))):
        yield whole
    in_flight = min(trials_by_prompts, key=lambda count: trials_by_prompts[count].step_s, default=0)
    if not trials_by_prompts or trials_by_prompts[in_flight].step_s > now.step_s:
        return
    for phases in others:
        trial = try_phases(
            _with(recipe, phase_tokens=longest // phases, prompts_in_flight=in_flight)
        )
        if trial is None:
            return
        yield trial
        if trial.step_s < trials_by_prompts[in_flight].step_s:
            return


def _other_ahead(trials: Sequence[TriedPhases], try_phases: TryPhases) -> list[TriedPhases]:
    """The fastest of these, and whole responses, with the other value of `rollout.ahead`."""
    fastest = min(trials, key=lambda trial: trial.step_s).recipe
    whole = _with(fastest, **_WHOLE)
    recipes = [fastest] if fastest == whole else [fastest, whole]
    tried = [try_phases(_with(other, ahead=1 - other.rollout.ahead)) for other in recipes]
    return list(filter(None, tried))


def _with(recipe: Recipe, **keys: Any) -> Recipe:
    return overlaid(recipe, {"rollout": keys})

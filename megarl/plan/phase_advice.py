"""Whether a rollout in phases would take fewer seconds: a few sizes are tried, and the best is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.algos import ALGORITHMS, hyperparameters_of, learns_from_answers
from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.plan.phased_rollout import PhasedRollout

# A recipe with other phases -> its rollout, or None where its memory does not fit.
TryPhases = Callable[[Recipe], PhasedRollout | None]

_PHASES = (4, 2, 8)  # of the longest response, in the order in which they are tried
_IN_FLIGHT = (1.5, 2, 4)  # prompts, over those of a step
_WORTH_IT = 1.1  # times fewer seconds
_ABOUT_AS_FAST = 1.05  # the size with the lowest bound on staleness is chosen among those within this of the fastest


def phase_advice(recipe: Recipe, try_phases: TryPhases) -> list[str]:
    """Which phases would make a step's rollout shorter, and how old its tokens would be; one sentence or none.

    The recipe's own memory must fit.
    """
    name, rollout = recipe.algorithm.name, recipe.rollout
    is_refused = learns_from_answers(name) or ALGORITHMS[name].greedy_baseline
    if is_refused or rollout.max_response_tokens < max(_PHASES):
        return []
    now = try_phases(recipe)
    found = list(_tried(recipe, now.time.total_s, try_phases)) if now else []
    if now is None or not found:
        return []
    fastest_s = min(one.time.total_s for one in found)
    near = [one for one in found if one.time.total_s <= _ABOUT_AS_FAST * fastest_s]
    best = min(near, key=lambda one: (one.bound, one.time.total_s))
    gain = now.time.total_s / best.time.total_s
    return [_sentence(recipe, best, gain)] if gain >= _WORTH_IT else []


def _sentence(recipe: Recipe, best: PhasedRollout, gain: float) -> str:
    effect = f"would take {gain:.1f}x fewer rollout seconds"
    if best.phase_tokens == recipe.rollout.max_response_tokens:
        return f"rollout.phase_tokens null with prompts_in_flight null {effect}"
    keys = f"rollout.phase_tokens {best.phase_tokens} with prompts_in_flight {best.prompts_in_flight}"
    is_off = hyperparameters_of(recipe.algorithm.name, recipe.algorithm).mismatch == "off"
    keys += " and algorithm.mismatch tis" * is_off
    versions = f"{best.bound} version{'s' * (best.bound != 1)}"
    return f"{keys} {effect}; tokens are at most {versions} old ({best.token_mean:.1f} in the mean)"


def _tried(recipe: Recipe, now_s: float, try_phases: TryPhases) -> Iterator[PhasedRollout]:
    """More and more prompts until the KV cache is full, then the fastest number of them with other phases.

    Other phases are not tried where these are slower than the recipe, nor shorter ones where longer ones are faster.
    """
    longest, wanted = recipe.rollout.max_response_tokens, recipe.rollout.prompts_per_step
    first, *others = _PHASES
    found: dict[int, PhasedRollout] = {}
    for in_flight in (int(times * wanted) for times in _IN_FLIGHT):
        one = try_phases(_with_phases(recipe, longest // first, in_flight))
        if one is None:
            break
        found[in_flight] = one
        if one.time.running < one.open_sequences:
            break
    yield from found.values()
    if recipe.rollout.phase_tokens and (whole := try_phases(_with_phases(recipe, None, None))):
        yield whole
    in_flight = min(found, key=lambda count: found[count].time.total_s, default=0)
    if not found or found[in_flight].time.total_s > now_s:
        return
    for phases in others:
        one = try_phases(_with_phases(recipe, longest // phases, in_flight))
        if one is None:
            return
        yield one
        if one.time.total_s < found[in_flight].time.total_s:
            return


def _with_phases(recipe: Recipe, phase_tokens: int | None, in_flight: int | None) -> Recipe:
    return overlaid(recipe, {"rollout": {"phase_tokens": phase_tokens, "prompts_in_flight": in_flight}})

"""Errors of recipes in which a step trains on tokens that earlier policies have sampled.

These are rollouts in phases or ahead, and dynamic sampling, whose leftover groups wait for a later step.
"""

from __future__ import annotations

from megarl.algos import ALGORITHMS, hyperparameters_of, learns_from_answers
from megarl.algos.rollout_correction import bounds
from megarl.config import Recipe
from megarl.placement.roles import Roles
from megarl.types import Hyperparameters, UserError
from megarl.types.listed import ErrorIterator, listed

# By algorithm.rollout_correction of whole samples: the hyperparameters that bound it, and what its default bounds do to
# samples with tokens of earlier policies.
_SEQUENCE_BOUNDS: dict[str, tuple[str, ...]] = {
    "mis_geometric": ("rollout_correction_low", "rollout_correction_high"),
    "mis_sequence": ("rollout_correction_high",),
}
_LOSSES: dict[str, str] = {
    "mis_geometric": "drop about 97 % of the samples with such tokens",
    "mis_sequence": "leave an effective 8 % of samples with 1,000 such tokens",
}


@listed
def phase_errors(roles: Roles) -> ErrorIterator:
    """Every error of tokens of earlier policies, where the algorithm is known and learns from samples."""
    recipe = roles.recipe
    name = recipe.algorithm.name
    rollout = recipe.rollout
    if name not in ALGORITHMS or learns_from_answers(name):
        return
    yield from _size_errors(recipe)
    hyperparameters = hyperparameters_of(name, recipe.algorithm)
    if rollout.phase_tokens:
        key = "rollout.phase_tokens"
    elif rollout.ahead:
        key = "rollout.ahead"
    else:
        yield from _leftover_errors(name, hyperparameters)
        return
    if ALGORITHMS[name].greedy_baseline:
        yield UserError(
            key,
            f"is set, and {name} compares the samples of a prompt with a greedy response of the same policy",
            "leave it out, or choose another algorithm.name",
        )
    yield from _correction_errors(key, name, hyperparameters)
    if rollout.ahead and not (roles.unshared_engines or rollout.engine.external):
        yield UserError(
            "rollout.ahead",
            "1, and every engine shares GPUs with other models, to which it gives the memory while they compute",
            "set it to 0, or give engines GPUs of their own: placement.first_engine_gpu, placement.train_gpus",
        )


def _correction_errors(
    phase_key: str, name: str, hyperparameters: Hyperparameters
) -> ErrorIterator:
    """The error of tokens of earlier policies that nothing corrects, or that the correction drops.

    With the engine's log-probabilities as the old ones the ratio is to the policy that sampled a token, whichever that
    was, and so corrects for it: but for the ratio of a whole sequence, whose clip range is that of one policy.
    """
    if hyperparameters.old_logprobs == "engine":
        if ALGORITHMS[name].has_sequence_ratio:
            yield UserError(
                "algorithm.old_logprobs",
                f"engine, and with {phase_key} the ratio of a whole sample, which {name} clips, is to several policies",
                f"set it to train, or leave {phase_key} out",
            )
    elif hyperparameters.rollout_correction == "off":
        yield UserError(
            "algorithm.rollout_correction",
            f"off, and with {phase_key} earlier policies have sampled a part of the tokens",
            f"set it to tis or icepop, or leave {phase_key} out",
        )
    else:
        yield from _sequence_errors(phase_key, hyperparameters)


def _sequence_errors(phase_key: str, hyperparameters: Hyperparameters) -> ErrorIterator:
    """The error of sequence-level bounds whose defaults fit rounding alone, where a step trains on older tokens.

    These are tokens that earlier policies have sampled. Bounds that the recipe sets are accepted.

    The geometric mean of tokens which an earlier policy sampled is hardly ever within 1 %: measured in phases, 97 % of
    the samples with such tokens are dropped. The variance of a product grows with its tokens: where log-ratios of
    tokens deviate by 0.05, 1,000 tokens have an effective sample size of exp(-1000 x 0.05^2), 8 %.
    """
    keys = _SEQUENCE_BOUNDS.get(hyperparameters.rollout_correction, ())
    # of bounds of tokens there are no keys here
    if all(getattr(hyperparameters, key) is not None for key in keys):
        return
    low, high = bounds(hyperparameters)
    rollout_correction = hyperparameters.rollout_correction
    yield UserError(
        "algorithm.rollout_correction",
        f"{rollout_correction}, and with {phase_key} earlier policies have sampled a part of the tokens: "
        f"the bounds {low:g} and {high:g} of whole samples {_LOSSES[rollout_correction]}",
        f"set it to tis or icepop, or set {' and '.join(f'algorithm.{key}' for key in keys)} to wider bounds",
    )


def _leftover_errors(name: str, hyperparameters: Hyperparameters) -> ErrorIterator:
    """Leftover groups of dynamic sampling that nothing corrects for the policy which has sampled them."""
    is_corrected = ALGORITHMS[name].has_ratio or hyperparameters.rollout_correction != "off"
    if hyperparameters.dynamic_sampling and not is_corrected:
        yield UserError(
            "algorithm.rollout_correction",
            f"off, and {name} has no ratio: nothing corrects the older groups that dynamic sampling keeps",
            "set it to tis or icepop, or algorithm.dynamic_sampling to false",
        )


def _size_errors(recipe: Recipe) -> ErrorIterator:
    rollout = recipe.rollout
    where = "rollout.prompts_in_flight"
    phase = rollout.phase_tokens
    longest = recipe.longest_sample
    prompts = rollout.prompts_per_step
    if phase is not None and phase >= longest:
        if recipe.episode:
            what = f"episode has more than {longest} tokens (episode.max_tokens)"
        else:
            what = f"response has more than {longest} tokens (rollout.max_response_tokens)"
        yield UserError(
            "rollout.phase_tokens",
            f"{phase}, and no {what}",
            "set it to less, or leave it out",
        )
    if rollout.in_flight < prompts:
        yield UserError(
            where,
            f"{rollout.in_flight}, and a step trains on {prompts} (rollout.prompts_per_step)",
            f"set it to at least {prompts}; with phases {2 * prompts} is usual",
        )
    elif rollout.in_flight > prompts and phase is None:
        yield UserError(
            where,
            f"{rollout.in_flight}, and without rollout.phase_tokens a step begins what it trains on",
            "set rollout.phase_tokens too, or leave it out",
        )

"""Errors of hyperparameters, sampling and evaluation that contradict the algorithm or each other."""

from __future__ import annotations

from dataclasses import fields

from megarl.algos import ALGORITHMS, has_critic, hyperparameters_of, learns_from_answers
from megarl.algos.rollout_correction import bounds
from megarl.config import Recipe
from megarl.spelling import did_you_mean, near
from megarl.types import Hyperparameters, UserError
from megarl.types.listed import ErrorIterator, listed

_OF_VALUES = ("gae_lambda", "critic_lambda", "lambda_alpha", "value_clip")
_OF_SAMPLING = ("oversample", "max_rounds", "when_short")


@listed
def hyperparameter_errors(recipe: Recipe, *, learns: bool = True) -> ErrorIterator:
    """Every error of the algorithm's hyperparameters; learns: false where the command samples alone."""
    name = recipe.algorithm.name
    if name not in ALGORITHMS:
        yield UserError(
            "algorithm.name", f"{name!r} is no algorithm", f"choose from {', '.join(ALGORITHMS)}"
        )
        return
    hyperparameters = hyperparameters_of(name, recipe.algorithm)
    unread = _unread(name, hyperparameters, has_turns=recipe.episode is not None)
    for key, value in recipe.algorithm.given.items():
        if key in unread and value != getattr(ALGORITHMS[name].hyperparameters, key):
            yield UserError(f"algorithm.{key}", f"is set, and {unread[key]}", "leave it out")
    yield from _bounds_errors(hyperparameters)
    if hyperparameters.old_logprobs == "engine":
        yield from _engine_errors(recipe, hyperparameters)
    if learns:
        yield from _start_errors(recipe, hyperparameters)
    if learns and learns_from_answers(name):
        yield from _idle_errors(recipe)


def _unread(name: str, hyperparameters: Hyperparameters, *, has_turns: bool) -> dict[str, str]:
    """Hyperparameter -> why nothing reads it with this algorithm and the other hyperparameters.

    has_turns: samples are episodes, whose turns may have rewards.
    """
    row = ALGORITHMS[name]
    reasons_by_key = {}
    if row.surrogate is None:
        others = [field.name for field in fields(Hyperparameters) if field.name != "aggregation"]
        return dict.fromkeys(others, f"{name} learns from the data's answers")
    reasons_by_key |= {key: f"{name} {why}" for key, why in row.unread.items()}
    if row.critic != "values":
        reasons_by_key |= dict.fromkeys(_OF_VALUES, f"{name} has no critic")
    if not row.critic:
        reasons_by_key["critic_warmup_steps"] = f"{name} has no critic or implicit reward model"
    if not (row.critic or hyperparameters.pays_kl or (has_turns and row.credits_turns)):
        reasons_by_key["gamma"] = f"no token has a reward of its own with {name}"
    if row.critic != "process_rewards":
        reasons_by_key["prime_beta"] = f"{name} has no process rewards"
    if not hyperparameters.kl_coefficient:
        reasons_by_key |= dict.fromkeys(
            ("kl_estimator", "kl_place"), "algorithm.kl_coefficient is 0"
        )
    if not hyperparameters.dynamic_sampling:
        reasons_by_key |= dict.fromkeys(_OF_SAMPLING, "algorithm.dynamic_sampling is off")
    if hyperparameters.lambda_alpha:
        reasons_by_key["gae_lambda"] = (
            "algorithm.lambda_alpha decides for the policy (0: not), critic_lambda for the critic"
        )
    if hyperparameters.rollout_correction == "off":
        reasons_by_key |= dict.fromkeys(
            ("rollout_correction_low", "rollout_correction_high"),
            "algorithm.rollout_correction is off",
        )
    if hyperparameters.rollout_correction == "tis":
        reasons_by_key["rollout_correction_low"] = "tis has an upper bound alone"
    return reasons_by_key


def _bounds_errors(hyperparameters: Hyperparameters) -> ErrorIterator:
    if hyperparameters.rollout_correction == "off":
        return
    low, high = bounds(hyperparameters)
    if low >= high:
        yield UserError(
            "algorithm.rollout_correction_low",
            f"the bounds of {hyperparameters.rollout_correction} are {low} and {high}, between which nothing is kept",
            "set it below algorithm.rollout_correction_high",
        )


def _engine_errors(recipe: Recipe, hyperparameters: Hyperparameters) -> ErrorIterator:
    """What does not go with the engine's log-probabilities as the old ones."""
    with_key = "and with algorithm.old_logprobs engine"
    or_train = "or algorithm.old_logprobs to train"
    correction = hyperparameters.rollout_correction
    if correction != "off":
        yield UserError(
            "algorithm.rollout_correction",
            f"{correction}, {with_key} the ratio itself corrects for the engine's probabilities",
            f"set it to off, {or_train}",
        )
    if hyperparameters.pays_kl:
        yield UserError(
            "algorithm.kl_place",
            f"reward, {with_key} nothing computes the policy's log-probabilities for its penalties",
            f"set it to loss, {or_train}",
        )
    if recipe.train.replay == "r2":
        yield UserError(
            "train.replay",
            f"r2, {with_key} no pass before the updates records the experts",
            f"set it to r3 or off, {or_train}",
        )


def _start_errors(recipe: Recipe, hyperparameters: Hyperparameters) -> ErrorIterator:
    """Errors of the critic's warm-up and of the reference that a run starts with."""
    warmup = hyperparameters.critic_warmup_steps
    if has_critic(recipe.algorithm.name) and warmup >= recipe.run.steps:
        yield UserError(
            "algorithm.critic_warmup_steps",
            f"{warmup} are all of run.steps ({recipe.run.steps}): the policy would never learn",
            f"set it below {recipe.run.steps}",
        )
    name = recipe.algorithm.name
    has_teacher = ALGORITHMS[name].has_teacher
    if has_teacher and not hyperparameters.kl_coefficient:
        yield UserError(
            "algorithm.kl_coefficient",
            f"0, and {name} learns from nothing else",
            "leave it out",
        )
    if has_teacher and not recipe.reference.path:
        yield UserError(
            "reference.path",
            f"{name} learns from the reference, and model.path has nothing to teach itself",
            "name the teacher's checkpoint",
        )
    elif (
        hyperparameters.kl_coefficient and recipe.warm_start.steps and recipe.reference.path is None
    ):
        yield UserError(
            "algorithm.kl_coefficient",
            f"{hyperparameters.kl_coefficient}, but the reference is model.path as it is before the warm start",
            "set it to 0, warm_start.steps to 0, or name reference.path",
        )


def _idle_errors(recipe: Recipe) -> ErrorIterator:
    """Models and options without a use where the policy learns from the data's answers."""
    idle = {
        "reference.use": recipe.reference.use,
        "reward_model.path": recipe.reward_model.path is not None,
        "reward_model.adapters": recipe.reward_model.adapters is not None,
        "train.replay": recipe.train.replay != "off",
    }
    for key, is_set in idle.items():
        if is_set:
            yield UserError(
                key,
                f"is set, and {recipe.algorithm.name} learns from the data's answers",
                "leave it out",
            )


@listed
def sampling_errors(recipe: Recipe) -> ErrorIterator:
    """Errors of how training samples are drawn, where the algorithm is known and learns from samples."""
    name = recipe.algorithm.name
    rollout = recipe.rollout
    if name not in ALGORITHMS or learns_from_answers(name):
        return
    if rollout.top_p < 1:
        yield UserError(
            "rollout.top_p",
            f"{rollout.top_p} cuts off tokens that the policy's log-probabilities, ratios and entropy count",
            "set it to 1.0, or shape the samples by rollout.temperature; evaluation.top_p may be below 1",
        )
    if rollout.samples_per_prompt > 1:
        return
    if ALGORITHMS[name].needs_group:
        others = ", ".join(
            other for other, row in ALGORITHMS.items() if row.surrogate and not row.needs_group
        )
        yield UserError(
            "rollout.samples_per_prompt",
            f"1, and {name} compares the samples of a prompt with each other",
            f"set it to at least 2, or choose an algorithm.name that does not ({others})",
        )
    elif hyperparameters_of(name, recipe.algorithm).dynamic_sampling:
        yield UserError(
            "algorithm.dynamic_sampling",
            "true keeps prompts with right and wrong answers, and rollout.samples_per_prompt is 1",
            "set it to false, or rollout.samples_per_prompt to at least 2",
        )


@listed
def eval_errors(recipe: Recipe) -> ErrorIterator:
    """Keys for evaluation sets that data.eval does not have, and several greedy answers, which are all the same."""
    names = list(recipe.data.eval)
    for name in recipe.evaluation.sets:
        if name not in names:
            yield UserError(
                f"evaluation.sets.{name}",
                "data.eval has no such set",
                did_you_mean(
                    near(name, names),
                    f"name one of {', '.join(names)}" if names else "leave it out",
                ),
            )
    for name in names:
        evaluation = recipe.evaluation.of(name)
        if evaluation.samples > 1 and evaluation.temperature == 0:
            of_set = recipe.evaluation.sets.get(name)
            if of_set and of_set.samples:
                where = f"evaluation.sets.{name}.samples"
            else:
                where = "evaluation.samples"
            yield UserError(
                where,
                f"{evaluation.samples} greedy answers to a prompt of {name} are the same {evaluation.samples} times",
                "set a temperature, or samples to 1",
            )

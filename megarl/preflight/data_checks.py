"""The prompts that a recipe names, read and tokenised; errors of these files, of files of samples, and of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.algos import ALGORITHMS, learns_from_answers
from megarl.config import Recipe
from megarl.data.prompts import vocabulary_errors
from megarl.data.tokens import TokenCache, Tokens, cached_tokens, tokenise
from megarl.model.shape import ModelShape
from megarl.placement.roles import Role, Roles
from megarl.placement.train_layout import fewest_ranks
from megarl.samples.parquet import SampleFile
from megarl.tracking.progress import progress_bar
from megarl.types import Prompt, SampleGroup, UserError
from megarl.types.listed import ErrorIterator, listed


@listed
def budget_errors(role: Role, longest: int, what: str) -> ErrorIterator:
    """Micro-batches of the role's ranks with fewer tokens than the longest sequence, padded to what its ranks divide.

    longest: tokens of that sequence. what: the sequence in words.
    """
    align = role.layout.tokens_align
    needed = -(-longest // align) * align
    budget = role.recipe.train.tokens_per_micro_batch
    max_cp = role.layout.max_cp
    if needed > max_cp * budget:
        ranks = ""
        hint = f"set it to at least {needed}"
        if max_cp > 1:
            ranks = f" on each of {max_cp} ranks"
            hint = f"set it to {_least_budget(role, needed)}"
        yield UserError(
            f"{role.branch}.tokens_per_micro_batch",
            f"{budget}{ranks} is less than {what} ({needed} tokens)",
            hint,
        )


def _least_budget(role: Role, needed: int) -> int:
    """The least larger budget that holds so many tokens on the ranks that `train.cp: auto` splits a row over with it.

    A larger budget may hold less: the recipe's longest sequence may then need half as many ranks.
    """
    longest = role.recipe.longest_sequence
    budget = role.recipe.train.tokens_per_micro_batch
    larger = range(budget // 2 * 2 + 2, needed + 1, 2)
    return next(each for each in larger if fewest_ranks(longest, each) * each >= needed)


@listed
def length_errors(
    roles: Roles,
    tokenizer: Any,
    train: Sequence[Prompt],
    cache: TokenCache | None,
    vocab_size: int | None,
    *,
    learns: bool,
) -> ErrorIterator:
    """Micro-batches too small for the longest prompt and response; answers too long for a response, where taught.

    vocab_size: the model's, or None where it is not known. learns: whether ranks have micro-batches.
    """
    recipe = roles.recipe
    limit = recipe.longest_sample
    if recipe.episode and recipe.episode.environment:  # whose openings may be as long
        prompt_tokens = recipe.data.max_prompt_tokens
    else:
        prompt_tokens = max(len(prompt.token_ids) for prompt in train)
    longest = prompt_tokens + limit
    for role in roles.models.values():
        if learns and role.trains:  # a reward model cuts what is too long
            yield from budget_errors(role, longest, "the longest prompt and response")
    if recipe.episode and recipe.data.messages:  # demonstration_errors has read them
        return
    if recipe.warm_start.steps or learns_from_answers(recipe.algorithm.name):
        tokens = _tokens_of_answers(tokenizer, train, cache)
        needed = 1 + int(tokens.lengths.max())
        if needed > limit:
            yield UserError(
                "episode.max_tokens" if recipe.episode else "rollout.max_response_tokens",
                f"{limit} is less than the longest answer ({needed} tokens with its end)",
                f"set it to at least {needed}",
            )
        if vocab_size:
            yield from vocabulary_errors(
                "data.train", tokenizer, train, tokens, "answer", vocab_size
            )


def _tokens_of_answers(
    tokenizer: object, prompts: Sequence[Prompt], cache: TokenCache | None
) -> Tokens:
    """The answers as supervised steps learn them, without the end-of-sequence token."""
    answers = [prompt.answer for prompt in prompts]

    def make() -> Tokens:
        with progress_bar(f"data.train: tokenising {len(answers):,} answers", len(answers)) as done:
            return tokenise(tokenizer, answers, special=False, done=done)

    return cached_tokens(cache, tokenizer, "answers", answers, make) or make()


@listed
def sample_file_errors(samples: SampleFile, roles: Roles) -> ErrorIterator:
    """Every error of a file for this recipe. The whole file is read, and the policy's shape must be known."""
    recipe = roles.recipe
    shape = roles.policy.shape
    context = roles.policy.model.context_tokens
    where = str(samples.path)
    train = recipe.train
    try:
        seen = [_seen(samples.groups(step), shape) for step in range(1, samples.num_steps + 1)]
    except UserError as error:
        yield error
        return
    if recipe.run.steps > samples.num_steps:
        yield UserError(
            "run.steps",
            f"{recipe.run.steps} is more than the {samples.num_steps} steps in {where}",
            f"set it to at most {samples.num_steps}, or sample more",
        )
    if recipe.rollout.temperature != samples.temperature:
        yield UserError(
            "rollout.temperature",
            f"{recipe.rollout.temperature}, and {where} was sampled at {samples.temperature}",
            f"set it to {samples.temperature}, or sample anew",
        )
    highest = max((step.highest_id for step in seen), default=0)
    if highest >= shape.vocab_size or samples.vocab_size != shape.vocab_size:
        yield UserError(
            where,
            f"it was sampled from a vocabulary of {samples.vocab_size} (highest id {highest})",
            f"the vocabulary of model.path has {shape.vocab_size}: name the model that made the file",
        )
    longest = max((step.longest for step in seen), default=0)
    for role in roles.models.values():
        if role.trains:
            yield from budget_errors(role, longest, f"the longest sequence in {where}")
    if context is not None and longest > context:
        yield UserError(
            where,
            f"its longest sequence has {longest} tokens, the model's context is {context}",
            "sample shorter ones, or name the model that made the file",
        )
    fewest = min(samples.num_samples, default=0)
    if fewest < train.updates_per_step:
        yield UserError(
            "train.updates_per_step",
            f"{train.updates_per_step} is more than the {fewest} samples of a step in {where}",
            f"set it to at most {fewest}",
        )
    yield from _algorithm_errors(recipe, seen, where)


def _algorithm_errors(recipe: Recipe, seen: Sequence[_Seen], where: str) -> ErrorIterator:
    """What the algorithm needs of samples and a file does not have. where: the file's path."""
    name = recipe.algorithm.name
    algorithm = ALGORITHMS.get(name)
    if algorithm and algorithm.greedy_baseline and not all(step.has_baselines for step in seen):
        yield UserError(
            "algorithm.name",
            f"{name} compares with greedy samples, and {where} has steps without any",
            f"sample with algorithm.name={name}",
        )
    if algorithm and algorithm.needs_group and not any(step.has_groups for step in seen):
        yield UserError(
            "algorithm.name",
            f"{name} compares the samples of a prompt, and {where} has one of each prompt",
            "choose an algorithm that does not, or sample with rollout.samples_per_prompt of at least 2",
        )
    if recipe.train.replay == "r3" and not all(step.has_experts for step in seen):
        yield UserError(
            "train.replay",
            f"r3 replays the experts that the engine chose, and {where} does not have them of this model",
            "set it to off or r2, or sample with train.replay=r3",
        )


@dataclass(frozen=True)
class _Seen:
    """What the checks need to know of one step's samples.

    has_experts: every row has routed experts, in the model's own shape. has_baselines: a group has a greedy sample.
    has_groups: a group has at least two other samples.
    """

    highest_id: int
    longest: int
    has_experts: bool
    has_baselines: bool
    has_groups: bool


def _seen(groups: Sequence[SampleGroup], shape: ModelShape) -> _Seen:
    rows = [row for group in groups for sample in group.samples for row in sample.rows]
    layers = shape.num_sparse_layers
    token_ids = [ids for row in rows for ids in (row.prompt_ids, row.response_ids_T)]
    return _Seen(
        highest_id=max((int(np.max(ids)) for ids in token_ids if len(ids)), default=0),
        longest=max((row.num_tokens for row in rows), default=0),
        has_experts=all(
            row.routed_experts is not None
            and row.routed_experts.shape == (row.num_tokens - 1, layers, shape.experts_per_token)
            for row in rows
        ),
        has_baselines=any(sample.is_baseline for group in groups for sample in group.samples),
        has_groups=any(
            sum(not sample.is_baseline for sample in group.samples) > 1 for group in groups
        ),
    )

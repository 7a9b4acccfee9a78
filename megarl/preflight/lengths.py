"""Whether the longest possible sequence fits a micro-batch, and whether the answers to learn from fit a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.algos import learns_from_answers
from megarl.parallel.roles import Role, Roles
from megarl.preflight.data import tokens_of_answers
from megarl.rollout.prompts import vocabulary_faults
from megarl.rollout.tokens import TokenCache
from megarl.tracking.progress import progress_bar
from megarl.types import Prompt, UserFault


def budget_faults(role: Role, longest: int, what: str) -> list[UserFault]:
    """A micro-batch of the role's ranks with fewer tokens than the longest sequence, padded to what its ranks divide.

    longest: tokens of that sequence. what: the sequence in words.
    """
    align = role.layout.tokens_align
    needed = -(-longest // align) * align
    budget = role.recipe.train.tokens_per_micro_batch
    if needed <= budget:
        return []
    problem = f"{budget} is less than {what} ({needed} tokens)"
    return [UserFault(f"{role.branch}.tokens_per_micro_batch", problem, f"set it to at least {needed}")]


def length_faults(
    roles: Roles, tokenizer: Any, train: Sequence[Prompt], cache: TokenCache | None, vocab_size: int | None
) -> list[UserFault]:
    """Micro-batches too small for the longest prompt and response; answers too long for a response, where taught.

    vocab_size: the model's, or None where it is not known.
    """
    recipe, faults = roles.recipe, []
    limit = recipe.rollout.max_response_tokens
    longest = max(len(prompt.token_ids) for prompt in train) + limit
    for role in roles.models.values():
        if role.trains:  # a reward model cuts what is too long
            faults += budget_faults(role, longest, "the longest prompt and response")
    if recipe.warm_start.steps or learns_from_answers(recipe.algorithm.name):
        tokens = tokens_of_answers(tokenizer, train, progress_bar, cache)
        needed = 1 + int(tokens.lengths.max())
        if needed > limit:
            problem = f"{limit} is less than the longest answer ({needed} tokens with its end)"
            faults.append(UserFault("rollout.max_response_tokens", problem, f"set it to at least {needed}"))
        if vocab_size:
            faults += vocabulary_faults("data.train", tokenizer, train, tokens, "answer", vocab_size)
    return faults
